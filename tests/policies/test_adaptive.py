"""The adaptive policy: it learns which order serves a load, also when that shifts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvcache.base.arrays import IndexArray
from kvcache.base.clock import VirtualClock
from kvcache.policies import EVICTION_POLICIES, EntryInfo, adaptive, orders
from kvcache.policies.adaptive import AdaptivePolicy
from kvcache.policies.orders import DELAYS
from kvcache.policies.policy import columns_of
from kvcache.simulate import MooncakeTrace, Workload, generate
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.workload import LimitedWorkload
from tests.policies.cache import Cache
from tests.policies.slow_adaptive import SlowAdaptive
from tests.policies.tables import WrittenTable, evict, name_of

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"


def hit_rate(workload: Workload, num_blocks: int, policy: str = "adaptive") -> float:
    options = CountingOptions(num_blocks, eviction_policy=policy, hash_algorithm="xxh3_128")
    return count_prefill_hits(workload, options, VirtualClock()).hit_rate


def note_uses(memory: orders.Memory, names: IndexArray) -> None:
    entries, was_unused = np.arange(len(names)), np.zeros(len(names), np.bool_)
    orders.note_uses(memory, int(memory.capacity), entries, names, was_unused)


def short(names: IndexArray, parents: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return names as long as the core's."""
    return names % (1 << 44), parents


class Contents:
    """Contents used one after another, in a cache that evicts by the policy."""

    def __init__(self, num_entries: int) -> None:
        self.table = WrittenTable()
        self.policy = AdaptivePolicy(num_entries, self.table)
        self.free = list(range(num_entries))
        self.entry_of: dict[int, int] = {}

    def use(self, content: int) -> bool:
        """Return whether it was a hit."""
        entry = self.entry_of.get(content)
        if entry is not None:
            self.policy.remove([entry])
            self.policy.insert([entry])
            return True
        if not self.free:
            gone = evict(self.policy, 1)
            self.free += gone
            self.entry_of = {c: e for c, e in self.entry_of.items() if e not in gone}
        entry = self.entry_of[content] = self.free.pop()
        self.table.hold(entry, content)
        self.policy.insert([entry])
        return False


def test_popular_contents_stay_while_others_pass_and_are_let_go_when_that_ends() -> None:
    contents, rng = Contents(100), random.Random(1)

    def serve(popular: range, count: int) -> float:
        hits = []
        for number in range(count):
            content = rng.choice(popular) if number % 5 == 0 else rng.randrange(10**6, 10**9)
            hits.append(contents.use(content))
        return sum(hits[-1_000:]) / 200

    assert contents.policy.ruling < len(DELAYS)
    assert serve(range(80), 8_000) > 0.8  # LRU: 100 others pass between most uses
    assert contents.policy.ruling >= len(DELAYS)
    assert serve(range(80, 160), 12_000) > 0.8


def test_recent_contents_stay_where_recency_is_all() -> None:
    contents, rng = Contents(100), random.Random(1)
    recent: list[int] = []
    hits = []
    for number in range(8_000):
        is_new = number < 90 or rng.random() < 0.3
        recent.append(number if is_new else rng.choice(recent))
        recent = recent[-90:]
        hits.append((contents.use(recent[-1]), is_new))
    assert all(hit or is_new for hit, is_new in hits[:500])
    lost = sum(not (hit or is_new) for hit, is_new in hits)
    assert lost < 0.02 * len(hits)


def test_classes_tell_lengths_continuations_and_uses_apart() -> None:
    def classes(num_uses: list[int]) -> list[int]:
        memory = orders.make_memory(1 << 12, 1_000, 1)
        names = np.arange(1, len(num_uses) + 1)
        rows = [orders.find(memory, name, 0, False) for name in names.tolist()]
        memory.fact[rows, orders.USES] = np.array(num_uses) - 1
        memory.seen[rows, orders.STAMP] = np.array(num_uses) > 1
        memory.number[orders.CLOCK] = 1
        note_uses(memory, names)
        return [int(line) for line in memory.fact[rows, orders.LINE]]

    mixed = [1, 1, 1, 3, 2, 1, 5, 1, 1, 1, 1]
    assert classes(mixed) == [9, 9, 9, 17, 16, 0, 19, 2, 2, 2, 2]
    assert classes([64, 65, *[1] * 300]) == [21, 22, *[7] * 300]


