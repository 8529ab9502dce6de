"""The last operations on each block, for messages about wrong bytes.

`record` keeps references to a command's arrays; `describe` searches them. The number of operations
and of block ids is limited; the oldest are dropped.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from kvcache.base.arrays import Int32Array

MAX_OPERATIONS = 4096
MAX_IDS = 1 << 20
"""Block ids of all remembered operations together."""


class _Operation(NamedTuple):
    seq: int
    verb: str
    block_ids: Int32Array
    others: Int32Array | None


class BlockHistory:
    """A ring of the last operations on blocks. Arrays given to `record` must not change later."""

    def __init__(self) -> None:
        self._operations: deque[_Operation] = deque()
        self._num_ids = 0

    def record(
        self, seq: int, verb: str, block_ids: Int32Array, others: Int32Array | None = None
    ) -> None:
        """Record that message `seq` did `verb` to `block_ids`; `others[i]` is the other block, host
        slot or request slot of the operation."""
        if not len(block_ids):
            return
        self._operations.append(_Operation(seq, verb, block_ids, others))
        self._num_ids += len(block_ids)
        while self._operations and (
            len(self._operations) > MAX_OPERATIONS or self._num_ids > MAX_IDS
        ):
            self._num_ids -= len(self._operations.popleft().block_ids)

    def describe(self, block_id: int, max_lines: int = 8) -> str:
        """Return the last operations on `block_id`, newest first, as one line."""
        found: list[str] = []
        for operation in reversed(self._operations):
            for index in np.flatnonzero(operation.block_ids == block_id).tolist():
                other = "" if operation.others is None else f" {int(operation.others[index])}"
                found.append(f"seq {operation.seq} {operation.verb}{other}")
            if len(found) >= max_lines:
                break
        return "; ".join(found[:max_lines]) or "nothing recorded"
