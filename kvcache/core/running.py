"""The columns of running rows, and what a step does to all of its rows at once, as machine code.

The manager owns these columns, by slot, beside those of the core, by row; a step reads and writes
both in one go (rows.py). Refuses rows by `check_rows`; the manager says what is wrong with them.

    slot           0     1     2     3
    TOKENS       [ 33 | 120 |   0 | 17 ]      tokens of the row, those its request lacks included
    COMPUTED     [ 32 | 119 |   0 | 17 ]      positions computed or scheduled, drafts included
    CLIENT       [  1 |   2 |  -1 |  1 ]      whose row it is; -1 is a free slot

A row's newest tokens are in a ring, token `t` in column `t % width`. A unit of tokens, whose end
may be the end of a block, is never torn apart there:

    ring         [ .... unit 6 .... | .... unit 7 .... | unit 8 >>| .... unit 5 .... ]
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.compiled import array_type
from kvcache.core.machine import (
    INT,
    INT_ROWS,
    INTS,
    NEW_INT_ROWS,
    NEW_INTS,
    NOTHING,
    kernel,
    routine,
)

TOKENS, COMPUTED, OWN, CLIENT, SYNCED, FIRST_IN_RING, CONFIRMED, MARK, NUM_COLUMNS = range(9)
"""Of a row. OWN is where its last forward ended, drafts left out; its request holds SYNCED of its
tokens, and those from FIRST_IN_RING on are in the ring; CONFIRMED is scratch, and MARK the stamp of
the check that saw the row last."""

BEFORE_COMPUTED, BEFORE_TOKENS, SETTLED, END_OF_OWN, END, CONFIRMED_END, NUM_POSITIONS = range(7)
"""Of a row of a step, in `figures`: how far it had come before; COMPUTED once rejected drafts are
taken back; where its forward ends with its own tokens, and with its drafts; how many of its tokens
were computed before this step and are its own."""

IS_WRONG, IS_CROWDED = 1, 2
"""What `check_rows` says: a row or a column is wrong; the ring has no room for a row's tokens."""

FREE = -1
"""Generation and CLIENT of a slot in which nobody sits."""


class RunningRows(NamedTuple):
    """The running rows of a step. Shapes `(n,)`; `figures` `(NUM_FIGURES, n)`, see above.

    Row `i` gets the tokens `[offsets[i], offsets[i + 1])`; `is_crowded`: the ring may lack room for
    those of some row. `generations` say which occupancy of its slot each row is.
    """

    slots: Int32Array
    generations: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    offsets: Int32Array
    token_ids: Int32Array
    is_crowded: bool


