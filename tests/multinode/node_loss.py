"""A cluster that loses the node of one of its stages. A script: see test_two_nodes.py."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from actors import KVCacheCluster
from actors.clusters.placement import wait_until
from kvcache.base.errors import DeadlineError, StaleEpochError, WorkerLostError
from kvcache.config import parse_config
from kvcache.protocol.step import NewRequest, StepRequest

SOON_S = 150.0
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 10}


def main(scratch: str) -> None:
    """Start two nodes with room for one stage each; remove one, and bring another one later."""
    head = {**NODE, "include_dashboard": False, "temp_dir": os.path.join(scratch, "ray")}
    nodes = Cluster(initialize_head=True, head_node_args={**head, "_system_config": HEALTH})
    second = nodes.add_node(**NODE)
    ray.init(address=nodes.address, log_to_driver=False)
    config = parse_config(
        {
            "name": "node-loss",
            "model": {
                "name": "small",
                "max_model_len": 512,
                "layers": [{"kind": "full", "count": 4, "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {"memory_per_rank": "1MiB"},
            "parallel": {"pipeline_parallel_size": 2},
            "workers": {"num_cpus_per_rank": 0.8},
            "deadlines": {"startup_s": 90.0, "worker_silence_s": 5.0, "worker_kill_s": 15.0},
            "content_check": {"enabled": True},
        }
    )
    with KVCacheCluster.launch(config) as cluster, cluster.client() as client:
        play(client, "a")
        end_one_that_hangs(cluster, client)
        before = cluster.status().ranks
        lost = next(rank for rank in before if rank.node_id == second.node_id)
        nodes.remove_node(second, allow_graceful=False)
        wait_for_the_end(client)
        waiting = f"rank {lost.rank}: lost"
        assert wait_until(lambda: is_waiting_for_room(cluster, lost.rank), SOON_S), waiting
        third = nodes.add_node(**NODE)
        client.attach(timeout_s=SOON_S)
        play(client, "b")
        play(client, "c", num_hits=32)
        assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
        after = cluster.status().ranks
        assert after[lost.rank].node_id == third.node_id, (before, after)
        assert after[1 - lost.rank] == before[1 - lost.rank], (before, after)
    ray.shutdown()
    nodes.shutdown()
    print("the stage has moved")


def end_one_that_hangs(cluster: KVCacheCluster, client: Any) -> None:
    """Stop the worker that is not on the coordinator's node: it is ended remotely."""
    status = cluster.status()
    far = next(r for r in status.ranks if r.node_id != status.coordinator_node.node_id)
    os.kill(far.process_id, signal.SIGSTOP)
    wait_for_the_end(client)
    client.attach(timeout_s=SOON_S)
    assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
    again = cluster.status().ranks[far.rank]
    assert (again.node_id, again.process_id != far.process_id) == (far.node_id, True), again
    assert not os.path.exists(f"/proc/{far.process_id}")
    play(client, "hung")


def is_waiting_for_room(cluster: KVCacheCluster, rank: int) -> bool:
    """Return whether the coordinator, which may be moving itself, reports that there is no room."""
    try:
        return cluster.status().ranks[rank].replacement == "waiting for room"
    except (DeadlineError, IndexError):
        return False


def wait_for_the_end(client: Any) -> None:
    """Step until the epoch's end is known; a client without any answer keeps trying."""
    while True:
        try:
            client.wait_finished(client.step(StepRequest("", 0, 0)).step)
        except DeadlineError:
            continue
        except (WorkerLostError, StaleEpochError):
            return


def play(client: Any, request_id: str, num_hits: int = 0) -> None:
    """Compute a prompt, which hits `num_hits` tokens, and finish it."""
    new = (NewRequest(request_id, np.arange(40, dtype=np.int32), 40),)
    computed = client.step(StepRequest("", 0, 0, new=new))
    client.wait_finished(computed.step)
    done = StepRequest("", 0, 0, completed_step=computed.step, finished=(request_id,))
    client.wait_finished(client.step(done).step)
    assert computed.num_hit_tokens.tolist() == [num_hits]
    assert client.failures == ()


if __name__ == "__main__":
    main(sys.argv[1])
