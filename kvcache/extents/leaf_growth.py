"""One unit more for many rows at once: what a step of decoding publishes.

Beside the publisher, for the rows of a batch whose own leaf grows by exactly one unit; all others
it leaves to it. Refuses to look anything up: a leaf that one row holds alone has no children to
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from kvcache.arrays import IndexArray, Int32Array
from kvcache.core import RowTokens
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray
from kvcache.extents.published import Published, Segment
from kvcache.extents.publisher import Publisher, extra_keys_of
from kvcache.extents.rows import Int64Array, Row
from kvcache.extents.run import HandleArray
from kvcache.extents.shape import GroupShape
from kvcache.hashing import BlockHash


class GrownSegments(Sequence[Segment]):
    """One unit of each of some rows, as segments that are made when somebody asks.

    Most are never asked for: where nobody is told of contents and no step fails.
    """

    def __init__(
        self,
        rows: list[Row],
        tokens: bytes,
        digests: list[bytes],
        parents: list[bytes],
        unit_bytes: int,
    ) -> None:
        """Note where the rows stand now: their last unit is the one."""
        self.digests = digests
        self._parents = parents
        self._tokens = tokens
        self._unit_bytes = unit_bytes
        self._requests = [row.request for row in rows]
        self._places = [(row.run, row.run.end - 1) for row in rows]

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...

    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        (run, unit), request = self._places[index], self._requests[index]
        start = range(len(self))[index] * self._unit_bytes
        return Segment(
            run,
            unit,
            1,
            request.request_id,
            request.namespace,
            unit,
            self._tokens[start : start + self._unit_bytes],
            self.digests[index],
            self._parents[index],
            extra_keys_of(request),
        )

    def with_lead(self, index: int, publisher: Publisher) -> Segment:
        """Return a segment with the units before it that longer blocks need."""
        (run, unit), request = self._places[index], self._requests[index]
        return publisher.segment_of(
            run, request, unit, 1, self.digests[index], self._parents[index]
        )


class LeafGrower:
    """Grows the leaves of rows of one core."""

    def __init__(self, parts: CoreParts, publisher: Publisher) -> None:
        """Work on the parts of one core."""
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._tables = parts.tables
        self._ledger = parts.ledger
        self._evictor = parts.evictor
        self._announcer = parts.announcer
        self._hash_fn = parts.hash_fn
        self._publisher = publisher
        self._is_mixed = any(group.num_units > 1 for group in parts.shape.groups)
        self._is_plain = len(parts.shape.ordered) == 1 and not self._is_mixed
        self._ordered = [group.index for group in parts.shape.ordered]
        self._others = [group.index for group in parts.shape.others]

    def publish_units(
        self,
        rows: IndexArray,
        published: Int64Array,
        ends: Int64Array,
        tokens: RowTokens,
        places: IndexArray,
    ) -> IndexArray | None:
        """Publish one unit of each row, for all rows whose own leaf grows by it.

        `places` are the rows' places in the batch whose `tokens` these are. Returns the indices of
        the rows that must be published one by one, None if there are none.
        """
        by_index = self._tables.by_index
        is_growing = ends - published == 1
        growing = is_growing.tolist()
        members: list[Row] = []
        for i, index in enumerate(rows.tolist()):
            row = by_index[index]
            if row is None or not growing[i]:
                continue
            run = row.run
            if run.children or run.num_holders > 1 or run.parent is None or row.has_images:
                is_growing[i] = False
            else:
                members.append(row)
        chosen = is_growing.nonzero()[0]
        blocks = self._blocks(rows.take(chosen), published.take(chosen))
        is_own = self._are_own(blocks)
        if not is_own.all():  # others have references to some of these blocks
            is_growing[chosen[~is_own]] = False
            members = [row for row, own in zip(members, is_own.tolist(), strict=True) if own]
            chosen, blocks = chosen[is_own], blocks[:, is_own]
        if members:
            if self._is_mixed:  # labels of longer blocks tell tokens of earlier units too
                tokens.sync(places.take(chosen))
            units = tokens.newest_units(places.take(chosen), published.take(chosen))
            self._grow_leaves(members, blocks, units.tobytes())
            self._tables.published[rows.take(chosen)] += 1
        return None if len(members) == len(rows) else (~is_growing).nonzero()[0]

    def _blocks(self, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return each row's block of each group that ends with its unit, shape `(groups, n)`."""
        blocks = [self._unit_blocks(group, rows, units) for group in self._shape.groups]
        return blocks[0].reshape(1, -1) if len(blocks) == 1 else np.array(blocks)

    def _are_own(self, blocks: Int32Array) -> BoolArray:
        """Say which rows' blocks of ordered groups nobody else has a reference to."""
        is_own: BoolArray = self._store.references[blocks[self._ordered]] <= 1
        own: BoolArray = is_own[0] if self._is_plain else np.logical_and.reduce(is_own)
        return own

    def _grow_leaves(self, rows: list[Row], blocks: Int32Array, tokens: bytes) -> None:
        """Append one unit to the run of each row; `tokens` are theirs, one unit after the other."""
        store, publisher = self._store, self._publisher
        handles = store.handles_of(blocks)
        ids = blocks[self._ordered]
        new = ids[0] if self._is_plain else ids[ids != 0]
        store.references[new] = 0
        store.fill(new, publisher.seal())
        for group in self._shape.others:
            filled = blocks[group.index]
            publisher.fill_single(group, filled[filled != 0])
        self._tree.num_units += len(rows)
        grown = self._append_units(rows, ids, handles[self._others], tokens)
        if self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload:
            if self._evictor.digest_of.size:
                publisher.note_digests(handles, b"".join(grown.digests))
            segments: Sequence[Segment] = grown
            if self._is_mixed:
                segments = [grown.with_lead(i, publisher) for i in range(len(grown))]
            publisher.conclude(Published(segments, handles, is_content=True))

    def _append_units(
        self, rows: list[Row], ids: Int32Array, handles: HandleArray, tokens: bytes
    ) -> GrownSegments:
        size, unit_bytes = self._shape.digest_bytes, self._shape.unit_bytes
        hash_plain = self._hash_fn.hash_plain
        digests: list[bytes] = []
        parents: list[bytes] = []
        columns, others = ids.T.tolist(), handles.T.tolist()
        at = 0
        for i, row in enumerate(rows):
            run = row.run
            unit = tokens[at : at + unit_bytes]
            at += unit_bytes
            parent = run.last_digest(size)
            digest = hash_plain(parent, unit) if row.is_plain else self._digest(row, unit, parent)
            run.append_unit(unit, columns[i], others[i], digest)
            digests.append(digest)
            parents.append(parent)
        return GrownSegments(rows, tokens, digests, parents, unit_bytes)

    def _unit_blocks(self, group: GroupShape, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return, per row, the block that ends with its unit `units[i]`; 0 where none does."""
        table, length = self._tables.tables[group.index], group.num_units
        if length == 1:
            return table[rows, units]
        ids = np.zeros(len(rows), dtype=np.int32)
        ends = (units + 1) % length == 0
        ids[ends] = table[rows[ends], units[ends] // length]
        return ids

    def _digest(self, row: Row, tokens: bytes, parent: bytes) -> bytes:
        """Return the digest of one unit behind others, in which no multimodal item lies."""
        lora = row.request.lora
        keys = None if lora is None else (("lora", lora.name, lora.path),)
        return self._hash_fn.hash_block(BlockHash(parent), tokens, keys)
