"""The running rows of a step: checked and settled on paper by one look at all of them.

Part of checking a step request. Changes nothing: what a failed step takes back is worked out on
copies. Where the compiled check refuses, each rule is checked on its own, to say what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import InvariantError, RequestError
from kvcache.core.running import (
    CLIENT,
    COMPUTED,
    FREE,
    IS_CROWDED,
    IS_WRONG,
    NO_ROWS,
    NUM_FIGURES,
    TOKENS,
    RunningRows,
    check_rows,
)
from kvcache.manager.model_limits import ModelLimits, draft_remedy
from kvcache.manager.request_table import KnownRequest, RequestTable
from kvcache.manager.step_ledger import ClientSteps, Rollback
from kvcache.protocol.step import EMPTY_RUNNING, RunningRequests, check_columns

_COLUMNS = (
    "slots",
    "num_new_tokens",
    "num_draft_tokens",
    "num_rejected_tokens",
    "token_offsets",
    "token_ids",
    "draft_token_ids",
)


def plan_rows(  # noqa: PLR0917 - a step, and what it is checked against
    where: str,
    running: RunningRequests,
    client: ClientSteps,
    table: RequestTable,
    limits: ModelLimits,
    rollback: Rollback | None = None,
    leaving: Sequence[KnownRequest] = (),
) -> RunningRows:
    """Return what the running rows of a step will do; `leaving` must not be among them.

    Raises:
        RequestError: they contradict each other or what is known.
    """
    if running is EMPTY_RUNNING:
        return NO_ROWS
    rows = table.rows if rollback is None else _rows_after(table, rollback)
    gone = EMPTY_INT32
    if leaving:
        gone = int32_array([known.slot for known in leaving if known.is_running])
    columns = (
        running.slots,
        running.num_new_tokens,
        running.num_draft_tokens,
        running.num_rejected_tokens,
        running.token_offsets,
        running.token_ids,
        running.draft_token_ids,
    )
    try:
        count = len(columns[0]) if isinstance(columns[0], np.ndarray) else 0
        figures, generations = np.empty((NUM_FIGURES, count), np.int32), np.empty(count, np.int64)
        seen = check_rows(
            rows, table.generation, *columns, gone, figures, generations, table.next_stamp(),
            client.index, limits.max_model_len, limits.most_drafts, table.width,
        )  # fmt: skip
    except TypeError:
        check_columns(where, running)
        plain = {name: np.ascontiguousarray(getattr(running, name)) for name in _COLUMNS}
        if all(plain[name] is getattr(running, name) for name in _COLUMNS):
            raise
        again = RunningRequests(**plain)
        return plan_rows(where, again, client, table, limits, rollback, leaving)
    if seen == IS_WRONG:
        check_columns(where, running)
        _explain(where, running, client, rows, limits, leaving)
    return RunningRows(
        running.slots.copy(),  # a record keeps them
        generations,
        figures,
        running.token_offsets,
        running.token_ids,
        seen == IS_CROWDED,
    )


def _rows_after(table: RequestTable, rollback: Rollback) -> npt.NDArray[np.int32]:
    """Return the columns of all rows as they are once failed steps are taken back."""
    rows: npt.NDArray[np.int32] = table.rows.copy()
    for row in rollback.rows:
        rows[row.known.slot, COMPUTED], rows[row.known.slot, TOKENS] = (
            row.num_computed,
            row.num_tokens,
        )
    waiting = (row.known for row in (*rollback.preempted_again, *rollback.overwritten))
    for known in (*rollback.forgotten, *waiting):
        if known.is_running:
            rows[known.slot, CLIENT] = FREE
    return rows


def _explain(  # noqa: PLR0917 - a step, and what it is checked against
    where: str,
    running: RunningRequests,
    client: ClientSteps,
    rows: npt.NDArray[np.int32],
    limits: ModelLimits,
    leaving: Sequence[KnownRequest],
) -> NoReturn:
    """Say which rule the compiled check found broken: the first one, rows one by one."""
    counts = _token_counts(where, running)
    _require_token_ids(where, running)
    _check_slots(where, running.slots, rows, client)
    for known in leaving:
        if known.is_running and known.slot in running.slots:
            raise RequestError(
                f"{where}: request {known.request.request_id} is finished or preempted and "
                f"also runs on in slot {known.slot}: leave its row out"
            )
    computed, tokens = rows[running.slots, COMPUTED], rows[running.slots, TOKENS]
    _check_counts(where, running, computed, tokens, limits)
    _check_lengths(where, running, computed - running.num_rejected_tokens, tokens + counts, limits)
    raise InvariantError(f"{where}: its running rows were refused, but no rule is broken")


def _token_counts(where: str, running: RunningRequests) -> npt.NDArray[np.int64]:
    """Return how many tokens each row appends; refuse counts that do not fit each other."""
    offsets, token_ids = running.token_offsets.astype(np.int64), running.token_ids
    counts = offsets[1:] - offsets[:-1]
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != len(token_ids) or np.count_nonzero(counts < 0):
        raise RequestError(
            f"{where}: running.token_offsets run from {first} to {last} for "
            f"{len(token_ids)} token ids: pass offsets that rise from 0 to that number"
        )
    num_drafts = int(running.num_draft_tokens.sum())
    if len(running.draft_token_ids) not in (0, num_drafts):
        raise RequestError(
            f"{where}: {len(running.draft_token_ids)} draft_token_ids for {num_drafts} "
            "drafts: pass one per draft or none"
        )
    return counts


def _require_token_ids(where: str, running: RunningRequests) -> None:
    """Refuse what is no token id."""
    for name in ("token_ids", "draft_token_ids"):
        ids = getattr(running, name)
        if np.count_nonzero(ids < 0):
            i = int(ids.argmin())
            raise RequestError(
                f"{where}: running.{name}[{i}] is {int(ids[i])}: token ids are not negative"
            )


def _check_slots(
    where: str, slots: Int32Array, rows: npt.NDArray[np.int32], client: ClientSteps
) -> None:
    """Refuse slots that do not exist, are named twice, or that this client does not run."""
    outside = slots[(slots < 0) | (slots >= len(rows))]
    if len(outside):
        raise RequestError(
            f"{where}: slot {int(outside[0])} does not exist: slots are 0 to {len(rows) - 1}"
        )
    times = np.bincount(slots, minlength=1)
    if int(times.max()) > 1:
        raise RequestError(
            f"{where}: slot {int(times.argmax())} runs {int(times.max())} times: name each "
            "slot once"
        )
    strange = slots[rows[slots, CLIENT] != client.index]
    if len(strange):
        raise RequestError(
            f"{where}: slot {int(strange[0])} does not run a request of this client: "
            "name slots of its running requests only"
        )


def _check_counts(
    where: str,
    running: RunningRequests,
    num_computed: Int32Array,
    num_tokens: Int32Array,
    limits: ModelLimits,
) -> None:
    """Refuse new, draft and rejected tokens that contradict each other or their row."""
    slots, num_new, num_draft = running.slots, running.num_new_tokens, running.num_draft_tokens
    _refuse(where, slots, num_new < 0, "num_new_tokens", num_new, "pass 0 or more")
    bad = (num_draft < 0) | (num_draft > num_new)
    _refuse(where, slots, bad, "num_draft_tokens", num_draft, "pass 0 to num_new_tokens")
    if (most := limits.max_draft_tokens) is not None:
        remedy = draft_remedy(most)
        _refuse(where, slots, num_draft > most, "num_draft_tokens", num_draft, remedy)
    rejected = running.num_rejected_tokens
    bad = (rejected < 0) | (rejected > np.maximum(num_computed - num_tokens, 0))
    remedy = "pass 0 to the number of drafts that were scheduled last"
    _refuse(where, slots, bad, "num_rejected_tokens", rejected, remedy)


def _check_lengths(
    where: str,
    running: RunningRequests,
    settled: Int32Array,
    tokens: npt.NDArray[np.int64],
    limits: ModelLimits,
) -> None:
    """Refuse rows longer than the model takes, and forwards beyond a row's own tokens."""
    slots, num_new, most = running.slots, running.num_new_tokens, limits.max_model_len
    remedy = f"the model takes {most} tokens, schedule fewer"
    _refuse(where, slots, num_new > most - settled, "num_new_tokens", num_new, remedy)
    own_ends = settled + (num_new - running.num_draft_tokens)
    short = np.flatnonzero(own_ends > tokens)
    if len(short):
        i = int(short[0])
        raise RequestError(
            f"{where}: slot {int(slots[i])} would have {int(own_ends[i])} "
            f"computed tokens, but has {int(tokens[i])} tokens: append the tokens first, or "
            "schedule fewer"
        )
    if int(tokens.max()) > most:
        i = int(tokens.argmax())
        raise RequestError(
            f"{where}: slot {int(slots[i])} would have {int(tokens[i])} tokens, the model "
            f"takes {most}: finish the request"
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
