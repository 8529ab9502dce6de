"""What a step looks at and changes in the arrays of many rows, as compiled functions.

Under rows.py and leaf_tails.py, which keep the arrays, and under row_batch.py and leaf_growth.py,
which know when to do what. Refuses to check: rows, columns, units and blocks exist, tables are wide
enough, and tails have room.

`figures` has a column for each row, and these rows of numbers:

    0 .. G-1        columns in use, by group        -5  published     -2  skip_tokens
    G .. 2G-1       columns that nobody reads       -4  capacity      -1  next_tokens
                    any more, by group              -3  full_tokens

`found` is what `find_busy` says of the rows of a batch: `PLACES` to `CACHED` of each for which
something is to be done, the others as indices into these.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.arrays import IndexArray, Int32Array
from kvcache.compiled import array_type, compiled, tuple_type

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NEVER = 1 << 62
_NULL_BLOCK = 0
_NULL_HANDLE = -(1 << 32)
"""As in `BlockStore`: what is compiled sees its own file only."""

PUBLISHED, CAPACITY, FULL, SKIP, NEXT = -5, -4, -3, -2, -1
NUM_LIMITS = 5

PLACES, ROWS, COMPUTED, SLOT_TOKENS, CACHED, LATE, SHORT, FILLED = range(8)
NUM_FOUND = 8

BEHIND, UNSLOTTED = 1, 2
"""What may be odd about a row: computed beyond its slots; to cache more than it gets slots for."""

GROUP, WINDOW, CHUNK, BLOCK_TOKENS = range(4)
"""Columns of the rules of groups that skip: by a window, or where that is 0 by a chunk."""

_FIGURES = array_type("int64", 2)
_READ_FIGURES = array_type("int64", 2, is_read=True)
_TABLE = array_type("int32", 2)
_ROWS = array_type("intp", is_read=True)
_TOKENS = array_type("int32", is_read=True)
_FOUND = array_type("int64", 2)
_READ_FOUND = array_type("int64", 2, is_read=True)
_READ_TABLE = array_type("int32", 2, is_read=True)
_READ_BLOCKS = array_type("intp", 2, is_read=True)
_READ_HANDLES = array_type("int64", is_read=True)
_BLOCKS = array_type("intp", 2)


@compiled(tuple_type(types.intp, 7)(_READ_FIGURES, _ROWS, _TOKENS, _TOKENS, _TOKENS, _FOUND))
def find_busy(  # noqa: PLR0917 - the columns of a batch
    figures: Int64Array,
    rows: IndexArray,
    num_computed: Int32Array,
    num_slot_tokens: Int32Array,
    num_cached: Int32Array,
    found: Int64Array,
) -> tuple[int, int, int, int, int, int, int]:
    """Write down for which rows something is to be done, and say how many there are of each kind.

    Returns how many are busy, how many of them read some columns no more (late), lack slots (short)
    and fill a unit; the most tokens for which one lacks slots; the most slots a short one wants;
    and what is odd about any, `BEHIND` or `UNSLOTTED` or both, otherwise 0.
    """
    num_busy = num_late = num_short = num_filled = 0
    most_lacking = most_wanted = oddity = 0
    for place in range(len(rows)):
        row = rows[place]
        computed, wanted, cached = num_computed[place], num_slot_tokens[place], num_cached[place]
        is_late = computed >= figures[SKIP, row]
        if not is_late and max(wanted, cached) < figures[NEXT, row]:
            continue
        found[PLACES, num_busy] = place
        found[ROWS, num_busy] = row
        found[COMPUTED, num_busy] = computed
        found[SLOT_TOKENS, num_busy] = wanted
        found[CACHED, num_busy] = cached
        capacity = figures[CAPACITY, row]
        if cached > wanted:
            oddity |= UNSLOTTED
        if computed > capacity:
            oddity |= BEHIND
        if is_late:
            found[LATE, num_late] = num_busy
            num_late += 1
        if wanted > capacity:
            found[SHORT, num_short] = num_busy
            num_short += 1
            most_lacking = max(most_lacking, wanted - capacity)
            most_wanted = max(most_wanted, wanted)
        if cached >= figures[FULL, row]:
            found[FILLED, num_filled] = num_busy
            num_filled += 1
        num_busy += 1
    return num_busy, num_late, num_short, num_filled, most_lacking, most_wanted, oddity


@compiled(
    types.void(
        _TABLE,
        _FIGURES,
        types.intp,
        types.intp,
        _READ_FOUND,
        _TOKENS,
        array_type("int32"),
        _TOKENS,
        _TABLE,
    )
)
def extend_rows(  # noqa: PLR0917 - what a table is, what changes in it, and who is told
    table: Int32Array,
    figures: Int64Array,
    group: int,
    block_tokens: int,
    found: Int64Array,
    block_ids: Int32Array,
    references: Int32Array,
    slots: Int32Array,
    patch: Int32Array,
) -> None:
    """Put a block behind each short row in the table of a group, and note it in a patch.

    `block_ids`, each of which gets a reference, are those of all groups, row by row; so are the
    columns of `patch`: slots, groups, columns, counts. Groups come in order, and after the last
    one a row's capacity is that of its table.
    """
    num_groups = (len(figures) - NUM_LIMITS) // 2
    for i in range(len(block_ids) // num_groups):
        busy = found[SHORT, i]
        row = found[ROWS, busy]
        column = figures[group, row]
        k = i * num_groups + group
        block_id = block_ids[k]
        table[row, column] = block_id
        references[block_id] = 1
        figures[group, row] = column + 1
        patch[0, k] = slots[found[PLACES, busy]]
        patch[1, k] = group
        patch[2, k] = column
        patch[3, k] = 1
        if group == num_groups - 1:
            capacity = (column + 1) * block_tokens
            figures[CAPACITY, row] = capacity
            figures[NEXT, row] = min(capacity + 1, figures[FULL, row])


@compiled(types.intp(_FIGURES, _READ_FIGURES, _READ_FOUND, types.intp, _FIGURES, _FIGURES))
def plan_skips(  # noqa: PLR0917 - what is known, and what comes of it
    figures: Int64Array,
    rules: Int64Array,
    found: Int64Array,
    num_late: int,
    ends: Int64Array,
    places: Int64Array,
) -> int:
    """Find what late rows read no more, and note when they will skip again.

    `ends[k, i]` becomes the first column that late row `i` keeps by rule `k`, `places[k, i]` where
    the first of those that go is among all of them: row by row, rule by rule. Returns how many go.
    """
    num_groups = (len(figures) - NUM_LIMITS) // 2
    total = 0
    for i in range(num_late):
        busy = found[LATE, i]
        row, computed = found[ROWS, busy], found[COMPUTED, busy]
        next_skip = NEVER
        for k in range(len(rules)):
            group, window, chunk = rules[k, GROUP], rules[k, WINDOW], rules[k, CHUNK]
            size = rules[k, BLOCK_TOKENS]
            if window:
                skipped = max(computed - (window - 1), 0) // size
            else:
                skipped = computed // chunk * chunk // size
            first = figures[num_groups + group, row]
            end = max(first, min(skipped, figures[group, row]))
            ends[k, i] = end
            places[k, i] = total
            total += end - first
            if window:
                next_skip = min(next_skip, (end + 1) * size + (window - 1))
            else:
                next_skip = min(next_skip, (end * size // chunk + 1) * chunk)
        figures[SKIP, row] = next_skip
    return total


@compiled(
    types.void(
        _TABLE,
        _FIGURES,
        types.intp,
        _READ_FOUND,
        array_type("int64", is_read=True),
        array_type("int64", is_read=True),
        types.intp,
        array_type("intp"),
    )
)
def take_skipped(  # noqa: PLR0917 - what `plan_skips` found, and where it goes
    table: Int32Array,
    figures: Int64Array,
    group: int,
    found: Int64Array,
    ends: Int64Array,
    places: Int64Array,
    num_late: int,
    block_ids: IndexArray,
) -> None:
    """Move what late rows read no more from the table of a group to its places in `block_ids`:
    of each row right to left."""
    first_kept = figures[(len(figures) - NUM_LIMITS) // 2 + group]
    for i in range(num_late):
        row = found[ROWS, found[LATE, i]]
        first, end, place = first_kept[row], ends[i], places[i]
        for column in range(end - 1, first - 1, -1):
            block_ids[place] = table[row, column]
            table[row, column] = _NULL_BLOCK
            place += 1
        first_kept[row] = end


@compiled(
    tuple_type(types.intp, 2)(
        _READ_TABLE,
        _READ_FIGURES,
        _TOKENS,
        _ROWS,
        _READ_FOUND,
        tuple_type(types.intp, 5),
        _BLOCKS,
        _BLOCKS,
        array_type("boolean", 2),
    )
)
def gather_units(  # noqa: PLR0917 - what is known, and what comes of it
    table: Int32Array,
    figures: Int64Array,
    references: Int32Array,
    tail_counts: IndexArray,
    found: Int64Array,
    sizes: tuple[int, int, int, int, int],
    growing: IndexArray,
    blocks: IndexArray,
    marks: BoolArray,
) -> tuple[int, int]:
    """Note which units the rows that fill one do, and the block of a group that ends with each.

    `sizes`: which group; how many units its blocks are long; whether it is ordered; tokens of a
    unit; units of a tail. `growing[:, i]` becomes the place, row and unit of the one numbered `i`
    among them, `blocks[group, i]` its block (0: none ends there). It is odd (`marks[0, i]`) where
    it fills further units or where others have references to its block of an ordered group, and
    full (`marks[1, i]`) where its tail is. Groups come in order, and the last one's answer counts:
    how many rows are odd, how many full.
    """
    group, num_units, is_ordered, unit_tokens, max_units = sizes
    num_odd = num_full = 0
    for i in range(blocks.shape[1]):
        busy = found[FILLED, i]
        row = found[ROWS, busy]
        unit = figures[PUBLISHED, row]
        block_id = 0
        if (unit + 1) % num_units == 0:
            block_id = table[row, unit // num_units]
        blocks[group, i] = block_id
        if group == 0:
            growing[0, i], growing[1, i], growing[2, i] = found[PLACES, busy], row, unit
            marks[0, i] = found[CACHED, busy] >= (unit + 2) * unit_tokens
            marks[1, i] = tail_counts[row] >= max_units
        if is_ordered and references[block_id] > 1:
            marks[0, i] = True
        num_odd += marks[0, i]
        num_full += marks[1, i]
    return num_odd, num_full


@compiled(
    types.void(
        _READ_TABLE,
        _READ_TABLE,
        _READ_BLOCKS,
        _READ_HANDLES,
        _ROWS,
        _ROWS,
        _TABLE,
        _FIGURES,
    )
)
def pack_units(  # noqa: PLR0917 - what a unit is made of
    last_digests: Int32Array,
    tokens: Int32Array,
    blocks: IndexArray,
    present_handles: Int64Array,
    rows: IndexArray,
    group_places: IndexArray,
    packed: Int32Array,
    handles: Int64Array,
) -> None:
    """Lay each row's new unit out as tails do: digest before it, tokens, ids, handles.

    `group_places[g]` is an ordered group's place among those; of another one it is `-1 - place`.
    `handles[g, i]` becomes the handle of `blocks[g, i]`.
    """
    num_digest, num_tokens = last_digests.shape[1], tokens.shape[1]
    ids_at, num_ordered = num_digest + num_tokens, 0
    for place in group_places:
        num_ordered += place >= 0
    for i in range(len(rows)):
        row = rows[i]
        for k in range(num_digest):
            packed[i, k] = last_digests[row, k]
        for k in range(num_tokens):
            packed[i, num_digest + k] = tokens[i, k]
        for group in range(len(group_places)):
            block_id, place = blocks[group, i], group_places[group]
            handle = present_handles[block_id] if block_id else _NULL_HANDLE
            handles[group, i] = handle
            if place >= 0:
                packed[i, ids_at + place] = block_id
            else:
                at = ids_at + num_ordered + 2 * (-1 - place)
                packed[i, at] = np.int32(handle & 0xFFFFFFFF)
                packed[i, at + 1] = np.int32(handle >> 32)


@compiled(
    types.void(
        array_type("int32", 3),
        array_type("intp"),
        _TABLE,
        _FIGURES,
        _ROWS,
        _READ_TABLE,
        _READ_TABLE,
        types.intp,
    )
)
def append_units(  # noqa: PLR0917 - all that is known of a row's last units
    tail_units: Int32Array,
    tail_counts: IndexArray,
    last_digests: Int32Array,
    figures: Int64Array,
    rows: IndexArray,
    packed: Int32Array,
    digests: Int32Array,
    unit_tokens: int,
) -> None:
    """Put a unit into the tail of each row, which is published then; `digests` are the units'."""
    for i in range(len(rows)):
        row = rows[i]
        count = tail_counts[row]
        for k in range(packed.shape[1]):
            tail_units[row, count, k] = packed[i, k]
        tail_counts[row] = count + 1
        for k in range(digests.shape[1]):
            last_digests[row, k] = digests[i, k]
        unit = figures[PUBLISHED, row] + 1
        full = (unit + 1) * unit_tokens
        figures[PUBLISHED, row] = unit
        figures[FULL, row] = full
        figures[NEXT, row] = min(figures[CAPACITY, row] + 1, full)
