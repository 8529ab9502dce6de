"""Hints: random walks against a slow model, and what each kind of hint does and may not do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import RequestError
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.manager import KVCacheManager
from kvcache.policies import LRUPolicy
from kvcache.policies import hinted as module
from kvcache.policies.hinted import HintColumns, HintedPolicy
from kvcache.requests.hints import CacheHint, blocks_in
from kvcache.requests.request import Request
from kvcache.simulate.counting import CountingOptions, counted_config, make_counted_manager
from tests.policies.cache import Cache
from tests.policies.slow_hinted import SlowHinted

OVER = CacheHint(is_over=True)


class HintedCache(Cache):
    """A cache whose requests end with hints; time moves on between operations."""

    policy: HintedPolicy
    slow: SlowHinted  # type: ignore[assignment]

    def __init__(self, rng: random.Random) -> None:
        capacity = rng.choice([6, 15, 30])
        self.columns = HintColumns(capacity, 0.0)
        super().__init__(
            rng,
            lambda capacity, table: HintedPolicy(LRUPolicy(capacity, table), table, self.columns),
            lambda capacity, table: SlowHinted(table),  # type: ignore[arg-type,return-value]
            capacity=capacity,
        )

    def release(self) -> None:
        if not self.users:
            return
        self.rng.shuffle(self.users)
        others, path = self.users[:-1], self.users[-1]
        self.users = [path]
        super().release()
        self.users = others
        self.pass_time()
        unused = [c.entry for c in path if c.entry is not None and not c.num_users]
        if unused and self.rng.random() < 0.8:
            hint = self.draw_hint()
            self.policy.hint(unused, hint)
            self.slow.hint(unused, hint)

    def forget_in_use(self) -> None:
        held = set(self.held_by)
        super().forget_in_use()
        self.tell("forget", sorted(held - set(self.held_by)))

    def pass_time(self) -> None:
        self.columns.now_s = self.slow.now_s = self.columns.now_s + self.rng.choice([0, 0.5, 3.0])

    def draw_hint(self) -> CacheHint:
        return self.rng.choice(
            [
                OVER,
                CacheHint(returns_in_s=self.rng.choice([0.5, 2.0, 30.0])),
                CacheHint(
                    priority=self.rng.choice([0, 50, 60, 90]),
                    duration_s=self.rng.choice([None, 1.0, 9.0]),
                ),
            ]
        )

    def compare(self) -> None:
        super().compare()
        assert self.policy.trust == self.slow.trust
        assert self.columns.lasting == self.slow.lasting


@pytest.mark.seeds(4, long=30)
@pytest.mark.parametrize("few_claims", [16, 1])
def test_hints_do_what_the_slow_model_does(
    few_claims: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FEW_CLAIMS", few_claims)
    monkeypatch.setattr(module, "_MEMORY_CLAIMS", 40)
    HintedCache(random.Random(seed)).walk(300)


class Engine:
    """A manager of 20 blocks of 2 tokens, and requests one after another, a second apart."""

    def __init__(self, **options: object) -> None:
        self.clock = VirtualClock()
        self.manager: KVCacheManager = make_counted_manager(
            CountingOptions(**options),
            2,
            20,
            4,
            self.clock,  # type: ignore[arg-type]
        )
        self.num_requests = 0

    def serve(self, first: int, num_blocks: int, *hints: CacheHint) -> int:
        """Serve tokens from `first` on; return the hit blocks."""
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", range(first, first + 2 * num_blocks + 1))
        hit, num_hit = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_hit
        assert self.manager.allocate_slots(request, num_new, num_hit, hit) is not None
        request.hints = hints
        self.manager.free(request)
        self.manager.check()
        self.clock.advance(1.0)
        return num_hit // 2

    def teach(self) -> None:
        """Let sessions end and return as hinted until hints are trusted."""
        for i in range(60):
            first = 10_000 + 1_000 * i
            self.serve(first, 1, CacheHint(returns_in_s=1.0))
            self.serve(first, 1, OVER)
            self.serve(first + 100, 3, OVER)

    def press(self, num_blocks: int) -> None:
        """Take blocks by other contents without hints."""
        for i in range(num_blocks // 2):
            self.serve(900_000 + 1_000 * self.num_requests + i, 2)


def test_a_priority_outlasts_uses_and_ends_in_time() -> None:
    engine = Engine()
    engine.serve(0, 4, CacheHint(priority=90, duration_s=100.0))
    engine.press(60)
    assert engine.serve(0, 4) == 4
    engine.press(60)
    assert engine.serve(0, 4) == 4
    engine.clock.advance(100.0)
    engine.press(60)
    assert engine.serve(0, 4) == 0


def test_a_low_priority_goes_first() -> None:
    engine = Engine()
    engine.serve(0, 4)
    engine.serve(1_000, 4, CacheHint(priority=0))
    engine.serve(2_000, 8)
    engine.serve(3_000, 7)
    assert engine.serve(0, 4) == 4 and engine.serve(1_000, 4) == 0


def test_a_low_priority_is_for_own_blocks_only() -> None:
    engine = Engine()
    for tail, hints in ((100, ()), (200, ()), (300, (CacheHint(priority=0),))):
        request = Request(f"s{tail}", [*range(8), *range(tail, tail + 5)])
        hit, num_hit = engine.manager.get_computed_blocks(request)
        assert engine.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        request.hints = hints
        engine.manager.free(request)
        engine.clock.advance(1.0)
    engine.press(12)
    own = Request("own", [*range(8), *range(300, 305)])
    assert engine.manager.get_computed_blocks(own)[1] == 8


def test_among_kept_blocks_a_higher_priority_stays_longer() -> None:
    engine = Engine()
    engine.press(40)
    engine.serve(0, 4, CacheHint(priority=100))
    for i in range(1, 5):
        engine.serve(1_000 * i, 4, CacheHint(priority=60))
    assert engine.serve(0, 4) == 4 and engine.serve(1_000, 4) < 4


def test_kept_blocks_hold_at_most_half_of_all() -> None:
    engine = Engine()
    engine.serve(0, 4)
    for i in range(1, 20):
        engine.serve(1_000 * i, 3, CacheHint(priority=100))
        assert engine.serve(0, 4) == 4  # without a hint, used all the time: as under LRU


def test_kept_blocks_go_when_there_is_no_other_room() -> None:
    engine = Engine()
    for i in range(3):
        engine.serve(1_000 * i, 6, CacheHint(priority=100))
    assert engine.serve(9_000, 19) == 0  # has all blocks


def test_a_session_that_is_over_goes_first_once_hints_are_trusted() -> None:
    engine = Engine()
    engine.teach()
    engine.serve(0, 8)
    engine.serve(1_000, 8, OVER)
    engine.serve(2_000, 4)
    engine.serve(3_000, 3)
    assert engine.serve(0, 8) == 8 and engine.serve(1_000, 8) < 8


def test_what_other_sessions_share_is_not_over() -> None:
    engine = Engine()
    engine.teach()
    shared = Request("shared", range(8))
    for tail, hints in ((100, ()), (200, ()), (300, (OVER,))):
        request = Request(f"s{tail}", [*range(8), *range(tail, tail + 5)])
        hit, num_hit = engine.manager.get_computed_blocks(request)
        engine.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        request.hints = hints
        engine.manager.free(request)
    hit, num_hit = engine.manager.get_computed_blocks(shared)
    order = engine.manager._core.cache.order
    assert order is not None and isinstance(order.policy, HintedPolicy)
    assert num_hit == 6 and not set(hit.get_block_ids()[0]) & set(order.policy._first)
    assert order.policy._first  # the tail of the last session


def test_returns_are_ordered_by_their_time() -> None:
    engine = Engine()
    engine.teach()
    engine.serve(0, 6, CacheHint(returns_in_s=20.0))
    engine.serve(1_000, 6, CacheHint(returns_in_s=500.0))
    engine.serve(2_000, 6, CacheHint(returns_in_s=20.0))
    engine.serve(3_000, 6, CacheHint(returns_in_s=20.0))
    assert [engine.serve(first, 6) for first in (0, 2_000)] == [6, 6]
    assert engine.serve(1_000, 6) < 6


def test_a_return_that_does_not_come_costs_its_owner() -> None:
    engine = Engine()
    engine.teach()
    engine.serve(0, 6, CacheHint(returns_in_s=2.0))
    engine.serve(1_000, 6)
    engine.clock.advance(5.0)
    engine.serve(2_000, 10)
    assert engine.serve(1_000, 6) == 6 and engine.serve(0, 6) < 6


def hits_of_sessions(lies: list[CacheHint], truths: list[CacheHint]) -> int:
    """Return the hits of sessions that soon go on: half of their requests end with `lies`, the
    others with `truths`."""
    engine, rng = Engine(), random.Random(3)
    num_hits = 0
    for i in range(400):
        session = i // 4 + rng.randrange(5)
        num_hits += engine.serve(1_000 * session, 3, *(lies if rng.random() < 0.5 else truths))
    return num_hits


SOON = CacheHint(returns_in_s=3.0)


@pytest.mark.parametrize("hint", [OVER, CacheHint(returns_in_s=1_000.0)])
def test_false_hints_are_not_followed(hint: CacheHint) -> None:
    assert hits_of_sessions([hint], [SOON]) >= hits_of_sessions([], []) - 400 * 3 * 0.02


def test_a_claim_that_is_repeated_counts_once() -> None:
    assert hits_of_sessions([OVER] * 16, [SOON]) == hits_of_sessions([OVER], [SOON])


def test_hints_of_a_tenant_order_only_its_own_share() -> None:
    def hits(*hints: CacheHint) -> int:
        clock = VirtualClock()
        half = TenantConfig(guaranteed=0.5)
        manager = KVCacheManager(
            counted_config(CountingOptions(), 2, 20),
            1_000,
            clock=clock,
            tenants=TenantsConfig(named={"a": half, "b": half}),
        )
        num_hits = 0
        for i in range(60):
            for tenant, first in (("a", 1_000 * i), ("b", 1_000 * (i % 3))):
                request = Request(f"{tenant}{i}", range(first, first + 7), tenant=tenant)
                hit, num_hit = manager.get_computed_blocks(request)
                manager.allocate_slots(request, 7 - num_hit, num_hit, hit)
                request.hints = hints if tenant == "a" else ()
                manager.free(request)
                manager.check()
                clock.advance(1.0)
                num_hits += num_hit if tenant == "b" else 0
        return num_hits

    assert hits(CacheHint(priority=100)) == hits() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (CacheHint, "0 of is_over, returns_in_s and priority"),
        (lambda: CacheHint(is_over=True, priority=1), "2 of"),
        (lambda: CacheHint(priority=101), "priority of a hint is 101"),
        (lambda: CacheHint(returns_in_s=0), "returns_in_s of a hint is 0"),
        (lambda: CacheHint(returns_in_s=float("nan")), "returns_in_s"),
        (lambda: CacheHint(is_over=True, duration_s=1), "only priorities last"),
        (lambda: CacheHint(5, 5, is_over=True), "end of a hint is 5"),
        (lambda: setattr(Request("r", [1]), "hints", [1]), "hints"),
        (lambda: setattr(Request("r", [1]), "hints", [OVER] * 17), "17 hints"),
    ],
)
def test_an_invalid_hint_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_a_hint_is_for_the_blocks_that_end_in_its_range() -> None:
    assert blocks_in(CacheHint(is_over=True), 4, 5) == (0, 5)
    assert blocks_in(CacheHint(3, 12, is_over=True), 4, 5) == (0, 3)
    assert blocks_in(CacheHint(4, 11, is_over=True), 4, 5) == (1, 2)
    assert blocks_in(CacheHint(99, is_over=True), 4, 5) == (5, 5)


def test_nothing_changes_before_the_first_hint() -> None:
    engine = Engine()
    engine.serve(0, 4)
    assert engine.manager._core.cache.order is None
    engine.serve(0, 4, OVER)
    assert engine.manager._core.cache.order is not None
    engine.manager.reset_prefix_cache()
    engine.serve(0, 4)
    assert engine.manager._core.cache.order is None
