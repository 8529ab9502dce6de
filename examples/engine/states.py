"""Recurrences over pages: block tables locate both the state that a row reads and those it writes.

The state after `n` of a request's own tokens is in column `(n - 1) // block size` of its table,
those after its drafts in the next columns (see kvcache/core/kinds/mamba.py). So the position of the
state after `start` tokens depends on how many of them were drafts when it was written; this module
remembers that by slot. All rows read before any row writes. Nothing is checked: the coordinator has
validated the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from examples.engine.layers import StateInputs, Weights
from examples.engine.work import WorkRow


@dataclass(frozen=True)
class RowStates:
    """One row: tokens `[first, end)` of the step. It begins with the state in block `read` (None:
    without one), and writes the state after `kept[i][0]` of its tokens to block
    `kept[i][1]`."""

    first: int
    end: int
    read: int | None
    kept: tuple[tuple[int, int], ...]


class StateColumnsInUse:
    """The number of own tokens before each slot's newest states; one per engine and group."""

    def __init__(self, block_size: int) -> None:
        """States are kept every `block_size` tokens."""
        self._block_size = block_size
        self._own_ends: dict[int, int] = {}

    def plan(self, rows: Sequence[WorkRow], table: torch.Tensor) -> list[RowStates]:
        """Return the reads and writes of rows; remember them for the next step."""
        plans, first = [], 0
        for row in rows:
            columns = table[row.slot].tolist()
            own_end = row.end - row.num_drafts
            last_own_end = row.start if row.is_new else self._own_ends.get(row.slot, row.start)
            read = None
            if row.start:
                read = columns[self._column(last_own_end) + row.start - last_own_end]
            kept = tuple(
                (after - row.start, columns[self._column(own_end) + after - own_end])
                for after in range(own_end, row.end + 1)
                if after
            )
            plans.append(RowStates(first, first + len(row.token_ids), read, kept))
            self._own_ends[row.slot] = own_end
            first += len(row.token_ids)
        return plans

    def _column(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self._block_size


def run_recurrence(
    weights: Weights,
    layer: int,
    inputs: StateInputs,
    rows: Sequence[RowStates],
    caches: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Return the gated outputs of a layer, `(n, channels)`.

    `caches` are the pages of the convolution's inputs, `(blocks, channels, conv size - 1)`, and of
    the recurrence, `(blocks, channels, state)`.
    """
    name = f"layers.{layer}"
    inputs_cache, state_cache = caches
    kernel, skip = weights[f"{name}.convolution"], weights[f"{name}.skip"]
    decay = -weights[f"{name}.log_decay"].exp()
    begins = [
        (torch.zeros_like(inputs_cache[0]), torch.zeros_like(state_cache[0]))
        if row.read is None
        else (inputs_cache[row.read].clone(), state_cache[row.read].clone())
        for row in rows
    ]
    outputs = torch.empty_like(inputs.entering)
    for row, (before, begin) in zip(rows, begins, strict=True):
        span = slice(row.first, row.end)
        seen = torch.cat((before, inputs.entering[span].T), dim=1)
        mixed = functional.silu(
            functional.conv1d(seen[None], kernel[:, None], groups=len(kernel))[0].T
        )
        kept = dict(row.kept)
        state = begin
        _keep(kept, 0, seen, state, caches)
        for token, entering in enumerate(mixed):
            step = inputs.step[row.first + token][:, None]
            state = state * (step * decay).exp()
            state = state + step * entering[:, None] * inputs.write[row.first + token]
            outputs[row.first + token] = state @ inputs.read[row.first + token]
            _keep(kept, token + 1, seen, state, caches)
        outputs[span] += skip * mixed
    return outputs * inputs.gate


def _keep(
    kept: dict[int, int],
    num_tokens: int,
    seen: torch.Tensor,
    state: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
) -> None:
    """Write the state after `num_tokens` of a row to its block, if that state is kept."""
    block = kept.get(num_tokens)
    if block is not None:
        inputs_cache, state_cache = caches
        inputs_cache[block] = seen[:, num_tokens : num_tokens + inputs_cache.shape[2]]
        state_cache[block] = state
