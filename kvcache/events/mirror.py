"""What is cached where, as told by events: the same in a publisher and in its followers.

The publisher makes snapshots from it; a subscriber compares its checksum with the publisher's.
Refuses nothing that is an event: what is removed and was not there is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvcache.base.arguments import as_int, as_text, as_tuple
from kvcache.events.shelf import BlockKind, Shelf
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent


class CacheMirror:
    """The present state of one cache. One owner, one thread."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._shelves: dict[tuple[str, int, int], Shelf] = {}
        self.num_unknown_removals = 0
        """Blocks that were removed although they were not there."""

    def __len__(self) -> int:
        """Return how many blocks there are in all media."""
        return sum(map(len, self._shelves.values()))

    @property
    def checksum(self) -> int:
        """64 bits that are equal where two mirrors hold the same, whatever happened before."""
        return sum(shelf.checksum for shelf in self._shelves.values()) & (2**64 - 1)

    def num_blocks(self) -> dict[str, int]:
        """Return how many blocks each medium has."""
        found: dict[str, int] = {}
        for (medium, _, _), shelf in self._shelves.items():
            found[medium] = found.get(medium, 0) + len(shelf)
        return {medium: count for medium, count in found.items() if count}

    def contains(self, block_hash: int, medium: str, group_idx: int = 0) -> bool:
        """Say whether a block is in a medium."""
        block_hash = as_int("block_hash", block_hash, at_most=2**64 - 1)
        medium, group_idx = as_text("medium", medium), as_int("group_idx", group_idx)
        return any(block_hash in shelf.rows for shelf in self._of(medium, group_idx))

    def apply(self, events: Sequence[WireEvent]) -> None:
        """Follow events, in order."""
        events = as_tuple("events", events, kind=(StoredEvent, RemovedEvent, ClearedEvent))
        for kind, group in groupby(events, _kind_of):
            if isinstance(kind, BlockKind):
                self._put([event for event in group if isinstance(event, StoredEvent)])
                continue
            for event in group:
                if isinstance(event, RemovedEvent):
                    self._take(event)
                elif isinstance(event, ClearedEvent):
                    self._shelves.clear()

    def state(self) -> list[WireEvent]:
        """Return events that state everything, a clear first, and parents before children."""
        media = ("GPU", "CPU", "STORAGE")
        rank = {medium: place for place, medium in enumerate(media)}
        keys = sorted(self._shelves, key=lambda key: (rank.get(key[0], len(media)), key))
        return [ClearedEvent(), *(e for key in keys for e in self._shelves[key].state())]

    def _put(self, events: list[StoredEvent]) -> None:
        """Hold the blocks of events of one kind."""
        first = events[0]
        key = (first.medium, first.group_idx, first.block_size)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = Shelf(first.block_size)
        for other in self._of(first.medium, first.group_idx):
            if other is not shelf:
                for event in events:
                    other.take(event.block_hashes.tolist())
        shelf.put(events)

    def _take(self, event: RemovedEvent) -> None:
        shelves = self._of(event.medium, event.group_idx)
        hashes = event.block_hashes.tolist()
        num_missing = len(hashes)
        for shelf in shelves:
            num_missing -= len(hashes) - shelf.take(hashes)
        self.num_unknown_removals += num_missing

    def _of(self, medium: str, group_idx: int) -> list[Shelf]:
        """Return the shelves of a medium and group: one, unless block sizes differ."""
        return [
            shelf
            for (name, group, _), shelf in self._shelves.items()
            if (name, group) == (medium, group_idx)
        ]


def _kind_of(event: WireEvent) -> BlockKind | None:
    """Return what stored events that can be put together have in common."""
    return BlockKind.of(event) if isinstance(event, StoredEvent) else None
