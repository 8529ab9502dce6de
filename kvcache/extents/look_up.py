"""Which cached prefix a request can start from: walk, fit, and the blocks it would adopt.

First step of a request's way through the fast core. Changes nothing; what was found last is
remembered until something changes, so that adopting it does not search again. Refuses to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array
from kvcache.core import CacheHit
from kvcache.errors import BlockError, RequestError
from kvcache.extents.block_store import NULL_HANDLE, SEALED
from kvcache.extents.hits import HitFinder, Kept
from kvcache.extents.parts import CoreParts
from kvcache.extents.run import HandleArray, Run
from kvcache.extents.shape import GroupShape
from kvcache.extents.tree import NO_WALK, Walk
from kvcache.request import Request

BoolArray = npt.NDArray[np.bool_]


class Match(NamedTuple):
    """A hit and where it lies: unit `num_units` ends in the run `last`, maybe in its middle.

    Where no group reads the whole prefix, a hit may end behind what the tree has of it: behind unit
    `num_matched` in `last`, or behind the root where that is None.
    """

    hit: CacheHit
    last: Run | None
    num_units: int
    num_matched: int


class LookUp:
    """Looks requests up in one tree."""

    def __init__(self, parts: CoreParts, finder: HitFinder) -> None:
        """Look up in `tree`; `ledger` says for whom unsealed blocks can be used."""
        self._shape = parts.shape
        self._unit_tokens = parts.shape.unit_tokens
        # One table, a block for each unit: what a walk finds are its blocks.
        self._is_simple = parts.shape.is_simple
        self._store = parts.store
        self._tree = parts.tree
        self._ledger = parts.ledger
        self._finder = finder
        self._match_tokens = parts.match_tokens
        self.no_hit = CacheHit(tuple(_no_ids() for _ in parts.shape.groups), 0)
        self._state_groups = tuple(
            group for group in parts.shape.others if group.spec.num_state_blocks is not None
        )
        self._found: tuple[Request, tuple[int, int], Match | None] | None = None

    def forget(self) -> None:
        """Something has changed: what was found does not hold any more."""
        self._found = None

    def find(self, request: Request) -> Match | None:
        """Return the longest hit of at most `num_tokens - 1` tokens, None if there is none."""
        found, state = self._found, (request.num_tokens, request.num_truncations)
        if found is not None and found[0] is request and found[1] == state:
            return found[2]
        match = self._find(request, request.num_tokens - 1)
        self._found = request, state, match
        return match

    def find_again(self, request: Request, hit: CacheHit) -> Match:
        """Return where a hit that was found before lies.

        Raises:
            RequestError: it is not there any more, or is not a prefix of this request.
        """
        match = self.find(request)
        if match is not None and (
            match.hit is hit or _are_same(match.hit, hit) or match.hit == hit
        ):
            return match
        root = self._tree.roots.get(request.namespace)
        num_units = hit.num_tokens // self._shape.unit_tokens
        if root is not None and hit.num_tokens <= request.num_tokens:
            tokens = self._match_tokens.leading(request, num_units)
            walk = self._tree.walk(root, tokens, 0, num_units)
            if walk.num_units == num_units and self._leads_to(walk.path[-1], hit, num_units):
                return Match(hit, walk.path[-1], num_units, num_units)
        raise RequestError(
            f"request {request.request_id}: its {hit.num_tokens} computed tokens are not cached in "
            "these blocks any more: look it up again"
        )

    def locate(self, hit: CacheHit) -> tuple[Match, Request | None]:
        """Return where a hit lies, and the request it was found for, if that is known.

        Raises:
            BlockError: its blocks do not hold that prefix any more.
        """
        num_units = hit.num_tokens // self._shape.unit_tokens
        found = self._found
        if found is not None and found[2] is not None and found[2].hit == hit:
            return found[2], found[0]
        for run in self._tree.runs():
            if run.start < num_units <= run.end and self._leads_to(run, hit, num_units):
                return Match(hit, run, num_units, num_units), None
        raise BlockError(
            f"the blocks of a hit of {hit.num_tokens} tokens do not hold it any more: look it up "
            "again"
        )

    def _leads_to(self, run: Run, hit: CacheHit, num_units: int) -> bool:
        """Say whether the way to unit `num_units` in `run` has the blocks of a hit."""
        if len(hit.block_ids) != len(self._shape.groups):
            return False
        path = [run]
        while (above := path[-1].parent) is not None and above.num_units:
            path.append(above)
        path.reverse()
        for each in path:
            each.settle()
        walk = Walk(path, num_units, num_units - run.start)
        for group in self._shape.groups:
            num_blocks = hit.num_tokens // group.block_size
            ids = hit.block_ids[group.index]
            if group.is_ordered:
                if not np.array_equal(self._adopted(walk, group, Kept(0, num_blocks)), ids):
                    return False
                continue
            handles = self._beside(walk, group, 0, num_blocks)
            there = np.where(self._store.are_valid(handles), self._store.ids_of(handles), 0)
            if len(ids) != num_blocks or ((ids != 0) & (ids != there)).any():
                return False
        return True

    def _find(self, request: Request, max_tokens: int) -> Match | None:
        root = self._tree.roots.get(request.namespace)
        max_units = max_tokens // self._unit_tokens
        if not max_units or (root is None and self._shape.ordered):
            return None
        walk = NO_WALK
        if root is not None:
            tokens = self._match_tokens.leading(request, max_units)
            walk = self._tree.walk(root, tokens, 0, max_units)
        num_units = walk.num_units if self._shape.ordered else max_units
        if num_units and self._shape.ordered and self._waits_for_others():
            num_units = self._usable_units(walk)
        if not num_units:
            return None
        if not self._shape.others:
            num_tokens = self._finder.fit_ordered(num_units * self._unit_tokens)
            if self._is_simple and num_tokens:
                return _plain_match(walk, num_tokens, num_tokens // self._unit_tokens)
            kept = [Kept(0, num_tokens // group.block_size) for group in self._shape.groups]
            return self._match(walk, root, num_tokens, kept) if num_tokens else None
        barred = self._states_of_open_step()

        def is_there(group: int, start: int, end: int) -> BoolArray:
            return self._are_there(walk, self._shape.groups[group], start, end, barred)

        fit = self._finder.fit(num_units * self._shape.unit_tokens, is_there)
        return self._match(walk, root, fit.num_tokens, fit.kept) if fit.num_tokens else None

    def _match(self, walk: Walk, root: Run | None, num_tokens: int, kept: Sequence[Kept]) -> Match:
        """Return a hit of so many tokens on the way of a walk, with what is kept of each group."""
        ids = [
            self._adopted(walk, group, of_group)
            for group, of_group in zip(self._shape.groups, kept, strict=True)
        ]
        num_units = num_tokens // self._shape.unit_tokens
        matched = min(num_units, walk.num_units)
        last = next((run for run in reversed(walk.path) if run.start < matched), root)
        return Match(CacheHit(tuple(ids), num_tokens), last, num_units, matched)

    def _usable_units(self, walk: Walk) -> int:
        """Return how many of the units are sealed, or wait for a step of the same client."""
        for run in walk.path:
            usable = self._are_usable(run.ids) | (run.ids == 0)
            bad = np.flatnonzero(~usable.all(axis=0))
            if len(bad):
                return min(walk.num_units, run.start + int(bad[0]))
        return walk.num_units

    def _waits_for_others(self) -> bool:
        waiting = self._store.num_unsealed
        if not waiting:
            return False
        if len(waiting) > 1:
            return True
        return not self._ledger.is_open or self._ledger.known_number() not in waiting

    def _are_usable(self, block_ids: IndexArray | Int32Array) -> BoolArray:
        seals = self._store.seals[block_ids]
        usable: BoolArray = seals == SEALED
        own = self._ledger.known_number() if self._ledger.is_open else None
        if own is not None:
            usable |= seals == own
        return usable

    def _states_of_open_step(self) -> HandleArray | None:
        """Return the states that the open step only just writes: nobody can start from them."""
        if not self._state_groups or not self._ledger.is_open:
            return None
        rows = [group.index for group in self._state_groups]
        parts = [published.handles[rows].ravel() for published in self._ledger.of_open_step()]
        return np.concatenate(parts) if parts else None

    def _are_there(
        self, walk: Walk, group: GroupShape, start: int, end: int, barred: HandleArray | None
    ) -> BoolArray:
        handles = self._beside(walk, group, start, end)
        if len(handles) < end - start:  # the tree ends before
            handles = np.pad(handles, (0, end - start - len(handles)), constant_values=NULL_HANDLE)
        there = self._store.are_valid(handles)
        if self._waits_for_others():
            there &= self._are_usable(self._store.ids_of(handles))
        if barred is not None and group in self._state_groups:
            there &= ~np.isin(handles, barred)
        return there

    def _beside(self, walk: Walk, group: GroupShape, start: int, end: int) -> HandleArray:
        """Return the handles of a group's blocks `[start, end)`."""
        length = group.num_units
        first, last = start * length, min(end * length, walk.num_units)
        parts: list[HandleArray] = []
        for run in reversed(walk.path):
            if run.start < last:
                low = max(0, first - run.start)
                parts.append(run.handles[group.place, low : last - run.start])
            if run.start <= first:
                break
        if not parts:
            return np.empty(0, dtype=np.int64)
        units = parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
        return units if length == 1 else units[length - 1 :: length]

    def _adopted(self, walk: Walk, group: GroupShape, kept: Kept) -> Int32Array:
        """Return the blocks of a group that a hit adopts, null before the first."""
        if not group.is_ordered:
            ids = np.zeros(kept.end, dtype=np.int32)
            if kept.start < kept.end:
                handles = self._beside(walk, group, kept.start, kept.end)
                ids[kept.start :] = self._store.ids_of(handles)
            return ids
        parts = [run.ids[group.place] for run in walk.path]
        units = parts[0] if len(parts) == 1 else np.concatenate(parts)
        length = group.num_units
        if length == 1:
            return units if len(units) == kept.end else units[: kept.end]
        return units[length - 1 :: length][: kept.end]


def _plain_match(walk: Walk, num_tokens: int, num_units: int) -> Match:
    """Return the hit of a walk's first units, where each has one block, of the only group."""
    path = walk.path
    last = path[-1]
    if len(path) == 1:
        ids = last.ids[0]
    else:
        ids = np.concatenate([run.ids[0] for run in path])
        if last.start >= num_units:
            last = next(run for run in reversed(path) if run.start < num_units)
    if len(ids) != num_units:
        ids = ids[:num_units]
    return Match(CacheHit((ids,), num_tokens), last, num_units, num_units)


def _are_same(hit: CacheHit, other: CacheHit) -> bool:
    """Say whether a hit has come back as it was given out; equal ones may be others."""
    return hit.num_tokens == other.num_tokens and (
        hit.block_ids is other.block_ids
        or (
            len(hit.block_ids) == len(other.block_ids)
            and all(map(is_, hit.block_ids, other.block_ids))
        )
    )


def _no_ids() -> Int32Array:
    return np.empty(0, dtype=np.int32)
