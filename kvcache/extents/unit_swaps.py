"""Single units that requests computed although the tree had them, all of a step's at once.

Beside the merger of duplicates, which hands over what is usual of its notes: a decoding request
follows an answer that is cached already, a unit every few steps, and nobody else is there. Its own
block takes the place of the tree's, which is fresh then. Refuses whatever is not as simple as that.
"""

from __future__ import annotations

from kvcache.arrays import IndexArray, index_array
from kvcache.extents.block_store import SEALED
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment
from kvcache.extents.rows import Row
from kvcache.extents.run import Run


class UnitSwaps:
    """Blocks that are about to take the place of others in one core."""

    def __init__(self, parts: CoreParts) -> None:
        """Have none."""
        self._is_simple = parts.shape.is_simple
        self._store = parts.store
        self._tables = parts.tables
        self._announcer = parts.announcer
        self._segments: list[Segment] = []
        self._runs: list[Run] = []
        self._theirs: list[int] = []
        self._ours: list[int] = []

    def add(self, row: Row, segment: Segment) -> bool:
        """Let the row's block of a segment take the place of the tree's when these are settled.

        False, and nothing was changed, where the segment is more than a unit, where somebody else
        holds what the tree has, or what the row has, or where a step has still to fill it.
        """
        unit, doubles = segment.first_unit, row.doubles.get(0)
        if not self._is_simple or segment.num_units != 1 or not doubles or unit not in doubles:
            return False
        if self._tables.by_id.get(row.request.request_id) is not row:
            return False
        run = row.run
        while run.num_holders == 1 and run.start > unit and run.parent is not None:
            run = run.parent
        if run.num_holders != 1 or not run.start <= unit < run.end:
            return False
        if run.is_unsettled:
            run.settle()
        theirs = run.ids.item(0, unit - run.start)
        ours = self._tables.tables[0].item(row.index, unit)
        if self._store.seals.item(theirs) != SEALED or self._store.references.item(ours) != 1:
            return False
        doubles.remove(unit)
        self._segments.append(segment)
        self._runs.append(run)
        self._theirs.append(theirs)
        self._ours.append(ours)
        return True

    def settle(self) -> Published | None:
        """Carry out what was added; return what workers are still to be told of, if anything."""
        segments = self._segments
        if not segments:
            return None
        store, theirs, ours = self._store, index_array(self._theirs), index_array(self._ours)
        for run, segment, block_id in zip(self._runs, segments, self._ours, strict=True):
            run.ids = run.ids.copy()  # look-ups have given out views of it
            run.ids[0, segment.first_unit - run.start] = block_id
        self._announcer.forgotten(theirs)
        store.end_lives(theirs)
        unheld: IndexArray = theirs[store.references[theirs] == 0]
        store.put_fresh(unheld[::-1])  # the last one on top
        store.fill(ours, SEALED)
        store.references[ours] = 0
        self._segments, self._runs, self._theirs, self._ours = [], [], [], []
        return Published(segments, store.handles_of_all(ours).reshape(1, -1), is_content=True)