class RowTable(Protocol):
    """Who owns the columns of running rows, their ring of tokens, and their requests, by slot."""

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The columns. Shape `(slots, NUM_COLUMNS)`."""

    @property
    def ring(self) -> npt.NDArray[np.int32]:
        """The newest tokens. Shape `(slots, width)`."""

    @property
    def requests(self) -> npt.NDArray[np.object_]:
        """Requests, which may lack their newest tokens. Shape `(slots,)`."""

    def sync(self, slot: int) -> None:
        """Bring the request in a slot up to date with all its tokens."""


NO_ROWS = RunningRows(
    EMPTY_INT32,
    np.empty(0, np.int64),
    np.empty((NUM_POSITIONS, 0), np.int32),
    EMPTY_INT32,
    EMPTY_INT32,
    False,
)

LONGS = array_type("int64", is_read=True)
NEW_LONGS = array_type("int64")


@kernel(
    INT, NEW_INT_ROWS, LONGS, *[INTS] * 8, NEW_INT_ROWS, NEW_LONGS, *[INT] * 5, checks_types=True
)
def check_rows(
    rows: Any, generation: Any, slots: Any, num_new: Any, num_draft: Any, num_rejected: Any,
    offsets: Any, token_ids: Any, draft_token_ids: Any, leaving: Any, positions: Any,
    generations: Any, stamp: int, client: int, max_model_len: int, most_drafts: int, width: int,
) -> int:  # fmt: skip
    """Check the rows of a step, and note their `figures` and `generations`; see `IS_WRONG`.

    Rows in the slots `leaving` must not be among them. No row is marked with `stamp` before.
    """
    count = len(slots)
    if not (
        count == len(num_new) == len(num_draft) == len(num_rejected) == len(offsets) - 1
        and offsets[0] == 0
        and offsets[count] == len(token_ids)
    ):
        return IS_WRONG
    signs = np.int32(0)
    for k in range(len(token_ids)):
        signs |= token_ids[k]
    for k in range(len(draft_token_ids)):
        signs |= draft_token_ids[k]
    if signs < 0:
        return IS_WRONG
    for k in range(len(leaving)):
        rows[leaving[k], MARK] = stamp
    result = num_drafts = np.int64(0)
    for i in range(count):
        slot = np.int64(slots[i])
        if slot < 0 or slot >= len(rows) or rows[slot, CLIENT] != client:
            return IS_WRONG
        before_computed, before = np.int64(rows[slot, COMPUTED]), np.int64(rows[slot, TOKENS])
        new, drafts = np.int64(num_new[i]), np.int64(num_draft[i])
        rejected, num_appended = (
            np.int64(num_rejected[i]),
            np.int64(offsets[i + 1]) - np.int64(offsets[i]),
        )
        settled, after = before_computed - rejected, before + num_appended
        own_end = settled + new - drafts
        if (
            (rows[slot, MARK] == stamp)
            | (num_appended < 0)
            | (drafts < 0)
            | (drafts > min(new, most_drafts))
            | (rejected < 0)
            | (rejected > max(before_computed - before, np.int64(0)))
            | (new > max_model_len - settled)
            | (own_end > after)
            | (after > max_model_len)
        ):
            return IS_WRONG
        rows[slot, MARK] = stamp
        num_drafts += drafts
        if after - rows[slot, SYNCED] > width:
            result = np.int64(IS_CROWDED)
        positions[BEFORE_COMPUTED, i], positions[BEFORE_TOKENS, i] = before_computed, before
        positions[SETTLED, i], positions[END_OF_OWN, i] = settled, own_end
        positions[END, i], positions[CONFIRMED_END, i] = settled + new, min(settled, before)
        generations[i] = generation[slot]
    if len(draft_token_ids) and len(draft_token_ids) != num_drafts:
        return IS_WRONG
    return int(result)


@routine
def append(rows: Any, ring: Any, slots: Any, offsets: Any, token_ids: Any) -> None:
    """Append the tokens `[offsets[i], offsets[i + 1])` to row `i`; the ring has room for them."""
    width = ring.shape[1]
    for i in range(len(slots)):
        slot, count = slots[i], np.int64(rows[slots[i], TOKENS])
        for k in range(offsets[i], offsets[i + 1]):
            ring[slot, count % width] = token_ids[k]
            count += 1
        rows[slot, TOKENS] = count


@kernel(NOTHING, NEW_INT_ROWS, NEW_INT_ROWS, INTS, INTS, INTS)
def append_tokens(rows: Any, ring: Any, slots: Any, offsets: Any, token_ids: Any) -> None:
    """Do `append`."""
    append(rows, ring, slots, offsets, token_ids)


@routine
def note_ends(rows: Any, slots: Any, positions: Any, has_run: Any) -> None:
    """Note how far each row is computed: to its end where it got its blocks."""
    for i in range(len(slots)):
        slot = slots[i]
        if has_run[i]:
            rows[slot, COMPUTED] = positions[END, i]
            if positions[END, i] > positions[SETTLED, i]:
                rows[slot, OWN] = positions[END_OF_OWN, i]
        else:
            rows[slot, COMPUTED] = positions[SETTLED, i]


@kernel(NOTHING, NEW_INT_ROWS, INTS, INT_ROWS, INTS)
def note_row_ends(rows: Any, slots: Any, positions: Any, has_run: Any) -> None:
    """Do `note_ends`."""
    note_ends(rows, slots, positions, has_run)


@kernel(NOTHING, NEW_INT_ROWS, LONGS, INTS, LONGS, INT_ROWS)
def confine(rows: Any, generation: Any, slots: Any, generations: Any, positions: Any) -> None:
    """Note as CONFIRMED what rows had before a step, where the same request is in the slot."""
    for i in range(len(slots)):
        slot = slots[i]
        if generation[slot] == generations[i]:
            rows[slot, CONFIRMED] = min(positions[BEFORE_COMPUTED, i], positions[BEFORE_TOKENS, i])


@kernel(INT, INT_ROWS, INT_ROWS, INTS, INTS, NEW_INT_ROWS, NEW_INTS)
def read_units(rows: Any, ring: Any, slots: Any, units: Any, tokens: Any, missing: Any) -> int:
    """Copy the tokens of row `i`'s unit `units[i]` into `tokens[i]`; return how many units are
    `missing` in the ring, whose indices these become."""
    width, unit_tokens = ring.shape[1], tokens.shape[1]
    num_missing = 0
    for i in range(len(slots)):
        slot, start = slots[i], units[i] * unit_tokens
        if start < max(rows[slot, FIRST_IN_RING], rows[slot, TOKENS] - width):
            missing[num_missing] = i
            num_missing += 1
            continue
        column = start % width
        for k in range(unit_tokens):
            tokens[i, k] = ring[slot, column + k]
    return num_missing
