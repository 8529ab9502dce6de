"""The running rows of a step, checked and settled on paper: one look at all rows per rule.

Part of checking a step request; a thousand rows are checked by a few array operations. Changes
nothing: what a failed step takes back is worked out on copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.errors import RequestError
from kvcache.manager.model_limits import ModelLimits, draft_remedy
from kvcache.manager.request_book import KnownRequest
from kvcache.manager.slots import FREE, SlotTable
from kvcache.manager.step_ledger import ClientSteps, Rollback
from kvcache.step import EMPTY_RUNNING, RunningRequests, StepRequest

_TOKEN_FIELDS = ("token_offsets", "token_ids", "draft_token_ids")
_ROW_FIELDS = ("slots", "num_new_tokens", "num_draft_tokens", "num_rejected_tokens")
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class RowPlan:
    """The running rows of a step, checked and settled on paper. Shapes `(n,)`.

    `num_computed` and `num_tokens` are the rows' figures before the step, `settled_computed` after
    rejected drafts are taken back; `counts[i]` of `token_ids` are appended to row `i`.
    """

    slots: Int32Array
    num_new: Int32Array
    num_draft: Int32Array
    num_computed: Int32Array
    num_tokens: Int32Array
    settled_computed: Int32Array
    counts: Int32Array
    token_ids: Int32Array


NO_ROWS = RowPlan(*(EMPTY_INT32,) * 8)


class RowPlanner:
    """Checks the rows of steps against a slot table. Changes nothing."""

    def __init__(self, slots: SlotTable, limits: ModelLimits) -> None:
        """Check against `slots` and what the model allows."""
        self._slots = slots
        self._max_model_len = limits.max_model_len
        self._max_draft_tokens = limits.max_draft_tokens

    def plan(
        self,
        where: str,
        request: StepRequest,
        client: ClientSteps,
        rollback: Rollback | None,
        leaving: Iterable[KnownRequest],
    ) -> RowPlan:
        running = request.running
        counts = _check_row_shapes(where, running)
        slots = int32_array(running.slots)
        num_new, num_draft = running.num_new_tokens, running.num_draft_tokens
        if not len(slots):
            return NO_ROWS
        client_index, computed, tokens = self._figures_after(rollback)
        self._check_slots(where, slots, client_index, client)
        self._check_not_leaving(where, slots, leaving)
        _refuse(where, slots, num_new < 0, "num_new_tokens", num_new, "pass 0 or more")
        bad = (num_draft < 0) | (num_draft > num_new)
        _refuse(where, slots, bad, "num_draft_tokens", num_draft, "pass 0 to num_new_tokens")
        if (most := self._max_draft_tokens) is not None:
            remedy = draft_remedy(most)
            _refuse(where, slots, num_draft > most, "num_draft_tokens", num_draft, remedy)
        row_computed, row_tokens = computed[slots], tokens[slots]
        rejected = running.num_rejected_tokens
        bad = (rejected < 0) | (rejected > np.maximum(row_computed - row_tokens, 0))
        remedy = "pass 0 to the number of drafts that were scheduled last"
        _refuse(where, slots, bad, "num_rejected_tokens", rejected, remedy)
        settled = row_computed - rejected
        bad = num_new > self._max_model_len - settled
        remedy = f"the model takes {self._max_model_len} tokens, schedule fewer"
        _refuse(where, slots, bad, "num_new_tokens", num_new, remedy)
        after = row_tokens + counts
        self._check_row_lengths(where, slots, settled, after, num_new - num_draft)
        return RowPlan(
            slots,
            int32_array(num_new),
            int32_array(num_draft),
            row_computed,
            row_tokens,
            int32_array(settled),
            counts,
            int32_array(running.token_ids),
        )

    def _figures_after(
        self, rollback: Rollback | None
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Whose each slot is, its computed and known tokens, once failed steps are taken back."""
        table = self._slots
        if rollback is None:
            return table.client_index, table.num_computed, table.num_tokens
        client_index, computed = table.client_index.copy(), table.num_computed.copy()
        tokens = table.num_tokens.copy()
        for row in rollback.rows:
            computed[row.known.slot] = row.num_computed
            tokens[row.known.slot] = row.num_tokens
        waiting = (row.known for row in (*rollback.preempted_again, *rollback.overwritten))
        for known in (*rollback.forgotten, *waiting):
            if known.is_running:
                client_index[known.slot] = FREE
        return client_index, computed, tokens

    def _check_slots(
        self, where: str, slots: Int32Array, client_index: Int32Array, client: ClientSteps
    ) -> None:
        num_slots = self._slots.num_slots
        if int(slots.min()) < 0 or int(slots.max()) >= num_slots:
            bad = int(slots[(slots < 0) | (slots >= num_slots)][0])
            raise RequestError(
                f"{where}: slot {bad} does not exist: slots are 0 to {num_slots - 1}"
            )
        times = np.bincount(slots)
        if int(times.max()) > 1:
            raise RequestError(
                f"{where}: slot {int(times.argmax())} runs {int(times.max())} times: name each "
                "slot once"
            )
        strange = client_index[slots] != client.index
        if strange.any():
            raise RequestError(
                f"{where}: slot {int(slots[strange][0])} does not run a request of this client: "
                "name slots of its running requests only"
            )

    def _check_not_leaving(
        self, where: str, slots: Int32Array, leaving: Iterable[KnownRequest]
    ) -> None:
        left = {known.slot: known for known in leaving if known.is_running}
        if left:
            both = np.isin(slots, np.fromiter(left, dtype=np.int32))
            if both.any():
                known = left[int(slots[both][0])]
                raise RequestError(
                    f"{where}: request {known.request.request_id} is finished or preempted and "
                    f"also runs on in slot {known.slot}: leave its row out"
                )

    def _check_row_lengths(
        self,
        where: str,
        slots: Int32Array,
        settled: Int32Array,
        tokens: Int32Array,
        num_owned: Int32Array,
    ) -> None:
        short = settled + num_owned > tokens
        if short.any():
            i = int(np.flatnonzero(short)[0])
            raise RequestError(
                f"{where}: slot {int(slots[i])} would have {int(settled[i] + num_owned[i])} "
                f"computed tokens, but has {int(tokens[i])} tokens: append the tokens first, or "
                "schedule fewer"
            )
        if int(tokens.max()) > self._max_model_len:
            i = int(tokens.argmax())
            raise RequestError(
                f"{where}: slot {int(slots[i])} would have {int(tokens[i])} tokens, the model "
                f"takes {self._max_model_len}: finish the request"
            )


