"""What a manager's cache looks like from outside: who holds which block, and which pins hold.

For whoever inspects a running manager. Reads tables and pins, all there are; changes nothing.
"""

from __future__ import annotations

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.core.flat_core import FlatCore
from kvcache.manager.cache_control import CacheControl
from kvcache.manager.pins import Pin, held_blocks
from kvcache.manager.request_table import RequestTable
from kvcache.requests.request import Request


class CacheView:
    """The blocks of one manager, for looking."""

    def __init__(self, core: FlatCore, table: RequestTable, control: CacheControl) -> None:
        """Look at nothing yet."""
        self._core = core
        self._table = table
        self._control = control

    def request(self, request_id: str) -> Request | None:
        """Return the manager's own request with all its tokens, None if it is not known.

        For those who run the manager and must tell its requests apart: not to be changed.
        """
        return self._table.up_to_date(request_id)

    def pins(self) -> tuple[Pin, ...]:
        """Return the pins that hold, the oldest first."""
        return tuple(pin for pin, _ in self._control.pin_hits())

    def holders(self) -> Int32Array:
        """Return how many running requests and pins hold each block, by id. Shape `(num_blocks,)`.

        A request that has a block in two columns counts once. O(blocks of all tables).
        """
        holders = np.zeros(self._core.statistics().num_blocks + 1, dtype=np.int32)
        for request_id in list(self._table.slot_by_request):
            tables = self._core.block_ids(request_id)
            holders[np.unique(np.concatenate([*map(_ids, tables), _ids([])]))] += 1
        for _, hit in self._control.pin_hits():
            holders[held_blocks(hit)] += 1
        holders[0] = 0
        return holders


def _ids(table: list[int]) -> Int32Array:
    return np.array(table, dtype=np.int32)
