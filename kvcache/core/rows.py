"""Rows: the block tables of running requests, and the kernels that change one or many of them.

    skip ──▶ grow ──▶ publish ──▶ (the engine's forward) ──▶ seal        free: last block first

*Skip* releases blocks that no token will read again, *grow* takes blocks, and *publish* puts full
units into the tree. Three comparisons, with SKIP_AT, CAPACITY and UNITS, tell whether a row needs
any of them. Kernels log what enters tables in `change` and `ids`, and what becomes hittable in
`note`; Python reads both.

*Duplicate blocks.* If the tree has a unit's content in another block of a prefix group, the row
keeps its own block, which stays private, and also references the cached one. So a row that
continues a node references all blocks before it, and a parent is never evicted before its child.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvcache.core.columns import columns_of, logs_of, search_of
from kvcache.core.hits import are_found, find
from kvcache.core.kinds.registry import next_skip, num_columns, num_skipped
from kvcache.core.kinds.rule import COLUMN, EXTRA, FULL, KIND, LENGTH, NEVER, SIZE, STATE
from kvcache.core.machine import (
    BYTE_ROWS,
    CORE,
    INT,
    INT_ROWS,
    INTS,
    NEW_INT_ROWS,
    NEW_INTS,
    NOTHING,
    address_of,
    copy,
    inner,
    kernel,
    routine,
)
from kvcache.core.names import *
from kvcache.core.pool import acquire, has_room, release, release_run, take
from kvcache.core.prefix_tree import add_child, find_child, is_sealed, prune
from kvcache.core.running import (
    CLIENT,
    COMPUTED,
    END,
    END_OF_OWN,
    FIRST_IN_RING,
    OWN,
    ROW,
    SETTLED,
    SYNCED,
    TOKENS,
    append,
    note_ends,
)
from kvcache.core.states import forget_ends, grow_states, lacking_states, note_end

ALONE, ASKING, BY_TENANT = range(3)
"""How rows get blocks: from the free list and the policy; after Python has asked tiers; by
Python."""

BUSY, LATE, LONG, NUM_PLACES = range(4)
"""Lines of `places`, which `run_rows` fills with the positions of rows in a batch: rows that need
anything; rows that skip; rows whose full units Python must publish, because they have multimodal
items, tokens that are no longer in the ring, or a tenant whose room must be counted."""

SKIP, COUNT, GROW = range(3)
"""What `serve_row` does. COUNT only counts the lacking blocks."""


@routine
def note_limits(core: Any, r: int) -> None:
    """Set a row's CAPACITY and SKIP_AT, up to which it needs nothing."""
    c = columns_of(core)
    capacity = skip = np.int64(NEVER)
    for g in range(len(c.group)):
        columns = np.int64(c.row[r, COLUMNS + 2 * g]) - c.group[g, EXTRA]
        capacity = min(capacity, max(np.int64(0), columns * np.int64(c.group[g, COLUMN])))
        skip = min(skip, next_skip(c.group[g], np.int64(c.row[r, KEPT + 2 * g])))
    if c.row[r, FLAGS] & IS_SHARING:
        capacity = np.int64(0)  # it must be checked before every write
    c.row[r, CAPACITY], c.row[r, SKIP_AT] = capacity, skip


@routine
def note_change(core: Any, slot: int, g: int, line: int, first: int, count: int) -> None:
    """Log that `count` columns of a table are new from `first` on, unless `slot` is negative."""
    if slot < 0:
        return
    c = columns_of(core)
    log = logs_of(core)
    at, to = c.number[NUM_CHANGES], c.number[NUM_IDS]
    if at >= log.change.shape[1] or to + count > len(log.ids):
        c.number[IS_FULL] = 1
        return
    log.change[0, at], log.change[1, at] = slot, g
    log.change[2, at], log.change[3, at] = first, count
    for i in range(count):
        log.ids[to + i] = c.table[line, first + i]
    c.number[NUM_CHANGES], c.number[NUM_IDS] = at + 1, to + count


@routine
def table_end(core: Any, r: int, g: int, slot_tokens: int) -> int:
    """Return how many columns a row's table needs for `slot_tokens` tokens and its forward."""
    s = search_of(core)
    return num_columns(
        columns_of(core).group[g], slot_tokens, np.int64(s.forward[r, OWN_END]),
        np.int64(s.forward[r, NUM_ENCODER]),
    )  # fmt: skip


@routine
def lacking(core: Any, r: int, g: int, held: int, computed: int, slot_tokens: int) -> int:
    """Return how many blocks a row's table of `held` columns lacks for `slot_tokens` tokens. New
    columns that no token after `computed` reads need no block."""
    rule, total = columns_of(core).group[g], table_end(core, r, g, slot_tokens)
    if total <= held:
        return np.int64(0)
    if rule[KIND] == STATE:
        return lacking_states(core, r, g, held, computed, total)
    return total - max(held, min(num_skipped(rule, computed), total))


