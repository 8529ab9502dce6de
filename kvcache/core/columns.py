"""The columns: all state of a flat core, as a few arrays that compiled functions walk over.

A *node* is one place in the prefix tree: the tokens of one unit behind one parent. A *unit* is as
many tokens as divide every group's block size. A *block* is a page of device memory; a node has at
most one for each KV cache group, where a block of that group ends. A *row* is a running request.

    block[b]    REF PREV NEXT NODE                  holders; the list of free blocks; what it caches
    node[n]     PARENT CHILD CHILDREN STANDING KEYS | BLOCK OWNER for each group
    tokens[n]   the unit's tokens                   digest[n]   its digest, once somebody needed it
    index       open addressing: (parent, keys, tokens) -> node, for all children but one
    row[r]      UNITS LAST ROOT FLAGS ...           | COLUMNS KEPT for each group
    table[r, g] the row's blocks, column by column

Invariants, which `audit.py` checks one by one:

- Block 0 is the null block, and the head of the list of free blocks: those without content first,
  then, unless a policy orders them, cached ones, the next victim first. `number[FREE]` counts both.
- `block[b, NODE] == n` exactly if `node[n, BLOCK + 2 * g] == b` for one group `g`.
- A node lives while it has a block, a child, or a row that stands on it (STANDING); then its
  ancestors live, too. So a node may outlive its own block. Number 0 is no node.
- A node that has its digest continues one that has its own.
- Whoever holds a block of an ordered group (full attention) holds those of that group before it:
  a row that computed again what is cached keeps its own block, and holds the cached one besides.
- What was made hittable in a step carries the step's serial in OWNER (0: in none). It is sealed
  when `SEALED_BELOW` or the step's entry in `client` says so: sealing writes one number.

Kernels get all columns as one array of addresses and shapes: numba takes longer to look at an array
that it is handed than most kernels take. Rows of digests and tokens are compared and copied as
bytes. Refuses to check indices: they come from these books; what comes from outside is checked
before it gets here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcache.base.compiled import IS_PLAIN
from kvcache.base.errors import ConfigurationError
from kvcache.core.kinds.registry import rule_of
from kvcache.core.kinds.rule import NUM_ENTRIES
from kvcache.core.machine import columns_at
from kvcache.specs import KVCacheSpec

REF, PREV, NEXT, NODE = range(4)
"""Of a block: who holds it, counted; its neighbours in the list of free blocks; what it caches."""

PARENT, CHILD, CHILDREN, ROWS, KEYS, BLOCK, OWNER = range(7)
"""Of a node. CHILD is one of its children, found without a search; STANDING counts the rows whose
newest unit it is; KEYS is twice the number of its extra keys, plus one once its digest is there.
BLOCK and OWNER of group `g` are `2 * g` further."""

UNITS, LAST, ROOT, FLAGS, DUPLICATES, CAPACITY, SKIP_AT, GENERATION = range(8)
FIRST_KEYS, OTHER_KEYS, COLUMNS, KEPT = range(8, 12)
"""Of a row: units in the tree, the node of the newest, its namespace's root; flags; units whose
content the tree has in another block; tokens for which it has slots; computed tokens from which on
something is skipped; how many requests had the row before. Extra keys of its first unit, and of
those without multimodal items. COLUMNS and KEPT of group `g` are `2 * g` further: the length of its
table, and how many leading columns are null."""

OWN_END, LAST_END, ACCEPTED, NUM_ENCODER, ENDS = range(5)
"""Of a row's forwards: own tokens behind the one that is reserved for; those behind the one before,
-1 where there was none, and how many of its drafts were accepted; tokens of the encoder. From ENDS
on, unit by unit, whether a forward's own tokens ended right behind it."""

IS_OPEN, NO_CACHING, IS_SHARING, HAS_ITEMS = 1, 2, 4, 8
"""Flags of a row: in use; caches nothing more; may write blocks that others hold; has multimodal
items."""

