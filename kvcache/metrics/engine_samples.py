"""Statistics of an engine that runs our tiers without a cluster, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from kvcache.metrics import declarations as known
from kvcache.metrics.metric import Sample
from kvcache.offload.statistics import HierarchyStatistics, TierStatistics


@dataclass(frozen=True)
class RequestStatistics:
    """Requests and their tokens since the engine's start. A request that comes again after a
    preemption counts again.

    Of `num_asked_tokens`, `num_device_tokens` were on the device, `num_loaded_tokens` were loaded
    from host memory; `num_file_tokens` of them came from files, `num_remote_tokens` from other
    nodes. `num_fetched_tokens` were read from files, `num_imported_tokens` copied from other nodes,
    loaded since or not. Loads of `num_failed_tokens` have failed. Requests have waited
    `files_wait_s` seconds for files to be read, and for other nodes, and `load_wait_s` for loads,
    together; `num_waiting` wait now.
    """

    num_requests: int = 0
    num_asked_tokens: int = 0
    num_device_tokens: int = 0
    num_loaded_tokens: int = 0
    num_file_tokens: int = 0
    num_remote_tokens: int = 0
    num_fetched_tokens: int = 0
    num_imported_tokens: int = 0
    num_failed_tokens: int = 0
    num_failed_loads: int = 0
    files_wait_s: float = 0.0
    load_wait_s: float = 0.0
    num_waiting: int = 0


@dataclass(frozen=True)
class EngineStatistics:
    """One engine. `tiers` is None until all ranks have told what they hold; `events` are its
    publisher's own statistics, `recording` says what was recorded, `nodes` how it shares with
    other nodes."""

    name: str
    replica: int
    model: str
    process_id: int
    num_ranks: int
    block_tokens: int
    uptime_s: float
    requests: RequestStatistics
    tiers: HierarchyStatistics | None
    events: dict[str, Any] | None = None
    recording: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return asdict(self)

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> EngineStatistics:
        """Return what `to_plain` was called on. Raises TypeError, KeyError for other values."""
        tiers = values["tiers"]
        if tiers is not None:
            made = {name: _tier(tiers[name]) for name in ("host", "disk")}
            tiers = HierarchyStatistics(**{**tiers, **made})
        requests = RequestStatistics(**values["requests"])
        return cls(**{**values, "requests": requests, "tiers": tiers})


def engine_samples(statistics: EngineStatistics) -> list[Sample]:
    """Return all samples of an engine, under the names that a cluster's have."""
    name = statistics.name
    if statistics.replica:
        name = f"{name}/{statistics.replica}"
    return list(_samples(name, statistics))


def exposition(samples: list[Sample]) -> str:
    """Return samples as Prometheus reads them."""
    lines: list[str] = []
    for metric, group in groupby(samples, lambda sample: sample.metric):
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind.value}")
        for sample in group:
            pairs = zip(metric.labels, sample.labels, strict=True)
            labels = ",".join(f'{label}="{value}"' for label, value in pairs)
            lines.append(f"{metric.name}{{{labels}}} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    is_whole = isinstance(value, int) or value.is_integer()
    return str(int(value)) if is_whole else repr(float(value))


def _samples(name: str, statistics: EngineStatistics) -> Iterator[Sample]:
    requests, tiers = statistics.requests, statistics.tiers
    yield Sample(known.QUERIED_TOKENS, requests.num_asked_tokens, (name,))
    for tier, count in (
        ("device", requests.num_device_tokens),
        (
            "host",
            requests.num_loaded_tokens - requests.num_file_tokens - requests.num_remote_tokens,
        ),
        ("disk", requests.num_file_tokens),
        ("node", requests.num_remote_tokens),
    ):
        yield Sample(known.HIT_TOKENS, count, (name, tier))
    yield Sample(known.LOAD_WAITERS, requests.num_waiting, (name,))
    for cause, seconds in (("files", requests.files_wait_s), ("load", requests.load_wait_s)):
        yield Sample(known.LOAD_WAIT, seconds, (name, cause))
    errors = {"failed_load": requests.num_failed_loads}
    if tiers is not None:
        errors |= {
            "failed_job": tiers.num_failed_jobs,
            "expired_job": tiers.num_expired_jobs,
            "disk_rest": tiers.num_disk_rests,
        }
    for kind, count in errors.items():
        yield Sample(known.ERRORS, count, (name, kind))
    if tiers is not None:
        yield from sorted(tier_samples(name, tiers), key=lambda sample: sample.metric.name)


def _tier(values: Mapping[str, Any] | None) -> TierStatistics | None:
    return None if values is None else TierStatistics(**{**values, "tenants": ()})


def tier_samples(cluster: str, tiers: HierarchyStatistics) -> Iterator[Sample]:
    for kind, count in tiers.open_jobs.items():
        yield Sample(known.TIER_JOBS, float(count), (cluster, kind))
    for name, tier in tiers.by_name.items():
        yield from _samples_of(cluster, name, tier)


def _samples_of(cluster: str, name: str, tier: TierStatistics) -> Iterator[Sample]:
    states = {
        "capacity": tier.num_slots * tier.blocks_per_slot,
        "ready": tier.num_ready,
        "pending": tier.num_pending,
        "held": tier.num_held,
    }
    operations = {
        "stored": tier.num_stored,
        "failed": tier.num_failed_stores,
        "loaded": tier.num_loaded,
        "evicted": tier.num_evicted,
        "forgotten": tier.num_forgotten,
        "skipped": tier.num_skipped,
        "refused": tier.num_refused,
    }
    for metric, values in (
        (known.TIER_BLOCKS, states),
        (known.TIER_LOOKUPS, {"hit": tier.num_hits, "miss": tier.num_misses}),
        (known.TIER_OPERATIONS, operations),
        (known.TIER_BYTES, {"stored": tier.stored_bytes, "loaded": tier.loaded_bytes}),
    ):
        for label, value in values.items():
            yield Sample(metric, float(value), (cluster, name, label))
