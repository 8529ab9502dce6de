"""Coordinators: hits on which all groups agree, against brute force and the core."""

from __future__ import annotations

import logging
import random
from math import gcd, lcm

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.core import CacheHit, Reservation
from kvcache.core.block_pool import BlockPool
from kvcache.requests.request_content import DEFAULT_NAMESPACE
from kvcache.specs import KVCacheSpec, SlidingWindowSpec
from kvcache.tables.coordinators import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from tests.core.builders import (
    chunked,
    cross,
    full,
    make_flat_core,
    make_request,
    mamba,
    plan,
    window,
)
from tests.core.model_group import ModelGroup, spec_of
from tests.tables.builders import Tables

FULL, WINDOW = ModelGroup(4), ModelGroup(4, window=6)
CHUNKED, STATES = ModelGroup(4, chunk=8), ModelGroup(4, states="align")

ANY_KINDS = {
    "full": [FULL],
    "window": [WINDOW],
    "chunked": [CHUNKED],
    "states": [STATES],
    "full and chunked": [FULL, CHUNKED],
    "full and states": [FULL, STATES],
    "chunked and states": [CHUNKED, STATES],
    "window and chunked": [WINDOW, CHUNKED],
    "two chunks": [ModelGroup(2, chunk=6), ModelGroup(4, chunk=8)],
    "all": [FULL, WINDOW, CHUNKED, STATES],
    "full 16, window 8, chunked 32": [
        ModelGroup(16),
        ModelGroup(8, window=20),
        ModelGroup(32, chunk=64),
    ],
    "blocks that share no divisor": [
        ModelGroup(6),
        ModelGroup(4, chunk=8),
        ModelGroup(2, states="align"),
        ModelGroup(2, window=5),
    ],
    "coarse states": [ModelGroup(2), ModelGroup(2, window=3), ModelGroup(8, states="align")],
}
WITH_EAGLE = {
    "full": [FULL],
    "window": [WINDOW],
    "full and window": [FULL, WINDOW],
    "differing blocks": [ModelGroup(6), ModelGroup(4, window=9), ModelGroup(2, window=3)],
}
CASES = [(name, groups, False) for name, groups in ANY_KINDS.items()]
CASES += [(f"{name}, eagle", groups, True) for name, groups in WITH_EAGLE.items()]