@routine
def growth(core: Any, r: int, computed: int, slot_tokens: int) -> int:
    """Return how many blocks `grow` takes."""
    c = columns_of(core)
    needed = np.int64(0)
    for g in range(len(c.group)):
        needed += lacking(core, r, g, np.int64(c.row[r, COLUMNS + 2 * g]), computed, slot_tokens)
    return needed


@routine
def grow(core: Any, r: int, slot: int, computed: int, slot_tokens: int) -> None:
    """Extend a row's tables for `slot_tokens` tokens. Columns that no token reads stay null. Enough
    blocks are free."""
    c = columns_of(core)
    for g in range(len(c.group)):
        line, held = r * len(c.group) + g, np.int64(c.row[r, COLUMNS + 2 * g])
        total = table_end(core, r, g, slot_tokens)
        if total > held:
            if c.group[g, KIND] == STATE:
                grow_states(core, r, g, held, computed, total)
            else:
                first = max(held, min(num_skipped(c.group[g], computed), total))
                for i in range(held, first):
                    c.table[line, i] = 0
                take(core, c.table[line], first, total - first)
            c.row[r, COLUMNS + 2 * g] = total
            note_change(core, slot, g, line, held, total - held)
            for i in range(held, total if c.group[g, KIND] == STATE else held):
                c.table[line, i] = abs(c.table[line, i])
    note_limits(core, r)


@routine
def skip(core: Any, r: int, computed: int, front: int) -> int:
    """Release the blocks that no token reads any more, group by group, right to left. `front` and
    the result are those of `release`."""
    c = columns_of(core)
    for g in range(len(c.group)):
        if c.group[g, KIND] == FULL:
            continue
        start, line = np.int64(c.row[r, KEPT + 2 * g]), r * len(c.group) + g
        end = min(num_skipped(c.group[g], computed), np.int64(c.row[r, COLUMNS + 2 * g]))
        if end > start:
            for i in range(end - 1, start - 1, -1):
                b = np.int64(c.table[line, i])
                if b:
                    front = release(core, b, front)
                    c.table[line, i] = 0
            c.row[r, KEPT + 2 * g] = end
    note_limits(core, r)
    return front


@routine
def attach_to_node(core: Any, r: int, n: int, num_units: int) -> None:
    """Make node `n` a row's newest node, with `num_units` units up to it. The row leaves its
    previous node, which may be removed."""
    c = columns_of(core)
    before = np.int64(c.row[r, LAST])
    c.node[n, ROWS] += 1
    c.row[r, LAST], c.row[r, UNITS] = n, num_units
    if before:
        c.node[before, ROWS] -= 1
        if c.node[before, ROWS] == 0:
            prune(core, before)


@routine
def _has_room(core: Any, r: int, n: int, u: int) -> bool:
    """Return whether the row's tenant may also reference the blocks of node `n`, which duplicate
    the row's own blocks of unit `u`. If so, subtract them from ROOM."""
    c = columns_of(core)
    count = np.int64(0)
    for g in range(len(c.group)):
        if c.group[g, KIND] == FULL and (u + 1) % c.group[g, LENGTH] == 0:
            cached, column = np.int64(c.node[n, BLOCK + 2 * g]), (u + 1) // c.group[g, LENGTH] - 1
            if cached and cached != c.table[r * len(c.group) + g, column]:
                count += c.block[cached, REF] == 0
    if count > c.number[ROOM]:
        return False
    c.number[ROOM] -= count
    return True


@routine
def publish(core: Any, r: int, end: int, base: int, tokens: int, keys: Any, digests: int) -> None:
    """Put a row's full units up to `end` into the tree.

    `tokens` and `digests` are addresses; they and the array `keys` begin with unit `base`. Without
    `keys`, the row's own extra keys are used. Without `digests` (0), digests are made when they are
    needed.
    """
    c = columns_of(core)
    s = search_of(core)
    log = logs_of(core)
    unit, num_groups, num_bytes = c.tokens.shape[1], len(c.group), s.digest.shape[1]
    parent, at = np.int64(c.row[r, LAST]), np.int64(c.row[r, UNITS])
    serial, u = c.number[SERIAL], np.int64(c.row[r, UNITS])
    while u < end:
        at_tokens = tokens + 4 * unit * (u - base)
        own = np.int64(c.row[r, FIRST_KEYS]) if u == 0 else np.int64(c.row[r, OTHER_KEYS])
        if len(keys):
            own = np.int64(keys[u - base])
        n = find_child(core, parent, own, at_tokens)
        if n == 0:
            n = add_child(core, parent, own, at_tokens)
        if n == 0 or (c.number[HAS_POLICY] == 2 and not _has_room(core, r, n, u)):
            # No node is left, or no room: the row caches nothing more.
            c.row[r, FLAGS] |= NO_CACHING
            break
        # If the parent has no digest, both are made later.
        if digests and c.node[n, KEYS] & 1 == 0 and c.node[parent, KEYS] & 1:
            copy(address_of(s.digest, n), digests + num_bytes * (u - base), num_bytes)
            c.node[n, KEYS] |= 1
        for g in range(num_groups):
            of_block = c.group[g, LENGTH]
            if of_block > 1 and (u + 1) % of_block:
                continue
            column, mine = u if of_block == 1 else (u + 1) // of_block - 1, np.int64(0)
            has_content = c.group[g, KIND] != STATE or s.forward[r, ENDS + u] != 0
            if has_content and column < c.row[r, COLUMNS + 2 * g]:
                mine = np.int64(c.table[r * num_groups + g, column])
            cached = np.int64(c.node[n, BLOCK + 2 * g])
            if mine == 0 or mine == cached:
                continue
            if cached:
                if c.group[g, KIND] == FULL:
                    acquire(core, cached)
                    c.row[r, DUPLICATES] += 1
            elif c.block[mine, NODE] == 0:
                # A fork that references the block may have other blocks before it.
                c.number[HAS_GAPS] |= c.block[mine, REF] > 1 and c.group[g, KIND] == FULL
                c.node[n, BLOCK + 2 * g], c.node[n, OWNER + 2 * g] = mine, serial
                c.block[mine, NODE], c.block[mine, PREV] = n, 0  # new, so not WAS_UNUSED
                to = c.number[NUM_NOTES]
                if to < len(log.note):
                    log.note[to, 0], log.note[to, 1], log.note[to, 2] = n, g, r
                    log.note[to, 3], log.note[to, 4] = c.row[r, GENERATION], c.row[r, ROOT]
                    c.number[NUM_NOTES] = to + 1
                else:
                    c.number[IS_FULL] = 1
        parent = n
        u += 1
    if u > at:
        attach_to_node(core, r, parent, u)


