"""The coordinator killed over a full cache: how long until a prompt hits again. Row C4.

A cluster with 100,000 cached blocks; its coordinator's process is killed, Ray starts it again, and
the client attaches again and looks up a prompt that was computed before. The same run measures
Ray's own share: a bare actor is killed and called until it answers. The benchmark prints the
difference, and the share of the sealed blocks that survived.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from actors import KVCacheClient, KVCacheCluster
from bench.cores import OURS, PEER
from bench.measure import Figure, Row
from kvcache.base.errors import KVCacheError
from kvcache.config import ClusterConfig, parse_config
from kvcache.protocol.step import NewRequest, StepRequest

BLOCK_SIZE = 16
PROMPT_BLOCKS = 512
NUM_WORKERS = 2
GIVE_UP_S = 60.0


class BareActor:
    """What Ray restarts when there is nothing to be done."""

    def process_id(self) -> int:
        """Answer."""
        return os.getpid()


def make_config(num_blocks: int) -> ClusterConfig:
    """Return a tiny model with many blocks."""
    prompt = PROMPT_BLOCKS * BLOCK_SIZE
    return parse_config(
        {
            "name": "restart",
            "model": {
                "name": "restart",
                "max_model_len": prompt + BLOCK_SIZE,
                "layers": [
                    {
                        "kind": "full",
                        "count": 1,
                        "num_kv_heads": 1,
                        "head_size": 2,
                        "block_size": BLOCK_SIZE,
                    }
                ],
            },
            "cache": {"memory_per_rank": "256MiB", "num_blocks": num_blocks},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 8 * prompt},
            "parallel": {"tensor_parallel_size": NUM_WORKERS},
            "workers": {"num_cpus_per_rank": 0.1},
        }
    )


def fill(client: KVCacheClient, num_prompts: int, say: Callable[[str], None]) -> None:
    """Compute so many prompts, one after the other."""
    completed = -1
    random = np.random.default_rng(5)
    names: tuple[str, ...] = ()
    for number in range(num_prompts):
        if number % 32 == 0:
            say(f"filling the cache, {number} of {num_prompts} prompts")
        tokens = prompt_tokens(random)
        step = StepRequest(
            completed_step=completed,
            finished=names,
            new=(NewRequest(f"fill-{number}", tokens, len(tokens)),),
        )
        completed = client.step(step).step
        client.wait_applied(completed)
        names = (f"fill-{number}",)
    last = client.step(StepRequest(completed_step=completed, finished=names)).step
    client.wait_applied(last)


def prompt_tokens(random: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return a prompt that fills its blocks, and one token more."""
    return random.integers(0, 150_000, PROMPT_BLOCKS * BLOCK_SIZE + 1, np.int32)


def first_hit_s(client: KVCacheClient, process_id: int) -> tuple[float, float]:
    """Kill the coordinator; return seconds until the first correct hit, and until attached."""
    tokens = prompt_tokens(np.random.default_rng(5))
    start_s = time.perf_counter()
    os.kill(process_id, signal.SIGKILL)
    while True:
        try:
            client.step(StepRequest(), timeout_s=GIVE_UP_S)
        except KVCacheError:
            break
    client.attach(timeout_s=GIVE_UP_S)
    attached_s = time.perf_counter() - start_s
    result = client.step(StepRequest(new=(NewRequest("again", tokens, 64),)), timeout_s=GIVE_UP_S)
    hit_s = time.perf_counter() - start_s
    num_hit = int(result.num_hit_tokens[0])
    if num_hit != PROMPT_BLOCKS * BLOCK_SIZE:
        raise RuntimeError(f"{num_hit} tokens of the first prompt were found after the restart")
    return hit_s, attached_s


def bare_restart_s() -> float:
    """Return the seconds that Ray takes to start a bare actor again."""
    make_remote: Any = ray.remote
    actor = make_remote(BareActor).options(max_restarts=-1, num_cpus=0).remote()
    process_id = ray.get(actor.process_id.remote())
    start_s = time.perf_counter()
    os.kill(process_id, signal.SIGKILL)
    while time.perf_counter() - start_s < GIVE_UP_S:
        try:
            if ray.get(actor.process_id.remote(), timeout=GIVE_UP_S) != process_id:
                break
        except RayError:
            time.sleep(0.002)
    taken_s = time.perf_counter() - start_s
    ray.kill(actor)
    return taken_s


@contextmanager
def filled_cluster(
    num_blocks: int, say: Callable[[str], None]
) -> Iterator[tuple[KVCacheCluster, KVCacheClient]]:
    """Yield a cluster whose cache is as full as whole prompts make it."""
    config = make_config(num_blocks + PROMPT_BLOCKS)
    with KVCacheCluster.launch(config) as cluster, cluster.client() as client:
        fill(client, num_blocks // PROMPT_BLOCKS, say)
        yield cluster, client


def measure_restart(is_small: bool, say: Callable[[str], None]) -> list[Row]:
    """Return the rows of C4. Ray runs."""
    num_blocks, rounds = (2 * PROMPT_BLOCKS, 1) if is_small else (100_352, 3)
    hits: list[float] = []
    bare: list[float] = []
    shares = []
    with filled_cluster(num_blocks, say) as (cluster, client):
        for number in range(rounds):
            say(f"restart {number + 1} of {rounds}")
            before = sealed_blocks(cluster)
            bare.append(bare_restart_s())
            hit_s, _ = first_hit_s(client, cluster.status().coordinator_process_id)
            hits.append(hit_s)
            shares.append(kept_share(cluster, before))
            client.step(StepRequest(finished=("again",)))
    beyond_s = sorted(hits)[len(hits) // 2] - sorted(bare)[len(bare) // 2]
    return [
        Row(
            workload="C4",
            what=f"coordinator killed over {num_blocks:,} cached blocks: first correct hit",
            figures={OURS: Figure(tuple(hits)), PEER: Figure(tuple(bare))},
            peer_name="a bare actor's restart",
            goal="< 2 s beyond Ray's own restart, 100% kept",
            note=f"beyond Ray's own restart: {beyond_s * 1e3:.0f} ms; "
            f"kept {min(shares):.2%} of sealed blocks",
        )
    ]


def sealed_blocks(cluster: KVCacheCluster) -> int:
    """Return how many blocks are sealed now."""
    figures = cluster.statistics().coordinator
    if figures is None or figures.manager is None:
        raise RuntimeError("the coordinator has no figures")
    return figures.manager.core.num_sealed_blocks


def kept_share(cluster: KVCacheCluster, before: int) -> float:
    """Return the share of the blocks sealed before that the new coordinator began with."""
    figures = cluster.statistics().coordinator
    return 0.0 if figures is None else figures.num_kept_blocks / before
