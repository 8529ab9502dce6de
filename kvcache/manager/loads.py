"""Prefixes that come from a tier below: blocks for them, hittable when their bytes are there.

Beside the steps of requests. A request that waits for a load has no blocks itself; a stand-in with
its tokens, known to nobody else, holds what is being written. When every rank has the bytes the
stand-in's blocks are cached like anybody's, and the request finds them by an ordinary look-up.
Refuses to know tiers, jobs and time: their owner says how a load ended.

    begin ──▶ blocks without content ──finish──▶ cached, held ──release──▶ evictable
                        └──release, when nobody writes them──▶ free

A load may have a tail, that is end in the middle of a block: a request that was swapped out comes
back. What has no content hash cannot be found; the request forks from its stand-in, which goes.

    finish ──▶ cached + tail, held ──hand_over──▶ tables of the request ──release──▶ gone
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import RequestError
from kvcache.base.ids import NULL_BLOCK_ID
from kvcache.core import ForkOrigin, NewestState, Reservation, TableChange
from kvcache.core.flat_core import FlatCore
from kvcache.manager.cache_control import CacheControl
from kvcache.manager.request_table import RequestTable
from kvcache.manager.step_ledger import StepLedger, StepsUnderWay
from kvcache.requests.request import BlockHasher, Request, copy_request
from kvcache.specs import ceil_div


@dataclass(frozen=True, eq=False)
class PrefixLoad:
    """Blocks to be written before `num_tokens` tokens of a request can be hit.

    Block `block_ids[g][i]` of group `g` takes column `columns[g][i]` of the request's table, that
    is its tokens from `columns[g][i] * block size` on. Shapes `(n_g,)`, columns in rising order.
    `num_device_tokens` were cached already, and stay so while the load lasts.
    """

    load_id: int
    request_id: str
    num_device_tokens: int
    num_tokens: int
    columns: tuple[Int32Array, ...]
    block_ids: tuple[Int32Array, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks to be written, over all groups."""
        return sum(len(ids) for ids in self.block_ids)


@dataclass(frozen=True)
class HeldPrefix:
    """What a finished load with a tail holds for its request."""

    load_id: int
    num_tokens: int


@dataclass(eq=False)
class _Standing:
    """A stand-in for `owner` and what it waits for. `was_taken`: its blocks are the owner's now."""

    owner: Request
    request: Request
    num_tokens: int
    readers: StepsUnderWay
    has_tail: bool
    is_finished: bool = False
    was_taken: bool = False


