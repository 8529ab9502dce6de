"""One unit more for many rows at once: what a step of decoding publishes.

Beside the publisher, for the rows of a batch whose own leaf grows by exactly one unit; all others
it leaves to it. Refuses to look anything up: a leaf that one row holds alone has no children to
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import overload

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.core import RowTokens
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray
from kvcache.extents.published import Published, Segment
from kvcache.extents.publisher import Publisher, extra_keys_of
from kvcache.extents.rows import Int64Array, Row
from kvcache.extents.run import HandleArray, Run
from kvcache.extents.shape import GroupShape
from kvcache.hashing import BlockHash
from kvcache.request import Request


class GrownSegments(Sequence[Segment]):
    """One unit of each of some rows, as segments that are made when somebody asks.

    Most are never asked for: where nobody is told of contents and no step fails.
    """

    def __init__(
        self,
        rows: list[Row],
        units: Int64Array,
        tokens: bytes,
        digests: list[bytes],
        parents: list[bytes],
    ) -> None:
        """Note where the rows stand now: `units[i]` is the last one of row `i`."""
        self.digests = digests
        self._parents = parents
        self._tokens = tokens
        self._rows = rows
        self._runs = [row.run for row in rows]
        self._units = units

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...

    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        run, unit, request = self._place(index)
        unit_bytes = len(self._tokens) // len(self)
        start = range(len(self))[index] * unit_bytes
        return Segment(
            run,
            unit,
            1,
            request.request_id,
            request.namespace,
            unit,
            self._tokens[start : start + unit_bytes],
            self.digests[index],
            self._parents[index],
            extra_keys_of(request),
        )

    def with_lead(self, index: int, publisher: Publisher) -> Segment:
        """Return a segment with the units before it that longer blocks need."""
        run, unit, request = self._place(index)
        return publisher.segment_of(
            run, request, unit, 1, self.digests[index], self._parents[index]
        )

    def _place(self, index: int) -> tuple[Run, int, Request]:
        return self._runs[index], int(self._units[index]), self._rows[index].request


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
        tables, by_index = self._tables, self._tables.by_index
        unit_tokens = self._shape.unit_tokens
        published = tables.published.take(rows)
        members: list[Row] = []
        single: list[int] = []
        keeps_pasts = self._tree.keeps_pasts
        ends, starts = cached.tolist(), published.tolist()
        for i, index in enumerate(rows.tolist()):
            row = by_index[index]
            if row is None:
                single.append(i)
                continue
            run = row.run
            if (  # its own leaf grows by one plain unit
                run.num_holders == 1
                and not run.children
                and run.parent is not None
                and not (run.has_past and keeps_pasts)
                and not row.has_images
                and ends[i] < (starts[i] + 2) * unit_tokens
            ):
                members.append(row)
            else:
                single.append(i)
        others = index_array(single)
        if single:
            chosen = np.delete(np.arange(len(rows)), others)
            rows, published, places = rows[chosen], published[chosen], places[chosen]
        blocks = index_array(self._blocks(rows, published))
        ordered = blocks[self._ordered] if self._others else blocks
        if members and np.count_nonzero(self._store.references[ordered] > 1):
            # Others have references to some of these blocks.
            is_own = self._are_own(blocks)
            shared = (~is_own).nonzero()[0]
            others = np.sort(np.concatenate((others, chosen[shared] if single else shared)))
            members = [row for row, own in zip(members, is_own.tolist(), strict=True) if own]
            rows, published, places = rows[is_own], published[is_own], places[is_own]
            blocks = blocks[:, is_own]
        if members:
            if self._is_mixed:  # labels of longer blocks tell tokens of earlier units too
                tokens.sync(places)
            self._grow_leaves(members, published, blocks, tokens.newest_units(places, published))
            tables.published[rows] = published + 1
        return others

    def _blocks(self, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return each row's block of each group that ends with its unit, shape `(groups, n)`."""
        blocks = [self._unit_blocks(group, rows, units) for group in self._shape.groups]
        return blocks[0].reshape(1, -1) if len(blocks) == 1 else np.array(blocks)

    def _are_own(self, blocks: IndexArray) -> BoolArray:
        """Say which rows' blocks of ordered groups nobody else has a reference to."""
        is_own: BoolArray = self._store.references[blocks[self._ordered]] <= 1
        own: BoolArray = is_own[0] if self._is_plain else np.logical_and.reduce(is_own)
        return own

    def _grow_leaves(
        self, rows: list[Row], units: Int64Array, blocks: IndexArray, tokens: Int32Array
    ) -> None:
        """Append `units[i]` to the run of row `i`, with its blocks and `tokens`: one row each."""
        store, publisher = self._store, self._publisher
        handles = store.handles_of_all(blocks) if self._is_full else store.handles_of(blocks)
        ids = blocks[self._ordered] if self._others else blocks
        new = ids[0] if self._is_plain else ids[ids != 0]
        store.references[new] = 0
        store.fill(new, publisher.seal())
        for group in self._shape.others:
            filled = blocks[group.index]
            publisher.fill_single(group, filled[filled != 0])
        self._tree.num_units += len(rows)
        beside = handles[self._others] if self._others else handles[:0]
        packed = tokens.tobytes()
        digests, parents = self._append_units(rows, ids, beside, packed)
        if self._evictor.digest_of.size:
            publisher.note_digests(beside, b"".join(digests))
        grown = GrownSegments(rows, units, packed, digests, parents)
        if self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload:
            segments: Sequence[Segment] = grown
            if self._is_mixed:
                segments = [grown.with_lead(i, publisher) for i in range(len(grown))]
            publisher.conclude(Published(segments, handles, is_content=True))

    def _append_units(
        self, rows: list[Row], ids: IndexArray, handles: HandleArray, tokens: bytes
    ) -> tuple[list[bytes], list[bytes]]:
        """Append one unit to the run of each row; return the digests, and those before them."""
        unit_bytes = self._shape.unit_bytes
        hash_plain = self._hash_fn.hash_plain
        digests: list[bytes] = []
        parents: list[bytes] = []
        columns, others = ids.T.tolist(), handles.T.tolist()
        at = 0
        for i, row in enumerate(rows):
            end = at + unit_bytes
            digest_of = hash_plain if row.is_plain else partial(self._digest, row)
            parent, digest = row.run.append_unit(tokens[at:end], columns[i], others[i], digest_of)
            digests.append(digest)
            parents.append(parent)
            at = end
        return digests, parents

    def _unit_blocks(self, group: GroupShape, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return, per row, the block that ends with its unit `units[i]`; 0 where none does."""
        table, length = self._tables.tables[group.index], group.num_units
        if length == 1:
            return table[rows, units]
        ids = np.zeros(len(rows), dtype=np.int32)
        ends = (units + 1) % length == 0
        ids[ends] = table[rows[ends], units[ends] // length]
        return ids

    def _digest(self, row: Row, parent: bytes, tokens: bytes) -> bytes:
        """Return the digest of one unit behind others, in which no multimodal item lies."""
        lora = row.request.lora
        keys = None if lora is None else (("lora", lora.name, lora.path),)
        return self._hash_fn.hash_block(BlockHash(parent), tokens, keys)
