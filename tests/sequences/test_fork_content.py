"""Forks with real bytes: a write to a shared block never changes another sequence's."""

from __future__ import annotations

from typing import Any

import pytest

from actors import LocalCluster
from kvcache.config import ClusterConfig, parse_config
from tests.sequences.fork_engine import ForkEngine

FULL = {"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 8}
WINDOW = {**FULL, "kind": "sliding_window", "window_tokens": 9}
CHUNKED = {**FULL, "kind": "chunked_local", "chunk_tokens": 8}
CROSS = {**FULL, "kind": "cross", "max_encoder_tokens": 10, "beside_previous": True}


def states(mode: str, num_drafts: int = 0) -> dict[str, Any]:
    return {
        "kind": "mamba",
        "count": 2,
        "state_shapes": [[16, 2], [16, 4]],
        "cache_mode": mode,
        "num_speculative_blocks": num_drafts,
    }


MODELS: dict[str, tuple[list[dict[str, Any]], dict[str, int]]] = {
    "full": ([FULL], {"max_drafts": 3}),
    "full and window": ([FULL, WINDOW], {"max_drafts": 3}),
    "three kinds": ([FULL, WINDOW, CHUNKED], {"max_drafts": 2}),
    "aligned states": ([FULL, states("align")], {}),
    "aligned states with drafts": ([FULL, states("align", 2)], {"max_drafts": 2}),
    "states and drafts": ([FULL, states("none", 2)], {"max_drafts": 2}),
    "encoder": ([FULL, CROSS], {"max_drafts": 2, "num_encoder_tokens": 7}),
}


def make_config(
    layers: list[dict[str, Any]], num_ranks: int, *, merge_duplicates: bool = False
) -> ClusterConfig:
    return parse_config(
        {
            "name": "forks",
            "model": {"name": "small", "max_model_len": 96, "layers": layers},
            "cache": {
                "block_size": 4,
                "num_blocks": 90,
                "memory_per_rank": "1MiB",
                "merge_duplicates": merge_duplicates,
            },
            "parallel": {"tensor_parallel_size": num_ranks},
            "scheduler": {"max_num_seqs": 12, "max_num_batched_tokens": 96},
            "content_check": {"enabled": True},
        }
    )


@pytest.mark.seeds(2, long=8)
@pytest.mark.parametrize("model", MODELS)
def test_a_writer_never_changes_another_sequences_bytes(model: str, seed: int) -> None:
    layers, options = MODELS[model]
    num_ranks = 2 if seed == 0 else 1
    merges = seed in (1, 2)
    config = make_config(layers, num_ranks, merge_duplicates=merges)
    with LocalCluster(config) as cluster, cluster.client() as client:
        engine = ForkEngine(cluster, client, seed, longest=30, **options)
        engine.walk(45)
        assert client.failures == ()
        manager = cluster.coordinator.manager
        core = manager.statistics().core
        assert core.num_free_blocks == core.num_blocks
        assert core.references == {"request": 0, "pin": 0, "fork": 0, "transfer": 0}
        assert engine.num_forks > 10
        may_merge = merges and cluster.plan.can_prefix_cache
        assert (core.num_merged_blocks > 0) == may_merge
        block_bytes = cluster.plan.configs[0].block_size_bytes
        assert core.merged_bytes == core.num_merged_blocks * block_bytes
        for host in cluster.workers:
            assert host.worker.statistics().num_blocks_copied > 0
