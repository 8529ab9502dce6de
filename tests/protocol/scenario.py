"""The events of a simulated schedule, drawn by a seed, and its tiny plan."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.protocol.network import NetworkFaults

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 8
BLOCK_SIZE = 4
MAX_ENCODER_TOKENS = 6
MAX_DRAFTS = 3

FULL = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=2)
MLA = MLAAttentionSpec(8, num_kv_heads=1, head_size=2)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_size=2, sliding_window=6)
SHORT_WINDOW = SlidingWindowSpec(2, num_kv_heads=2, head_size=2, sliding_window=5)
CHUNK = ChunkedLocalAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=2, attention_chunk_size=8)
CROSS = CrossAttentionSpec(
    BLOCK_SIZE, num_kv_heads=1, head_size=2, max_encoder_tokens=MAX_ENCODER_TOKENS
)
STATE = MambaSpec(
    8,
    shapes=((3,), (4,)),
    dtypes=("float16", "float32"),
    num_speculative_blocks=MAX_DRAFTS,
    page_size_padded=32,
)
KEPT_STATE = replace(STATE, mamba_cache_mode="align")

MODELS: Mapping[str, tuple[KVCacheSpec, ...]] = MappingProxyType(
    {
        "full": (FULL,),
        "full, window": (FULL, WINDOW),
        "mla": (MLA,),
        "chunk": (CHUNK,),
        "full, cross": (FULL, CROSS),
        "align": (KEPT_STATE,),
        "full, none": (FULL, STATE),
        "full, short window, align": (FULL, SHORT_WINDOW, KEPT_STATE),
        "mla, chunk, short window": (MLA, CHUNK, SHORT_WINDOW),
        "mla, chunk, align": (MLA, CHUNK, KEPT_STATE),
        "chunk, cross, none": (CHUNK, CROSS, STATE),
    }
)
"""Attention kinds of a model, one layer each. All pages have 32 bytes."""

MODELS_BY_CONTENT = frozenset(
    name
    for name, specs in MODELS.items()
    if not any(s.num_state_blocks is not None or s.keeps_encoder_tokens for s in specs)
)
"""Models whose blocks depend on their own tokens alone: their tails can be swapped."""

MODELS_IN_TIERS = frozenset(
    name for name, specs in MODELS.items() if all(s.can_prefix_cache for s in specs)
)
"""Models whose sealed blocks can all be stored and loaded."""


@dataclass(frozen=True)
class Scenario:
    """The events of a schedule, in addition to network faults.

    `num_host_blocks` adds a tier below the device, `num_disk_blocks` a second one of files:
    `disk_fail_share` of its calls fail and `disk_stall_share` are slow. `keeps_memory`: host memory
    outlives its process. `swap_share` of the preemptions ask for a swap. With `has_slow_copies`,
    transfers take time and overtake each other. Connections of clients end `num_hang_ups` times,
    and soon return. `num_visitors` are additional clients that leave with requests running: they
    say so, or are killed. The weights change `num_weight_changes` times.
    """

    seed: int
    num_blocks: int = 24
    num_ranks: int = 2
    num_clients: int = 1
    num_requests: int = 5
    fail_share: float = 0.0
    num_worker_losses: int = 0
    num_restarts: int = 0
    model: str = "full"
    is_content_checking: bool = True
    num_host_blocks: int = 0
    blocks_per_slot: int = 1
    store_after: int = 1
    num_disk_blocks: int = 0
    disk_fail_share: float = 0.0
    disk_stall_share: float = 0.0
    writes_through: bool = False
    keeps_memory: bool = False
    swap_share: float = 0.0
    has_slow_copies: bool = False
    num_hang_ups: int = 0
    num_visitors: int = 0
    num_weight_changes: int = 0
    faults: NetworkFaults = field(default_factory=NetworkFaults)


def random_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(seed)
    model = random.Random(seed * 15485863 + 7).choice(list(MODELS))
    tiers = random.Random(seed * 32452843 + 11)
    has_tiers = model in MODELS_IN_TIERS and tiers.random() < 0.6
    disks = random.Random(seed * 49979687 + 13)
    has_disk = has_tiers and disks.random() < 0.6
    goings = random.Random(seed * 122949823 + 19)
    num_blocks = rng.choice((22, 26, 40))
    if has_tiers:  # few, so that blocks are evicted
        num_blocks = tiers.choice((13, 16, 20))
    return Scenario(
        seed,
        num_blocks=num_blocks * len(MODELS[model]),
        num_ranks=rng.choice((1, 2, 2, 3)),
        num_clients=rng.choice((1, 1, 1, 2)),
        num_requests=rng.randint(2, 4) + tiers.choice((2, 6)) * has_tiers,
        fail_share=rng.choice((0.0, 0.0, 0.15)),
        num_worker_losses=rng.choice((0, 0, 0, 1)),
        num_restarts=random.Random(-seed).choice((0, 0, 0, 0, 1, 2)),
        model=model,
        num_host_blocks=tiers.choice((4, 12, 40)) * has_tiers,
        blocks_per_slot=tiers.choice((1, 1, 2)),
        store_after=tiers.choice((1, 1, 2)),
        num_disk_blocks=disks.choice((6, 30, 100)) * has_disk,
        disk_fail_share=disks.choice((0.0, 0.0, 0.03, 0.2)),
        disk_stall_share=disks.choice((0.0, 0.0, 0.05)),
        writes_through=disks.random() < 0.3,
        keeps_memory=has_tiers and disks.random() < 0.4,
        swap_share=random.Random(seed * 86028121 + 17).choice((0.0, 0.5, 1.0)),
        num_hang_ups=goings.choice((0, 0, 0, 1, 4)),
        num_visitors=goings.choice((0, 0, 0, 1, 2)),
        num_weight_changes=random.Random(seed * 179424673 + 23).choice((0, 0, 1, 3)),
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
    return config_of("full, window" if is_hybrid else "full", num_blocks)


def config_of(
    model: str, num_blocks: int, host_blocks: int = 0, disk_blocks: int = 0
) -> KVCacheConfig:
    """One layer of each kind of a model in one pool, slots of host memory, and files."""
    specs = MODELS[model]
    page = specs[0].page_size_bytes
    assert {spec.page_size_bytes for spec in specs} == {page}
    groups = tuple(KVCacheGroupSpec((f"{spec.kind}.0",), spec) for spec in specs)
    pool = KVCacheTensor(num_blocks * page, tuple(g.layer_names[0] for g in groups), 0, page, page)
    return KVCacheConfig(
        num_blocks, (pool,), groups, host_blocks=host_blocks, disk_blocks=disk_blocks
    )
