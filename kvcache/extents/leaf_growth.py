"""One unit more for many rows at once: what a step of decoding publishes.

Beside the publisher, for the rows of a batch whose own leaf grows by exactly one unit; all others
it leaves to it. Refuses to look anything up: a leaf that one row holds alone has no children to
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.core import RowTokens
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment
from kvcache.extents.publisher import Publisher, extra_keys_of
from kvcache.extents.rows import Int64Array, Row
from kvcache.extents.run import Run
from kvcache.extents.shape import GroupShape
from kvcache.hashing import BlockHash
from kvcache.request import Request

_NOBODY: frozenset[int] = frozenset()


class GrownSegments(Sequence[Segment]):
    """One unit of each of some rows, as segments that are made when somebody asks.

    Most are never asked for: where nobody is told of contents and no step fails.
    """

    def __init__(  # noqa: PLR0917 - what the units of a step are
        self,
        rows: list[Row],
        runs: list[Run],
        units: Int64Array,
        tokens: Int32Array,
        digests: list[bytes],
        parents: list[bytes],
    ) -> None:
        """Note where the rows stand now: `units[i]` is the last one of row `i`."""
        self.digests = digests
        self._parents = parents
        self._tokens = tokens
        self._rows = rows
        self._runs = runs
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
        return Segment(
            run,
            unit,
            1,
            request.request_id,
            request.namespace,
            unit,
            self._tokens[index].tobytes(),
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
        units = tables.published.take(rows)
        blocks = self._blocks(rows, units)
        members = [row for index in rows.tolist() if (row := by_index[index]) is not None]
        runs = [row.run for row in members]
        others = self._others_of(members, runs, self._odd(blocks, units, cached))
        if others:
            chosen = np.delete(np.arange(len(rows)), others)
            members = [members[i] for i in chosen.tolist()]
            runs = [row.run for row in members]
            rows, units, places = rows[chosen], units[chosen], places[chosen]
            blocks = blocks[:, chosen]
        if members:
            if self._is_mixed:  # labels of longer blocks tell tokens of earlier units too
                tokens.sync(places)
            contents = tokens.newest_units(places, units)
            digests, parents = self._grow_leaves(members, runs, blocks, contents)
            grown = GrownSegments(members, runs, units, contents, digests, parents)
            self._enter(grown, index_array(blocks))
            units = units + 1
            tables.published[rows] = units
            tables.note_full(rows, (units + 1) * self._shape.unit_tokens)
        return index_array(others)

    def _blocks(self, rows: IndexArray, units: Int64Array) -> Int32Array:
        """Return each row's block of each group that ends with its unit, shape `(groups, n)`."""
        blocks = [self._unit_blocks(group, rows, units) for group in self._shape.groups]
        return blocks[0].reshape(1, -1) if len(blocks) == 1 else np.array(blocks)

    def _odd(self, blocks: Int32Array, units: Int64Array, cached: Int32Array) -> frozenset[int]:
        """Return which rows fill several units, or have blocks that others have references to."""
        ordered = blocks[self._ordered] if self._others else blocks
        is_shared = self._store.references[ordered] > 1
        fills_more = cached - units * self._shape.unit_tokens >= 2 * self._shape.unit_tokens
        if not np.count_nonzero(is_shared) and not np.count_nonzero(fills_more):
            return _NOBODY
        is_odd = np.logical_or.reduce(is_shared) | fills_more
        return frozenset(is_odd.nonzero()[0].tolist())

    def _others_of(self, rows: list[Row], runs: list[Run], odd: frozenset[int]) -> list[int]:
        """Return which rows have no leaf of their own that grows by one unit; others begin to."""
        if not odd and None not in [run.waiting for run in runs]:
            return []
        others = []
        for i, (row, run) in enumerate(zip(rows, runs, strict=True)):
            if i in odd:
                others.append(i)
            elif run.waiting is None:
                if row.has_images or not self._tree.can_grow(run):
                    others.append(i)
                else:
                    run.begin_waiting()
        return others

    def _grow_leaves(
        self, rows: list[Row], runs: list[Run], blocks: Int32Array, contents: Int32Array
    ) -> tuple[list[bytes], list[bytes]]:
        """Append a unit to each run, with its blocks and content; return digests, and parents'."""
        hash_plain = self._hash_fn.hash_plain
        digests: list[bytes] = []
        parents: list[bytes] = []
        each = zip(rows, runs, _bytes_of(contents), self._packed(blocks, contents), strict=True)
        for row, run, tokens, packed in each:
            waiting = run.waiting
            assert waiting is not None
            parents.append(parent := waiting.last)
            if row.is_plain:
                digest = hash_plain(parent, tokens)
            else:
                digest = self._digest(row, parent, tokens)
            digests.append(digest)
            waiting.last = digest
            waiting.packed += packed + digest
            run.num_units += 1
        return digests, parents

    def _packed(self, blocks: Int32Array, contents: Int32Array) -> list[bytes]:
        """Return what `WaitingUnits` hold of each row's unit before its digest."""
        num_rows, handles_at = len(contents), self._shape.unit_tokens + len(self._ordered)
        packed = np.empty((num_rows, handles_at + 2 * len(self._others)), dtype=np.int32)
        packed[:, : self._shape.unit_tokens] = contents
        packed[:, self._shape.unit_tokens : handles_at] = blocks[self._ordered].T
        if self._others:
            handles = self._store.handles_of(blocks[self._others])
            packed[:, handles_at:].view(np.int64)[:] = handles.T
        return _bytes_of(packed)

    def _enter(self, grown: GrownSegments, blocks: IndexArray) -> None:
        """Note that the blocks of these units have contents now, and whom they wait for."""
        store, publisher = self._store, self._publisher
        handles = store.handles_of_all(blocks) if self._is_full else store.handles_of(blocks)
        ids = blocks[self._ordered] if self._others else blocks
        new = ids[0] if self._is_plain else ids[ids != 0]
        store.references[new] = 0
        store.fill(new, publisher.seal())
        for group in self._shape.others:
            filled = blocks[group.index]
            publisher.fill_single(group, filled[filled != 0])
        self._tree.num_units += len(grown)
        if self._evictor.digest_of.size:
            publisher.note_digests(handles[self._others], b"".join(grown.digests))
        if self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload:
            segments: Sequence[Segment] = grown
            if self._is_mixed:
                segments = [grown.with_lead(i, publisher) for i in range(len(grown))]
            published = Published(segments, handles, is_content=True)
            if self._is_full:
                published.block_ids, published.num_cut_short = blocks, store.num_cut_short
            publisher.conclude(published)

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


def _bytes_of(rows: Int32Array) -> list[bytes]:
    """Return each row of a table as bytes. Shape `(n, columns)`, both above 0."""
    pieces: list[bytes] = rows.view(f"V{rows.shape[1] * rows.itemsize}").ravel().tolist()
    return pieces
