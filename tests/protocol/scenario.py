"""What happens in a simulated schedule, drawn by a seed, and the tiny plan it happens to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvcache.network import NetworkFaults
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 8
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Scenario:
    """What happens in a schedule, beside the faults of the network."""

    seed: int
    num_blocks: int = 24
    num_ranks: int = 2
    num_clients: int = 1
    num_requests: int = 5
    fail_share: float = 0.0
    num_worker_losses: int = 0
    num_restarts: int = 0
    is_hybrid: bool = False
    is_content_checking: bool = True
    faults: NetworkFaults = field(default_factory=NetworkFaults)


def random_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(seed)
    return Scenario(
        seed,
        num_blocks=rng.choice((22, 26, 40)) * (2 if (is_hybrid := rng.random() < 0.4) else 1),
        num_ranks=rng.choice((1, 2, 2, 3)),
        num_clients=rng.choice((1, 1, 1, 2)),
        num_requests=rng.randint(2, 4),
        fail_share=rng.choice((0.0, 0.0, 0.15)),
        num_worker_losses=rng.choice((0, 0, 0, 1)),
        num_restarts=random.Random(-seed).choice((0, 0, 0, 0, 1, 2)),
        is_hybrid=is_hybrid,
        faults=NetworkFaults(
            dropped=rng.choice((0.0, 0.05, 0.2)),
            duplicated=rng.choice((0.0, 0.1, 0.3)),
            delayed=rng.choice((0.0, 0.2, 0.5)),
            reordered=rng.choice((0.0, 0.3)),
            torn=rng.choice((0.0, 0.05)),
            max_delay_s=rng.choice((0.02, 0.2)),
        ),
    )


def make_config(num_blocks: int, *, is_hybrid: bool) -> KVCacheConfig:
    """One layer of full attention, or one each of full and of window attention in one pool."""
    full = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=2, dtype="float16")
    groups = [KVCacheGroupSpec(("full.0",), full)]
    if is_hybrid:
        window = SlidingWindowSpec(
            BLOCK_SIZE, num_kv_heads=1, head_size=2, dtype="float16", sliding_window=6
        )
        groups.append(KVCacheGroupSpec(("window.0",), window))
    page = full.page_size_bytes
    pool = KVCacheTensor(num_blocks * page, tuple(g.layer_names[0] for g in groups), 0, page, page)
    return KVCacheConfig(num_blocks, (pool,), tuple(groups))
