"""Policies other than LRU on the flat core: called with arrays, they evict the same as
elsewhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvcache.core import Reservation
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.policies.entry_queue import Entries
from kvcache.policies.policy import EntryTable
from kvcache.requests.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import full, make_flat_core, make_request, window

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