(
    FREE, BLANK, NEXT_NODE, SPARE_NODE, NUM_SPARE, SERIAL, SEALED_BELOW, EVICTED, SEED, NUM_INDEXED,
    NUM_CHANGES, NUM_IDS, NUM_NOTES, NUM_GONE, NUM_MOVED, STEP_TOKENS, IS_EAGLE, NUM_PREFIX_GROUPS,
    HAS_POLICY, LOGS_GONE, IS_FULL, OPENED, ROOM, HAS_GAPS, NUM_NUMBERS,
) = range(25)  # fmt: skip
"""Entries of `number`: free blocks, and those of them without content; the first node never used,
the chain of nodes given back and its length; the open step's serial (0: none), and that below which
all are sealed; blocks evicted; what nobody outside knows of hashes in `index`, and its entries;
lengths of the logs; tokens of which hits are a multiple; whether hits drop their last block; groups
that read the whole prefix; whether a policy orders cached blocks (2: one for each tenant); whether
`gone` is wanted; whether a log was too short; the first serial of the open step; with tenants, how
many blocks more the one that is served may hold; whether somebody may hold a block of an ordered
group and not those before it."""

INSERTED, REMOVED, DISCARDED, BLANKED = range(4)
"""What a policy is told of a cached block in `moved`: out of use, used again, content forgotten.
With tenants also which block nobody holds any more and has no content."""

NUM_STEPS = 4096
"""Serials that may be open at once, a power of two."""

_FEW_ROWS, _FEW_COLUMNS, _FEW_INDEXED = 32, 64, 1024


AGE_BOUNDS, AT_HIT, AT_EVICTION = range(3)
"""Lines of `ages`: upper bounds, the last one infinite, and what time it is; how many cached blocks
were at most so old when they were hit, and the sum of all; the same when they were evicted."""


