"""A cluster whose pipeline stages are on two nodes. A script of its own: see test_two_nodes.py."""

from __future__ import annotations

import os
import sys

import numpy as np
import ray
from ray.cluster_utils import Cluster

from actors import KVCacheCluster
from kvcache.config import parse_config
from kvcache.protocol.step import NewRequest, StepRequest


def main(scratch: str) -> None:
    """Start two nodes with room for one stage each; use them with and without keys."""
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80 * 2**20,
            "temp_dir": os.path.join(scratch, "ray"),
        },
    )
    nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    ray.init(address=nodes.address, log_to_driver=False)
    for curve in ("auto", "always"):
        play(curve)
    ray.shutdown()
    nodes.shutdown()
    print("two nodes agree")


def play(curve: str) -> None:
    """Launch a cluster over both nodes; a request hits the blocks of an earlier one."""
    config = parse_config(
        {
            "name": f"two-nodes-{curve}",
            "model": {
                "name": "small",
                "max_model_len": 512,
                "layers": [{"kind": "full", "count": 4, "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {"memory_per_rank": "1MiB"},
            "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "workers": {"num_cpus_per_rank": 0.4},
            "transport": {"curve": curve},
            "deadlines": {"startup_s": 50.0},
            "content_check": {"enabled": True},
        }
    )
    with KVCacheCluster.launch(config) as cluster, cluster.client() as client:
        ranks = cluster.status().ranks
        stages = [{rank.node_id for rank in ranks[i : i + 2]} for i in (0, 2)]
        assert [len(stage) for stage in stages] == [1, 1], stages
        assert stages[0] != stages[1], stages
        tokens = np.arange(40, dtype=np.int32)
        computed = client.step(StepRequest("", 0, 0, new=(NewRequest("a", tokens, 40),)))
        client.wait_finished(computed.step)
        finished = client.step(StepRequest("", 0, 0, completed_step=computed.step, finished=("a",)))
        client.wait_finished(finished.step)
        again = client.step(StepRequest("", 0, 0, new=(NewRequest("b", tokens, 40),)))
        client.wait_finished(again.step)
        assert again.num_hit_tokens.tolist() == [32]
        assert client.failures == ()
        assert cluster.status().state == "ready"


if __name__ == "__main__":
    main(sys.argv[1])
