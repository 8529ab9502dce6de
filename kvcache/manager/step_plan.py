"""The check of a step request: every error is found before anything changes.

The manager turns a `StepRequest` into a `StepPlan` here and passes the plan to the executor, which
refuses nothing. Planning changes nothing: it works out on copies how a failed step, finished and
preempted requests affect the rest of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, int32_array
from kvcache.base.errors import BacklogFullError, RequestError, shown
from kvcache.core.running import (
    BAD_DRAFT_IDS,
    BAD_OFFSETS,
    BAD_SLOT,
    CLIENT,
    COMPUTED,
    FREE,
    IS_CROWDED,
    MISTAKES,
    NAMED_TWICE,
    NO_ROWS,
    NUM_POSITIONS,
    SYNCED,
    TOKENS,
    RunningRows,
    check_rows,
)
from kvcache.manager.model_limits import ModelLimits, draft_remedy
from kvcache.manager.request_table import KnownRequest, RequestTable
from kvcache.manager.step_ledger import ClientSteps, Rollback
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    NO_STEP,
    Fork,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    check_columns,
)
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import BlockHasher, LoRARequest, Request, check_request_id


class StepPlan(NamedTuple):
    """The operations of a checked step, except `forks`, in order of execution."""

    request: StepRequest
    client: ClientSteps
    rollback: Rollback | None
    finished: tuple[KnownRequest, ...]
    preempted: tuple[KnownRequest, ...]
    rows: RunningRows
    model_epoch: int
    resumed: tuple[tuple[KnownRequest, int], ...] = ()
    new: tuple[tuple[Request, NewRequest], ...] = ()
    forks: tuple[tuple[KnownRequest, str], ...] = ()
    hints: tuple[tuple[KnownRequest, tuple[CacheHint, ...]], ...] = ()


class StepPlanner:
    """Checks step requests against a manager's state. Changes nothing."""

    def __init__(
        self,
        table: RequestTable,
        limits: ModelLimits,
        max_unfinished_steps: int,
        hasher: BlockHasher,
    ) -> None:
        """Check against `table` and the model's `limits`; requests get `hasher`."""
        self._table = table
        self._limits = limits
        self._max_unfinished_steps = max_unfinished_steps
        self._hasher = hasher

    def plan(self, request: StepRequest, client: ClientSteps, model_epoch: int) -> StepPlan:
        """Check a step of `client` and return its plan.

        Raises:
            RequestError: the step contradicts the manager's state, or itself.
            BacklogFullError: the client has too many steps that neither completed nor failed.
        """
        where = f"step {request.step} of {request.client_id}"
        _check_numbers(where, request, client)
        rollback, table, limits = None, self._table, self._limits
        if request.failed_step != NO_STEP:
            rollback = client.plan_rollback(
                request.failed_step, table, keeps_states=bool(limits.state_groups)
            )
        if len(client.records) >= self._max_unfinished_steps:
            self._check_backlog(where, request, client)
        running = request.running
        if rollback is None and _has_only_rows(request):
            rows = plan_rows(where, running, client, table, limits)
            return StepPlan(request, client, None, (), (), rows, model_epoch)
        forgotten: set[int] = set()
        waiting: set[int] = set()
        if rollback is not None:
            forgotten = {id(known) for known in rollback.forgotten}
            waiting = {id(row.known) for row in rollback.without_slot}
        _check_ids_once(where, request)
        finished: tuple[KnownRequest, ...] = ()
        if request.finished:
            finished = tuple(
                [self._known(where, "finished", name, client) for name in request.finished]
            )
        preempted: tuple[KnownRequest, ...] = ()
        if request.preempted_recompute or request.preempted_swap:
            preempted = self._preempted(where, request, client, forgotten | waiting)
        leaving = (*finished, *preempted)
        rows = plan_rows(where, running, client, table, limits, rollback, leaving)
        resumed: tuple[tuple[KnownRequest, int], ...] = ()
        if request.resumed:
            resumed = self._resumed(where, request.resumed, client, forgotten, waiting)
        gone = {id(known) for known in finished} | forgotten
        new: tuple[tuple[Request, NewRequest], ...] = ()
        if request.new:
            new = tuple([(self._new(where, each, gone, model_epoch), each) for each in request.new])
        if forgotten:
            finished = tuple([known for known in finished if id(known) not in forgotten])
        forks: tuple[tuple[KnownRequest, str], ...] = ()
        if request.forks:
            lost = {id(known) for known in leaving} | forgotten | waiting
            forks = tuple([self._fork(where, f, client, gone, lost) for f in request.forks])
        hints: tuple[tuple[KnownRequest, tuple[CacheHint, ...]], ...] = ()
        if request.hints:
            hints = tuple(
                [
                    (self._known(where, "hinted", h.request_id, client), h.hints)
                    for h in request.hints
                ]
            )
        return StepPlan(
            request, client, rollback, finished, preempted, rows, model_epoch, resumed, new, forks,
            hints,
        )  # fmt: skip

    def _check_backlog(self, where: str, request: StepRequest, client: ClientSteps) -> None:
        first_failed = request.failed_step if request.failed_step != NO_STEP else request.step
        unfinished = sum(
            request.completed_step < record.step < first_failed for record in client.records
        )
        if unfinished >= self._max_unfinished_steps:
            raise BacklogFullError(
                f"{where}: {unfinished} earlier steps have neither completed nor failed: report "
                "completed_step before sending more"
            )

    def _preempted(
        self, where: str, request: StepRequest, client: ClientSteps, not_running: set[int]
    ) -> tuple[KnownRequest, ...]:
        preempted = []
        for request_id in (*request.preempted_recompute, *request.preempted_swap):
            known = self._known(where, "preempted", request_id, client)
            if not known.is_running or id(known) in not_running:
                raise RequestError(
                    f"{where}: request {request_id} is to be preempted but does not run: preempt "
                    "running requests only"
                )
            preempted.append(known)
        return tuple(preempted)

    def _resumed(
        self,
        where: str,
        resumed: Sequence[ResumedRequest],
        client: ClientSteps,
        forgotten: set[int],
        waiting: set[int],
    ) -> tuple[tuple[KnownRequest, int], ...]:
        plans = []
        for item in resumed:
            known = self._known(where, "resumed", item.request_id, client)
            is_waiting = id(known) in waiting or not known.is_running
            if id(known) in forgotten or not is_waiting:
                raise RequestError(
                    f"{where}: request {item.request_id} is to be resumed but is not preempted: "
                    "resume preempted requests only"
                )
            plans.append((known, item.max_new_tokens))
        return tuple(plans)

    def _known(self, where: str, verb: str, request_id: str, client: ClientSteps) -> KnownRequest:
        known = self._table.known.get(request_id)
        if known is None:
            raise RequestError(
                f"{where}: request {request_id!r} is to be {verb} but is not known: name requests "
                "that were admitted and have not finished"
            )
        if known.client_index != client.index:
            raise RequestError(
                f"{where}: request {request_id} is to be {verb} but belongs to another client: "
                "name requests of this client only"
            )
        return known

    def _fork(
        self, where: str, fork: Fork, client: ClientSteps, gone: set[int], lost: set[int]
    ) -> tuple[KnownRequest, str]:
        """Return a fork's parent and child id, or raise. Requests in `lost` have no blocks then."""
        parent = self._known(where, "forked", fork.parent_id, client)
        if id(parent) in lost or not parent.is_running:
            raise RequestError(
                f"{where}: request {fork.parent_id} is to be forked but does not run: fork running "
                "requests only, resume it first"
            )
        check_request_id(fork.child_id)
        known = self._table.known.get(fork.child_id)
        if known is not None and id(known) not in gone:
            raise RequestError(
                f"{where}: request {fork.child_id} is to be forked from {fork.parent_id} but known "
                "already: use another id"
            )
        return parent, fork.child_id

    def _new(self, where: str, new: NewRequest, gone: set[int], model_epoch: int) -> Request:
        """Make a new request of a step, or raise."""
        known = self._table.known.get(new.request_id)
        if known is not None and id(known) not in gone:
            raise RequestError(
                f"{where}: request {new.request_id} is new but known already: use another id, or "
                "resume it if it is preempted"
            )
        num_tokens, most = len(new.token_ids), self._limits.max_model_len
        if num_tokens > most:
            raise RequestError(
                f"{where}: request {new.request_id} has a prompt of {num_tokens} tokens, "
                f"the model takes {most}: shorten it or raise max_model_len"
            )
        if new.num_external_computed_tokens >= max(1, num_tokens):
            raise RequestError(
                f"{where}: request {new.request_id} has {new.num_external_computed_tokens} "
                f"external computed tokens, but {num_tokens} tokens: the last one is "
                "always computed, pass fewer"
            )
        if new.num_encoder_tokens:
            self._limits.require_encoder_tokens(new.request_id, new.num_encoder_tokens)
        return make_request(new, model_epoch, self._hasher)


