"""The records of contents by name, their keys in several orders, and a simulated cache for each.

    seen[row]      NAME STAMP; the 8 rows of a bucket keep the names that were used last
    fact[row]      USES LINE FLAGS BEFORE
    worth[row]     its worth when it was used last, by half-life
    number, real   counts, see CLOCK, SAMPLED
    held[entry]    the name that the entry came out of use with last, and the row of that name
    member[order]  the rows in the simulated cache of an order
    past[use]      name and class of the uses that only sampled records have yet, a ring

Kernels over arrays that `adaptive.py` owns. An order gives a content a key when it comes out of
use; the lowest key is evicted first. docs/policies.md has more.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.base.arrays import IndexArray
from kvcache.base.compiled import array_type, compiled

Int64Array: TypeAlias = "npt.NDArray[np.int64]"
Float64Array: TypeAlias = "npt.NDArray[np.float64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

WAYS = 8
"""Rows of a bucket."""

NAME, STAMP = range(2)
USES, LINE, FLAGS, BEFORE, NUM_FACTS = range(5)
"""Columns of a record: a name, or 0; the time of its last use, in uses of all contents; the number
of its uses; its class; bits, see WAS_HIT; and the time of its last use but one, or 0."""

WAS_HIT, IS_INSIDE, WAS_INSIDE = 1, 2, 1 << 20
"""Bits of FLAGS: the content was cached when it was used last. Shifted by an order: it is in the
simulated cache; it was, when it was used last."""

CLOCK, RULING, NUM_PAST, ROOM, NUM_INSIDE = range(5)
"""Entries of `number`: all uses so far; the order that rules; how many of the uses are in `past`;
the most entries that were unused at a time: the part of a pool that the policy rules; and from
NUM_INSIDE on, how many contents are in the simulated cache of each order."""

SAMPLED, REQUESTS, LEAD = range(3)
"""Entries of `real`: uses of sampled contents, lately; how often some came out of use together; and
from LEAD on, hits of each order less those of LRU; from SQUARES on, squares of such differences.
From REUSED and from USED on, uses by class."""

DELAYS = (0.0, 0.5, 1.0)
"""Orders by recency. A new content counts as used this many capacities ago: 0 is LRU."""

_TIE_BLOCKS, _TIE_SHARE = 0.25, 1e-6
"""New contents are older by this, too, so that no two contents have the same key."""

LONGEST, NUM_HALF_LIVES = 16.0, 7
"""Orders by all uses; a use loses half of its weight in 16 capacities, in 8, and so on."""

NUM_DELAYS = len(DELAYS)
LAST_BUT_ONE = NUM_DELAYS + NUM_HALF_LIVES
NUM_ORDERS = LAST_BUT_ONE + 1
"""The last order is by the last use but one (LRU-2)."""

_MOST_LENGTHS = 8
_USE_LIMITS = (2, 3, 4, 8, 16, 64)
USED_AGAIN = 2 * _MOST_LENGTHS
NUM_CLASSES = USED_AGAIN + len(_USE_LIMITS) + 1
"""Classes of contents: new ones, by how many came together and whether they continue others; and
used ones, by their number of uses."""

SQUARES = LEAD + NUM_ORDERS
REUSED = SQUARES + NUM_ORDERS
USED = REUSED + NUM_CLASSES

_SHARED_START_BLOCKS = 1
"""A request that continues at most this many blocks begins a conversation: the first block is
often a common system prompt."""

_PRIOR_USES = 100.0
"""Weight of all classes in the estimate of one class, in uses: a few requests."""

_SAMPLED_BIT = 24
"""The lowest bit of names that says whether they are sampled; the bits below find their bucket."""

_SPARSE, _LINE_BITS = 4, 6
"""While LRU evicts, one in so many names is looked up: those between two new ones are new. The low
bits of an entry of `past`: the class, and whether the content was hit."""

_HORIZON_ROOMS = 8.0
"""Simulated hits lose half of their weight in this many capacities."""

_LEAST_REQUESTS = 0.5
"""An order's lead over LRU is sure if it is above its standard error by this part of a request. The
order that rules gives way only to one with so many more hits, or if its own lead is not sure."""


class Memory(NamedTuple):
    """All that is known; see above."""

    seen: Int64Array
    fact: Int64Array
    worth: Float64Array
    number: Int64Array
    real: Float64Array
    member: Int64Array
    held: Int64Array
    past: Int64Array
    capacity: float
    scale: int


def make_memory(num_rows: int, capacity: int, scale: int) -> Memory:
    """Return an empty memory for a cache of `capacity` entries, with `num_rows` records. One in
    `scale` names is simulated."""
    num_inside = capacity // scale + 1
    return Memory(
        np.zeros((num_rows, 2), np.int64),
        np.zeros((num_rows, NUM_FACTS), np.int64),
        np.zeros((num_rows, NUM_HALF_LIVES)),
        np.zeros(NUM_INSIDE + NUM_ORDERS, np.int64),
        np.zeros(USED + NUM_CLASSES),
        np.zeros((NUM_ORDERS, 2 * num_inside + 1), np.int64),
        np.zeros((capacity, 2), np.int64),
        np.zeros(num_rows, np.int64),
        float(capacity),
        scale,
    )


_int, _names = types.int64, array_type("int64", is_read=True)
_entries = array_type("intp", is_read=True)
_facts, _worths, _numbers = array_type("int64", 2), array_type("float64", 2), array_type("int64")
_reals, _flags = array_type("float64"), array_type("bool_")
_types: Any = types  # numba's types are missing
_columns = [_facts, _facts, _worths, _numbers, _reals, _facts, _facts, _numbers]
_memory = _types.NamedTuple([*_columns, types.float64, _int], Memory)


@compiled(types.void(_memory, _int))
def forget(memory: Memory, row: int) -> None:
    """Make a row empty."""
    seen, fact, worth, number, _, member, _, _, _, _ = memory
    for order in range(NUM_ORDERS):
        if fact[row, FLAGS] & (IS_INSIDE << order):
            number[NUM_INSIDE + order] -= 1
            last = number[NUM_INSIDE + order]
            for at in range(last):
                if member[order, at] == row:
                    member[order, at] = member[order, last]
    seen[row], fact[row], worth[row] = 0, 0, 0


@compiled(_int(_memory, _int, _int), inline="always")
def row_of(memory: Memory, name: int, guess: int) -> int:
    """Return the row of a name, perhaps the one guessed; if it has none, that of the name in its
    bucket unused longest."""
    seen = memory.seen
    if seen[guess, NAME] == name:
        return guess
    oldest = first = (name & (len(seen) // WAYS - 1)) * WAYS
    for row in range(first, first + WAYS):
        if seen[row, NAME] == name:
            return row
        if seen[row, STAMP] < seen[oldest, STAMP]:
            oldest = row
    return oldest


@compiled(_int(_memory, _int, _int, types.boolean), inline="always")
def find(memory: Memory, name: int, guess: int, is_hit: bool) -> int:
    """Return the row of a name; make it new if it has none, or is an entry's, with new content."""
    row = row_of(memory, name, guess)
    if memory.seen[row, NAME] != name or (name < 0 and not is_hit):
        if memory.seen[row, NAME]:
            forget(memory, row)
        memory.seen[row, NAME] = name
    return row


