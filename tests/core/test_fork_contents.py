"""Forks with the same tokens: one publishes what both hold, each offers what stands beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcache.core import ForkOrigin, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.request import Request
from tests.core.builders import full, make_flat_core, make_request, row_batch, window

NUM_TOKENS = 32
TOKENS = [number for number in range(1, 9) for _ in range(4)]


def hits(core: FlatCore) -> list[int]:
    """Return how many blocks hit of prompts that share 1, 2, ... blocks with `TOKENS`."""
    prompts = [[*TOKENS[:end], 99] for end in range(4, NUM_TOKENS + 1, 4)]
    return [core.look_up(make_request("probe", prompt)).num_tokens // 4 for prompt in prompts]


def fork_of_unpublished(core: FlatCore) -> tuple[Request, Request]:
    """Fork a request none of whose blocks is cached; let it run on, past what its window reads."""
    parent, child = make_request("parent", TOKENS), make_request("child", TOKENS)
    core.reserve(parent, Reservation(0, NUM_TOKENS, 0))
    core.fork(parent, child, ForkOrigin(NUM_TOKENS, NewestState(NUM_TOKENS, 0)))
    parent.append_output_token_ids([1])
    core.reserve(parent, Reservation(NUM_TOKENS, NUM_TOKENS + 1, NUM_TOKENS + 1))
    return parent, child


def run_child(core: FlatCore, child: Request, how: str) -> None:
    """Let the child cache its blocks; its window has passed those before token 16."""
    if how == "commit":
        core.commit(child, NUM_TOKENS)
        return
    child.append_output_token_ids([2])
    end = NUM_TOKENS + 1
    if how == "reserve":
        core.reserve(child, Reservation(16, end, end))
    else:
        core.reserve_rows(row_batch([child], [0], [16], [end], [end]))


@pytest.mark.parametrize("how", ["commit", "reserve", "rows"])
def test_a_fork_offers_window_blocks_that_its_parent_has_given_back(how: str) -> None:
    core = make_flat_core(60, full(), window(9))
    _, child = fork_of_unpublished(core)
    core.check()
    assert hits(core) == [0, 0, 0, 0, 0, 0, 0, 8]
    run_child(core, child, how)
    core.check()
    assert hits(core) == ([1, 2, 3, 4, 5, 6, 7, 8] if how == "commit" else [0, 0, 0, 4, 5, 6, 7, 8])


def test_a_fork_of_a_fork_offers_them_too() -> None:
    core = make_flat_core(60, full(), window(9))
    _, child = fork_of_unpublished(core)
    grandchild = make_request("grandchild", TOKENS)
    core.fork(child, grandchild, ForkOrigin(NUM_TOKENS, NewestState(NUM_TOKENS, 0)))
    core.free(child)
    assert hits(core) == [0, 0, 0, 0, 0, 0, 0, 8]
    run_child(core, grandchild, "reserve")
    core.check()
    assert hits(core) == [0, 0, 0, 4, 5, 6, 7, 8]


def test_what_a_fork_offers_in_pieces_is_hit_in_pieces() -> None:
    core = make_flat_core(60, full(), window(9))
    _, child = fork_of_unpublished(core)
    core.commit(child, 20)
    assert hits(core) == [1, 2, 3, 4, 5, 5, 5, 8]
    core.commit(child, NUM_TOKENS)
    core.check()
    assert hits(core) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_was_offered_in_a_step_that_failed_is_offered_again() -> None:
    core = make_flat_core(60, full(), window(9))
    _, child = fork_of_unpublished(core)
    core.open_step("engine", 1)
    core.commit(child, NUM_TOKENS)
    core.close_step()
    core.fail_steps("engine", 1)
    core.check()
    assert hits(core) == [0, 0, 0, 0, 0, 0, 0, 8]
    core.commit(child, NUM_TOKENS)
    core.check()
    assert hits(core) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_who_leaves_offers_nothing() -> None:
    core = make_flat_core(60, full(), window(9))
    parent, child = fork_of_unpublished(core)
    core.free(child)
    core.free(parent)
    core.check()
    assert hits(core) == [0, 0, 0, 0, 0, 0, 0, 8]
    again = make_request("child", TOKENS)
    hit = core.look_up(again)
    core.reserve(again, Reservation(hit.num_tokens, NUM_TOKENS, NUM_TOKENS), hit)
    core.check()


def cached_after(steps: Sequence[str]) -> list[int]:
    """Return the cached blocks after each step; in `PC` parent and child run, `-1` fails step 1."""
    core = make_flat_core(60, full(), window(9))
    requests = {"P": make_request("parent", TOKENS), "C": make_request("child", TOKENS)}
    core.reserve(requests["P"], Reservation(0, NUM_TOKENS, 0))
    origin = ForkOrigin(NUM_TOKENS, NewestState(NUM_TOKENS, 0))
    core.fork(requests["P"], requests["C"], origin)
    counts = []
    for number, step in enumerate(steps, start=1):
        if step.startswith("-"):
            core.fail_steps("engine", int(step[1:]))
        else:
            core.open_step("engine", number)
            for who in step:
                core.reserve(requests[who], Reservation(NUM_TOKENS, NUM_TOKENS + 1, NUM_TOKENS))
            core.close_step()
        core.check()
        counts.append(core.statistics().num_cached_blocks)
    return counts


def test_a_fork_that_went_on_caches_what_a_failed_step_withdrew() -> None:
    assert cached_after(["P", "C", "-1", "C"]) == [10, 10, 0, 10]
