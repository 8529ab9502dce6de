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

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.compiled import array_type
from kvcache.core.machine import INT, INT_ROWS, INTS, NEW_INT_ROWS, NOTHING, kernel, routine

TOKENS, COMPUTED, OWN, CLIENT, SYNCED, FIRST_IN_RING, ROW, CONFIRMED, MARK, NUM_COLUMNS = range(10)
"""Columns of a row. OWN is where its last forward ended, drafts left out. Its request has SYNCED of
its tokens. The ring has the tokens from FIRST_IN_RING on. ROW is its number in the core. CONFIRMED
is scratch. MARK is the stamp of the last check that saw the row."""

BEFORE_COMPUTED, BEFORE_TOKENS, SETTLED, END_OF_OWN, END, CONFIRMED_END, NUM_POSITIONS = range(7)
"""Lines of `positions`, all in tokens: COMPUTED and TOKENS before the step; COMPUTED without
rejected drafts; where the forward ends without and with drafts; how many of the row's own tokens
were computed before this step."""

(
    IS_RIGHT, IS_CROWDED, BAD_COLUMNS, BAD_OFFSETS, BAD_TOKEN, BAD_SLOT, NOT_RUNNING, NAMED_TWICE,
    BAD_NEW, BAD_DRAFTS, TOO_MANY_DRAFTS, BAD_REJECTED, TOO_MANY_NEW, TOO_FEW_TOKENS, TOO_LONG,
    BAD_DRAFT_IDS,
) = range(16)  # fmt: skip
"""Results of `check_rows`. IS_CROWDED: the ring lacks room for a row's tokens. The others are
mistakes."""

MISTAKES = {
    BAD_SLOT: "does not exist: slots are 0 to {last_slot}",
    NOT_RUNNING: "does not run a request of this client: name slots of its running requests only",
    NAMED_TWICE: "runs {times} times: name each slot once",
    BAD_NEW: "has num_new_tokens {new}: pass 0 or more",
    BAD_DRAFTS: "has num_draft_tokens {drafts}: pass 0 to num_new_tokens",
    TOO_MANY_DRAFTS: "has num_draft_tokens {drafts}: {draft_remedy}",
    BAD_REJECTED: "has num_rejected_tokens {rejected}: pass 0 to the number of drafts that were "
    "scheduled last",
    TOO_MANY_NEW: "has num_new_tokens {new}: the model takes {most} tokens, schedule fewer",
    TOO_FEW_TOKENS: "would have {own_end} computed tokens, but has {after} tokens: append the "
    "tokens first, or schedule fewer",
    TOO_LONG: "would have {after} tokens, the model takes {most}: finish the request",
}
"""The words for mistakes of one row."""

FREE = -1
"""CLIENT of a free slot."""


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
    def requests(self) -> Sequence[Any]:
        """The request in each slot, which may lack its newest tokens."""

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
    types.UniTuple(INT, 2), NEW_INT_ROWS, LONGS, *[INTS] * 8, NEW_INT_ROWS, NEW_LONGS, *[INT] * 5,
    checks_types=True,
)  # fmt: skip
def check_rows(
    rows: Any, generation: Any, slots: Any, num_new: Any, num_draft: Any, num_rejected: Any,
    offsets: Any, token_ids: Any, draft_token_ids: Any, leaving: Any, positions: Any,
    generations: Any, stamp: int, client: int, max_model_len: int, most_drafts: int, width: int,
) -> Any:  # fmt: skip
    """Check the rows of a step, and fill in their `positions` and `generations`. Return IS_RIGHT,
    IS_CROWDED or the first mistake, and the row that has it.

    No row may be in one of the slots `leaving`. No row has the mark `stamp` yet.
    """
    count, none = len(slots), np.int64(0)
    if not (count == len(num_new) == len(num_draft) == len(num_rejected) == len(offsets) - 1):
        return np.int64(BAD_COLUMNS), none
    falls = none
    for i in range(count):
        falls |= np.int64(offsets[i + 1]) - offsets[i]
    if falls < 0 or offsets[0] != 0 or offsets[count] != len(token_ids):
        return np.int64(BAD_OFFSETS), none
    signs = np.int32(0)
    for k in range(len(token_ids)):
        signs |= token_ids[k]
    for k in range(len(draft_token_ids)):
        signs |= draft_token_ids[k]
    if signs < 0:
        return np.int64(BAD_TOKEN), none
    for k in range(len(leaving)):
        rows[leaving[k], MARK] = stamp
    result = num_drafts = what = none
    for i in range(count):
        slot = np.int64(slots[i])
        if slot < 0 or slot >= len(rows):
            return np.int64(BAD_SLOT), i
        if rows[slot, CLIENT] != client:
            return np.int64(NOT_RUNNING), i
        before_computed, before = np.int64(rows[slot, COMPUTED]), np.int64(rows[slot, TOKENS])
        new, drafts = np.int64(num_new[i]), np.int64(num_draft[i])
        rejected, after = np.int64(num_rejected[i]), before + offsets[i + 1] - offsets[i]
        settled = before_computed - rejected
        own_end = settled + new - drafts
        if rows[slot, MARK] == stamp:
            what = np.int64(NAMED_TWICE)
        elif new < 0:
            what = np.int64(BAD_NEW)
        elif drafts < 0 or drafts > new:
            what = np.int64(BAD_DRAFTS)
        elif rejected < 0 or rejected > max(before_computed - before, none):
            what = np.int64(BAD_REJECTED)
        elif new > max_model_len - settled:
            what = np.int64(TOO_MANY_NEW)
        elif drafts > most_drafts:
            what = np.int64(TOO_MANY_DRAFTS)
        elif own_end > after:
            what = np.int64(TOO_FEW_TOKENS)
        elif after > max_model_len:
            what = np.int64(TOO_LONG)
        if what:
            return what, i
        rows[slot, MARK] = stamp
        num_drafts += drafts
        if after - rows[slot, SYNCED] > width:
            result = np.int64(IS_CROWDED)
        positions[BEFORE_COMPUTED, i], positions[BEFORE_TOKENS, i] = before_computed, before
        positions[SETTLED, i], positions[END_OF_OWN, i] = settled, own_end
        positions[END, i], positions[CONFIRMED_END, i] = settled + new, min(settled, before)
        generations[i] = generation[slot]
    if len(draft_token_ids) and len(draft_token_ids) != num_drafts:
        return np.int64(BAD_DRAFT_IDS), none
    return result, none


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