def make_request(new: NewRequest, model_epoch: int, hasher: BlockHasher | None = None) -> Request:
    """Return the request that `new` describes; raises `RequestError` if it is invalid."""
    if new.lora_name is None and new.lora_path is not None:
        raise RequestError(
            f"request {new.request_id} has the LoRA path {shown(new.lora_path)} but no LoRA name: "
            "pass both or neither"
        )
    if len(new.mm_offsets) != len(new.mm_lengths):
        raise RequestError(
            f"request {new.request_id}: {len(new.mm_offsets)} mm_offsets and "
            f"{len(new.mm_lengths)} mm_lengths: pass one of each per item"
        )
    lora = None if new.lora_name is None else LoRARequest(new.lora_name, new.lora_path or "")
    positions: tuple[tuple[int, int], ...] = ()
    if len(new.mm_offsets):
        offsets, lengths = new.mm_offsets.tolist(), new.mm_lengths.tolist()
        positions = tuple(zip(offsets, lengths, strict=True))
    request = Request(
        new.request_id,
        new.token_ids,
        lora=lora,
        mm_positions=positions,
        mm_hashes=new.mm_hashes,
        cache_salt=new.cache_salt,
        skip_reading_prefix_cache=new.skip_reading_prefix_cache,
        block_hasher=hasher,
        tenant=new.tenant,
        model_epoch=model_epoch,
    )
    if new.hints:
        request.hints = new.hints
    return request


