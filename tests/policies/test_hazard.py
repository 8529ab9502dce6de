"""The hazard policy: it learns, and never falls far behind LRU."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvcache.base.clock import VirtualClock
from kvcache.policies import LooksAhead, guard
from kvcache.policies.guard import Guard
from kvcache.policies.hazard import HazardPolicy
from kvcache.policies.ranked_policies import ARCPolicy
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, NUM_AGES, reuse_index
from kvcache.requests.request import Request
from kvcache.simulate import GENERATORS, MooncakeTrace, Workload, generate
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.workload import LimitedWorkload
from tests.manager.managers_under_test import FULL, make_manager
from tests.policies.books import WrittenBook, evict, name_of

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"
MOST_BELOW_LRU = 0.001
FIRST_REQUESTS = 200
"""From this many requests on; with fewer, a block is more than that."""


def hits_by_request(workload: Workload, num_blocks: int, policy: str) -> npt.NDArray[np.int64]:
    """Return hit blocks and block references so far after each request. Shape `(requests, 2)`."""
    options = CountingOptions(num_blocks, eviction_policy=policy, hash_algorithm="xxh3_128")
    counted: list[tuple[int, int]] = []
    count_prefill_hits(
        workload,
        options,
        VirtualClock(),
        lambda count: counted.append((count.num_hit_blocks, count.num_block_references)),
    )
    return np.array(counted)


def hit_rate(workload: Workload, num_blocks: int, policy: str) -> float:
    num_hits, num_references = hits_by_request(workload, num_blocks, policy)[-1]
    return float(num_hits / num_references)


def most_below_lru(workload: Workload, num_blocks: int) -> float:
    """Return the largest difference by which hazard's rate is below LRU's, after any request."""
    lru = hits_by_request(workload, num_blocks, "lru")
    lost = lru[:, 0] - hits_by_request(workload, num_blocks, "hazard")[:, 0]
    return float((lost / lru[:, 1])[FIRST_REQUESTS - 1 :].max())


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


def test_no_more_is_missing_than_the_budget_and_what_was_won_cover() -> None:
    shadow = Guard(100)
    names = [name_of(number) for number in range(100)]

    def use_all(stamp: int, *, is_hit: bool) -> None:
        for name in reversed(names):
            shadow.use(name, stamp, is_hit=is_hit, is_lru_hit=False)
        shadow.settle(100, 100)

    use_all(100, is_hit=False)
    assert not shadow.allows(names[-1])  # .08 of a block
    for _ in range(30):
        use_all(200, is_hit=True)
    for name in names[-2:]:
        assert shadow.allows(name)
        shadow.evict(name)
    assert not shadow.allows(names[-3])  # 2.48: all hits come at once
    shadow.restore(names[-1])
    assert shadow.allows(names[-1]) and shadow.num_missing_blocks == 1
    shadow.use(names[-2], 300, is_hit=False, is_lru_hit=False)  # LRU has a hit
    assert (shadow.won_blocks, shadow.num_missing_blocks) == (-1, 0)


def test_what_lru_would_have_let_go_may_always_go_and_is_won_when_it_is_hit() -> None:
    shadow = Guard(100)
    old, new = name_of(1), name_of(2)
    shadow.use(old, 1, is_hit=False, is_lru_hit=False)
    shadow.use(new, 2, is_hit=False, is_lru_hit=False)
    shadow.settle(2, 1)
    assert shadow.old_stamp == 2
    assert shadow.allows(old) and not shadow.allows(new)
    shadow.use(old, 3, is_hit=True, is_lru_hit=False)
    assert shadow.won_blocks == 1
    shadow.use(new, 4, is_hit=True, is_lru_hit=True)
    assert shadow.won_blocks == 1


class Loop:
    """Contents used one after another in a loop, more than fit."""

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
    assert loop.policy.won_blocks == sum(hits)
    rng = random.Random(2)
    recent = list(range(1_000, 1_150))
    for _ in range(6_000):  # what was used is used again, or never: the old habit misleads
        recent.append(10_000 + rng.randrange(10**6) if rng.random() < 0.3 else rng.choice(recent))
        del recent[0]
        loop.use(recent[-1])
    lru_hits = sum(loop.use(content) for content in recent[-100:])
    assert lru_hits > 90


@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_where_nothing_may_be_lost_it_is_lru(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BUDGET_PER_BLOCK", -1.0)
    for num_blocks in (300, 1_000):
        workload = generate(kind, seed=1, num_requests=200)
        if kind == "agents" and num_blocks == 300:
            continue  # its prompts are longer
        lru = hits_by_request(workload, num_blocks, "lru")
        assert np.array_equal(hits_by_request(workload, num_blocks, "hazard"), lru)


@pytest.mark.seeds(1, long=6)
@pytest.mark.parametrize("num_blocks", [500, 2_000])
@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_hits_are_never_far_below_those_of_lru(kind: str, num_blocks: int, seed: int) -> None:
    workload = generate(kind, seed=seed, num_requests=400)
    assert most_below_lru(workload, num_blocks) <= MOST_BELOW_LRU


@pytest.mark.long
@pytest.mark.seeds(6, 12)
@pytest.mark.parametrize("num_blocks", [200, 1_000, 2_000, 5_000, 20_000])
@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_hits_are_never_far_below_those_of_lru_for_long(
    kind: str, num_blocks: int, seed: int
) -> None:
    workload = generate(kind, seed=seed, num_requests=3_000)
    if max(request.num_prompt_tokens for request in workload) > num_blocks * workload.block_size:
        pytest.skip(f"a prompt of {workload.name} needs more than {num_blocks} blocks")
    assert most_below_lru(workload, num_blocks) <= MOST_BELOW_LRU


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
def test_the_hit_rate_on_the_beginning_of_the_conversation_trace() -> None:
    opening = LimitedWorkload(MooncakeTrace(TRACE), 1_500)
    rate = hit_rate(opening, 3_000, "hazard")
    assert rate == pytest.approx(0.0652, abs=0.0005)
    assert rate > hit_rate(opening, 3_000, "lru")


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        pytest.param(1_000, 0.0742, marks=pytest.mark.long),
        pytest.param(5_000, 0.1639, marks=pytest.mark.long),
        pytest.param(10_000, 0.2309, marks=pytest.mark.long),
        pytest.param(30_000, 0.3314, marks=pytest.mark.long),
        pytest.param(50_000, 0.3566, marks=pytest.mark.long),
        pytest.param(100_000, 0.3637, marks=pytest.mark.long),
    ],
)
def test_hit_rates_on_the_conversation_trace(num_blocks: int, expected: float) -> None:
    assert hit_rate(MooncakeTrace(TRACE), num_blocks, "hazard") >= expected - 0.001


def test_contents_forgotten_in_use_do_not_make_lrus_cache_larger() -> None:
    """No signal says that they have gone; LRU with more room than exists would seem to win."""
    manager = make_manager(FULL, 201, eviction_policy="hazard")

    def serve(name: str, tokens: list[int], *, is_forgotten: bool = False) -> int:
        request = Request(name, tokens)
        hit, num_hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hit)
        request.num_computed_tokens = len(tokens)
        if is_forgotten:
            manager.evict_blocks(manager.get_block_ids(name)[0][:1])
        manager.free(request)
        return num_hit

    for number in range(40):
        serve(f"cached {number}", [number] * 76)
        serve(f"forgotten {number}", [number] * 76 + [5], is_forgotten=True)
    loop = [[1_000 + place] * 76 + [9] for place in range(15)]  # 285 blocks, of 200
    hits = [serve(f"loop {number}", loop[number % 15]) for number in range(4_000)]
    assert sum(hits[-1_500:]) > 0.4 * 1_500 * 77  # under LRU none


def test_who_is_next_is_not_known_without_choosing() -> None:
    """Its lines are not queues of ranks, so a tier that looks ahead must choose and put back."""
    assert not isinstance(HazardPolicy(4, WrittenBook()), LooksAhead)
    assert isinstance(ARCPolicy(4, WrittenBook()), LooksAhead)
