"""Who else holds blocks that a row is about to publish: forks that shared them before.

Beside the publisher. A block that enters the tree is held by runs from then on, so nobody may keep
a reference of his own: forks with the same tokens end behind the same run (having followed what the
tree has before, if need be), and where somebody else
has a reference (a fork in the middle of the block, a pin whose content was withdrawn), publishing
ends before that block until he has gone. What its blocks of other groups can stand beside, each row
offers when it publishes itself. Refuses to guess: tokens and blocks must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvcache.arrays import Int32Array
from kvcache.extents.parts import CoreParts
from kvcache.extents.row_columns import NEVER
from kvcache.extents.rows import Row
from kvcache.extents.run import Run
from kvcache.extents.shape import GroupShape


class Company(NamedTuple):
    """Units up to `end` can be published; each of `rows` shares so many of them."""

    end: int
    rows: tuple[tuple[Row, int], ...] = ()


class Companions:
    """Finds and takes along the rows that share blocks with others, in one core."""

    def __init__(self, parts: CoreParts) -> None:
        """Work on the parts of one core."""
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._tables = parts.tables
        self._match_tokens = parts.match_tokens

    def of(self, row: Row, start: int, end: int, follow: Callable[[Row, int], None]) -> Company:
        """Say how many of a row's units `[start, end)` can be published, and who shares them.

        Forks that have not followed the tree as far as the row, to unit `start`, do so by `follow`.
        """
        blocks = [self._blocks(group, row, start, end) for group in self._shape.ordered]
        if not any(np.count_nonzero(self._store.references[ids] > 1) for ids in blocks):
            return Company(end)
        for other in self._behind(row, start):
            follow(other, start)
            self._note_end(other)
        references = [self._store.own_references(ids) for ids in blocks]
        tokens = self._match_tokens.of(row.request, start, end)
        rows = []
        allowed = np.ones(end - start, dtype=np.int64)
        for other in self._tables.by_id.values():
            if other is row or other.run is not row.run:
                continue
            count = self._num_shared(tokens, blocks, other, start, end)
            if count:
                rows.append((other, count))
                allowed[:count] += 1
        stop = end - start
        for counts in references:
            bad = np.flatnonzero(counts > allowed)
            if len(bad):
                stop = min(stop, int(bad[0]))
        return Company(
            start + stop, tuple((other, min(count, stop)) for other, count in rows if stop)
        )

    def take_along(self, company: Company, row: Row, above: Run, start: int) -> None:
        """Let rows that ended with `above` end behind what the row has just published."""
        for other, count in company.rows:
            for group in self._shape.ordered:
                ids = self._blocks(group, other, start, start + count)
                self._store.references[ids[ids != 0]] -= 1
            end, run = start + count, row.run
            while run.start >= end and run.parent is not None:
                run = run.parent
            if end < run.end:
                run = self._tree.split(run, end - run.start)
            self._tree.hold(run)
            self._tree.release(above)
            other.run = run
            self._tables.published[other.index] = end
            if self._shape.others:
                self._tables.leave_unoffered(other.index, start)
            self._note_end(other)

    def _behind(self, row: Row, end: int) -> list[Row]:
        """Return the rows that end on the way to the row's run and share its units up to `end`."""
        way: set[int] = set()
        run = row.run.parent
        while run is not None:
            way.add(id(run))
            run = run.parent
        rows = []
        for other in self._tables.by_id.values():
            if id(other.run) not in way:
                continue
            start = int(self._tables.published[other.index])
            blocks = [self._blocks(group, row, start, end) for group in self._shape.ordered]
            tokens = self._match_tokens.of(row.request, start, end)
            if self._num_shared(tokens, blocks, other, start, end) == end - start:
                rows.append(other)
        return rows

    def _note_end(self, row: Row) -> None:
        """Note what fills the next unit of a row whose units others have published."""
        capacity = int(self._tables.capacity_tokens[row.index])
        limit = int(self._tables.full_tokens[row.index])
        if limit != NEVER:
            limit = (self._tables.first_open_unit(row.index) + 1) * self._shape.unit_tokens
        self._tables.note_limits(row.index, capacity, limit)

    def _num_shared(
        self, tokens: bytes, blocks: list[Int32Array], other: Row, start: int, end: int
    ) -> int:
        """Return how many units from `start` on another row has with the same tokens and blocks."""
        end = min(end, other.request.num_tokens // self._shape.unit_tokens)
        for group in self._shape.ordered:
            columns = int(self._tables.num_columns[group.index, other.index])
            end = min(end, columns * group.num_units)
        if end <= start:
            return 0
        theirs = self._match_tokens.of(other.request, start, end)
        words = (end - start) * self._shape.unit_tokens
        differs = np.frombuffer(tokens, np.int32, words) != np.frombuffer(theirs, np.int32)
        shared = int(differs.argmax()) // self._shape.unit_tokens if differs.any() else end - start
        for group, ours in zip(self._shape.ordered, blocks, strict=True):
            theirs_ids = self._blocks(group, other, start, start + shared)
            bad = np.flatnonzero(ours[:shared] != theirs_ids)
            if len(bad):
                shared = int(bad[0])
        return shared

    def _blocks(self, group: GroupShape, row: Row, start: int, end: int) -> Int32Array:
        """Return, per unit of `[start, end)`, the row's block that ends there; 0 if none does."""
        return self._tables.blocks_of_units(group, row.index, start, end)
