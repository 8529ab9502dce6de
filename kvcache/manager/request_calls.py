"""The per-request calls: one request at a time, its tokens in the caller's hands.

The caller keeps the `Request`, appends its tokens and sets `num_computed_tokens`; what is done
here is what a step does for a batch of one. Refuses requests that steps own, and hits that are no
longer true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.arguments import MAX_INT, are_ints, as_int, check_kind
from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.commands import BlockTablePatch
from kvcache.core import CacheHit, Core, NewestState, TableChange, patch_of
from kvcache.errors import RequestError
from kvcache.ids import NULL_BLOCK_ID
from kvcache.manager.admission import Admission, Demand
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.cache_control import CacheControl
from kvcache.manager.forks import Forks, require_continuation
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.request_book import KnownRequest, RequestBook
from kvcache.manager.slots import CALLER
from kvcache.manager.tiers import TierLink
from kvcache.request import BlockHasher, Request, check_request


class Wanted(NamedTuple):
    """The counts of one `allocate_slots` call."""

    num_new_tokens: int
    num_new_computed_tokens: int = 0
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_external_computed_tokens: int = 0
    num_encoder_tokens: int = 0


NOTHING = Wanted(0)
"""No new tokens of any kind."""


def checked_wanted(request: Request, *counts: int) -> Wanted:
    """Return the counts of a call as plain integers, in the order of `Wanted`.

    Raises:
        RequestError: the request is none that its caller may change, or a count is no integer of
            at least 0.
    """
    check_request(request)
    if not are_ints(counts) or min(counts) < 0 or max(counts) > MAX_INT:
        counts = tuple(
            [
                as_int(f"request {request.request_id}: {name}", count, error=RequestError)
                for name, count in zip(Wanted._fields, counts, strict=True)
            ]
        )
    return Wanted(*counts)


class RequestCalls:
    """What callers may do with single requests."""

    def __init__(
        self,
        book: RequestBook,
        core: Core,
        admission: Admission,
        control: CacheControl,
        tiers: TierLink,
        *,
        hasher: BlockHasher,
        block_sizes: Sequence[int],
        limits: ModelLimits,
    ) -> None:
        """Work on the same book and core as steps do."""
        self._book = book
        self._core = core
        self._admission = admission
        self._control = control
        self._tiers = tiers
        self._hasher = hasher
        self._block_sizes = tuple(block_sizes)
        self._limits = limits
        self._forks = Forks(book, core)
        self._no_blocks = KVCacheBlocks([EMPTY_INT32] * len(self._block_sizes))
        # First stale column per group of the worker's table, by slot, until a patch is taken.
        self._stale: dict[int, list[int | None]] = {}

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Look a request up and count that."""
        check_kind("request", request, Request, RequestError)
        self._prepare(request)
        hit = self._admission.look_up(request)
        self._admission.record(request, hit.num_tokens)
        blocks = KVCacheBlocks(hit.block_ids, look_up_number=self._control.state_number)
        return blocks, hit.num_tokens

    def allocate_slots(
        self,
        request: Request,
        wanted: Wanted,
        new_computed_blocks: KVCacheBlocks | None,
        *,
        delays_caching: bool,
    ) -> KVCacheBlocks | None:
        """Reserve blocks for a request; seat it if it is not known."""
        _check_wanted(request, wanted, self._limits)
        hit, look_up_number = _adopted(wanted, new_computed_blocks)
        self._prepare(request)
        known = self._book.require_caller_owned(request)
        newest = None if known is None else self._newest_state(known, wanted)
        demand = _demand(request, wanted, newest, delays_caching=delays_caching)
        if hit is not None:
            self._check_hit(request, known, hit, look_up_number)
        self._control.changed()
        if known is None:
            admitted = self._admission.seat(request, CALLER, demand, hit)
            if admitted is None:
                self._admission.require_hope(request)
                return None
            known, changes = admitted.known, admitted.changes
        else:
            reserved = self._core.reserve(request, self._admission.reservation(demand))
            if reserved is None:
                self._admission.require_limit(request, demand.num_own_tokens)
                return None
            changes = reserved
            self._book.slots.num_own[known.slot] = demand.num_own_tokens
        known.num_draft_tokens = wanted.num_draft_tokens
        self._note_stale(known.slot, changes)
        return self._new_blocks(demand, changes, hit)

    def fork(self, parent: Request, child: Request) -> KVCacheBlocks | None:
        """Let a new request share the blocks of a known one."""
        check_request(parent)
        check_request(child)
        known = self._book.require_caller_owned(parent)
        if known is None or not known.is_running:
            raise RequestError(
                f"request {parent.request_id} is not known and cannot be forked: allocate slots "
                "for it first"
            )
        if self._book.get(child.request_id) is not None:
            raise RequestError(
                f"request {child.request_id} is to be forked from {parent.request_id} but known "
                "already: use another id"
            )
        require_continuation(parent, child, self._limits.max_model_len)
        self._newest_state(known, NOTHING)
        child.attach_block_hasher(self._hasher)
        self._control.refresh()
        self._control.changed()
        seated = self._forks.seat(known, child, parent.num_computed_tokens)
        if seated is None:
            return None
        self._note_stale(seated.known.slot, seated.changes)
        return KVCacheBlocks(self._core.block_ids(child.request_id))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make full blocks of a running request hittable."""
        check_request(request)
        what = f"request {request.request_id}: num_computed_tokens"
        num_computed_tokens = as_int(what, num_computed_tokens, error=RequestError)
        known = self._book.require_caller_owned(request)
        if known is None:
            raise RequestError(
                f"request {request.request_id} has no blocks to cache: allocate slots for it first"
            )
        if num_computed_tokens > request.num_tokens:
            raise RequestError(
                f"request {request.request_id}: cannot cache {num_computed_tokens} tokens, it has "
                f"{request.num_tokens}: pass 0 to that number"
            )
        self._control.changed()
        self._core.commit(request, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give a request's blocks back and forget it; nothing if it is not known."""
        check_request(request)
        known = self._book.require_caller_owned(request)
        if known is None:
            return
        self._control.changed()
        self._stale.pop(known.slot, None)
        self._book.forget(known)
        self._tiers.on_request_finished(request.request_id)
        self._control.refresh()

    def free_block_hashes(self, request: Request) -> None:
        """Make no further block of a request hittable; nothing if it is not known."""
        check_request(request)
        if self._book.require_caller_owned(request) is not None:
            self._core.forget_hashes(request)

    def take_patch(self) -> BlockTablePatch:
        """Return the table changes of all calls since the last time."""
        changes = []
        for slot, columns in self._stale.items():
            request = self._book.slots.request_in(slot)
            if request is None:
                continue
            for group, ids in enumerate(self._core.block_ids(request.request_id)):
                first = columns[group]
                if first is not None and first < len(ids):
                    changes.append((slot, TableChange(group, first, int32_array(ids[first:]))))
        self._stale.clear()
        return patch_of(changes)

    def _prepare(self, request: Request) -> None:
        """Refuse a request of another model epoch; give it the hasher of this manager."""
        if self._book.get(request.request_id) is None:
            epoch = request.namespace.model_epoch
            if epoch != self._control.model_epoch:
                raise RequestError(
                    f"request {request.request_id} is of model epoch {epoch}, the weights are of "
                    f"epoch {self._control.model_epoch}: create it with "
                    "model_epoch=manager.model_epoch"
                )
        request.attach_block_hasher(self._hasher)
        self._control.refresh()

    def _newest_state(self, known: KnownRequest, wanted: Wanted) -> NewestState | None:
        """Where the last forward of a running request ended; None where no states are kept.

        Raises:
            RequestError: it was not where the caller says, or has other encoder tokens.
        """
        request = known.request
        if wanted.num_encoder_tokens not in (0, known.num_encoder_tokens):
            raise RequestError(
                f"request {request.request_id} was admitted with {known.num_encoder_tokens} "
                f"encoder tokens, not {wanted.num_encoder_tokens}: pass that number or 0"
            )
        if not self._limits.keeps_states:
            return None
        num_computed = request.num_computed_tokens
        if wanted.num_external_computed_tokens:
            return NewestState(num_computed + wanted.num_external_computed_tokens, 0)
        num_own = int(self._book.slots.num_own[known.slot])
        num_accepted = num_computed - num_own
        if not 0 <= num_accepted <= known.num_draft_tokens:
            raise RequestError(
                f"request {request.request_id} has {num_computed} computed tokens, but its last "
                f"slots were for {num_own} and {known.num_draft_tokens} drafts, and states are "
                "written over: count what was computed, or free it and begin again"
            )
        return NewestState(num_own, num_accepted)

    def _check_hit(
        self,
        request: Request,
        known: KnownRequest | None,
        hit: CacheHit,
        look_up_number: int | None,
    ) -> None:
        """Refuse to adopt blocks that are not what a look-up finds now."""
        if known is not None:
            raise RequestError(
                f"request {request.request_id} has blocks already and cannot adopt "
                f"{hit.num_tokens} computed tokens: pass new_computed_blocks on the first call only"
            )
        covered = [
            len(ids) * size for ids, size in zip(hit.block_ids, self._block_sizes, strict=False)
        ]
        wanted = [hit.num_tokens] * len(self._block_sizes)
        if len(hit.block_ids) != len(self._block_sizes) or covered != wanted:
            raise RequestError(
                f"request {request.request_id}: new_computed_blocks cover {covered} tokens of the "
                f"groups, num_new_computed_tokens is {hit.num_tokens}: pass both as "
                "get_computed_blocks returned them"
            )
        if look_up_number != self._control.state_number and self._admission.look_up(request) != hit:
            raise RequestError(
                f"request {request.request_id}: the cache has changed since its "
                f"{hit.num_tokens} computed tokens were found: call get_computed_blocks again"
            )

    def _note_stale(self, slot: int, changes: Sequence[TableChange]) -> None:
        if not changes:
            return
        columns = self._stale.setdefault(slot, [None] * len(self._block_sizes))
        for change in changes:
            first = columns[change.group]
            columns[change.group] = (
                change.first_index if first is None else min(first, change.first_index)
            )

    def _new_blocks(
        self, demand: Demand, changes: Sequence[TableChange], hit: CacheHit | None
    ) -> KVCacheBlocks:
        """The blocks that entered the tables, without those that the request adopted."""
        if not changes:
            return self._no_blocks
        new = [EMPTY_INT32] * len(self._block_sizes)
        unhashed = [EMPTY_INT32] * len(self._block_sizes)
        for change in changes:
            group = change.group
            num_adopted = 0 if hit is None else len(hit.block_ids[group])
            entered = change.block_ids[max(0, num_adopted - change.first_index) :]
            first_index = max(num_adopted, change.first_index)
            without = self._unhashed(demand, group, first_index, entered)
            new[group] = np.concatenate((new[group], entered)) if len(new[group]) else entered
            unhashed[group] = (
                np.concatenate((unhashed[group], without)) if len(unhashed[group]) else without
            )
        return KVCacheBlocks(new, unhashed)

    def _unhashed(
        self, demand: Demand, group: int, first_index: int, block_ids: Int32Array
    ) -> Int32Array:
        """Those of the blocks from column `first_index` on whose content has no hash."""
        size = self._block_sizes[group]
        num_full = demand.num_cached_tokens // size
        if group not in self._limits.state_groups:
            return block_ids[max(0, num_full - first_index) :]
        has_none = block_ids != NULL_BLOCK_ID
        # Only a state at the very end of what is cached has a hash.
        hashed = num_full - 1 - first_index
        if demand.num_cached_tokens == num_full * size and 0 <= hashed < len(block_ids):
            has_none[hashed] = False
        unhashed: Int32Array = block_ids[has_none]
        return unhashed