@routine
def rewind(core: Any, r: int, num_units: int) -> None:
    """Move a row back to its first `num_units` units. It may publish the others again."""
    c = columns_of(core)
    n, u, front = np.int64(c.row[r, LAST]), np.int64(c.row[r, UNITS]), np.int64(0)
    while u > num_units:
        if c.row[r, DUPLICATES]:
            for g in range(len(c.group)):
                if c.group[g, KIND] == FULL and u % c.group[g, LENGTH] == 0:
                    column = u // c.group[g, LENGTH] - 1
                    cached = np.int64(c.node[n, BLOCK + 2 * g])
                    if cached and cached != c.table[r * len(c.group) + g, column]:
                        front = release(core, cached, front)
                        c.row[r, DUPLICATES] -= 1
                        c.number[HAS_GAPS] = 1
        n = np.int64(c.node[n, PARENT])
        u -= 1
    attach_to_node(core, r, n, u)


@routine
def open_row(
    core: Any, r: int, root: int, depth: int, hit_tokens: int, computed: int, slot_tokens: int,
    spare: int,
) -> int:  # fmt: skip
    """Give a new row the hit in `found`, with `depth` units in `path`. Return how many more blocks
    it needs. If too few are free, change nothing and return -1 minus the number of blocks that it
    takes in all."""
    c = columns_of(core)
    s = search_of(core)
    num_groups, needed, unheld = len(c.group), np.int64(0), np.int64(0)
    for g in range(num_groups):
        num_hit = hit_tokens // c.group[g, SIZE]
        needed += lacking(core, r, g, num_hit, computed, slot_tokens)
        for i in range(min(num_skipped(c.group[g], computed), num_hit), num_hit):
            b = np.int64(s.found[g, i])
            unheld += b != 0 and c.block[b, REF] == 0
    if needed + unheld > c.number[FREE] - spare:
        return -1 - needed - unheld
    for g in range(num_groups):
        num_hit, line = hit_tokens // c.group[g, SIZE], r * num_groups + g
        kept = num_hit
        for i in range(num_hit - 1, -1, -1):
            b = np.int64(s.found[g, i]) if i >= num_skipped(c.group[g], computed) else np.int64(0)
            c.table[line, i] = b
            if b:
                kept = i
        for i in range(kept, num_hit):
            if c.table[line, i]:
                acquire(core, np.int64(c.table[line, i]))
        c.row[r, COLUMNS + 2 * g], c.row[r, KEPT + 2 * g] = num_hit, kept
    c.row[r, ROOT], c.row[r, LAST], c.row[r, DUPLICATES] = root, 0, 0
    attach_to_node(core, r, np.int64(s.path[depth - 1]) if depth else root, depth)
    return needed


@routine
def _has_news(core: Any) -> int:
    """Return whether Python must read a log or a flag."""
    number = columns_of(core).number
    num_moved = number[NUM_MOVED]
    if number[HAS_POLICY] == 0 and num_moved < number[LOGS_USES]:
        num_moved = np.int64(0)
    return num_moved | number[NUM_GONE] | number[HAS_GAPS] | number[IS_FULL]


