"""The state of a cache according to its events: the same in a publisher and in its followers.

The publisher makes snapshots from it; a subscriber compares its checksum with the publisher's.
Removals of unknown blocks are counted, not refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.base.arguments import as_int, as_text, as_tuple
from kvcache.base.arrays import Int32Array
from kvcache.events.wire_events import (
    ClearedEvent,
    Hashes,
    RemovedEvent,
    RouterKey,
    StoredEvent,
    WireEvent,
)

_FIRST_ROWS: Final = 64
_NO_ROW: Final = -1
_MIN_FORGOTTEN_KINDS: Final = 1024
"""Kinds are dropped when there are this many more than blocks: salts come and go."""
_MASK: Final = 2**64 - 1
_MIXING: Final = (
    (np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)),
    (np.uint64(29), np.uint64(0xC4CEB9FE1A85EC53)),
)

RowArray = NDArray[np.int64]


@dataclass(frozen=True)
class BlockKind:
    """Common properties of blocks, apart from their medium: names and sizes."""

    medium: str
    group_idx: int
    block_size: int
    lora_name: str | None
    cache_salt: str | None
    spec_kind: str | None
    sliding_window: int | None

    @classmethod
    def of(cls, event: StoredEvent) -> BlockKind:
        return cls(
            event.medium,
            event.group_idx,
            event.block_size,
            event.lora_name,
            event.cache_salt,
            event.spec_kind,
            event.sliding_window,
        )

    def checksum(self) -> int:
        """Return 64 bits that hardly any other kind has; the same in every process."""
        parts = (self.medium, self.group_idx, self.block_size, self.lora_name, self.cache_salt)
        return int(xxhash.xxh3_64_intdigest(msgpack.packb(parts)))


class Shelf:
    """Blocks by hash. A block that is added again replaces the earlier one."""

    def __init__(self, block_size: int) -> None:
        """Start empty; blocks have `block_size` tokens."""
        self.block_size = block_size
        self.rows: dict[int, int] = {}
        self.checksum = 0
        """The sum over all blocks, modulo 2**64: equal shelves have equal ones."""
        self._hashes: Hashes = np.zeros(_FIRST_ROWS, np.uint64)
        self._parents: Hashes = np.zeros(_FIRST_ROWS, np.uint64)
        self._sums: Hashes = np.zeros(_FIRST_ROWS, np.uint64)
        self._tokens: Int32Array = np.zeros((_FIRST_ROWS, block_size), np.int32)
        self._kind_of: NDArray[np.int32] = np.zeros(_FIRST_ROWS, np.int32)
        self._extra_keys: dict[int, tuple[RouterKey, ...]] = {}
        self._kinds: list[BlockKind] = []
        self._numbers: dict[BlockKind, int] = {}
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, events: Sequence[StoredEvent]) -> None:
        """Add the blocks of events, in order, all of one kind and this block size.

        Many events of one block each cost little more than one event of many blocks.
        """
        block_hashes = np.concatenate([event.block_hashes for event in events])
        hashes = block_hashes.tolist()
        if len(events) > 1 and len(set(hashes)) < len(hashes):
            for event in events:
                self.put((event,))
            return
        if not self.rows.keys().isdisjoint(hashes):
            self.take([value for value in hashes if value in self.rows])
        kind = BlockKind.of(events[0])
        if kind not in self._numbers:
            if len(self._kinds) >= len(self.rows) + _MIN_FORGOTTEN_KINDS:
                self._forget_kinds()
            self._numbers[kind] = len(self._kinds)
            self._kinds.append(kind)
        rows = self._take_rows(len(hashes))
        self.rows.update(zip(hashes, rows.tolist(), strict=True))
        tokens = np.concatenate([event.token_ids for event in events])
        tokens = tokens.reshape(-1, self.block_size)
        parents = np.empty(len(hashes), np.uint64)
        parents[1:] = block_hashes[:-1]
        starts = np.cumsum([0, *[len(event.block_hashes) for event in events[:-1]]])
        parents[starts] = [event.parent_block_hash or 0 for event in events]
        sums = _row_sums(kind.checksum(), block_hashes, parents, tokens)
        for start, event in zip(starts.tolist(), events, strict=True):
            if event.extra_keys:
                end = start + len(event.block_hashes)
                sums[start:end] += self._put_extra_keys(rows[start:end], event.extra_keys)
        self._hashes[rows], self._parents[rows] = block_hashes, parents
        self._tokens[rows], self._sums[rows] = tokens, sums
        self._kind_of[rows] = self._numbers[kind]
        self.checksum = (self.checksum + int(sums.sum(dtype=np.uint64))) & _MASK

    def take(self, hashes: Sequence[int]) -> int:
        """Remove these blocks; return how many of them were not here."""
        found = [row for row in (self.rows.pop(h, _NO_ROW) for h in hashes) if row != _NO_ROW]
        if found:
            gone = int(self._sums[found].sum(dtype=np.uint64))
            self.checksum = (self.checksum - gone) & _MASK
            self._free += found
            if self._extra_keys:
                for row in found:
                    self._extra_keys.pop(row, None)
        return len(hashes) - len(found)

    def state(self) -> list[StoredEvent]:
        """Return events of the whole state, in long chains, parents before children."""
        if not self.rows:
            return []
        rows = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        places = {value: place for place, value in enumerate(self.rows)}
        parents = self._parents[rows]
        above = np.array([places.get(p, _NO_ROW) for p in parents.tolist()], np.int64)
        order, ends = _chains(above, self._kind_of[rows])
        ordered = rows[order]
        found, start = [], 0
        for end in ends.tolist():
            found.append(self._event(ordered[start:end]))
            start = end
        return found

    def _event(self, rows: RowArray) -> StoredEvent:
        kind = self._kinds[self._kind_of[rows[0]]]
        keys: tuple[tuple[RouterKey, ...] | None, ...] = ()
        if self._extra_keys:
            keys = tuple(self._extra_keys.get(row) for row in rows.tolist())
        return StoredEvent(
            self._hashes[rows],
            int(self._parents[rows[0]]) or None,
            self._tokens[rows].reshape(-1),
            kind.block_size,
            kind.medium,
            kind.lora_name,
            keys if any(keys) else (),
            kind.group_idx,
            kind.spec_kind,
            kind.sliding_window,
            kind.cache_salt,
        )

    def _put_extra_keys(
        self, rows: RowArray, extra_keys: tuple[tuple[RouterKey, ...] | None, ...]
    ) -> Hashes:
        """Store the extra keys of blocks; return their parts of the rows' sums."""
        sums = np.zeros(len(rows), np.uint64)
        for index, keys in enumerate(extra_keys):
            if keys:
                self._extra_keys[int(rows[index])] = keys
                sums[index] = xxhash.xxh3_64_intdigest(msgpack.packb(keys))
        return sums

    def _forget_kinds(self) -> None:
        """Keep only kinds that some block has."""
        rows = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        used, self._kind_of[rows] = np.unique(self._kind_of[rows], return_inverse=True)
        self._kinds = [self._kinds[number] for number in used.tolist()]
        self._numbers = {kind: number for number, kind in enumerate(self._kinds)}

    def _take_rows(self, count: int) -> RowArray:
        if len(self._free) < count:
            old = len(self._hashes)
            new = max(2 * old, old + count)
            for name in ("_hashes", "_parents", "_sums", "_tokens", "_kind_of"):
                array = getattr(self, name)
                grown = np.zeros((new, *array.shape[1:]), array.dtype)
                grown[:old] = array
                setattr(self, name, grown)
            self._free += range(new - 1, old - 1, -1)
        taken = self._free[-count:]
        del self._free[-count:]
        return np.array(taken[::-1], np.int64)