class PrefixLoads:
    """The loads of one manager. Each begins once, is finished or abandoned, and ends."""

    def __init__(
        self,
        core: FlatCore,
        control: CacheControl,
        hasher: BlockHasher,
        ledger: StepLedger,
        table: RequestTable,
        *,
        block_sizes: tuple[int, ...],
        num_dropped_tokens: int = 0,
    ) -> None:
        """Load nothing. `block_sizes` are tokens per block of each group. A hit on what was loaded
        is shorter by `num_dropped_tokens`, and reads what comes before its own end."""
        self._core = core
        self._hasher = hasher
        self._ledger = ledger
        self._table = table
        self._control = control
        self._block_sizes = block_sizes
        self._num_dropped_tokens = num_dropped_tokens
        self._standing: dict[int, _Standing] = {}
        self._held: dict[str, int] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """Return how many loads have begun and hold blocks."""
        return len(self._standing)

    def under_way(self) -> StepsUnderWay:
        """Return the steps that are neither complete nor void now, of all clients."""
        return self._ledger.under_way()

    def are_over(self, steps: StepsUnderWay) -> bool:
        """Say whether no rank can run any of these steps any more."""
        return self._ledger.are_over(steps)

    def num_device_tokens(self, request: Request) -> int:
        """Return how many tokens of `request` are cached now. Changes nothing."""
        request.attach_block_hasher(self._hasher)
        return self._core.look_up(request).num_tokens

    def begin(
        self,
        request: Request,
        num_tokens: int,
        num_spare_blocks: int = 0,
        *,
        has_tail: bool = False,
    ) -> PrefixLoad | None:
        """Take blocks for the first `num_tokens` tokens of `request` that are not cached.

        `num_tokens` is a multiple of every group's block size, unless it is said that the load
        `has_tail`. While a request runs, `num_spare_blocks` must stay free. None, unchanged, if
        there is no room, nothing to load, or a drain: what is loaded now could never be hit.

        Raises:
            RequestError: no such number of tokens can be loaded for this request.
        """
        self._require_blocks(request, num_tokens, has_tail=has_tail)
        if self._control.is_draining:
            return None
        request.attach_block_hasher(self._hasher)
        hit = self._core.look_up(request)
        if hit.num_tokens >= num_tokens:
            return None
        load_id = next(self._numbers)
        stand_in = copy_request(request, f"\x00load {load_id}")  # as no engine's request is called
        spare = num_spare_blocks if self._table.num_taken else 0
        num_hit_tokens = max(0, num_tokens - self._num_dropped_tokens)
        wanted = Reservation(num_hit_tokens, num_tokens, 0, spare, num_tokens)
        self._control.changed()
        if self._core.reserve(stand_in, wanted, hit if hit.num_tokens else None) is None:
            return None
        self._standing[load_id] = _Standing(
            request, stand_in, num_tokens, self._ledger.under_way(), has_tail
        )
        columns, block_ids = [], []
        for size, table in zip(
            self._block_sizes, self._core.block_ids(stand_in.request_id), strict=True
        ):
            ids = int32_array(table)
            ids[: hit.num_tokens // size] = NULL_BLOCK_ID
            ids[ceil_div(num_tokens, size) :] = NULL_BLOCK_ID  # drafts' states
            kept = np.flatnonzero(ids)
            columns.append(int32_array(kept))
            block_ids.append(ids[kept])
        return PrefixLoad(
            load_id,
            request.request_id,
            hit.num_tokens,
            num_tokens,
            tuple(columns),
            tuple(block_ids),
        )

    def may_be_written(self, load_id: int) -> bool:
        """Say whether no step that was scheduled before `begin` can read the blocks any more.

        Until then they may stand in its tables: a load is not a forward, and not in order with it.

        Raises:
            RequestError: there is no such load, or it is finished already.
        """
        return self._ledger.are_over(self._unfinished(load_id).readers)

    def finish(self, load_id: int) -> None:
        """Every rank has the bytes: cache the blocks. They are held until `release`.

        Raises:
            RequestError: there is no such load, or it is finished already; nothing was changed.
        """
        standing = self._unfinished(load_id)
        self._control.changed()
        self._core.commit(standing.request, standing.num_tokens)
        standing.is_finished = True
        if standing.has_tail:
            self._held[standing.owner.request_id] = load_id

    def held_for(self, request: Request, num_hit_tokens: int) -> HeldPrefix | None:
        """Return what is held for this very request and more than its hit; None if nothing is.

        The last token of a request is always computed: a load that reaches it is of no use.
        """
        load_id = self._held.get(request.request_id)
        if load_id is None:
            return None
        standing = self._standing[load_id]
        is_more = num_hit_tokens < standing.num_tokens < request.num_tokens
        if standing.owner is not request or not is_more:
            return None
        return HeldPrefix(load_id, standing.num_tokens)

    def hand_over(
        self, load_id: int, request: Request, reservation: Reservation
    ) -> list[TableChange] | None:
        """Give a request without blocks those of its stand-in, and what else it reserves.

        Returns its whole tables; None, unchanged, if there is no room. `release` ends the load.

        Raises:
            RequestError: nothing is held for this request by this load.
        """
        standing = self._standing.get(load_id)
        if standing is None or self._held.get(request.request_id) != load_id:
            raise RequestError(f"load {load_id} holds nothing for request {request.request_id}")
        core, stand_in = self._core, standing.request
        origin = ForkOrigin(standing.num_tokens, NewestState(standing.num_tokens, 0))
        self._control.changed()
        core.fork(stand_in, request, origin)
        core.free(stand_in)  # first, or what both hold would be copied
        if core.reserve(request, reservation) is None:
            core.fork(request, stand_in, origin)
            core.free(request)
            return None
        del self._held[request.request_id]
        standing.was_taken = True
        tables = core.block_ids(request.request_id)
        return [TableChange(g, 0, int32_array(ids)) for g, ids in enumerate(tables) if ids]

    def was_taken(self, load_id: int) -> bool:
        """Say whether a load that was not released yet has been handed over."""
        standing = self._standing.get(load_id)
        return standing is not None and standing.was_taken

    def release(self, load_id: int) -> None:
        """Let a load's blocks go: cached ones can be evicted from now on, others are free again.

        Call it for a load that is not finished only when no rank can write to its blocks any more.

        Raises:
            RequestError: there is no such load; nothing was changed.
        """
        standing = self._standing.get(load_id)
        if standing is None:
            raise RequestError(f"load {load_id} is not known: it was never begun, or has ended")
        self._control.changed()
        del self._standing[load_id]
        if self._held.get(standing.owner.request_id) == load_id:
            del self._held[standing.owner.request_id]
        self._core.free(standing.request)

    def _unfinished(self, load_id: int) -> _Standing:
        standing = self._standing.get(load_id)
        if standing is None or standing.is_finished:
            state = "is not known" if standing is None else "is finished already"
            raise RequestError(f"load {load_id} {state}: finish each load that was begun, once")
        return standing

    def _require_blocks(self, request: Request, num_tokens: int, *, has_tail: bool) -> None:
        is_whole = has_tail or all(num_tokens % size == 0 for size in self._block_sizes)
        if not 0 < num_tokens <= request.num_tokens or not is_whole:
            raise RequestError(
                f"request {request.request_id} has {request.num_tokens} tokens in blocks of "
                f"{list(self._block_sizes)}, {num_tokens} of them cannot be loaded: load whole "
                "blocks of every group"
            )
