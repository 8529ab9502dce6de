"""What a group that keeps states must hold: the state after the newest token, and after drafts.

    own_end 9, 2 drafts, block 4        column   0    1    2    3    4
                                                null null  s9   s10  s11
    one draft accepted: the next row starts at 10 and reads column 3, then writes column 2 on again

A state is one cell that depends on all tokens before it. The column of the state after `n` own
tokens is the first one that a request of `n` computed tokens does not skip. Where the newest states
of a slot are follows from its last row, so that is remembered here. Refuses rows that continue
from where no state is.
"""

from __future__ import annotations

import numpy as np

from kvcache.base.errors import RequestError
from kvcache.worker.forward_rows import ForwardRows, Int64Array
from kvcache.worker.group_content import Cells, GroupContent, GroupPlace, LiveBlocks, spread

NO_STATE = -1


class StateContent(GroupContent):
    """A cell per state. `_own_ends[slot]` tokens and `_num_drafts[slot]` drafts behind them have
    states, the former in their own column, the latter in the columns behind."""

    cell_name = "state after token"

    def __init__(self, place: GroupPlace) -> None:
        super().__init__(place)
        self._own_ends: Int64Array = np.full(place.max_num_seqs, NO_STATE, dtype=np.int64)
        self._num_drafts: Int64Array = np.zeros(place.max_num_seqs, dtype=np.int64)

    def verify_before(self, rows: ForwardRows) -> int:
        """Compare the states that rows continue from; a new row's is the one its hit ends with.

        A state that comes from elsewhere is not compared: `write` writes it.
        """
        slots = rows.slots[rows.is_new]
        self._own_ends[slots], self._num_drafts[slots] = rows.firsts[rows.is_new], 0
        is_read = (rows.starts == rows.firsts) & (rows.is_new | (rows.starts < rows.ends))
        return self.verify(rows.slots[is_read], rows.starts[is_read])

    def write(self, rows: ForwardRows, seq: int) -> None:
        loaded = rows.firsts > rows.starts
        self._write_states(rows.slots[loaded], rows.firsts[loaded], rows.firsts[loaded] + 1, seq)
        runs = rows.starts < rows.ends
        slots, own_ends, ends = rows.slots[runs], rows.own_ends[runs], rows.ends[runs]
        self._write_states(slots, own_ends, ends + 1, seq)
        self._own_ends[slots], self._num_drafts[slots] = own_ends, ends - own_ends

    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        has_state = lengths > 0
        slots, lengths = slots[has_state], lengths[has_state]
        own_ends = self._own_ends[slots]
        ahead = lengths - own_ends
        wrong = np.flatnonzero(
            (own_ends == NO_STATE) | (ahead < 0) | (ahead > self._num_drafts[slots])
        )
        if len(wrong):
            row = int(wrong[0])
            slot, place = int(slots[row]), self.place
            raise RequestError(
                f"slot {slot} of rank {place.rank} continues after {int(lengths[row])} tokens, but "
                f"group {place.group} has its states after {int(own_ends[row])} to "
                f"{int(own_ends[row] + self._num_drafts[slot])}"
            )
        columns = self._skipped_columns(own_ends) + ahead
        live = LiveBlocks(slots, columns, np.ones_like(slots), lengths)
        sums = self.place.sums
        return self._compare(live, lambda part: sums.at(slots[part], lengths[part] - 1)[:, None])

    def forget(self) -> None:
        self._own_ends[:] = NO_STATE

    def _write_states(
        self, slots: Int64Array, firsts: Int64Array, ends: Int64Array, seq: int
    ) -> None:
        """Write the states after `firsts[i]` tokens and those up to before `ends[i]`, behind it."""
        rows, lengths = spread(np.arange(len(slots)), firsts, ends)
        columns = self._skipped_columns(firsts)[rows] + lengths - firsts[rows]
        has_state = lengths > 0  # before the first token there is none
        rows, lengths, columns = rows[has_state], lengths[has_state], columns[has_state]
        cells = Cells(slots[rows], columns, np.zeros_like(columns))
        self._write_cells(cells, self.place.sums.at(slots[rows], lengths - 1), seq)