@compiled(types.float64(_memory, _int, _int, _int))
def key_of(memory: Memory, row: int, order: int, hit_bit: int) -> float:
    """Return the key of a record in an order. `hit_bit` says where it was or was not hit."""
    fact, stamp, capacity = memory.fact, memory.seen[row, STAMP], memory.capacity
    if order == LAST_BUT_ONE:
        return float(fact[row, BEFORE] + _TIE_SHARE * stamp)
    if order >= NUM_DELAYS:
        half_life = LONGEST * capacity / (1 << (order - NUM_DELAYS))
        worth = memory.worth[row, order - NUM_DELAYS]
        return float(np.log2(worth) + stamp / half_life)
    delay = 0.0 if fact[row, FLAGS] & hit_bit else DELAYS[order] * capacity + _TIE_BLOCKS
    return float(stamp - delay)


@compiled(types.void(_memory, _int, _int))
def trim(memory: Memory, order: int, room: int) -> None:
    """Evict the lowest keys from a simulated cache until `room` contents are left."""
    fact, number, member = memory.fact, memory.number, memory.member
    count = number[NUM_INSIDE + order]
    keys = np.empty(count)
    for at in range(count):
        keys[at] = key_of(memory, member[order, at], order, WAS_INSIDE << order)
    limit = np.partition(keys, count - room)[count - room]
    num_kept = 0
    for at in range(count):
        row = member[order, at]
        if keys[at] >= limit and num_kept < room:
            member[order, num_kept] = row
            num_kept += 1
        else:
            fact[row, FLAGS] &= ~(IS_INSIDE << order)
    number[NUM_INSIDE + order] = num_kept


