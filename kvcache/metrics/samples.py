"""Samples of a coordinator and of a rank, from their frozen statistics and meters.

Called at an interval, not in a step. Only converts counts. Of a rank it uses only the shape of the
statistics, so that no process loads torch for it; and a rank does not load the core's kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache.metrics import declarations as known
from kvcache.metrics.engine_samples import tier_samples
from kvcache.metrics.metric import AnySample, Metric, Sample
from kvcache.metrics.step_meter import StepMeter
from kvcache.tenants import TenantStatistics
from kvcache.tenants.shares import DEVICE_TIER

if TYPE_CHECKING:
    from kvcache.coordinator.settings import CoordinatorStatistics, OffloadStatistics
    from kvcache.core import CoreStatistics
    from kvcache.manager.statistics import ManagerStatistics
    from kvcache.metrics.ages import AgeMeter
    from kvcache.worker.statistics import WorkerStatistics


def log_line(
    name: str, before: CoordinatorStatistics, now: CoordinatorStatistics, seconds: float
) -> str:
    """Return the summary of `seconds` between two moments, empty if no step ran.

    The hit rate covers this interval, or the time since a new epoch began in it.
    """
    num_steps = now.num_steps - before.num_steps
    manager = now.manager
    if manager is None or num_steps <= 0 or seconds <= 0:
        return ""
    last = before.manager if before.epoch == now.epoch else None
    core = manager.core
    num_used = core.num_blocks - core.num_free_blocks
    evicted = core.num_evictions - (0 if last is None else last.core.num_evictions)
    parts = [
        f"{name}: {num_steps / seconds:,.1f} steps/s",
        f"hit rate {_hit_rate(last, manager)}",
        f"{num_used / max(1, core.num_blocks):.1%} of {core.num_blocks:,} blocks in use",
        f"{manager.num_running_requests:,} running",
        f"{manager.num_preempted_requests:,} preempted",
        f"{evicted / seconds:,.1f} evictions/s",
    ]
    if now.num_refused_steps > before.num_refused_steps:
        parts.append(f"{now.num_refused_steps - before.num_refused_steps:,} steps refused")
    if now.num_no_room > before.num_no_room:
        parts.append(f"{now.num_no_room - before.num_no_room:,} times no room")
    if now.problem:
        parts.append(now.problem)
    return ", ".join(parts)


def _hit_rate(last: ManagerStatistics | None, now: ManagerStatistics) -> str:
    asked, hit = now.num_asked_tokens, now.num_hit_tokens
    if last is not None:
        asked, hit = asked - last.num_asked_tokens, hit - last.num_hit_tokens
    return f"{hit / asked:.1%}" if asked > 0 else "-"


OTHER = "other"


class TenantLabels:
    """The tenants with labels of their own. One user, one thread."""

    def __init__(self, max_labels: int) -> None:
        self._max_labels = max_labels
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._max_labels:
                return OTHER
            self._names.add(name)
        return name


def tenant_samples(
    cluster: str, tenants: Sequence[TenantStatistics], labels: TenantLabels
) -> Iterator[Sample]:
    """Yield the samples of all tenants, added up for tenants that share a label."""
    sums: Counter[tuple[Metric, tuple[str, ...]]] = Counter()
    for tenant in tenants:
        own, tier = labels.label(tenant.name), tenant.tier
        for state, count in {
            "held": tenant.num_held_blocks,
            "cached": tenant.num_cached_blocks,
            "pinned": tenant.num_pinned_blocks,
            "guaranteed": tenant.guaranteed_blocks,
            "limit": tenant.limit_blocks,
        }.items():
            sums[known.TENANT_BLOCKS, (own, tier, state)] += count
        asked, hit = tenant.num_asked_tokens, tenant.num_hit_tokens
        if tier == DEVICE_TIER:
            sums[known.TENANT_QUERIED_TOKENS, (own,)] += asked
            sums[known.TENANT_HIT_TOKENS, (own,)] += hit
        else:
            sums[known.TENANT_TIER_QUERIED_TOKENS, (own, tier)] += asked
            sums[known.TENANT_TIER_HIT_TOKENS, (own, tier)] += hit
        sums[known.TENANT_EVICTIONS, (own, tier)] += tenant.num_evicted_blocks
        sums[known.TENANT_REFUSALS, (own, tier)] += tenant.num_refusals
    for (metric, values), count in sums.items():
        yield Sample(metric, float(count), (cluster, *values))


@dataclass(frozen=True, eq=False)
class CoordinatorMeters:
    """Meters in addition to the statistics."""

    steps: StepMeter
    ages: AgeMeter
    tenants: TenantLabels = field(default_factory=lambda: TenantLabels(0))


def coordinator_samples(
    cluster: str,
    statistics: CoordinatorStatistics,
    meters: CoordinatorMeters,
    loop_errors: Mapping[str, int] | None = None,
) -> list[AnySample]:
    """Return all samples of the coordinator of `cluster`.

    `loop_errors`: errors that its message loop counted, by kind.
    """
    return list(_Samples(cluster).of(statistics, meters, loop_errors or {}))


class _Samples:
    """Makes samples of one cluster."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def of(
        self,
        statistics: CoordinatorStatistics,
        meters: CoordinatorMeters,
        loop_errors: Mapping[str, int],
    ) -> Iterator[AnySample]:
        from kvcache.coordinator.settings import Phase  # not in ranks: it loads the core

        yield self._one(known.EPOCH, statistics.epoch)
        yield self._one(known.IS_RUNNING, statistics.phase == Phase.RUNNING.value)
        yield self._one(known.CLIENTS, statistics.num_clients)
        yield self._one(known.UNACKNOWLEDGED, statistics.num_unacknowledged)
        yield self._one(known.RESENT, statistics.num_resent)
        executed = statistics.num_steps - statistics.num_refused_steps
        yield self._one(known.STEPS, executed, "executed")
        yield self._one(known.STEPS, statistics.num_refused_steps, "refused")
        yield self._one(known.NO_ROOM, statistics.num_no_room)
        yield from self._meters(meters)
        if statistics.manager is not None:
            yield from self._manager(statistics.manager)
            yield from self._hits(statistics.manager, statistics.offload)
            yield from tenant_samples(self._cluster, tenants_of(statistics), meters.tenants)
        if statistics.offload is not None:
            yield self._one(known.LOAD_WAITERS, statistics.offload.num_waiting_requests)
            yield from tier_samples(self._cluster, statistics.offload.tiers)
        for kind, count in {**_errors(statistics), **loop_errors}.items():
            yield self._one(known.ERRORS, count, kind)

    def _one(self, metric: Metric, value: float, *labels: str) -> Sample:
        return Sample(metric, float(value), (self._cluster, *labels))

    def _meters(self, meters: CoordinatorMeters) -> Iterator[AnySample]:
        labels = (self._cluster,)
        yield meters.steps.queue.sample(known.STEP_QUEUE, labels)
        yield meters.steps.decision.sample(known.STEP_DECISION, labels)
        yield meters.steps.applied.sample(known.STEP_APPLIED, labels)
        yield meters.ages.at_hit(known.HIT_AGE, labels)
        yield meters.ages.at_eviction(known.EVICTION_AGE, labels)

    def _manager(self, manager: ManagerStatistics) -> Iterator[Sample]:
        yield from self._core(manager.core)
        yield self._one(known.REQUESTS, manager.num_running_requests, "running")
        yield self._one(known.REQUESTS, manager.num_preempted_requests, "preempted")
        yield self._one(known.PINS, manager.num_pins)
        yield self._one(known.PREEMPTIONS, manager.num_preemptions)

    def _core(self, core: CoreStatistics) -> Iterator[Sample]:
        num_used = core.num_blocks - core.num_free_blocks
        yield self._one(known.BLOCKS, num_used, "in_use")
        yield self._one(known.BLOCKS, core.num_free_blocks, "free")
        yield self._one(known.CACHED_BLOCKS, core.num_cached_blocks)
        yield self._one(known.SEALED_BLOCKS, core.num_sealed_blocks)
        yield self._one(known.PINNED_BLOCKS, core.num_pinned_blocks)
        yield self._one(known.USAGE, num_used / max(1, core.num_blocks))
        yield self._one(known.EVICTIONS, core.num_evictions)
        yield self._one(known.MERGED, core.num_merged_blocks)

    def _hits(
        self, manager: ManagerStatistics, offload: OffloadStatistics | None
    ) -> Iterator[Sample]:
        """A loaded block is later found by an ordinary look-up, which is no hit of the device."""
        yield self._one(known.QUERIED_TOKENS, manager.num_asked_tokens)
        loaded = 0 if offload is None else offload.num_loaded_tokens
        fetched = 0 if offload is None else offload.num_fetched_tokens
        yield self._one(known.HIT_TOKENS, max(0, manager.num_hit_tokens - loaded), "device")
        if offload is not None:
            yield self._one(known.HIT_TOKENS, loaded - fetched, "host")
            yield self._one(known.HIT_TOKENS, fetched, "disk")


