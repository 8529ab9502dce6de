"""What a publisher has published, and the blocks that it holds back because they are orphans.

A store takes time. When a block arrives in a lower tier, its parent may have been evicted from
every medium, or the parent's own store may still be under way. Most routers drop a block without a
known parent, and would miss it when the parent comes back. So an orphan waits until its parent is
stored in some medium, or it is removed itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvcache.events.mirror import CacheMirror
from kvcache.events.translation import needs_parent
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent


class PublishedState:
    """The state that followers have, and the orphans. One user, one thread."""

    def __init__(self) -> None:
        self.mirror: Final = CacheMirror()
        """The published blocks."""
        self.orphans: Final = Orphans()

    def apply(self, events: Sequence[WireEvent]) -> list[WireEvent]:
        """Apply events, in order; return those to publish, with parents before children."""
        mirror, orphans = self.mirror, self.orphans
        told: list[WireEvent] = []
        # Many events at once are faster: some wait for the mirror, with these hashes by group.
        num_applied, has_removals = 0, False
        waiting: defaultdict[int, set[int]] = defaultdict(set)
        for event in events:
            if not isinstance(event, StoredEvent):
                kept: RemovedEvent | ClearedEvent | None = event
                if isinstance(event, ClearedEvent):
                    orphans.clear()
                elif orphans:
                    kept = orphans.drop(event)
                if kept is not None:
                    told.append(kept)
                    has_removals = True
                continue
            parent, group = event.parent_block_hash, event.group_idx
            if parent is not None and needs_parent(event):
                if has_removals:
                    mirror.apply(told[num_applied:])
                    num_applied, has_removals = len(told), False
                    waiting.clear()
                if parent not in waiting[group] and not mirror.is_cached(parent, group):
                    orphans.hold(event)
                    continue
            placed = [event, *orphans.release(event)] if orphans else [event]
            for each in placed:
                waiting[group].update(each.block_hashes.tolist())
            told += placed
        mirror.apply(told[num_applied:])
        return told


class _Place(NamedTuple):
    """A block in one medium."""

    block_hash: int
    medium: str
    group_idx: int


class Orphans:
    """Blocks that wait for their parents. Invariant: `_children` has each of `_blocks` under its
    parent."""

    def __init__(self) -> None:
        self._blocks: dict[_Place, StoredEvent] = {}
        self._children: dict[tuple[int, int], dict[_Place, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def num_blocks(self) -> dict[str, int]:
        """Return how many blocks wait in each medium that has any."""
        found: dict[str, int] = {}
        for place in self._blocks:
            found[place.medium] = found.get(place.medium, 0) + 1
        return found

    def hold(self, event: StoredEvent) -> None:
        """Let the blocks of an event wait, each for its own parent."""
        for i, value in enumerate(event.block_hashes.tolist()):
            block = event.part(i, i + 1)
            place = _Place(value, event.medium, event.group_idx)
            self._forget(place)
            self._blocks[place] = block
            self._children.setdefault(_parent_of(block), {})[place] = None

    def release(self, event: StoredEvent) -> list[StoredEvent]:
        """Return the blocks that waited for blocks of `event`, parents first; they wait no more."""
        found: list[StoredEvent] = []
        known = [(value, event.group_idx) for value in event.block_hashes.tolist()]
        for parent in known:  # grows
            for place in self._children.pop(parent, ()):
                found.append(self._blocks.pop(place))
                known.append((place.block_hash, place.group_idx))
        return found

    def drop(self, event: RemovedEvent) -> RemovedEvent | None:
        """Forget removed blocks that wait; return the event without them, None if none is left."""
        medium, group = event.medium, event.group_idx
        hashes = event.block_hashes.tolist()
        rest = [value for value in hashes if not self._forget(_Place(value, medium, group))]
        return RemovedEvent(np.array(rest, np.uint64), medium, group) if rest else None

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._children.clear()

    def _forget(self, place: _Place) -> bool:
        """Forget a block; return whether it waited."""
        block = self._blocks.pop(place, None)
        if block is None:
            return False
        siblings = self._children[_parent_of(block)]
        del siblings[place]
        if not siblings:
            del self._children[_parent_of(block)]
        return True


def _parent_of(block: StoredEvent) -> tuple[int, int]:
    return block.parent_block_hash or 0, block.group_idx
