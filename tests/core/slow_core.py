"""A core that is slow and obvious: blocks are objects, lists are searched, prefixes are tuples.

It has the interface of a core and shares no code with one, so that walks can drive both alike and
compare everything visible. It has no tenants, policies except LRU, tiers and rebuilds.

Each content has one *cached* block. A request that computes a content again keeps a private block
in its table. In groups that read the whole prefix it also holds the cached one, its *twin*, as long
as it has the private one: so no content is ever evicted before those that continue it. With
`merge_duplicates` the twin replaces the private block once its step is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, NamedTuple

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import BlockError, RequestError
from kvcache.core import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheHit,
    CoreSettings,
    CoreStatistics,
    NewestState,
    Reservation,
    RowsReserved,
    TableChange,
)
from kvcache.core.hits import stale_hit
from kvcache.core.running import (
    COMPUTED,
    END,
    END_OF_OWN,
    FIRST_IN_RING,
    OWN,
    SETTLED,
    TOKENS,
    RowTable,
    RunningRows,
)
from kvcache.protocol.commands import (
    EMPTY_PATCH,
    BlockTablePatch,
    Command,
    Copy,
    Label,
    Unlabel,
    Zero,
)
from kvcache.protocol.labels import SealedContents, extra_keys_bytes, sorted_contents
from kvcache.requests.hash_algorithms import ExtraKeys, HashFn
from kvcache.requests.hashing import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from kvcache.requests.request import Namespace, Request
from kvcache.requests.request_content import namespace_name
from tests.core.builders import append
from tests.core.model_group import ModelGroup, group_of

Unit = tuple[tuple[int, ...], ExtraKeys]
Step = tuple[str, int]
Column = tuple[int, int]
"""Group and column of a table."""


class Place(NamedTuple):
    """A whole prefix, unit by unit."""

    namespace: Namespace
    units: tuple[Unit, ...]

    def before(self, num_units: int) -> Place:
        return Place(self.namespace, self.units[:-num_units])

    def continues(self, other: Place) -> bool:
        """Return whether this is longer than another prefix and begins with it."""
        num_units = len(other.units)
        return (
            self.namespace == other.namespace
            and len(self.units) > num_units
            and self.units[:num_units] == other.units
        )


class Content(NamedTuple):
    """A place: a group, and the prefix at whose end its block is."""

    group: int
    place: Place


@dataclass(eq=False)
class Block:
    id: int
    references: int = 0
    content: Content | None = None
    waits_for: Step | None = None
    """The step that must be complete before this is sealed."""


class Published(NamedTuple):
    """A row made these units hittable in a step."""

    step: Step
    first: int
    end: int
    number: int
    """How many were before this one."""


@dataclass(eq=False)
class Row:
    request: Request
    num_encoder: int
    tables: list[list[Block | None]]
    place: Place
    """The contents that it has made hittable or adopted."""
    twins: dict[Column, Block] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)
    """Units at whose end a forward's own tokens ended."""
    is_mute: bool = False
    shared: dict[Column, int] = field(default_factory=dict)
    """Columns that others may hold too, and after how many tokens they are written."""
    published: list[Published] = field(default_factory=list)

    @property
    def num_units(self) -> int:
        return len(self.place.units)


