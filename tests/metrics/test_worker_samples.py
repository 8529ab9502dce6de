"""A rank's statistics as samples."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvcache.metrics import WORKER_METRICS, RankTraffic, worker_samples
from kvcache.metrics import declarations as known
from kvcache.protocol.delivery import ReceiverStatistics
from kvcache.worker.statistics import JobTally, TransferStatistics, WorkerStatistics


def statistics(**changes: Any) -> WorkerStatistics:
    plain = WorkerStatistics(
        *(3, 1, 20, 0, 11, 5, 0, 0, 0, 2, 0, 4, 6, 1, "", 7, 1 << 20, 1 << 21),
        ReceiverStatistics(),
    )
    return replace(plain, **changes)


def test_every_figure_of_a_rank_has_the_labels_that_were_declared() -> None:
    tally = JobTally()
    tally.add("store", 1000, 0.5, ok=True)
    tally.add("store", 500, 0.25, ok=True)
    tally.add("load", 0, 0.1, ok=False)
    transfers = TransferStatistics(jobs=MappingProxyType(dict(tally.counts())))
    samples = worker_samples("x", statistics(transfers=transfers), RankTraffic(8, 9, 2, 1, 4))
    values = {(sample.metric, sample.labels): sample.value for sample in samples}
    assert {sample.metric for sample in samples} == set(WORKER_METRICS)
    assert all(
        len(s.labels) == len(s.metric.labels) and s.labels[:2] == ("x", "3") for s in samples
    )
    assert values[known.WORKER_APPLIED, ("x", "3")] == 20
    assert values[known.COPIED_BYTES, ("x", "3", "store")] == 1500
    assert values[known.COPY_SECONDS, ("x", "3", "store")] == 0.75
    assert values[known.COPY_JOBS, ("x", "3", "load", "failed")] == 1
    assert values[known.WORKER_MESSAGES, ("x", "3", "received")] == 9
    assert values[known.WORKER_ERRORS, ("x", "3", "foreign")] == 7
    assert values[known.WORKER_ERRORS, ("x", "3", "fault")] == 4
