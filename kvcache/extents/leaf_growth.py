"""One unit more for many rows at once: what a step of decoding publishes.

Beside the publisher, for the rows of a batch whose own leaf grows by exactly one unit; all others
it leaves to it. Refuses to look anything up: a leaf that one row holds alone has no children to
follow.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.core import RowTokens
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment
from kvcache.extents.publisher import Publisher, extra_keys_of
from kvcache.extents.rows import Int64Array, Row, TableArray
from kvcache.extents.shape import GroupShape
from kvcache.hashing import BlockHash
from kvcache.request import Request


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
        is_plain = (ends - published == 1).tolist()
        growing: list[int] = []
        for i, index in enumerate(rows.tolist()):
            row = by_index[index]
            if row is not None and is_plain[i]:
                run = row.run
                is_leaf = run.num_holders == 1 and not run.children and run.parent is not None
                is_plain[i] = is_leaf and not row.request.mm_positions
            if is_plain[i]:
                growing.append(i)
        growing = self._own_blocks_only(rows, published, growing, is_plain)
        if growing:
            chosen = index_array(growing)
            if self._is_mixed:  # labels of longer blocks tell tokens of earlier units too
                tokens.sync(places.take(chosen))
            units = tokens.newest_units(places.take(chosen), published.take(chosen))
            self._grow_leaves(rows.take(chosen), published.take(chosen), units)
        if len(growing) == len(rows):
            return None
        return np.flatnonzero(~np.array(is_plain))

    def _own_blocks_only(
        self, rows: IndexArray, published: Int64Array, growing: list[int], is_plain: list[bool]
    ) -> list[int]:
        """Leave out the rows whose blocks others have references to."""
        chosen = index_array(growing)
        is_own = np.ones(len(growing), dtype=np.bool_)
        for group in self._shape.ordered:
            ids = self._unit_blocks(group, rows.take(chosen), published.take(chosen))
            is_own &= self._store.references[ids] <= 1
        if is_own.all():
            return growing
        for i in chosen[~is_own].tolist():
            is_plain[i] = False
        own: list[int] = chosen[is_own].tolist()
        return own

    def _grow_leaves(self, rows: IndexArray, units: Int64Array, tokens: TableArray) -> None:
        """Append one unit to the run of each row; `tokens` are theirs, shape `(n, unit_tokens)`."""
        store, shape, tables = self._store, self._shape, self._tables
        count, size, unit_bytes = len(rows), shape.digest_bytes, shape.unit_bytes
        of_groups = np.empty((len(shape.groups), count), dtype=np.int32)
        for group in shape.groups:
            of_groups[group.index] = self._unit_blocks(group, rows, units)
        handles = store.handles_of(of_groups)
        ids = of_groups[[group.index for group in shape.ordered]]
        beside = handles[[group.index for group in shape.others]]
        new = ids[ids != 0]
        store.references[new] -= 1
        store.fill(new, self._publisher.seal())
        for group in shape.others:
            filled = of_groups[group.index]
            self._publisher.fill_single(group, filled[filled != 0])
        self._tree.num_units += count
        packed, all_digests = tokens.tobytes(), []
        tells = self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload
        segments = []
        by_index = tables.by_index
        for i, index in enumerate(rows.tolist()):
            row = by_index[index]
            if row is None:
                continue
            run = row.run
            unit_tokens = packed[i * unit_bytes : (i + 1) * unit_bytes]
            parent = run.last_digest(size)
            digest = self._digest(row.request, unit_tokens, parent)
            run.append(unit_tokens, ids[:, i : i + 1], beside[:, i : i + 1], digest, 1)
            if tells:
                all_digests.append(digest)
                segments.append(self._grown_segment(row, unit_tokens, digest, parent))
        tables.published[rows] = units + 1
        if tells:
            if self._evictor.digest_of.size:
                self._publisher.note_digests(handles, b"".join(all_digests))
            self._publisher.conclude(Published(segments, handles, is_content=True))

    def _grown_segment(self, row: Row, tokens: bytes, digest: bytes, parent: bytes) -> Segment:
        end = row.run.end
        if self._is_mixed:
            return self._publisher.segment(row, end - 1, 1, digest, parent)
        request, base = row.request, end - 1
        name, keys = request.namespace, extra_keys_of(request)
        return Segment(
            row.run, base, 1, request.request_id, name, base, tokens, digest, parent, keys
        )

    def _unit_blocks(self, group: GroupShape, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return, per row, the block that ends with its unit `units[i]`; 0 where none does."""
        table, length = self._tables.tables[group.index], group.num_units
        if length == 1:
            return table[rows, units]
        ids = np.zeros(len(rows), dtype=np.int32)
        ends = (units + 1) % length == 0
        ids[ends] = table[rows[ends], units[ends] // length]
        return ids

    def _digest(self, request: Request, tokens: bytes, parent: bytes) -> bytes:
        """Return the digest of one unit behind others, in which no multimodal item lies."""
        keys = None if request.lora is None else (("lora", request.lora.name, request.lora.path),)
        return self._hash_fn.hash_block(BlockHash(parent), tokens, keys)
