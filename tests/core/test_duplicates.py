"""Blocks that a row gives up because the tree has their contents in others."""

from __future__ import annotations

import random

import pytest

from kvcache.core import ForkOrigin, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.audits import Audits
from tests.core.builders import chunked, full, make_flat_core, make_request, mamba, window

PLANS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(),),
    "two full": (full(), full(8)),
    "full, window": (full(), window(9)),
    "full, long window": (full(), window(20, 8)),
    "window": (window(40),),
    "full, chunked": (full(), chunked(24)),
    "full, states": (full(), mamba()),
}


def request(name: str, *numbers: int) -> Request:
    tokens = [number for number in numbers for _ in range(4)]
    return make_request(name, tokens, skip_reading_prefix_cache=True)


def compute(core: FlatCore, one: Request) -> None:
    """Compute all of a request anew."""
    end = one.num_tokens
    assert core.reserve(one, Reservation(0, end, end)) is not None


def in_step(core: FlatCore, step: int, *requests: Request) -> None:
    core.open_step("engine", step)
    for one in requests:
        compute(core, one)
    core.close_step()


def test_what_forks_share_behind_doubles_is_published_by_the_first_that_runs() -> None:
    core = make_flat_core(40)
    parent, child = request("b", 1, 2, 3), request("c", 1, 2, 3)
    in_step(core, 1, request("a", 1, 2))
    assert core.reserve(parent, Reservation(0, 12, 0)) is not None
    core.fork(parent, child, ForkOrigin(12, NewestState(12, 0)))
    in_step(core, 2, parent)
    core.complete_steps("engine", 2)
    core.check()
    assert core.look_up(make_request("d", [*parent.all_token_ids.tolist(), 9])).num_tokens == 12
    for one in (parent, child, request("a", 1)):
        core.free(one)
        core.check()
    assert core.num_free_blocks() == 39


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(3))
def test_books_add_up_when_steps_that_computed_doubles_fail(name: str, seed: int) -> None:
    print(f"seed {seed}")
    choose, core = random.Random(seed), make_flat_core(60, *PLANS[name])
    audits = Audits(seed, core.check)
    running: list[Request] = []
    num_complete = 0
    for step in range(1, 60):
        core.open_step("engine", step)
        for one in running:
            if choose.random() < 0.5:
                compute(core, one)
        fresh = request(f"r{step}", *(choose.randrange(2) for _ in range(choose.randrange(1, 5))))
        end = fresh.num_tokens
        if core.reserve(fresh, Reservation(0, end, end)) is not None:
            running.append(fresh)
        core.close_step()
        while len(running) > 4 or (running and choose.random() < 0.3):
            core.free(running.pop(choose.randrange(len(running))))
        if choose.random() < 0.4:
            core.fail_steps("engine", choose.randint(num_complete + 1, step))
            num_complete = step
        elif choose.random() < 0.5:
            num_complete = step
            core.complete_steps("engine", step)
        audits.perhaps()
    for one in running:
        core.free(one)
    core.check()
    assert core.num_free_blocks() == 59
