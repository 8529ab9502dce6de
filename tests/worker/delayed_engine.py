"""A copy engine whose transfers are slow, come in pieces, and overtake each other.

Like a device next to the processor: a row is read when its turn comes, not when the copy was
requested. Compute-stream work is done at once.
"""

from __future__ import annotations

import random

import torch

from kvcache.base.arrays import Int32Array
from kvcache.worker import CpuCopyEngine, PendingCopy


class DelayedCopy:
    """A transfer, row by row."""

    def __init__(
        self, engine: DelayedEngine, rows: list[tuple[torch.Tensor, int, torch.Tensor, int]]
    ) -> None:
        self._engine = engine
        self.rows = rows

    def is_done(self) -> bool:
        self._engine.go_on()
        return not self.rows

    def wait(self, timeout_s: float) -> bool:
        self._engine.num_waits += bool(self.rows)
        while self.rows and timeout_s > 0 and not self._engine.is_stuck:
            self.move_one()
        return not self.rows

    def move_one(self) -> None:
        sources, source, destinations, destination = self.rows.pop(
            self._engine.chance.randrange(len(self.rows))
        )
        destinations[destination] = sources[source]


class DelayedEngine(CpuCopyEngine):
    """Sometimes moves a row of some transfer; while `is_stopped` only for a caller that waits for
    it, while `is_stuck` not even then."""

    copies_at_once = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.copies: list[DelayedCopy] = []
        self.is_stopped = False
        self.is_stuck = False
        self.num_waits = 0

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        pairs = zip(source_ids.tolist(), destination_ids.tolist(), strict=True)
        copy = DelayedCopy(self, [(sources, s, destinations, d) for s, d in pairs])
        self.copies.append(copy)
        return copy

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        CpuCopyEngine().copy_blocks(rows, source_ids, rows, destination_ids)

    def go_on(self) -> None:
        """Move a few rows of random transfers."""
        if self.is_stopped or self.is_stuck:
            return
        for _ in range(self.chance.randrange(3)):
            self.copies = [copy for copy in self.copies if copy.rows]
            if self.copies:
                self.chance.choice(self.copies).move_one()
