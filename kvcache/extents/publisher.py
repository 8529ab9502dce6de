"""Making a row's full blocks hittable: follow what the tree has, add what it lacks.

Between rows, whose blocks fill, and the tree. Contents are digested here, the new ones only.
Refuses to allocate and to seal: inside a step what is added waits for the step to complete.

    the row's run ──▶ the tree has these units already: the row follows, and its own blocks of
                      ordered groups are doubles, given back empty when it goes
                  ──▶ it has not: the row's blocks become the tree's
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.digests import join_digests
from kvcache.extents.block_store import NO_CONTENT, NULL_HANDLE, SEALED
from kvcache.extents.companions import Companions
from kvcache.extents.duplicates import DuplicateMerger
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment, extra_keys_of
from kvcache.extents.rows import Row
from kvcache.extents.run import HandleArray, Run
from kvcache.extents.shape import GroupShape
from kvcache.extents.tree import NO_WALK, Walk
from kvcache.hashing import BlockHash
from kvcache.ids import NULL_BLOCK_ID
from kvcache.request import Request

_NO_HANDLES: HandleArray = np.empty((0, 0), dtype=np.int64)


class Publisher:
    """Publishes rows of one core."""

    def __init__(self, parts: CoreParts, duplicates: DuplicateMerger) -> None:
        """Work on the parts of one core; tell `duplicates` what the tree had already."""
        self._duplicates = duplicates
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._tables = parts.tables
        self._ledger = parts.ledger
        self._digest_bytes = parts.shape.digest_bytes
        self._evictor = parts.evictor
        self._announcer = parts.announcer
        self._match_tokens = parts.match_tokens
        self._hash_fn = parts.hash_fn
        self._longest = max((group.num_units for group in parts.shape.groups), default=1)
        self._lists = parts.lists
        self._companions = Companions(parts)
        groups = parts.shape.groups
        self._ordered = index_array([group.index for group in groups if group.is_ordered])
        self._others = index_array([group.index for group in groups if not group.is_ordered])
        places = [group.place if group.is_ordered else -1 for group in groups]
        self._group_places = index_array(places)

    def publish(self, row: Row, num_tokens: int, *, are_new: bool = False) -> None:
        """Make the row's full units up to `num_tokens` hittable, in the open step if there is one.

        Its request has these tokens, and the row blocks for them; where they `are_new`, nobody has
        references to those of ordered groups, not even the row.
        """
        start = self._tables.published.item(row.index)
        if self._tables.unoffered and row.index in self._tables.unoffered:
            self._offer(row, min(num_tokens // self._shape.unit_tokens, start))
        # Where every block is longer than a unit, the last unit's tokens may not be there yet.
        end = min(num_tokens, row.request.num_tokens) // self._shape.unit_tokens
        if end <= start:
            return
        if are_new:
            self.publish_new(row, start, end)
            return
        tokens, walk = self._walk(row, start, end)
        if walk.num_units:
            self._follow(row, walk, are_new=False)
        middle = start + walk.num_units
        if middle < end:
            self._tables.published[row.index] = middle
            company = self._companions.of(row, middle, end, self._follow_to)
            end = company.end
            if middle < end:
                above, unit_bytes = row.run, self._shape.unit_bytes
                offset = walk.num_units * unit_bytes
                tokens = tokens[offset : offset + (end - middle) * unit_bytes]
                self._add(row, tokens, middle, end, are_new=False)
                if company.rows:
                    self._companions.take_along(company, row, above, middle)
        self._tables.published[row.index] = end

    def publish_new(self, row: Row, start: int, end: int) -> None:
        """Do `publish` for units `[start, end)` of a row whose blocks there are new.

        Nobody has references to those of ordered groups, not even the row.
        """
        tokens, walk = self._walk(row, start, end)
        if walk.num_units:
            self._follow(row, walk, are_new=True)
            start += walk.num_units
            tokens = tokens[walk.num_units * self._shape.unit_bytes :]
        if start < end:
            self._add(row, tokens, start, end, are_new=True)
        self._tables.published[row.index] = end

    def beside_blocks(self, group: GroupShape, row: Row, start: int, end: int) -> Int32Array:
        """Return, per unit of `[start, end)`, the row's block that can stand beside it or 0."""
        if group.index in self._lists.by_group:
            return self._lists.boundary_blocks(group, row.request.request_id, start, end)
        return self.table_blocks(group, row, start, end)

    def table_blocks(self, group: GroupShape, row: Row, start: int, end: int) -> Int32Array:
        """Return, per unit of `[start, end)`, the row's block that ends there; 0 if none does."""
        return self._tables.blocks_of_units(group, row.index, start, end)

    def digest(self, request: Request, first_unit: int, end_unit: int, parent: bytes) -> bytes:
        """Return the packed digests of a request's units behind `parent`."""
        hasher = request.block_hasher
        if hasher is None:
            return join_digests(request.block_hashes[first_unit:end_unit])
        if len(request.known_block_hashes) >= end_unit:
            return request.packed_block_hashes(first_unit, end_unit)
        return join_digests(hasher.digests(request, first_unit, end_unit, BlockHash(parent)))

    # --- inside --------------------------------------------------------------------------------

    def _walk(self, row: Row, start: int, end: int) -> tuple[bytes, Walk]:
        """Return a row's units `[start, end)` as match tokens, and where they lead behind it."""
        tokens = self._match_tokens.of(row.request, start, end)
        if not row.run.children:
            return tokens, NO_WALK
        return tokens, self._tree.walk(row.run, tokens, 0, end - start)

    def _follow_to(self, row: Row, end: int) -> None:
        """Let a row end at unit `end`, behind its own end: so far the tree has its units already.

        Somebody else publishes: the row offers what may stand beside them when it does.
        """
        start = self._tables.published.item(row.index)
        tokens = self._match_tokens.of(row.request, start, end)
        walk = self._tree.walk(row.run, tokens, 0, end - start)
        self._follow(row, walk, are_new=False, is_offering=False)
        self._tables.published[row.index] = end

    def _digests_of(self, row: Row, tokens: bytes, start: int, end: int, parent: bytes) -> bytes:
        """Do `digest` for units of a row of which these are the match tokens."""
        request = row.request
        is_plain = row.is_plain and not (request.cache_salt and not start)
        is_known = len(request.known_block_hashes) >= end
        if not is_plain or is_known or request.block_hasher is None:
            return self.digest(request, start, end, parent)
        # What it is matched by are the request's own tokens, and nothing else is digested.
        size = self._shape.unit_tokens
        return join_digests(self._hash_fn.chain(BlockHash(parent), tokens, size, end - start))

    def _follow(self, row: Row, walk: Walk, *, are_new: bool, is_offering: bool = True) -> None:
        """Let the row end where the tree has its next units already; its own are doubles."""
        last, path = walk.path[-1], walk.path
        if walk.num_of_last < last.num_units:
            is_below = self._shape.is_simple and last.parent is row.run
            if is_below and last.can_hand_up and not self._tree.keeps_pasts:
                self._follow_within(row, last, walk.num_of_last, are_new=are_new)
                return
            last = path[-1] = self._tree.split(last, walk.num_of_last)
        self._tree.hold(last)
        self._tree.release(row.run)
        row.run = last
        start, end = path[0].start, last.end
        for group in self._shape.ordered:
            theirs = np.concatenate([run.ids[group.place] for run in path])
            self._note_doubles(group, row, start, theirs, are_new=are_new)
        segment = self._path_segment(row, path, start, end)
        if self._shape.others:
            if is_offering:
                self._put_beside(row, path, segment)
            else:
                self._tables.leave_unoffered(row.index, start)
        self._duplicates.note(row, segment)

    def _follow_within(self, row: Row, below: Run, num_units: int, *, are_new: bool) -> None:
        """Do `_follow` for the first units of the run below the row's, which the row's takes over.

        So an answer that is cached already is no chain of runs of a unit each.
        """
        size, start = self._digest_bytes, row.run.end
        parent = row.run.last_digest(size)
        below.settle()
        theirs, digests = below.ids[0, :num_units], below.digests[: num_units * size]
        self._tree.hand_up(below, num_units)
        self._note_doubles(self._shape.ordered[0], row, start, theirs, are_new=are_new)
        self._duplicates.note(row, self.segment(row, start, num_units, digests, parent))

    def _offer(self, row: Row, end: int) -> None:
        """Put a row's blocks beside its units up to `end`, which others have published."""
        start, run = self._tables.unoffered[row.index], row.run
        if end <= start:
            return
        path: list[Run] = []
        while run.end > start and run.parent is not None:
            run.settle()
            path.insert(0, run)
            run = run.parent
        self._put_beside(row, path, self._path_segment(row, path, start, end))
        del self._tables.unoffered[row.index]
        if end < self._tables.published.item(row.index):
            self._tables.leave_unoffered(row.index, end)

    def _note_doubles(
        self, group: GroupShape, row: Row, start: int, theirs: Int32Array, *, are_new: bool
    ) -> None:
        """Note which of a row's blocks from unit `start` on are not the tree's, but as good."""
        ours = self.table_blocks(group, row, start, start + len(theirs))
        doubles = ((ours != theirs) & (ours != 0)).nonzero()[0]
        if len(doubles) < len(ours):
            # Shared with a fork that published them: the tree's hold is enough.
            is_same = (ours == theirs) & (ours != 0)
            self._store.references[ours[is_same]] -= 1
        if len(doubles):
            if are_new:
                self._store.references[ours[doubles]] = 1
            columns = (doubles + start) // group.num_units
            row.doubles.setdefault(group.index, []).extend(columns.tolist())

    def _put_beside(self, row: Row, path: list[Run], segment: Segment) -> None:
        """Put the row's blocks of other groups where the tree lacks some, beside a segment."""
        store = self._store
        start, end = segment.first_unit, segment.first_unit + segment.num_units
        handles: HandleArray = np.full(
            (len(self._shape.groups), end - start), NULL_HANDLE, dtype=np.int64
        )
        for group in self._shape.others:
            ours = self.beside_blocks(group, row, start, end)
            theirs = np.concatenate([run.handles[group.place] for run in path])
            theirs = theirs[start - path[0].start :][: end - start]
            lacks = ~store.are_valid(theirs) & (ours != 0) & (store.seals[ours] == NO_CONTENT)
            if not lacks.any():
                continue
            handles[group.index, lacks] = store.handles_of(ours[lacks])
            for run in path:
                first, last = max(run.start, start), min(run.end, end)
                if first >= last:
                    continue
                lacking = lacks[first - start : last - start]
                lent = handles[group.index, first - start : last - start]
                of_run = run.handles[group.place, first - run.start : last - run.start]
                of_run[lacking] = lent[lacking]
            self.fill_single(group, ours[lacks])
        if (handles != NULL_HANDLE).any():
            if self._evictor.digest_of.size:
                beside = handles[[group.index for group in self._shape.others]]
                self.note_digests(beside, segment.digests[(start - end) * self._digest_bytes :])
            self.conclude(Published([segment], handles, is_content=False))

    def _path_segment(self, row: Row, path: list[Run], start: int, end: int) -> Segment:
        """Return units of a path that the row follows as a segment."""
        first, size = path[0], self._digest_bytes
        digests = b"".join([run.digests for run in path])
        at = (start - first.start) * size
        if at:
            parent = digests[at - size : at]
        else:
            parent = b"" if first.parent is None else first.parent.last_digest(size)
        return self.segment(
            row, start, end - start, digests[at : (end - first.start) * size], parent
        )

    def _add(self, row: Row, tokens: bytes, start: int, end: int, *, are_new: bool) -> None:
        """Let the row's units `[start, end)`, of these match tokens, become the tree's."""
        store, shape = self._store, self._shape
        parent = row.run.last_digest(self._digest_bytes)
        digests = self._digests_of(row, tokens, start, end, parent)
        ids = self._blocks(row, start, end)
        blocks: IndexArray = ids.astype(np.intp)
        if are_new:
            num_blocks = self._fill(blocks)
        else:
            # Others may have references too: copies, and forks that follow.
            ordered = blocks.take(self._ordered, axis=0)
            ordered = ordered[ordered != NULL_BLOCK_ID]
            left = store.references[ordered] - 1
            num_blocks = self._fill(blocks)
            store.references[ordered] = left
        is_told = self._ledger.is_open or self._announcer.tells_contents or self._announcer.offload
        handles = store.handles_of(blocks) if is_told or shape.others else _NO_HANDLES
        beside: HandleArray = np.empty((0, end - start), dtype=np.int64)
        if shape.others:
            ids, beside = ids.take(self._ordered, axis=0), handles.take(self._others, axis=0)
        if self._evictor.digest_of.size:
            self.note_digests(beside, digests)
        row.run = self._tree.extend(row.run, tokens, ids, beside, digests)
        if is_told:
            segment = self.segment(row, start, end - start, digests, parent)
            published = Published([segment], handles, is_content=True)
            if num_blocks == blocks.size:
                published.block_ids, published.num_cut_short = blocks, store.num_cut_short
            self.conclude(published)

    def _fill(self, blocks: IndexArray) -> int:
        """Let these blocks, a row for each group, have contents; return how many there are."""
        return self._store.fill_units(
            blocks, self._group_places, self.seal(), self._evictor.group_of
        )

    def _blocks(self, row: Row, start: int, end: int) -> Int32Array:
        """Return copies of a row's blocks that end with units `[start, end)`, a row per group."""
        shape = self._shape
        if shape.is_simple:
            own: Int32Array = self._tables.tables[0][row.index : row.index + 1, start:end].copy()
            return own
        ids: Int32Array = np.empty((len(shape.groups), end - start), dtype=np.int32)
        for group in shape.groups:
            blocks = self.table_blocks if group.is_ordered else self.beside_blocks
            ids[group.index] = blocks(group, row, start, end)
        return ids

    def segment(
        self, row: Row, start: int, num_units: int, digests: bytes, parent: bytes
    ) -> Segment:
        """Return units of the row as a segment; its run ends with them or behind."""
        return self.segment_of(row.run, row.request, start, num_units, digests, parent)

    def segment_of(  # noqa: PLR0917 - what a segment is
        self, run: Run, request: Request, start: int, num_units: int, digests: bytes, parent: bytes
    ) -> Segment:
        """Return units of a request as a segment, with those before that a long block needs."""
        base = start
        if self._longest > 1 and start:
            base = max(0, start - self._longest + 1)
            base_parent, before = self._digests_before(run, base, start)
            digests, parent = before + digests, base_parent
        tokens = b""
        if self._announcer.tells_contents:
            unit = self._shape.unit_tokens
            tokens = request.all_token_ids[base * unit : (start + num_units) * unit].tobytes()
        return Segment(
            run,
            start,
            num_units,
            request.request_id,
            request.namespace,
            base,
            tokens,
            digests,
            parent,
            extra_keys_of(request),
        )

    def _digests_before(self, run: Run, base: int, end: int) -> tuple[bytes, bytes]:
        """Return the digest before unit `base` on the way to `run`, and those of `[base, end)`."""
        size = self._shape.digest_bytes
        parts: list[bytes] = []
        while run.start > base or run.start >= end:
            run.settle()
            parts.append(run.digests[: max(0, end - run.start) * size])
            if run.parent is None:
                return run.digests, b"".join(reversed(parts))
            run = run.parent
        run.settle()
        first = base - run.start
        parts.append(run.digests[first * size : (end - run.start) * size])
        if first:
            before = run.digests[(first - 1) * size : first * size]
        else:
            before = b"" if run.parent is None else run.parent.last_digest(size)
        return before, b"".join(reversed(parts))

    def fill_single(self, group: GroupShape, block_ids: IndexArray | Int32Array) -> None:
        if len(block_ids):
            block_ids = index_array(block_ids)
            self._store.fill(block_ids, self.seal())
            self._evictor.group_of[block_ids] = group.index
            self._store.is_single[block_ids] = True

    def note_digests(self, handles: HandleArray, digests: bytes) -> None:
        """Note what single blocks beside new units hold, a row of handles for each group."""
        packed = np.frombuffer(digests, np.uint8).reshape(-1, self._shape.digest_bytes)
        for group in self._shape.others:
            ids = self._store.ids_of(handles[group.place])
            units = np.flatnonzero(ids)
            self._evictor.digest_of[ids[units]] = packed[units]

    def seal(self) -> int:
        return self._ledger.number() if self._ledger.is_open else SEALED

    def conclude(self, published: Published) -> None:
        """Let blocks wait for the open step; outside of any they are sealed already."""
        if self._ledger.is_open:
            self._ledger.add(published)
            return
        store = self._store
        ids: IndexArray = index_array(store.ids_of(published.handles))
        self._announcer.sealed(published, ids, ids != 0)