class BlockAges:
    """Counts how long cached blocks have been out of use when they are hit, and when evicted.

    Kernels count, by bucket, into `table`, shape `(3, bounds + 2)`, see AGE_BOUNDS. `idle_since`
    says since when each cached block of the newest pool is out of use, -1 for all other blocks.
    The owner sets the time before anything changes. One owner, one thread.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """Count nothing yet. `bounds_s` rise."""
        self.table = np.zeros((3, len(bounds_s) + 2))
        self.table[AGE_BOUNDS, :-1] = [*bounds_s, np.inf]
        self.idle_since = np.zeros(0)

    def set_time(self, now_s: float) -> None:
        """Say what time it is."""
        self.table[AGE_BOUNDS, -1] = now_s

    def watch(self, num_blocks: int) -> Any:
        """Return the column for a new pool, whose blocks are all free and hold nothing."""
        self.idle_since = np.full(num_blocks, -1.0)
        return self.idle_since


class Columns(NamedTuple):
    """All there is, in the order of the address book. Shapes; `G` is the number of groups."""

    number: Any  # int64 (NUM_NUMBERS,)
    block: Any  # int32 (blocks, 4)
    node: Any  # int32 (nodes, 5 + 2 * G)
    tokens: Any  # int32 (nodes, unit)
    digest: Any  # uint8 (nodes, digest bytes)
    mark: Any  # uint8 (nodes,): scratch, 0 between calls
    index: Any  # int32 (power of two,): at most half full, so that every search ends
    row: Any  # int32 (rows, 10 + 2 * G)
    table: Any  # int32 (rows * G, columns): row r * G + g
    group: Any  # int32 (G, 4): the rule of each, see kinds/rule.py
    client: Any  # int32 (NUM_STEPS,): whose step a serial is, 0: nobody's, sealed
    found: Any  # int32 (G, columns): the blocks of the last look-up
    path: Any  # int32 (units,): the nodes of the last look-up
    change: Any  # int32 (4, changes): slot, group, first column, count of what entered tables
    ids: Any  # int32 (ids,): the blocks of all changes; negative: the row had it before
    note: Any  # int32 (blocks, 5): node, group, row, generation, root of what became hittable
    gone: Any  # int32 (blocks, 2): block and group of sealed contents that were forgotten
    gone_digest: Any  # uint8 (blocks, digest bytes)
    moved: Any  # int32 (4 * blocks, 2): what happened to cached blocks, and which
    tail: Any  # uint8 (bytes,): what extra keys add to hashed bytes
    tail_at: Any  # int64 (keys, 2): first byte and number of bytes, by number of extra keys
    word: Any  # int64 (6,): addresses of hash functions
    forward: Any  # int32 (rows, ENDS + columns where states are cached)
    since: Any  # float64 (blocks,): since when cached blocks are out of use, -1: others; or (0,)
    ages: Any  # float64 (3, bounds + 2): see BlockAges


class State(NamedTuple):
    """Of `Columns`, what nearly every function works on."""

    number: Any
    block: Any
    node: Any
    tokens: Any
    row: Any
    table: Any
    group: Any


class Search(NamedTuple):
    """Of `Columns`, what finds nodes, says for whom they are, and where forwards end."""

    digest: Any
    mark: Any
    index: Any
    client: Any
    found: Any
    path: Any
    forward: Any


class Logs(NamedTuple):
    """Of `Columns`, what Python is told, and what digests are made with."""

    change: Any
    ids: Any
    note: Any
    gone: Any
    gone_digest: Any
    moved: Any
    tail: Any
    tail_at: Any
    word: Any
    since: Any
    ages: Any


_LINES = ("number", "mark", "index", "client", "path", "ids", "tail", "word", "since")
_DTYPES = {
    **dict.fromkeys(("number", "tail_at", "word"), "int64"),
    **dict.fromkeys(("digest", "mark", "gone_digest", "tail"), "uint8"),
    **dict.fromkeys(("since", "ages"), "float64"),
}


def _part(part: Any) -> Any:
    """Return what gives kernels a part of the columns behind their book."""
    places = [
        (Columns._fields.index(name), _DTYPES.get(name, "int32"), 1 if name in _LINES else 2)
        for name in part._fields
    ]
    return columns_at(part, places)


def _same(core: Any) -> Any:
    return core


columns_of: Any = _same if IS_PLAIN else _part(State)
search_of: Any = _same if IS_PLAIN else _part(Search)
logs_of: Any = _same if IS_PLAIN else _part(Logs)
"""The columns behind the book that a kernel gets, in three parts: each costs time to compile."""


class ColumnStore:
    """The columns of one core, and the book that kernels get. Grows what must grow.

    `book` is another one after each growth: get it for each call.
    """

    def __init__(
        self,
        num_blocks: int,
        specs: Sequence[KVCacheSpec],
        unit_tokens: int,
        digest_bytes: int,
        *,
        use_eagle: bool,
        step_tokens: int,
        ages: BlockAges | None = None,
    ) -> None:
        """Make the books of a pool of free blocks; `ages` count those of its blocks.

        Raises:
            ConfigurationError: no block at all, or a kind that has no rule here.
        """
        if num_blocks < 1:
            raise ConfigurationError(
                f"a pool of {num_blocks} blocks has no room for the null block: use at least 1"
            )
        self.num_groups = len(specs)
        self.keeps_states = any(spec.num_state_blocks is not None for spec in specs)
        self._has_ends = any(
            spec.num_state_blocks is not None and spec.can_prefix_cache for spec in specs
        )
        self._extra_columns = max((spec.num_state_blocks or 0 for spec in specs), default=0)
        self.unit_tokens = unit_tokens
        width = 2 * self.num_groups
        most_units = max((spec.block_size // unit_tokens for spec in specs), default=1)
        # A prompt's nodes are made before what its blocks held is forgotten. Nodes that are never
        # used take no memory; more of them later are a copy of all.
        num_nodes = num_blocks + num_blocks // 4 + 64
        has_prefix_groups = any(spec.reads_whole_prefix for spec in specs)
        units_per_block = 512 if self.keeps_states and not has_prefix_groups else 8 * most_units
        self.max_nodes = units_per_block * num_blocks + 4096
        """Most nodes: where they outlive their blocks, what is oldest is forgotten for new ones.
        One state may stand for all tokens of a long chunk."""
        int32 = np.int32
        group = np.array([rule_of(spec, unit_tokens) for spec in specs], int32)
        self.columns = c = Columns(
            number=np.zeros(NUM_NUMBERS, np.int64),
            block=np.zeros((num_blocks, 4), int32),
            node=np.zeros((num_nodes, 5 + width), int32),
            tokens=np.zeros((num_nodes, unit_tokens), int32),
            digest=np.zeros((num_nodes, digest_bytes), np.uint8),
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
        number[STEP_TOKENS], number[IS_EAGLE] = step_tokens, use_eagle
        number[NUM_PREFIX_GROUPS] = sum(spec.reads_whole_prefix for spec in specs)
        number[FREE] = number[BLANK] = num_blocks - 1
        ids = np.arange(num_blocks, dtype=int32)
        c.block[:, NEXT], c.block[:, PREV] = np.roll(ids, -1), np.roll(ids, 1)
        self.cells = number.data
        """`number` once more: Python reads and writes a cell there in less time."""
        self.num_reached = len(c.path) - self._extra_columns
        """Units for which tables and look-ups have room."""
        self.free_rows = list(range(_FEW_ROWS - 1, -1, -1))
        self.address: Any = None
        self._bind()

    def replace(self, **arrays: Any) -> None:
        """Use other arrays for some columns from now on."""
        self.columns = self.columns._replace(**arrays)
        self._bind()

    def more_rows(self) -> None:
        """Make more free rows, which are taken behind those that are left."""
        c = self.columns
        old, new = len(c.row), 2 * len(c.row)
        changes = max(c.change.shape[1], 2 * new * self.num_groups)
        self.replace(
            row=_grown(c.row, new),
            table=_grown(c.table, new * self.num_groups),
            forward=_grown(c.forward, new),
            change=np.zeros((4, changes), np.int32),
        )
        self.free_rows = [*range(new - 1, old - 1, -1), *self.free_rows]

    def reach_units(self, num_units: int) -> None:
        """Make sure that tables and look-ups have room for so many units."""
        num_units += self._extra_columns
        if num_units <= len(self.columns.path):
            return
        c = self.columns
        width = max(num_units, 2 * len(c.path))
        width += 16 - width % 16 + 16 * (not width & (width - 1))  # powers of two share cache lines
        in_use = int(c.row[:, COLUMNS::2].max(initial=0)) if self.num_groups else 0
        table = np.zeros((c.table.shape[0], width), np.int32)
        table[:, :in_use] = c.table[:, :in_use]
        found = np.zeros((self.num_groups, width), np.int32)
        found[:, : c.found.shape[1]] = c.found
        path = np.zeros(width, np.int32)
        path[: len(c.path)] = c.path
        forward = np.zeros((len(c.forward), ENDS + self._has_ends * width), np.int32)
        forward[:, : c.forward.shape[1]] = c.forward
        self.replace(table=table, found=found, path=path, forward=forward)
        self.num_reached = width - self._extra_columns
        self.reach_changes(width * self.num_groups)

    def reach_changes(self, num_columns: int) -> None:
        """Make sure that so many columns can enter tables beside all blocks."""
        wanted = 2 * (num_columns + len(self.columns.block))
        if wanted > len(self.columns.ids):
            self.replace(ids=np.zeros(wanted, np.int32))

    def num_spare_nodes(self) -> int:
        """Return how many nodes could be made now."""
        return self.cells[NUM_SPARE] + len(self.columns.node) - self.cells[NEXT_NODE]

    def has_nodes(self, num_more: int) -> bool:
        """Say whether so many nodes could be made, and found, as the columns are."""
        cells, c = self.cells, self.columns
        return cells[NUM_SPARE] + len(c.node) - cells[NEXT_NODE] >= num_more and 2 * (
            cells[NUM_INDEXED] + num_more
        ) <= len(c.index)

    def reach_nodes(self, num_more: int) -> bool:
        """Make sure that so many nodes can be made; say whether that is possible."""
        lacking = num_more - self.num_spare_nodes()
        if lacking <= 0:
            return True
        c, size = self.columns, len(self.columns.node)
        wanted = min(max(size + lacking, size + size // 2), self.max_nodes)
        if wanted > size:
            self.replace(
                node=_grown(c.node, wanted),
                tokens=_grown(c.tokens, wanted),
                digest=_grown(c.digest, wanted),
                mark=_grown(c.mark, wanted),
            )
        return self.num_spare_nodes() >= num_more

    def _bind(self) -> None:
        c = self.columns
        if IS_PLAIN:
            self.address = c
            return
        entries = np.zeros((len(c), 3), np.int64)
        for i, column in enumerate(c):
            entries[i, 0] = column.ctypes.data
            entries[i, 1 : 1 + column.ndim] = column.shape
        self._entries = entries.reshape(-1)  # what the address leads to
        self.address = entries.ctypes.data


def _grown(column: Any, size: int) -> Any:
    grown = np.zeros((size, *column.shape[1:]), column.dtype)
    grown[: len(column)] = column
    return grown