def _row_sums(kind: int, hashes: Hashes, parents: Hashes, tokens: Int32Array) -> Hashes:
    """Return each block's part of the checksum: all its properties, well mixed."""
    weights = _mixed(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64))
    content: Hashes = (tokens.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    mixed = _mixed(hashes ^ np.uint64(kind))
    parts: Hashes = mixed + _mixed(parents) * np.uint64(3) + content
    return _mixed(parts)


def _mixed(values: Hashes) -> Hashes:
    """Return 64 bits for each value; each bit depends on all bits of the value."""
    for shift, factor in _MIXING:
        values = np.multiply(np.bitwise_xor(values, np.right_shift(values, shift)), factor)
    mixed: Hashes = values ^ (values >> np.uint64(32))
    return mixed


def _chains(above: RowArray, kinds: NDArray[np.int32]) -> tuple[RowArray, RowArray]:
    """Return an order of blocks in which chains are together, and the ends of chains.

    `above` is the place of each block's parent, or -1. A block continues its parent's chain if it
    has the same kind and is the first child. Shapes `(n,)`; O(n log n).
    """
    count = len(above)
    depth = (above != _NO_ROW).astype(np.int64)
    jump = above.copy()
    # Every round doubles the length of a jump. A circle of hashes would never end.
    for _ in range(count.bit_length()):
        linked = np.flatnonzero(jump != _NO_ROW)
        if not len(linked):
            break
        depth[linked] += depth[jump[linked]]
        jump[linked] = jump[jump[linked]]
    children = np.flatnonzero(above != _NO_ROW)
    children = children[kinds[children] == kinds[above[children]]]
    _, first = np.unique(above[children], return_index=True)
    head = np.arange(count)
    head[children[first]] = above[children[first]]
    for _ in range(count.bit_length()):
        head = head[head]
    order = np.lexsort((depth, head, depth[head]))
    breaks = np.flatnonzero(np.diff(head[order])) + 1
    return order, np.append(breaks, count)


class CacheMirror:
    """The present state of one cache. One user, one thread."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, int, int], Shelf] = {}
        self.num_unknown_removals = 0
        """Removals of blocks that were not there."""

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))

    @property
    def checksum(self) -> int:
        """64 bits that are equal if two mirrors have equal contents, whatever their history."""
        return sum(shelf.checksum for shelf in self._shelves.values()) & (2**64 - 1)

    def num_blocks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (medium, _, _), shelf in self._shelves.items():
            found[medium] = found.get(medium, 0) + len(shelf)
        return {medium: count for medium, count in found.items() if count}

    def contains(self, block_hash: int, medium: str, group_idx: int = 0) -> bool:
        block_hash = as_int("block_hash", block_hash, at_most=2**64 - 1)
        medium, group_idx = as_text("medium", medium), as_int("group_idx", group_idx)
        return any(block_hash in shelf.rows for shelf in self._of(medium, group_idx))

    def is_cached(self, block_hash: int, group_idx: int = 0) -> bool:
        """Return whether any medium has a block."""
        block_hash = as_int("block_hash", block_hash, at_most=2**64 - 1)
        group_idx = as_int("group_idx", group_idx)
        return any(
            block_hash in shelf.rows
            for (_, group, _), shelf in self._shelves.items()
            if group == group_idx
        )

    def apply(self, events: Sequence[WireEvent]) -> None:
        """Apply events, in order."""
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
        """Return events with the whole state: a clear first, and parents before children, whatever
        their media."""
        media = ("GPU", "CPU", "STORAGE")
        rank = {medium: place for place, medium in enumerate(media)}
        found: list[WireEvent] = [ClearedEvent()]
        for group in sorted({group for _, group, _ in self._shelves}):
            keys = [key for key in self._shelves if key[1] == group]
            keys.sort(key=lambda key: (rank.get(key[0], len(media)), key))
            events = [event for key in keys for event in self._shelves[key].state()]
            found += events if len(keys) < 2 else _parents_first(events)
        return found

    def _put(self, events: list[StoredEvent]) -> None:
        """Add the blocks of events of one kind."""
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


def _parents_first(events: list[StoredEvent]) -> list[StoredEvent]:
    """Return the events of one group, with those later whose parent is in a later medium."""
    heads = {event.parent_block_hash for event in events}
    ends = [heads.intersection(event.block_hashes.tolist()) for event in events]
    ahead = set().union(*ends)
    found: list[StoredEvent] = []
    waiting = list(zip(events, ends, strict=True))
    while waiting:
        late = []
        for event, parents in waiting:
            if event.parent_block_hash in ahead:
                late.append((event, parents))
            else:
                found.append(event)
                ahead -= parents
        if len(late) == len(waiting):  # a circle of hashes
            return found + [event for event, _ in late]
        waiting = late
    return found


def _kind_of(event: WireEvent) -> BlockKind | None:
    """Return the common part of stored events that can be merged."""
    return BlockKind.of(event) if isinstance(event, StoredEvent) else None