def _check_numbers(where: str, request: StepRequest, client: ClientSteps) -> None:
    """Refuse step numbers that contradict the client's earlier ones."""
    if request.step <= client.last_step:
        raise RequestError(
            f"{where}: the last step was {client.last_step}: number steps upwards from there"
        )
    completed, failed = request.completed_step, request.failed_step
    if completed != NO_STEP and not 0 <= completed < request.step:
        raise RequestError(
            f"{where}: completed_step {completed} is not known: name a step before this one"
        )
    if client.void and completed != NO_STEP and (void := client.void_range(completed)) is not None:
        raise RequestError(
            f"{where}: completed_step {completed} failed, with all steps from {void[0]} to "
            f"{void[1]}: name a step that was not reported as failed"
        )
    if failed == NO_STEP:
        return
    if not client.completed_step < failed <= client.last_step:
        raise RequestError(
            f"{where}: failed_step {failed} cannot fail: steps up to {client.completed_step} are "
            f"complete and {client.last_step} is the last: name a step in between"
        )
    if (void := client.void_range(failed)) is not None:
        raise RequestError(
            f"{where}: failed_step {failed} has failed already, with all steps from {void[0]} to "
            f"{void[1]}: report a failure once"
        )
    if completed >= failed:
        raise RequestError(
            f"{where}: completed_step {completed} is not before failed_step {failed}: a failed "
            "step voids all later ones"
        )


def _has_only_rows(request: StepRequest) -> bool:
    """Return whether a step names no requests, and has at most running rows."""
    leaving = request.finished or request.preempted_recompute or request.preempted_swap
    return not (leaving or request.resumed or request.new or request.forks or request.hints)


def _check_ids_once(where: str, request: StepRequest) -> None:
    """Refuse an id that appears twice, in one list or in lists that exclude each other."""
    if len(request.hints) > 1:
        hinted = [item.request_id for item in request.hints]
        _refuse_twice(where, "hinted", hinted)
    num_leaving = len(request.finished) + len(request.preempted_recompute)
    num_leaving += len(request.preempted_swap)
    if num_leaving + len(request.resumed) + len(request.new) + len(request.forks) < 2:
        return
    leaving = (*request.finished, *request.preempted_recompute, *request.preempted_swap)
    resumed = [item.request_id for item in request.resumed]
    arriving = [*resumed, *[item.request_id for item in request.new]]
    arriving += [fork.child_id for fork in request.forks]
    if len({*leaving, *arriving}) == len(leaving) + len(arriving):
        return
    for what, ids in (
        ("finished or preempted", leaving),
        ("resumed or new", arriving),
        ("finished, preempted or resumed", [*leaving, *resumed]),
    ):
        _refuse_twice(where, what, ids)


def _refuse_twice(where: str, what: str, ids: Sequence[str]) -> None:
    if len(set(ids)) < len(ids):
        twice = next(name for name, times in Counter(ids).items() if times > 1)
        raise RequestError(f"{where}: request {twice} is {what} twice: name it once")


_COLUMNS = (
    "slots",
    "num_new_tokens",
    "num_draft_tokens",
    "num_rejected_tokens",
    "token_offsets",
    "token_ids",
    "draft_token_ids",
)
_columns_of: Any = attrgetter(*_COLUMNS)