@compiled(_numbers(_flags))
def classify(is_new: BoolArray) -> Int64Array:
    """Return the classes of contents that came out of use together, tails first; those of all used
    ones are USED_AGAIN.

    New contents next to each other came with one request; those they continue come after them.
    """
    lines, start = np.full(len(is_new), USED_AGAIN), 0
    while start < len(is_new):
        end = start
        while end < len(is_new) and is_new[end]:
            end += 1
        line, length = 0, (end - start) // 2
        while length and line < _MOST_LENGTHS - 1:
            line, length = line + 1, length // 2
        behind = end
        while behind < len(is_new) and not is_new[behind]:
            behind += 1
        lines[start:end] = line + _MOST_LENGTHS * (behind - end > _SHARED_START_BLOCKS)
        start = behind
    return lines


@compiled(_reals(_memory))
def weights_of(memory: Memory) -> Float64Array:
    """Return the weight of a use, by class."""
    num_reused, num_used = memory.real[REUSED:USED], memory.real[USED:]
    mean = (num_reused.sum() + 1) / (num_used.sum() + 50)
    chances = (num_reused + _PRIOR_USES * mean) / (num_used + _PRIOR_USES)
    weights: Float64Array = (chances / mean) ** 2
    return weights


@compiled(types.void(_memory, _int, types.boolean, _int, _reals), inline="always")
def use(memory: Memory, row: int, is_hit: bool, line: int, weights: Float64Array) -> None:
    """Record a use, in a class of new contents or USED_AGAIN. STAMP and BEFORE are set already."""
    _, fact, worth, _, real, _, _, _, capacity, _ = memory
    real[REUSED + fact[row, LINE]] += fact[row, USES] > 0
    fact[row, FLAGS] = (fact[row, FLAGS] & ~WAS_HIT) | (WAS_HIT * is_hit)
    fact[row, USES] += 1
    if line == USED_AGAIN:
        for limit in _USE_LIMITS:
            line += fact[row, USES] > limit
    fact[row, LINE] = line
    real[USED + line] += 1
    fading = 2.0 ** ((fact[row, BEFORE] - memory.seen[row, STAMP]) / (LONGEST * capacity))
    for place in range(NUM_HALF_LIVES):
        worth[row, place] = worth[row, place] * fading + weights[line]
        fading *= fading


