"""`FlatCore`: the core of one pool of blocks. Its state is a few columns; kernels do its loops.

`KVCacheManager` uses it, and owns requests, slots and statistics. Python makes the decisions here,
and kernels carry them out. The manager validates requests; the core validates what becomes an index
and can be wrong: blocks that a caller names, hits, and shared tokens. The core knows neither the
meaning of tokens, nor workers, nor time.

    cache.look_up ─▶ walk, fit      reserve ─▶ admit | skip, grow, publish      run_rows, admit_rows
    complete_steps ─▶ seal ─▶ notify      fail_steps, cache.evict ─▶ mark ─▶ forget
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.errors import RequestError
from kvcache.core import (
    CacheHit,
    CoreSettings,
    CoreStatistics,
    NewestState,
    ReferenceKind,
    Reservation,
    RowsAdmitted,
    RowsReserved,
    TableChange,
    new_tuple,
)
from kvcache.core.audit import check_core, dump_core
from kvcache.core.forgetting import count_sealed, forget_steps
from kvcache.core.forks import Column, RowForks
from kvcache.core.hits import stale_hit
from kvcache.core.kinds.rule import SIZE
from kvcache.core.names import *
from kvcache.core.prefix_cache import PrefixCache
from kvcache.core.rows import (
    ALONE,
    ASKING,
    BUSY,
    BY_TENANT,
    COUNT,
    DONE,
    GROW,
    HAS_NEWS,
    IS_STALE,
    LATE,
    LONG,
    NEEDS_ROOM,
    NEEDS_SPACE,
    NO_NODES,
    NO_ROOM,
    NUM_PLACES,
    NUM_WISHES,
    SINGLY,
    SKIP,
    admit_row,
    admit_rows,
    free_row,
    free_rows,
    merge_row,
    publish_row,
    rewind_row,
    run_rows,
    serve_row,
)
from kvcache.core.running import END_OF_OWN, ROW, RowTable, RunningRows, note_row_ends
from kvcache.protocol.commands import EMPTY_PATCH, BlockTablePatch, Command
from kvcache.protocol.step import NewRequest
from kvcache.requests.request import Request
from kvcache.requests.request_content import DEFAULT_NAMESPACE
from kvcache.tenants import TenantAccount
from kvcache.tenants.ledger import required

NO_ROW = -1

CoreFactory: TypeAlias = "Callable[[CoreSettings], FlatCore]"
"""Makes the manager's core. Pass another one to observe or replace the core."""

_NO_KEYS = 0, 0, EMPTY_INT32
_NO_DIGESTS = np.empty((0, 1), np.uint8)

_WISH = Struct(f"{NUM_WISHES}i")
"""One row of the `wishes` of `admit_rows`."""


