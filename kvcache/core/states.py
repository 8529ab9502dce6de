"""States in tables: which columns get blocks, which blocks move on, and where forwards ended.

For groups that keep states (`kinds/mamba.py` draws such a table); `rows.py` calls it. A row's
`forward` says where its reserved forward ends and where the previous one ended. Blocks that a long
forward passes move to the columns that it writes. So a request never has more states than its spec
allows. Only a unit at which a forward ended has a state to publish.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.columns import columns_of, search_of
from kvcache.core.kinds.mamba import column_of
from kvcache.core.kinds.rule import KIND, LENGTH, STATE
from kvcache.core.machine import inner, routine
from kvcache.core.names import *
from kvcache.core.pool import take


@inner
def first_written(core: Any, r: int, g: int, held: int) -> int:
    """Return the first column, from column `held` on, to which the forward writes a state."""
    c = columns_of(core)
    return max(held, column_of(c.group[g], search_of(core).forward[r, OWN_END]))


@routine
def read_apart(core: Any, r: int, g: int, held: int, computed: int) -> int:
    """Return the column, from column `held` on, whose state the forward reads although no forward
    of the row wrote it: the state comes with external tokens. -1: there is none."""
    read = column_of(columns_of(core).group[g], computed)
    return read if held <= read < first_written(core, r, g, held) else np.int64(-1)


@routine
def next_spare(core: Any, r: int, g: int, i: int) -> int:
    """Return the first column, from column `i` on, with a state that the forward passes and that no
    other request references or can hit; -1: there is none."""
    c = columns_of(core)
    s = search_of(core)
    last = column_of(c.group[g], s.forward[r, LAST_END])
    written = column_of(c.group[g], s.forward[r, OWN_END])
    if s.forward[r, LAST_END] < 0 or written <= last + 1:
        return np.int64(-1)
    start = max(np.int64(i), np.int64(c.row[r, KEPT + 2 * g]))
    for k in range(start, min(written, np.int64(c.row[r, COLUMNS + 2 * g]))):
        b = np.int64(c.table[r * len(c.group) + g, k])
        if b and k != last + s.forward[r, ACCEPTED]:
            if c.block[b, REF] == 1 and c.block[b, NODE] == 0:
                return np.int64(k)
    return np.int64(-1)


@routine
def lacking_states(core: Any, r: int, g: int, held: int, computed: int, total: int) -> int:
    """Return how many blocks `grow_states` takes."""
    needed = total - first_written(core, r, g, held)
    needed += read_apart(core, r, g, held, computed) >= 0
    i = next_spare(core, r, g, 0)
    while needed > 0 and i >= 0:
        needed -= 1
        i = next_spare(core, r, g, i + 1)
    return needed


@routine
def grow_states(core: Any, r: int, g: int, held: int, computed: int, total: int) -> None:
    """Extend a table of `held` columns to `total`. Columns whose state the forward reads or writes
    get a block, all others null. Enough blocks are free. Blocks that move on are negative, to tell
    them from blocks just taken."""
    c = columns_of(core)
    line, first = r * len(c.group) + g, first_written(core, r, g, held)
    for i in range(held, first):
        c.table[line, i] = 0
    apart, to = read_apart(core, r, g, held, computed), first
    if apart >= 0:
        to = apart
    i = next_spare(core, r, g, 0)
    while to < total and i >= 0:
        c.table[line, to] = -c.table[line, i]
        c.table[line, i] = 0
        to = to + 1 if to >= first else first
        i = next_spare(core, r, g, i + 1)
    if to < first:
        take(core, c.table[line], to, np.int64(1))
        to = first
    take(core, c.table[line], to, total - to)


@routine
def note_end(core: Any, r: int, computed: int) -> None:
    """Note at which unit the own tokens of a row's forward end. The forward begins after the
    previous one, or after `computed` tokens if it is the first. Ends after that point belong to
    failed forwards and are forgotten. A first forward without own tokens stands for forwards
    elsewhere, whose state comes with external tokens."""
    s = search_of(core)
    unit = columns_of(core).tokens.shape[1]
    end, start = np.int64(s.forward[r, OWN_END]), np.int64(computed)
    is_first = s.forward[r, LAST_END] < 0
    if not is_first:
        start = np.int64(s.forward[r, LAST_END]) + s.forward[r, ACCEPTED]
    if s.forward.shape[1] > ENDS and (end > start or (is_first and end == start)):
        forget_ends(core, r, start // unit)
        if end % unit == 0:
            s.forward[r, ENDS + end // unit - 1] = 1


@routine
def forget_ends(core: Any, r: int, num_units: int) -> None:
    """Forget that forwards of a row ended after unit `num_units`."""
    c = columns_of(core)
    s = search_of(core)
    last = np.int64(0)
    for g in range(len(c.group)):
        if c.group[g, KIND] == STATE:
            last = max(last, np.int64(c.row[r, COLUMNS + 2 * g]) * c.group[g, LENGTH])
    for u in range(num_units, min(last, s.forward.shape[1] - ENDS)):
        s.forward[r, ENDS + u] = 0