def _check_row_shapes(where: str, running: RunningRequests) -> Int32Array:
    """Refuse arrays that do not fit each other; return how many tokens each row appends."""
    if running is EMPTY_RUNNING:
        return EMPTY_INT32
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
    wide = offsets.astype(np.int64)  # in int32 falling offsets could seem to rise
    counts = wide[1:] - wide[:-1]
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(token_ids) or (counts < 0).any():
        raise RequestError(
            f"{where}: running.token_offsets run from {int(offsets[0])} to {int(offsets[-1])} for "
            f"{len(token_ids)} token ids: pass offsets that rise from 0 to that number"
        )
    num_drafts = int(running.num_draft_tokens.sum())
    if len(running.draft_token_ids) not in (0, num_drafts):
        raise RequestError(
            f"{where}: {len(running.draft_token_ids)} draft_token_ids for {num_drafts} drafts: "
            "pass one per draft or none"
        )
    for name in ("token_ids", "draft_token_ids"):
        ids = getattr(running, name)
        if len(ids) and int(ids.min()) < 0:
            i = int(ids.argmin())
            raise RequestError(
                f"{where}: running.{name}[{i}] is {int(ids[i])}: token ids are not negative"
            )
    return int32_array(counts)


def _refuse(  # noqa: PLR0917
    where: str,
    slots: Int32Array,
    bad: npt.NDArray[np.bool_],
    name: str,
    values: Int32Array,
    remedy: str,
) -> None:
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise RequestError(f"{where}: slot {int(slots[i])} has {name} {int(values[i])}: {remedy}")
