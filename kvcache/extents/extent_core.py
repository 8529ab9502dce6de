"""The fast core: tree, blocks and rows behind the `Core` protocol.

Stands under `KVCacheManager`, which owns requests, slots and statistics. A look-up walks the tree,
a reservation adopts, takes and publishes, steps seal or withdraw. Refuses to know tokens' meaning,
workers or time.

    look_up ─▶ Match        reserve ─▶ Reserver ──┬─▶ Evictor ─▶ policy
                            reserve_rows ─▶ RowServer    └─▶ Publisher ─▶ RunTree
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvcache.commands import Command
from kvcache.core import (
    CacheHit,
    CoreStatistics,
    EventSink,
    ForkOrigin,
    NullEventSink,
    NullOffloadHooks,
    OffloadHooks,
    Reservation,
    RowBatch,
    RowsReserved,
    TableChange,
)
from kvcache.errors import RequestError
from kvcache.extents.announcer import Announcer
from kvcache.extents.audit import check_core, dump_core
from kvcache.extents.block_store import SEALED, BlockStore
from kvcache.extents.digest_look_up import find_block
from kvcache.extents.duplicates import DuplicateMerger
from kvcache.extents.figures import block_bytes_of, shared_prefix_blocks, statistics_of
from kvcache.extents.forks import RowForks
from kvcache.extents.hits import HitFinder
from kvcache.extents.leaf_growth import LeafGrower
from kvcache.extents.look_up import LookUp
from kvcache.extents.parts import PoolHabits, make_parts
from kvcache.extents.pins import PinnedRuns
from kvcache.extents.publisher import Publisher
from kvcache.extents.rebuild import TreeRebuilder
from kvcache.extents.reserver import Reserver
from kvcache.extents.row_batch import RowServer
from kvcache.extents.rows import Row
from kvcache.extents.sealed import sealed_contents
from kvcache.extents.settlement import Settlement
from kvcache.extents.shape import TreeShape
from kvcache.extents.sweeper import Sweeper
from kvcache.extents.withdrawal import Withdrawal
from kvcache.hash_algorithms import HashFn
from kvcache.hashing import BlockHash
from kvcache.labels import LabelSet
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.request import Namespace, Request
from kvcache.sealed_contents import SealedContents
from kvcache.specs import KVCacheConfig, can_cache_prefixes, require_eagle_support
from kvcache.tenants import TenantLedger


class ExtentCore:
    """A `Core` that keeps runs of blocks in a tree and running requests in dense rows."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        none_hash: BlockHash,
        hash_fn: HashFn,
        enable_caching: bool = True,
        use_eagle: bool = False,
        policy_name: str = "lru",
        policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
        events: EventSink | None = None,
        offload: OffloadHooks | None = None,
        medium: str = "device",
        publish_all_groups: bool = False,
        zero_new_blocks: bool = False,
        has_workers: bool = True,
        slots: Mapping[str, int] | None = None,
        merge_duplicates: bool = False,
        tenants: TenantLedger | None = None,
    ) -> None:
        """Make the books of an empty pool.

        `none_hash` is the parent of every first block. Events of ordered groups are published, of
        all groups with `publish_all_groups` (or where no group is ordered). Without workers no
        commands are kept. Owner slots for labels are read from `slots`, a live view by request id.
        With `merge_duplicates` requests give up blocks whose content the tree has in sealed ones,
        when their steps are complete. `tenants` say who may take what.

        Raises:
            ConfigurationError: no block at all, an unknown policy, a kind that nobody serves.
        """
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if use_eagle:
            require_eagle_support(specs)
        shape = TreeShape.of(kv_cache_config, hash_fn.digest_bytes)
        self.hash_block_size = shape.unit_tokens
        self.can_hit = enable_caching and can_cache_prefixes(specs)
        announcer = Announcer(
            shape,
            events or NullEventSink(),
            medium,
            published_groups=shape.told_groups(tells_all=publish_all_groups),
            has_workers=has_workers,
            none_hash=none_hash,
            offload=None if type(offload) is NullOffloadHooks else offload,
            slots={} if slots is None else slots,
        )
        self.parts = parts = make_parts(
            BlockStore(kv_cache_config.num_blocks, has_single=bool(shape.others), tenants=tenants),
            announcer,
            hash_fn,
            none_hash,
            PoolHabits(policy_name, zero_new_blocks, policies, tenants),
        )
        self.shape, self.store, self.tree = shape, parts.store, parts.tree
        self.tables, self.ledger = parts.tables, parts.ledger
        self.evictor, self.announcer = parts.evictor, announcer
        self.look_ups = LookUp(parts, HitFinder(shape, use_eagle=use_eagle))
        self.pins = PinnedRuns(shape, self.store, self.tree)
        self.duplicates = DuplicateMerger(parts, self.pins, is_wanted=merge_duplicates)
        self.publisher = Publisher(parts, self.duplicates)
        self.forks = RowForks(parts, self.pins)
        self.reserver = Reserver(parts, self.look_ups, self.publisher, self.forks)
        grower = LeafGrower(parts, self.publisher)
        self.row_server = RowServer(parts, self.reserver, grower)
        self.withdrawal = Withdrawal(parts, self.pins)
        self.settlement = Settlement(parts, self.withdrawal, self.duplicates)
        self.sweeper = Sweeper(parts)
        self._block_bytes = block_bytes_of(kv_cache_config)
        self.reserver.can_publish = self.can_hit
        self.hits_stopped = False

    # --- steps ---------------------------------------------------------------------------------

    def open_step(self, client_id: str, step: int) -> None:
        """Begin step `step` of `client_id`; raises RequestError for a step before its latest."""
        self.ledger.open(client_id, step)
        self.look_ups.forget()

    def close_step(self) -> None:
        """End the open step, if any."""
        self.ledger.close()
        self.look_ups.forget()

    def complete_steps(self, client_id: str, through_step: int) -> None:
        """Seal what the client's steps up to `through_step` made hittable and still stands."""
        self.look_ups.forget()
        for row in self.settlement.complete(client_id, through_step):
            self.reserver.note_limits(row)
        self.duplicates.complete(client_id, through_step)

    def take_merges(self) -> list[tuple[str, TableChange]]:
        """Return the table changes of merged duplicates since the last call, by request."""
        return self.duplicates.take_changes()

    def fail_steps(self, client_id: str, from_step: int) -> None:
        """Withdraw what the client's steps from `from_step` on made hittable, last steps first.

        Requests that adopted such blocks keep them, without content.
        """
        self.look_ups.forget()
        self.duplicates.fail(client_id, from_step)
        for row in self.settlement.fail(client_id, from_step):
            self.reserver.note_limits(row)

    # --- a request's way -----------------------------------------------------------------------

    def look_up(self, request: Request) -> CacheHit:
        """Return the longest usable hit, at most `request.num_tokens - 1` tokens. No mutation."""
        if not self.can_hit or self.hits_stopped or request.skip_reading_prefix_cache:
            return self.look_ups.no_hit
        if request.mm_positions:
            self.sweeper.forget_numbers()
        match = self.look_ups.find(request)
        return self.look_ups.no_hit if match is None else match.hit

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        """Give the request blocks, all or nothing over all groups; see `Core.reserve`.

        Raises:
            RequestError: it would cache tokens it does not have or has no slots for, or adopts a
                hit although it has blocks; nothing was changed.
        """
        row = self.tables.by_id.get(request.request_id)
        self._require_possible(request, reservation, hit, row)
        if row is None:
            return self.reserver.admit(request, reservation, hit)
        return self.reserver.extend(row, request, reservation)

    def reserve_rows(self, rows: RowBatch) -> RowsReserved:
        """Do what `reserve` does for every running row of a step, in one call.

        Raises:
            RequestError: a row for which `reserve` would; nothing was changed.
        """
        return self.row_server.serve(rows)

    def commit(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks up to `num_tokens` hittable.

        Raises:
            RequestError: it has fewer tokens or blocks; nothing was changed.
        """
        row = self.tables.get(request.request_id)
        if row is None or not self.reserver.may_publish(row):
            return
        self._require_tokens(request, num_tokens)
        for group in self.shape.in_rows:
            columns = int(self.tables.num_columns[group.index, row.index])
            if columns < num_tokens // group.block_size:
                raise RequestError(
                    f"request {request.request_id} has {columns} blocks in group {group.index}, "
                    f"{num_tokens // group.block_size} cannot be cached: allocate them first"
                )
        self.look_ups.forget()
        row.request = request
        self.publisher.publish(row, num_tokens)
        self.reserver.note_limits(row)

    def fork(self, parent: Request, child: Request, origin: ForkOrigin) -> list[TableChange]:
        """Let `child`, which has no blocks, share those of `parent`; return its tables.

        Raises:
            RequestError: the parent has no blocks for so many tokens; nothing was changed.
        """
        row = self.tables.get(parent.request_id)
        self.forks.require_blocks(row, parent.request_id, origin.num_tokens)
        if self.tables.get(child.request_id) is not None:
            raise RequestError(
                f"request {child.request_id} has blocks already: fork into a request without any"
            )
        if row is None:
            raise RequestError(f"request {parent.request_id} has no blocks to share")
        self.look_ups.forget()
        shared = origin.num_tokens // self.shape.unit_tokens
        if int(self.tables.published[row.index]) > shared:
            self.withdrawal.shorten(row, shared)
        changes = self.forks.fork(row, child, origin)
        for each in (row, self.tables.by_id[child.request_id]):
            self.reserver.note_limits(each)
        return changes

    def free(self, request: Request) -> None:
        """Give all its blocks back, tail first. A request without blocks: no effect."""
        row = self.tables.get(request.request_id)
        if row is None:
            return
        self.look_ups.forget()
        self.reserver.give_back(row)
        self.forks.release_run(row)
        self.tables.close(row)
        self.duplicates.row_left(row)
        if row.has_images or not self.shape.ordered:
            self.sweeper.sweep()

    def forget_hashes(self, request: Request) -> None:
        """Make no further block of this running request hittable (used while draining)."""
        row = self.tables.get(request.request_id)
        if row is not None:
            row.is_mute = True
            self.reserver.note_limits(row)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return copies of the request's tables, one list per group; empty lists if unknown."""
        row = self.tables.get(request_id)
        if row is None:
            return tuple([] for _ in self.shape.groups)
        return tuple(self.parts.table_of(row, group.index).tolist() for group in self.shape.groups)

    def common_prefix_blocks(self, request_id: str, num_running_requests: int) -> list[int]:
        """Return, per group, how many leading blocks every running request shares."""
        row = self.tables.get(request_id)
        return [
            shared_prefix_blocks(self.parts, row, group, num_running_requests)
            if row is not None and group.is_ordered
            else 0
            for group in self.shape.groups
        ]

    # --- contents ------------------------------------------------------------------------------

    def sealed_contents(self) -> SealedContents:
        """Return what the label of every sealed block says. O(units)."""
        return sealed_contents(self.parts)

    def find_block(self, digest: BlockHash, namespace: Namespace, group: int) -> int | None:
        """Return the sealed block of a group that holds `digest`, None if none does. O(units).

        Raises:
            BlockError: there is no such group.
        """
        return find_block(self.parts, digest, namespace, group)

    def pin(self, hit: CacheHit) -> None:
        """Hold the blocks of `hit` by a pin reference; raises BlockError if one is gone."""
        if not hit.num_tokens:
            return
        match, request = self.look_ups.locate(hit)
        self.look_ups.forget()
        self.pins.pin(hit, self.reserver.hold(match, request))

    def unpin(self, hit: CacheHit) -> None:
        """Give a pin reference back; raises BlockError, unchanged, if one has none."""
        if hit.num_tokens:
            self.look_ups.forget()
            self.pins.unpin(hit)

    def evict(self, block_ids: Sequence[int]) -> None:
        """Forget the contents of these blocks and of their cached descendants.

        Raises:
            BlockError: one of them does not exist; nothing was changed.
        """
        self.look_ups.forget()
        self.withdrawal.evict(block_ids)
        for row in self.tables.by_id.values():
            self.reserver.note_limits(row)

    def reset(self) -> int:
        """Forget every content if no block is in use. Return how many are in use (0: done)."""
        in_use = self.store.num_blocks - 1 - self.store.num_free
        if in_use > 0:
            return in_use
        self.look_ups.forget()
        sealed = np.flatnonzero(self.store.seals == SEALED)
        self.announcer.forgotten(sealed)
        self.announcer.cleared()
        pins = self.pins.namespaces()
        self.store.clear()  # the policy still asks the tree what goes
        self.tree.clear()
        self.parts.tails.clear()
        self.ledger.clear()
        self.duplicates.clear()
        # Whoever is left has no block; he begins anew at the root.
        self.pins.begin_anew(pins)
        for row in self.tables.by_id.values():
            row.run = self.tree.root(row.request.namespace)
            self.tree.hold(row.run)
            self.tables.end_at(row.index, 0)
        self.parts.match_tokens.clear()
        self.hits_stopped = False
        self.reserver.can_publish = self.can_hit
        for row in self.tables.by_id.values():
            self.reserver.note_limits(row)
        return 0

    def stop_hits(self) -> None:
        """From now on nothing hits and nothing becomes hittable, until a `reset` succeeds."""
        self.hits_stopped = True
        self.reserver.can_publish = False
        for row in self.tables.by_id.values():
            self.reserver.note_limits(row)

    # --- figures -------------------------------------------------------------------------------

    def take_commands(self) -> list[Command]:
        """Return label, unlabel, zero and copy commands since the last call, in order."""
        self.look_ups.forget()
        commands = self.announcer.take_commands()
        self.forks.release_copied()
        return commands

    def num_free_blocks(self) -> int:
        """Return how many blocks could be taken now, cached ones included."""
        return self.store.num_free

    def usage(self) -> float:
        """Return the share of blocks that are in use, 0.0 to 1.0."""
        total = self.store.num_blocks - 1
        return 1.0 - self.store.num_free / total if total else 0.0

    def statistics(self) -> CoreStatistics:
        """Return figures, frozen. O(rows, pins)."""
        return statistics_of(
            self.parts,
            self.pins,
            self.forks,
            num_merged=self.duplicates.num_merged,
            block_bytes=self._block_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` with the failed sum if the books do not add up. O(blocks)."""
        check_core(self.parts, self.pins, self.forks)

    def dump_state(self) -> dict[str, object]:
        """Return the whole state in a canonical form made of plain values, for comparison."""
        state = dump_core(self.parts, self.pins, self.forks)
        return {**state, "hits_stopped": self.hits_stopped}

    def restore(self, labels: Sequence[LabelSet]) -> int:
        """Rebuild an empty core from the labels of all ranks; return how many blocks were kept.

        Raises:
            BlockError: something is held or cached here already; nothing was changed.
        """
        self.look_ups.forget()
        rebuilder = TreeRebuilder(self.parts)
        return rebuilder.rebuild(labels, can_hit=self.can_hit)

    # --- inside --------------------------------------------------------------------------------

    def _require_possible(
        self,
        request: Request,
        reservation: Reservation,
        hit: CacheHit | None,
        row: Row | None,
    ) -> None:
        if reservation.num_cached_tokens > reservation.num_slot_tokens:
            raise RequestError(
                f"request {request.request_id}: {reservation.num_cached_tokens} tokens to cache, "
                f"but slots for {reservation.num_slot_tokens}: reserve slots for all of them"
            )
        if (
            reservation.num_cached_tokens > request.num_tokens
            and self.reserver.can_publish
            and (row is None or not row.is_mute)
        ):
            self._require_tokens(request, reservation.num_cached_tokens)
        if hit is not None and row is not None:
            raise RequestError(
                f"request {request.request_id} has blocks already: only a request without blocks "
                "adopts a hit"
            )

    def _require_tokens(self, request: Request, num_tokens: int) -> None:
        for group in self.shape.groups:
            size = group.block_size
            if num_tokens // size > request.num_tokens // size:
                raise RequestError(
                    f"request {request.request_id} has {request.num_tokens} tokens, blocks up to "
                    f"token {num_tokens} cannot be full: append its tokens first"
                )