class SlowCore:
    keeps_copies = False
    """Cache a content in every block that has it, and hold no twins, as other managers do."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[ModelGroup],
        *,
        none_hash: BlockHash,
        hash_fn: HashFn,
        use_eagle: bool = False,
        enable_caching: bool = True,
        events: Any = None,
        zero_new_blocks: bool = False,
        has_workers: bool = True,
        merge_duplicates: bool = False,
        publish_all_groups: bool = False,
        block_bytes: int = 0,
    ) -> None:
        self.groups, self.use_eagle = list(groups), use_eagle
        sizes = [group.block_size for group in groups]
        self.hash_block_size, self.step_tokens = gcd(*sizes), lcm(*sizes)
        self.can_hit = enable_caching and all(group.can_be_hit for group in groups)
        self.none_hash, self.hash_fn = none_hash, hash_fn
        self.emit = (lambda event: None) if events is None else events.emit
        self.zeroes, self.has_workers = zero_new_blocks and has_workers, has_workers
        self.merges, self.block_bytes = merge_duplicates, block_bytes
        ordered = {g for g, group in enumerate(groups) if group.is_ordered}
        self.told = set(range(len(groups))) if publish_all_groups or not ordered else ordered
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blank = self.blocks[:0:-1]
        """Free blocks without content, in any order."""
        self.unheld: list[Block] = []
        """Cached blocks without references, the next victim first."""
        self.cached: list[Block] = []
        """In order of caching."""
        self.rows: dict[str, Row] = {}
        self.step: Step | None = None
        self.hits_stopped = False
        self.pins: Counter[Block] = Counter()
        self.copied: Counter[Block] = Counter()
        self.copies: list[tuple[Block, Block]] = []
        self.commands: list[Command] = []
        self.zeroed: list[int] = []
        self.changed: list[tuple[str, TableChange]] = []
        self.num_evicted = self.num_merged = self.num_published = 0
        self.digests: dict[Place, BlockHash] = {}

    @property
    def cache(self) -> SlowCore:
        """The prefix cache: the model does not part it from the requests."""
        return self

    # --- steps ---

    def open_step(self, client_id: str, step: int) -> None:
        self.step = client_id, step

    def close_step(self) -> None:
        self.step = None

    def complete_steps(self, client_id: str, through_step: int) -> None:
        """Seal the blocks of these steps, except those that continue unsealed contents of
        others."""

        def is_done(step: Step) -> bool:
            return step[0] == client_id and step[1] <= through_step

        done = {b.waits_for for b in self.cached if b.waits_for and is_done(b.waits_for)}
        for step in sorted(done):
            self.seal([b for b in self.cached if b.waits_for == step], step)
        if self.merges:
            made = [(p, row) for row in self.rows.values() for p in row.published]
            for published, row in sorted(made, key=lambda pair: (pair[0].step, pair[0].number)):
                if is_done(published.step):
                    self.merge(row, published)
        for row in self.rows.values():
            row.published = [p for p in row.published if not is_done(p.step)]

    def seal(self, blocks: Sequence[Block], step: Step | None) -> None:
        for block in sorted(blocks, key=lambda b: self.content(b).place.units.__len__()):
            parent = self.parent(block)
            waits_for = None if parent is None else parent.waits_for
            block.waits_for = waits_for if waits_for != step else None
            if block.waits_for is None:
                self.tell_sealed(block)

    def parent(self, block: Block) -> Block | None:
        """The block without which this one is useless."""
        content = self.content(block)
        group = self.groups[content.group]
        if not group.is_ordered:
            return None
        above = content.place.before(group.block_size // self.hash_block_size)
        return self.find(Content(content.group, above))

    def merge(self, row: Row, published: Published) -> None:
        """Replace private blocks by cached ones."""
        for units in range(min(row.num_units, published.end), published.first, -1):
            for g, group in enumerate(self.groups):
                column, rest = divmod(units * self.hash_block_size, group.block_size)
                if rest or group.states or column > len(row.tables[g]):
                    continue
                place = Place(row.place.namespace, row.place.units[:units])
                mine, cached = row.tables[g][column - 1], self.find(Content(g, place))
                if mine is None or mine.content or cached is None or cached.waits_for:
                    continue
                if group.is_ordered:
                    del row.twins[g, column - 1]
                else:
                    self.hold(cached)
                row.tables[g][column - 1] = cached
                self.release([mine])
                self.num_merged += not mine.references
                change = TableChange(g, column - 1, int32_array([cached.id]))
                self.changed.append((row.request.request_id, change))

    def take_merges(self) -> list[tuple[str, TableChange]]:
        changed, self.changed = self.changed, []
        return changed

    def fail_steps(self, client_id: str, from_step: int) -> None:
        """Drop what these steps made hittable, and all that continues it."""

        def has_failed(step: Step | None) -> bool:
            return step is not None and step[0] == client_id and step[1] >= from_step

        made = [(p, row) for row in self.rows.values() for p in row.published if has_failed(p.step)]
        for published, row in sorted(made, key=lambda pair: -pair[0].number):
            if row.num_units > published.first:
                self.rewind(row, published.first)
                row.ends = {end for end in row.ends if end <= published.first}
        for row in self.rows.values():
            row.published = [p for p in row.published if not has_failed(p.step)]
        void = [block for block in self.cached if has_failed(block.waits_for)]
        self.forget_behind(void)

    # --- look-up ---

    def look_up(self, request: Request) -> CacheHit:
        length = self.longest(request) // self.step_tokens * self.step_tokens
        if not self.may_cache or request.skip_reading_prefix_cache:
            length = 0
        place = self.place_of(request, length // self.hash_block_size)
        while length > 0:
            tables = self.hit_at(place, length)
            if tables is not None:
                extra = self.step_tokens if self.use_eagle else 0
                return CacheHit(tuple(map(int32_array, tables)), length - extra)
            length -= self.step_tokens
        return CacheHit(tuple(int32_array([]) for _ in self.groups), 0)

    def longest(self, request: Request) -> int:
        """Most tokens of a hit, including the block that EAGLE drops."""
        return request.num_tokens - 1

    def hit_at(self, place: Place, length: int) -> list[list[int]] | None:
        """Return whether all groups can start from `length` tokens, including the EAGLE block."""
        extra = self.step_tokens if self.use_eagle else 0
        tables = []
        for g, group in enumerate(self.groups):
            size = group.block_size
            first = max(0, group.first_needed(length) - (extra // size if group.window else 0))
            table = [0] * first
            for index in range(first, length // size):
                end = (index + 1) * size // self.hash_block_size
                block = self.find(Content(g, Place(place.namespace, place.units[:end])))
                if block is None or not self.can_use(block):
                    return None
                table.append(block.id)
            tables.append(table[: (length - extra) // size])
        return tables

    def can_use(self, block: Block) -> bool:
        """Return whether the open step's client may read a block: it is sealed, or its own. A state
        of the open step is not written yet when others are read."""
        if block.waits_for is None:
            return True
        if self.step is None or block.waits_for[0] != self.step[0]:
            return False
        is_state = self.groups[self.content(block).group].states is not None
        return not is_state or block.waits_for != self.step

    @property
    def may_cache(self) -> bool:
        return self.can_hit and not self.hits_stopped

    def place_of(self, request: Request, num_units: int) -> Place:
        size = self.hash_block_size
        units = []
        for start in range(0, num_units * size, size):
            tokens = tuple(request.all_token_ids[start : start + size])
            keys = generate_block_hash_extra_keys(request, start, start + size, 0)[0]
            units.append((tokens, keys or ()))
        return Place(request.namespace, tuple(units))

    def find(self, content: Content) -> Block | None:
        return next((block for block in self.cached if block.content == content), None)

    @staticmethod
    def content(block: Block) -> Content:
        assert block.content is not None
        return block.content

    # --- references ---

    def hold(self, block: Block) -> None:
        block.references += 1
        if block in self.unheld:
            self.unheld.remove(block)

    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.references -= 1
            if not block.references:
                (self.unheld if block.content else self.blank).append(block)

    def tail_first(self, tables: Sequence[Sequence[Block | None]]) -> list[Column]:
        """Groups whose blocks can be freed one by one first, each from its end; then the others."""
        places = [
            ((True, -(index + 1) * group.block_size, g), (g, index))
            if group.is_ordered
            else ((False, g, -index), (g, index))
            for g, group in enumerate(self.groups)
            for index, block in enumerate(tables[g])
            if block is not None
        ]
        return [column for _, column in sorted(places)]

    def num_free_blocks(self) -> int:
        return len(self.blank) + len(self.unheld)

    # --- contents ---

    def forget(self, block: Block) -> None:
        """Remove a block's content, whatever references it has."""
        if block.waits_for is None:
            self.tell_gone(block)
        block.content = block.waits_for = None
        self.cached.remove(block)
        if block in self.unheld:
            self.unheld.remove(block)
            self.blank.append(block)

    def forget_behind(self, blocks: Sequence[Block]) -> None:
        """Drop the contents of blocks. In prefix groups, drop all cached blocks at or after their
        places, and move rows back before them. If only others were dropped, move back rows without
        twins as well, which may make the same blocks hittable once more."""
        ordered, others = [], []
        for block in blocks:
            content = self.content(block)
            places = ordered if self.groups[content.group].is_ordered else others
            places.append(content.place)
        for row in self.rows.values():
            cuts = [p for p in ordered if row.place.continues(p) or row.place == p]
            if not row.twins:
                cuts += [p for p in others if row.place.continues(p) or row.place == p]
            if cuts:
                self.rewind(row, min(len(place.units) for place in cuts) - 1)
        for block in list(self.cached):
            place = self.content(block).place
            if block in blocks or any(place.continues(p) or place == p for p in ordered):
                self.forget(block)

    def forget_in_group(self, blocks: Sequence[Block]) -> None:
        """Drop blocks that can be freed one by one, and those that continue them without a gap."""
        doomed = list(blocks)
        for block in doomed:
            group, place = self.content(block)
            length = self.groups[group].block_size // self.hash_block_size
            for other in self.cached:
                content = self.content(other)
                if content.group == group and content.place.before(length) == place:
                    doomed.append(other)
        for block in dict.fromkeys(doomed):
            self.forget(block)

    def rewind(self, row: Row, num_units: int) -> None:
        """Move a row back to at most `num_units`."""
        if row.num_units <= num_units:
            return
        length = self.hash_block_size
        gone = [
            (-(index + 1) * self.groups[g].block_size, g, index)
            for g, index in row.twins
            if (index + 1) * self.groups[g].block_size > num_units * length
        ]
        self.release([row.twins.pop((g, index)) for _, g, index in sorted(gone)])
        row.place = Place(row.place.namespace, row.place.units[:num_units])

    def is_continued(self, block: Block) -> bool:
        """Return whether a block continues the content of a prefix group."""
        content = self.content(block)
        return self.groups[content.group].is_ordered and (
            any(self.content(other).place.continues(content.place) for other in self.cached)
            or any(row.place.continues(content.place) for row in self.rows.values())
        )

    def make_room(self, count: int) -> None:
        """Evict until `num_blocks` are blank: the least recently used first, blocks with children
        only if no others are left."""
        while len(self.blank) < count:
            before = self.num_evicted
            for block in list(self.unheld):
                if len(self.blank) < count and not self.is_continued(block):
                    self.forget(block)
                    self.num_evicted += 1
            if self.num_evicted == before:
                going = self.unheld[: count - len(self.blank)]
                self.num_evicted += len(going)
                self.evict([block.id for block in going])

    def take(self, count: int) -> list[Block]:
        """Take free blocks; there are enough."""
        self.make_room(count)
        blocks = [self.blank.pop() for _ in range(count)]
        for block in blocks:
            block.references = 1
        if self.zeroes:
            self.zeroed += [block.id for block in blocks]
        return blocks

    # --- a request's life ---

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        row = self.rows.get(request.request_id)
        if row is None:
            return self.admit(request, reservation, hit)
        assert hit is None
        self.skip(row, reservation.num_computed_tokens)
        return self.extend(row, reservation)

    def match_again(self, request: Request, hit: CacheHit) -> None:
        """Refuse a hit that is not what a look-up finds now."""
        if self.look_up(request) != hit:
            raise stale_hit(request, hit.num_tokens)

    def admit(
        self, request: Request, wanted: Reservation, hit: CacheHit | None
    ) -> list[TableChange] | None:
        tables: list[list[Block | None]] = [[] for _ in self.groups]
        if hit is not None:
            if hit.num_tokens:
                self.match_again(request, hit)
            tables = [
                [self.blocks[b] if b and i >= skipped else None for i, b in enumerate(ids.tolist())]
                for ids, group in zip(hit.block_ids, self.groups, strict=True)
                for skipped in [group.num_skipped(wanted.num_computed_tokens)]
            ]
        num_hit = 0 if hit is None else hit.num_tokens
        place = self.place_of(request, num_hit // self.hash_block_size)
        row = Row(request, wanted.num_encoder_tokens, tables, place)
        columns = self.columns(row, wanted)
        adopted = [block for table in tables for block in table if block is not None]
        needed = sum(map(sum, columns)) + sum(not block.references for block in adopted)
        if needed > self.num_free_blocks() - wanted.num_spare_blocks:
            return None
        for block in adopted:
            self.hold(block)
        self.rows[request.request_id] = row
        self.grow(row, wanted, columns)
        self.publish(row, wanted.num_cached_tokens)
        return self.tables(request.request_id, [] if hit is None else [*map(len, hit.block_ids)])

    def tables(self, request_id: str, starts: Sequence[int] = ()) -> list[TableChange]:
        tables = self.rows[request_id].tables
        starts = starts or [0] * len(tables)
        return [
            TableChange(g, first, ids_of(table[first:]))
            for g, (table, first) in enumerate(zip(tables, starts, strict=True))
            if len(table) > first
        ]

    def extend(self, row: Row, wanted: Reservation) -> list[TableChange] | None:
        due = self.due_copies(row, wanted)
        columns = self.columns(row, wanted)
        needed = self.num_wanted(row, wanted, columns) + len(due)
        if needed > self.num_free_blocks() - wanted.num_spare_blocks:
            return None
        self.make_room(needed)
        changes = self.copy(row, wanted, due)
        changes += self.grow(row, wanted, columns)
        self.publish(row, wanted.num_cached_tokens)
        return changes

    def admit_rows(self, *_: object) -> None:
        """Does nothing: `look_up` and `reserve` do it."""

    def row_of(self, request_id: str) -> int:
        """Return any number: rows have none."""
        return 0

    def run_rows(
        self, table: RowTable, rows: RunningRows, computed: Int32Array, slot_tokens: Int32Array
    ) -> RowsReserved:
        """Serve rows that share what they may write one by one, the others together: all skip,
        those who can have all they lack get it, and then contents are made hittable; last of all
        what rows fill with items, or with tokens that are not in the ring."""
        append(table, rows)
        slots, positions = rows.slots.tolist(), rows.positions
        chosen = [self.rows[table.requests[slot].request_id] for slot in slots]
        is_long = [self.is_long(row, table, slot) for row, slot in zip(chosen, slots, strict=True)]
        wanted = []
        for i, (row, slot) in enumerate(zip(chosen, slots, strict=True)):
            table.sync(slot)
            wanted.append(self.reservation(i, table, rows, int(computed[i]), int(slot_tokens[i])))
            self.skip(row, wanted[i].num_computed_tokens)
        is_reserved, changes = [True] * len(chosen), []
        if any(row.shared for row in chosen):
            for i, row in enumerate(chosen):
                found = self.extend(row, wanted[i])
                is_reserved[i] = found is not None
                changes += [(slots[i], change) for change in found or ()]
        else:
            total = 0
            for i, row in enumerate(chosen):
                needed = self.num_wanted(row, wanted[i], self.columns(row, wanted[i]))
                is_reserved[i] = total + needed <= self.num_free_blocks()
                total += needed * is_reserved[i]
            self.make_room(total)
            served = [i for i in range(len(chosen)) if is_reserved[i]]
            for i in served:
                found = self.grow(chosen[i], wanted[i], self.columns(chosen[i], wanted[i]))
                changes += [(slots[i], change) for change in found]
            for i in sorted(served, key=is_long.__getitem__):
                self.publish(chosen[i], wanted[i].num_cached_tokens)
        for i, slot in enumerate(slots):
            table.rows[slot, COMPUTED] = positions[END if is_reserved[i] else SETTLED, i]
            if is_reserved[i] and positions[END, i] > positions[SETTLED, i]:
                table.rows[slot, OWN] = positions[END_OF_OWN, i]
        return RowsReserved(int32_array(is_reserved), changes)

    def take_patch(self) -> BlockTablePatch:
        """Return nothing: `run_rows` returns all changes."""
        return EMPTY_PATCH

    def reservation(
        self, i: int, table: RowTable, rows: RunningRows, computed: int, slot_tokens: int
    ) -> Reservation:
        last, positions = table.rows.item(rows.slots.item(i), OWN), rows.positions
        settled, own_end = positions.item(SETTLED, i), positions.item(END_OF_OWN, i)
        return Reservation(
            computed,
            slot_tokens,
            own_end,
            num_own_tokens=own_end if positions.item(END, i) > settled else last,
            newest_state=NewestState(last, settled - last),
        )

    def is_long(self, row: Row, table: RowTable, slot: int) -> bool:
        oldest = max(
            table.rows[slot, FIRST_IN_RING], table.rows[slot, TOKENS] - table.ring.shape[1]
        )
        is_old = row.num_units * self.hash_block_size < oldest
        return bool(row.request.mm_positions) or bool(is_old)

    def skip(self, row: Row, computed: int) -> None:
        for g, group in enumerate(self.groups):
            table = row.tables[g]
            for index in reversed(range(min(group.num_skipped(computed), len(table)))):
                block = table[index]
                if block is not None:
                    self.release([block])
                    table[index] = None

    def columns(self, row: Row, wanted: Reservation) -> list[list[bool]]:
        """The new columns of tables, by group: whether a block is in each."""
        return [self.new_columns(g, row, wanted) for g in range(len(self.groups))]

    def new_columns(self, g: int, row: Row, wanted: Reservation) -> list[bool]:
        group, held = self.groups[g], len(row.tables[g])
        if group.is_cross:
            return [True] * (-(-row.num_encoder // group.block_size) - held)
        tokens = wanted.own_end if group.states else wanted.num_slot_tokens
        count = 1 if group.states == "none" else -(-tokens // group.block_size)
        columns = range(held, count + group.num_drafts)
        if not group.states:
            return [i >= group.num_skipped(wanted.num_computed_tokens) for i in columns]
        written, read = group.column(wanted.own_end), group.column(wanted.num_computed_tokens)
        return [i >= written or i == read for i in columns]

    def spares(self, g: int, row: Row, wanted: Reservation) -> list[int]:
        """Columns of states that a forward passes without reading or writing them."""
        group, newest, table = self.groups[g], wanted.newest_state, row.tables[g]
        if not group.states or newest is None or newest.num_own_tokens < 0:
            return []
        written, last = group.column(wanted.own_end), group.column(newest.num_own_tokens)
        if written <= last + 1:
            return []
        return [
            i
            for i, block in enumerate(table[:written])
            if i != last + newest.num_accepted_drafts and block is not None
            if block.references == 1 and block.content is None
        ]

    def num_wanted(self, row: Row, wanted: Reservation, columns: list[list[bool]]) -> int:
        return sum(
            sum(flags) - len(self.spares(g, row, wanted)[: sum(flags)])
            for g, flags in enumerate(columns)
        )

    def grow(self, row: Row, wanted: Reservation, columns: list[list[bool]]) -> list[TableChange]:
        """Extend tables; there is enough room."""
        changes = []
        for g, flags in enumerate(columns):
            table, first = row.tables[g], len(row.tables[g])
            spares = self.spares(g, row, wanted)[: sum(flags)]
            new = [table[i] for i in spares]
            for i in spares:
                table[i] = None
            new += self.take(sum(flags) - len(new))
            table += [new.pop(0) if flag else None for flag in flags]
            if flags:
                changes.append(TableChange(g, first, ids_of(table[first:])))
        self.note_end(row, wanted)
        return changes

    def note_end(self, row: Row, wanted: Reservation) -> None:
        """Record where a forward's own tokens end, if there are any; records of forwards after its
        start become void."""
        size, newest = self.hash_block_size, wanted.newest_state
        start, is_first = wanted.num_computed_tokens, True
        if newest is not None and newest.num_own_tokens >= 0:
            start, is_first = newest.num_own_tokens + newest.num_accepted_drafts, False
        end = wanted.own_end
        if end > start or (is_first and end == start):
            row.ends = {each for each in row.ends if each <= start // size}
            if end % size == 0:
                row.ends.add(end // size)

    def publish(self, row: Row, num_tokens: int) -> None:
        """Make the row's full units up to `num_tokens` hittable."""
        size = self.hash_block_size
        end = min(num_tokens, row.request.num_tokens) // size
        if not self.may_cache or row.is_mute or end <= row.num_units:
            return
        if self.step is not None:
            self.num_published += 1
            row.published.append(Published(self.step, row.num_units, end, self.num_published))
        place, made = self.place_of(row.request, end), []
        for units in range(row.num_units + 1, end + 1):
            row.place = Place(place.namespace, place.units[:units])
            for g, group in enumerate(self.groups):
                column, rest = divmod(units * size, group.block_size)
                is_kept = not group.states or units in row.ends
                if rest or not is_kept or column > len(row.tables[g]):
                    continue
                content = Content(g, row.place)
                mine, cached = row.tables[g][column - 1], self.find(content)
                if mine is None or mine is cached:
                    continue
                if cached is not None and not self.keeps_copies:
                    if group.is_ordered:
                        self.hold(cached)
                        row.twins[g, column - 1] = cached
                elif mine.content is None:
                    mine.content, mine.waits_for = content, self.step
                    self.cached.append(mine)
                    made.append(mine)
        if self.step is None:
            self.seal(made, None)

    def commit(self, request: Request, num_tokens: int) -> None:
        row = self.rows.get(request.request_id)
        if row is not None:
            self.publish(row, num_tokens)

    def free(self, request: Request) -> None:
        row = self.rows.pop(request.request_id, None)
        if row is None:
            return
        for g, index in self.tail_first(row.tables):
            block = row.tables[g][index]
            assert block is not None
            twin = row.twins.get((g, index))
            self.release([block] if twin is None else [twin, block])

    def free_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.free(request)

    def forget_hashes(self, request: Request) -> None:
        if request.request_id in self.rows:
            self.rows[request.request_id].is_mute = True

    # --- forks ---

    def fork(
        self, parent: Request, child: Request, num_tokens: int, newest: NewestState
    ) -> list[TableChange]:
        source = self.rows[parent.request_id]
        units = num_tokens // self.hash_block_size
        if source.num_units > units:
            self.rewind(source, units)
            source.ends = {end for end in source.ends if end <= units}
        tables: list[list[Block | None]] = []
        in_parent, in_child = dict(source.shared), {}
        for g, (group, table) in enumerate(zip(self.groups, source.tables, strict=True)):
            column = of_child = num_tokens // group.block_size
            if group.is_cross:
                tables.append(list(table))
                continue
            if group.states and num_tokens:
                column = group.column(newest.num_own_tokens) + newest.num_accepted_drafts
                of_child = group.column(num_tokens)
                tables.append([None] * of_child + [table[column]])
            else:
                tables.append(table[: -(-num_tokens // group.block_size)])
            if of_child < len(tables[g]) and tables[g][of_child] is not None:
                in_child[g, of_child] = num_tokens
                in_parent[g, column] = min(in_parent.get((g, column), num_tokens), num_tokens)
        place = Place(source.place.namespace, source.place.units[:units])
        row = Row(child, source.num_encoder, tables, place, is_mute=source.is_mute)
        for (g, index), twin in source.twins.items():
            if (index + 1) * self.groups[g].block_size <= row.num_units * self.hash_block_size:
                row.twins[g, index] = twin
        for block in [b for table in tables for b in table if b is not None]:
            self.hold(block)
        for twin in row.twins.values():
            self.hold(twin)
        self.rows[child.request_id] = row
        if in_child:
            source.shared, row.shared = in_parent, in_child
        return [TableChange(g, 0, ids_of(table)) for g, table in enumerate(tables) if table]

    def due_copies(self, row: Row, wanted: Reservation) -> list[Column]:
        """The shared columns that a forward writes although others read them."""
        due = []
        for (g, index), num_tokens in row.shared.items():
            block, group = row.tables[g][index], self.groups[g]
            is_written = wanted.num_slot_tokens > num_tokens and (
                not group.states or index >= group.column(wanted.own_end)
            )
            if not is_written or block is None:
                continue
            if block.content is not None or self.is_held_elsewhere(block):
                due.append((g, index))
        return due

    def is_held_elsewhere(self, block: Block) -> bool:
        return block.references - self.copied[block] > 1

    def copy(self, row: Row, wanted: Reservation, due: list[Column]) -> list[TableChange]:
        changes = []
        for (g, index), new in zip(due, self.take(len(due)), strict=True):
            old = row.tables[g][index]
            assert old is not None
            if self.has_workers:
                for block in (old, new):
                    self.hold(block)
                    self.copied[block] += 1
                self.copies.append((old, new))
            row.tables[g][index] = new
            self.release([old])
            changes.append(TableChange(g, index, int32_array([new.id])))
        for (g, index), num_tokens in list(row.shared.items()):
            block = row.tables[g][index]
            is_read = block is not None and self.is_held_elsewhere(block)
            if wanted.num_slot_tokens > num_tokens and not is_read:
                del row.shared[g, index]
        return changes

    # --- contents by name ---

    def pin(self, hit: CacheHit) -> None:
        for block in self.hit_blocks(hit):
            self.hold(block)
            self.pins[block] += 1

    def unpin(self, hit: CacheHit) -> None:
        blocks = self.hit_blocks(hit)
        self.pins -= Counter(blocks)
        self.release(blocks)

    def hit_blocks(self, hit: CacheHit) -> list[Block]:
        tables = [[self.blocks[b] if b else None for b in ids.tolist()] for ids in hit.block_ids]
        return [self.blocks[int(hit.block_ids[g][i])] for g, i in self.tail_first(tables)]

    def evict(self, block_ids: Sequence[int]) -> None:
        bad = [b for b in block_ids if not 0 <= b < len(self.blocks)]
        if bad:
            raise BlockError(f"blocks {bad[:5]} do not exist: ids are below {len(self.blocks)}")
        chosen = [self.blocks[b] for b in dict.fromkeys(block_ids)]
        before = list(self.cached)
        for is_ordered in (False, True):
            for g, group in enumerate(self.groups):
                if group.is_ordered is is_ordered:
                    forget = self.forget_behind if is_ordered else self.forget_in_group
                    forget([b for b in chosen if b.content is not None and b.content.group == g])
        lost = {block for block in before if block.content is None}
        for row in self.rows.values():
            row.is_mute |= any(block in lost for table in row.tables for block in table)

    def reset(self) -> int:
        in_use = len(self.blocks) - 1 - self.num_free_blocks()
        if in_use:
            return in_use
        self.empty()
        return 0

    def forget_all(self) -> None:
        self.empty()
        for row in self.rows.values():
            row.is_mute = True

    def empty(self) -> None:
        sealed = [block.id for block in self.cached if block.waits_for is None]
        if sealed and self.has_workers:
            self.commands.append(Unlabel(int32_array(sealed)))
        for row in self.rows.values():
            self.rewind(row, 0)
            row.published.clear()
        for block in self.cached:
            block.content = block.waits_for = None
        self.blank += self.unheld
        self.cached, self.unheld = [], []
        self.emit(AllBlocksCleared())
        self.hits_stopped = False

    def stop_hits(self) -> None:
        self.hits_stopped = True

    # --- events and commands ---

    def take_commands(self) -> list[Command]:
        commands, self.commands = self.commands, []
        if self.zeroed:
            commands.append(Zero(int32_array(self.zeroed)))
        sources: dict[int, int] = {}
        for old, new in self.copies:
            origin = sources.get(old.id, old.id)
            if origin != new.id:
                sources.setdefault(new.id, origin)
        if sources:
            commands.append(Copy(int32_array(list(sources.values())), int32_array(list(sources))))
        self.zeroed, self.copies = [], []
        copied, self.copied = list(self.copied.elements()), Counter()
        self.release(copied)
        return commands

    def digest(self, place: Place) -> BlockHash:
        if not place.units:
            return self.none_hash
        if place not in self.digests:
            parent, (tokens, keys) = self.digest(place.before(1)), place.units[-1]
            self.digests[place] = hash_block_tokens(self.hash_fn, parent, tokens, keys)
        return self.digests[place]

    def tell_sealed(self, block: Block) -> None:
        g, place = self.content(block)
        size = self.groups[g].block_size
        length = size // self.hash_block_size
        digest, parent = self.digest(place), self.digest(place.before(length))
        units = place.units[-length:]
        tokens = int32_array([token for own, _ in units for token in own])
        keys = self.joined_keys([keys for _, keys in units])
        if self.has_workers:
            self.commands.append(
                Label(
                    block_ids=int32_array([block.id]),
                    groups=int32_array([g]),
                    slots=int32_array([-1]),
                    digests=digest,
                    parent_digests=parent,
                    token_counts=int32_array([size]),
                    token_ids=tokens,
                    namespaces=int32_array([0]),
                    namespace_names=(namespace_name(place.namespace),),
                    extra_keys={0: extra_keys_bytes(keys)} if keys else {},
                )
            )
        if g in self.told:
            above = None if parent == self.none_hash else parent
            extra = (keys,) if keys else ()
            self.emit(
                BlocksStored(g, "device", (digest,), above, tokens, size, place.namespace, extra)
            )

    def joined_keys(self, keys: Sequence[ExtraKeys]) -> ExtraKeys | None:
        """The extra keys of a block of several units: adapter, multimodal items, salt."""
        found: dict[Any, None] = {}
        for number, each in enumerate(keys):
            for key in each:
                is_item = len(key) == 3 and key[0] == "mm"
                start = number * self.hash_block_size
                found[("mm", key[1], int(key[2]) + start) if is_item else key] = None
        order = ("lora", "mm", "cache_salt")
        return tuple(sorted(found, key=lambda key: order.index(key[0]))) or None

    def tell_gone(self, block: Block) -> None:
        g, place = self.content(block)
        if self.has_workers:
            self.commands.append(Unlabel(int32_array([block.id])))
        if g in self.told:
            self.emit(BlocksRemoved(g, "device", (self.digest(place),)))

    # --- statistics ---

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        row = self.rows.get(request_id)
        tables = [[] for _ in self.groups] if row is None else row.tables
        return tuple([ids_of(table).tolist() for table in tables])

    def common_prefix_blocks(self, request_id: str, num_running_requests: int) -> list[int]:
        held = Counter(b for row in self.rows.values() for table in row.tables for b in table)
        counts = []
        for g, group in enumerate(self.groups):
            count, row = 0, self.rows.get(request_id)
            table = row.tables[g] if row is not None and group.is_ordered else []
            while count < len(table) and held[table[count]] == num_running_requests:
                count += 1
            counts.append(count)
        return counts

    def sealed_contents(self) -> SealedContents:
        sealed = [block for block in self.cached if block.waits_for is None]
        contents = [self.content(block) for block in sealed]
        return sorted_contents(
            int32_array([block.id for block in sealed]),
            int32_array([content.group for content in contents]),
            b"".join(self.digest(content.place) for content in contents),
            self.hash_fn.digest_bytes,
        )

    def usage(self) -> float:
        total = len(self.blocks) - 1
        return 1.0 - self.num_free_blocks() / total if total else 0.0

    def statistics(self) -> CoreStatistics:
        in_tables = [b for row in self.rows.values() for table in row.tables for b in table if b]
        return CoreStatistics(
            num_blocks=len(self.blocks) - 1,
            num_free_blocks=self.num_free_blocks(),
            num_cached_blocks=len(self.cached),
            num_sealed_blocks=sum(block.waits_for is None for block in self.cached),
            num_pinned_blocks=len(self.pins),
            num_in_flight_blocks=0,
            num_quarantined_blocks=0,
            num_evictions=self.num_evicted,
            references={
                "pin": self.pins.total(),
                "fork": self.copied.total(),
                "transfer": 0,
                "request": len(in_tables),
            },
            num_merged_blocks=self.num_merged,
            merged_bytes=self.num_merged * self.block_bytes,
        )

    def check(self) -> None:
        """Check that every reference to a block belongs to a row or a pin."""
        held: Counter[Block] = self.pins + self.copied
        for row in self.rows.values():
            held.update(block for table in row.tables for block in table if block is not None)
            held.update(row.twins.values())
        for block in self.blocks[1:]:
            assert block.references == held[block]
            assert (block in self.cached) == (block.content is not None)
            assert (block in self.unheld) == (not block.references and block.content is not None)
            assert (block in self.blank) == (not block.references and block.content is None)
        contents = [block.content for block in self.cached]
        assert self.keeps_copies or len(set(contents)) == len(contents)

    def dump_state(self) -> dict[str, object]:
        """Return the whole state, to see whether anything has changed."""
        return {
            "blocks": [(b.references, b.content, b.waits_for) for b in self.blocks],
            "order": [b.id for b in self.unheld],
            "rows": {
                name: (self.block_ids(name), row.place, sorted(row.ends), row.is_mute)
                for name, row in self.rows.items()
            },
            "step": self.step,
        }


def ids_of(table: Sequence[Block | None]) -> Any:
    return int32_array([0 if block is None else block.id for block in table])


def make_slow_core(settings: CoreSettings, core_class: type[SlowCore] = SlowCore) -> Any:
    """Make a slow core with the arguments of a manager."""
    if settings.tenants is not None:
        raise RequestError("the slow core knows no tenants: walk without them")
    config = settings.kv_cache_config
    return core_class(
        config.num_blocks,
        [group_of(group.kv_cache_spec) for group in config.kv_cache_groups],
        none_hash=settings.none_hash,
        hash_fn=settings.hash_fn,
        use_eagle=settings.use_eagle,
        enable_caching=settings.enable_caching,
        events=settings.events,
        zero_new_blocks=settings.zero_new_blocks,
        has_workers=settings.has_workers,
        merge_duplicates=settings.merge_duplicates,
        publish_all_groups=settings.publish_all_groups,
    )
