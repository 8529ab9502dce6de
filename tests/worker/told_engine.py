"""A copy engine whose transfers end on demand, in any order.

Like the slowest device: ids and source bytes are read at the very end, all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcache.base.arrays import Int32Array
from kvcache.worker import CpuCopyEngine, PendingCopy


class ToldCopy:
    """A transfer that waits for `finish`."""

    def __init__(self, move: Callable[[], object]) -> None:
        self._move = move
        self.is_over = False

    def finish(self) -> None:
        if not self.is_over:
            self._move()
            self.is_over = True

    def is_done(self) -> bool:
        return self.is_over

    def wait(self, timeout_s: float) -> bool:
        return self.is_over


class ToldEngine(CpuCopyEngine):
    """`log` has the calls, in order: `zero`, `within`, `forward end`, `copy`."""

    copies_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[ToldCopy] = []
        self.log: list[str] = []

    def copy_blocks(self, *rows_and_ids: Any) -> PendingCopy:
        self.log.append("copy")
        move = super().copy_blocks
        copy = ToldCopy(lambda: move(*rows_and_ids))
        self.copies.append(copy)
        return copy

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        self.log.append("within")
        super().copy_blocks(rows, source_ids, rows, destination_ids)

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        self.log.append("zero")
        super().zero_blocks(rows, ids)

    def on_forward_end(self) -> None:
        self.log.append("forward end")

    def finish(self, *, is_reversed: bool = False) -> None:
        """Let all started transfers end."""
        for copy in self.copies[::-1] if is_reversed else self.copies:
            copy.finish()