def tenants_of(statistics: CoordinatorStatistics | None) -> tuple[TenantStatistics, ...]:
    """Return the statistics of all tenants in all tiers; empty without tenants."""
    if statistics is None or statistics.manager is None:
        return ()
    found = statistics.manager.tenants
    if statistics.offload is not None:
        for tier in statistics.offload.tiers.by_name.values():
            found += tier.tenants
    return found


def _errors(statistics: CoordinatorStatistics) -> dict[str, int]:
    manager, offload, recorder = statistics.manager, statistics.offload, statistics.recorder
    errors = {
        "refused_step": statistics.num_refused_steps,
        "failed_forward": statistics.num_failed_forwards,
        "dropped": statistics.num_dropped,
        "unattached": statistics.num_unattached,
        "wrong_block": statistics.num_wrong_blocks,
        "failed_step_report": 0 if manager is None else manager.num_failed_step_reports,
    }
    if offload is not None:
        errors |= {
            "failed_job": offload.tiers.num_failed_jobs,
            "expired_job": offload.tiers.num_expired_jobs,
            "load_given_up": offload.num_loads_given_up,
            "disk_rest": offload.tiers.num_disk_rests,
        }
    if recorder is not None:
        errors["lost_record"] = recorder.num_lost_records
    return errors


@dataclass(frozen=True)
class RankTraffic:
    """Messages of a rank's process, undecodable and undeliverable ones, and errors that messages or
    connections caused."""

    num_sent: int
    num_received: int
    num_malformed: int
    num_undeliverable: int
    num_faults: int = 0


