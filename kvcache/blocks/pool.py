"""The pool: who holds which block, which block is handed out next, and what is evicted for it.

Stands between the managers, which keep the requests' tables, and the content index, which knows
what blocks hold. Blocks are ids; `block(id)` gives a view of one. Refuses to hand out a block that
anybody holds, copies or may still write to, and to give back more references than were taken.

    free ──get_new_blocks──▶ owned ──cache──▶ hittable ──seal──▶ sealed
      ▲                        │                 └───withdraw──▶ owned
      └──────free_blocks───────┘      a cached block nobody holds waits in the eviction policy
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

from kvcache.arrays import int32_array
from kvcache.blocks.block import BlockState, KVCacheBlock
from kvcache.blocks.contents import ContentIndex
from kvcache.blocks.free_queue import FreeKVCacheBlockQueue
from kvcache.blocks.outbox import EventLog, Outbox
from kvcache.blocks.prefix_table import DEFAULT_NAMESPACE
from kvcache.blocks.run import CachedRun, StepLedger
from kvcache.core import CacheEvent, NullOffloadHooks, OffloadHooks, ReferenceKind
from kvcache.errors import BlockError, ConfigurationError, OutOfBlocksError
from kvcache.hashing import BlockHash
from kvcache.policies import EntryInfo, make_eviction_policy
from kvcache.request import Namespace

NULL_ID = 0

_T = TypeVar("_T")
KINDS_APART = (ReferenceKind.PIN, ReferenceKind.FORK, ReferenceKind.TRANSFER)


class BlockPool:
    """Blocks `1..num_blocks - 1`, and block 0, the null block, which is nobody's.

    Invariants: a block is in the free queue exactly when it has no reference, no content and no
    quarantine; in the policy exactly when it has no reference, a content and no quarantine.
    `_num_references` counts all kinds together, `_references[kind]` the rare kinds apart.
    """

    is_uniform = True

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        ordered_groups: frozenset[int] = frozenset({0}),
        eviction_policy: str = "lru",
        outbox: Outbox | None = None,
        offload: OffloadHooks | None = None,
        zero_new_blocks: bool = False,
    ) -> None:
        """Make a pool of free blocks.

        `ordered_groups` are those in which only blocks without a cached child are evicted: the
        full-attention ones. Without an `outbox` events are kept for `take_events`.

        Raises:
            ConfigurationError: fewer than one block, or an unknown policy.
        """
        if num_blocks < 1:
            raise ConfigurationError(
                f"a pool of {num_blocks} blocks has no room for the null block: use at least 1"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_evictions = 0
        self._event_log = EventLog()
        self._outbox = outbox or Outbox(
            self._event_log,
            "device",
            none_hash=BlockHash(b""),
            published_groups=ordered_groups,
            has_workers=False,
        )
        self.contents = ContentIndex(num_blocks, ordered_groups, self._outbox)
        self.ledger = StepLedger()
        self._offload = None if isinstance(offload, NullOffloadHooks) else offload
        self._zero_new_blocks = zero_new_blocks
        self._num_references = [0] * num_blocks
        self._references: dict[ReferenceKind, dict[int, int]] = {k: {} for k in KINDS_APART}
        self._quarantined: set[int] = set()
        self._blank = FreeKVCacheBlockQueue(num_blocks, range(1, num_blocks))
        self._policy = make_eviction_policy(eviction_policy, num_blocks, self)

    # --- what there is -------------------------------------------------------------------------

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be handed out at all: the null block is not one."""
        return self.num_blocks - 1

    def get_num_free_blocks(self) -> int:
        """Return how many blocks `get_new_blocks` could hand out now, cached ones included."""
        return self._blank.num_free_blocks + len(self._policy)

    def num_blocks_in_use(self) -> int:
        """Return how many blocks have a reference of any kind."""
        return self.num_total_blocks - self._num_references.count(0) + 1

    def get_usage(self) -> float:
        """Return the share of blocks that cannot be handed out, 0.0 to 1.0."""
        total = self.num_total_blocks
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def block(self, block_id: int) -> KVCacheBlock:
        """Return a view of a block; raises BlockError if there is no such block."""
        self._require_known([block_id])
        return KVCacheBlock(self, block_id)

    def state(self, block_id: int) -> BlockState:
        """Return what may be done with a block."""
        if block_id in self._quarantined:
            return BlockState.QUARANTINED
        if block_id in self._references[ReferenceKind.TRANSFER]:
            return BlockState.IN_FLIGHT
        if self.contents.digests[block_id] is not None:
            is_sealed = block_id not in self.contents.unsealed
            return BlockState.SEALED if is_sealed else BlockState.HITTABLE
        return BlockState.OWNED if self._num_references[block_id] else BlockState.FREE

    def digest(self, block_id: int) -> BlockHash | None:
        """Return the digest by which a block can be found, None if it cannot."""
        return self.contents.digests[block_id]

    def num_references(self, block_id: int, kind: ReferenceKind | None = None) -> int:
        """Return a block's references of one kind, or of all."""
        total = self._num_references[block_id]
        if kind is None:
            return total
        if kind is not ReferenceKind.REQUEST:
            return self._references[kind].get(block_id, 0)
        return total - sum(held.get(block_id, 0) for held in self._references.values())

    def total_references(self) -> int:
        """Return the references of all kinds to all blocks. O(n)."""
        return sum(self._num_references)

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """Return how many of these distinct blocks have no reference, null blocks left out."""
        return _each(self._num_references, block_ids).count(0) - block_ids.count(NULL_ID)

    def blocks_held(self, kind: ReferenceKind) -> dict[int, int]:
        """Return a copy of the counts of a kind other than REQUEST: block id to references."""
        return dict(self._references[kind])

    def quarantined_blocks(self) -> set[int]:
        """Return a copy of the quarantined ids."""
        return set(self._quarantined)

    def get_all_free_blocks(self) -> list[int]:
        """Return what can be handed out in order: empty blocks, then victims. O(n), for audits."""
        return self._blank.get_all_free_blocks() + self._policy.order()

    def describe(self, entry: int) -> EntryInfo:
        """Say what the eviction policy may know of a block."""
        table, parent = self.contents.tables[entry], self.contents.parents[entry]
        above = None if table is None or parent is None else table.ids.get(parent)
        return EntryInfo(parent=above, content=self.contents.digests[entry])

    # --- taking and giving back ----------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks, each with one request reference; empty ones first, then by eviction.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        num_blank, num_free = self._blank.num_free_blocks, self.get_num_free_blocks()
        if not 0 <= num_blocks <= num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks are wanted, {num_free} of {self.num_total_blocks} are free: "
                "free requests or raise num_blocks"
            )
        block_ids = self._blank.popleft_n(min(num_blocks, num_blank))
        if num_blocks > num_blank:
            block_ids += self._evict(num_blocks - num_blank)
        references = self._num_references
        for block_id in block_ids:
            references[block_id] = 1
        if self._zero_new_blocks:
            self._outbox.zero(block_ids)
        return block_ids

    def get_cached_block(
        self,
        block_hash: BlockHash,
        group_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> list[int] | None:
        """Return the block that holds a digest in each group, or None if one of them has none."""
        block_ids = []
        for group in group_ids:
            block_id = self.contents.finder(namespace, group)(block_hash)
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    def cache_full_blocks(self, run: CachedRun) -> None:
        """Make the blocks of `run` hittable. They are held, and hold nothing yet.

        In an ordered group the digest before the first block is cached or is the none hash: the
        managers see to it.

        Raises:
            BlockError: a block is free, the null block, or has a digest; nothing was changed.
        """
        self._require_known(run.block_ids)
        counts = _each(self._num_references, run.block_ids)
        digests = _each(self.contents.digests, run.block_ids)
        if 0 in counts or digests.count(None) != len(digests) or NULL_ID in run.block_ids:
            wrong = [
                b for b, n, d in zip(run.block_ids, counts, digests, strict=True) if not n or d
            ]
            raise BlockError(
                f"blocks {wrong[:5]} cannot be cached: only a held block without a digest can"
            )
        self.contents.add(run)
        if run.client_id:
            self.ledger.add(run)
        elif self._offload is not None:
            self._offload.on_sealed(run.table.group, int32_array(run.block_ids))

    def touch(
        self, block_ids: Sequence[int], kind: ReferenceKind = ReferenceKind.REQUEST
    ) -> None:
        """Take one reference more of each block, and save it from eviction.

        Raises:
            BlockError: unknown, the null block, quarantined, or free and empty; nothing changed.
        """
        self._require_known(block_ids)
        if self._quarantined and not self._quarantined.isdisjoint(block_ids):
            bad = sorted(self._quarantined.intersection(block_ids))
            raise BlockError(f"blocks {bad[:5]} are quarantined: release them first")
        references, digests = self._num_references, self.contents.digests
        free = [b for b in dict.fromkeys(block_ids) if not references[b]]
        if free:
            if NULL_ID in free:
                raise BlockError("the null block cannot be held: leave it out")
            empty = [b for b in free if digests[b] is None]
            if empty:
                raise BlockError(
                    f"blocks {empty[:5]} are free and hold nothing: take new ones instead"
                )
            self._policy.remove(free)
        for block_id in block_ids:
            references[block_id] += 1
        if kind is not ReferenceKind.REQUEST:
            held = self._references[kind]
            for block_id in block_ids:
                held[block_id] = held.get(block_id, 0) + 1

    def free_blocks(
        self, block_ids: Sequence[int], kind: ReferenceKind = ReferenceKind.REQUEST
    ) -> None:
        """Give one reference of each block back. Of those now unheld the first is evicted first.

        Cached ones go to the back of the eviction order, others to the front of the free queue.

        Raises:
            BlockError: unknown, or without a reference of this kind; nothing was changed.
        """
        if not block_ids:
            return
        self._require_known(block_ids)
        self._require_references(block_ids, kind)
        references = self._num_references
        if kind is not ReferenceKind.REQUEST:
            held = self._references[kind]
            for block_id in block_ids:
                held[block_id] -= 1
                if not held[block_id]:
                    del held[block_id]
        unheld: Sequence[int]
        if _each(references, block_ids).count(1) == len(block_ids):
            unheld = block_ids
            for block_id in block_ids:
                references[block_id] = 0
        else:
            unheld = []
            for block_id in block_ids:
                references[block_id] -= 1
                if not references[block_id]:
                    unheld.append(block_id)
        if unheld:
            self._put_free(unheld)

    # --- contents ------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the contents of these blocks and of their cached descendants.

        Blocks in use stay with their holders, and cannot be found any more.

        Raises:
            BlockError: unknown block; nothing was changed.
        """
        wanted = list(block_ids)
        self._require_known(wanted)
        self._release_forgotten(self.contents.forget(wanted))

    def seal(self, run: CachedRun) -> None:
        """The bytes of what is left of an unsealed run are there."""
        sealed = self.contents.seal(run)
        if sealed and self._offload is not None:
            self._offload.on_sealed(run.table.group, int32_array(sealed))

    def withdraw(self, run: CachedRun) -> bool:
        """Forget what is left of an unsealed run; return whether anything was."""
        unsealed = self.contents.unsealed
        live = [b for b in run.block_ids if unsealed.get(b) is run]
        # Children were cached in later steps, which are withdrawn first: mostly nothing is kept.
        forgotten, needed = self.contents.evict(reversed(live))
        self._release_forgotten(forgotten)
        if needed:
            self._release_forgotten(self.contents.forget(needed))
        return bool(live)

    def reset_prefix_cache(self) -> bool:
        """Forget every content; return False, unchanged, while any block is in use."""
        if self.num_blocks_in_use():
            return False
        order = self._policy.order()
        self._policy.discard(order)
        self.contents.clear()
        self.ledger.clear()
        self._blank.append_n(order)
        return True

    def take_events(self) -> list[CacheEvent]:
        """Return events since the last call; empty where an outbox with its own sink was given."""
        return self._event_log.take()

    # --- copies and their ends -----------------------------------------------------------------

    def begin_transfer(self, block_ids: Sequence[int]) -> None:
        """A copy starts to read or write these blocks: they stay until it has ended."""
        self.touch(block_ids, ReferenceKind.TRANSFER)

    def end_transfer(self, block_ids: Sequence[int]) -> None:
        """A copy has ended on every rank; raises BlockError, unchanged, if none was under way."""
        self.free_blocks(block_ids, ReferenceKind.TRANSFER)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Somebody may still write to these blocks: forget them, and hand them out to nobody.

        Who holds one keeps it. Raises BlockError, unchanged, for an unknown or the null block.
        """
        self._require_known(block_ids)
        if NULL_ID in block_ids:
            raise BlockError("the null block cannot be quarantined: leave it out")
        self.evict_blocks(block_ids)
        new = [b for b in dict.fromkeys(block_ids) if b not in self._quarantined]
        self._blank.remove_n([b for b in new if not self._num_references[b]])
        self._quarantined.update(new)

    def release_quarantine(self, block_ids: Sequence[int]) -> None:
        """Nobody writes to these blocks any more: they may be handed out when nobody holds them.

        Raises BlockError, unchanged, if one is not quarantined.
        """
        bad = [b for b in block_ids if b not in self._quarantined]
        if bad:
            raise BlockError(f"blocks {bad[:5]} are not quarantined: nothing to release")
        self._quarantined.difference_update(block_ids)
        self._blank.prepend_n([b for b in dict.fromkeys(block_ids) if not self._num_references[b]])

    # --- inside --------------------------------------------------------------------------------

    def _evict(self, num_blocks: int) -> list[int]:
        """Take blocks from the policy, forgetting what they hold. There are enough."""
        evicted: list[int] = []
        kept: list[int] = []
        while len(evicted) < num_blocks:
            victims = self._policy.choose(num_blocks - len(evicted)).entries
            if not victims:
                break
            self._offer(victims)
            forgotten, needed = self.contents.evict(victims)
            evicted += forgotten
            kept += needed
        if len(evicted) < num_blocks:
            # Only blocks with cached children are left, and the children are held: by copies that
            # outlived their requests. Their contents go too, the copies themselves are safe.
            missing = kept[: num_blocks - len(evicted)]
            del kept[: len(missing)]
            forgotten = self.contents.forget(missing)
            taken = set(missing)
            self._policy.put_back(kept)
            kept = []
            self._release_forgotten([b for b in forgotten if b not in taken])
            evicted += missing
        self._policy.put_back(kept)
        self.num_evictions += num_blocks
        return evicted

    def _offer(self, block_ids: Sequence[int]) -> None:
        """Tell the tiers below which sealed blocks are about to go."""
        if self._offload is None:
            return
        by_group: dict[int, list[int]] = {}
        for block_id in block_ids:
            table = self.contents.tables[block_id]
            if table is not None and block_id not in self.contents.unsealed:
                by_group.setdefault(table.group, []).append(block_id)
        for group, ids in by_group.items():
            self._offload.on_eviction_candidates(group, int32_array(ids))

    def _put_free(self, block_ids: Sequence[int]) -> None:
        """Queue blocks that have just lost their last reference."""
        if self._quarantined:
            block_ids = [b for b in block_ids if b not in self._quarantined]
        digests = self.contents.digests
        num_empty = _each(digests, block_ids).count(None)
        if not num_empty:
            self._policy.insert(block_ids)
        elif num_empty == len(block_ids):
            self._blank.prepend_n(block_ids)
        else:
            self._blank.prepend_n([b for b in block_ids if digests[b] is None])
            self._policy.insert([b for b in block_ids if digests[b] is not None])

    def _release_forgotten(self, block_ids: Sequence[int]) -> None:
        """Move unheld blocks whose content has just been forgotten to the free queue."""
        unheld = [b for b in block_ids if not self._num_references[b]]
        unheld = [b for b in unheld if b not in self._quarantined]
        if unheld:
            self._policy.discard(unheld)
            self._blank.prepend_n(unheld)

    def _require_known(self, block_ids: Sequence[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            bad = [b for b in block_ids if not 0 <= b < self.num_blocks]
            raise BlockError(
                f"blocks {bad[:5]} do not exist: ids are below {self.num_blocks}"
            )

    def _require_references(self, block_ids: Sequence[int], kind: ReferenceKind) -> None:
        """Raise BlockError unless each block has as many references of `kind` as it is given."""
        is_distinct = len(set(block_ids)) == len(block_ids)
        is_plain = kind is ReferenceKind.REQUEST and not any(self._references.values())
        if is_distinct and is_plain and 0 not in _each(self._num_references, block_ids):
            return
        wanted: dict[int, int] = {}
        for block_id in block_ids:
            wanted[block_id] = wanted.get(block_id, 0) + 1
        for block_id, count in wanted.items():
            held = self.num_references(block_id, kind)
            if held < count:
                raise BlockError(
                    f"block {block_id} is given back {count} times but has {held} "
                    f"{kind.value} references: free what you hold, once"
                )


def _each(values: list[_T], indices: Sequence[int]) -> tuple[_T, ...]:
    """Return `values[i]` for every index, at the speed of C."""
    if len(indices) > 1:
        return tuple(itemgetter(*indices)(values))
    return tuple(values[index] for index in indices)
