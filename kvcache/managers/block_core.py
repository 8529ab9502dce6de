"""The reference core: block pool, managers and coordinator behind the `Core` protocol.

Stands under `KVCacheManager`, which owns requests, slots and statistics. A look-up asks the
coordinator; a reservation counts, adopts, allocates and caches; steps seal or withdraw what they
made hittable. Refuses to know tokens' meaning, workers or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcache.arrays import EMPTY_INT32, int32_array
from kvcache.blocks.audit import check_pool, dump_pool
from kvcache.blocks.outbox import Outbox
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.rebuild import rebuild
from kvcache.blocks.references import KINDS_APART
from kvcache.blocks.run import NO_STEP
from kvcache.blocks.sealed import sealed_contents
from kvcache.commands import Command
from kvcache.core import (
    CacheHit,
    CoreStatistics,
    EventSink,
    ForkOrigin,
    NullEventSink,
    OffloadHooks,
    ReferenceKind,
    Reservation,
    RowBatch,
    RowsReserved,
    TableChange,
)
from kvcache.errors import BlockError, RequestError
from kvcache.hashing import BlockHash
from kvcache.labels import LabelSet
from kvcache.managers.audit import check_tables, dump_tables
from kvcache.managers.block_tables import RowLimits
from kvcache.managers.coordinators import (
    KVCacheCoordinator,
    get_kv_cache_coordinator,
    ordered_groups,
)
from kvcache.managers.duplicates import DuplicateMerger
from kvcache.managers.forks import TableForks
from kvcache.managers.row_board import RowBoard
from kvcache.managers.row_server import RowServer
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.request import Namespace, Request
from kvcache.sealed_contents import SealedContents
from kvcache.specs import KVCacheConfig
from kvcache.tenants import TenantLedger


class BlockCore:
    """A `Core` that maps digests to blocks, one block at a time."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        none_hash: BlockHash,
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
        merge_duplicates: bool = False,
        tenants: TenantLedger | None = None,
    ) -> None:
        """Make the books of an empty pool.

        `none_hash` is the parent of every first block. Events of full-attention groups are
        published, of all groups with `publish_all_groups` (or where no group is full attention).
        Without workers no commands are kept. With `merge_duplicates` blocks whose content another
        sealed block has are given up when their steps are complete.

        Raises:
            ConfigurationError: no block at all, an unknown policy, a kind that nobody serves.
        """
        groups = range(len(kv_cache_config.kv_cache_groups))
        ordered = ordered_groups(kv_cache_config)
        published = ordered if ordered and not publish_all_groups else frozenset(groups)
        self._none_hash = none_hash
        self._outbox = Outbox(
            events or NullEventSink(),
            medium,
            none_hash=none_hash,
            published_groups=published,
            has_workers=has_workers,
        )
        self.pool = BlockPool(
            kv_cache_config.num_blocks,
            enable_caching=enable_caching,
            ordered_groups=ordered,
            eviction_policy=policy_name,
            policies=policies,
            tenants=tenants,
            outbox=self._outbox,
            offload=offload,
            zero_new_blocks=zero_new_blocks,
        )
        self.coordinator: KVCacheCoordinator = get_kv_cache_coordinator(
            kv_cache_config, self.pool, enable_caching=enable_caching, use_eagle=use_eagle
        )
        self._forks = TableForks(self.coordinator, self._outbox)
        self._merger = DuplicateMerger(self.coordinator)
        self._merges_duplicates = merge_duplicates
        self._block_bytes = max(
            (
                len(group.layer_names) * group.kv_cache_spec.page_size_bytes
                for group in kv_cache_config.kv_cache_groups
            ),
            default=0,
        )
        self._limits: dict[str, RowLimits] = {}
        self._board = RowBoard(self.coordinator.managers)
        self._row_server = RowServer(
            self.coordinator,
            self._board,
            reserve_one=self._reserve,
            may_cache=self._may_cache,
            forks=self._forks,
        )
        self._hashless: set[str] = set()
        self._hits_stopped = False

    @property
    def hash_block_size(self) -> int:
        """Tokens per digest that requests must come with."""
        return self.coordinator.hash_block_size

    @property
    def can_hit(self) -> bool:
        """Whether prefix caching is on: configured, and possible in every group."""
        return self.coordinator.can_hit

    def use_slots(self, slots: Mapping[str, int]) -> None:
        """Read owner slots for labels from `slots`, by request id, from now on; a live view."""
        self._outbox.slots = slots

    # --- steps ---------------------------------------------------------------------------------

    def open_step(self, client_id: str, step: int) -> None:
        """Begin step `step` of `client_id`; raises RequestError for a step before its latest."""
        self.pool.ledger.open(client_id, step)
        self.pool.contents.client_id = client_id
        self.pool.contents.step = step

    def close_step(self) -> None:
        """End the open step, if any."""
        self.pool.ledger.close()
        self.pool.contents.client_id = None
        self.pool.contents.step = NO_STEP

    def complete_steps(self, client_id: str, through_step: int) -> None:
        """Seal what the client's steps up to `through_step` made hittable and still stands."""
        runs = self.pool.ledger.take_through(client_id, through_step)
        self.pool.seal(runs)
        if self._merges_duplicates:
            self._merger.merge(runs)

    def take_merges(self) -> list[tuple[str, TableChange]]:
        """Return the table changes of merged duplicates since the last call, by request."""
        return self._merger.take_changes()

    def fail_steps(self, client_id: str, from_step: int) -> None:
        """Withdraw what the client's steps from `from_step` on made hittable, last steps first.

        Requests that adopted such blocks keep them, without content.
        """
        for run in self.pool.ledger.take_from(client_id, from_step):
            manager = self.coordinator.managers[run.table.group]
            for request_id in manager.take_back_run(run):
                self._forget_limits(request_id)
            self.pool.withdraw(run)

    # --- a request's way -----------------------------------------------------------------------

    def look_up(self, request: Request) -> CacheHit:
        """Return the longest usable hit, at most `request.num_tokens - 1` tokens. No mutation."""
        coordinator = self.coordinator
        if not coordinator.can_hit or self._hits_stopped or request.skip_reading_prefix_cache:
            return CacheHit((EMPTY_INT32,) * len(coordinator.managers), 0)
        return coordinator.longest_hit(
            request.block_hashes, request.num_tokens - 1, request.namespace
        )

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        """Give the request blocks, all or nothing over all groups; see `Core.reserve`.

        Raises:
            RequestError: it would cache tokens it does not have or has no slots for, or adopts a
                hit although it has blocks; nothing was changed.
        """
        self._require_possible(request, reservation, hit)
        return self._reserve(request, reservation, hit)

    def reserve_rows(self, rows: RowBatch) -> RowsReserved:
        """Do what `reserve` does for every running row of a step, in one call.

        Raises:
            RequestError: a row for which `reserve` would; nothing was changed.
        """
        return self._row_server.serve(rows)

    def commit(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks up to `num_tokens` hittable.

        Raises:
            RequestError: it has fewer tokens or blocks; nothing was changed.
        """
        if self._may_cache(request) and self.coordinator.has_blocks(request.request_id):
            self.coordinator.cache_blocks(request, num_tokens)
            self._forget_limits(request.request_id)

    def fork(self, parent: Request, child: Request, origin: ForkOrigin) -> list[TableChange]:
        """Let `child`, which has no blocks, share those of `parent`; return its tables.

        Raises:
            RequestError: the parent has no blocks for so many tokens; nothing was changed.
        """
        changes = self._forks.fork(parent.request_id, child.request_id, origin)
        self._forget_limits(parent.request_id)
        self._forget_limits(child.request_id)
        if parent.request_id in self._hashless:
            self._hashless.add(child.request_id)
        return changes

    def free(self, request: Request) -> None:
        """Give all its blocks back, tail first. A request without blocks: no effect."""
        self.coordinator.free(request.request_id)
        self._forks.forget(request.request_id)
        self._forget_limits(request.request_id)
        self._hashless.discard(request.request_id)

    def forget_hashes(self, request: Request) -> None:
        """Make no further block of this running request hittable (used while draining)."""
        self._hashless.add(request.request_id)
        self._forget_limits(request.request_id)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return copies of the request's tables, one list per group; empty lists if unknown."""
        return self.coordinator.get_blocks(request_id)

    def common_prefix_blocks(self, request_id: str, num_running_requests: int) -> list[int]:
        """Return, per group, how many leading blocks every running request shares."""
        return self.coordinator.get_num_common_prefix_blocks(request_id, num_running_requests)

    # --- contents ------------------------------------------------------------------------------

    def sealed_contents(self) -> SealedContents:
        """Return what the label of every sealed block says. O(blocks)."""
        return sealed_contents(self.pool.contents)

    def find_block(self, digest: BlockHash, namespace: Namespace, group: int) -> int | None:
        """Return a sealed block of a group that holds `digest`, None if none does. No mutation.

        Raises:
            BlockError: there is no such group.
        """
        num_groups = len(self.coordinator.managers)
        if not 0 <= group < num_groups:
            raise BlockError(f"KV cache group {group} does not exist: the plan has {num_groups}")
        return self.pool.contents.find_sealed(digest, namespace, group)

    def pin(self, hit: CacheHit) -> None:
        """Hold the blocks of `hit` by a pin reference; raises BlockError if one is gone."""
        self.pool.touch(self._tail_first(hit), ReferenceKind.PIN)

    def unpin(self, hit: CacheHit) -> None:
        """Give a pin reference back; raises BlockError, unchanged, if one has none."""
        self.pool.free_blocks(self._tail_first(hit), ReferenceKind.PIN)

    def evict(self, block_ids: Sequence[int]) -> None:
        """Forget the contents of these blocks and of their cached descendants; see `Core`."""
        for request_id in self.coordinator.holders_of(self.pool.evict_blocks(block_ids)):
            self._hashless.add(request_id)  # it would cache them again, or what continues them
            self._forget_limits(request_id)

    def reset(self) -> int:
        """Forget every content if no block is in use. Return how many are in use (0: done)."""
        if not self.pool.reset_prefix_cache():
            return self.pool.num_blocks_in_use()
        self._hits_stopped = False
        self._limits.clear()
        self._board.forget_all()
        return 0

    def stop_hits(self) -> None:
        """From now on nothing hits and nothing becomes hittable, until a `reset` succeeds."""
        self._hits_stopped = True
        self._limits.clear()
        self._board.forget_all()

    # --- figures -------------------------------------------------------------------------------

    def take_commands(self) -> list[Command]:
        """Return label, unlabel, zero and copy commands since the last call, in order."""
        commands = self._outbox.take_commands()
        self._forks.release_copied()
        return commands

    def num_free_blocks(self) -> int:
        """Return how many blocks could be taken now, cached ones included."""
        return self.pool.get_num_free_blocks()

    def usage(self) -> float:
        """Return the share of blocks that are in use, 0.0 to 1.0."""
        return self.pool.get_usage()

    def statistics(self) -> CoreStatistics:
        """Return figures, frozen. O(blocks)."""
        pool = self.pool
        num_cached = pool.contents.num_cached
        apart = {kind: pool.blocks_held(kind) for kind in KINDS_APART}
        references = {kind.value: sum(held.values()) for kind, held in apart.items()}
        references[ReferenceKind.REQUEST.value] = pool.total_references() - sum(references.values())
        return CoreStatistics(
            num_blocks=pool.num_total_blocks,
            num_free_blocks=pool.get_num_free_blocks(),
            num_cached_blocks=num_cached,
            num_sealed_blocks=num_cached - len(pool.contents.unsealed),
            num_pinned_blocks=len(apart[ReferenceKind.PIN]),
            num_in_flight_blocks=len(apart[ReferenceKind.TRANSFER]),
            num_quarantined_blocks=len(pool.quarantined_blocks()),
            num_evictions=pool.num_evictions,
            references=references,
            num_merged_blocks=self._merger.num_merged,
            merged_bytes=self._merger.num_merged * self._block_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` with the failed sum if the books do not add up. O(blocks)."""
        check_pool(self.pool)
        check_tables(self.pool, self.coordinator)
        managers = self.coordinator.managers
        ids = {request_id for manager in managers for request_id in manager.request_ids()}
        self._board.check((i, [len(manager.table(i)) for manager in managers]) for i in ids)

    def dump_state(self) -> dict[str, object]:
        """Return the whole state in a canonical form made of plain values, for comparison."""
        return {
            **dump_pool(self.pool),
            "tables": dump_tables(self.coordinator),
            "hashless": sorted(self._hashless),
            "hits_stopped": self._hits_stopped,
            "shared": self._forks.dump_state(),
        }

    def restore(self, labels: Sequence[LabelSet]) -> int:
        """Rebuild an empty core from the labels of all ranks; return how many blocks were kept.

        Raises:
            BlockError: something is held or cached here already; nothing was changed.
        """
        sizes = [spec.block_size for spec in self.coordinator.specs] if self.can_hit else []
        return rebuild(self.pool, labels, self._none_hash, sizes)

    # --- inside --------------------------------------------------------------------------------

    def _tail_first(self, hit: CacheHit) -> list[int]:
        return self.coordinator.tail_first([ids.tolist() for ids in hit.block_ids])

    def _may_cache(self, request: Request) -> bool:
        return (
            self.coordinator.can_hit
            and not self._hits_stopped
            and request.request_id not in self._hashless
        )

    def _require_possible(
        self, request: Request, reservation: Reservation, hit: CacheHit | None
    ) -> None:
        if reservation.num_cached_tokens > reservation.num_slot_tokens:
            raise RequestError(
                f"request {request.request_id}: {reservation.num_cached_tokens} tokens to cache, "
                f"but slots for {reservation.num_slot_tokens}: reserve slots for all of them"
            )
        if self._may_cache(request):
            for manager in self.coordinator.managers:
                manager.require_cacheable(request, reservation.num_cached_tokens)
        if hit is not None and self.coordinator.has_blocks(request.request_id):
            raise RequestError(
                f"request {request.request_id} has blocks already: only a request without blocks "
                "adopts a hit"
            )

    def _reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        coordinator, request_id = self.coordinator, request.request_id
        computed = reservation.num_computed_tokens
        limits = self._limits.get(request_id)
        self._board.forget(request_id)
        if (
            limits is not None
            and hit is None
            and not reservation.num_spare_blocks
            and not self._forks.is_sharing(request_id)
            and reservation.num_slot_tokens <= limits.capacity_tokens
            and computed < limits.skip_tokens
        ):
            self._cache(request, reservation)
            return []
        if hit is None:
            coordinator.remove_skipped_blocks(request_id, computed)
        due = self._forks.due_copies(request_id, reservation)
        needed = coordinator.get_num_blocks_to_allocate(request_id, reservation, hit) + len(due)
        if (tenants := self.pool.tenants) is not None:
            tenants.serve(tenants.account(request.namespace))
        if not self.pool.has_room(needed, reservation.num_spare_blocks):
            self._limits.pop(request_id, None)
            return None
        if hit is not None:
            coordinator.save_new_computed_blocks(request_id, hit, computed)
        changes = []
        if self._forks.is_sharing(request_id):
            changes = self._forks.copy(request_id, reservation, due)
        new = coordinator.allocate_new_blocks(request_id, reservation)
        for group, entered in enumerate(new):
            manager = coordinator.managers[group]
            end = len(manager.table(request_id))
            first = 0 if hit is not None else end - len(entered)
            if end > first:
                ids = int32_array(manager.columns(request_id, first, end))
                changes.append(TableChange(group, first, ids))
        self._cache(request, reservation)
        if hit is None and computed:  # it may go on by single calls, as it did now
            self._limits[request_id] = coordinator.row_limits(request_id)
        return changes

    def _cache(self, request: Request, reservation: Reservation) -> None:
        """Cache what may be cached."""
        if self._may_cache(request):
            self.coordinator.note_own_end(request.request_id, reservation.own_end)
            if reservation.num_cached_tokens:
                self.coordinator.cache_blocks(request, reservation.num_cached_tokens)

    def _forget_limits(self, request_id: str) -> None:
        self._limits.pop(request_id, None)
        self._board.forget(request_id)
