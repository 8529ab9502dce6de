"""What the fast core's rules let a request start from: the same as the managers of that kind."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.blocks.pool import BlockPool
from kvcache.blocks.run import CachedRun
from kvcache.errors import ConfigurationError
from kvcache.extents.hits import BoolArray, HitFinder
from kvcache.extents.shape import TreeShape
from kvcache.hashing import BlockHash
from kvcache.managers.coordinators import get_kv_cache_coordinator
from kvcache.request_content import DEFAULT_NAMESPACE
from kvcache.specs import KVCacheSpec
from tests.managers.core_builders import chunked, full, mamba, plan, window

NUM_UNITS = 24

PLANS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(),),
    "window of one block": (window(5),),
    "window": (window(9),),
    "wide window": (window(30),),
    "full, window": (full(), window(9)),
    "full, two windows": (full(), window(6), window(17)),
    "full, two equal windows": (full(), window(9), window(9)),
    "full, window of long blocks": (full(), window(17, 8)),
    "long full, window": (full(8), window(9)),
}
PLANS_WITHOUT_EAGLE: dict[str, tuple[KVCacheSpec, ...]] = {
    "full, chunked": (full(), chunked(16)),
    "full, chunked, window": (full(), chunked(8), window(7)),
    "full, states": (full(), mamba()),
    "full, states far apart": (full(), mamba(block_size=16)),
    "full, window, states": (full(), window(13, 8), mamba(block_size=16)),
}
CASES = [(name, eagle) for name in PLANS for eagle in (False, True)]
CASES += [(name, False) for name in PLANS_WITHOUT_EAGLE]


def random_presence(specs: tuple[KVCacheSpec, ...], choose: random.Random) -> list[BoolArray]:
    """Which blocks of each group are there. Of ordered groups it is a prefix."""
    share = choose.choice([0.3, 0.7, 0.9, 0.97])
    presence = []
    for spec in specs:
        count = NUM_UNITS * 4 // spec.block_size
        there = [choose.random() < share for _ in range(count)]
        presence.append(np.array(there, dtype=np.bool_))
    reached = choose.randrange(NUM_UNITS + 1) * 4
    for spec, there in zip(specs, presence, strict=True):
        if spec.reads_whole_prefix:
            there[:] = True
        there[reached // spec.block_size :] = False
    return presence


def expected_hit(
    specs: tuple[KVCacheSpec, ...], presence: list[BoolArray], max_tokens: int, use_eagle: bool
) -> tuple[int, list[list[bool]]]:
    """Return what the managers find in a pool that holds just these blocks."""
    config = plan(2000, *specs)
    ordered = frozenset(g for g, spec in enumerate(specs) if spec.reads_whole_prefix)
    pool = BlockPool(2000, ordered_groups=ordered)
    coordinator = get_kv_cache_coordinator(config, pool, enable_caching=True, use_eagle=use_eagle)
    units = coordinator.hash_block_size
    hashes = [BlockHash(bytes([n])) for n in range(NUM_UNITS * 4 // units)]
    for group, (spec, there) in enumerate(zip(specs, presence, strict=True)):
        length = spec.block_size // units
        for n in np.flatnonzero(there).tolist():
            last = (n + 1) * length - 1
            parent = hashes[last - length] if n else BlockHash(b"")
            table = pool.contents.table(DEFAULT_NAMESPACE, group)
            tokens = np.arange(spec.block_size, dtype=np.int32)
            pool.cache_full_blocks(
                CachedRun(
                    table=table,
                    block_ids=pool.get_new_blocks(1),
                    digests=[hashes[last]],
                    parent=parent,
                    token_ids=tokens,
                    block_size=spec.block_size,
                    extra_keys=(),
                    request_id="r",
                    first_index=n,
                )
            )
    hit = coordinator.find_longest_cache_hit(hashes, max_tokens, DEFAULT_NAMESPACE)
    return hit.num_tokens, [(ids != 0).tolist() for ids in hit.block_ids]


def found_hit(
    specs: tuple[KVCacheSpec, ...], presence: list[BoolArray], max_tokens: int, use_eagle: bool
) -> tuple[int, list[list[bool]]]:
    finder = HitFinder(TreeShape.of(plan(10, *specs), 8), use_eagle=use_eagle)
    ordered = [g for g, spec in enumerate(specs) if spec.reads_whole_prefix]
    for g in ordered:
        max_tokens = min(max_tokens, int(presence[g].sum()) * specs[g].block_size)
    fit = finder.fit(max_tokens, lambda group, start, end: presence[group][start:end])
    read = [[kept.start <= n for n in range(kept.end)] for kept in fit.kept]
    return fit.num_tokens, read


@pytest.mark.parametrize(("name", "use_eagle"), CASES)
def test_a_hit_is_what_the_managers_of_the_kinds_find(name: str, use_eagle: bool) -> None:
    specs = (PLANS | PLANS_WITHOUT_EAGLE)[name]
    choose = random.Random(name)
    for case in range(25):
        presence = random_presence(specs, choose)
        max_tokens = choose.randrange(NUM_UNITS * 4 + 1)
        expected = expected_hit(specs, presence, max_tokens, use_eagle)
        found = found_hit(specs, presence, max_tokens, use_eagle)
        assert found == expected, f"case {case}: {presence}, at most {max_tokens} tokens"


def test_a_kind_without_a_rule_is_refused() -> None:
    shape = TreeShape.of(plan(10, full(), window(9)), 8)
    with pytest.raises(ConfigurationError) as error:
        HitFinder(shape, use_eagle=False, rules={})
    assert str(error.value) == (
        "core 'extents' has no hit rule for KV cache specs of kind 'sliding_window': use one of "
        ", give it a rule, or choose core 'blocks'"
    )
