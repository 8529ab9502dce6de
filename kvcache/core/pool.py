"""The pool: reference counts, and the free list from which blocks are taken.

The free list begins at the null block. Blocks without content come first, then cached blocks, least
recently used first. A request references all blocks before one that it references, and releases its
blocks last one first. So under full attention a child always comes before its parent in the list.
If a policy orders cached blocks, they are not in the list: kernels log their changes in `moved`,
and Python tells the policy (`eviction.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.columns import columns_of, logs_of
from kvcache.core.kinds.rule import FULL, KIND
from kvcache.core.machine import CORE, INT, INTS, NEW_INTS, NOTHING, call_3, inner, kernel, routine
from kvcache.core.names import *
from kvcache.core.prefix_tree import forget_content, is_sealed


@routine
def note_move(core: Any, what: int, b: int) -> None:
    """Log in `moved` what happened to a block."""
    c = columns_of(core)
    log = logs_of(core)
    at = c.number[NUM_MOVED]
    if at < len(log.moved):
        log.moved[at, 0] = what
        log.moved[at, 1] = b
        c.number[NUM_MOVED] = at + 1
    else:
        c.number[IS_FULL] = 1


@routine
def count_age(core: Any, b: int, line: int) -> None:
    """Count for how long a cached block was unused, if ages are counted."""
    log = logs_of(core)
    if len(log.since) == 0:
        return
    ages, last, i = log.ages, log.ages.shape[1] - 1, np.int64(0)
    age = ages[AGE_BOUNDS, last] - log.since[b]
    while i < last - 1 and age > ages[AGE_BOUNDS, i]:
        i += 1
    ages[line, i] += 1
    ages[line, last] += age
    log.since[b] = -1


@inner
def note_idle(core: Any, b: int) -> None:
    """Note the time at which a cached block becomes unused, if ages are counted."""
    log = logs_of(core)
    if len(log.since):
        log.since[b] = log.ages[AGE_BOUNDS, log.ages.shape[1] - 1]


@inner
def insert_after(core: Any, at: int, b: int) -> None:
    """Insert block `b` into the free list after block `at`."""
    c = columns_of(core)
    then = c.block[at, NEXT]
    c.block[at, NEXT] = b
    c.block[b, PREV] = at
    c.block[b, NEXT] = then
    c.block[then, PREV] = b


@inner
def remove(core: Any, b: int) -> None:
    """Remove block `b` from the free list."""
    c = columns_of(core)
    before, then = c.block[b, PREV], c.block[b, NEXT]
    c.block[before, NEXT] = then
    c.block[then, PREV] = before


@routine
def acquire(core: Any, b: int) -> None:
    """Add a reference to a block that is referenced already or has content."""
    c = columns_of(core)
    if c.block[b, REF] == 0:
        count_age(core, b, AT_HIT)
        c.number[FREE] -= 1
        if c.number[HAS_POLICY]:
            note_move(core, REMOVED, b)
        else:
            remove(core, b)
        c.block[b, PREV] = WAS_UNUSED
    c.block[b, REF] += 1


@inner
def note_use(core: Any, b: int) -> None:
    """Log in `moved` that a cached block becomes unused and enters the free list."""
    c = columns_of(core)
    if c.number[LOGS_USES]:
        note_move(core, REMOVED if c.block[b, PREV] == WAS_UNUSED else INSERTED, b)


@inner
def note_blank(core: Any, at: int, b: int) -> None:
    """Insert a free block without content into the free list after block `at`."""
    c = columns_of(core)
    insert_after(core, at, b)
    c.number[BLANK] += 1
    if c.number[HAS_POLICY] >= 2:
        note_move(core, BLANKED, b)


@routine
def release(core: Any, b: int, front: int) -> int:
    """Drop a reference to a block. Return the block after which to insert the next one without
    content."""
    c = columns_of(core)
    c.block[b, REF] -= 1
    if c.block[b, REF]:
        return front
    c.number[FREE] += 1
    if c.block[b, NODE] == 0:
        note_blank(core, front, b)
        return b
    note_idle(core, b)
    if c.number[HAS_POLICY]:
        note_move(core, INSERTED, b)
    else:
        note_use(core, b)
        insert_after(core, c.block[0, PREV], b)
    return front


@routine
def release_run(core: Any, line: int, start: int, end: int, front: int) -> int:
    """Do `release` for all blocks in columns `[start, end)` of a table line, right to left."""
    c = columns_of(core)
    block, table, has_policy, num_freed = c.block, c.table, c.number[HAS_POLICY], np.int64(0)
    tail = np.int64(block[0, PREV])
    for i in range(end - 1, start - 1, -1):
        b = np.int64(table[line, i])
        if b == 0:
            continue
        block[b, REF] -= 1
        if block[b, REF]:
            continue
        num_freed += 1
        if block[b, NODE]:
            note_idle(core, b)
        if block[b, NODE] and not has_policy:
            note_use(core, b)
            block[tail, NEXT] = b
            block[b, PREV] = tail
            tail = b
            continue
        block[tail, NEXT] = 0
        block[0, PREV] = tail
        if block[b, NODE]:
            note_move(core, INSERTED, b)
        else:
            note_blank(core, front, b)
            front = b
        tail = np.int64(block[0, PREV])
    block[tail, NEXT] = 0
    block[0, PREV] = tail
    c.number[FREE] += num_freed
    return front


@routine
def make_blank(core: Any, b: int) -> None:
    """Move a free block that has just lost its content to the front of the free list."""
    c = columns_of(core)
    log = logs_of(core)
    if len(log.since):
        log.since[b] = -1
    if not c.number[HAS_POLICY]:
        remove(core, b)
    note_blank(core, 0, b)


@routine
def take(core: Any, taken: Any, first: int, count: int) -> None:
    """Take the next `count` free blocks, drop their contents, and write them to `taken` from index
    `first` on. Each gets one reference. The free list has as many."""
    c = columns_of(core)
    block, num_evicted = c.block, np.int64(0)
    b = np.int64(block[0, NEXT])
    for i in range(first, first + count):
        if block[b, NODE]:
            count_age(core, b, AT_EVICTION)
            forget_content(core, b)
            num_evicted += 1
        block[b, REF] = 1
        taken[i] = b
        b = np.int64(block[b, NEXT])
    block[0, NEXT] = b
    block[b, PREV] = 0
    c.number[FREE] -= count
    c.number[EVICTED] += num_evicted
    c.number[BLANK] -= count - num_evicted


@routine
def has_room(core: Any, count: int, asks_python: int) -> bool:
    """Return whether the next `count` blocks can be taken from the free list. If a policy orders
    the others, let it evict as many as lack; False if it failed. With `asks_python`, return whether
    so many are blank."""
    number = columns_of(core).number
    if number[HAS_POLICY] and not asks_python and count > number[BLANK]:
        call_3(number[EVICTS], (np.int64(count), np.int64(0), np.int64(0)))
    return count <= number[BLANK] or not (number[HAS_POLICY] or asks_python)


@kernel(NOTHING, CORE, NEW_INTS)
def take_blocks(core: Any, taken: Any) -> None:
    """Fill `taken` with the next free blocks, which enter no table yet."""
    take(core, taken, np.int64(0), np.int64(len(taken)))


@kernel(NOTHING, CORE, INTS)
def take_listed(core: Any, ids: Any) -> None:
    """Take the given blocks, which are free and without content."""
    c = columns_of(core)
    for i in range(len(ids)):
        b = np.int64(ids[i])
        remove(core, b)
        c.block[b, REF] = 1
        c.number[BLANK] -= 1
        c.number[FREE] -= 1


@kernel(NOTHING, CORE, INTS)
def acquire_all(core: Any, ids: Any) -> None:
    """Add one reference per mention of a block."""
    for i in range(len(ids)):
        acquire(core, np.int64(ids[i]))


@kernel(NOTHING, CORE, INTS)
def release_all(core: Any, ids: Any) -> None:
    """Release blocks, in order."""
    front = 0
    for i in range(len(ids)):
        front = release(core, np.int64(ids[i]), front)


@kernel(NOTHING, CORE, INTS)
def count_evicted(core: Any, ids: Any) -> None:
    """Count unreferenced cached blocks as evicted, before their contents are dropped."""
    c = columns_of(core)
    for i in range(len(ids)):
        count_age(core, np.int64(ids[i]), AT_EVICTION)
    c.number[EVICTED] += len(ids)


@kernel(INT, CORE, NEW_INTS)
def first_free(core: Any, ids: Any) -> int:
    """Write the first blocks of the free list to `ids`; return how many. Changes nothing."""
    c = columns_of(core)
    b, count = np.int64(c.block[0, NEXT]), 0
    while b and count < len(ids):
        ids[count] = b
        count += 1
        b = np.int64(c.block[b, NEXT])
    return count


@kernel(INT, CORE, INTS, NEW_INTS, NEW_INTS)
def sealed_among(core: Any, ids: Any, sealed: Any, groups: Any) -> int:
    """Write those of the given blocks that are sealed to `sealed`, and their groups to `groups`;
    return how many there are."""
    c = columns_of(core)
    count = np.int64(0)
    for i in range(len(ids)):
        b = np.int64(ids[i])
        n = np.int64(c.block[b, NODE])
        for g in range(len(c.group) if n else 0):
            if c.node[n, BLOCK + 2 * g] == b and is_sealed(core, c.node[n, OWNER + 2 * g]):
                sealed[count], groups[count] = b, g
                count += 1
    return count


@kernel(INT, CORE, INTS, NEW_INTS)
def evict_all(core: Any, ids: Any, kept: Any) -> int:
    """Drop the contents of blocks that a policy has chosen; they are taken in this order. A block
    of a prefix group whose node has children keeps its content. Write such blocks to `kept`, and
    return how many there are."""
    c = columns_of(core)
    front, num_kept = np.int64(0), 0
    for i in range(len(ids)):
        b = np.int64(ids[i])
        n = np.int64(c.block[b, NODE])
        is_needed = False
        if c.node[n, CHILDREN]:
            for g in range(len(c.group)):
                if c.node[n, BLOCK + 2 * g] == b and c.group[g, KIND] == FULL:
                    is_needed = True
        if is_needed:
            kept[num_kept] = b
            num_kept += 1
            continue
        count_age(core, b, AT_EVICTION)
        forget_content(core, b)
        insert_after(core, front, b)
        c.number[BLANK] += 1
        c.number[EVICTED] += 1
        front = b
    return num_kept
