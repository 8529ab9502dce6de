"""Attention over pages: keys and values are read by block table, and only from there.

    step's rows ──▶ TokenPlan (once per KV cache group) ──▶ write ──▶ read, attend (each layer)

Every row writes before any row reads, because rows may have hit blocks that another row of the
same step fills. Rows of equal length are read together, padded to the longest of them. On CPU a
gather and plain sums; on CUDA the gathered pages go to PyTorch's fused attention. Bytes of a block
beyond a row's own tokens are never used, not even times zero, because they may be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from examples.engine.work import WorkRow


@dataclass(frozen=True)
class RowsAlike:
    """Rows of one length: their queries, the blocks that they read, and a mask.

    `queries` `(rows, length)` index the step's tokens; `blocks` `(rows, columns)` are block ids;
    `is_seen` `(rows, length, columns * block size)`.
    """

    queries: torch.Tensor
    blocks: torch.Tensor
    is_seen: torch.Tensor


class TokenPlan:
    """The writes and reads of a step's tokens, for the layers of one group."""

    def __init__(
        self,
        rows: Sequence[WorkRow],
        table: torch.Tensor,
        block_size: int,
        window_tokens: int | None = None,
    ) -> None:
        """Plan by `table`, `(slots, columns)`, valid while the step's forward is open."""
        self._block_size = block_size
        self._window = window_tokens
        device = table.device
        slots = torch.tensor([row.slot for row in rows for _ in row.token_ids], device=device)
        positions = torch.tensor(
            [position for row in rows for position in range(row.start, row.end)], device=device
        )
        self._blocks = table[slots, positions // block_size].long()
        self._offsets = positions % block_size
        first, by_length = 0, dict[int, list[tuple[WorkRow, int]]]()
        for row in rows:
            by_length.setdefault(len(row.token_ids), []).append((row, first))
            first += len(row.token_ids)
        self._groups = [self._read_plan(alike, table) for alike in by_length.values()]

    def write(self, pages: torch.Tensor, *parts: torch.Tensor) -> None:
        """Write each token's parts, in the order of the page's axis after the block, or the only
        part of a page without that axis."""
        if len(parts) == 1:
            pages[self._blocks, self._offsets] = parts[0]
            return
        for index, part in enumerate(parts):
            pages[self._blocks, index, self._offsets] = part

    def attend(self, query: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention of `query`, `(n, heads, size)`, over pages `(block, 2, tokens,
        heads, size)`."""
        output = torch.empty_like(query)
        for group in self._groups:
            key, value = pages[group.blocks].movedim(2, 0).flatten(2, 3)
            output[group.queries] = attend(query[group.queries], key, value, group.is_seen, scale)
        return output

    def attend_latent(
        self, query: torch.Tensor, pages: torch.Tensor, latent_size: int, scale: float
    ) -> torch.Tensor:
        """Return the attention of queries, `(n, heads, latent + rope)`, over pages `(block, tokens,
        1, latent + rope)`: `(n, heads, latent)`."""
        output = query.new_empty(*query.shape[:2], latent_size)
        for group in self._groups:
            key = pages[group.blocks].flatten(1, 2)
            value = key[..., :latent_size]
            output[group.queries] = attend(query[group.queries], key, value, group.is_seen, scale)
        return output

    def _read_plan(self, alike: Sequence[tuple[WorkRow, int]], table: torch.Tensor) -> RowsAlike:
        device, size = table.device, self._block_size
        rows = [row for row, _ in alike]
        length = torch.arange(len(rows[0].token_ids), device=device)
        window = self._window
        firsts = [0 if window is None else max(0, r.start - window + 1) // size for r in rows]
        num_columns = max(-(-r.end // size) - f for r, f in zip(rows, firsts, strict=True))
        columns = torch.tensor(firsts, device=device)[:, None] + torch.arange(
            num_columns, device=device
        )
        slots = torch.tensor([row.slot for row in rows], device=device)
        blocks = table[slots[:, None], columns.clamp(max=table.shape[1] - 1)].long()
        keys = (columns[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        positions = torch.tensor([row.start for row in rows], device=device)[:, None] + length
        distance = positions[:, :, None] - keys[:, None, :]
        is_seen = distance >= 0
        if window is not None:
            is_seen &= distance < window
        starts = torch.tensor([first for _, first in alike], device=device)
        return RowsAlike(starts[:, None] + length, blocks, is_seen)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_seen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return softmax attention, `(rows, length, heads, value size)`.

    `query` `(rows, length, heads, size)`, `key` and `value` `(rows, keys, kv heads, size)`,
    `is_seen` `(rows, length, keys)`.
    """
    is_used = is_seen.any(dim=1)[..., None, None]
    key, value = key.masked_fill(~is_used, 0), value.masked_fill(~is_used, 0)
    if query.is_cuda:
        return fused_attention(query, key, value, is_seen, scale)
    return plain_attention(query, key, value, is_seen, scale)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_seen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `attend`, by PyTorch's fused kernels; masked values must not be NaN."""
    fused = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=is_seen[:, None],
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return fused.transpose(1, 2)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_seen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `fused_attention`, by plain sums."""
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=2)
        value = value.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("rqhd,rkhd->rhqk", query, key) * scale
    shares = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("rhqk,rkhd->rqhd", shares, value)
