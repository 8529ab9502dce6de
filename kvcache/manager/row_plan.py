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
from kvcache.manager.step_ledger import ClientSteps, Rollback
from kvcache.step import EMPTY_RUNNING, RunningRequests, StepRequest

_TOKEN_FIELDS = ("token_offsets", "token_ids", "draft_token_ids")
_ROW_FIELDS = ("slots", "num_new_tokens", "num_draft_tokens", "num_rejected_tokens")
_INT32 = np.dtype(np.int32)
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
    EMPTY_INDEX,
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
        self._last_key: tuple[int, int, bytes] | None = None
        self._last_columns = _NO_COLUMNS
        self._last_columns_key: tuple[object, ...] = ()
        self._know_decodes(_FEW_ROWS)
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
        columns = self._columns(where, running)
        _require_token_ids(where, running)
        if not len(running.slots):
            return NO_ROWS
        if rollback is None:
            seated = self._seated_again(where, running.slots, client)
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
        if not _fit(running):
            _check_shapes(where, running)
        if self._is_decode(running):
            return self._decode_columns(len(running.slots))
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
        counts = _token_counts(where, running)
        has_drafts = bool(np.count_nonzero(num_draft))
        is_strange = (
            has_drafts
            or bool(np.count_nonzero(running.num_rejected_tokens))
            or bool(np.count_nonzero(num_new.view(np.uint32) > self._most_new))
        )
        self._last_columns = _Columns(counts, has_drafts, is_strange, is_decode=False)
        self._last_columns_key = key
        return self._last_columns

    def _is_decode(self, running: RunningRequests) -> bool:
        """Whether each row appends a token and computes one, and nothing else is said of it.

        Whole columns are compared as bytes with what they are then.
        """
        count = len(running.slots)
        if count != len(running.token_ids) or len(running.draft_token_ids):
            return False
        if count > len(self._ones):
            self._know_decodes(2 * count)
        size = count * _INT32.itemsize
        zeros = self._zero_bytes[:size]
        return (
            running.num_new_tokens.tobytes() == self._one_bytes[:size]
            and running.num_draft_tokens.tobytes() == zeros
            and running.num_rejected_tokens.tobytes() == zeros
            and running.token_offsets.tobytes() == self._offset_bytes[: size + _INT32.itemsize]
        )

    def _know_decodes(self, most_rows: int) -> None:
        """Note what the columns of so many rows are that decode a token each."""
        self._ones: Int32Array = np.full(most_rows, 1, dtype=np.int32)
        self._one_bytes = self._ones.tobytes()
        self._zero_bytes = bytes(len(self._one_bytes))
        self._offset_bytes = np.arange(most_rows + 1, dtype=np.int32).tobytes()

    def _decode_columns(self, count: int) -> _Columns:
        """Return the columns of so many rows that decode a token each: the last ones if alike."""
        last = self._last_columns
        if not last.is_decode or len(last.counts) != count:
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

    def _seated_again(self, where: str, slots: Int32Array, client: ClientSteps) -> SeatedRows:
        """Do `_find_seated` unless these rows are those of the last time and still sit there."""
        key = client.index, self._slots.num_changes, slots.tobytes()
        if key != self._last_key:
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


def _token_counts(where: str, running: RunningRequests) -> Int32Array:
    """Return how many tokens each row appends; refuse counts that do not fit each other."""
    offsets, token_ids = running.token_offsets, running.token_ids
    counts = offsets[1:] - offsets[:-1]
    first, last = int(offsets[0]), int(offsets[-1])
    # Falling offsets could seem to rise where the difference overflows: none may be below 0.
    rises = np.count_nonzero(counts < 0) == 0 and np.count_nonzero(offsets < 0) == 0
    if first != 0 or last != len(token_ids) or not rises:
        raise RequestError(
            f"{where}: running.token_offsets run from {first} to {last} for "
            f"{len(token_ids)} token ids: pass offsets that rise from 0 to that number"
        )
    if len(running.draft_token_ids):
        num_drafts = int(running.num_draft_tokens.sum())
        if len(running.draft_token_ids) != num_drafts:
            raise RequestError(
                f"{where}: {len(running.draft_token_ids)} draft_token_ids for {num_drafts} "
                "drafts: pass one per draft or none"
            )
    return counts


def _require_token_ids(where: str, running: RunningRequests) -> None:
    """Refuse what is no token id."""
    for name, ids in (
        ("token_ids", running.token_ids),
        ("draft_token_ids", running.draft_token_ids),
    ):
        if len(ids) and np.count_nonzero(ids < 0):
            i = int(ids.argmin())
            raise RequestError(
                f"{where}: running.{name}[{i}] is {int(ids[i])}: token ids are not negative"
            )


def _fit(running: RunningRequests) -> bool:
    """Whether all arrays are int32 and of the right shapes."""
    slots, offsets, token_ids = running.slots, running.token_offsets, running.token_ids
    num_new, num_draft = running.num_new_tokens, running.num_draft_tokens
    rejected, draft_ids = running.num_rejected_tokens, running.draft_token_ids
    shape = (len(slots),)
    return (
        shape == slots.shape == num_new.shape == num_draft.shape == rejected.shape
        and offsets.shape == (len(slots) + 1,)
        and token_ids.ndim == 1
        and _INT32 == slots.dtype == num_new.dtype == num_draft.dtype == rejected.dtype
        and _INT32 == offsets.dtype == token_ids.dtype == draft_ids.dtype
    )


def _check_shapes(where: str, running: RunningRequests) -> None:
    """Refuse arrays of other types or shapes."""
    n = len(running.slots)
    for name in (*_ROW_FIELDS, *_TOKEN_FIELDS):
        values = getattr(running, name)
        if values.dtype != _INT32:
            raise RequestError(f"{where}: running.{name} is of {values.dtype}: pass int32 arrays")
    for name in _ROW_FIELDS:
        values = getattr(running, name)
        if values.shape != (n,):
            raise RequestError(
                f"{where}: running.{name} has shape {values.shape} for {n} slots: pass one number "
                "per slot"
            )
    offsets, token_ids = running.token_offsets, running.token_ids
    if offsets.shape != (n + 1,) or token_ids.ndim != 1:
        raise RequestError(
            f"{where}: running.token_offsets has shape {offsets.shape} and token_ids "
            f"{token_ids.shape} for {n} slots: pass {n + 1} offsets and one row of tokens"
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