@routine
def admit(
    core: Any, r: int, flags: int, first: int, other: int, own_end: int, num_encoder: int,
    root: int, depth: int, hit_tokens: int, computed: int, slot_tokens: int, spare: int, end: int,
    slot: int, tokens: int, keys: Any, digests: int,
) -> int:  # fmt: skip
    """Do `admit_row` with the hit in `found`, and with tokens and digests by address. Return the
    result of `open_row`."""
    c = columns_of(core)
    s = search_of(core)
    s.forward[r, OWN_END], s.forward[r, LAST_END] = own_end, -1
    s.forward[r, ACCEPTED], s.forward[r, NUM_ENCODER] = 0, num_encoder
    needed = open_row(core, r, root, depth, hit_tokens, computed, slot_tokens, spare)
    if needed < 0:
        return needed
    c.row[r, FLAGS], c.row[r, FIRST_KEYS], c.row[r, OTHER_KEYS] = flags, first, other
    note_end(core, r, computed)
    if end >= 0 and has_room(core, needed, ALONE):
        grow(core, r, slot, computed, slot_tokens)
        if end > depth:
            publish(core, r, end, 0, tokens, keys, digests)
    return needed


@routine
def lacks_space(core: Any, num_nodes: int) -> bool:
    """Return whether `num_nodes` more nodes need larger columns or a larger index."""
    c = columns_of(core)
    num_spare = c.number[NUM_SPARE] + len(c.node) - c.number[NEXT_NODE]
    num_indexed = c.number[NUM_INDEXED] + num_nodes
    return num_nodes > num_spare or 2 * num_indexed > len(search_of(core).index)


QUIET, HAS_NEWS, NO_ROOM, NO_NODES, IS_STALE = range(5)
"""Results of `admit_row`: done; done, and Python must read a log or a flag; too few blocks are
free; the nodes of its units do not fit; a look-up does not find the hit. The last three change
nothing."""


@kernel(types.UniTuple(INT, 3), CORE, *[INT] * 16, INTS, INTS, BYTE_ROWS, INTS)
def admit_row(
    core: Any, r: int, flags: int, first: int, other: int, own_end: int, num_encoder: int,
    root: int, client: int, limit: int, hit_tokens: int, depth: int, computed: int,
    slot_tokens: int, spare: int, end: int, slot: int, tokens: Any, keys: Any, digests: Any,
    ids: Any,
) -> Any:  # fmt: skip
    """Open a row with a hit, take its blocks and publish its units up to `end`. If `end` is -1
    minus that number, only open it. Log changes of its tables if `slot` is 0, not if it is -1.

    The hit has `hit_tokens` tokens and the blocks `ids`, group after group; a look-up of `limit`
    tokens has to find it. With `depth`, the last call did, and no more nodes fit; -1 otherwise.
    Return one of the results; how many blocks the row lacked (NO_ROOM: takes in all); and how many
    units of the hit have nodes.
    """
    c, none = columns_of(core), np.int64(0)
    if depth < 0:
        depth = none
        if hit_tokens:
            length, depth = find(core, root, client, first, other, keys, tokens, limit)
            if length != hit_tokens or not are_found(core, length, ids):
                return np.int64(IS_STALE), none, none
        if lacks_space(core, max(end, -1 - end) - depth):
            return np.int64(NO_NODES), none, depth
    needed = admit(
        core, r, flags, first, other, own_end, num_encoder, root, depth, hit_tokens, computed,
        slot_tokens, spare, end, slot, address_of(tokens, 0), keys,
        address_of(digests, 0) if len(digests) else 0,
    )  # fmt: skip
    if needed < 0:
        return np.int64(NO_ROOM), -1 - needed, depth
    has_news = c.number[NUM_NOTES] | _has_news(core)
    return np.int64(HAS_NEWS if has_news else QUIET), needed, depth


@kernel(INT, CORE, INT, INT, INT, INT, INT)
def serve_row(core: Any, r: int, computed: int, slot_tokens: int, what: int, slot: int) -> int:
    """Let the row in a slot SKIP or GROW, or only COUNT; enough blocks are free. Return how many
    blocks it lacked before it grew."""
    if what == SKIP:
        skip(core, r, computed, np.int64(0))
    needed = growth(core, r, computed, slot_tokens)
    if what == GROW:
        grow(core, r, slot, computed, slot_tokens)
        note_end(core, r, computed)
    return needed


@kernel(NOTHING, CORE, INT, INT, INTS, INTS, BYTE_ROWS)
def publish_row(core: Any, r: int, end: int, tokens: Any, keys: Any, digests: Any) -> None:
    """Publish one row's units up to `end`."""
    publish(
        core, r, end, 0, address_of(tokens, 0), keys, address_of(digests, 0) if len(digests) else 0
    )


@kernel(NOTHING, CORE, INT, INT)
def rewind_row(core: Any, r: int, num_units: int) -> None:
    """Move a row back to `num_units` units, and forget where later forwards ended."""
    rewind(core, r, num_units)
    forget_ends(core, r, num_units)


