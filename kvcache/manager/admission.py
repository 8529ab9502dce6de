"""Letting a request in: what of it is cached, whether there is room, and a seat.

The one way in for per-request calls, new requests and resumed ones. Refuses nobody that fits: the
order in which requests come is the engine's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from kvcache.arrays import EMPTY_INT32
from kvcache.core import CacheHit, Core, NewestState, Reservation, TableChange
from kvcache.errors import RequestError
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.prefix_statistics import PrefixCacheStats
from kvcache.manager.request_book import KnownRequest, RequestBook
from kvcache.request import Request
from kvcache.step import Refusal
from kvcache.tenants import TenantLedger, TenantStatistics


@dataclass(frozen=True)
class AdmissionLimits:
    """What every request must respect.

    Slots are never reserved behind `max_model_len` tokens. While another request runs,
    `watermark_blocks` must stay free when one is let in.
    """

    max_model_len: int
    watermark_blocks: int


class Demand(NamedTuple):
    """How much a request wants, in tokens from position 0: computed before, slots up to, how far
    full blocks become hittable, and where its forward ends without drafts.

    `newest_state` is where its last forward ended, if it had any.
    """

    num_computed_tokens: int
    num_slot_tokens: int
    num_cached_tokens: int
    num_own_tokens: int
    num_encoder_tokens: int = 0
    newest_state: NewestState | None = None


class Admitted(NamedTuple):
    """A seated request and the blocks that entered its tables."""

    known: KnownRequest
    changes: Sequence[TableChange]


class Admission:
    """Looks requests up and seats them."""

    def __init__(
        self,
        book: RequestBook,
        core: Core,
        limits: AdmissionLimits,
        model: ModelLimits,
        *,
        log_stats: bool,
        tenants: TenantLedger | None = None,
    ) -> None:
        """Seat requests in `book`, with blocks of `core`; the core and `tenants` say who may."""
        self._tenants = tenants
        self._book = book
        self._core = core
        self._limits = limits
        self._model = model
        self._no_hit = CacheHit((EMPTY_INT32,) * len(core.block_ids("")), 0)
        self._stats = PrefixCacheStats() if log_stats else None
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        """Of all look-ups that were counted, but for those after a preemption."""

    def look_up(self, request: Request) -> CacheHit:
        """Return the longest hit of a request that reads the cache. Changes nothing."""
        if request.skip_reading_prefix_cache:
            return self._no_hit
        return self._core.look_up(request)

    def record(self, request: Request, num_hit_tokens: int) -> None:
        """Count a look-up; one of a request that does not read the cache is not counted."""
        if self._stats is not None and not request.skip_reading_prefix_cache:
            self._stats.record(
                request.num_tokens, num_hit_tokens, is_preempted=request.num_preemptions > 0
            )
            if not request.num_preemptions:
                self.num_asked_tokens += request.num_tokens
                self.num_hit_tokens += num_hit_tokens
                if self._tenants is not None:
                    account = self._tenants.account(request.namespace)
                    account.num_asked_tokens += request.num_tokens
                    account.num_hit_tokens += num_hit_tokens

    def tenant_statistics(self) -> tuple[TenantStatistics, ...]:
        """Return the figures of all tenants; none where there are none."""
        return () if self._tenants is None else self._tenants.statistics()

    @property
    def has_tenants(self) -> bool:
        """Whether tenants are configured."""
        return self._tenants is not None

    def require_hope(self, request: Request) -> None:
        """Raise RequestError if a request that has just found no room never will."""
        if self._tenants is None or not self._book.slots.num_free:
            return
        account = self._tenants.account(request.namespace)
        if account.hopeless_blocks:
            raise RequestError(f"request {request.request_id}: {account.last_refusal}")

    def require_limit(self, request: Request, num_tokens: int) -> None:
        """Raise RequestError if a running request that has just found no room for so many tokens
        never will, because its tenant may not have so much."""
        refusal = self.refusal(request, num_tokens, is_counted=True)
        if refusal is not None:
            raise RequestError(f"request {request.request_id}: {refusal.reason}")

    def refusal(
        self, request: Request, num_tokens: int, *, is_counted: bool = False
    ) -> Refusal | None:
        """Say why its tenant will never have room for so many tokens of a request, if that is so.

        Then it is noted with the tenant, as other refusals are, and counted if it is not yet.
        """
        if self._tenants is None:
            return None
        account = self._tenants.account(request.namespace)
        needed, limit = self._model.least_blocks(num_tokens), account.share.limit_blocks
        if needed <= limit:
            return None
        reason = (
            f"{num_tokens} tokens need at least {needed} blocks, which is more than all that this "
            f"tenant may have ({limit}): shorten the request, or raise the tenant's limit"
        )
        account.num_refusals -= is_counted
        account.refuse(reason)
        tenant = self._tenants.shares.shown_name(account.name)
        return Refusal(request.request_id, tenant, needed, limit, reason)

    def record_reset(self) -> None:
        """Note in the statistics that the cache was emptied."""
        if self._stats is not None:
            self._stats.reset = True

    def take_stats(self) -> PrefixCacheStats | None:
        """Return the counts since the last time and start anew; None where nothing is counted."""
        stats = self._stats
        if stats is not None:
            self._stats = PrefixCacheStats()
        return stats

    def dump_state(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return {} if self._stats is None else asdict(self._stats)

    def reservation(self, demand: Demand, num_spare_blocks: int = 0) -> Reservation:
        """Return what to ask of the core; slots end with the model's length."""
        return Reservation(
            demand.num_computed_tokens,
            min(demand.num_slot_tokens, self._limits.max_model_len),
            demand.num_cached_tokens,
            num_spare_blocks,
            demand.num_own_tokens,
            demand.newest_state,
            demand.num_encoder_tokens,
        )

    def seat(
        self,
        request: Request,
        client_index: int,
        demand: Demand,
        hit: CacheHit | None,
        reserve: Callable[[Reservation], list[TableChange] | None] | None = None,
    ) -> Admitted | None:
        """Give a request without blocks its blocks and a slot; None, unchanged, without room.

        `reserve` gives it blocks instead of the core, where there is more for it than a hit.
        """
        slots = self._book.slots
        num_free = slots.num_free
        if not num_free:
            return None
        spare = self._limits.watermark_blocks if num_free < slots.num_slots else 0
        wanted = self.reservation(demand, spare)
        changes = reserve(wanted) if reserve else self._core.reserve(request, wanted, hit)
        if changes is None:
            return None
        known = self._book.admit(request, client_index, demand.num_own_tokens)
        known.num_encoder_tokens = demand.num_encoder_tokens
        slots.num_own[known.slot] = demand.num_own_tokens
        return Admitted(known, changes)
