"""The columns: the whole state of a core in a few numpy arrays, which kernels read and write.

A *unit* is a hash block: its length divides every group's block size. A *node* is a place in the
prefix tree: one unit that continues its parent. A *block* is a page of device memory. A node has at
most one block per KV cache group, and only where a block of that group ends. A *row* is a running
request. A *prefix group* reads the whole prefix (full attention); all others are *windowed groups*
(windows, chunks, states).

    block[b]    REF PREV NEXT NODE                  references; the free list; the node it caches
    node[n]     PARENT CHILD CHILDREN ROWS KEYS     | BLOCK OWNER for each group
    tokens[n]   the unit's tokens                   digest[n]   its digest, once it is needed
    index       open addressing: (parent, keys, tokens) -> node, for all children but CHILD
    row[r]      UNITS LAST ROOT FLAGS ...           | COLUMNS KEPT for each group
    table[r, g] the row's blocks, column by column

Invariants, which `audit.py` checks one by one:

- Block 0 is the null block and the head of the free list. Blocks without content come first. Cached
  blocks follow, the next victim first, unless a policy orders them. `number[FREE]` counts both.
- `block[b, NODE] == n` exactly if `node[n, BLOCK + 2 * g] == b` for one group `g`.
- A node lives while it has a block, a child, or a row whose newest node it is (ROWS). So the
  ancestors of a node always live, and a node may outlive its own block. Number 0 is no node.
- If a node has its digest, so has its parent.
- A row that references a block of a prefix group also references that group's blocks before it. If
  a row computed content that was cached already, it keeps its own block and also references the
  cached one.
- A block that a step made hittable carries the step's serial in OWNER (0: no step). It is sealed
  when `SEALED_BELOW` or the step's entry in `client` says so. So sealing a step writes one number.

Kernels get all columns as the address of one table of addresses and shapes, because numba needs
longer to inspect an array argument than most kernels run. Kernels compare and copy digests and
tokens as bytes. They do not check indices: callers validate whatever comes from outside the core.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Sequence
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.compiled import IS_PLAIN
from kvcache.base.errors import ConfigurationError
from kvcache.core.kinds.registry import rule_of
from kvcache.core.kinds.rule import NUM_ENTRIES
from kvcache.core.machine import columns_at
from kvcache.core.names import *
from kvcache.specs import KVCacheSpec

_FEW_ROWS, _FEW_COLUMNS, _FEW_INDEXED = 32, 64, 1024


class BlockAges:
    """Counts how long cached blocks have been unused when they are hit, and when evicted.

    Kernels count into `table`, shape `(3, bounds + 2)`; see AGE_BOUNDS. `idle_since[b]` is the time
    since when block `b` of the newest pool is cached and unused, or -1. Set the time before every
    change. One owner, one thread.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """Start with counts of 0. `bounds_s` must rise."""
        self.table = np.zeros((3, len(bounds_s) + 2))
        self.table[AGE_BOUNDS, :-1] = [*bounds_s, np.inf]
        self.idle_since = np.zeros(0)

    def set_time(self, now_s: float) -> None:
        """Set the current time, in seconds."""
        self.table[AGE_BOUNDS, -1] = now_s

    def watch(self, num_blocks: int) -> Any:
        """Return `idle_since` for a new pool, whose blocks are all free and without content."""
        self.idle_since = np.full(num_blocks, -1.0)
        return self.idle_since