@kernel(INT, CORE, INT, INT, INT)
def merge_row(core: Any, r: int, first: int, end: int) -> int:
    """Replace a row's own blocks of units `[first, end)` by sealed blocks with the same content.
    The forwards that wrote these units are complete. Return how many of the row's blocks became
    free."""
    c = columns_of(core)
    n, u, front = np.int64(c.row[r, LAST]), np.int64(c.row[r, UNITS]), np.int64(0)
    count = np.int64(0)
    while u > first:
        for g in range(len(c.group)):
            length, column = c.group[g, LENGTH], u // c.group[g, LENGTH] - 1
            if u > end or u % length or column >= c.row[r, COLUMNS + 2 * g]:
                continue
            if c.group[g, KIND] == STATE:  # the row's forwards expect it in this block
                continue
            line = r * len(c.group) + g
            mine, cached = np.int64(c.table[line, column]), np.int64(c.node[n, BLOCK + 2 * g])
            if mine == 0 or cached == 0 or mine == cached or c.block[mine, NODE]:
                continue
            if not is_sealed(core, c.node[n, OWNER + 2 * g]):
                continue
            if c.group[g, KIND] == FULL:
                c.row[r, DUPLICATES] -= 1
            else:
                acquire(core, cached)
            c.table[line, column] = cached
            front = release(core, mine, front)
            count += c.block[mine, REF] == 0
        n = np.int64(c.node[n, PARENT])
        u -= 1
    return count


@kernel(NOTHING, CORE, INT)
def note_row_limits(core: Any, r: int) -> None:
    """Do `note_limits`."""
    note_limits(core, r)


@routine
def close_row(core: Any, r: int) -> None:
    """Release all blocks of a row and close it. Blocks of windowed groups go first, each group from
    its end; then those of prefix groups, last tokens first."""
    c = columns_of(core)
    num_groups, front = len(c.group), np.int64(0)
    forget_ends(core, r, np.int64(0))
    for g in range(num_groups):
        if c.group[g, KIND] != FULL:
            start, end = c.row[r, KEPT + 2 * g], c.row[r, COLUMNS + 2 * g]
            front = release_run(core, r * num_groups + g, start, end, front)
            c.row[r, COLUMNS + 2 * g] = 0
    n, u = np.int64(c.row[r, LAST]), np.int64(c.row[r, UNITS])
    num_left = c.number[NUM_PREFIX_GROUPS]
    while num_left:
        best, most = np.int64(-1), np.int64(0)
        num_left = np.int64(0)
        for g in range(num_groups):
            if c.group[g, KIND] == FULL:
                end = np.int64(c.row[r, COLUMNS + 2 * g]) * c.group[g, LENGTH]
                if end > 0:
                    num_left += 1
                    if end > most:
                        best, most = g, end
        if best < 0:
            break
        column = np.int64(c.row[r, COLUMNS + 2 * best]) - 1
        # If only one group is left, release all of its blocks in one sweep.
        last = column if num_left > 1 else np.int64(0)
        of_block, line = np.int64(c.group[best, LENGTH]), r * num_groups + best
        if c.row[r, DUPLICATES] == 0:
            front = release_run(core, line, last, column + 1, front)
            c.row[r, COLUMNS + 2 * best] = last
            continue
        for i in range(column, last - 1, -1):
            b = np.int64(c.table[line, i])
            if (i + 1) * of_block <= c.row[r, UNITS]:
                while u > (i + 1) * of_block:
                    n = np.int64(c.node[n, PARENT])
                    u -= 1
                cached = np.int64(c.node[n, BLOCK + 2 * best])
                if cached and cached != b:
                    front = release(core, cached, front)
            if b:
                front = release(core, b, front)
        c.row[r, COLUMNS + 2 * best] = last
    n = np.int64(c.row[r, LAST])
    c.node[n, ROWS] -= 1
    for g in range(num_groups):
        c.row[r, COLUMNS + 2 * g] = c.row[r, KEPT + 2 * g] = 0
    for i in range(DUPLICATES + 1):
        c.row[r, i] = 0
    c.row[r, GENERATION] += 1
    if c.node[n, ROWS] == 0:
        prune(core, n)


@kernel(INT, CORE, INT)
def free_row(core: Any, r: int) -> int:
    """Do `close_row`; return whether Python must read a log or a flag."""
    close_row(core, r)
    return _has_news(core)


# --- many rows ---------------------------------------------------------------------------------


@kernel(INT, CORE, INTS)
def free_rows(core: Any, rows: Any) -> int:
    """Do `close_row` for each row; return whether Python must read a log or a flag."""
    for r in rows:
        close_row(core, np.int64(r))
    return _has_news(core)


NUM_TOKENS, NUM_READ, MOST_NEW, NUM_EXTERNAL, NUM_AHEAD, NUM_OF_ENCODER, IS_DELAYED, NUM_WISHES = (
    range(8)
)
"""Columns of `wishes`: the request's tokens; how many of them may be hit; the most that may be
computed; tokens that come from elsewhere; lookahead; encoder tokens; whether nothing becomes
hittable."""

SLOT, NUM_HIT, NUM_SCHEDULED = range(3)
"""Lines of `answers`: the first fields of `RowsAdmitted`."""