def test_the_last_order_is_by_the_last_use_but_one() -> None:
    memory = orders.make_memory(64, 10, 1)
    for name in (1, 2, 3, 2, 1):
        note_uses(memory, np.array([name]))
    rows = {name: orders.row_of(memory, name, 0) for name in (1, 2, 3)}
    keys = {name: orders.key_of(memory, row, orders.LAST_BUT_ONE, 0) for name, row in rows.items()}
    assert sorted(keys, key=lambda name: keys[name]) == [3, 1, 2]


@pytest.mark.parametrize("takes_over", [False, True])
def test_what_was_evicted_is_no_hit_when_its_entry_gets_it_again(takes_over: bool) -> None:
    table = WrittenTable()
    policy = AdaptivePolicy(4, table)
    memory = policy._memory

    def was_hit() -> bool:
        policy.insert([0])
        return bool(memory.fact[memory.held[0, 1], orders.FLAGS] & orders.WAS_HIT)

    table.hold(0, 7)
    assert not was_hit()
    policy.remove([0])
    assert was_hit()
    evict(policy, 1)
    if takes_over:
        policy._take_over()
    assert not was_hit()


@pytest.mark.parametrize(
    ("ruling", "leads", "errors", "expected"),
    [
        (0, {3: 20}, {3: 10}, 3),
        (0, {3: 20}, {3: 20}, 0),  # may be chance
        (0, {3: 4}, {}, 0),  # less than half a request
        (0, {3: 20, 4: 22}, {4: 20}, 3),
        (3, {3: 20, 4: 23}, {}, 3),  # not enough more
        (3, {3: 20, 4: 27}, {}, 4),
        (3, {3: 20, 4: 23}, {3: 20}, 4),
        (3, {3: 12}, {3: 10}, 0),
        (3, {3: 2}, {}, 0),
    ],
)
def test_an_order_rules_if_its_lead_over_lru_is_sure(
    ruling: int, leads: dict[int, float], errors: dict[int, float], expected: int
) -> None:
    memory = orders.make_memory(64, 10_000, 1)
    memory.number[orders.RULING] = ruling
    memory.real[[orders.SAMPLED, orders.REQUESTS]] = 100.0, 10.0
    for order in range(1, orders.NUM_ORDERS):
        memory.real[orders.LEAD + order] = leads.get(order, -50.0)
        memory.real[orders.SQUARES + order] = errors.get(order, 0.0) ** 2
    note_uses(memory, np.array([1]))
    assert memory.number[orders.RULING] == expected


def test_a_lead_loses_half_of_its_weight_in_eight_capacities() -> None:
    memory = orders.make_memory(1_024, 10, 1)
    memory.real[orders.LEAD + 3], memory.real[orders.SQUARES + 3] = 32.0, 64.0
    for name in range(1, 81):  # nothing hits
        note_uses(memory, np.array([name]))
    assert memory.real[orders.LEAD + 3] == pytest.approx(16)
    assert memory.real[orders.SQUARES + 3] == pytest.approx(16)


def test_records_catch_up_with_the_uses_while_lru_evicted() -> None:
    known, late = (orders.make_memory(1 << 12, 1_000, scale) for scale in (1, 8))
    rng = np.random.default_rng(5)
    some = rng.integers(1, 1 << 40, 600)
    seen: set[int] = set()
    for turn in range(200):
        names = rng.choice(some, rng.integers(1, 20), replace=False)
        hits = np.array([name in seen for name in names.tolist()])
        seen.update(names.tolist())
        note_uses(known, names)
        orders.note_uses(late, 1_000 - turn, np.empty(0, np.intp), names, hits)

    def facts(memory: orders.Memory) -> list[list[int]]:
        rows = [orders.row_of(memory, name, 0) for name in some.tolist()]
        times = memory.seen[rows, orders.STAMP][:, np.newaxis]
        found = np.hstack((times, memory.fact[rows][:, [orders.USES, orders.BEFORE]]))
        lines: list[list[int]] = found.tolist()
        return lines

    assert facts(late) != facts(known)
    for _ in range(2):  # the second time, nothing is left to do
        orders.catch_up(late)
        assert facts(late) == facts(known)
    times = orders.CLOCK, orders.ROOM
    assert late.number[[*times]].tolist() == known.number[[*times]].tolist()
    fact = late.fact[[orders.row_of(late, name, 0) for name in some.tolist()]]
    was_hit = fact[:, orders.USES] > 1
    assert ((fact[:, orders.FLAGS] & orders.WAS_HIT > 0) == was_hit).all()
    assert ((fact[:, orders.LINE] >= orders.USED_AGAIN) == was_hit).all()
    orders.note_uses(late, 1_000, np.empty(0, np.intp), some[:1], np.ones(1, np.bool_))
    note_uses(late, some[1:2])
    assert late.number[orders.NUM_PAST] == 0