class FlatCore:
    """The core of one pool of blocks: its prefix `cache`, and the requests that use it.

    One owner, one thread. A raise leaves everything unchanged.

    Whatever becomes hittable between `open_step` and the next step belongs to that step:
    `complete_steps` seals it, `fail_steps` drops it. Until then only requests of the same client
    hit it. Outside any step (`close_step`), contents are sealed as soon as they become hittable;
    the caller must then run the forward before it uses a hit.
    """

    def __init__(self, settings: CoreSettings) -> None:
        """Make the core of an empty pool.

        Raises:
            ConfigurationError: there is no block, the policy is unknown, or a kind has no rules.
        """
        self.cache = cache = PrefixCache(settings, self._slots_of)
        self.store, self.steps, self.notifier = cache.store, cache.steps, cache.notifier
        self.tenants, self.hash_block_size = cache.tenants, cache.hash_block_size
        self.rows: dict[str, int] = {}
        self.requests: dict[int, str] = {}
        self._slot_of = settings.slot_of
        self._zeroes = settings.zero_new_blocks and settings.has_workers
        self._merges_duplicates = settings.merge_duplicates
        self._merges: list[tuple[str, TableChange]] = []
        self._num_merged = 0
        self._block_bytes = max(
            [
                len(group.layer_names) * group.kv_cache_spec.page_size_bytes
                for group in settings.kv_cache_config.kv_cache_groups
            ],
            default=0,
        )
        self.forks = RowForks(self.store, self.notifier)
        self._places: Any = np.empty((NUM_PLACES, 0), np.int32)
        self._published: Any = np.empty((0, 4), np.int32)

    # --- steps -------------------------------------------------------------------------------

    def open_step(self, client_id: str, step: int) -> None:
        """Begin step `step` of `client_id`; raises RequestError if the client had a later one."""
        self.steps.open(client_id, step)

    def close_step(self) -> None:
        """End the open step, if any."""
        self.steps.close()

    def complete_steps(self, client_id: str, through_step: int) -> None:
        """Seal what the client's steps up to `through_step` made hittable and is still cached."""
        completed = self.steps.complete(client_id, through_step)
        for step in completed:
            for notes in step.notes:
                self.notifier.sealed(notes)
        if self._merges_duplicates:
            for step in completed:
                self._merge(step.published_rows())
            self.cache.settle()

    def take_merges(self) -> list[tuple[str, TableChange]]:
        """Return the table changes of merged duplicates since the last call, by request."""
        merges, self._merges = self._merges, []
        return merges

    def fail_steps(self, client_id: str, from_step: int) -> None:
        """Drop what the client's steps from `from_step` on made hittable.

        Requests that hit such blocks keep them, without content.
        """
        failed = self.steps.take_failed(client_id, from_step)
        if failed:
            last = failed[-1]
            forget_steps(self.store.address, last.client, last.serial, self.cache.no_blocks())
            self.steps.end_failed(client_id, failed)
            self.cache.settle()

    # --- requests ----------------------------------------------------------------------------

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        """Give the request blocks, all or nothing over all groups; return what enters its tables,
        without the hit.

        Skipped blocks are freed first, and stay freed even if None is returned because too few
        blocks are free; nothing else changes then. A request without blocks adopts `hit`. Full
        blocks up to `num_cached_tokens` become hittable.

        Raises:
            RequestError: the hit is not what a look-up finds now; nothing was changed.
        """
        r = self.rows.get(request.request_id, NO_ROW)
        if r != NO_ROW:
            if self.store.keeps_states:
                newest = reservation.newest_state or NewestState(-1, 0)
                self.store.columns.forward[r, : ACCEPTED + 1] = (
                    reservation.own_end, newest.num_own_tokens, newest.num_accepted_drafts,
                )  # fmt: skip
            return self._extend(r, request, reservation)
        return self._admit(request, reservation, hit)

    def _admit(
        self, request: Request, reservation: Reservation, hit: CacheHit | None
    ) -> list[TableChange] | None:
        """Give a request a row and its blocks. None, unchanged, if too few are free."""
        store, unit, num_tokens = self.store, self.hash_block_size, request.num_tokens
        computed, wanted, cached, spare, own_end, _, num_encoder = reservation
        most = wanted if wanted >= num_tokens else num_tokens
        if most > store.num_reached * unit or num_encoder > most:
            store.reach_units(-(-max(most, num_encoder) // unit))
        end = min(cached, num_tokens) // unit if self.cache.is_caching else 0
        reads = self.cache.is_caching and not request.skip_reading_prefix_cache
        limit, hit_tokens, ids = num_tokens - 1 if reads else 0, 0, EMPTY_INT32
        if hit is not None and hit.num_tokens:
            blocks, hit_tokens = hit
            ids = blocks[0] if len(blocks) == 1 else np.concatenate((EMPTY_INT32, *blocks))
        client = 0 if self.steps.current is None else self.steps.current.client
        root = self.cache.default_root if request.namespace is DEFAULT_NAMESPACE else 0
        root = root or self.cache.root(request.namespace)
        keys, digests = _NO_KEYS, _NO_DIGESTS
        if not request.is_plain:
            self.cache.sweep_keys()
            keys = self.cache.keys_of(request, max(1, end, limit // unit))
        if end and self.notifier.needs_digests:
            digests = self._known_digests(request, end)
        room = spare if self.tenants is None else self._spare_of_tenant(request, spare)
        if not store.free_rows:
            store.more_rows()
        r = store.free_rows[-1]
        is_simple = self.tenants is None and self.notifier.offload is None
        code, depth = NO_NODES, -1
        while code == NO_NODES:
            code, needed, found = admit_row(
                store.address, r, IS_OPEN | (HAS_ITEMS if request.mm_positions else 0), keys[0],
                keys[1], wanted if own_end is None else own_end, num_encoder, root, client, limit,
                hit_tokens, depth, computed, wanted, room, end if is_simple else -1 - end,
                0 if self._zeroes else -1, request.token_buffer, keys[2], digests, ids,
            )  # fmt: skip
            if code == NO_NODES:
                self.cache.reach_nodes(end - found, store.columns.path[:found])
                depth = found
        if code == IS_STALE:
            raise stale_hit(request, hit_tokens)
        if code == NO_ROOM:
            if self.tenants is not None:
                self.tenants.refuse(self.tenants.served, needed, store.cells[FREE], spare)
            return None
        store.free_rows.pop()
        self.rows[request.request_id], self.requests[r] = r, request.request_id
        if end > found:
            self.steps.note_row(r, found, end)
        if not is_simple:
            self._grow(r, computed, wanted, needed, [])
        if not is_simple and end > found:
            self._count_room(request)
            publish_row(store.address, r, end, request.token_buffer, keys[2], digests)
        if self._zeroes or not is_simple:
            self._drop_changes()
        if code == HAS_NEWS or not is_simple:
            self.cache.settle()
        return self._tables_from(r, hit_tokens)

    def tables(self, request_id: str) -> list[TableChange]:
        """Return all blocks of a running request as changes of its tables."""
        return self._tables_from(self.rows[request_id], 0)

    def _tables_from(self, r: int, num_tokens: int) -> list[TableChange]:
        """Return the blocks of a row's tables behind `num_tokens` tokens."""
        c, sizes, changes = self.store.columns, self.cache.sizes, []
        for g, size in enumerate(sizes):
            first, count = num_tokens // size, c.row.item(r, COLUMNS + 2 * g)
            if count > first:
                ids = c.table[r * len(sizes) + g, first:count].copy()
                changes.append(new_tuple(TableChange, (g, first, ids)))
        return changes

    def run_rows(
        self, table: RowTable, rows: RunningRows, computed: Int32Array, slot_tokens: Int32Array
    ) -> RowsReserved:
        """Run the rows of a step: append their tokens, reserve their blocks, note how far they are
        computed. Blocks before `computed` tokens may be skipped; slots are wanted for `slot_tokens`
        tokens.

        All rows skip before the first one gets blocks, and all get blocks before the first one
        publishes; `take_patch` returns the table changes. But if some share blocks that they may
        write, or if there is no room for all tenants' rows, they are served one by one, and the
        result has their changes.
        """
        store, slots = self.store, rows.slots
        self._reach_rows(len(slots))
        places, is_reserved = self._places, np.empty(len(slots), np.int32)
        how = ALONE if self.notifier.offload is None else ASKING
        if self.tenants is not None:
            how = BY_TENANT
        publishes, lacks_nodes = self.cache.is_caching and store.num_groups > 0, False
        code, num_busy = NEEDS_SPACE, 0
        while code != DONE:
            code, first, second, third = run_rows(
                store.address, publishes, how, lacks_nodes, num_busy, store.num_reached,
                table.rows, table.ring, slots, rows.offsets, rows.token_ids, rows.positions,
                computed, slot_tokens, places, is_reserved, self._published,
            )  # fmt: skip
            if code == NEEDS_SPACE:
                store.reach_units(-(-first // self.hash_block_size))
                store.reach_changes(third)
                lacks_nodes = not self.cache.reach_nodes(second)
            elif code == NEEDS_ROOM and how != BY_TENANT:
                self.cache.make_room(first)
                num_busy = second
            elif code != DONE:
                num_busy, num_late = (first, second) if code == SINGLY else (second, 0)
                columns = np.stack((computed, slot_tokens, rows.positions[END_OF_OWN]), axis=1)
                busy, late = places[BUSY, :num_busy].tolist(), places[LATE, :num_late].tolist()
                wanted = {i: Reservation(*columns[i].tolist()) for i in busy}
                if code == SINGLY or not self._grow_by_tenant(table, slots, wanted):
                    changes = self._serve_singly(table, slots, late, wanted, is_reserved)
                    note_row_ends(table.rows, slots, rows.positions, is_reserved)
                    return RowsReserved(is_reserved, changes)
        self._zero_new_blocks()
        if first:
            self.steps.note_rows(self._published[:first].copy())
        for place in places[LONG, :second].tolist():
            slot = int(slots[place])
            table.sync(slot)
            num_cached = int(rows.positions[END_OF_OWN, place])
            self._publish(int(table.rows[slot, ROW]), table.requests[slot], num_cached)
        self.cache.settle()
        return RowsReserved(is_reserved, [])

    def admit_rows(
        self, table: RowTable, new: Sequence[tuple[Request, NewRequest]], slots: Sequence[int],
        client_index: int, num_running: int, num_spare: int, max_model_len: int,
    ) -> RowsAdmitted | None:  # fmt: skip
        """Do `look_up` and `reserve` for the new requests of a step, in order and in one piece;
        enter their rows into `table`, as those of client `client_index`. The requests that find
        room get the first of `slots`; `take_patch` returns their tables.

        While any request runs (`num_running` did before), `num_spare` blocks must stay free. No
        request gets slots for more than `max_model_len` tokens. Return None, unchanged, if this
        takes more than one piece: if a request has extra keys or another namespace, or if Python
        must be asked for blocks.
        """
        store, namespace, count = self.store, new[0][0].namespace, len(new)
        if self.tenants is not None or self._zeroes or self.notifier.offload is not None:
            return None
        wishes, place = np.empty((count, NUM_WISHES), np.int32), 0
        lines = wishes.data
        for request, wish in new:
            own = request.namespace
            if not request.is_plain or (own is not namespace and own != namespace):
                return None
            num_tokens = request.num_tokens
            _WISH.pack_into(
                lines, place,
                num_tokens, 0 if request.skip_reading_prefix_cache else num_tokens - 1,
                min(wish.max_new_tokens, max_model_len), wish.num_external_computed_tokens,
                min(wish.num_lookahead_tokens, max_model_len), wish.num_encoder_tokens,
                wish.delay_cache_blocks,
            )  # fmt: skip
            place += _WISH.size
        is_default = namespace is DEFAULT_NAMESPACE and self.cache.default_root
        root = self.cache.default_root if is_default else self.cache.root(namespace)
        tokens = new[0][0].token_buffer
        if count > 1:
            tokens = np.concatenate([request.token_buffer for request, _ in new])
        while len(store.free_rows) < len(slots):
            store.more_rows()
        self._reach_rows(count)
        client = 0 if self.steps.current is None else self.steps.current.client
        free, answers = store.free_rows[: -len(slots) - 1 : -1], np.empty((3, count), np.int32)
        places, num_admitted = np.array((free, slots), np.int32), -1
        while num_admitted < 0:
            num_admitted, num_published, num_units, num_columns = admit_rows(
                store.address, root, client, self.cache.is_caching, store.num_reached, client_index,
                num_running, num_spare, max_model_len, tokens, wishes, places, table.rows,
                table.ring, answers, self._published,
            )  # fmt: skip
            if num_admitted < 0:
                store.reach_units(-(-num_published // self.hash_block_size))
                store.reach_changes(num_columns)
                self.cache.reach_index(num_units)
                if not store.reach_nodes(num_units):
                    return None
        if num_admitted:
            del store.free_rows[-num_admitted:]
        left, (taken, num_hit, num_scheduled) = iter(free), answers
        for (request, _), slot in zip(new, taken.tolist(), strict=True):
            if slot >= 0:
                r = next(left)
                self.rows[request.request_id], self.requests[r] = r, request.request_id
        if num_published:
            self.steps.note_rows(self._published[:num_published].copy())
        self.cache.settle()
        return RowsAdmitted(taken, num_hit, num_scheduled)

    def _reach_rows(self, count: int) -> None:
        """Make room in the scratch arrays for a batch of `count` rows."""
        if count > self._places.shape[1]:
            self._places = np.empty((NUM_PLACES, 2 * count), np.int32)
            self._published = np.empty((2 * count, 4), np.int32)

    def commit(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks up to `num_tokens` hittable.

        Raises:
            RequestError: it has fewer blocks; nothing was changed.
        """
        r = self.rows.get(request.request_id, NO_ROW)
        if r == NO_ROW or not self._publishes(r):
            return
        c = self.store.columns
        for g in range(self.store.num_groups):
            columns, size = c.row.item(r, COLUMNS + 2 * g), c.group.item(g, SIZE)
            if columns < num_tokens // size:
                raise RequestError(
                    f"request {request.request_id} has {columns} blocks in group {g}, "
                    f"{num_tokens // size} cannot be cached: allocate them first"
                )
        self._publish(r, request, num_tokens)
        self.cache.settle()

    def fork(
        self, parent: Request, child: Request, num_tokens: int, newest: NewestState
    ) -> list[TableChange]:
        """Let `child`, which has no blocks, share those of the first `num_tokens` tokens of
        `parent`; return its tables. `newest` locates the parent's state after these tokens.

        Before one of them writes a block that both reference, `reserve` gives it a block of its own
        and queues a copy command.

        Raises:
            RequestError: the parent has no blocks for so many tokens; nothing was changed.
        """
        r = self.rows.get(parent.request_id, NO_ROW)
        self.forks.require_blocks(r, parent.request_id, num_tokens, newest)
        num_units = num_tokens // self.hash_block_size
        if self.store.columns.row.item(r, UNITS) > num_units:
            # When the parent writes, the partly filled block may be freed before later blocks.
            rewind_row(self.store.address, r, num_units)
            self.store.cells[HAS_GAPS] = 1
        row = self._open_row(child)
        self.store.columns.row[row, FLAGS] |= self.store.columns.row[r, FLAGS] & NO_CACHING
        changes = self.forks.fork(r, row, num_tokens, newest)
        self.cache.settle()
        return changes

    def free(self, request: Request) -> None:
        """Release all of the request's blocks, last one first. Ignore a request without any."""
        r = self._forget_row(request)
        if r != NO_ROW and free_row(self.store.address, r):
            self.cache.settle()

    def path_of(self, request: Request) -> Int32Array:
        """Return the nodes of the request's hittable contents, for `hint`; of a preempted one, of
        what is still cached."""
        r = self.rows.get(request.request_id, NO_ROW)
        if r == NO_ROW:
            return self.cache.path_of(request)
        row, node = self.store.columns.row, self.store.columns.node
        path, n = np.zeros(row.item(r, UNITS), np.int32), row.item(r, LAST)
        for unit in range(len(path) - 1, -1, -1):
            path[unit], n = n, node.item(n, PARENT)
        return path

    def free_all(self, requests: Sequence[Request]) -> None:
        """Do `free` for each of these requests, in order."""
        lines = [r for r in map(self._forget_row, requests) if r != NO_ROW]
        if lines and free_rows(self.store.address, np.array(lines, np.int32)):
            self.cache.settle()

    def _forget_row(self, request: Request) -> int:
        """Forget which row a request has, and return it. The caller then releases its blocks."""
        r = self.rows.pop(request.request_id, NO_ROW)
        if r == NO_ROW:
            return r
        if self.forks.copied:
            self.store.cells[HAS_GAPS] = 1
        if self.forks.shared:
            self.forks.shared.pop(r, None)
        del self.requests[r]
        self.store.free_rows.append(r)
        return r

    def forget_hashes(self, request: Request) -> None:
        """Make no more blocks of this running request hittable (used while draining)."""
        r = self.rows.get(request.request_id, NO_ROW)
        if r != NO_ROW:
            self.store.columns.row[r, FLAGS] |= NO_CACHING

    def row_of(self, request_id: str) -> int:
        """Return the number of a request's row, -1 if it has no blocks."""
        return self.rows.get(request_id, NO_ROW)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return copies of the request's tables, one list per group, empty if it is unknown."""
        r = self.rows.get(request_id, NO_ROW)
        if r == NO_ROW:
            return tuple([[] for _ in range(self.store.num_groups)])
        return tuple([self.store.table(r, g).tolist() for g in range(self.store.num_groups)])

    def common_prefix_blocks(self, request_id: str, num_running_requests: int) -> list[int]:
        """Return, per group, how many leading blocks every running request shares."""
        r = self.rows.get(request_id, NO_ROW)
        counts = [0] * self.store.num_groups
        if r == NO_ROW or not self.cache.prefix_groups:
            return counts
        held = self.store.blocks_in_tables()
        for g in self.cache.prefix_groups:
            differs = held[self.store.table(r, g)] != num_running_requests
            counts[g] = int(differs.argmax()) if differs.any() else len(differs)
        return counts

    # --- commands and statistics -------------------------------------------------------------

    def take_commands(self) -> list[Command]:
        """Return label, unlabel, zero and copy commands since the last call, in order."""
        commands = self.notifier.take_commands()
        if self.forks.release_copied():
            self.cache.settle()
        return commands

    def statistics(self) -> CoreStatistics:
        """Return frozen statistics. O(blocks)."""
        c = self.store.columns
        return CoreStatistics(
            num_blocks=len(c.block) - 1,
            num_free_blocks=self.cache.num_free_blocks(),
            num_cached_blocks=int(np.count_nonzero(c.block[:, NODE])),
            num_sealed_blocks=int(count_sealed(self.store.address)),
            num_pinned_blocks=len(self.cache.pins),
            num_in_flight_blocks=0,
            num_quarantined_blocks=0,
            num_evictions=int(c.number[EVICTED]),
            references={
                ReferenceKind.PIN.value: self.cache.pins.total(),
                ReferenceKind.FORK.value: self.forks.copied.total(),
                ReferenceKind.TRANSFER.value: 0,
                ReferenceKind.REQUEST.value: int(self.store.blocks_in_tables().sum()),
            },
            num_merged_blocks=self._num_merged,
            merged_bytes=self._num_merged * self._block_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` at the first invariant that does not hold. O(blocks)."""
        check_core(self)

    def dump_state(self) -> dict[str, object]:
        """Return the whole state as plain values in a canonical form, for comparison."""
        return dump_core(self)

    # --- inside ------------------------------------------------------------------------------

    def _count_taken(self, first: int = 0) -> None:
        """Charge the served tenant for the new blocks in `ids`, from index `first` on."""
        if self.tenants is not None:
            c = self.store.columns
            ids = c.ids[first : c.number[NUM_IDS]]
            self.tenants.took(ids[ids > 0], self.tenants.served)

    def _count_room(self, request: Request) -> None:
        """Set ROOM to the number of blocks that a request's tenant may still reference."""
        if self.tenants is not None and self.cache.order is not None:
            self.cache.order.tell()
            account = self.tenants.account(request.namespace)
            room = self.tenants.room(account, self.cache.num_free_blocks())
            self.store.columns.number[ROOM] = max(0, room)

    def _publishes(self, r: int) -> bool:
        """Return whether further blocks of a row become hittable."""
        return self.cache.is_caching and not self.store.columns.row.item(r, FLAGS) & NO_CACHING

    def _open_row(self, request: Request) -> int:
        """Give a request a row with its flags and extra keys. The caller sets everything else."""
        store = self.store
        self.cache.sweep_keys()
        first, other, _ = self.cache.keys_of(request, 1)
        if not store.free_rows:
            store.more_rows()
        r, row = store.free_rows.pop(), store.columns.row
        row[r, FLAGS] = IS_OPEN | (HAS_ITEMS if request.mm_positions else 0)
        row[r, FIRST_KEYS], row[r, OTHER_KEYS] = first, other
        store.columns.forward[r, :ENDS] = 0, -1, 0, 0
        self.rows[request.request_id], self.requests[r] = r, request.request_id
        return r

    def _spare_of_tenant(self, request: Request, num_spare_blocks: int) -> int:
        """Serve a request's tenant from now on; return how many blocks must stay free so that it
        takes no more than it may, and leaves `num_spare_blocks`."""
        tenants, num_free = required(self.tenants), self.store.cells[FREE]
        account = tenants.account(request.namespace)
        tenants.serve(account)
        return num_free - tenants.room(account, num_free - num_spare_blocks)

    def _extend(
        self, r: int, request: Request, reservation: Reservation
    ) -> list[TableChange] | None:
        """Give a request more blocks. None if too few are free; then only skips have happened."""
        store, row = self.store, self.store.columns.row
        computed, wanted = reservation.num_computed_tokens, reservation.num_slot_tokens
        cached, unit = reservation.num_cached_tokens, self.hash_block_size
        is_late = computed >= row.item(r, SKIP_AT)
        if (
            wanted <= row.item(r, CAPACITY)
            and not is_late
            and not store.keeps_states
            and not reservation.num_spare_blocks
            and (cached < (row.item(r, UNITS) + 1) * unit or not self._publishes(r))
        ):
            return []
        if is_late:
            serve_row(store.address, r, computed, wanted, SKIP, 0)
            self.cache.settle()
        store.reach_units(-(-wanted // unit))
        due = self.forks.due_copies(r, wanted)
        needed = serve_row(store.address, r, computed, wanted, COUNT, 0) + len(due)
        spare = reservation.num_spare_blocks
        kept = spare if self.tenants is None else self._spare_of_tenant(request, spare)
        if needed > store.cells[FREE] - kept:
            if self.tenants is not None:
                self.tenants.refuse(self.tenants.served, needed, store.cells[FREE], spare)
            return None
        self._grow(r, computed, wanted, needed, due)
        changes = self._take_changes()
        if cached and self._publishes(r):
            self._publish(r, request, cached)
        self.cache.settle()
        return changes

    def _grow(self, r: int, computed: int, wanted: int, needed: int, due: list[Column]) -> None:
        """Give a row the blocks that it lacks, and copies of the blocks `due`; in all `needed`."""
        self.cache.make_room(needed)
        self.forks.copy(r, wanted, due)
        serve_row(self.store.address, r, computed, wanted, GROW, 0)
        self._count_taken()

    def _publish(self, r: int, request: Request, num_tokens: int) -> None:
        """Publish a row's units up to `num_tokens` tokens. It has all blocks that they fill."""
        store = self.store
        start = store.columns.row.item(r, UNITS)
        end = min(num_tokens, request.num_tokens) // self.hash_block_size
        if end <= start:
            return
        self.cache.reach_nodes(end - start)
        self.steps.note_row(r, start, end)
        _, _, keys = self.cache.keys_of(request, end)
        digests = self._known_digests(request, end)
        self._count_room(request)
        publish_row(store.address, r, end, request.all_token_ids, keys, digests)

    def _merge(self, published: list[Any]) -> None:
        """Replace rows' duplicate blocks by sealed ones; the forwards that wrote them are
        complete."""
        for r, generation, first, end in published:
            if self.store.columns.row.item(r, GENERATION) != generation:
                continue
            tables = [self.store.table(r, g) for g in range(self.store.num_groups)]
            before = [table.copy() for table in tables]
            self._num_merged += merge_row(self.store.address, r, first, end)
            for g, (old, new) in enumerate(zip(before, tables, strict=True)):
                columns = np.flatnonzero(old != new)
                for run in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1):
                    if len(run):
                        change = TableChange(g, int(run[0]), new[run])
                        self._merges.append((self.requests[r], change))

    def _known_digests(self, request: Request, num_units: int) -> Any:
        """Return the digests of a request's first units, if they are needed and known."""
        if not self.notifier.needs_digests or not num_units:
            return _NO_DIGESTS
        known = request.known_block_hashes
        if len(known) < num_units or len(known[0]) != self.store.columns.digest.shape[1]:
            return _NO_DIGESTS
        packed = np.frombuffer(request.packed_block_hashes(0, num_units), np.uint8)
        return packed.reshape(num_units, -1)

    def _take_changes(self) -> list[TableChange]:
        """Return what entered the tables of one row."""
        c, start, changes = self.store.columns, 0, []
        for i in range(c.number.item(NUM_CHANGES)):
            _, g, first, count = c.change[:, i].tolist()
            changes.append(TableChange(g, first, np.abs(c.ids[start : start + count])))
            start += count
        self._drop_changes()
        return changes

    def take_patch(self) -> BlockTablePatch:
        """Return what entered tables in `run_rows` and `admit_rows`, unless rows were served one by
        one. Take it before a call for one request."""
        c, cells = self.store.columns, self.store.cells
        count = cells[NUM_CHANGES]
        if not count:
            return EMPTY_PATCH
        changes, ids = c.change[:, :count].copy(), c.ids[: cells[NUM_IDS]].copy()
        if self.store.keeps_states:
            np.abs(ids, out=ids)
        cells[NUM_CHANGES] = cells[NUM_IDS] = 0
        slots, groups, first_indices, counts = changes
        return BlockTablePatch(slots, groups, first_indices, counts, ids)

    def _drop_changes(self) -> None:
        self._zero_new_blocks()
        cells = self.store.cells
        cells[NUM_CHANGES] = cells[NUM_IDS] = 0

    def _zero_new_blocks(self) -> None:
        """Queue the command that zeroes the blocks which have just entered tables."""
        cells = self.store.cells
        if self._zeroes and cells[NUM_IDS]:
            ids = self.store.columns.ids[: cells[NUM_IDS]]
            self.notifier.zero(ids[ids > 0])

    def _grow_by_tenant(
        self, table: RowTable, slots: Int32Array, wanted: Mapping[int, Reservation]
    ) -> bool:
        """Give rows the blocks that they lack, one tenant after the other. Return False, unchanged,
        unless there is room for all."""
        self.cache.settle()  # tenants count what rows have skipped
        core, tenants = self.store.address, required(self.tenants)
        lines, slots_of = table.rows[slots, ROW].tolist(), slots.tolist()
        lacking: dict[TenantAccount, int] = {}
        places: dict[TenantAccount, list[int]] = {}
        for i, (computed, slot_tokens, *_) in wanted.items():
            count = serve_row(core, lines[i], computed, slot_tokens, COUNT, 0)
            if count:
                account = tenants.account(table.requests[slots_of[i]].namespace)
                lacking[account] = lacking.get(account, 0) + count
                places.setdefault(account, []).append(i)
        if not tenants.has_room(lacking, self.cache.num_free_blocks()):
            return False
        for account, count in lacking.items():
            tenants.serve(account)
            self.cache.make_room(count)
            first = self.store.cells[NUM_IDS]
            for i in places[account]:
                computed, slot_tokens, *_ = wanted[i]
                serve_row(core, lines[i], computed, slot_tokens, GROW, slots_of[i])
            self._count_taken(first)
        return True

    def _serve_singly(
        self,
        table: RowTable,
        slots: Int32Array,
        late: Sequence[int],
        wanted: Mapping[int, Reservation],
        is_reserved: Int32Array,
    ) -> list[tuple[int, TableChange]]:
        """Serve rows, named by their places in `slots`, one by one; return their table changes.
        Those in `late` skip first."""
        lines = table.rows[slots, ROW].tolist()
        for i in late:
            serve_row(self.store.address, lines[i], wanted[i].num_computed_tokens, 0, SKIP, 0)
        self.cache.settle()
        changes: list[tuple[int, TableChange]] = []
        for i, reservation in wanted.items():
            slot = int(slots[i])
            table.sync(slot)
            changed = self._extend(lines[i], table.requests[slot], reservation)
            is_reserved[i] = changed is not None
            changes += [(slot, change) for change in changed or ()]
        return changes

    def _slots_of(self, notes: Any) -> Int32Array:
        """Return the slots of the requests that made blocks hittable, -1 if they have ended."""
        generations = self.store.columns.row[:, GENERATION]
        found: dict[tuple[int, int], int] = {}
        slots = []
        for pair in zip(notes[:, 2].tolist(), notes[:, 3].tolist(), strict=True):
            if pair not in found:
                r, generation = pair
                is_here = r >= 0 and generations.item(r) == generation
                found[pair] = self._slot_of(self.requests[r]) if is_here else -1
            slots.append(found[pair])
        return np.array(slots, np.int32)