def worker_samples(
    cluster: str, statistics: WorkerStatistics, traffic: RankTraffic
) -> list[Sample]:
    return [
        Sample(metric, float(value), (cluster, str(statistics.rank), *labels))
        for metric, value, labels in (*_rank(statistics), *_copies(statistics), *_messages(traffic))
    ] + [
        Sample(known.WORKER_ERRORS, float(count), (cluster, str(statistics.rank), kind))
        for kind, count in {
            "failed_job": statistics.num_failed_jobs,
            "invalid": statistics.num_invalid_messages,
            "foreign": statistics.num_foreign_messages,
            "malformed": traffic.num_malformed,
            "undeliverable": traffic.num_undeliverable,
            "refused_report": statistics.num_refused_reports,
            "fault": traffic.num_faults,
        }.items()
    ]


_Row = tuple[Metric, float, tuple[str, ...]]


def _rank(statistics: WorkerStatistics) -> Iterator[_Row]:
    yield known.WORKER_APPLIED, statistics.applied_seq, ()
    yield known.WORKER_FORWARDS, statistics.num_forwards, ()
    yield known.WORKER_LABELS, statistics.num_labels, ()
    yield known.WORKER_POOL, statistics.pool_bytes, ("device",)
    yield known.WORKER_POOL, statistics.host_bytes, ("host",)
    if statistics.transfers.files is not None:
        yield known.WORKER_POOL, statistics.transfers.files.used_bytes, ("disk",)
    yield known.WORKER_BLOCKS, statistics.num_blocks_copied, ("copied",)
    yield known.WORKER_BLOCKS, statistics.num_blocks_zeroed, ("zeroed",)


def _copies(statistics: WorkerStatistics) -> Iterator[_Row]:
    for kind, counts in statistics.transfers.jobs.items():
        yield known.COPIED_BYTES, counts.num_bytes, (kind,)
        yield known.COPY_SECONDS, counts.seconds, (kind,)
        yield known.COPY_JOBS, counts.num_good, (kind, "good")
        yield known.COPY_JOBS, counts.num_failed, (kind, "failed")


def _messages(traffic: RankTraffic) -> Iterator[_Row]:
    yield known.WORKER_MESSAGES, traffic.num_sent, ("sent",)
    yield known.WORKER_MESSAGES, traffic.num_received, ("received",)