def plan_rows(  # noqa: PLR0917 - a step and the state to check it against
    where: str,
    running: RunningRequests,
    client: ClientSteps,
    table: RequestTable,
    limits: ModelLimits,
    rollback: Rollback | None = None,
    leaving: Sequence[KnownRequest] = (),
) -> RunningRows:
    """Check the running rows of a step and return them; none may be of a request in `leaving`.

    Raises:
        RequestError: they contradict each other or the manager's state.
    """
    if running is EMPTY_RUNNING:
        return NO_ROWS
    rows = table.rows if rollback is None else _rows_after(table, rollback)
    gone = EMPTY_INT32
    if leaving:
        gone = int32_array([known.slot for known in leaving if known.is_running])
    slots, new, drafts, rejected, offsets, ids, draft_ids = _columns_of(running)
    try:
        count = len(slots) if isinstance(slots, np.ndarray) else 0
        positions, generations = (
            np.empty((NUM_POSITIONS, count), np.int32),
            np.empty(count, np.int64),
        )
        what, place = check_rows(
            rows, table.generation, slots, new, drafts, rejected, offsets, ids, draft_ids, gone,
            positions, generations, table.next_stamp(), client.index, limits.max_model_len,
            limits.most_drafts, table.width,
        )  # fmt: skip
    except TypeError:
        check_columns(where, running)
        plain = {name: np.ascontiguousarray(getattr(running, name)) for name in _COLUMNS}
        if all(plain[name] is getattr(running, name) for name in _COLUMNS):
            raise
        again = RunningRequests(**plain)
        return plan_rows(where, again, client, table, limits, rollback, leaving)
    if what > IS_CROWDED:
        _explain(where, running, what, place, rows, limits, leaving)
    return RunningRows(
        running.slots.copy(),  # a record keeps them
        generations,
        positions,
        running.token_offsets,
        running.token_ids,
        what == IS_CROWDED,
    )


def _rows_after(table: RequestTable, rollback: Rollback) -> npt.NDArray[np.int32]:
    """Return the columns of all rows as they are after the rollback."""
    rows: npt.NDArray[np.int32] = table.rows.copy()
    for row in rollback.rows:
        slot = row.known.slot
        rows[slot, COMPUTED] = row.num_computed
        rows[slot, TOKENS] = rows[slot, SYNCED] = row.num_tokens
    waiting = (row.known for row in (*rollback.preempted_again, *rollback.overwritten))
    for known in (*rollback.forgotten, *waiting):
        if known.is_running:
            rows[known.slot, CLIENT] = FREE
    return rows


def _explain(  # noqa: PLR0917 - a step and the state to check it against
    where: str,
    running: RunningRequests,
    what: int,
    i: int,
    rows: npt.NDArray[np.int32],
    limits: ModelLimits,
    leaving: Sequence[KnownRequest],
) -> NoReturn:
    """Raise the error for a mistake that the compiled check found in row `i`, or in no one row."""
    check_columns(where, running)
    if what not in MISTAKES:
        _explain_tokens(where, running, what)
    slot, offsets = running.slots.item(i), running.token_offsets
    for known in leaving:
        if what == NAMED_TWICE and known.slot == slot:
            raise RequestError(
                f"{where}: request {known.request.request_id} is finished or preempted and "
                f"also runs on in slot {slot}: leave its row out"
            )
    new, drafts = running.num_new_tokens.item(i), running.num_draft_tokens.item(i)
    rejected, computed, num_tokens = running.num_rejected_tokens.item(i), 0, 0
    if what != BAD_SLOT:
        computed, num_tokens = rows[slot, [COMPUTED, TOKENS]].tolist()
    told = MISTAKES[what].format(
        last_slot=len(rows) - 1,
        times=np.count_nonzero(running.slots == slot),
        new=new,
        drafts=drafts,
        draft_remedy=draft_remedy(limits.most_drafts),
        rejected=rejected,
        most=limits.max_model_len,
        own_end=computed - rejected + new - drafts,
        after=num_tokens + offsets.item(i + 1) - offsets.item(i),
    )
    raise RequestError(f"{where}: slot {slot} {told}")


def _explain_tokens(where: str, running: RunningRequests, what: int) -> NoReturn:
    """Raise the error for offsets, tokens or drafts' tokens that the compiled check has refused."""
    offsets, token_ids = running.token_offsets, running.token_ids
    if what == BAD_OFFSETS:
        raise RequestError(
            f"{where}: running.token_offsets run from {offsets[0]} to {offsets[-1]} for "
            f"{len(token_ids)} token ids: pass offsets that rise from 0 to that number"
        )
    if what == BAD_DRAFT_IDS:
        raise RequestError(
            f"{where}: {len(running.draft_token_ids)} draft_token_ids for "
            f"{running.num_draft_tokens.sum()} drafts: pass one per draft or none"
        )
    name = "token_ids" if len(token_ids) and token_ids.min() < 0 else "draft_token_ids"
    ids = getattr(running, name)
    i = int(ids.argmin())
    raise RequestError(f"{where}: running.{name}[{i}] is {ids[i]}: token ids are not negative")