@kernel(
    types.UniTuple(INT, 4), CORE, *[INT] * 8, INTS, INT_ROWS, INT_ROWS, *[NEW_INT_ROWS] * 4,
)  # fmt: skip
def admit_rows(
    core: Any, root: int, client: int, publishes: int, num_reached: int, client_index: int,
    num_running: int, spare: int, max_model_len: int, tokens: Any, wishes: Any, places: Any,
    running: Any, ring: Any, answers: Any, published: Any,
) -> Any:  # fmt: skip
    """Look up and admit the new requests `wishes` in order; see `FlatCore.admit_rows`. `tokens` has
    their tokens, concatenated. A request that finds room gets the next of `places`, a row and a
    slot; all of its tables are logged. If its units become hittable, they get a line in
    `published`. Without `publishes`, nothing is looked up and nothing becomes hittable. Return the
    number of admitted requests and the number of lines.

    If the columns are too small, change nothing and return -1, the most slots that one request
    wants, and the numbers of nodes and table columns that must fit.
    """
    c = columns_of(core)
    unit, width, none, num_groups = c.tokens.shape[1], ring.shape[1], np.int64(0), len(c.group)
    most = total = num_nodes = none
    num_columns = c.number[NUM_IDS]  # those of the rows that ran
    for i in range(len(wishes)):
        wanted = min(np.int64(wishes[i, NUM_TOKENS]) + wishes[i, NUM_AHEAD], max_model_len)
        wanted = max(wanted, np.int64(wishes[i, NUM_OF_ENCODER]))
        most, total = max(most, wanted), total + wanted
        num_nodes += wishes[i, NUM_TOKENS] // unit
    for g in range(num_groups):
        num_columns += total // unit + len(wishes) * (1 + np.int64(c.group[g, EXTRA]))
    needs_space = most > num_reached * unit or lacks_space(core, num_nodes)
    if needs_space or num_columns > len(logs_of(core).ids):
        return np.int64(-1), most, num_nodes, num_columns
    start = count = num_published = none
    for i in range(len(wishes)):
        num_tokens, num_read = np.int64(wishes[i, NUM_TOKENS]), np.int64(wishes[i, NUM_READ])
        these = tokens[start : start + num_tokens]
        start += num_tokens
        answers[SLOT, i], answers[NUM_HIT, i], answers[NUM_SCHEDULED, i] = -1, 0, 0
        if count == places.shape[1]:
            continue
        hit = depth = none
        if publishes and num_read >= unit:
            hit, depth = find(core, root, client, none, none, tokens[:0], these, num_read)
        computed = min(hit + wishes[i, NUM_EXTERNAL], num_tokens - 1)
        end = min(computed + wishes[i, MOST_NEW], num_tokens)
        num_units = end // unit if publishes and not wishes[i, IS_DELAYED] else none
        r, slot = np.int64(places[0, count]), np.int64(places[1, count])
        needed = admit(
            core, r, np.int64(IS_OPEN), none, none, end, np.int64(wishes[i, NUM_OF_ENCODER]), root,
            depth, hit, computed, min(end + wishes[i, NUM_AHEAD], max_model_len),
            spare if num_running + count else none, num_units, np.int64(-1), address_of(these, 0),
            tokens[:0], none,
        )  # fmt: skip
        if needed < 0:
            continue
        for g in range(num_groups):
            if c.row[r, COLUMNS + 2 * g]:
                line, columns = r * num_groups + g, np.int64(c.row[r, COLUMNS + 2 * g])
                note_change(core, slot, g, line, none, columns)
        if num_units > depth:
            published[num_published, 0], published[num_published, 1] = r, c.row[r, GENERATION]
            published[num_published, 2], published[num_published, 3] = depth, num_units
            num_published += 1
        first = num_tokens - num_tokens % unit
        running[slot, TOKENS] = running[slot, SYNCED] = num_tokens
        running[slot, COMPUTED] = running[slot, OWN] = end
        running[slot, CLIENT], running[slot, FIRST_IN_RING] = client_index, first
        running[slot, ROW] = r
        for k in range(first, num_tokens):
            ring[slot, k % width] = these[k]
        answers[SLOT, i], answers[NUM_HIT, i] = slot, hit
        answers[NUM_SCHEDULED, i] = end - computed
        count += 1
    return count, num_published, none, none


@inner
def _fills(c: Any, r: int, publishes: int, cached: int) -> bool:
    """Return whether a row has full units to publish when `cached` tokens become hittable."""
    is_full = cached >= (np.int64(c.row[r, UNITS]) + 1) * c.tokens.shape[1]
    return is_full and publishes != 0 and c.row[r, FLAGS] & NO_CACHING == 0


@inner
def _is_long(c: Any, r: int, running: Any, slot: int, width: int) -> bool:
    """Return whether Python must publish the row in a slot; see LONG."""
    oldest = max(running[slot, FIRST_IN_RING], running[slot, TOKENS] - width)
    is_old = np.int64(c.row[r, UNITS]) * c.tokens.shape[1] < oldest
    return is_old or c.row[r, FLAGS] & HAS_ITEMS != 0