class CachedBlocks:
    """A pool where some blocks of one sequence are cached, by group and index."""

    def __init__(self, groups: list[ModelGroup], num_tokens: int, rng: random.Random) -> None:
        self.groups = groups
        sizes = [group.block_size for group in groups]
        self.fine = gcd(*sizes)
        request = make_request("r", range(num_tokens), self.fine)
        self.digests = request.block_hashes
        self.pool = BlockPool(1 + sum(num_tokens // size for size in sizes), ordered_groups=())
        self.ids: list[dict[int, int]] = []
        share = rng.choice([0.3, 0.6, 0.8, 0.95])
        for number, size in enumerate(sizes):
            blocks = [
                b if rng.random() < share else 0
                for b in self.pool.get_new_blocks(num_tokens // size)
            ]
            self.pool.cache_full_blocks(request, blocks, 0, len(blocks), size, number)
            self.ids.append({i: b for i, b in enumerate(blocks) if b})

    def tables_at(self, length: int, extra: int) -> list[list[int]] | None:
        """The tables of a hit of `length` tokens, or None if a group lacks a block."""
        tables = []
        for group, ids in zip(self.groups, self.ids, strict=True):
            size = group.block_size
            first = max(0, group.first_needed(length) - (extra // size if group.window else 0))
            if any(index not in ids for index in range(first, length // size)):
                return None
            table = [0 if i < first else ids[i] for i in range(length // size)]
            tables.append(table[: (length - extra) // size])
        return tables

    def longest(self, max_length: int, use_eagle: bool) -> tuple[list[list[int]], int]:
        step = lcm(*(group.block_size for group in self.groups))
        extra = step if use_eagle else 0
        most = min(max_length, len(self.digests) * self.fine)
        for length in range(most // step * step, 0, -step):
            tables = self.tables_at(length, extra)
            if tables is not None:
                return tables, length - extra
        return [[] for _ in self.groups], 0


@pytest.mark.parametrize(
    ("groups", "use_eagle"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_hit_is_the_longest_on_which_all_kinds_agree(
    groups: list[ModelGroup], use_eagle: bool
) -> None:
    specs: list[KVCacheSpec] = [spec_of(group) for group in groups]
    lengths = set()
    for seed in range(60):
        rng = random.Random(seed)
        step = lcm(*(group.block_size for group in groups))
        blocks = CachedBlocks(groups, step * rng.randint(1, 9), rng)
        coordinator = get_kv_cache_coordinator(
            plan(blocks.pool.num_blocks, *specs), blocks.pool, use_eagle=use_eagle
        )
        for max_length in rng.sample(range(step * 11), 5):
            hit = coordinator.find_longest_cache_hit(blocks.digests, max_length, DEFAULT_NAMESPACE)
            tables, num_tokens = blocks.longest(max_length, use_eagle)
            assert hit.num_tokens == num_tokens, f"seed {seed}, {max_length} tokens"
            assert [list(ids) for ids in hit.block_ids] == tables, f"seed {seed}"
            lengths.add(num_tokens)
    assert len(lengths) > 3


PLANS = {
    "full": [ModelGroup(2)],
    "window": [ModelGroup(2, window=5)],
    "chunked": [ModelGroup(2, chunk=4)],
    "states": [ModelGroup(2, states="align")],
    "full and window": [ModelGroup(2), ModelGroup(2, window=4)],
    "coarse full and window": [ModelGroup(4), ModelGroup(2, window=5)],
    "full, chunked, states": [
        ModelGroup(2),
        ModelGroup(4, chunk=8),
        ModelGroup(2, states="align"),
    ],
}


@pytest.mark.parametrize("groups", PLANS.values(), ids=PLANS)
@pytest.mark.seeds(4, long=16)
def test_tables_and_hits_are_those_of_the_core(groups: list[ModelGroup], seed: int) -> None:
    """Requests come and go. Prompts end inside a block. With one group no content is computed twice
    then, so that both evict the same; with several groups nothing is evicted."""
    rng = random.Random(seed)
    specs, step = [spec_of(group) for group in groups], lcm(*(g.block_size for g in groups))
    num_blocks = 24 if len(groups) == 1 else 1000
    tables, core = Tables(num_blocks, *specs), make_flat_core(num_blocks, *specs)
    running: list[str] = []
    for turn in range(40):
        if running and rng.random() < 0.5:
            name = running.pop(rng.randrange(len(running)))
            tables.coordinator.free(name)
            core.free(make_request(name, [1]))
        else:
            name, length = f"r{turn}", step * rng.randint(1, 5) + 1
            tokens = [rng.randrange(2)] * step + list(range(length - step))
            request = make_request(name, tokens, gcd(*(g.block_size for g in groups)))
            hit, other = tables.look_up(request), core.cache.look_up(request)
            assert hit.num_tokens == other.num_tokens
            wanted = Reservation(hit.num_tokens, length, length)
            is_done = tables.reserve(request, wanted, hit)
            assert is_done == (core.reserve(request, wanted, other) is not None)
            running += [name] if is_done else []
        for name in running:
            ours, theirs = tables.coordinator.get_blocks(name), core.block_ids(name)
            assert [[b > 0 for b in t] for t in ours] == [[b > 0 for b in t] for t in theirs]
        if len(groups) == 1:
            assert tables.pool.get_num_free_blocks() == core.cache.num_free_blocks()
        assert tables.pool.num_cached_blocks == core.statistics().num_cached_blocks
        tables.pool.check()


def test_a_freed_requests_tail_goes_before_its_head_in_all_groups() -> None:
    tables = Tables(20, full(), window(9), full(8))
    tables.run(make_request("a", range(16)))
    one, two, three = tables.coordinator.get_blocks("a")
    tables.coordinator.free("a")
    order = [*two[::-1], one[3], three[1], one[2], one[1], three[0], one[0]]
    assert tables.pool.get_all_free_blocks()[-len(order) :] == order


class UncachableSpec(SlidingWindowSpec):
    @property
    def can_prefix_cache(self) -> bool:
        return False


@pytest.mark.parametrize(
    "spec", [cross(), mamba("none"), UncachableSpec(4, 1, 8, sliding_window=5)]
)
def test_a_kind_that_never_hits_turns_caching_off_with_a_warning(
    spec: KVCacheSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    tables = Tables(20, full(), spec)
    assert isinstance(tables.coordinator, KVCacheCoordinatorNoPrefixCache)
    assert caplog.messages == [
        f"prefix caching is off: KV cache groups of kind {spec.kind} cannot start from cached "
        "blocks"
    ]
    tables.run(make_request("a", range(9)))
    assert tables.pool.num_cached_blocks == 0
    assert tables.look_up(make_request("b", range(9))) == CacheHit(
        tables.look_up(make_request("b", range(9))).block_ids, 0
    )


def test_the_coordinator_follows_from_the_groups() -> None:
    pool = BlockPool(10)
    for specs, options, kind in (
        ((full(),), {}, UnitaryKVCacheCoordinator),
        ((full(), full()), {}, HybridKVCacheCoordinator),
        ((), {}, KVCacheCoordinatorNoPrefixCache),
        ((full(),), {"enable_caching": False}, KVCacheCoordinatorNoPrefixCache),
    ):
        coordinator = get_kv_cache_coordinator(plan(10, *specs), pool, **options)
        assert type(coordinator) is kind


@pytest.mark.parametrize("spec", [chunked(8), mamba()])
def test_eagle_is_refused_where_no_last_block_can_be_dropped(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigurationError) as error:
        HybridKVCacheCoordinator(plan(20, full(), spec), BlockPool(20), use_eagle=True)
    assert str(error.value) == (
        f"EAGLE cannot be used with KV cache groups of kind {spec.kind!r}, whose hits do not hold "
        "without their last block: turn use_eagle off"
    )


def test_a_unitary_coordinator_has_one_group() -> None:
    with pytest.raises(ConfigurationError, match="2 KV cache groups: use HybridKVCacheCoordinator"):
        UnitaryKVCacheCoordinator(plan(20, full(), full()), BlockPool(20))