def test_of_more_uses_than_are_remembered_the_last_are_recorded() -> None:
    memory = orders.make_memory(64, 10, 8)
    for number in range(1, 101):
        name = np.array([(number << 24) + number])
        orders.note_uses(memory, 10, np.empty(0, np.intp), name, np.zeros(1, np.bool_))
    orders.catch_up(memory)
    assert memory.number[orders.CLOCK] == 100
    assert memory.fact[:, orders.USES].max() == 1


def test_adopted_entries_are_ordered_by_their_uses_and_children_before_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adaptive, "_MOST_SIMULATED", 10)
    monkeypatch.setattr(adaptive, "_MOST_SAMPLED", 2)
    table = WrittenTable()
    parent, child, others = 0, 1, list(range(2, 15))
    table.infos = {child: EntryInfo(parent, name_of(child)), parent: EntryInfo(None, name_of(0), 1)}
    policy = AdaptivePolicy(15, table)
    for entry in [child, *others, child, parent]:
        names, _ = short(*columns_of(table, np.array([entry])))
        policy.learn(15, names, np.zeros(1, np.bool_))
    policy._memory.number[orders.RULING] = 0
    monkeypatch.setattr(adaptive, "columns_of", lambda *of: short(*columns_of(*of)))
    policy.adopt(np.array([child, parent, *others[::-1]]))
    assert policy.order() == [*others, child, parent]
    policy._memory.number[orders.RULING] = orders.LAST_BUT_ONE
    policy._take_over()
    assert policy.order() == [*others, child, parent]


def test_orders_change_in_walks_next_to_the_slow_policy() -> None:
    cache = Cache(
        random.Random(3), EVICTION_POLICIES["adaptive"], SlowAdaptive, capacity=15, has_names=True
    )
    ruled = set()
    for _ in range(30):
        cache.walk(20)
        assert isinstance(cache.policy, AdaptivePolicy) and isinstance(cache.slow, SlowAdaptive)
        assert cache.policy.ruling == cache.slow.ruling
        ruled.add(cache.policy.ruling)
    assert len(ruled) > 1


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
def test_the_hit_rate_on_the_beginning_of_the_conversation_trace() -> None:
    opening = LimitedWorkload(MooncakeTrace(TRACE), 1_500)
    assert hit_rate(opening, 1_500) > 1.2 * hit_rate(opening, 1_500, "lru")


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        pytest.param(1_000, 0.079, marks=pytest.mark.long),
        pytest.param(5_000, 0.168, marks=pytest.mark.long),
        pytest.param(10_000, 0.2365, marks=pytest.mark.long),
        pytest.param(30_000, 0.334, marks=pytest.mark.long),
        pytest.param(50_000, 0.356, marks=pytest.mark.long),
        pytest.param(100_000, 0.3637, marks=pytest.mark.long),
    ],
)
def test_hit_rates_on_the_conversation_trace(num_blocks: int, expected: float) -> None:
    assert hit_rate(MooncakeTrace(TRACE), num_blocks) >= expected - 0.0005


@pytest.mark.parametrize(("kind", "least_gain"), [("chat", -0.003), ("retrieval", 0.02)])
def test_hits_on_generated_loads(kind: str, least_gain: float) -> None:
    workload = generate(kind, seed=3, num_requests=1_000)
    assert hit_rate(workload, 800) >= hit_rate(workload, 800, "lru") + least_gain