@routine
def _note_forwards(core: Any, running: Any, slots: Any, positions: Any) -> int:
    """Note where the forwards of the rows with states end, and where the previous ones did. A row
    without a forward stays at the end of its last one. Return how many columns the tables of states
    lack."""
    c = columns_of(core)
    s = search_of(core)
    total = np.int64(0)
    for g in range(len(c.group)):
        if c.group[g, KIND] != STATE:
            continue
        for i in range(len(slots)):
            r, last = np.int64(running[slots[i], ROW]), running[slots[i], OWN]
            has_forward = positions[END, i] > positions[SETTLED, i]
            s.forward[r, OWN_END] = positions[END_OF_OWN, i] if has_forward else last
            s.forward[r, LAST_END] = last
            s.forward[r, ACCEPTED] = positions[SETTLED, i] - last
            lacking_columns = table_end(core, r, g, np.int64(0)) - c.row[r, COLUMNS + 2 * g]
            total += max(np.int64(0), lacking_columns)
    return total


@routine
def _inspect(
    core: Any, publishes: int, running: Any, slots: Any, cached: Any, computed: Any,
    slot_tokens: Any, places: Any,
) -> Any:  # fmt: skip
    """Find the BUSY and LATE rows. Return their numbers, how many units the rows fill, the most
    slots that one wants, and whether one shares blocks that it may write."""
    c = columns_of(core)
    num_busy = num_late = num_units = most = is_sharing = np.int64(0)
    for i in range(len(slots)):
        r = np.int64(running[slots[i], ROW])
        is_late, fills = computed[i] >= c.row[r, SKIP_AT], _fills(c, r, publishes, cached[i])
        if not (is_late or fills or slot_tokens[i] > c.row[r, CAPACITY]):
            continue
        places[BUSY, num_busy] = i
        num_busy += 1
        most = max(most, np.int64(slot_tokens[i]))
        if is_late:
            places[LATE, num_late] = i
            num_late += 1
        if fills:
            num_units += cached[i] // c.tokens.shape[1] - np.int64(c.row[r, UNITS])
        if c.row[r, FLAGS] & IS_SHARING:
            is_sharing = np.int64(1)
    return num_busy, num_late, num_units, most, is_sharing


@routine
def _grant(
    core: Any, running: Any, slots: Any, computed: Any, slot_tokens: Any, places: Any,
    num_busy: int, is_reserved: Any,
) -> int:  # fmt: skip
    """Decide, in order, which rows can get all their blocks: clear `is_reserved` of the others.
    Return how many blocks these rows take."""
    total, num_free = np.int64(0), columns_of(core).number[FREE]
    for k in range(num_busy):
        i = places[BUSY, k]
        r = np.int64(running[slots[i], ROW])
        needed = growth(core, r, np.int64(computed[i]), np.int64(slot_tokens[i]))
        if total + needed <= num_free:
            total += needed
        else:
            is_reserved[i] = 0
    return total


DONE, SINGLY, NEEDS_SPACE, NEEDS_ROOM = range(4)
"""Results of `run_rows`: all is done; tokens are appended, but Python must serve the rows one by
one; the columns are too small, and nothing has changed; Python must evict blocks."""


