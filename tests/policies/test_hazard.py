"""What tells the hazard policy from the others: it learns, and it follows whoever is ahead."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvcache.clock import VirtualClock
from kvcache.policies.contest import Contest
from kvcache.policies.hazard import HazardPolicy
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, NUM_AGES, reuse_index
from kvcache.simulate import GENERATORS, MooncakeTrace, Workload, generate
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from tests.policies.books import WrittenBook, evict

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"
MOST_BELOW_LRU = 0.004
"""A change of the leader costs hits that short loads do not win back; see docs/policies.md."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))]


def hit_rate(workload: Workload, num_blocks: int, policy: str) -> float:
    options = CountingOptions(num_blocks, eviction_policy=policy, hash_algorithm="xxh3_128")
    return count_prefill_hits(workload, options, VirtualClock()).hit_rate


def test_the_index_is_the_best_ratio_of_hits_to_time_over_all_ages_to_give_up_at() -> None:
    rng = np.random.default_rng(1)
    chances = rng.random((3, NUM_AGES)) ** 4
    index = reuse_index(chances)
    limits = [0, *AGE_LIMITS_BLOCKS, 2 * AGE_LIMITS_BLOCKS[-1]]
    for line, age in ((0, 0), (1, 7), (2, 30), (0, NUM_AGES - 1)):
        ratios = []
        left = 1.0
        hits = stays = 0.0
        for at in range(age, NUM_AGES):
            chance = float(chances[line, at])
            hits += left * chance
            stays += left * (1 - chance / 2) * (limits[at + 1] - limits[at])
            ratios.append(hits / stays)
            left *= 1 - chance
        assert index[line, age] == pytest.approx(max(ratios))


def test_index_leads_when_it_is_ahead_and_no_longer_when_it_has_lost_half_of_its_gain() -> None:
    contest = Contest()
    assert not contest.note(32, 0, 1_000)
    assert not contest.note(-20, 0, 1_000)
    assert contest.note(21, 0, 1_000) and contest.index_leads
    assert not contest.note(1_000, 0, 1_000)
    assert not contest.note(-300, 0, 1_000)
    assert contest.note(-100, 0, 1_000) and not contest.index_leads  # 400 of 1,000 - 400


class Loop:
    """Contents used one after another, round and round: more than there is room for."""

    def __init__(self, num_entries: int) -> None:
        self.book = WrittenBook()
        self.policy = HazardPolicy(num_entries, self.book)
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
        self.book.hold(entry, content)
        self.policy.insert([entry])
        return False


def test_a_loop_that_never_hits_under_lru_is_learned_and_given_up_when_it_ends() -> None:
    loop = Loop(200)
    hits = [loop.use(number % 300) for number in range(6_000)]
    assert sum(hits[-300:]) > 100  # LRU: none
    assert loop.policy.index_leads
    rng = random.Random(2)
    recent = list(range(1_000, 1_150))
    for _ in range(6_000):  # what was used is used again, or never: the old habit misleads
        recent.append(10_000 + rng.randrange(10**6) if rng.random() < 0.3 else rng.choice(recent))
        del recent[0]
        loop.use(recent[-1])
    lru_hits = sum(loop.use(content) for content in recent[-100:])
    assert lru_hits > 90


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_blocks", [2_000, 6_000])
@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_hits_are_never_far_below_those_of_lru(kind: str, num_blocks: int, seed: int) -> None:
    def workload() -> Workload:
        return generate(kind, seed=seed, num_requests=400)

    lru = hit_rate(workload(), num_blocks, "lru")
    assert hit_rate(workload(), num_blocks, "hazard") >= lru - MOST_BELOW_LRU


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        pytest.param(1_000, 0.079, marks=pytest.mark.long),
        pytest.param(5_000, 0.1696, marks=pytest.mark.long),
        pytest.param(10_000, 0.237, marks=pytest.mark.long),
        pytest.param(30_000, 0.3367, marks=pytest.mark.long),
        pytest.param(50_000, 0.3561, marks=pytest.mark.long),
        pytest.param(100_000, 0.3637, marks=pytest.mark.long),
    ],
)
def test_hit_rates_on_the_conversation_trace(num_blocks: int, expected: float) -> None:
    assert hit_rate(MooncakeTrace(TRACE), num_blocks, "hazard") >= expected - 0.001
