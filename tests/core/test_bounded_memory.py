"""A core that has served many requests takes no more memory than after a few."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvcache.core import prefix_cache
from kvcache.requests.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import (
    chunked,
    full,
    make_flat_core,
    make_request,
    mamba,
    run_request,
    window,
)
from tests.core.footprint import footprint_bytes

PLANS = {
    "full": (full(),),
    "window": (window(9),),
    "chunked": (chunked(8),),
    "window and chunked": (window(6, 8), chunked(8)),
    "full and window": (full(8), window(9)),
    "two full": (full(), full(8)),
    "full and states": (full(), mamba()),
}


class Churn:
    """Small requests of several clients in new namespaces; some are only looked up."""

    def __init__(self, specs: Sequence[KVCacheSpec], seed: int) -> None:
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.core = make_flat_core(40, *specs, has_workers=False, merge_duplicates=True)
        self.running: list[Request] = []
        self.num_served = 0
        self.unit_tokens = self.core.hash_block_size

    def serve(self, count: int) -> None:
        for _ in range(count):
            self.num_served += 1
            number = self.num_served
            client = f"client {number // 20}"
            if number % 20 == 0:
                self.core.open_step(client, number)
            self.serve_one(self.new_request(number))
            if number % 20 == 19:
                if number % 3:
                    self.core.complete_steps(client, number)
                else:
                    self.core.fail_steps(client, 0)
                self.core.close_step()
                self.core.take_commands()
                self.core.take_merges()

    def serve_one(self, request: Request) -> None:
        if self.num_served % 7 == 0:
            self.core.cache.look_up(request)
            return
        while self.core.cache.num_free_blocks() < 30:
            self.core.free(self.running.pop(self.random.randrange(len(self.running))))
        assert run_request(self.core, request) is not None
        self.running.append(request)

    def new_request(self, number: int) -> Request:
        unit, shared = self.unit_tokens, self.random.randrange(4)
        tokens = [self.random.randrange(2)] * unit * shared + [number] * unit
        items = {}
        if number % 3 == 0:
            items = {"mm_positions": [(0, unit)], "mm_hashes": [f"image {number}"]}
        salt = self.random.choice([None, "often", f"once {number}"])
        return make_request(f"r{number}", tokens, unit, cache_salt=salt, **items)


@pytest.fixture(autouse=True)
def sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop unused extra keys after a few requests."""
    monkeypatch.setattr(prefix_cache, "_FEW_KEYS", 64)


def require_bounded(name: str, num_samples: int, requests_per_sample: int) -> None:
    churn = Churn(PLANS[name], seed=0)
    samples = []
    for _ in range(num_samples):
        churn.serve(requests_per_sample)
        churn.core.check()
        samples.append(footprint_bytes(churn.core))
    few = samples[: num_samples // 3]
    assert max(samples) <= 1.25 * max(few), samples


@pytest.mark.parametrize("name", ["full and window", "window and chunked"])
def test_memory_is_as_after_a_few_requests(name: str) -> None:
    require_bounded(name, 9, 70)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PLANS))
def test_memory_is_bounded_over_many_requests(name: str) -> None:
    require_bounded(name, 20, 1000)