@compiled(types.void(_memory, _names, _int))
def simulate(memory: Memory, rows: Int64Array, num_requests: int) -> None:
    """Use sampled contents in the simulated caches, and let the order rule that had most hits, of
    LRU and those whose lead over it is sure. A cache is trimmed when it has a few contents too
    many; a sample is then a few smaller, so that it is trimmed less often."""
    _, fact, _, number, real, member, _, _, capacity, scale = memory
    fading = 0.5 ** (len(rows) * scale / (_HORIZON_ROOMS * capacity))
    real[SAMPLED] = real[SAMPLED] * fading + len(rows)
    real[REQUESTS] = real[REQUESTS] * fading + num_requests
    room, hits = max(1, number[ROOM] // scale), np.zeros(NUM_ORDERS)
    spare = room // (16 if scale == 1 else 4)
    for row in rows:
        inside = fact[row, FLAGS] & (WAS_INSIDE - IS_INSIDE)
        fact[row, FLAGS] = fact[row, FLAGS] % WAS_INSIDE + inside * (WAS_INSIDE // IS_INSIDE)
    for order in range(NUM_ORDERS):
        is_inside, was_inside = IS_INSIDE << order, WAS_INSIDE << order
        for row in rows:
            hits[order] += (fact[row, FLAGS] & was_inside) != 0
            if not fact[row, FLAGS] & is_inside:
                fact[row, FLAGS] |= is_inside
                member[order, number[NUM_INSIDE + order]] = row
                number[NUM_INSIDE + order] += 1
                if number[NUM_INSIDE + order] == len(member[order]):
                    trim(memory, order, room)
        if number[NUM_INSIDE + order] > room + spare:
            trim(memory, order, room if scale == 1 else room - spare)
    leads, squares = real[LEAD:SQUARES], real[SQUARES:REUSED]
    leads[:] = leads * fading + hits - hits[0]
    squares[:] = squares * fading**2 + (hits - hits[0]) ** 2
    least = _LEAST_REQUESTS * real[SAMPLED] / max(1.0, real[REQUESTS])
    gains = np.where(leads > np.sqrt(squares) + least, leads, -np.inf)
    gains[number[RULING]] += least
    number[RULING] = np.argmax(gains)


@compiled(_reals(_memory, _entries))
def keys_of(memory: Memory, entries: IndexArray) -> Float64Array:
    """Return the keys of entries in the order that rules; the lowest one if they are forgotten."""
    keys = np.full(len(entries), -np.inf)
    for at in range(len(entries)):
        name = memory.held[entries[at], 0]
        row = row_of(memory, name, memory.held[entries[at], 1])
        if memory.seen[row, NAME] == name:
            keys[at] = key_of(memory, row, memory.number[RULING], WAS_HIT)
    return keys


@compiled(types.void(_memory))
def catch_up(memory: Memory) -> None:
    """Record the uses in `past`."""
    seen, fact, _, number, _, _, _, past, _, _ = memory
    now, weights = number[CLOCK], weights_of(memory)
    number[CLOCK] -= min(number[NUM_PAST], len(past))
    number[NUM_PAST] = 0
    while number[CLOCK] < now:
        waiting = past[number[CLOCK] & (len(past) - 1)]
        name, line = waiting >> _LINE_BITS, waiting % (1 << _LINE_BITS)
        number[CLOCK] += 1
        if name >= 0 and (name >> _SAMPLED_BIT) & (memory.scale - 1):
            row = find(memory, name, 0, True)
            fact[row, BEFORE] = seen[row, STAMP] if fact[row, USES] else 0
            seen[row, STAMP] = number[CLOCK]
            use(memory, row, line % 2 == 1, line // 2, weights)


@compiled(types.void(_memory, _int, _entries, _names, _flags))
def note_uses(
    memory: Memory, num_unused: int, entries: IndexArray, names: Int64Array, hits: BoolArray
) -> None:
    """Learn from contents that come out of use together, tails first. `hits` says which of them
    were unused before, in these entries. Without entries, LRU evicts: those records that are not
    sampled wait in `past`."""
    seen, fact, worth, number, _, _, held, past, _, scale = memory
    is_all = len(entries) > 0
    if is_all and number[NUM_PAST]:
        catch_up(memory)
    number[ROOM] = max(number[ROOM], num_unused)
    count, num_sampled, start, is_ghost = 0, 0, number[CLOCK], False
    rows, is_new = np.full(len(names), -1), np.zeros(len(names), np.bool_)
    ahead = np.empty(len(names))
    for at in range(len(names)):  # read ahead: the processor waits for these at the same time
        row = (names[at] & (len(seen) // WAYS - 1)) * WAYS
        if is_all:
            hits[at] &= held[entries[at], 0] == names[at]
            row = held[entries[at], 1] & -WAYS if hits[at] else row
        if is_all or not (hits[at] or (names[at] >> _SAMPLED_BIT) % _SPARSE):
            ahead[at] = seen[row, STAMP] + seen[row + WAYS // 2, STAMP]
    for at in range(len(names)):
        bits = (names[at] >> _SAMPLED_BIT) & (scale - 1)
        is_recorded, is_ghost = is_all or bits == 0, is_ghost and not hits[at]
        if is_recorded or not (hits[at] or bits % _SPARSE):
            row = find(memory, names[at], held[entries[at], 1] if is_all else 0, hits[at])
            if is_all:
                held[entries[at], 0], held[entries[at], 1] = names[at], row
                if seen[row, STAMP] > start:
                    continue  # twice in this batch
            is_ghost, hits[count] = seen[row, STAMP] > 0 and not hits[at], hits[at]
            if is_recorded:
                rows[count], fact[row, BEFORE] = row, seen[row, STAMP]
            if is_recorded or not seen[row, STAMP]:
                seen[row, STAMP] = start + count + 1
        is_new[count] = not (is_ghost or hits[count])
        count += 1
    number[CLOCK] += count
    for at in range(count):
        ahead[at] = worth[rows[at], 0] + worth[rows[at], -1] if rows[at] >= 0 else 0
    lines, weights = classify(is_new[:count]), weights_of(memory)
    for at in range(count):
        if not is_all:
            waiting = (names[at] << _LINE_BITS) + 2 * lines[at] + hits[at]
            past[(start + at) & (len(past) - 1)] = waiting
        if rows[at] >= 0:
            use(memory, rows[at], hits[at], lines[at], weights)
            if not (seen[rows[at], NAME] >> _SAMPLED_BIT) & (scale - 1):
                rows[num_sampled] = rows[at]
                num_sampled += 1
    number[NUM_PAST] += 0 if is_all else count
    if num_sampled:
        starts = is_new[1:count] & ~is_new[: count - 1]
        simulate(memory, rows[:num_sampled], 1 if is_all else 1 + starts.sum())
