"""Loads of prefixes from a tier below: blocks that become hittable once every rank has the bytes.

Loads run outside the steps of requests. A request that waits for a load has no blocks; a
placeholder request with its tokens, known only here, holds the blocks being written. When every
rank has the bytes, the placeholder's blocks are cached as any request's, and an ordinary look-up
finds them. Loads know no tiers, jobs or time: their owner says how a load ended.

    begin ──▶ blocks without content ──finish──▶ cached, held ──release──▶ evictable
                        └──release, when no rank writes them──▶ free

A load for a swapped-out request may have a tail, that is end in the middle of a block. A partial
block has no content hash, so no look-up finds it: the request forks from its placeholder instead,
and the placeholder is freed.

    finish ──▶ cached + tail, held ──hand_over──▶ tables of the request ──release──▶ gone
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import lcm

import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import RequestError
from kvcache.core import NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.manager.cache_control import CacheControl
from kvcache.manager.request_table import RequestTable
from kvcache.manager.settings import ManagerSettings
from kvcache.manager.step_ledger import StepLedger, StepsUnderWay
from kvcache.requests.request import BlockHasher, Request, placeholder_of
from kvcache.specs import NULL_BLOCK_ID, ceil_div


@dataclass(frozen=True, eq=False)
class PrefixLoad:
    """The blocks to write before a look-up can hit `num_tokens` tokens of a request.

    Block `block_ids[g][i]` of group `g` is column `columns[g][i]` of the request's table: it holds
    the tokens from `columns[g][i] * block size` on. Shapes `(n_g,)`, columns in rising order.
    `num_device_tokens` were cached already, and stay cached while the load lasts.
    """

    load_id: int
    request_id: str
    num_device_tokens: int
    num_tokens: int
    columns: tuple[Int32Array, ...]
    block_ids: tuple[Int32Array, ...]

    @property
    def num_blocks(self) -> int:
        """How many blocks are to be written, over all groups."""
        return sum(len(ids) for ids in self.block_ids)


@dataclass(eq=False)
class _Placeholder:
    """The placeholder `request` of `owner`. `readers` are the steps that may still read its blocks.
    `was_taken`: the owner has its blocks now."""

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
        settings: ManagerSettings,
    ) -> None:
        """Begin without loads. With EAGLE, a hit on a loaded prefix is shorter, and reads the
        blocks before its own end."""
        self._core = core
        self._hasher = hasher
        self.ledger = ledger
        self._table = table
        self._control = control
        self._block_sizes = sizes = settings.block_sizes
        self._num_dropped_tokens = lcm(*sizes) if settings.use_eagle else 0
        self._placeholders: dict[int, _Placeholder] = {}
        self._held: dict[str, int] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """Return how many loads hold blocks."""
        return len(self._placeholders)

    def num_device_tokens(self, request: Request) -> int:
        """Return how many tokens of `request` are cached now. Does not change the cache."""
        request.attach_block_hasher(self._hasher)
        return self._core.cache.look_up(request).num_tokens

    def begin(
        self,
        request: Request,
        num_tokens: int,
        num_spare_blocks: int = 0,
        *,
        has_tail: bool = False,
    ) -> PrefixLoad | None:
        """Take blocks for the first `num_tokens` tokens of `request` that are not cached.

        `num_tokens` must be a multiple of every group's block size unless the load `has_tail`.
        While a request runs, `num_spare_blocks` must stay free. None, unchanged, if there is no
        room or nothing to load, or during a drain, when a loaded prefix could never be hit.

        Raises:
            RequestError: `num_tokens` tokens of this request cannot be loaded.
        """
        self._require_blocks(request, num_tokens, has_tail=has_tail)
        if self._control.is_draining:
            return None
        request.attach_block_hasher(self._hasher)
        hit = self._core.cache.look_up(request)
        if hit.num_tokens >= num_tokens:
            return None
        load_id = next(self._numbers)
        placeholder_request = placeholder_of(request, load_id)
        spare = num_spare_blocks if self._table.num_taken else 0
        num_hit_tokens = max(0, num_tokens - self._num_dropped_tokens)
        wanted = Reservation(num_hit_tokens, num_tokens, 0, spare, num_tokens)
        if self._core.reserve(placeholder_request, wanted, hit if hit.num_tokens else None) is None:
            return None
        self._placeholders[load_id] = _Placeholder(
            request, placeholder_request, num_tokens, self.ledger.under_way(), has_tail
        )
        columns, block_ids = [], []
        for size, table in zip(
            self._block_sizes, self._core.block_ids(placeholder_request.request_id), strict=True
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
        """Return whether no step scheduled before `begin` can still read the blocks.

        Its tables may contain them, and loads are not ordered with forwards.

        Raises:
            RequestError: the load is unknown or finished already.
        """
        return self.ledger.are_over(self._unfinished(load_id).readers)

    def finish(self, load_id: int) -> None:
        """Cache the blocks, which every rank has written. They are held until `release`.

        Raises:
            RequestError: the load is unknown or finished already; nothing was changed.
        """
        placeholder = self._unfinished(load_id)
        self._core.commit(placeholder.request, placeholder.num_tokens)
        placeholder.is_finished = True
        if placeholder.has_tail:
            self._held[placeholder.owner.request_id] = load_id

    def num_held_tokens(self, request: Request, num_hit_tokens: int) -> int:
        """Return how many tokens are held for this very request, if more than its hit; else 0.

        The last token of a request is always computed, so a load that reaches it is not used.
        """
        load_id = self._held.get(request.request_id)
        if load_id is None:
            return 0
        placeholder = self._placeholders[load_id]
        is_more = num_hit_tokens < placeholder.num_tokens < request.num_tokens
        return placeholder.num_tokens if placeholder.owner is request and is_more else 0

    def hand_over(self, request: Request, reservation: Reservation) -> bool:
        """Give a request without blocks those of its placeholder, and the rest of `reservation`.

        Returns False, unchanged, if there is no room. `release` ends the load.

        Raises:
            RequestError: no load holds tokens for this request.
        """
        load_id = self._held.get(request.request_id)
        if load_id is None:
            raise RequestError(f"no load holds tokens for request {request.request_id}")
        placeholder = self._placeholders[load_id]
        core, placeholder_request = self._core, placeholder.request
        origin = placeholder.num_tokens, NewestState(placeholder.num_tokens, 0)
        core.fork(placeholder_request, request, *origin)
        core.free(placeholder_request)  # first: shared blocks would be copied
        if core.reserve(request, reservation) is None:
            core.fork(request, placeholder_request, *origin)
            core.free(request)
            return False
        del self._held[request.request_id]
        placeholder.was_taken = True
        return True

    def was_taken(self, load_id: int) -> bool:
        """Return whether a load that is not released yet has been handed over."""
        placeholder = self._placeholders.get(load_id)
        return placeholder is not None and placeholder.was_taken

    def release(self, load_id: int) -> None:
        """Release a load's blocks: cached ones become evictable, others are free.

        Call it for an unfinished load only when no rank can still write to its blocks.

        Raises:
            RequestError: the load is unknown; nothing was changed.
        """
        placeholder = self._placeholders.get(load_id)
        if placeholder is None:
            raise RequestError(f"load {load_id} is not known: it was never begun, or has ended")
        del self._placeholders[load_id]
        if self._held.get(placeholder.owner.request_id) == load_id:
            del self._held[placeholder.owner.request_id]
        self._core.free(placeholder.request)

    def _unfinished(self, load_id: int) -> _Placeholder:
        placeholder = self._placeholders.get(load_id)
        if placeholder is None or placeholder.is_finished:
            state = "is not known" if placeholder is None else "is finished already"
            raise RequestError(f"load {load_id} {state}: finish each load that was begun, once")
        return placeholder

    def _require_blocks(self, request: Request, num_tokens: int, *, has_tail: bool) -> None:
        is_whole = has_tail or all(num_tokens % size == 0 for size in self._block_sizes)
        if not 0 < num_tokens <= request.num_tokens or not is_whole:
            raise RequestError(
                f"request {request.request_id} has {request.num_tokens} tokens in blocks of "
                f"{list(self._block_sizes)}, {num_tokens} of them cannot be loaded: load whole "
                "blocks of every group"
            )
