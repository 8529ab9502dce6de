"""The pool: who holds which block, which block is handed out next, and what is evicted for it.

Stands between the managers, which keep the requests' tables, and the content index, which knows
what blocks hold. Blocks are ids; `block(id)` gives a view of one. Refuses to hand out a block that
anybody holds, copies or may still write to, and to give back more references than were taken.

    free ──get_new_blocks──▶ owned ──cache──▶ hittable ──seal──▶ sealed
      ▲                        │                 └───withdraw──▶ owned
      └──────free_blocks───────┘      a cached block nobody holds waits in the eviction policy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from kvcache.arguments import (
    MAX_INT,
    MAX_INT32,
    as_bool,
    as_bytes,
    as_int,
    as_integers,
    check_kind,
    check_methods,
)
from kvcache.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.blocks.block import KVCacheBlock
from kvcache.blocks.contents import NO_TABLE, ContentIndex
from kvcache.blocks.outbox import EventLog, Outbox
from kvcache.blocks.references import NULL_ID, ReferencedBlocks
from kvcache.blocks.run import CachedRun, StepLedger
from kvcache.core import CacheEvent, NullEventSink, NullOffloadHooks, OffloadHooks
from kvcache.errors import BlockError, ConfigurationError, OutOfBlocksError
from kvcache.hashing import BlockHash
from kvcache.policies import (
    EVICTION_POLICIES,
    EntryInfo,
    PolicyFactory,
    make_eviction_policy,
)
from kvcache.policies.entry_queue import Entries
from kvcache.request import Namespace
from kvcache.request_content import DEFAULT_NAMESPACE
from kvcache.tenants import TenantAccount, TenantLedger, TenantPolicy
from kvcache.tenants.ledger import required

_TIER_HOOKS = ("on_eviction_candidates", "on_sealed")


class BlockPool(ReferencedBlocks):
    """Blocks `1..num_blocks - 1`, and block 0, the null block, which is nobody's."""

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        ordered_groups: frozenset[int] = frozenset({0}),
        eviction_policy: str = "lru",
        policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
        outbox: Outbox | None = None,
        offload: OffloadHooks | None = None,
        zero_new_blocks: bool = False,
        enable_kv_cache_events: bool = False,
        tenants: TenantLedger | None = None,
    ) -> None:
        """Make a pool of free blocks.

        `ordered_groups` are those in which only blocks without a cached child are evicted: the
        full-attention ones. `eviction_policy` is one of `policies` by name. With
        `enable_kv_cache_events` and no `outbox` of its own, events are kept for `take_events`.
        `tenants` say who may take what.

        Raises:
            ConfigurationError: fewer than one block, or an unknown policy.
        """
        num_blocks = as_int("num_blocks", num_blocks, 0, MAX_INT32, ConfigurationError)
        enable_caching = as_bool("enable_caching", enable_caching, ConfigurationError)
        zero_new_blocks = as_bool("zero_new_blocks", zero_new_blocks, ConfigurationError)
        keeps_events = as_bool("enable_kv_cache_events", enable_kv_cache_events, ConfigurationError)
        groups = as_integers("ordered_groups", ordered_groups, error=ConfigurationError)
        ordered_groups = frozenset(groups.tolist())
        check_kind("policies", policies, Mapping, ConfigurationError)
        check_kind("outbox", outbox, (Outbox, type(None)), ConfigurationError)
        check_kind("tenants", tenants, (TenantLedger, type(None)), ConfigurationError)
        if offload is not None:
            check_methods("offload", offload, _TIER_HOOKS, ConfigurationError)
        if num_blocks < 1:
            raise ConfigurationError(
                f"a pool of {num_blocks} blocks has no room for the null block: use at least 1"
            )
        log = EventLog()
        outbox = outbox or Outbox(
            log if keeps_events else NullEventSink(),
            "device",
            none_hash=BlockHash(b""),
            published_groups=ordered_groups,
            has_workers=False,
        )
        contents = ContentIndex(num_blocks, ordered_groups, outbox)
        make = partial(make_eviction_policy, eviction_policy, num_blocks, self, policies)
        policy = (
            make()
            if tenants is None
            else TenantPolicy(num_blocks, self, tenants, make, counts_unheld=True)
        )
        super().__init__(num_blocks, contents, policy, tenants)
        self.enable_caching = enable_caching
        self.num_evictions = 0
        self.none_hash = outbox.none_hash
        self.ledger = StepLedger()
        self._event_log = log
        self._outbox = outbox
        self._offload = None if type(offload) is NullOffloadHooks else offload
        self._zero_new_blocks = zero_new_blocks

    # --- what there is -------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Return how many blocks `get_new_blocks` could hand out now, cached ones included."""
        return self._blank.num_free_blocks + len(self._policy)

    def num_empty_blocks(self) -> int:
        """Return how many blocks are free and hold nothing."""
        return self._blank.num_free_blocks

    def get_usage(self) -> float:
        """Return the share of blocks that cannot be handed out, 0.0 to 1.0."""
        total = self.num_total_blocks
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def block(self, block_id: int) -> KVCacheBlock:
        """Return a view of a block; raises BlockError if there is no such block."""
        return KVCacheBlock(self, self._one_known(block_id))

    def get_all_free_blocks(self) -> list[int]:
        """Return what can be handed out in order: empty blocks, then victims. O(n), for audits."""
        return self._blank.get_all_free_blocks() + self._policy.order()

    def tenant_numbers(self, entries: IndexArray) -> Int32Array:
        """Return whose blocks these are. There are tenants."""
        numbers: Int32Array = required(self.tenants).owners[entries]
        return numbers

    def blocks_of(self, entry: int) -> IndexArray:
        """Return the block that an entry of the policy stands for: its own id. For looking."""
        return index_array([entry])

    def describe(self, entry: int) -> EntryInfo:
        """Say what the eviction policy may know of a block."""
        contents = self.contents
        table, digest = contents.table_of(entry), contents.digests[entry]
        if table is None or digest is None:
            return EntryInfo()
        # A copy may go before its children: another block holds what they continue.
        has_copies = digest in table.copies
        return EntryInfo(
            parent=int(contents.parent_blocks[entry]) or None,
            content=digest + table.group.to_bytes(4, "big"),
            num_children=0 if has_copies else int(contents.num_children[entry]),
        )

    # --- taking and giving back ----------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks, each with one request reference; empty ones first, then by eviction.

        Raises:
            BlockError: that is no number of blocks.
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        count = as_int("num_blocks", num_blocks, error=BlockError)
        block_ids: list[int] = self.take(count).tolist()
        return block_ids

    def take(self, num_blocks: int) -> IndexArray:
        """Do `get_new_blocks`; return the blocks as an array."""
        num_blank, num_free = self._blank.num_free_blocks, self.get_num_free_blocks()
        if not 0 <= num_blocks <= num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks are wanted, {num_free} of {self.num_total_blocks} are free: "
                "free requests or raise num_blocks"
            )
        if self.tenants is not None and (num_own := self.tenants.demand(num_blocks)):
            self._blank.prepend_many(self._evict(num_own))
            num_blank = self._blank.num_free_blocks
        taken = self._blank.pop_many(min(num_blocks, num_blank))
        if num_blocks > num_blank:
            taken = np.concatenate((taken, self._evict(num_blocks - num_blank)))
        self._num_references[taken] = 1
        if self.tenants is not None:
            self.tenants.took(taken, self.tenants.served)
        if self._zero_new_blocks:
            self._outbox.zero(taken.tolist())
        return taken

    def get_new_blocks_for(self, accounts: Sequence[TenantAccount]) -> list[int]:
        """Do `get_new_blocks` for several tenants: a block for each of `accounts`, in that order.

        All blocks of a tenant are taken together, in the order in which tenants come first.
        """
        taken = [NULL_ID] * len(accounts)
        for account in dict.fromkeys(accounts):
            places = [place for place, each in enumerate(accounts) if each is account]
            required(self.tenants).serve(account)
            for place, block_id in zip(places, self.get_new_blocks(len(places)), strict=True):
                taken[place] = block_id
        return taken

    def has_room(self, num_blocks: int, num_spare_blocks: int = 0) -> bool:
        """Say whether so many blocks can be had by whoever is served, and others stay free."""
        num_free = self.get_num_free_blocks() - num_spare_blocks
        if self.tenants is None:
            return num_blocks <= num_free
        return self.tenants.has_room_for_served(num_blocks, num_free)

    def get_cached_block(
        self,
        block_hash: BlockHash,
        group_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> list[int] | None:
        """Return the block that holds a digest in each group, or None if one of them has none.

        Raises BlockError for what is no digest, no group or no namespace.
        """
        as_bytes("block_hash", block_hash, BlockError)
        check_kind("namespace", namespace, Namespace, BlockError)
        block_ids = []
        for group in as_integers("group_ids", group_ids, error=BlockError).tolist():
            block_id = self.contents.finder(namespace, group)(block_hash)
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    @property
    def tells_tokens(self) -> bool:
        """Whether runs must carry their tokens, because labels or events tell them."""
        return self._outbox.tells_tokens

    def cache_full_blocks(self, run: CachedRun) -> None:
        """Make the blocks of `run` hittable. They are held, and hold nothing yet.

        In an ordered group the digest before the first block is cached or is the none hash: the
        managers see to it.

        Raises:
            BlockError: a block is free, the null block, quarantined, or has a digest; nothing was
                changed.
        """
        check_kind("run", run, CachedRun, BlockError)
        ids = self.known(run.block_ids)
        can_be_cached = self._num_references[ids] > 0
        can_be_cached &= self.contents.table_numbers[ids] == NO_TABLE
        if self._quarantined:
            can_be_cached[self.find_quarantined(ids)] = False
        if np.count_nonzero(can_be_cached) < len(ids):
            raise BlockError(
                f"blocks {ids[~can_be_cached][:5].tolist()} cannot be cached: only a held block "
                "without a digest can"
            )
        self.cache_runs([run])

    def cache_runs(self, runs: Sequence[CachedRun]) -> None:
        """Do `cache_full_blocks` for runs of the open step, or of none, on the caller's word.

        For managers, who have looked: their tables hold the blocks, each in one place, and these
        hold nothing yet and are not quarantined. `check` says whether that was so.
        """
        if not runs:
            return
        ids = runs[0].ids
        if ids is None or len(runs) > 1:
            ids = index_array(list(chain.from_iterable([run.block_ids for run in runs])))
        self.contents.add(runs, ids)
        if runs[0].client_id:
            self.ledger.add(runs)
        elif self._offload is not None:
            for run in runs:
                self._offload.on_sealed(run.table.group, int32_array(run.block_ids))

    # --- contents ------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> list[int]:
        """Forget the contents of these blocks and of their cached descendants; return all of them.

        Blocks in use stay with their holders, and cannot be found any more.

        Raises:
            BlockError: unknown block; nothing was changed.
        """
        wanted = self.known(as_integers("block_ids", block_ids, -MAX_INT, error=BlockError))
        forgotten = self.contents.forget(wanted.tolist())
        self._release_forgotten(forgotten)
        return forgotten

    def adopt(self, runs: Sequence[CachedRun], victims: IndexArray) -> None:
        """Enter contents that workers hold already, into free empty blocks; all are evictable.

        A run comes behind the one it continues. `victims` are the blocks of all runs, the first one
        to be evicted first.
        """
        self._blank.remove_n(victims.tolist())
        by_table: dict[int, list[CachedRun]] = {}
        for run in runs:
            by_table.setdefault(run.table.number, []).append(run)
        for same in by_table.values():
            block_ids = list(chain.from_iterable([run.block_ids for run in same]))
            self.contents.add(same, index_array(block_ids), is_labelled=True)
            if self.tenants is not None:
                account = self.tenants.account(same[0].table.namespace)
                self.tenants.took(index_array(block_ids), account)
        self._policy.insert(victims)

    def seal(self, runs: Sequence[CachedRun]) -> None:
        """The bytes of what is left of unsealed runs are there."""
        sealed_runs = self.contents.seal(runs)
        if self._offload is not None:
            for run, places in sealed_runs:
                sealed = int32_array([run.block_ids[place] for place in places])
                self._offload.on_sealed(run.table.group, sealed)

    def withdraw(self, run: CachedRun) -> bool:
        """Forget what is left of an unsealed run; return whether anything was."""
        unsealed = self.contents.unsealed
        live = [b for b in run.block_ids if unsealed.get(b) is run]
        # Children were cached in later steps, which are withdrawn first: mostly nothing is kept.
        forgotten, needed = self.contents.evict(live[::-1])
        self._release_forgotten(forgotten.tolist())
        if needed:
            self._release_forgotten(self.contents.forget(needed))
        return bool(live)

    def forget_copies(self, block_ids: Sequence[int]) -> None:
        """Forget contents that other blocks have as well; nothing that can be found is lost."""
        forgotten, _ = self.contents.evict(block_ids)
        self._release_forgotten(forgotten.tolist())

    def reset_prefix_cache(self) -> bool:
        """Forget every content; return False, unchanged, while any block is in use."""
        if self.num_blocks_in_use():
            return False
        order = self._policy.order()
        self._policy.discard(order)
        self.contents.clear()
        self.ledger.clear()
        if self.tenants is not None:
            self.tenants.clear()
        self._blank.append_n(order)
        return True

    def take_events(self) -> list[CacheEvent]:
        """Return events since the last call; empty unless they are enabled and kept here."""
        return self._event_log.take()

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Somebody may still write to these blocks: forget them, and hand them out to nobody.

        Who holds one keeps it. Raises BlockError, unchanged, for an unknown or the null block.
        """
        block_ids = self.known(block_ids).tolist()
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
        block_ids = self.known(block_ids).tolist()
        bad = [b for b in block_ids if b not in self._quarantined]
        if bad:
            raise BlockError(f"blocks {bad[:5]} are not quarantined: nothing to release")
        self._quarantined.difference_update(block_ids)
        self._blank.prepend_n([b for b in dict.fromkeys(block_ids) if not self._num_references[b]])

    # --- inside --------------------------------------------------------------------------------

    def _evict(self, num_blocks: int) -> IndexArray:
        """Take blocks from the policy, forgetting what they hold. There are enough."""
        evicted: list[IndexArray] = []
        kept: list[int] = []
        missing = num_blocks
        has_progress = False
        while missing:
            victims = self._policy.choose(missing)
            if not len(victims):
                if not (kept and has_progress):
                    break
                # A policy may put parents before their children: those whose children have gone
                # meanwhile can go now.
                self._policy.put_back(kept)
                kept, has_progress = [], False
                continue
            self._offer(victims)
            forgotten, needed = self.contents.evict(victims)
            self._note_evicted(forgotten)
            evicted.append(forgotten)
            missing -= len(forgotten)
            kept += needed
            has_progress |= len(forgotten) > 0
        self._policy.put_back(kept[missing:])
        if missing:
            # Only blocks with cached children are left, and the children are held: by copies that
            # outlived their requests. Their contents go too, the copies themselves are safe.
            taken = dict.fromkeys(kept[:missing])
            forgotten_blocks = self.contents.forget(taken)
            self._release_forgotten([b for b in forgotten_blocks if b not in taken])
            evicted.append(index_array(list(taken)))
            self._note_evicted(evicted[-1])
        self.num_evictions += num_blocks
        return np.concatenate(evicted)

    def _note_evicted(self, block_ids: IndexArray) -> None:
        if self.tenants is not None:
            self.tenants.evicted(block_ids)
            self.tenants.freed(block_ids)

    def _offer(self, block_ids: Entries) -> None:
        """Tell the tiers below which sealed blocks are about to go."""
        if self._offload is None:
            return
        by_group: dict[int, list[int]] = {}
        for block_id in index_array(block_ids).tolist():
            table = self.contents.table_of(block_id)
            if table is not None and block_id not in self.contents.unsealed:
                by_group.setdefault(table.group, []).append(block_id)
        for group, ids in by_group.items():
            self._offload.on_eviction_candidates(group, int32_array(ids))

    def _release_forgotten(self, block_ids: Sequence[int]) -> None:
        """Move unheld blocks whose content has just been forgotten to the free queue."""
        unheld = [b for b in block_ids if not self._num_references[b]]
        if self.tenants is not None:
            self.tenants.freed(unheld)
        unheld = [b for b in unheld if b not in self._quarantined]
        if unheld:
            self._policy.discard(unheld)
            self._blank.prepend_n(unheld)
