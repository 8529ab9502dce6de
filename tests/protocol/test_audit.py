"""Audits of a running cluster: labels are compared and dropped, and service continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors import LocalCluster
from actors.client import KVCacheClient
from kvcache.base.arrays import int32_array
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig, parse_config
from kvcache.coordinator import Phase
from kvcache.coordinator.settings import AuditSettings, CoordinatorStatistics
from kvcache.core.columns import FREE
from kvcache.protocol.commands import Audit, Label
from kvcache.protocol.messages import JobReport, StepCommands
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.worker.execution import audit_labels
from tests.protocol.scenario import random_scenario
from tests.protocol.simulation import simulate
from tests.protocol.test_coordinator import Bench, only
from tests.worker.worker_support import Harness, label


def config(mode: str) -> ClusterConfig:
    return parse_config(
        {
            "name": "audit",
            "model": {
                "name": "m",
                "max_model_len": 256,
                "layers": [{"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 4}],
            },
            "cache": {"memory_per_rank": "16MiB", "num_blocks": 64},
            "parallel": {"tensor_parallel_size": 2},
            "content_check": {"enabled": True},
            "audit": {"mode": mode, "interval_s": 0.5},
        }
    )


def compute(client: KVCacheClient, name: str, num_tokens: int = 64) -> int:
    """Compute a request and let it finish; return how many of its tokens were hit."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    result = client.step(StepRequest(new=(NewRequest(name, tokens, num_tokens),)))
    client.wait_finished(result.step)
    done = client.step(StepRequest(completed_step=result.step, finished=(name,)))
    client.wait_finished(done.step)
    empty = client.step(StepRequest(completed_step=done.step))
    client.wait_finished(empty.step)
    return int(result.num_hit_tokens[0])


def other_label(block_id: int, byte: bytes) -> Label:
    """Return a label of 16 tokens that were never computed."""
    return replace(
        label(block_id, byte * 32),
        parent_digests=b"p" * 32,
        token_counts=int32_array([16]),
        token_ids=int32_array(range(16)),
    )


def statistics(cluster: LocalCluster) -> CoordinatorStatistics:
    return cluster.coordinator.statistics()


def test_ranks_that_know_what_the_coordinator_does_pass() -> None:
    with LocalCluster(config("on")) as cluster, cluster.client() as client:
        for name in "abc":
            compute(client, name)
        assert statistics(cluster).num_audits > 5
        assert (statistics(cluster).num_wrong_blocks, statistics(cluster).last_finding) == (0, "")


def test_nothing_is_compared_unless_it_is_wanted() -> None:
    with LocalCluster(config("off")) as cluster, cluster.client() as client:
        compute(client, "a")
        assert statistics(cluster).num_audits == 0


def test_a_label_that_is_lost_is_reported_and_withdrawn_and_service_goes_on() -> None:
    with LocalCluster(config("on")) as cluster, cluster.client() as client:
        compute(client, "a")
        labels = cluster.workers[1].worker.labels
        (block_id, *_) = labels.collect(1, 1, 0, "").labels.block_ids.tolist()
        labels.withdraw(int32_array([block_id]))
        compute(client, "other", 20)
        found = statistics(cluster)
        assert found.num_wrong_blocks == 1
        assert found.last_finding.startswith(f"rank 1: block {block_id}: the coordinator has group")
        assert "the rank knows no content; seq " in found.last_finding
        compute(client, "b")
        compute(client, "b again")
        after = statistics(cluster)
        assert after.num_wrong_blocks == 1
        assert after.num_audits > found.num_audits
        cluster.coordinator.check()
        assert client.failures == ()


def test_a_label_of_another_content_is_withdrawn_from_all_ranks() -> None:
    with LocalCluster(config("on")) as cluster, cluster.client() as client:
        compute(client, "a")
        tables = [worker.worker.labels for worker in cluster.workers]
        first, second = tables[0].collect(0, 1, 0, "").labels.block_ids.tolist()[:2]
        tables[0].apply(other_label(first, b"x"))
        compute(client, "other", 20)
        assert statistics(cluster).num_wrong_blocks == 1
        for table in tables:
            assert not table.is_labelled(first) or table.digest(first) != b"x" * 32
        assert second
        assert compute(client, "b") < 48


