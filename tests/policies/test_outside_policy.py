"""External policies that fail: the state stays consistent, and the cache continues with LRU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcache.core import CoreSettings
from kvcache.core.flat_core import FlatCore
from kvcache.manager import KVCacheManager
from kvcache.policies import EVICTION_POLICIES, LRUPolicy, make_eviction_policy
from kvcache.requests.request import Request
from tests.manager.managers_under_test import FULL, make_manager
from tests.policies.tables import WrittenTable

METHODS = ("insert", "remove", "discard", "choose", "put_back", "order")


class Sound(LRUPolicy):
    """An external policy that keeps to the protocol."""


class Raising(LRUPolicy):
    """Does half of what it should, and raises."""

    method = ""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != type(self).method:
            return found

        def broken(argument: Any = None) -> None:
            if name in ("insert", "remove"):
                found(argument[: len(argument) // 2])
            raise RuntimeError(f"no {name}")

        return broken


ANSWERS: dict[str, Callable[[list[int]], object]] = {
    "nothing": lambda chosen: [],
    "None": lambda chosen: None,
    "text": lambda chosen: "12",
    "negative": lambda chosen: [-1],
    "beyond": lambda chosen: [10**9],
    "twice": lambda chosen: [*chosen, *chosen],
    "in use": lambda chosen: [0],
    "too few": lambda chosen: chosen[:-1],
}


class Lying(LRUPolicy):
    """Chooses invalid victims."""

    answer = ""

    def choose(self, num_entries: int) -> Any:
        chosen = [int(entry) for entry in super().choose(num_entries)]
        return ANSWERS[type(self).answer](chosen)


def play(policy: Any) -> KVCacheManager:
    """Serve and reset requests on a small pool whose `lru` is `policy`; checks all state."""

    def make(settings: CoreSettings) -> FlatCore:
        return FlatCore(replace(settings, policies={"lru": policy}))

    manager = make_manager(FULL, num_blocks=13, core_factory=make)
    for i in range(24):
        request = Request(f"r{i}", [i % 5] * 8 + [i % 3] * 12 + [i])
        found, num_hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, found)
        manager.check()
        manager.free(request)
        manager.check()
        if i == 12:
            manager.evict_blocks([1, 2, 3])
            manager.check()
        if i == 18:
            assert manager.reset_prefix_cache()
            manager.check()
    return manager


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_that_raises_is_replaced_by_lru(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = type("Broken", (Raising,), {"method": method})
    assert play(policy).dump_state() == play(Sound).dump_state()
    errors = errors_in(caplog)
    assert all(line.startswith(f"the eviction policy lru failed in {method}: ") for line in errors)
    assert len(errors) <= 1


@pytest.mark.parametrize("answer", sorted(ANSWERS))
def test_a_policy_that_chooses_nonsense_is_replaced_by_lru(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = type("Lying", (Lying,), {"answer": answer})
    assert play(policy).dump_state() == play(Sound).dump_state()
    assert [line.partition(":")[0] for line in errors_in(caplog)] == [
        "the eviction policy lru failed in choose"
    ]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_policies_of_the_package_are_asked_directly(name: str) -> None:
    made = make_eviction_policy(name, 8, WrittenTable())
    assert type(made) is EVICTION_POLICIES[name]
