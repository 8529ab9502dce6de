"""Admission: the watermark, the limits of tenants, and counts of look-ups.

Per-request calls and steps ask it before a request gets a slot. It admits every request that fits:
the engine chooses the order of requests.
"""

from __future__ import annotations

from dataclasses import asdict

from kvcache.base.errors import RequestError
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.request_table import RequestTable
from kvcache.manager.settings import ManagerSettings
from kvcache.manager.statistics import PrefixCacheStats
from kvcache.protocol.step import Refusal
from kvcache.requests.request import Request
from kvcache.tenants import TenantLedger, TenantStatistics


class Admission:
    """The conditions for admission other than free blocks, and counts of look-ups."""

    def __init__(
        self,
        table: RequestTable,
        model: ModelLimits,
        *,
        settings: ManagerSettings,
        tenants: TenantLedger | None,
    ) -> None:
        """Check limits against `tenants`; count look-ups if the settings say so. While another
        request runs, admitting one must leave `watermark_blocks` free."""
        self._tenants = tenants
        self._table = table
        self.watermark_blocks = settings.num_watermark_blocks
        self._model = model
        self.counts = settings.log_stats
        """Whether look-ups are counted."""
        self._stats = PrefixCacheStats() if settings.log_stats else None
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        """Over all counted look-ups, except those after a preemption."""

    def record(self, request: Request, num_hit_tokens: int) -> None:
        """Count a look-up, unless its request does not read the cache."""
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
        """Return the statistics of all tenants; empty without tenants."""
        return () if self._tenants is None else self._tenants.statistics()

    @property
    def has_tenants(self) -> bool:
        """Whether tenants are configured."""
        return self._tenants is not None

    @property
    def num_spare_blocks(self) -> int:
        """How many blocks must stay free when one more request is admitted."""
        return self.watermark_blocks if self._table.num_taken else 0

    def raise_if_never_fits(self, request: Request, num_tokens: int | None) -> None:
        """Raise RequestError if a request that has just found no room exceeds its tenant's limit,
        and so never fits. `num_tokens`: how many a running request needs; None for a new one."""
        if self._tenants is None:
            return
        if num_tokens is not None:
            refusal = self.refusal(request, num_tokens, is_counted=True)
            if refusal is not None:
                raise RequestError(f"request {request.request_id}: {refusal.reason}")
        else:
            account = self._tenants.account(request.namespace)
            if account.hopeless_blocks:
                raise RequestError(f"request {request.request_id}: {account.last_refusal}")

    def refusal(
        self, request: Request, num_tokens: int, *, is_counted: bool = False
    ) -> Refusal | None:
        """Return the refusal if `num_tokens` tokens exceed the tenant's limit, otherwise None.

        The tenant's account records the refusal. `is_counted`: it has counted this one already.
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
        """Return the counts since the last call and reset them; None without `log_stats`."""
        stats = self._stats
        if stats is not None:
            self._stats = PrefixCacheStats()
        return stats

    def dump_state(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return {} if self._stats is None else asdict(self._stats)