class Columns(NamedTuple):
    """All columns, in the order of the address table. `G` is the number of groups."""

    number: Any  # int64 (NUM_NUMBERS,)
    block: Any  # int32 (blocks, 4)
    node: Any  # int32 (nodes, 5 + 2 * G)
    tokens: Any  # int32 (nodes, unit)
    digest: Any  # uint8 (nodes, digest bytes)
    name: Any  # int64 (nodes,): with a policy, a hash of the node's whole prefix
    mark: Any  # uint8 (nodes,): scratch, 0 between calls
    index: Any  # int32 (power of two,): at most half full, so that every search ends
    row: Any  # int32 (rows, 10 + 2 * G)
    table: Any  # int32 (rows * G, columns): row r * G + g
    group: Any  # int32 (G, NUM_ENTRIES): the rule of each, see kinds/rule.py
    client: Any  # int32 (NUM_STEPS,): the client of each serial's step; 0: it is sealed
    found: Any  # int32 (G, columns): the blocks of the last look-up
    path: Any  # int32 (units,): the nodes of the last look-up
    change: Any  # int32 (4, changes): slot, group, first column, count of what entered tables
    ids: Any  # int32 (ids,): the blocks of all changes; negative: moved within the row
    note: Any  # int32 (blocks, 5): node, group, row, generation, root of what became hittable
    gone: Any  # int32 (blocks, 2): block and group of forgotten sealed contents
    gone_digest: Any  # uint8 (blocks, digest bytes)
    moved: Any  # int32 (4 * blocks, 2): what happened, and to which cached block
    tail: Any  # uint8 (bytes,): the hashed bytes of extra keys
    tail_at: Any  # int64 (keys, 2): first byte and number of bytes, by number of extra keys
    word: Any  # int64 (6,): addresses of hash functions
    forward: Any  # int32 (rows, ENDS + columns where states are cached)
    since: Any  # float64 (blocks,): when cached blocks became unused, else -1; or (0,)
    ages: Any  # float64 (3, bounds + 2): see BlockAges


_LINES = ("number", "name", "mark", "index", "client", "path", "ids", "tail", "word", "since")
_DTYPES = {
    **dict.fromkeys(("number", "name", "tail_at", "word"), "int64"),
    **dict.fromkeys(("digest", "mark", "gone_digest", "tail"), "uint8"),
    **dict.fromkeys(("since", "ages"), "float64"),
}


def _part(name: str, columns: str) -> Any:
    """Return a function that gives kernels these columns behind an address, as a named tuple."""
    part = namedtuple(name, columns)  # type: ignore[misc]  # its names are a parameter
    places = [
        (Columns._fields.index(column), _DTYPES.get(column, "int32"), 1 if column in _LINES else 2)
        for column in columns.split()
    ]
    return columns_at(part, places)


def _same(core: Any) -> Any:
    return core


columns_of: Any = _same
search_of: Any = _same
logs_of: Any = _same
"""The columns behind an address, in three parts, because each costs compile time: those that nearly
every function needs; those that find nodes, say which client sees them, and record ends of
forwards; and the logs that Python reads, with the inputs of digests."""
if not IS_PLAIN:
    columns_of = _part("State", "number block node tokens row table group")
    search_of = _part("Search", "digest name mark index client found path forward")
    logs_of = _part("Logs", "change ids note gone gone_digest moved tail tail_at word since ages")


