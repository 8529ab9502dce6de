"""How requests stood before each step whose forward has not finished.

Stands inside the replay engine. A step that fails is void, and so is every later one; what this
remembers is where the engine's own requests go back to. Refuses to grow: records of finished steps
are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.replay.rows import ReplayedRequest, RowPositions


@dataclass(frozen=True, eq=False)
class Before:
    """Where a request goes back to: its row, the preempted ones, or the new ones.

    `keeps_row`: its row has run on since before the failed step, if it still has one. `is_new`: the
    manager forgets it, it starts over.
    """

    request: ReplayedRequest
    num_computed: int
    num_known: int
    keeps_row: bool
    is_new: bool


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What one step changed: rows as they were before it, and whom it admitted."""

    step: int
    rows: RowPositions
    admitted: Sequence[Before]


class UndoLog:
    """Records of unfinished steps, oldest first."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque()

    def add(self, record: StepRecord) -> None:
        """Remember a step that has just been sent."""
        self._records.append(record)

    def drop_finished(self, finished_step: int) -> None:
        """Forget steps up to `finished_step`."""
        while self._records and self._records[0].step <= finished_step:
            self._records.popleft()

    def undo(self, failed_step: int) -> list[Before]:
        """Forget steps from `failed_step` on; return how everybody in them stood before."""
        failed: deque[StepRecord] = deque()
        while self._records and self._records[-1].step >= failed_step:
            failed.appendleft(self._records.pop())
        before: dict[int, Before] = {}
        for record in failed:
            rows = zip(
                record.rows.requests,
                record.rows.num_computed_tokens.tolist(),
                record.rows.num_known_tokens.tolist(),
                strict=True,
            )
            for request, computed, known in rows:
                before.setdefault(id(request), Before(request, computed, known, True, False))
            for entry in record.admitted:
                first = before.setdefault(id(entry.request), entry)
                before[id(entry.request)] = replace(first, keeps_row=False)
        return list(before.values())
