"""The running rows of a step, checked and settled on paper: one look at all rows per rule.

Part of checking a step request; a thousand rows are checked by a few array operations. Changes
nothing: what a failed step takes back is worked out on copies.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.arrays import (
    EMPTY_INDEX,
    EMPTY_INT32,
    IndexArray,
    Int32Array,
    index_array,
    int32_array,
)
from kvcache.errors import RequestError
from kvcache.manager.model_limits import ModelLimits, draft_remedy
from kvcache.manager.request_book import KnownRequest
from kvcache.manager.slots import FREE, RowFigures, SeatedRows, SlotTable
from kvcache.manager.step_columns import (
    ARE_SAME_SLOTS,
    IS_DECODE,
    fit,
    look_at,
    require_token_ids,
    token_counts,
)
from kvcache.manager.step_ledger import ClientSteps, Rollback
from kvcache.step import EMPTY_RUNNING, RunningRequests, StepRequest, check_columns

_MAX_INT32 = 2**31 - 1
_FEW_ROWS = 256


class RowPlan(NamedTuple):
    """The running rows of a step, checked and settled on paper. Shapes `(n,)`.

    `num_computed` and `num_tokens` are the rows' figures before the step, `settled_computed`
    after rejected drafts are taken back; from there a row's forward ends at `own_ends` with its own
    tokens, at `ends` with its drafts. `counts[i]` of `token_ids` are appended to row `i`; with
    `is_one_each` it is one token for each row, for which the slot table has room.
    """

    seated: SeatedRows
    num_computed: Int32Array
    num_tokens: Int32Array
    settled_computed: Int32Array
    own_ends: Int32Array
    ends: Int32Array
    counts: Int32Array
    token_ids: Int32Array
    is_one_each: bool = False


class _Columns(NamedTuple):
    """What the columns of a step say by themselves, whatever the figures of its rows are.

    `is_strange` where one deserves a closer look; `is_decode` where each row appends a token and
    computes one, as most steps do.
    """

    counts: Int32Array
    has_drafts: bool
    is_strange: bool
    is_decode: bool


_NOBODY = SeatedRows(
    EMPTY_INT32,
    EMPTY_INDEX,
    np.empty(0, dtype=np.int64),
    np.empty(0, dtype=object),
)
_NO_COLUMNS = _Columns(EMPTY_INT32, has_drafts=False, is_strange=False, is_decode=False)
NO_ROWS = RowPlan(_NOBODY, *(EMPTY_INT32,) * 7)


class RowPlanner:
    """Checks the rows of steps against a slot table. Changes nothing there.

    First come a few tests of all rows at once, which sound rows pass. Where one fails, each rule is
    checked on its own, to say what is wrong. Steps of decoding differ little from each other, and
    what they have in common with the last one is not checked again: rows that ran in it, while
    nobody came or left since, are the client's; equal columns are as sound as they were; and rows
    that decode alone have room for as many tokens as were counted once.
    """

    def __init__(self, slots: SlotTable, limits: ModelLimits) -> None:
        """Check against `slots` and what the model allows."""
        self._slots = slots
        self._max_model_len = limits.max_model_len
        self._max_draft_tokens = limits.max_draft_tokens
        # Numbers of new tokens above this one, read as unsigned, deserve a closer look: they are
        # below 0, too many, or so many that sums could overflow.
        self._most_new = min(limits.max_model_len, max(0, _MAX_INT32 - limits.max_model_len))
        self._last_seated = _NOBODY
        # How often each slot is among the rows that were looked for last.
        self._last_times: IndexArray = EMPTY_INDEX
        self._last_key: tuple[int, int] | None = None
        self._last_columns = _NO_COLUMNS
        self._last_columns_key: tuple[object, ...] = ()
        self._ones: Int32Array = np.ones(_FEW_ROWS, dtype=np.int32)
        # So many tokens more fit the rows of the last step, if they decode on.
        self._num_fitting = 0

    def plan(
        self,
        where: str,
        request: StepRequest,
        client: ClientSteps,
        rollback: Rollback | None,
        leaving: Collection[KnownRequest],
    ) -> RowPlan:
        """Return what the running rows of a step will do.

        Raises:
            RequestError: they contradict each other or what is known.
        """
        if rollback is not None:
            self._last_key = None
        running = request.running
        if running is EMPTY_RUNNING:
            return NO_ROWS
        columns_before, seated_before = self._last_columns, self._last_seated
        seen = look_at(running, self._last_seated.slots)
        is_decode = bool(seen & IS_DECODE)
        if is_decode:
            columns = self._decode_columns(len(running.slots))
        else:
            columns = self._columns(where, running)
            require_token_ids(where, running)
        if not len(running.slots):
            return NO_ROWS
        if rollback is None:
            are_same = bool(seen & ARE_SAME_SLOTS)
            seated = self._seated_again(where, running.slots, client, are_same=are_same)
            row_computed, row_tokens = self._slots.figures_of(seated.indices)
        else:
            client_index, figures = self._figures_after(rollback)
            seated = self._find_seated(where, running.slots, client_index, client)
            row_computed, row_tokens = (column[seated.indices] for column in figures)
        if leaving:
            self._check_not_leaving(where, leaving)
        settled, counts = row_computed, columns.counts
        if columns.is_strange:
            self._check_counts(where, running, row_computed, row_tokens)
            settled = row_computed - running.num_rejected_tokens
        ends = settled + running.num_new_tokens
        own_ends = ends - running.num_draft_tokens if columns.has_drafts else ends
        is_known = columns is columns_before and seated is seated_before
        num_fitting = self._num_fitting if is_known else 0
        if not num_fitting:
            if columns.is_decode:
                num_fitting = self._count_fitting(seated, row_tokens)
            after = row_tokens + counts
            if (
                columns.is_strange
                or np.count_nonzero(own_ends > after)
                or (num_fitting <= 0 and np.count_nonzero(after > self._max_model_len))
            ):
                self._check_lengths(where, running, settled, after)
        self._num_fitting = max(0, num_fitting - 1)
        return RowPlan(
            seated,
            row_computed,
            row_tokens,
            settled,
            own_ends,
            ends,
            counts,
            int32_array(running.token_ids),
            is_one_each=num_fitting > 0,
        )

    def _columns(self, where: str, running: RunningRequests) -> _Columns:
        """Check what columns say by themselves; equal ones as the last time are known."""
        if not fit(running):
            check_columns(where, running)
        num_new, num_draft = running.num_new_tokens, running.num_draft_tokens
        key = (
            num_new.tobytes(),
            num_draft.tobytes(),
            running.num_rejected_tokens.tobytes(),
            running.token_offsets.tobytes(),
            len(running.token_ids),
            len(running.draft_token_ids),
        )
        if key == self._last_columns_key:
            return self._last_columns
        counts = token_counts(where, running)
        has_drafts = bool(np.count_nonzero(num_draft))
        is_strange = (
            has_drafts
            or bool(np.count_nonzero(running.num_rejected_tokens))
            or bool(np.count_nonzero(num_new.view(np.uint32) > self._most_new))
        )
        self._last_columns = _Columns(counts, has_drafts, is_strange, is_decode=False)
        self._last_columns_key = key
        return self._last_columns

    def _decode_columns(self, count: int) -> _Columns:
        """Return the columns of so many rows that decode a token each: the last ones if alike."""
        last = self._last_columns
        if not last.is_decode or len(last.counts) != count:
            if count > len(self._ones):
                self._ones = np.ones(2 * count, dtype=np.int32)
            counts = self._ones[:count]
            last = _Columns(counts, has_drafts=False, is_strange=False, is_decode=True)
            self._last_columns, self._last_columns_key = last, ()
        return last

    def _count_fitting(self, seated: SeatedRows, num_tokens: Int32Array) -> int:
        """Return how many tokens each of these rows can append, one a step, without a check."""
        num_fitting = self._slots.least_spare(self._max_model_len)
        if num_fitting > 0:
            return num_fitting
        longest = self._max_model_len - int(np.maximum.reduce(num_tokens))
        return min(longest, self._slots.num_spare(seated.indices))

    def _figures_after(self, rollback: Rollback) -> tuple[Int32Array, RowFigures]:
        """Whose each slot is, and the figures of all slots, once failed steps are taken back."""
        table = self._slots
        client_index, computed = table.client_index.copy(), table.num_computed.copy()
        tokens = table.num_tokens.copy()
        for row in rollback.rows:
            computed[row.known.slot] = row.num_computed
            tokens[row.known.slot] = row.num_tokens
        waiting = (row.known for row in (*rollback.preempted_again, *rollback.overwritten))
        for known in (*rollback.forgotten, *waiting):
            if known.is_running:
                client_index[known.slot] = FREE
        return client_index, RowFigures(computed, tokens)

    def _seated_again(
        self, where: str, slots: Int32Array, client: ClientSteps, *, are_same: bool
    ) -> SeatedRows:
        """Do `_find_seated` unless these rows are those of the last time and still sit there."""
        key = client.index, self._slots.num_changes
        if not are_same or key != self._last_key:
            owners = self._slots.client_index
            self._last_seated = self._find_seated(where, slots, owners, client)
            self._last_key = key
        return self._last_seated

    def _find_seated(
        self, where: str, slots: Int32Array, client_index: Int32Array, client: ClientSteps
    ) -> SeatedRows:
        """Return who sits in the slots; refuse those that this client does not run, once each."""
        indices = index_array(slots)
        try:
            owners = client_index.take(indices)
            times = np.bincount(indices)
        except (IndexError, ValueError):  # above all slots, below 0
            num_slots = self._slots.num_slots
            bad = int(slots[(slots < 0) | (slots >= num_slots)][0])
            raise RequestError(
                f"{where}: slot {bad} does not exist: slots are 0 to {num_slots - 1}"
            ) from None
        if np.count_nonzero(times) < len(indices):
            raise RequestError(
                f"{where}: slot {int(times.argmax())} runs {int(times.max())} times: name each "
                "slot once"
            )
        strange = owners != client.index
        if np.count_nonzero(strange):
            raise RequestError(
                f"{where}: slot {int(slots[strange][0])} does not run a request of this client: "
                "name slots of its running requests only"
            )
        self._last_times = times
        return self._slots.seated(slots.copy(), indices)

    def _check_not_leaving(self, where: str, leaving: Collection[KnownRequest]) -> None:
        times = self._last_times
        for known in leaving:
            if not known.is_running or known.slot >= len(times) or not times[known.slot]:
                continue
            raise RequestError(
                f"{where}: request {known.request.request_id} is finished or preempted and "
                f"also runs on in slot {known.slot}: leave its row out"
            )

    def _check_counts(
        self,
        where: str,
        running: RunningRequests,
        num_computed: Int32Array,
        num_tokens: Int32Array,
    ) -> None:
        """Refuse new, draft and rejected tokens that contradict each other or their row."""
        slots, num_new, num_draft = running.slots, running.num_new_tokens, running.num_draft_tokens
        _refuse(where, slots, num_new < 0, "num_new_tokens", num_new, "pass 0 or more")
        bad = (num_draft < 0) | (num_draft > num_new)
        _refuse(where, slots, bad, "num_draft_tokens", num_draft, "pass 0 to num_new_tokens")
        if (most := self._max_draft_tokens) is not None:
            remedy = draft_remedy(most)
            _refuse(where, slots, num_draft > most, "num_draft_tokens", num_draft, remedy)
        rejected = running.num_rejected_tokens
        bad = (rejected < 0) | (rejected > np.maximum(num_computed - num_tokens, 0))
        remedy = "pass 0 to the number of drafts that were scheduled last"
        _refuse(where, slots, bad, "num_rejected_tokens", rejected, remedy)

    def _check_lengths(
        self, where: str, running: RunningRequests, settled: Int32Array, tokens: Int32Array
    ) -> None:
        """Refuse rows longer than the model takes, and forwards beyond a row's own tokens."""
        slots, num_new = running.slots, running.num_new_tokens
        bad = num_new > self._max_model_len - settled
        remedy = f"the model takes {self._max_model_len} tokens, schedule fewer"
        _refuse(where, slots, bad, "num_new_tokens", num_new, remedy)
        own_ends = settled + (num_new - running.num_draft_tokens)
        short = own_ends > tokens
        if short.any():
            i = int(np.flatnonzero(short)[0])
            raise RequestError(
                f"{where}: slot {int(slots[i])} would have {int(own_ends[i])} "
                f"computed tokens, but has {int(tokens[i])} tokens: append the tokens first, or "
                "schedule fewer"
            )
        if int(tokens.max()) > self._max_model_len:
            i = int(tokens.argmax())
            raise RequestError(
                f"{where}: slot {int(slots[i])} would have {int(tokens[i])} tokens, the model "
                f"takes {self._max_model_len}: finish the request"
            )


def _refuse(  # noqa: PLR0917
    where: str,
    slots: Int32Array,
    bad: npt.NDArray[np.bool_],
    name: str,
    values: Int32Array,
    remedy: str,
) -> None:
    if np.count_nonzero(bad):
        i = int(np.flatnonzero(bad)[0])
        raise RequestError(f"{where}: slot {int(slots[i])} has {name} {int(values[i])}: {remedy}")
