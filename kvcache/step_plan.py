"""A step request, checked: everything that could be wrong with it is found before anything changes.

The manager turns a `StepRequest` into a `StepPlan` here and hands the plan to the execution, which
refuses nothing any more. Changes nothing: the effects of a failed step, of finished and of
preempted requests on what follows are worked out on copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.arrays import Int32Array, int32_array
from kvcache.errors import BacklogFullError, RequestError
from kvcache.request import LoRARequest, Request
from kvcache.request_book import KnownRequest, RequestBook
from kvcache.slots import FREE
from kvcache.step import NO_STEP, NewRequest, ResumedRequest, RunningRequests, StepRequest
from kvcache.step_ledger import ClientSteps, Rollback

_ROW_FIELDS = ("slots", "num_new_tokens", "num_draft_tokens", "num_rejected_tokens")


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


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What a checked step will do, in the order in which it will do it."""

    request: StepRequest
    client: ClientSteps
    rollback: Rollback | None
    finished: tuple[KnownRequest, ...]
    preempted: tuple[KnownRequest, ...]
    rows: RowPlan
    resumed: tuple[tuple[KnownRequest, int], ...]
    new: tuple[tuple[Request, NewRequest], ...]


class StepPlanner:
    """Checks step requests against what a manager knows. Changes nothing."""

    def __init__(
        self, book: RequestBook, max_model_len: int, max_unfinished_steps: int
    ) -> None:
        """Check against `book`; requests hold at most `max_model_len` tokens."""
        self._book = book
        self._slots = book.slots
        self._max_model_len = max_model_len
        self._max_unfinished_steps = max_unfinished_steps

    def plan(self, request: StepRequest, client: ClientSteps, model_epoch: int) -> StepPlan:
        """Check a step of `client` and return what it will do.

        Raises:
            RequestError: the step contradicts what is known, or itself.
            BacklogFullError: the client has too many steps that neither completed nor failed.
        """
        where = f"step {request.step} of {request.client_id}"
        _check_numbers(where, request, client)
        rollback = None
        if request.failed_step != NO_STEP:
            rollback = client.plan_rollback(request.failed_step, self._book)
        self._check_backlog(where, request, client)
        forgotten = set() if rollback is None else {id(known) for known in rollback.forgotten}
        waiting = set()
        if rollback is not None:
            waiting = {id(row.known) for row in (*rollback.preempted_again, *rollback.preempted)}
        _check_ids_once(where, request)
        finished = self._finished(where, request.finished, client)
        preempted = self._preempted(where, request, client, forgotten | waiting)
        leaving = {*finished, *preempted}
        rows = self._rows(where, request, client, rollback, leaving)
        resumed = self._resumed(where, request.resumed, client, forgotten, waiting)
        if request.num_lookahead_tokens < 0:
            raise RequestError(
                f"{where}: {request.num_lookahead_tokens} lookahead tokens: pass 0 or more"
            )
        gone = forgotten | {id(known) for known in finished}
        new = tuple((self._new(where, n, gone, model_epoch), n) for n in request.new)
        staying = tuple(known for known in finished if id(known) not in forgotten)
        return StepPlan(request, client, rollback, staying, preempted, rows, resumed, new)

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

    def _finished(
        self, where: str, request_ids: Sequence[str], client: ClientSteps
    ) -> tuple[KnownRequest, ...]:
        return tuple(self._known(where, "finished", r, client) for r in request_ids)

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
            _check_max_new_tokens(where, item.request_id, item.max_new_tokens)
            plans.append((known, item.max_new_tokens))
        return tuple(plans)

    def _known(
        self, where: str, verb: str, request_id: str, client: ClientSteps
    ) -> KnownRequest:
        known = self._book.get(request_id)
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

    def _new(self, where: str, new: NewRequest, gone: set[int], model_epoch: int) -> Request:
        """Make the request that a step brings, or raise."""
        known = self._book.get(new.request_id)
        if known is not None and id(known) not in gone:
            raise RequestError(
                f"{where}: request {new.request_id} is new but known already: use another id, or "
                "resume it if it is preempted"
            )
        _check_max_new_tokens(where, new.request_id, new.max_new_tokens)
        if len(new.token_ids) > self._max_model_len:
            raise RequestError(
                f"{where}: request {new.request_id} has a prompt of {len(new.token_ids)} tokens, "
                f"the model takes {self._max_model_len}: shorten it or raise max_model_len"
            )
        for name in ("num_external_computed_tokens", "num_lookahead_tokens"):
            if getattr(new, name) < 0:
                raise RequestError(
                    f"{where}: request {new.request_id} has {name} {getattr(new, name)}: pass 0 "
                    "or more"
                )
        if new.num_external_computed_tokens >= max(1, len(new.token_ids)):
            raise RequestError(
                f"{where}: request {new.request_id} has {new.num_external_computed_tokens} "
                f"external computed tokens, but {len(new.token_ids)} tokens: the last one is "
                "always computed, pass fewer"
            )
        return make_request(new, model_epoch)

    def _rows(
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
            return RowPlan(slots, *(int32_array(()),) * 7)
        client_index, computed, tokens = self._figures_after(rollback)
        self._check_slots(where, slots, client_index, client)
        self._check_not_leaving(where, slots, leaving)
        _refuse(where, slots, num_new < 0, "num_new_tokens", num_new, "pass 0 or more")
        bad = (num_draft < 0) | (num_draft > num_new)
        _refuse(where, slots, bad, "num_draft_tokens", num_draft, "pass 0 to num_new_tokens")
        row_computed, row_tokens = computed[slots], tokens[slots]
        rejected = running.num_rejected_tokens
        bad = (rejected < 0) | (rejected > np.maximum(row_computed - row_tokens, 0))
        remedy = "pass 0 to the number of drafts that were scheduled last"
        _refuse(where, slots, bad, "num_rejected_tokens", rejected, remedy)
        settled = row_computed - rejected
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
        for known in (*rollback.forgotten, *(row.known for row in rollback.preempted_again)):
            if known.is_running:
                client_index[known.slot] = FREE
        return client_index, computed, tokens

    def _check_slots(
        self, where: str, slots: Int32Array, client_index: Int32Array, client: ClientSteps
    ) -> None:
        num_slots = self._slots.num_slots
        if int(slots.min()) < 0 or int(slots.max()) >= num_slots:
            bad = int(slots[(slots < 0) | (slots >= num_slots)][0])
            raise RequestError(f"{where}: slot {bad} does not exist: slots are 0 to {num_slots - 1}")
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


def make_request(new: NewRequest, model_epoch: int) -> Request:
    """Return the request that `new` describes; raises `RequestError` for what cannot be one."""
    if new.lora_name is None and new.lora_path is not None:
        raise RequestError(
            f"request {new.request_id} has the LoRA path {new.lora_path!r} but no LoRA name: pass "
            "both or neither"
        )
    if len(new.mm_offsets) != len(new.mm_lengths):
        raise RequestError(
            f"request {new.request_id}: {len(new.mm_offsets)} mm_offsets and "
            f"{len(new.mm_lengths)} mm_lengths: pass one of each per item"
        )
    lora = None if new.lora_name is None else LoRARequest(new.lora_name, new.lora_path or "")
    offsets, lengths = new.mm_offsets.tolist(), new.mm_lengths.tolist()
    return Request(
        new.request_id,
        new.token_ids,
        lora=lora,
        mm_positions=list(zip(offsets, lengths, strict=True)),
        mm_hashes=new.mm_hashes,
        cache_salt=new.cache_salt,
        skip_reading_prefix_cache=new.skip_reading_prefix_cache,
        tenant=new.tenant,
        model_epoch=model_epoch,
    )


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
    if completed != NO_STEP and (void := client.void_range(completed)) is not None:
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


def _check_ids_once(where: str, request: StepRequest) -> None:
    """Refuse an id that is named twice, by one list or by lists that exclude each other."""
    leaving = (*request.finished, *request.preempted_recompute, *request.preempted_swap)
    resumed = tuple(item.request_id for item in request.resumed)
    new = tuple(item.request_id for item in request.new)
    for what, ids in (
        ("finished or preempted", leaving),
        ("resumed or new", (*resumed, *new)),
        ("finished, preempted or resumed", (*leaving, *resumed)),
    ):
        if len(set(ids)) < len(ids):
            twice = next(name for name, times in Counter(ids).items() if times > 1)
            raise RequestError(f"{where}: request {twice} is {what} twice: name it once")


def _check_max_new_tokens(where: str, request_id: str, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise RequestError(
            f"{where}: request {request_id} has max_new_tokens {max_new_tokens}: at least one "
            "token is scheduled, pass 1 or more"
        )


def _check_row_shapes(where: str, running: RunningRequests) -> Int32Array:
    """Refuse arrays that do not fit each other; return how many tokens each row appends."""
    n = len(running.slots)
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
    counts = int32_array(np.diff(offsets))
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
    return counts


def _refuse(
    where: str, slots: Int32Array, bad: np.ndarray, name: str, values: Int32Array, remedy: str
) -> None:
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise RequestError(
            f"{where}: slot {int(slots[i])} has {name} {int(values[i])}: {remedy}"
        )