def _adopted(wanted: Wanted, blocks: KVCacheBlocks | None) -> tuple[CacheHit | None, int | None]:
    """The hit that a call brings, and the state of the cache it was found in."""
    if not blocks and not wanted.num_new_computed_tokens:
        return None, None
    ids = () if blocks is None else blocks.id_arrays
    hit = CacheHit(ids, wanted.num_new_computed_tokens)
    return hit, None if blocks is None else blocks.look_up_number


def _demand(
    request: Request, wanted: Wanted, newest: NewestState | None, *, delays_caching: bool
) -> Demand:
    start = (
        request.num_computed_tokens
        + wanted.num_new_computed_tokens
        + wanted.num_external_computed_tokens
    )
    end = start + wanted.num_new_tokens
    own_end = end - wanted.num_draft_tokens
    return Demand(
        start,
        end + wanted.num_lookahead_tokens,
        0 if delays_caching else min(own_end, request.num_tokens),
        own_end,
        wanted.num_encoder_tokens,
        newest,
    )


def _check_wanted(request: Request, wanted: Wanted, limits: ModelLimits) -> None:
    """Refuse what `allocate_slots` cannot mean."""
    request_id = request.request_id
    if wanted.num_encoder_tokens:
        limits.require_encoder_tokens(request_id, wanted.num_encoder_tokens)
    if wanted.num_draft_tokens:
        limits.require_drafts(request_id, wanted.num_draft_tokens)
    num_new, num_draft = wanted.num_new_tokens, wanted.num_draft_tokens
    adopted = wanted.num_new_computed_tokens + wanted.num_external_computed_tokens
    if num_new + adopted == 0:
        raise RequestError(
            f"request {request_id}: no new tokens and none to adopt: pass num_new_tokens of at "
            "least 1"
        )
    if num_draft > num_new:
        raise RequestError(
            f"request {request_id}: {num_draft} draft tokens of {num_new} new ones: drafts are "
            "part of num_new_tokens"
        )
    end = request.num_computed_tokens + adopted + num_new - num_draft
    if end > request.num_tokens:
        raise RequestError(
            f"request {request_id}: {request.num_computed_tokens} computed, {adopted} adopted and "
            f"{num_new - num_draft} new tokens make {end}, but it has {request.num_tokens} tokens: "
            "append the tokens first, or pass fewer"
        )
    if end > limits.max_model_len:
        raise RequestError(
            f"request {request_id}: {end} tokens, the model takes {limits.max_model_len}: finish "
            "the request"
        )
