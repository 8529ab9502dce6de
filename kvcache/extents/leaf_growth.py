"""One unit more for many rows at once: what a step of decoding publishes.

Beside the publisher, for the rows of a batch whose own leaf grows by exactly one unit; all others
it leaves to it. Refuses to look anything up: a leaf that one row holds alone has no children to
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.core import RowTokens
from kvcache.extents.grown_segments import GrownSegments
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray
from kvcache.extents.published import Published, Segment
from kvcache.extents.publisher import Publisher
from kvcache.extents.rows import Int64Array, Row
from kvcache.extents.shape import GroupShape
from kvcache.hashing import BlockHash


class _Growth(NamedTuple):
    """Rows that grow by a unit each: their rooms in the tails, blocks `(groups, n)`, tokens."""

    rows: IndexArray
    units: Int64Array
    counts: IndexArray
    blocks: Int32Array
    contents: Int32Array


class LeafGrower:
    """Grows the leaves of rows of one core."""

    def __init__(self, parts: CoreParts, publisher: Publisher) -> None:
        """Work on the parts of one core."""
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._tables = parts.tables
        self._tails = parts.tails
        self._ledger = parts.ledger
        self._evictor = parts.evictor
        self._announcer = parts.announcer
        self._hash_fn = parts.hash_fn
        self._publisher = publisher
        self._is_mixed = any(group.num_units > 1 for group in parts.shape.groups)
        self._is_plain = len(parts.shape.ordered) == 1 and not self._is_mixed
        # Where there is one group, whose blocks are units, every unit has a block.
        self._is_full = self._is_plain and len(parts.shape.groups) == 1
        self._ordered = [group.index for group in parts.shape.ordered]
        self._others = [group.index for group in parts.shape.others]

    def publish_units(
        self, rows: IndexArray, cached: Int32Array, tokens: RowTokens, places: IndexArray
    ) -> IndexArray:
        """Publish the unit that each row's `cached` tokens fill, where its own leaf grows by it.

        `places` are the rows' places in the batch whose `tokens` these are. Returns the indices of
        the rows that must be published one by one.
        """
        tables, tails = self._tables, self._tails
        tails.reach(len(tables.by_index))
        units = tables.published.take(rows)
        next_full = (units + 2) * self._shape.unit_tokens
        blocks = self._blocks(rows, units)
        counts = tails.counts.take(rows)
        is_strange = counts >= tails.max_units
        is_odd = self._odd(blocks, cached >= next_full)
        others: list[int] = []
        if is_odd is not None or np.count_nonzero(is_strange):
            others = self._others_of(rows, is_strange, is_odd)
            if others:
                chosen = np.delete(np.arange(len(rows)), others)
                rows, units, places = rows[chosen], units[chosen], places[chosen]
                blocks, next_full = blocks[:, chosen], next_full[chosen]
            counts = tails.counts.take(rows)
        if len(rows):
            if self._is_mixed:  # labels of longer blocks tell tokens of earlier units too
                tokens.sync(places)
            contents = tokens.newest_units(places, units)
            self._grow(_Growth(rows, units, counts, blocks, contents))
            tables.published[rows] = units + 1
            tables.note_full(rows, next_full)
        return index_array(others)

    def _blocks(self, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return each row's block of each group that ends with its unit, shape `(groups, n)`."""
        blocks = [self._unit_blocks(group, rows, units) for group in self._shape.groups]
        return blocks[0].reshape(1, -1) if len(blocks) == 1 else np.array(blocks)

    def _odd(self, blocks: Int32Array, fills_more: BoolArray) -> BoolArray | None:
        """Return which rows fill several units, or have blocks that others have references to."""
        ordered = blocks[self._ordered] if self._others else blocks
        is_shared = self._store.references[ordered] > 1
        if not np.count_nonzero(is_shared) and not np.count_nonzero(fills_more):
            return None
        is_odd: BoolArray = np.logical_or.reduce(is_shared) | fills_more
        return is_odd

    def _others_of(
        self, rows: IndexArray, is_strange: BoolArray, is_odd: BoolArray | None
    ) -> list[int]:
        """Return which rows have no leaf of their own that grows by one unit.

        Of the strange ones, whose tails have no room, the rest gets some.
        """
        others = [] if is_odd is None else is_odd.nonzero()[0].tolist()
        if is_odd is not None:
            is_strange &= ~is_odd
        for i in is_strange.nonzero()[0].tolist():
            row = self._tables.by_index[int(rows[i])]
            if row is None or not self._has_room(row):
                others.append(i)
        return sorted(others)

    def _has_room(self, row: Row) -> bool:
        """Make room in a row's tail; False if it grows no leaf of its own."""
        run = row.run
        if run.waiting is not None:
            run.waiting.pack()
            return True
        if row.has_images or not self._tree.can_grow(run):
            return False
        last = run.last_digest(self._shape.digest_bytes)
        run.begin_waiting(self._tails.open(row.index, last))
        return True

    def _grow(self, growth: _Growth) -> None:
        """Append a unit to each row's leaf, and note whom the blocks wait for."""
        store, publisher, tails = self._store, self._publisher, self._tails
        rows, blocks = growth.rows, index_array(growth.blocks)
        handles = store.handles_of_all(blocks) if self._is_full else store.handles_of(blocks)
        packed = np.empty((len(rows), tails.width), dtype=np.int32)
        packed[:, : tails.tokens_at] = tails.last.take(rows, axis=0)
        packed[:, tails.tokens_at : tails.ids_at] = growth.contents
        ids = blocks[self._ordered] if self._others else blocks
        packed[:, tails.ids_at : tails.handles_at] = ids.T
        if self._others:
            packed[:, tails.handles_at :].view(np.int64)[:] = handles[self._others].T
        hashed = tails.hashed(packed)
        digests = self._digests(rows, hashed)
        all_digests = b"".join(digests)
        tails.append(rows, growth.counts, packed, all_digests)
        new = ids[0] if self._is_plain else ids[ids != 0]
        store.references[new] = 0
        store.fill(new, publisher.seal())
        for group in self._shape.others:
            filled = blocks[group.index]
            publisher.fill_single(group, filled[filled != 0])
        self._tree.num_units += len(rows)
        if self._evictor.digest_of.size:
            publisher.note_digests(handles[self._others], all_digests)
        if self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload:
            by_index = self._tables.by_index
            members = [row for index in rows.tolist() if (row := by_index[index]) is not None]
            contents = packed[:, : tails.ids_at]
            grown = GrownSegments(members, growth.units, contents, digests)
            segments: Sequence[Segment] = grown
            if self._is_mixed:  # with the units before that longer blocks need
                segments = [
                    publisher.segment(row, grown.unit(i), 1, digests[i], grown.parent(i))
                    for i, row in enumerate(members)
                ]
            published = Published(segments, handles, is_content=True)
            if self._is_full:
                published.block_ids, published.num_cut_short = blocks, store.num_cut_short
            publisher.conclude(published)

    def _digests(self, rows: IndexArray, hashed: list[bytes]) -> list[bytes]:
        """Return the digests of units behind others, in which no multimodal item lies."""
        if not self._tables.num_special:
            return self._hash_fn.hash_units(hashed)
        size, hash_block = self._shape.digest_bytes, self._hash_fn.hash_block
        digests: list[bytes] = []
        for index, unit in zip(rows.tolist(), hashed, strict=True):
            row = self._tables.by_index[index]
            lora = None if row is None else row.request.lora
            keys = None if lora is None else (("lora", lora.name, lora.path),)
            digests.append(hash_block(BlockHash(unit[:size]), unit[size:], keys))
        return digests

    def _unit_blocks(self, group: GroupShape, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return, per row, the block that ends with its unit `units[i]`; 0 where none does."""
        table, length = self._tables.tables[group.index], group.num_units
        if length == 1:
            return table[rows, units]
        ids = np.zeros(len(rows), dtype=np.int32)
        ends = (units + 1) % length == 0
        ids[ends] = table[rows[ends], units[ends] // length]
        return ids
