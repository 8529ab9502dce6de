"""The connector's statistics on their way to vLLM's own metrics and log.

vLLM carries them from the scheduler to its front end, and asks the connector's class there what to
do with them.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcache.metrics import CounterGrowth, Kind, Sample
from kvcache.metrics.declarations import ENGINE_METRICS, HIT_TOKENS, QUERIED_TOKENS
from kvcache.metrics.engine_samples import EngineStatistics, engine_samples

_BY_NAME = {metric.name: metric for metric in ENGINE_METRICS}
_SAMPLES = "samples"


class TierStats(KVConnectorStats):  # type: ignore[misc]  # an untyped base
    """Totals since the engine's start: a later object replaces an earlier one."""

    @classmethod
    def of(cls, statistics: EngineStatistics) -> TierStats:
        """Return what travels of an engine's statistics."""
        samples = engine_samples(statistics)
        return cls(data={_SAMPLES: [[s.metric.name, s.value, list(s.labels)] for s in samples]})

    def samples(self) -> list[Sample]:
        """Return the samples that are of metrics known here."""
        return [
            Sample(_BY_NAME[name], value, tuple(labels))
            for name, value, labels in self.data.get(_SAMPLES, ())
            if name in _BY_NAME
        ]

    def reset(self) -> None:
        """Forget all samples."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the later of the two."""
        return self if other.is_empty() else other

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log shows: how much of the prompts each tier had."""
        samples = self.samples()
        asked = sum(each.value for each in samples if each.metric is QUERIED_TOKENS)
        hits = {each.labels[1]: each.value for each in samples if each.metric is HIT_TOKENS}
        return {f"{tier} hits": round(value / max(1, asked), 3) for tier, value in hits.items()}

    def is_empty(self) -> bool:
        """Return whether there are no samples."""
        return not self.data.get(_SAMPLES)


class TierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # an untyped base
    """The same for Prometheus, with vLLM's labels and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._growth: dict[int, CounterGrowth] = {}
        self._metrics: dict[str, Any] = {}
        for metric in ENGINE_METRICS:
            is_counter = metric.kind is Kind.COUNTER
            self._metrics[metric.name] = metric_types[Counter if is_counter else Gauge](
                name=f"vllm:{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **({} if is_counter else {"multiprocess_mode": "mostrecent"}),
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take over an engine's statistics."""
        growth = self._growth.setdefault(engine_idx, CounterGrowth())
        names = self.per_engine_labelvalues[engine_idx]
        for sample in TierStats(data=transfer_stats_data).samples():
            value = self._metrics[sample.metric.name].labels(*names, *sample.labels)
            if sample.metric.kind is Kind.COUNTER:
                value.inc(growth.since_last(sample))
            else:
                value.set(sample.value)
