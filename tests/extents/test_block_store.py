"""Single blocks: references, lives, seals, and where blocks wait that nobody holds."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.errors import BlockError
from kvcache.extents.block_store import FIRST_CLIENT, NO_CONTENT, SEALED, BlockStore
from kvcache.policies import EntryInfo, make_eviction_policy

NUM_BLOCKS = 12


class Book:
    is_uniform = True

    def weight(self, entry: int) -> int:
        return 1

    def weights(self, entries: IndexArray) -> IndexArray:
        return np.ones_like(entries)

    def describe(self, entry: int) -> EntryInfo:
        return EntryInfo()


def make_store() -> BlockStore:
    store = BlockStore(NUM_BLOCKS, has_single=True)
    store.policy = make_eviction_policy("lru", NUM_BLOCKS, Book())
    return store


def fill(store: BlockStore, block_ids: Int32Array, seal: int = SEALED) -> None:
    """Give contents to blocks of a group whose blocks go one by one."""
    store.fill(block_ids, seal)
    store.is_single[block_ids] = True


class Model:
    """The same with a counter and sets."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()
        self.seals: dict[int, int] = {}
        self.waiting: list[int] = []

    def fresh(self) -> set[int]:
        held = +self.references
        return {b for b in range(1, NUM_BLOCKS) if b not in held and b not in self.seals}


def compare(store: BlockStore, model: Model) -> None:
    assert set(store.fresh_blocks().tolist()) == model.fresh()
    assert store.num_fresh == len(model.fresh())
    assert store.policy.order() == model.waiting
    assert store.num_unheld_cached == len(model.waiting)
    assert store.num_free == len(model.fresh()) + len(model.waiting)
    assert store.references.tolist() == [model.references[b] for b in range(NUM_BLOCKS)]
    assert store.num_cached == len(model.seals)
    states = [model.seals.get(b, NO_CONTENT) for b in range(NUM_BLOCKS)]
    assert store.seals.tolist() == states
    assert store.num_unsealed == Counter(s for s in model.seals.values() if s > SEALED)


def random_operation(store: BlockStore, model: Model, choose: random.Random) -> None:
    held = sorted(+model.references)
    match choose.randrange(7):
        case 0 if model.fresh():
            taken = store.take_fresh(choose.randrange(1, len(model.fresh()) + 1))
            assert set(taken.tolist()) <= model.fresh()
            model.references.update(taken.tolist())
        case 1 if held:
            given = choose.sample(held, choose.randrange(1, len(held) + 1))
            store.give_back(int32_array(given))
            model.references.subtract(given)
            gone = [b for b in given if not model.references[b]]
            model.waiting += [b for b in gone if b in model.seals]
        case 2 if held:
            block_id = choose.choice(held)
            if block_id not in model.seals:
                seal = choose.choice([SEALED, FIRST_CLIENT, FIRST_CLIENT + 1])
                fill(store, int32_array([block_id]), seal)
                model.seals[block_id] = seal
        case 3:
            touched = [b for b in {*held, *model.waiting} if choose.random() < 0.5]
            store.touch(int32_array(touched))
            model.references.update(touched)
            model.waiting = [b for b in model.waiting if b not in touched]
        case 4 if model.seals:
            forgotten = [b for b in sorted(model.seals) if choose.random() < 0.3]
            handles = store.handles_of(int32_array(forgotten))
            store.forget(np.array(forgotten, dtype=np.intp))
            assert not store.are_valid(handles).any()
            model.seals = {b: s for b, s in model.seals.items() if b not in forgotten}
            model.waiting = [b for b in model.waiting if b not in forgotten]
        case 5:
            sealed = [b for b, seal in model.seals.items() if seal == FIRST_CLIENT]
            if sealed:
                store.seal(int32_array(sealed), FIRST_CLIENT)
                model.seals.update(dict.fromkeys(sealed, SEALED))
        case 6 if model.waiting:
            victims = np.array(store.policy.choose(1).entries, dtype=np.intp)
            assert victims.tolist() == model.waiting[:1]
            store.drop_victims(victims)
            del model.seals[model.waiting.pop(0)]


@pytest.mark.parametrize("seed", range(4))
def test_a_store_counts_as_a_counter_does(seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    store, model = make_store(), Model()
    for _ in range(300):
        random_operation(store, model, choose)
        compare(store, model)


def test_a_handle_means_one_life_of_a_block() -> None:
    store = make_store()
    taken = store.take_fresh(3)
    fill(store, taken)
    handles = store.handles_of(taken)
    assert store.ids_of(handles).tolist() == taken.tolist()
    store.forget(np.array(taken[:1], dtype=np.intp))
    fill(store, taken[:1])
    assert store.are_valid(handles).tolist() == [False, True, True]
    assert store.are_valid(store.handles_of(taken)).all()
    assert not store.are_valid(store.handles_of(int32_array([0]))).any()


def test_blocks_given_back_several_times_in_one_call_go_at_the_last_time() -> None:
    store = make_store()
    taken = store.take_fresh(3)
    fill(store, taken)
    store.touch(taken[:2])
    one, two, three = taken.tolist()
    store.give_back(int32_array([one, two, one, three]))
    assert store.policy.order() == [one, three]
    assert store.references[two] == 1


def test_a_fresh_block_cannot_be_touched() -> None:
    store = make_store()
    taken = store.take_fresh(2)
    store.give_back(taken)
    with pytest.raises(BlockError) as error:
        store.touch(taken)
    assert str(error.value) == (
        f"blocks {taken.tolist()} are free and hold nothing: take new ones instead"
    )
    assert store.references.sum() == 0
