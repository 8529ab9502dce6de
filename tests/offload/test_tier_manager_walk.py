"""Random operations on a tier and on a slow model of it, with `check()` after each."""

from __future__ import annotations

import random

import pytest

from kvcache.base.errors import InvalidInputError
from kvcache.offload import OffloadAnswer, OffloadKey, TierManager, TierOptions, make_offload_key
from kvcache.offload.slots import NOTHING, READY, STORING
from kvcache.offload.spills import SpillQueue
from tests.offload.tier_model import ModelTier
from tests.walks import random_walk

NUM_STEPS = 250


class Walk:
    """One tier and its model; every operation is applied to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.choice([1, 1, 2, 4])
        num_slots = self.rng.choice([1, 3, 8, 12])
        self.tier = TierManager(TierOptions("host", num_slots, self.size))
        self.spills = SpillQueue(self.tier, 0.0)
        self.model = ModelTier(num_slots, self.size)
        # Chains that branch: a key names the way to it.
        self.chains: list[list[OffloadKey]] = [[]]
        for _ in range(6):
            base = self.rng.choice(self.chains)
            chain = base[: self.rng.randrange(len(base) + 1)]
            group = self.rng.randrange(2) if not chain else chain[0][-1]
            for _ in range(self.rng.randrange(1, 14)):
                chain.append(make_offload_key(self.rng.randbytes(8), group))
            self.chains.append(chain)
        self.every = sorted({key for chain in self.chains for key in chain})
        self.addresses: dict[OffloadKey, int] = {}
        self.has_copies = False
        """Whether loads are counted: not before the first copy."""

    def some_keys(self) -> list[OffloadKey]:
        chain = self.rng.choice(self.chains[1:])
        first = self.rng.choice([0, 0, self.rng.randrange(len(chain))])
        return chain[first : first + self.rng.randrange(1, len(chain) + 1)]

    def keys_of(self, state: str) -> list[OffloadKey]:
        return [key for key in self.every if self.model.state(key) == state]

    def some_of(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        return self.rng.sample(keys, self.rng.randrange(1, len(keys) + 1)) if keys else []

    def store(self) -> None:
        keys = self.some_keys()
        if self.rng.random() < 0.1:
            keys += self.some_of(keys)
        drops_dirty, needs_all = self.rng.random() < 0.5, self.rng.random() < 0.3
        are_copies = self.size == 1 and self.rng.random() < 0.3
        reserved = self.tier.reserve(
            keys,
            drops_dirty=drops_dirty,
            needs_all=needs_all,
            are_copies=are_copies,
        )
        expected = self.model.reserve(keys, drops_dirty, needs_all, are_copies)
        if expected is None or reserved is None:
            assert reserved is None
            assert expected is None
            return
        positions, evicted = expected
        self.has_copies |= are_copies and bool(positions)
        assert reserved.positions.tolist() == positions
        assert list(reserved.evicted_keys) == evicted
        for key in evicted:
            del self.addresses[key]
        for position, address in zip(positions, reserved.addresses.tolist(), strict=True):
            self.addresses[keys[position]] = address

    def end_store(self) -> None:
        written = [key for key in self.every if (f := self.model.find(key)) and f[2].is_written]
        keys, success = self.some_of(written), self.rng.random() < 0.7
        if not success:
            keys += self.some_of(self.keys_of("ready"))
        self.tier.complete_store(keys, success)
        self.model.complete_store(keys, success)

    def load(self) -> None:
        keys = self.some_of(self.keys_of("ready"))
        keys += self.some_of(keys) if self.rng.random() < 0.2 else []
        addresses = self.tier.hold_leading(keys)
        assert addresses.tolist() == [self.addresses[key] for key in keys]
        for key in keys:
            self.model.get(key).num_loads += 1
        for key in set(keys) if self.has_copies else ():
            self.model.get(key).own_loads = max(0, self.model.get(key).own_loads - 1)
        self.model.settle(self.model.slots_of(keys))

    def end_load(self) -> None:
        loaded = [k for k in self.every if (f := self.model.find(k)) and f[2].num_loads]
        keys = self.some_of(loaded)
        self.tier.complete_load(keys)
        slots = self.model.slots_of(keys)
        for key in keys:
            self.model.get(key).num_loads -= 1
        self.model.settle(slots)

    def spill(self) -> None:
        keys = self.some_of(self.keys_of("ready"))
        addresses = self.tier.prepare_spill(keys)
        assert addresses.tolist() == [self.addresses[key] for key in keys]
        for key in keys:
            self.model.get(key).num_spills += 1

    def end_spill(self) -> None:
        spilled = [k for k in self.every if (f := self.model.find(k)) and f[2].num_spills]
        keys = self.some_of(spilled)
        self.tier.complete_spill(keys)
        slots = self.model.slots_of(keys)
        for key in keys:
            self.model.get(key).num_spills -= 1
        self.model.settle(slots)

    def touch(self) -> None:
        keys = self.some_keys()
        self.tier.touch(keys)
        self.model.touch(keys)

    def mark(self) -> None:
        keys, is_dirty = self.some_of(self.every), self.rng.random() < 0.6
        (self.spills.mark_dirty if is_dirty else self.spills.mark_clean)(keys)
        for key in keys:
            if self.model.state(key) == "ready":
                self.model.get(key).is_dirty = is_dirty

    def mark_copies(self) -> None:
        keys, are_copies = self.some_of(self.every), self.rng.random() < 0.5
        slots = self.tier.slots
        marked = slots.slots_of(slots.ready(keys))
        changed = self.tier.eviction.mark_copies(marked, are_copies=are_copies)
        if self.size > 1:
            assert not len(changed)
            return
        ready = [key for key in keys if self.model.state(key) == "ready"]
        expected = [key for key in ready if self.model.get(key).is_copy != are_copies]
        assert slots.keys_at(changed) == expected
        self.has_copies |= bool(expected)
        self.model.mark_copies(keys, are_copies)

    def forget(self) -> None:
        keys = self.some_of(self.every) if self.rng.random() < 0.3 else self.some_keys()[:2]
        was_ready = {key for key in keys if self.model.state(key) == "ready"}
        assert set(self.tier.forget(keys)) == was_ready
        self.model.forget(keys)

    def mistake(self) -> None:
        """A call that must be refused and change nothing."""
        wrong = self.rng.choice(self.every)
        call, is_refused = self.rng.choice(
            [
                (self.tier.prepare_load, self.model.state(wrong) != "ready"),
                (self.tier.prepare_spill, self.model.state(wrong) != "ready"),
                (self.tier.complete_load, not self._counts(wrong, "num_loads")),
                (self.tier.complete_spill, not self._counts(wrong, "num_spills")),
                (self.tier.complete_store, not self._counts(wrong, "is_written")),
            ]
        )
        if not is_refused:
            return
        good = [key for key in self.some_of(self.keys_of("ready")) if key != wrong]
        with pytest.raises(InvalidInputError, match="nothing was changed"):
            call([*good, wrong])

    def _counts(self, key: OffloadKey, what: str) -> bool:
        found = self.model.find(key)
        return found is not None and bool(getattr(found[2], what))

    def compare(self) -> None:
        self.tier.check()
        known = {each.key: each for slot in self.model.slots for each in slot.places.values()}
        names = {"forgotten": NOTHING, "storing": STORING, "ready": READY}
        expected = [names[known[key].state] if key in known else NOTHING for key in self.every]
        assert self.tier.states_of(self.every).tolist() == expected
        self.addresses = {key: a for key, a in self.addresses.items() if key in known}
        assert len(set(self.addresses.values())) == len(self.addresses)
        for slot in self.model.slots:
            places = {self.addresses[k.key] - p for p, k in slot.places.items()}
            assert len(places) == 1 and places.pop() % self.size == 0
        order = [
            {self.addresses[each.key] // self.size for each in slot.places.values()}
            for slot in self.model.order
        ]
        assert [{slot} for slot in self.tier.eviction.order()] == order
        statistics = self.tier.statistics()
        assert statistics.num_free_slots == self.model.num_slots - len(self.model.slots)
        assert statistics.num_copies == sum(each.is_copy for each in known.values())
        is_owed = [k for k in self.every if k in known and known[k].is_dirty]
        assert self.spills.owed(self.every) == [k for k in is_owed if not known[k].num_spills]

    def end(self) -> None:
        """End every job: nothing may be left of it."""
        for key in self.every:
            while self._counts(key, "num_loads"):
                self.tier.complete_load([key])
                self.model.get(key).num_loads -= 1
                self.model.settle(self.model.slots_of([key]))
            while self._counts(key, "num_spills"):
                self.tier.complete_spill([key])
                self.model.get(key).num_spills -= 1
                self.model.settle(self.model.slots_of([key]))
            if self._counts(key, "is_written"):
                self.tier.complete_store([key])
                self.model.complete_store([key], True)
        self.compare()
        statistics = self.tier.statistics()
        assert (
            statistics.num_pending == statistics.num_held == statistics.num_quarantined_slots == 0
        )
        self.tier.reset_cache()
        self.tier.check()
        assert self.tier.statistics().num_free_slots == self.model.num_slots


@pytest.mark.seeds(10, long=40)
def test_a_tier_does_what_its_slow_model_does(seed: int) -> None:
    walk = Walk(seed)
    operations = {
        walk.store: 5,
        walk.end_store: 4,
        walk.load: 2,
        walk.end_load: 2,
        walk.spill: 1,
        walk.end_spill: 1,
        walk.touch: 1,
        walk.mark: 1,
        walk.mark_copies: 2,
        walk.forget: 1,
        walk.mistake: 1,
    }
    random_walk(f"seed {seed}", walk.rng, operations, NUM_STEPS, walk.compare)
    walk.end()


def test_look_ups_follow_a_key_through_its_life() -> None:
    tier = TierManager(TierOptions("host", 2))
    key = make_offload_key(b"digest", 0)
    tier.begin_adoption()
    assert tier.lookup(key) is OffloadAnswer.RETRY
    assert tier.prepare_store([key]) is None
    tier.adopt([])
    assert tier.lookup(key) is OffloadAnswer.MISS
    assert tier.prepare_store([key]) is not None
    assert tier.lookup(key) is OffloadAnswer.HIT_PENDING
    tier.complete_store([key])
    assert tier.lookup(key) is OffloadAnswer.HIT
    tier.prepare_load([key])
    tier.forget([key])
    assert tier.lookup(key) is OffloadAnswer.MISS
    assert tier.statistics().num_quarantined_slots == 1
    tier.complete_load([key])
    assert tier.statistics().num_free_slots == 2
    statistics = tier.statistics()
    assert (statistics.num_hits, statistics.num_misses) == (2, 3)
