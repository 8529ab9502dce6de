"""Policies other than LRU on the flat core: called with arrays, they evict the same as
elsewhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvcache.core import Reservation, prefix_cache
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.policies.entry_queue import Entries
from kvcache.policies.orders import CLOCK
from kvcache.policies.policy import EntryTable
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import full, make_flat_core, make_request, run_request, window

NUM_TURNS = 220


class NewestFirst:
    """An external policy in plain Python: last in, first out. It puts parents before their
    children, which must not matter."""

    def __init__(self, capacity: int, table: EntryTable) -> None:
        self.entries: list[int] = []

    @property
    def reads_contents(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self.entries

    def insert(self, entries: Entries) -> None:
        new: list[int] = np.asarray(entries).tolist()
        assert not set(new) & set(self.entries)
        self.entries += new

    def remove(self, entries: Entries) -> None:
        for entry in np.asarray(entries).tolist():
            self.entries.remove(entry)

    discard = remove

    def choose(self, num_entries: int) -> list[int]:
        taken = self.entries[-num_entries:][::-1]
        del self.entries[-num_entries:]
        return taken

    def put_back(self, entries: Entries) -> None:
        self.entries += np.asarray(entries).tolist()[::-1]

    def order(self) -> list[int]:
        return self.entries[::-1]


POLICIES: Mapping[str, PolicyFactory] = {**EVICTION_POLICIES, "newest": NewestFirst}


class Workload:
    """Prompts that share prefixes and end in tokens of their own, so that nothing is computed
    twice; a few run at a time, and some pins come and go."""

    def __init__(self, core: Any, seed: int) -> None:
        self.core, self.rng = core, random.Random(seed)
        self.running: list[Request] = []
        self.known: list[list[int]] = [[]]
        self.facts: list[object] = []
        self.count = 0

    def go(self, num_turns: int) -> list[object]:
        for turn in range(num_turns):
            self.count += 1
            if len(self.running) > 3 or (self.running and self.rng.random() < 0.45):
                self.core.free(self.running.pop(self.rng.randrange(len(self.running))))
            else:
                self.admit()
            if turn % 20 == 0:
                self.core.check()
        self.core.check()
        return self.facts

    def admit(self) -> None:
        base = self.rng.choice(self.known)
        base = base[: 4 * self.rng.randint(0, len(base) // 4)]
        tokens = base + [1000 * self.count + i for i in range(self.rng.randint(5, 30))]
        request = make_request(f"r{self.count}", tokens)
        hit = self.core.cache.look_up(request)
        wanted = Reservation(hit.num_tokens, len(tokens), len(tokens))
        changes = self.core.reserve(request, wanted, hit)
        if changes is not None:
            self.running.append(request)
            # Only hits: no content is in two blocks.
            if hit.num_tokens >= len(base) // 4 * 4:
                self.known = [*self.known[-12:], tokens]
        statistics = self.core.statistics()
        self.facts.append(
            (hit.num_tokens, changes is None, statistics.num_free_blocks, statistics.num_evictions)
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_add_up_where_a_policy_evicts_often(policy: str) -> None:
    for seed in range(2):
        options = {"eviction_policy": policy, "policies": POLICIES, "has_workers": False}
        facts = Workload(make_flat_core(40, **options), seed).go(NUM_TURNS)
        assert max(evictions for _, _, _, evictions in facts) > 50  # type: ignore[misc]  # facts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("specs", [(full(), window(9)), (window(9),)], ids=["hybrid", "window"])
def test_counts_add_up_with_any_policy_and_kind(
    policy: str, specs: tuple[KVCacheSpec, ...]
) -> None:
    core = make_flat_core(60, *specs, eviction_policy=policy, policies=POLICIES)
    facts = Workload(core, 3).go(NUM_TURNS)
    assert any(hit for hit, *_ in facts)  # type: ignore[misc, attr-defined]  # facts


def test_the_adaptive_policy_lets_lru_evict_until_another_order_is_better() -> None:
    core = make_flat_core(60, eviction_policy="adaptive", has_workers=False)
    rng, count = random.Random(2), 0

    def serve(num_turns: int) -> None:
        nonlocal count
        for turn in range(num_turns):
            count += 1
            head = [-rng.randrange(1, 6)] * 28 if turn % 5 == 0 else [count] * 28
            request = make_request(f"r{count}", [*[abs(t) + 5_000 * (t < 0) for t in head], 0])
            hit = core.cache.look_up(request)
            core.reserve(request, Reservation(hit.num_tokens, 29, 29), hit)
            core.free(request)
            core.check()

    serve(8)
    assert core.cache.order is None and core.statistics().num_evictions == 0
    serve(400)
    assert core.cache.order is not None and core.cache.order.policy.ruling
    assert core.cache.reset() == 0
    assert core.cache.order is None
    serve(20)
    core.check()


class Learner:
    """Notes what it is told while LRU evicts."""

    ruling = 0

    def __init__(self) -> None:
        self.learned: list[tuple[int, list[int], list[bool]]] = []

    def learn(self, num_unused: int, names: Any, hits: Any) -> None:
        self.learned.append((num_unused, names.tolist(), hits.tolist()))


def make_core_with(learner: Learner, num_blocks: int = 60) -> Any:
    core: Any = make_flat_core(num_blocks, eviction_policy="adaptive", has_workers=False)
    core.cache._learner = learner
    return core


def test_uses_are_learned_with_their_names_while_lru_evicts() -> None:
    learner = Learner()
    core = make_core_with(learner)
    for name, tokens in (("a", 13), ("b", 21), ("c", 13)):
        request = make_request(name, list(range(tokens)))
        run_request(core, request)
        core.free(request)
    (first, old, _), (second, new, _), (third, again, _) = learner.learned
    assert [hits for _, _, hits in learner.learned] == [
        [False] * 3, [False] * 2 + [True] * 3, [True] * 3
    ]  # fmt: skip
    assert old == new[2:] == again and len(set(new)) == 5
    assert (first, second, third) == (3, 5, 5)


def test_lru_evicts_until_another_order_rules_and_something_was_evicted() -> None:
    for ruling, num_tokens in ((0, 21), (1, 5)):
        learner = Learner()
        learner.ruling = ruling
        core = make_core_with(learner, 8)
        for start in range(0, 300, 100):
            request = make_request(f"r{start}", range(start, start + num_tokens))
            run_request(core, request)
            core.free(request)
        assert (core.statistics().num_evictions > 0) == (ruling == 0)
        assert core.cache.order is None
        core.check()


def test_large_pools_learn_in_batches_without_what_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_cache, "_LEARNED_AT_ONCE", 60 - 32 * 10)
    learner = Learner()
    core = make_core_with(learner)
    requests = [make_request(name, [ord(name)] * 13) for name in "abcd"]
    for request in requests[:3]:
        run_request(core, request)
        last = core.block_ids(request.request_id)[0][2]
        core.free(request)
        core.check()
    run_request(core, requests[3])
    core.cache.evict([last])
    assert not learner.learned
    core.free(requests[3])
    ((num_unused, names, hits),) = learner.learned
    assert num_unused == len(names) == len(set(names)) == len(hits) == 11


def test_the_policy_knows_the_uses_before_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_LEARNED_AT_ONCE", 60 - 32 * 10)
    core: Any = make_flat_core(60, eviction_policy="adaptive", has_workers=False)
    request = make_request("r", range(13))
    run_request(core, request)
    path = core.path_of(request)
    core.free(request)
    core.cache.hint(path, [CacheHint(is_over=True)])
    assert core.cache._learner._memory.number[CLOCK] == 3
    core.check()


def test_what_is_computed_again_after_a_failed_step_was_not_hit() -> None:
    learner = Learner()
    core = make_core_with(learner)
    core.open_step("engine", 1)
    first, second = (make_request(name, range(9)) for name in "ab")
    run_request(core, first)
    core.free(first)
    run_request(core, second)
    core.fail_steps("engine", 1)
    core.open_step("engine", 2)
    core.reserve(second, Reservation(0, 9, 9))
    core.free(second)
    assert [hits for _, _, hits in learner.learned] == [[False] * 2] * 2
