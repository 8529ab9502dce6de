"""The physical blocks of a sequence allocator: references, contents, and computed bytes.

The lower half of the allocator, with a `BlockPool` of its own: the pool counts references, finds
contents and evicts; this class has the caller's ids, access times and which blocks are computed.
All sequences are equal and hold blocks by request references. Refuses unknown ids, and keeps no
tokens except those of cached blocks.

    caller's ids   10 11 12 13          physical ids   0 1 2 3          pool ids   1 2 3 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvcache.base.arguments import as_int, as_integers
from kvcache.base.arrays import index_array
from kvcache.base.errors import BlockError, ConfigurationError, InvariantError, shown
from kvcache.core import ReferenceKind
from kvcache.core.block_pool import BlockPool
from kvcache.policies import EVICTION_POLICIES, EntryTable, EvictionPolicy
from kvcache.policies.entry_queue import Entries
from kvcache.requests.hashing import BlockHash, RequestBlockHasher
from kvcache.sequences.block import PrefixCachingBlock

NEVER_ACCESSED = -1.0
"""Access time of a block that was not accessed since it came into use."""


class BlockTracker:
    """Whether a block is in use, when it was accessed last, and whether its bytes are there.

    `last_accessed` is in the caller's unit of time; it and `computed` are meaningful only while
    `active`.
    """

    __slots__ = ("active", "computed", "last_accessed")

    def __init__(self) -> None:
        """Track a block that is not in use."""
        self.active = False
        self.last_accessed = NEVER_ACCESSED
        self.computed = False

    def reset(self) -> None:
        """Clear access and bytes; `active` stays."""
        self.last_accessed = NEVER_ACCESSED
        self.computed = False

    def enable(self) -> None:
        """Take the block into use; raises BlockError, unchanged, if it is in use."""
        if self.active:
            raise BlockError("a block that is in use is tracked already: disable it first")
        self.active = True
        self.reset()

    def disable(self) -> None:
        """Take the block out of use; raises BlockError, unchanged, if it is not in use."""
        if not self.active:
            raise BlockError("a block that is not in use is not tracked: enable it first")
        self.active = False
        self.reset()


_SPARE_STALE = 64


class _Place(NamedTuple):
    """An entry's place: the smallest goes first. `path` numbers the freeing of a sequence, `height`
    counts down along it."""

    last_accessed: float
    path: int
    height: int


class LastAccessOrder:
    """An `EvictionPolicy` ordered by access times. O(log n) per entry.

    `heap` may have stale places: an entry's valid place is the one in `_places`.
    """

    def __init__(self, capacity: int, table: EntryTable) -> None:
        """Make an empty order of entries below `capacity`, described by `table`."""
        self._table = table
        self._times = [NEVER_ACCESSED] * capacity
        self._places: dict[int, _Place] = {}
        self._chosen: dict[int, _Place] = {}
        self._heap: list[tuple[_Place, int]] = []
        self._last_path = 0
        self._last_entry: int | None = None

    @property
    def reads_contents(self) -> bool:
        """Does nothing: accesses are stated by entry."""
        return False

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: object) -> bool:
        return entry in self._places

    def note_access(self, entry: int, time: float) -> None:
        """Record when `entry` was accessed; takes effect when it is next inserted."""
        self._times[entry] = time

    def insert(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            parent = self._table.describe(entry).parent
            before = None if parent is None else self._places.get(parent)
            if before is not None and parent == self._last_entry:
                path, height = before.path, before.height - 1
            else:
                self._last_path += 1
                path, height = self._last_path, 0
            self._put(entry, _Place(self._times[entry], path, height))
            self._last_entry = entry

    def remove(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            del self._places[entry]
        self._drop_stale()

    def discard(self, entries: Entries) -> None:
        self.remove(entries)

    def choose(self, num_entries: int) -> Entries:
        chosen: list[int] = []
        while len(chosen) < num_entries and self._places:
            place, entry = heappop(self._heap)
            if self._places.get(entry) == place:
                self._chosen[entry] = self._places.pop(entry)
                chosen.append(entry)
        return chosen

    def put_back(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            self._put(entry, self._chosen[entry])
        self._chosen.clear()

    def order(self) -> list[int]:
        return sorted(self._places, key=lambda entry: self._places[entry])

    def _put(self, entry: int, place: _Place) -> None:
        self._places[entry] = place
        heappush(self._heap, (place, entry))

    def _drop_stale(self) -> None:
        """Rebuild the heap when most of its places are stale."""
        if len(self._heap) > 2 * len(self._places) + _SPARE_STALE:
            live: Sequence[tuple[_Place, int]] = [
                (place, entry) for entry, place in self._places.items()
            ]
            self._heap = list(live)
            heapify(self._heap)


GROUP = 0
"""The one KV cache group: every token of a sequence reads all tokens before it."""


class HeldBlocks:
    """References, contents and computed bytes, by the caller's block ids.

    Invariants: a tracker is active exactly when its block is held. `_uncomputed` has every full
    block, held or cached, whose bytes were not reported. `_twins` are held blocks whose content
    another block has; a pin keeps that one, which look-ups find, for as long.
    """

    def __init__(
        self, block_ids: Sequence[int], hasher: RequestBlockHasher, eviction_policy: str
    ) -> None:
        """Start with all blocks free; they are handed out in the order of `block_ids` at first."""
        num_blocks = len(block_ids)
        self.hasher = hasher
        self._ids = [-1, *block_ids]
        self._pool_ids = {
            block_id: pool_id for pool_id, block_id in enumerate(self._ids) if pool_id
        }
        self._physical = {block_id: i for i, block_id in enumerate(sorted(block_ids))}
        self._trackers = [BlockTracker() for _ in self._ids]
        self._uncomputed: set[int] = set()
        self._twins: dict[int, int] = {}
        self._access_order: LastAccessOrder | None = None
        self._pool = BlockPool(
            num_blocks + 1,
            eviction_policy=eviction_policy,
            policies={**EVICTION_POLICIES, "lru": self._make_access_order},
        )

    @property
    def pool(self) -> BlockPool:
        """The pool, read-only."""
        return self._pool

    @property
    def block_ids(self) -> frozenset[int]:
        return frozenset(self._pool_ids)

    @property
    def num_duplicate_blocks(self) -> int:
        """Held blocks whose content is cached in another block."""
        return len(self._twins)

    def physical_id(self, block_id: int) -> int:
        """Return the place of an id among all ids in ascending order, from 0."""
        self._pool_id(block_id)
        return self._physical[block_id]

    def num_references(self, block_id: int) -> int:
        """Return how many sequences hold a block."""
        return self._pool.num_references(self._pool_id(block_id), ReferenceKind.REQUEST)

    def is_cached(self, block_id: int) -> bool:
        """Return whether a block can be found by its content."""
        return self._pool_id(block_id) in self._pool.names

    def find(self, digest: BlockHash) -> int | None:
        """Return the block with a content; None if there is none."""
        found = self._pool.get_cached_block(digest, [GROUP])
        return None if found is None else self._ids[found[0]]

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """Return how many of these distinct blocks have no reference: sharing them uses up free
        blocks."""
        return self._pool.num_unheld([self._pool_id(block_id) for block_id in block_ids])

    # --- references ----------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[int]:
        """Hand out blocks; raises OutOfBlocksError, unchanged, if fewer are free."""
        taken = self._pool.get_new_blocks(num_blocks)
        for pool_id in taken:
            self._uncomputed.discard(pool_id)
            self._trackers[pool_id].enable()
        return [self._ids[pool_id] for pool_id in taken]

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, held or cached."""
        pool_ids = [self._pool_id(block_id) for block_id in block_ids]
        self._pool.touch(pool_ids)
        for pool_id in pool_ids:
            tracker = self._trackers[pool_id]
            if not tracker.active:
                tracker.enable()
                tracker.computed = pool_id not in self._uncomputed

    def give_back(self, block_id: int) -> bool:
        """Drop one reference; return whether it was the last one."""
        pool_id = self._pool_id(block_id)
        if self._pool.num_references(pool_id, ReferenceKind.REQUEST) != 1:
            self._pool.free_blocks([pool_id])
            return False
        tracker = self._trackers[pool_id]
        if self._access_order is not None:
            self._access_order.note_access(pool_id, tracker.last_accessed)
        self._pool.free_blocks([pool_id])
        if pool_id in self._twins:
            self._pool.free_blocks([self._twins.pop(pool_id)], ReferenceKind.PIN)
        tracker.disable()
        return True

    # --- contents ------------------------------------------------------------------------------

    def has_become_full(self, block_id: int) -> None:
        """Record that a later forward writes the block's last token."""
        pool_id = self._pool_id(block_id)
        self._trackers[pool_id].computed = False
        self._uncomputed.add(pool_id)

    def cache(self, block: PrefixCachingBlock, block_id: int, digest: BlockHash) -> None:
        """Make a full block, held as `block_id`, findable by its content.

        No effect if the block before it cannot be found, or if the block can be found already. If
        another block has that content, it is kept as long as this one is held.
        """
        pool_id, parent = self._pool_id(block_id), block.parent_hash
        if parent is None or pool_id in self._pool.names:
            return
        if (found := self._pool.get_cached_block(digest, [GROUP])) is not None:
            self._pool.touch(found, ReferenceKind.PIN)
            self._twins[pool_id] = found[0]
            return
        is_first = parent == self.hasher.none_hash
        self._pool.cache_block(pool_id, digest, None if is_first else parent)

    def reset(self) -> int:
        """Forget every content if no block is held; return how many are held (0: done)."""
        num_held = self._pool.num_blocks_in_use()
        if not num_held:
            self._pool.reset_prefix_cache()
            self._uncomputed.clear()
        return num_held

    # --- readiness and access ------------------------------------------------------------------

    def is_computed(self, block_id: int) -> bool:
        """Return whether the bytes of a held or cached block are computed."""
        pool_id = self._pool_id(block_id)
        tracker = self._trackers[pool_id]
        if tracker.active:
            return tracker.computed
        return pool_id in self._pool.names and pool_id not in self._uncomputed

    def mark_computed(self, block_ids: Sequence[int]) -> None:
        """Mark these blocks as computed; without any, all full blocks that are held."""
        pool_ids = self._in_use_or_cached(block_ids)
        if not pool_ids:
            pool_ids = [b for b in self._uncomputed if self._trackers[b].active]
        for pool_id in pool_ids:
            if self._trackers[pool_id].active:
                self._trackers[pool_id].computed = True
        self._uncomputed.difference_update(pool_ids)

    def mark_accessed(self, block_ids: Sequence[int], now: float) -> None:
        """Record that these blocks were accessed at `now`; re-sorts unheld ones for eviction."""
        unheld = []
        for pool_id in self._in_use_or_cached(block_ids):
            if self._trackers[pool_id].active:
                self._trackers[pool_id].last_accessed = now
            else:
                unheld.append(pool_id)
        for pool_id in dict.fromkeys(unheld):
            if self._access_order is not None:
                self._access_order.note_access(pool_id, now)
            # To a policy, an access is coming into use and out of it again.
            self._pool.touch([pool_id])
            self._pool.free_blocks([pool_id])

    def check(self, references: dict[int, int]) -> None:
        """Raise InvariantError unless blocks are held as often as `references` says. O(blocks)."""
        self._pool.check()
        for pool_id in range(1, self._pool.num_blocks):
            block_id, tracker = self._ids[pool_id], self._trackers[pool_id]
            held, wanted = self.num_references(block_id), references.get(block_id, 0)
            if held != wanted or tracker.active != bool(held):
                raise InvariantError(
                    f"block {block_id} has {held} references, is in {wanted} sequences, and "
                    f"is {'' if tracker.active else 'not '}tracked"
                )
            if tracker.computed and pool_id in self._uncomputed:
                raise InvariantError(f"block {block_id} is computed and waits to be")

    def _make_access_order(self, capacity: int, table: EntryTable) -> EvictionPolicy:
        self._access_order = LastAccessOrder(capacity, table)
        return self._access_order

    def _pool_id(self, block_id: int) -> int:
        pool_id = self._pool_ids.get(block_id)
        if pool_id is None:
            raise BlockError(
                f"block {shown(block_id)} is not one of this allocator's "
                f"{len(self._pool_ids)}: use the ids it hands out"
            )
        return pool_id

    def _in_use_or_cached(self, block_ids: Sequence[int]) -> list[int]:
        pool_ids = [self._pool_id(block_id) for block_id in block_ids]
        idle = [
            self._ids[b]
            for b in pool_ids
            if not self._trackers[b].active and b not in self._pool.names
        ]
        if idle:
            raise BlockError(f"blocks {idle[:5]} are free and hold nothing: leave them out")
        return pool_ids


def checked_block_ids(num_blocks: int, block_ids: Iterable[int] | None) -> list[int]:
    """Return the ids of an allocator's blocks, `0` to `num_blocks - 1` by default.

    Raises:
        ConfigurationError: not one per block, not distinct, or negative.
    """
    num_blocks = as_int("num_blocks", num_blocks, 1, error=ConfigurationError)
    if block_ids is None:
        return list(range(num_blocks))
    ids: list[int] = as_integers("block_ids", block_ids, error=ConfigurationError).tolist()
    if len(ids) != num_blocks or len(set(ids)) != num_blocks:
        raise ConfigurationError(
            f"{len(ids)} block ids, {len(set(ids))} of them distinct, for {num_blocks} blocks: "
            "name every block once"
        )
    return ids
