"""The columns of running rows, and the kernels that change all rows of a step at once.

The manager owns these columns, by slot; the core owns its own, by row. A step reads and writes both
in one call (`rows.py`). `check_rows` refuses bad rows, and the manager reports the mistake.

    slot           0     1     2     3
    TOKENS       [ 33 | 120 |   0 | 17 ]      the row's tokens, also those its request lacks
    COMPUTED     [ 32 | 119 |   0 | 17 ]      positions computed or scheduled, drafts included
    CLIENT       [  1 |   2 |  -1 |  1 ]      the row's client; -1 is a free slot

A row's newest tokens are in a ring, token `t` in column `t % width`. The tokens of one unit are
always contiguous there:

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
    NOTHING,
    kernel,
    routine,
)

TOKENS, COMPUTED, OWN, CLIENT, SYNCED, FIRST_IN_RING, ROW, CONFIRMED, MARK, NUM_COLUMNS = range(10)
"""Columns of a row. OWN is where its last forward ended, drafts left out. Its request has SYNCED of
its tokens. The ring has the tokens from FIRST_IN_RING on. ROW is its number in the core. CONFIRMED
is scratch. MARK is the stamp of the last check that saw the row."""

BEFORE_COMPUTED, BEFORE_TOKENS, SETTLED, END_OF_OWN, END, CONFIRMED_END, NUM_POSITIONS = range(7)
"""Lines of `positions`, all in tokens: COMPUTED and TOKENS before the step; COMPUTED without
rejected drafts; where the forward ends without and with drafts; how many of the row's own tokens
were computed before this step."""

IS_WRONG, IS_CROWDED = 1, 2
"""Results of `check_rows`, if not 0: something is wrong; the ring lacks room for a row's tokens."""

FREE = -1
"""Generation and CLIENT of a free slot."""


class RunningRows(NamedTuple):
    """The running rows of a step. Shapes `(n,)`, and `(NUM_POSITIONS, n)` for `positions`; see
    BEFORE_COMPUTED.

    Row `i` gets the tokens `[offsets[i], offsets[i + 1])`. `generations` say which use of its slot
    each row is. With `is_crowded`, the ring may lack room for some row's tokens.
    """

    slots: Int32Array
    generations: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    offsets: Int32Array
    token_ids: Int32Array
    is_crowded: bool


class RowTable(Protocol):
    """The owner of the running rows' columns, ring of tokens and requests, by slot."""

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
        """Bring the request in a slot up to date with all of its tokens."""


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
    """Check the rows of a step, and fill in their `positions` and `generations`. Return 0, IS_WRONG
    or IS_CROWDED.

    No row may be in one of the slots `leaving`. No row has the mark `stamp` yet.
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
    """Append the tokens `[offsets[i], offsets[i + 1])` to row `i`. The ring has room for them."""
    width = ring.shape[1]
    for i in range(len(slots)):
        slot, count = slots[i], np.int64(rows[slots[i], TOKENS])
        for k in range(offsets[i], offsets[i + 1]):
            ring[slot, count % width] = token_ids[k]
            count += 1
        rows[slot, TOKENS] = count


@routine
def note_ends(rows: Any, slots: Any, positions: Any, has_run: Any) -> None:
    """Set COMPUTED and OWN of each row: to the end of its forward if it got its blocks."""
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
def note_confirmed(
    rows: Any, generation: Any, slots: Any, generations: Any, positions: Any
) -> None:
    """Set CONFIRMED of each row that kept its slot to what was computed before a step."""
    for i in range(len(slots)):
        slot = slots[i]
        if generation[slot] == generations[i]:
            rows[slot, CONFIRMED] = min(positions[BEFORE_COMPUTED, i], positions[BEFORE_TOKENS, i])
