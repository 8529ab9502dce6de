"""What a report on steps does to the blocks that wait for them: sealed, or withdrawn.

Between the step ledger and the blocks. Refuses to guess which steps are meant.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import index_array
from kvcache.extents.block_store import NULL_HANDLE, SEALED
from kvcache.extents.duplicates import DuplicateMerger
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment
from kvcache.extents.rows import Row
from kvcache.extents.run import Run
from kvcache.extents.withdrawal import Withdrawal


class Settlement:
    """Settles the steps of one core."""

    def __init__(
        self, parts: CoreParts, withdrawal: Withdrawal, duplicates: DuplicateMerger
    ) -> None:
        """Work on the parts of one core."""
        self._store = parts.store
        self._ledger = parts.ledger
        self._announcer = parts.announcer
        self._evictor = parts.evictor
        self._withdrawal = withdrawal
        self._duplicates = duplicates
        self._lists = parts.lists
        announcer = parts.announcer
        self._is_told = announcer.tells_contents or announcer.offload is not None
        self._unit_tokens = parts.shape.unit_tokens
        self._ordered = [group.index for group in parts.shape.ordered]
        self._others = [group.index for group in parts.shape.others]

    def complete(self, client_id: str, through_step: int) -> list[Row]:
        """Seal what the client's steps up to `through_step` made hittable and still stands.

        Returns the rows whose content could not be sealed: it is withdrawn.
        """
        touched: dict[int, Row] = {}
        ready: list[Published] = []
        for published in self._ledger.take_through(client_id, through_step):
            has_others = len(self._store.num_unsealed) > 1 or published.doubles_of is not None
            if self._is_told or has_others:  # one after the other
                self._seal(ready)
                ready = []
            if published.doubles_of is not None:
                self._duplicates.take_over(published.doubles_of, published.segments[0])
                continue
            if has_others and published.is_content and self._ordered:
                self._withdraw_orphans(published, touched)
            ready.append(published)
        self._seal(ready)
        self._ledger.forget_if_idle(client_id, self._store.num_unsealed)
        return list(touched.values())

    def fail(self, client_id: str, from_step: int) -> list[Row]:
        """Withdraw what the client's steps from `from_step` on made hittable, last steps first.

        Returns the rows whose content that was, or that held it.
        """
        touched: dict[int, Row] = {}
        for published in self._ledger.take_from(client_id, from_step):
            start = 0
            for segment in published.segments:
                end = start + segment.num_units
                self._withdraw(published, segment, start, end, touched)
                start = end
        self._ledger.forget_if_idle(client_id, self._store.num_unsealed)
        return list(touched.values())

    # --- inside --------------------------------------------------------------------------------

    def _seal(self, ready: list[Published]) -> None:
        """Seal what of these blocks still stands; only of a single one anybody is told."""
        if not ready:
            return
        store = self._store
        untouched = [
            published.block_ids
            for published in ready
            if published.block_ids is not None and published.num_cut_short == store.num_cut_short
        ]
        if len(untouched) == len(ready):
            ids = untouched[0] if len(ready) == 1 else np.concatenate(untouched, axis=1)
            store.seal(ids.ravel(), store.seals.item(ids.item(0)))
            if self._is_told:
                self._announcer.sealed(ready[0], ids, np.ones(ids.shape, np.bool_))
            return
        handles = ready[0].handles
        if len(ready) > 1:
            handles = np.concatenate([published.handles.ravel() for published in ready])
        ids = store.ids_of(handles)
        is_new = store.are_waiting(handles, ids)
        new = ids.ravel() if np.count_nonzero(is_new) == ids.size else ids[is_new]
        if len(new):
            store.seal(new, int(store.seals[new[0]]))
            if len(ready) == 1:
                self._announcer.sealed(ready[0], ids, is_new)

    def _withdraw_orphans(self, published: Published, touched: dict[int, Row]) -> None:
        """Withdraw segments behind content that still waits for another client.

        Nobody is told of a content before its parent; and whoever had the parent's content complete
        has gone with its block.
        """
        start = 0
        for segment in published.segments:
            end = start + segment.num_units
            if segment.first_unit and self._is_orphan(published, segment, start, end):
                self._withdraw(published, segment, start, end, touched)
            start = end

    def _is_orphan(self, published: Published, segment: Segment, start: int, end: int) -> bool:
        if not self._store.are_valid(published.handles[self._ordered, start:end]).any():
            return False
        before = _run_at(segment.run, segment.first_unit - 1)
        before.settle()
        ids = before.ids[:, segment.first_unit - 1 - before.start]
        return bool((self._store.seals[ids] > SEALED).any())

    def _withdraw(
        self,
        published: Published,
        segment: Segment,
        start: int,
        end: int,
        touched: dict[int, Row],
    ) -> None:
        store = self._store
        if published.is_content and self._ordered:
            handles = published.handles[self._ordered, start:end]
            if store.are_valid(handles).any():
                run = _run_at(segment.run, segment.first_unit)
                for row in self._withdrawal.cut(run, segment.first_unit):
                    touched[row.index] = row
        self._lists.take_back(segment.request_id, segment.first_unit * self._unit_tokens)
        if self._others:
            handles = published.handles[self._others, start:end]
            ids = index_array(np.unique(store.ids_of(handles[store.are_valid(handles)])))
            if len(ids):
                self._evictor.forget_single(ids)
        own: Row | None = None
        ordered = published.handles[self._ordered, start:end]
        if not self._ordered or (published.is_content and (ordered == NULL_HANDLE).all()):
            # No block ends in these units: there is nothing to forget, but the row was there.
            own = self._withdrawal.rewind(segment.request_id, segment.first_unit)
        elif published.doubles_of is not None:
            own = self._withdrawal.rewind_doubles(published.doubles_of, segment.first_unit)
        elif not published.is_content:
            own = self._withdrawal.unoffer(segment.request_id, segment.first_unit)
        if own is not None:
            touched[own.index] = own


def _run_at(run: Run, unit: int) -> Run:
    """Return the run on the way up from `run` in which `unit` lies now."""
    standing = run.standing()
    while standing.start > unit and standing.parent is not None:
        # Of a run that has gone, what it continued may have been absorbed since.
        standing = standing.parent.standing()
    return standing
