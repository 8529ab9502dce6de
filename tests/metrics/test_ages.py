"""Ages of hit and evicted blocks, with a clock that tests move."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache import KVCacheManager, Request
from kvcache.base.clock import VirtualClock
from kvcache.core.flat_core import FlatCore
from kvcache.metrics import AgeMeter, Kind, Metric
from kvcache.policies import EVICTION_POLICIES
from tests.protocol.scenario import make_config

BLOCK = 4
BOUNDS_S = (1.0, 10.0, 100.0)
AGE = Metric("kvcache_age_seconds", Kind.HISTOGRAM, "Ages.")


class Cache:
    """A manager of a few blocks, its meter, and the clock of both."""

    def __init__(self, num_blocks: int, policy: str = "lru", *, is_watched: bool = True) -> None:
        self.clock = VirtualClock()
        self.meter = AgeMeter(BOUNDS_S, self.clock.now)
        self.manager = KVCacheManager(
            make_config(num_blocks, is_hybrid=False),
            256,
            eviction_policy=policy,
            clock=self.clock,
            core_factory=self.meter.watching() if is_watched else FlatCore,
        )

    def run(self, request_id: str, tokens: list[int]) -> int:
        """Compute a prompt and free it; return how many of its tokens were cached."""
        self.meter.tick()
        request = Request(request_id, tokens)
        blocks, num_hit = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_hit
        assert self.manager.allocate_slots(request, num_new, num_hit, blocks) is not None
        request.num_computed_tokens = request.num_tokens
        self.manager.free(request)
        self.manager.check()
        return num_hit

    def at_hit(self) -> tuple[int, ...]:
        return self.meter.at_hit(AGE).counts

    def at_eviction(self) -> tuple[int, ...]:
        return self.meter.at_eviction(AGE).counts


def prompt(number: int, num_blocks: int) -> list[int]:
    return [number * 1000 + i for i in range(num_blocks * BLOCK + 1)]


def test_a_hit_is_as_old_as_its_blocks_are_out_of_use() -> None:
    cache = Cache(32)
    cache.run("a", prompt(1, 3))
    assert cache.at_hit() == (0, 0, 0, 0)
    cache.clock.advance(5.0)
    assert cache.run("b", prompt(1, 3)) == 3 * BLOCK
    assert cache.at_hit() == (0, 3, 3, 3)
    cache.clock.advance(0.5)
    cache.run("c", prompt(1, 3))
    assert cache.at_hit() == (3, 6, 6, 6)
    assert cache.at_eviction() == (0, 0, 0, 0)


def test_a_victim_is_as_old_as_it_is_out_of_use_block_by_block() -> None:
    cache = Cache(9)  # 8 besides the null block
    cache.run("a", prompt(1, 4))  # 4 full ones, and one that holds a token
    cache.clock.advance(50.0)
    cache.run("b", prompt(2, 3))
    cache.clock.advance(5.0)
    cache.run("c", prompt(3, 3))
    evicted = cache.manager.statistics().core.num_evictions
    assert evicted == 3
    assert cache.at_eviction() == (0, 0, 3, 3)
    cache.clock.advance(200.0)
    cache.run("d", prompt(4, 7))
    assert cache.at_eviction() == (0, 0, 3, cache.manager.statistics().core.num_evictions)


def test_many_victims_at_once_are_each_as_old_as_they_are() -> None:
    cache = Cache(41)
    for number in range(40):
        cache.run(f"old {number}", prompt(number, 1)[:BLOCK])
        cache.clock.advance(3.0)  # in the end they are 120, 117, ... 3 s old
    for number, num_victims, expected in ((50, 30, (0, 0, 23, 30)), (51, 10, (0, 3, 33, 40))):
        cache.meter.tick()
        request = Request(f"new {number}", prompt(number, num_victims)[:-1])
        assert cache.manager.allocate_slots(request, request.num_tokens) is not None
        assert cache.at_eviction() == expected
    cache.manager.check()


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_a_watched_cache_decides_as_it_does_unwatched(policy: str) -> None:
    rng = random.Random(7)
    watched, plain = Cache(24, policy), Cache(24, policy, is_watched=False)
    for number in range(60):
        tokens = prompt(rng.randrange(8), rng.randrange(1, 7))
        watched.clock.advance(rng.random())
        assert watched.run(f"r{number}", tokens) == plain.run(f"r{number}", tokens)
    assert watched.manager.dump_state()["core"] == plain.manager.dump_state()["core"]
    evicted = watched.manager.statistics().core.num_evictions
    assert watched.at_eviction()[-1] == evicted > 0
    assert plain.at_eviction()[-1] == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_idle_are_exactly_the_cached_blocks_that_nothing_holds(policy: str) -> None:
    rng, cache, num_blocks = random.Random(3), Cache(24, policy), 24
    manager, since_s, seen = cache.manager, dict[int, float](), set[str]()
    for number in range(200):
        cache.clock.advance(1.0)
        cache.run(f"r{number}", prompt(rng.randrange(8), rng.randrange(1, 7)))
        if number % 11 == 5:
            manager.evict_blocks(rng.sample(range(1, num_blocks), 3))
        elif number % 23 == 7:
            manager.pin_prefix(prompt(rng.randrange(8), 3), 20.0)
        elif number % 61 == 60:
            seen.add(f"reset {manager.reset_prefix_cache()}")
        idle_s = cache.meter.idle_s(num_blocks)
        is_idle = set(np.flatnonzero(idle_s >= 0).tolist())
        held = set(np.flatnonzero(manager.control.users_of_blocks()).tolist())
        assert is_idle == set(manager.sealed_contents().block_ids.tolist()) - held
        now_s = cache.clock.now()
        since_s = {b: since_s.get(b, now_s) for b in is_idle}
        for b in is_idle:  # as long as at the last look, or used since
            assert idle_s[b] == 0.0 or idle_s[b] == pytest.approx(now_s - since_s[b])
            since_s[b] = now_s - float(idle_s[b])
        seen |= {"idle"} & {"idle" for b in is_idle if idle_s[b] > 3}
    assert seen >= {"idle", "reset True"}
