"""One unit more for many rows at once: what a step of decoding publishes.

Beside the publisher, for the rows of a batch whose own leaf grows by exactly one unit; all others
it leaves to it. Refuses to look anything up: a leaf that one row holds alone has no children to
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.arrays import EMPTY_INDEX, IndexArray, Int32Array, index_array
from kvcache.core import RowTokens
from kvcache.extents.grown_segments import GrownSegments
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray
from kvcache.extents.published import Published, Segment
from kvcache.extents.publisher import Publisher
from kvcache.extents.row_columns import FILLED, gather_units, pack_units
from kvcache.extents.rows import Int64Array, Row
from kvcache.hashing import BlockHash


class _Growth(NamedTuple):
    """Rows that grow by a unit each: which, with what blocks `(groups, n)` and tokens."""

    rows: IndexArray
    units: IndexArray
    blocks: IndexArray
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
        groups = parts.shape.groups
        self._is_mixed = any(group.num_units > 1 for group in groups)
        self._others = [group.index for group in parts.shape.others]
        self._group_places: IndexArray = index_array(
            [group.place if group.is_ordered else -1 - group.place for group in groups]
        )
        unit_tokens, max_units = parts.shape.unit_tokens, parts.tails.max_units
        # What `gather_units` has to know of each group.
        self._sizes = [
            (group.index, group.num_units, int(group.is_ordered), unit_tokens, max_units)
            for group in groups
        ]

    def publish_units(self, found: Int64Array, num_filled: int, tokens: RowTokens) -> IndexArray:
        """Publish the unit that each row fills, where its own leaf grows by it.

        So many rows do by what `find_busy` found in the batch whose `tokens` these are. Returns
        which of them, by their numbers among the busy ones, must be published one by one.
        """
        tables, tails = self._tables, self._tails
        tails.reach(len(tables.by_index))
        growing = np.empty((3, num_filled), dtype=np.intp)
        blocks = np.empty((len(self._sizes), num_filled), dtype=np.intp)
        marks = np.empty((2, num_filled), dtype=np.bool_)
        num_odd = num_full = 0
        for sizes in self._sizes:
            table = tables.tables[sizes[0]]
            num_odd, num_full = gather_units(
                table,
                tables.figures,
                self._store.references,
                tails.counts,
                found,
                sizes,
                growing,
                blocks,
                marks,
            )
        others: list[int] = []
        if num_odd or num_full:
            others = self._others_of(growing[1], marks)
            if others:
                chosen = np.delete(np.arange(num_filled), others)
                growing = np.ascontiguousarray(growing[:, chosen])
                blocks = np.ascontiguousarray(blocks[:, chosen])
        places, rows, units = growing
        if len(rows):
            if self._is_mixed:  # labels of longer blocks tell tokens of earlier units too
                tokens.sync(places)
            contents = tokens.newest_units(places, units)
            self._grow(_Growth(rows, units, blocks, contents))
        return found[FILLED].take(others) if others else EMPTY_INDEX

    def _others_of(self, rows: IndexArray, marks: BoolArray) -> list[int]:
        """Return which rows have no leaf of their own that grows by one unit.

        These are the odd ones, and those whose tails are full and get no room.
        """
        is_odd, is_full = marks
        others: list[int] = is_odd.nonzero()[0].tolist()
        for i in (is_full & ~is_odd).nonzero()[0].tolist():
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
        store, publisher, tails, tables = self._store, self._publisher, self._tails, self._tables
        rows, units, blocks, contents = growth
        packed = np.empty((len(rows), tails.width), dtype=np.int32)
        handles = np.empty(blocks.shape, dtype=np.int64)
        places = self._group_places
        pack_units(tails.last, contents, blocks, store.handles, rows, places, packed, handles)
        digests = self._digests(rows, tails.hashed(packed))
        all_digests = b"".join(digests)
        tails.append(rows, packed, all_digests, tables.figures)
        num_blocks = store.fill_units(blocks, places, publisher.seal(), self._evictor.group_of)
        self._tree.num_units += len(rows)
        if self._evictor.digest_of.size:
            publisher.note_digests(handles[self._others], all_digests)
        if self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload:
            by_index = self._tables.by_index
            members = [row for index in rows.tolist() if (row := by_index[index]) is not None]
            grown = GrownSegments(members, units, packed[:, : tails.ids_at], digests)
            segments: Sequence[Segment] = grown
            if self._is_mixed:  # with the units before that longer blocks need
                segments = [
                    publisher.segment(row, grown.unit(i), 1, digests[i], grown.parent(i))
                    for i, row in enumerate(members)
                ]
            published = Published(segments, handles, is_content=True)
            if num_blocks == blocks.size:
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