@kernel(
    types.UniTuple(INT, 4), CORE, *[INT] * 5, NEW_INT_ROWS, NEW_INT_ROWS, INTS, INTS, INTS,
    INT_ROWS, INTS, INTS, NEW_INT_ROWS, NEW_INTS, NEW_INT_ROWS,
)  # fmt: skip
def run_rows(
    core: Any, publishes: int, how: int, lacks_nodes: int, num_busy: int, num_reached: int,
    running: Any, ring: Any, slots: Any, offsets: Any, token_ids: Any, positions: Any,
    computed: Any, slot_tokens: Any, places: Any, is_reserved: Any, published: Any,
) -> Any:  # fmt: skip
    """Run the rows of a step: append their tokens, skip, grow the rows that can get all their
    blocks, publish the units that they fill, and note how far each row is computed.

    Return DONE, the number of lines in `published`, the number of LONG rows, and 0; or SINGLY and
    the numbers of BUSY and LATE rows, because some share blocks that they may write; or
    NEEDS_SPACE, the most slots that a row wants, and the numbers of nodes (if there can be any: not
    `lacks_nodes`) and table columns that must fit; or NEEDS_ROOM, the number of blocks that must be
    blank, and `num_busy` for the call that then continues this one (else 0).
    """
    c = columns_of(core)
    cached, unit, width, none = positions[END_OF_OWN], c.tokens.shape[1], ring.shape[1], np.int64(0)
    if num_busy == 0:
        num_busy, num_late, num_units, most, is_sharing = _inspect(
            core, publishes, running, slots, cached, computed, slot_tokens, places
        )
        num_columns = _note_forwards(core, running, slots, positions)
        needs_nodes = not lacks_nodes and lacks_space(core, num_units)
        needs_ids = num_columns and 2 * (num_columns + len(c.block)) > len(logs_of(core).ids)
        if most > num_reached * unit or needs_ids or needs_nodes:
            return np.int64(NEEDS_SPACE), most, num_units, num_columns
        append(running, ring, slots, offsets, token_ids)
        for i in range(len(slots)):
            is_reserved[i] = 1
        if is_sharing:
            return np.int64(SINGLY), num_busy, num_late, none
        front = none
        for k in range(num_late):
            i = places[LATE, k]
            front = skip(core, np.int64(running[slots[i], ROW]), np.int64(computed[i]), front)
        total = _grant(core, running, slots, computed, slot_tokens, places, num_busy, is_reserved)
        if total > 0 if how == BY_TENANT else not has_room(core, total, how):
            return np.int64(NEEDS_ROOM), total, num_busy, none
    for k in range(num_busy):
        i = places[BUSY, k]
        r, wanted = np.int64(running[slots[i], ROW]), np.int64(slot_tokens[i])
        if is_reserved[i] and wanted > c.row[r, CAPACITY]:
            grow(core, r, np.int64(slots[i]), np.int64(computed[i]), wanted)
        if is_reserved[i]:
            note_end(core, r, np.int64(computed[i]))
    num_published = num_long = none
    if how == BY_TENANT:
        c.number[ROOM] = 0  # where room is needed, Python sets it for the row's tenant
    for k in range(num_busy):
        i = places[BUSY, k]
        r, slot = np.int64(running[slots[i], ROW]), np.int64(slots[i])
        if is_reserved[i] == 0 or not _fills(c, r, publishes, cached[i]):
            continue
        if _is_long(c, r, running, slot, width):
            places[LONG, num_long] = i
            num_long += 1
            continue
        u, end = np.int64(c.row[r, UNITS]), np.int64(cached[i]) // unit
        published[num_published, 0], published[num_published, 1] = r, c.row[r, GENERATION]
        published[num_published, 2], published[num_published, 3] = u, end
        num_published += 1
        while u < end and c.row[r, FLAGS] & NO_CACHING == 0:
            base = u - u % (width // unit)
            publish(core, r, u + 1, base, address_of(ring, slot), slots[:0], 0)
            u += 1
        if how == BY_TENANT and c.row[r, FLAGS] & NO_CACHING:
            c.row[r, FLAGS] &= ~NO_CACHING
            places[LONG, num_long] = i
            num_long += 1
    note_ends(running, slots, positions, is_reserved)
    return np.int64(DONE), num_published, num_long, none


@kernel(NOTHING, CORE, INT, INT, INT, INTS, INTS)
def share_row(core: Any, parent: int, child: int, num_units: int, ends: Any, states: Any) -> None:
    """Give row `child` the first `ends[g]` columns of row `parent`'s tables, with references to
    their blocks. Its newest node is the parent's, or the ancestor with `num_units` units. Of a
    group with states it gets only the state in the parent's column `states[g]`, as its last
    column."""
    c = columns_of(core)
    num_groups = len(c.group)
    n, u = np.int64(c.row[parent, LAST]), np.int64(c.row[parent, UNITS])
    while u > num_units:
        n = np.int64(c.node[n, PARENT])
        u -= 1
    s = search_of(core)
    s.forward[child, NUM_ENCODER] = s.forward[parent, NUM_ENCODER]
    c.row[child, ROOT], c.row[child, LAST] = c.row[parent, ROOT], 0
    c.row[child, DUPLICATES] = 0
    for g in range(num_groups):
        source, line = parent * num_groups + g, child * num_groups + g
        kept = min(np.int64(ends[g]), np.int64(c.row[parent, KEPT + 2 * g]))
        if c.group[g, KIND] == STATE:
            kept = max(np.int64(0), np.int64(ends[g]) - 1)
        for i in range(ends[g]):
            b = np.int64(0)
            if c.group[g, KIND] != STATE:
                b = np.int64(c.table[source, i])
            elif i == kept:
                b = np.int64(c.table[source, states[g]])
            c.table[line, i] = b
            if b:
                acquire(core, b)
        c.row[child, COLUMNS + 2 * g], c.row[child, KEPT + 2 * g] = ends[g], kept
    attach_to_node(core, child, n, u)
    m = n
    while c.row[parent, DUPLICATES] and u > 0:
        for g in range(num_groups):
            if c.group[g, KIND] == FULL and u % c.group[g, LENGTH] == 0:
                column = u // c.group[g, LENGTH] - 1
                cached = np.int64(c.node[m, BLOCK + 2 * g])
                if cached and cached != c.table[child * num_groups + g, column]:
                    acquire(core, cached)
                    c.row[child, DUPLICATES] += 1
        m = np.int64(c.node[m, PARENT])
        u -= 1
    note_limits(core, child)


@kernel(NOTHING, CORE, INT, INT, INT, INT)
def replace_block(core: Any, r: int, g: int, column: int, b: int) -> None:
    """Put block `b`, which has a reference for it, into a column, and release the old one."""
    c = columns_of(core)
    line = r * len(c.group) + g
    before = np.int64(c.table[line, column])
    c.table[line, column] = b
    release(core, before, 0)
    note_change(core, 0, g, line, column, 1)
