"""Statistics of a real cluster as Prometheus scrapes them, from the agent of the node."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest
import ray

from actors import KVCacheCluster
from kvcache import NewRequest, StepRequest
from kvcache.base.arrays import int32_array
from kvcache.metrics import METRICS
from kvcache.metrics.step_meter import STRIDE
from tests.metrics.exposition import Series, parse_exposition
from tests.metrics.table import exposed_series

pytestmark = pytest.mark.ray

LONGEST_S = 90.0
"""Ray exports the metrics of processes every ten seconds."""

SOMETIMES = ("kvcache_tier", "kvcache_load", "kvcache_copied", "kvcache_copy", "kvcache_tenant")
"""Only with tiers, or with named tenants."""


def scrape() -> list[Series]:
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return parse_exposition(answer.read().decode())


def of_cluster(name: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the series of a cluster by name and by its own labels."""
    own = {label for metric in METRICS for label in metric.labels} | {"le"}
    return {
        (series.name, tuple(sorted((k, v) for k, v in series.labels.items() if k in own))): (
            series.value
        )
        for series in scrape()
        if series.labels.get("cluster") == name
    }


@pytest.mark.launches
def test_the_agent_of_the_node_serves_every_metric_with_its_value(
    launch: Any, make_config: Any
) -> None:
    config = make_config(metrics={"interval_s": 0.5})
    cluster: KVCacheCluster = launch(config)
    with cluster.client() as client:
        tokens = list(range(100, 164))
        client.wait_finished(client.step(new_request("a", tokens)).step)
        client.wait_finished(client.step(new_request("b", tokens, completed_step=1)).step)
        for step in range(2, 2 * STRIDE):
            client.wait_finished(client.step(StepRequest(completed_step=step)).step)
        statistics = cluster.coordinator_statistics()
        assert statistics is not None and statistics.manager is not None
        wanted = {
            ("ray_kvcache_query_tokens_total", ()): statistics.manager.num_asked_tokens,
            (
                "ray_kvcache_hit_tokens_total",
                (("tier", "device"),),
            ): statistics.manager.num_hit_tokens,
            ("ray_kvcache_requests", (("state", "running"),)): 2,
            ("ray_kvcache_steps_total", (("outcome", "executed"),)): 2 * STRIDE,
            ("ray_kvcache_step_applied_seconds_count", ()): 2,
            ("ray_kvcache_step_applied_seconds_bucket", (("le", "+Inf"),)): 2,
            ("ray_kvcache_cached_blocks", ()): statistics.manager.core.num_cached_blocks,
            ("ray_kvcache_running", ()): 1,
            ("ray_kvcache_worker_forwards_total", (("rank", "0"),)): 2 * STRIDE,
            ("ray_kvcache_worker_forwards_total", (("rank", "1"),)): 2 * STRIDE,
        }
        assert statistics.manager.num_hit_tokens > 0
        keys = {
            (name, tuple(sorted((*labels, ("cluster", config.name))))): value
            for (name, labels), value in wanted.items()
        }
        give_up_s = time.monotonic() + LONGEST_S
        while True:
            found = of_cluster(config.name)
            got = {key: found.get(key) for key in keys}
            if got == keys:
                break
            assert time.monotonic() < give_up_s, {k: (v, keys[k]) for k, v in got.items()}
            time.sleep(0.5)
    names = {name for name, _ in found}
    always = {
        series
        for metric in METRICS
        if not metric.name.startswith(SOMETIMES)
        for series in exposed_series(metric)
    }
    # Counters at 0 have no series yet.
    silent = {name for name in always - names if not name.endswith("_total")}
    assert silent == set()


def new_request(request_id: str, tokens: list[int], **fields: int) -> StepRequest:
    new = NewRequest(request_id, int32_array(tokens), max_new_tokens=len(tokens))
    return StepRequest(new=(new,), **fields)