class ColumnStore:
    """Allocates the columns of one core and enlarges them.

    `address` is what kernels get; in plain mode it is the columns themselves. It changes whenever
    an array grows, so read it for each call.
    """

    def __init__(
        self,
        num_blocks: int,
        specs: Sequence[KVCacheSpec],
        digest_bytes: int,
        *,
        use_eagle: bool = False,
        ages: BlockAges | None = None,
    ) -> None:
        """Allocate the columns of a pool of free blocks. `ages` counts the ages of its blocks.

        Raises:
            ConfigurationError: there is no block, or a kind of group has no rule.
        """
        if num_blocks < 1:
            raise ConfigurationError(
                f"a pool of {num_blocks} blocks has no room for the null block: use at least 1"
            )
        sizes = [spec.block_size for spec in specs]
        self.unit_tokens = unit_tokens = gcd(*sizes) or 1
        self.num_groups = len(specs)
        self.keeps_states = any(spec.num_state_blocks is not None for spec in specs)
        self._has_ends = any(
            spec.num_state_blocks is not None and spec.can_prefix_cache for spec in specs
        )
        self._extra_columns = max((spec.num_state_blocks or 0 for spec in specs), default=0)
        width = 2 * self.num_groups
        most_units = max((spec.block_size // unit_tokens for spec in specs), default=1)
        # A prompt's nodes are added before the old contents of its blocks are forgotten. Unused
        # nodes take no memory, but adding nodes later copies all of them.
        num_nodes = num_blocks + num_blocks // 4 + 64
        has_prefix_groups = any(spec.reads_whole_prefix for spec in specs)
        units_per_block = 512 if self.keeps_states and not has_prefix_groups else 8 * most_units
        self.max_nodes = units_per_block * num_blocks + 4096
        """The most nodes there may be. Nodes can outlive their blocks; at the limit the core
        forgets the oldest cached blocks. One state may stand for all tokens of a long chunk."""
        int32 = np.int32
        group = np.array([rule_of(spec, unit_tokens) for spec in specs], int32)
        self.columns = c = Columns(
            number=np.zeros(NUM_NUMBERS, np.int64),
            block=np.zeros((num_blocks, 4), int32),
            node=np.zeros((num_nodes, 5 + width), int32),
            tokens=np.zeros((num_nodes, unit_tokens), int32),
            digest=np.zeros((num_nodes, digest_bytes), np.uint8),
            name=np.zeros(num_nodes, np.int64),
            mark=np.zeros(num_nodes, np.uint8),
            index=np.zeros(_FEW_INDEXED, int32),
            row=np.zeros((_FEW_ROWS, COLUMNS + width), int32),
            table=np.zeros((_FEW_ROWS * self.num_groups, _FEW_COLUMNS), int32),
            group=group.reshape(-1, NUM_ENTRIES),
            client=np.zeros(NUM_STEPS, int32),
            found=np.zeros((self.num_groups, _FEW_COLUMNS), int32),
            path=np.zeros(_FEW_COLUMNS, int32),
            change=np.zeros((4, max(1, _FEW_ROWS * self.num_groups)), int32),
            ids=np.zeros(2 * (num_blocks + _FEW_COLUMNS * self.num_groups), int32),
            note=np.zeros((num_blocks, 5), int32),
            gone=np.zeros((num_blocks, 2), int32),
            gone_digest=np.zeros((num_blocks, digest_bytes), np.uint8),
            moved=np.zeros((4 * num_blocks, 2), int32),
            tail=np.zeros(1, np.uint8),
            tail_at=np.zeros((1, 2), np.int64),
            word=np.zeros(6, np.int64),
            forward=np.zeros((_FEW_ROWS, ENDS + self._has_ends * _FEW_COLUMNS), int32),
            since=np.zeros(0) if ages is None else ages.watch(num_blocks),
            ages=np.zeros((3, 2)) if ages is None else ages.table,
        )
        number = c.number
        number[NEXT_NODE] = number[SEALED_BELOW] = 1
        number[SEED] = int.from_bytes(os.urandom(7), "little")
        number[STEP_TOKENS], number[IS_EAGLE] = lcm(*sizes), use_eagle
        number[NUM_PREFIX_GROUPS] = sum(spec.reads_whole_prefix for spec in specs)
        number[FREE] = number[BLANK] = num_blocks - 1
        ids = np.arange(num_blocks, dtype=int32)
        c.block[:, NEXT], c.block[:, PREV] = np.roll(ids, -1), np.roll(ids, 1)
        self.cells = number.data
        """`number` as a memoryview, which Python reads and writes faster."""
        self.num_reached = len(c.path) - self._extra_columns
        """How many units tables and look-ups have room for."""
        self.free_rows = list(range(_FEW_ROWS - 1, -1, -1))
        self.address: Any = None
        self._bind()

    def replace(self, **arrays: Any) -> None:
        """Replace some columns by other arrays."""
        self.columns = self.columns._replace(**arrays)
        self._bind()

    def more_rows(self) -> None:
        """Double the number of rows. The new ones are taken last."""
        c = self.columns
        old, new = len(c.row), 2 * len(c.row)
        change = np.zeros((4, max(c.change.shape[1], 2 * new * self.num_groups)), np.int32)
        change[:, : c.change.shape[1]] = c.change
        self.replace(
            row=grown(c.row, new),
            table=grown(c.table, new * self.num_groups),
            forward=grown(c.forward, new),
            change=change,
        )
        self.free_rows = [*range(new - 1, old - 1, -1), *self.free_rows]

    def reach_units(self, num_units: int) -> None:
        """Make room for `num_units` units in tables and look-ups."""
        num_units += self._extra_columns
        if num_units <= len(self.columns.path):
            return
        c = self.columns
        width = max(num_units, 2 * len(c.path))
        # Not a power of two: such lines would share the same few sets of the processor's cache.
        width += 16 - width % 16 + 16 * (not width & (width - 1))
        in_use = int(c.row[:, COLUMNS::2].max(initial=0)) if self.num_groups else 0
        table = np.zeros((c.table.shape[0], width), np.int32)
        table[:, :in_use] = c.table[:, :in_use]
        self.replace(
            table=table,
            found=grown(c.found, self.num_groups, width),
            path=grown(c.path, width),
            forward=grown(c.forward, len(c.forward), ENDS + self._has_ends * width),
        )
        self.num_reached = width - self._extra_columns
        self.reach_changes(width * self.num_groups)

    def reach_changes(self, num_columns: int) -> None:
        """Make room in `ids` for `num_columns` table columns and all blocks."""
        wanted = 2 * (num_columns + len(self.columns.block))
        if wanted > len(self.columns.ids):
            self.replace(ids=grown(self.columns.ids, wanted))

    def reach_nodes(self, num_more: int) -> bool:
        """Make room for `num_more` nodes, up to `max_nodes`; return whether they fit."""
        c, cells, size = self.columns, self.cells, len(self.columns.node)
        lacking = num_more - cells[NUM_SPARE] - size + cells[NEXT_NODE]
        if lacking <= 0:
            return True
        wanted = min(max(size + lacking, size + size // 2), self.max_nodes)
        if wanted > size:
            self.replace(
                node=grown(c.node, wanted),
                tokens=grown(c.tokens, wanted),
                digest=grown(c.digest, wanted),
                name=grown(c.name, wanted),
                mark=grown(c.mark, wanted),
            )
        return lacking <= wanted - size

    def table(self, r: int, g: int) -> Int32Array:
        """Return a view of a row's table of one group."""
        c = self.columns
        table: Int32Array = c.table[r * self.num_groups + g, : c.row.item(r, COLUMNS + 2 * g)]
        return table

    def blocks_in_tables(self) -> Int32Array:
        """Return how many rows have each block in their tables. O(rows)."""
        held = np.zeros(len(self.columns.block), np.int32)
        for r in np.flatnonzero(self.columns.row[:, FLAGS] & IS_OPEN).tolist():
            for g in range(self.num_groups):
                held[self.table(r, g)] += 1
        held[0] = 0
        return held

    def contents(self) -> list[tuple[int, int, int, bool]]:
        """Return node, group, block and whether it is sealed, for all cached blocks."""
        c = self.columns
        node = c.node[: c.number[NEXT_NODE]]
        nodes, groups = np.nonzero(node[:, BLOCK::2])
        blocks, owners = node[nodes, BLOCK + 2 * groups], node[nodes, OWNER + 2 * groups]
        is_sealed = (owners < c.number[SEALED_BELOW]) | (c.client[owners & (NUM_STEPS - 1)] == 0)
        columns = nodes, groups, blocks, is_sealed
        return list(zip(*[column.tolist() for column in columns], strict=True))

    def root_of(self, n: int) -> int:
        """Return the root above a node."""
        node = self.columns.node
        while parent := node.item(n, PARENT):
            n = parent
        return n

    def _bind(self) -> None:
        c = self.columns
        if IS_PLAIN:
            self.address = c
            return
        entries = np.zeros((len(c), 3), np.int64)
        for i, column in enumerate(c):
            entries[i, 0] = column.ctypes.data
            entries[i, 1 : 1 + column.ndim] = column.shape
        self._entries = entries.reshape(-1)  # kept alive: the address points to it
        self.address = entries.ctypes.data


def grown(column: Any, *shape: int) -> Any:
    """Return a larger column that begins with this one. Dimensions that are not given stay."""
    longer = np.zeros((*shape, *column.shape[len(shape) :]), column.dtype)
    longer[tuple(map(slice, column.shape))] = column
    return longer
