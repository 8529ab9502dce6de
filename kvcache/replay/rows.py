"""The running requests as arrays, and the tokens of each that the next step may compute.

Part of the replay engine, which decides which requests run. One row per running request, in order
of admission. A row's life in tokens:

    0 ........ computed ........ known ........ target
      in the cache     in a chunk to come   sampled one by one

The manager has been told `known` tokens (the prompt, and appended ones); the row is done when
`target` tokens are computed. When all known tokens are computed, the next token has been sampled,
and the next step appends it. The last sampled token is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.base.arrays import Int32Array
from kvcache.protocol.step import RunningRequests
from kvcache.simulate.tokens import answer_seed, answer_token_ids, output_token_ids
from kvcache.simulate.workload import WorkloadRequest

IndexArray = NDArray[np.int64]
_SLOTS, _KNOWN, _COMPUTED, _TARGETS, _PROMPTS, _NUM_COLUMNS = 0, 1, 2, 3, 4, 5


@dataclass(eq=False)
class ReplayedRequest:
    """A request in progress. `num_known_tokens` is kept here while it has no row.

    `is_known` distinguishes the manager's requests (running or preempted) from new ones.
    `admission` counts admissions over all requests. `num_ever_computed` is its maximum so far:
    tokens below it are computed again. `is_gone`: finished, and the manager has been told.
    """

    request: WorkloadRequest
    num_known_tokens: int
    is_known: bool = False
    admission: int = 0
    num_ever_computed: int = 0
    is_gone: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def known_token_ids(self) -> Int32Array:
        """The prompt and the sampled tokens that the manager knows."""
        prompt, name = self.request.token_ids, self.request.request_id
        num_sampled = self.num_known_tokens - self.request.num_prompt_tokens
        if num_sampled <= 0:
            return prompt
        return np.concatenate((prompt, answer_token_ids(name, num_sampled)))

    @property
    def num_target_tokens(self) -> int:
        """Tokens to compute in total: all but the last sampled one."""
        return self.request.num_prompt_tokens + max(self.request.num_output_tokens, 1) - 1


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """The next step for the first `num_rows` rows, and the arrays to send."""

    num_rows: int
    running: RunningRequests
    num_tokens: int


@dataclass(frozen=True, eq=False)
class RowPositions:
    """A snapshot of the rows. Shapes of the arrays: `(len(requests),)`."""

    requests: Sequence[ReplayedRequest]
    num_computed_tokens: IndexArray
    num_known_tokens: IndexArray


class ReplayedRows:
    """Up to `capacity` running requests. Not checked: the engine never exceeds it."""

    def __init__(self, capacity: int) -> None:
        self._table = np.zeros((_NUM_COLUMNS, capacity), np.int64)
        self._seeds = np.zeros(capacity, np.uint64)
        self._requests: list[ReplayedRequest] = []  # replaced, never mutated: callers keep it

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[ReplayedRequest]:
        """The running requests, in order of rows, as they are now."""
        return self._requests

    def add(self, request: ReplayedRequest, slot: int, num_computed_tokens: int) -> None:
        """Append a row for an admitted request."""
        row = len(self._requests)
        self._table[:, row] = (
            slot,
            request.num_known_tokens,
            num_computed_tokens,
            request.num_target_tokens,
            request.request.num_prompt_tokens,
        )
        self._seeds[row] = answer_seed(request.request_id)
        self._requests = [*self._requests, request]

    def remove(self, rows: Sequence[int]) -> list[ReplayedRequest]:
        """Remove rows and return their requests; the others keep their order."""
        if not rows:
            return []
        before, gone = len(self._requests), set(rows)
        removed = [self._requests[row] for row in rows]
        for row, request in zip(rows, removed, strict=True):
            request.num_known_tokens = int(self._table[_KNOWN, row])
            request.num_ever_computed = max(
                request.num_ever_computed, int(self._table[_COMPUTED, row])
            )
        kept = np.array([row for row in range(before) if row not in gone], np.int64)
        self._requests = [self._requests[row] for row in kept]
        self._table[:, : len(kept)] = self._table[:, kept]
        self._seeds[: len(kept)] = self._seeds[kept]
        return removed

    def done(self) -> list[int]:
        """Return the rows whose every token is computed."""
        table = self._table[:, : len(self._requests)]
        return [int(row) for row in np.flatnonzero(table[_COMPUTED] >= table[_TARGETS])]

    def plan(self, budget_tokens: int, boundary_tokens: int | None = None) -> PlannedRows:
        """Plan at most `budget_tokens`, oldest rows first. Changes nothing.

        A chunk that passes a multiple of `boundary_tokens` ends at the last one that it reaches;
        the rest comes with the next step. Finished rows must have been removed.
        """
        num_rows = len(self._requests)
        table = self._table[:, :num_rows]
        known, computed = table[_KNOWN], table[_COMPUTED]
        samples = computed == known
        needed = known - computed + samples
        ends = np.cumsum(needed)
        granted = np.minimum(needed, budget_tokens - (ends - needed))
        if boundary_tokens is not None:
            cut = (computed + granted) // boundary_tokens * boundary_tokens - computed
            granted = np.where(cut > 0, cut, granted)
        count = int(np.count_nonzero(granted > 0))  # the oldest ones, as the budget shrinks
        samples = samples[:count]
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(samples, out=offsets[1:])
        positions = (known - table[_PROMPTS])[:count][samples]
        zeros = np.zeros(count, np.int32)
        num_new = granted[:count].astype(np.int32)
        running = RunningRequests(
            slots=table[_SLOTS, :count].astype(np.int32),
            num_new_tokens=num_new,
            num_draft_tokens=zeros,
            num_rejected_tokens=zeros,
            token_offsets=offsets,
            token_ids=output_token_ids(self._seeds[:count][samples], positions),
        )
        return PlannedRows(count, running, int(num_new.sum()))

    def settle(self, planned: PlannedRows, scheduled: Int32Array) -> list[int]:
        """Record the result of `planned`; return the rows that found no room.

        Shape of `scheduled`: `(planned.num_rows,)`, 1 if the row got its blocks. The manager knows
        the sampled tokens either way.
        """
        count = planned.num_rows
        self._table[_KNOWN, :count] += np.diff(planned.running.token_offsets)
        self._table[_COMPUTED, :count] += planned.running.num_new_tokens * (scheduled != 0)
        return [] if scheduled.all() else np.flatnonzero(scheduled == 0).tolist()

    def positions(self) -> RowPositions:
        """Return a snapshot of all rows, in case the next step fails."""
        count = len(self._requests)
        table = self._table[:, :count]
        return RowPositions(self._requests, table[_COMPUTED].copy(), table[_KNOWN].copy())

    def find(self, request: ReplayedRequest) -> int | None:
        """Return the row of a request, None if it does not run."""
        return self._requests.index(request) if request in self._requests else None

    def go_back(self, row: int, num_computed: int, num_known: int) -> None:
        self._table[_COMPUTED, row] = num_computed
        self._table[_KNOWN, row] = num_known
