"""Followers get parents before children, in whatever order blocks arrive in their media."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from kvcache.events.published_state import PublishedState
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent

MEDIA = ("GPU", "CPU", "STORAGE")


def stored(
    medium: str, *hashes: int, parent: int | None = None, kind: str = "full_attention"
) -> StoredEvent:
    tokens = np.array([token for value in hashes for token in (value, 0)], np.int32)
    names = np.array(hashes, np.uint64)
    return StoredEvent(names, parent, tokens, 2, medium, spec_kind=kind)


def removed(medium: str, *hashes: int) -> RemovedEvent:
    return RemovedEvent(np.array(hashes, np.uint64), medium)


def told(events: Sequence[WireEvent]) -> list[tuple[str, list[int]]]:
    return [
        (event.medium, event.block_hashes.tolist())
        for event in events
        if not isinstance(event, ClearedEvent)
    ]


def test_a_store_that_ends_after_its_parent_was_evicted_is_published_with_the_parent() -> None:
    state = PublishedState()
    state.apply([stored("GPU", 1, 2, 3), removed("GPU", 1, 2, 3)])
    assert state.apply([stored("CPU", 2, 3, parent=1)]) == []
    assert (state.orphans.num_blocks(), state.mirror.num_blocks()) == ({"CPU": 2}, {})
    assert told(state.apply([stored("GPU", 1)])) == [("GPU", [1]), ("CPU", [2]), ("CPU", [3])]
    assert (len(state.orphans), state.mirror.num_blocks()) == (0, {"GPU": 1, "CPU": 2})


def test_stores_that_end_in_another_order_than_they_began_are_published_parents_first() -> None:
    state = PublishedState()
    events = [stored("STORAGE", 3, parent=2), stored("CPU", 2, parent=1), stored("CPU", 1)]
    found = told(state.apply(events))
    assert found == [("CPU", [1]), ("CPU", [2]), ("STORAGE", [3])]


def test_a_parent_that_goes_in_the_same_batch_is_no_parent() -> None:
    state = PublishedState()
    events = [stored("GPU", 1), removed("GPU", 1), stored("CPU", 2, parent=1)]
    assert told(state.apply(events)) == [("GPU", [1]), ("GPU", [1])]
    assert state.orphans.num_blocks() == {"CPU": 1}


def test_an_orphan_that_goes_is_never_published() -> None:
    state = PublishedState()
    state.apply([stored("CPU", 2, 3, parent=1), stored("STORAGE", 2, parent=1)])
    assert state.apply([removed("CPU", 2)]) == []
    assert state.orphans.num_blocks() == {"CPU": 1, "STORAGE": 1}
    assert told(state.apply([stored("CPU", 1), removed("CPU", 1, 3)])) == [
        ("CPU", [1]),
        ("STORAGE", [2]),
        ("CPU", [3]),
        ("CPU", [1, 3]),
    ]
    state.apply([stored("CPU", 5, parent=4), ClearedEvent(), stored("CPU", 4)])
    assert (len(state.orphans), state.mirror.num_blocks()) == (0, {"CPU": 1})


def test_a_block_of_a_window_is_published_without_its_parent() -> None:
    state = PublishedState()
    assert told(state.apply([stored("CPU", 2, parent=1, kind="sliding_window")])) == [("CPU", [2])]


def test_the_whole_state_has_parents_first_across_media() -> None:
    state = PublishedState()
    state.apply([stored("STORAGE", 1), stored("CPU", 2, parent=1), stored("STORAGE", 3, parent=2)])
    state.apply([stored("CPU", 4, parent=3), stored("GPU", 9), stored("CPU", 6, parent=9)])
    state.apply([removed("GPU", 9)])
    found = told(state.mirror.state())
    assert found == [("CPU", [6]), ("STORAGE", [1]), ("CPU", [2]), ("STORAGE", [3]), ("CPU", [4])]


class Follower:
    """A router that drops children without a parent: the parents of its blocks, by medium."""

    def __init__(self) -> None:
        self.media: dict[str, dict[int, int | None]] = {medium: {} for medium in MEDIA}

    def follow(self, events: Sequence[WireEvent]) -> None:
        for event in events:
            if isinstance(event, ClearedEvent):
                self.media = {medium: {} for medium in MEDIA}
            elif isinstance(event, RemovedEvent):
                for value in event.block_hashes.tolist():
                    del self.media[event.medium][value]
            else:
                parent = event.parent_block_hash
                for value in event.block_hashes.tolist():
                    assert parent is None or self.knows(parent), f"{value} comes before {parent}"
                    assert value not in self.media[event.medium], f"{value} is stored twice"
                    self.media[event.medium][value] = parent
                    parent = value

    def knows(self, value: int) -> bool:
        return any(value in there for there in self.media.values())


@pytest.mark.seeds(60, long=2000)
def test_a_follower_gets_every_block_whose_parent_it_knows(seed: int) -> None:
    choice = random.Random(seed)
    parents = {value: choice.choice((None, *range(1, value))) for value in range(1, 16)}
    truth: dict[str, set[int]] = {medium: set() for medium in MEDIA}
    state, follower = PublishedState(), Follower()
    for _ in range(60):
        batch: list[WireEvent] = []
        for _ in range(choice.randint(1, 6)):
            medium, value = choice.choice(MEDIA), choice.randint(1, 15)
            parent, there = parents[value], truth[medium]
            # The device stores parents first, and evicts children first.
            has_child = medium == "GPU" and any(parents[other] == value for other in there)
            has_parent = medium != "GPU" or parent is None or parent in there
            if choice.random() < 0.02:
                batch.append(ClearedEvent())
                truth = {medium: set() for medium in MEDIA}
            elif value in there and not has_child:
                there.remove(value)
                batch.append(removed(medium, value))
            elif value not in there and has_parent:
                there.add(value)
                batch.append(stored(medium, value, parent=parent))
        follower.follow(state.apply(batch))
        known = {medium: set(there) for medium, there in follower.media.items()}
        waiting = {medium: truth[medium] - known[medium] for medium in MEDIA}
        assert all(known[medium] <= truth[medium] for medium in MEDIA)
        assert Counter(state.orphans.num_blocks()) == Counter(
            {medium: len(several) for medium, several in waiting.items()}
        )
        for several in waiting.values():
            assert not any(follower.knows(parents[value] or 0) for value in several)
        snapshot = state.mirror.state()
        places = {v: i for i, (_, values) in reversed([*enumerate(told(snapshot))]) for v in values}
        for i, event in enumerate(e for e in snapshot if isinstance(e, StoredEvent)):
            assert places.get(event.parent_block_hash or 0, -1) < i
