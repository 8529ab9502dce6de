"""Which requests use which block, idle times, and pins."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import Request
from kvcache.base.errors import NotRunningError
from kvcache.metrics.inspection import inspect_cache
from tests.metrics.test_ages import BLOCK, Cache, prompt


@pytest.fixture
def cache() -> Cache:
    return Cache(32)


def begin(cache: Cache, request_id: str, tokens: list[int]) -> list[int]:
    """Compute a prompt and keep it running; return its blocks."""
    request = Request(request_id, tokens)
    blocks, num_hit = cache.manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit
    assert cache.manager.allocate_slots(request, num_new, num_hit, blocks) is not None
    return cache.manager.get_block_ids(request_id)[0]


def test_references_are_of_running_requests_and_pins(cache: Cache) -> None:
    first = begin(cache, "a", prompt(1, 3))
    second = begin(cache, "b", prompt(1, 3))
    assert first[:3] == second[:3]
    pin = cache.manager.pin_prefix(prompt(1, 2), 60.0)
    cache.clock.advance(10.0)
    found = inspect_cache(cache.manager, cache.clock.now(), cache.meter)
    expected = np.zeros(32, np.int32)
    expected[first[:2]] = 3
    expected[first[2]] = 2
    expected[[first[3], second[3]]] = 1
    assert np.array_equal(found.reference_counts, expected)
    assert [(p.pin_id, p.num_tokens, p.num_blocks) for p in found.pins] == [
        (pin.pin_id, 2 * BLOCK, 2)
    ]
    assert found.pins[0].remaining_s == pytest.approx(50.0)
    assert (found.idle_s == -1).all()


def test_blocks_out_of_use_say_since_when(cache: Cache) -> None:
    cache.run("a", prompt(1, 3))
    cache.clock.advance(30.0)
    held = begin(cache, "b", prompt(2, 2))
    cache.run("c", prompt(3, 4))
    cache.clock.advance(1.0)
    found = inspect_cache(cache.manager, cache.clock.now(), cache.meter)
    assert np.count_nonzero(found.idle_s == 31.0) == 3
    assert np.count_nonzero(found.idle_s == 1.0) == 4
    assert (found.idle_s[held] == -1).all()
    assert np.count_nonzero(found.idle_s == -1) == 32 - 7
    unknown = inspect_cache(cache.manager, cache.clock.now(), None)
    assert (unknown.idle_s == -1).all()


def test_pins_that_have_run_out_are_not_shown(cache: Cache) -> None:
    cache.run("a", prompt(1, 3))
    cache.manager.pin_prefix(prompt(1, 2), 5.0)
    cache.clock.advance(6.0)
    assert inspect_cache(cache.manager, cache.clock.now(), cache.meter).pins == ()


def test_without_a_cache_there_is_nothing_to_look_at() -> None:
    with pytest.raises(NotRunningError, match="no cache at the moment"):
        inspect_cache(None, 0.0, None)