def test_an_unknown_label_is_withdrawn() -> None:
    with LocalCluster(config("sample")) as cluster, cluster.client() as client:
        compute(client, "a")
        tables = [worker.worker.labels for worker in cluster.workers]
        tables[0].apply(other_label(60, b"y"))
        num_audits = statistics(cluster).num_audits
        while statistics(cluster).num_wrong_blocks == 0:
            client.poll()
            assert statistics(cluster).num_audits <= num_audits + 2
        assert "the coordinator knows no content, the rank has group 0" in (
            statistics(cluster).last_finding
        )
        compute(client, "b")
        assert not tables[0].is_labelled(60)


def test_inconsistent_state_is_rebuilt_from_the_labels() -> None:
    with LocalCluster(config("on")) as cluster, cluster.client() as client:
        compute(client, "a")
        core: Any = cluster.coordinator.manager
        core._core.store.columns.number[FREE] += 1
        epoch = cluster.coordinator.epoch
        with pytest.raises(
            Exception, match="the coordinator's state is inconsistent and is rebuilt"
        ):
            compute(client, "b")
        client.attach()
        assert compute(client, "b") == 48
        assert cluster.coordinator.epoch == epoch + 1
        cluster.coordinator.check()


@pytest.mark.parametrize("block_id", [-1, 0, 24, 10**6, 2**40])
def test_a_report_of_blocks_that_were_not_audited_is_not_believed(block_id: int) -> None:
    bench = Bench(audit=AuditSettings("on")).run()
    bench.step(1)
    bad = JobReport(1, ok=False, detail="it is wrong", block_ids=(block_id,))
    bench.finished(0, bad)
    out = bench.finished(1, bad)
    assert bench.coordinator.phase is Phase.RUNNING
    assert not [m for m in only(out, StepCommands) if m.commands]
    assert bench.coordinator.statistics().num_wrong_blocks == 0


def test_schedules_are_audited_all_the_time() -> None:
    num_audits = sum(
        simulate(random_scenario(seed)).coordinator.statistics().num_audits
        for seed in (0, 1, 3, 5, 9, 11, 13)
    )
    assert num_audits > 40


# --- one rank


def test_a_rank_compares_at_the_message_that_asks() -> None:
    harness = Harness.make()
    one = label(3)
    audit = Audit(7, 0, 8, int32_array([3]), int32_array([0]), one.digests)
    harness.send(one, audit)
    report = harness.reports[7]
    assert (report.ok, report.block_ids) == (True, ())


def test_what_differs_is_named_and_bounded() -> None:
    harness = Harness.make()
    harness.send(label(3), label(5))
    size = len(label(3).digests)
    audit = Audit(1, 2, 6, int32_array([2, 3]), int32_array([0, 0]), b"z" * 2 * size)
    report = audit_labels(audit, harness.worker.labels, harness.worker._executor.history)
    assert report.block_ids == (2, 3, 5)


@pytest.mark.parametrize(
    ("audit", "reason"),
    [
        (Audit(1, 4, 4, int32_array([]), int32_array([]), b""), "audit of blocks 4 to 3"),
        (Audit(1, 0, 999, int32_array([]), int32_array([]), b""), "audit of blocks 0 to 998"),
        (Audit(1, 0, 4, int32_array([5]), int32_array([0]), b"abcd"), "audit of blocks 0 to 3"),
        (
            Audit(1, 0, 4, int32_array([2, 2]), int32_array([0, 0]), b"abcd" * 2),
            "name each block there once, in rising order",
        ),
        (
            Audit(1, 0, 4, int32_array([2]), int32_array([0]), b"abc"),
            "audit of 1 blocks with 1 groups and 3 bytes of digests, one has 4",
        ),
        (
            Audit(1, 0, 4, int32_array([2]), int32_array([0, 1]), b"abcd"),
            "audit of 1 blocks with 2 groups and 4 bytes of digests, one has 4",
        ),
    ],
)
def test_an_audit_that_cannot_be_meant_is_refused(audit: Audit, reason: str) -> None:
    harness = Harness.make()
    harness.send(audit)
    assert reason in harness.worker.statistics().last_invalid_reason


def test_audits_are_configured_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^audit mode 'always' is not known: choose off, sample, on$"
    ):
        AuditSettings("always")
    with pytest.raises(ConfigurationError, match=r"^audit interval_s is 0.0: set it above 0$"):
        AuditSettings("on", 0.0)
