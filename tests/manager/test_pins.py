"""The table of pins, against a set of blocks for each pin."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import PinLimitError
from kvcache.core import CacheHit, count_down
from kvcache.manager.pins import PinTable


def hit(*tables: list[int]) -> CacheHit:
    return CacheHit(tuple(map(int32_array, tables)), 4 * len(tables[0]) if tables else 0)


def test_a_hit_of_nothing_can_be_pinned() -> None:
    pins = PinTable(0)
    for empty in (hit(), hit([], []), hit([0, 0])):
        pins.require_room(empty)
        pins.add(empty, 1.0)
    assert (len(pins), pins.num_blocks) == (3, 0)
    pins.check()


@pytest.mark.seeds(4)
def test_counting_down_leaves_what_subtracting_counters_leaves(seed: int) -> None:
    rng = random.Random(seed)
    counts = Counter(rng.choices(range(1, 40), k=80))
    while counts:
        ids = rng.sample(list(counts.elements()), rng.randint(1, min(9, counts.total())))
        left = counts - Counter(ids)
        count_down(counts, int32_array(ids))
        assert list(counts.items()) == list(left.items())


@pytest.mark.seeds(4)
def test_pins_hold_what_their_sets_hold(seed: int) -> None:
    rng = random.Random(seed)
    pins = PinTable(40)
    held: dict[int, tuple[float, set[int]]] = {}
    now = 0.0
    for _ in range(300):
        now += rng.random()
        tables = [[rng.randrange(60) for _ in range(rng.randrange(8))] for _ in range(2)]
        wanted = {block for table in tables for block in table if block}
        union = set().union(*(blocks for _, blocks in held.values()))
        assert pins.num_blocks == len(union)
        if len(union | wanted) > 40:
            with pytest.raises(PinLimitError, match=f"needs {len(wanted - union)} more blocks"):
                pins.require_room(hit(*tables))
        else:
            pins.require_room(hit(*tables))
            pin = pins.add(hit(*tables), now + rng.random() * 8)
            assert pin.num_blocks == len(wanted)
            held[pin.pin_id] = (pin.expires_at_s, wanted)
        if held and rng.random() < 0.3:
            pin_id = rng.choice(list(held))
            del held[pin_id]
            assert pins.remove(pin_id) is not None
            assert pins.remove(pin_id) is None
        expired = [pin_id for pin_id, (end, _) in held.items() if end <= now]
        assert len(pins.take_expired(now)) == len(expired)
        for pin_id in expired:
            del held[pin_id]
        if rng.random() < 0.02:
            assert len(pins.take_all()) == len(held)
            held.clear()
        pins.check()
