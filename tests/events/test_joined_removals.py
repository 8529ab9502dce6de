"""Removals of one step are one event, and blocks that a clear removed are not removed again."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.events.translation import drop_void_removals, join_removals
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent


def stored(*hashes: int, medium: str = "GPU") -> StoredEvent:
    tokens = np.zeros(len(hashes), np.int32)
    return StoredEvent(np.array(hashes, np.uint64), None, tokens, 1, medium)


def removed(*hashes: int, medium: str = "GPU", group: int = 0) -> RemovedEvent:
    return RemovedEvent(np.array(hashes, np.uint64), medium, group)


def shown(events: list[WireEvent]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, ClearedEvent):
            found.append(("clear",))
        else:
            sign = "+" if isinstance(event, StoredEvent) else "-"
            found.append((sign, event.medium, event.group_idx, event.block_hashes.tolist()))
    return found


def test_removals_from_one_place_with_nothing_between_them_are_one() -> None:
    events = [removed(1, 2), removed(3), removed(3, 4), stored(5), removed(6)]
    assert shown(join_removals(events)) == [
        ("-", "GPU", 0, [1, 2, 3, 4]),
        ("+", "GPU", 0, [5]),
        ("-", "GPU", 0, [6]),
    ]


def test_removals_from_different_places_stay_apart() -> None:
    events = [removed(1), removed(2, medium="CPU"), removed(3, medium="CPU", group=1), removed(4)]
    assert shown(join_removals(events)) == shown(events)


def test_hashes_stay_whole_when_they_are_joined() -> None:
    (event,) = join_removals([removed(2**64 - 1), removed(2**63 + 1)])
    assert isinstance(event, RemovedEvent)
    assert event.block_hashes.dtype == np.uint64
    assert event.block_hashes.tolist() == [2**64 - 1, 2**63 + 1]


def test_what_a_clear_removes_is_not_removed_again() -> None:
    events = [
        removed(1),
        ClearedEvent(),
        removed(2, 3),
        removed(4, medium="CPU"),
        stored(2, 5),
        removed(2, 3),
        removed(2),
        stored(5, medium="CPU"),
        removed(5),
        removed(5, medium="CPU"),
    ]
    assert shown(drop_void_removals(events)) == [
        ("-", "GPU", 0, [1]),
        ("clear",),
        ("+", "GPU", 0, [2, 5]),
        ("-", "GPU", 0, [2]),
        ("+", "CPU", 0, [5]),
        ("-", "GPU", 0, [5]),
        ("-", "CPU", 0, [5]),
    ]
