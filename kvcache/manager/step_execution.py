"""A checked step, carried out: settle, free, extend running rows, resume and admit.

Takes a `StepPlan` and returns the `StepResult`. Nothing can be wrong any more here, only full:
what finds no room is said in the result. Refuses to look at time, clients' epochs or workers.

    failed_step ▶ completed_step ▶ finished ▶ preempted ▶ forks ▶ running ▶ resumed ▶ new
    └── core withdraws, seals ──┘  └── blocks come free ─┘         └── blocks are taken ──┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.core import (
    CacheHit,
    Core,
    OffloadAnswer,
    Reservation,
    RowBatch,
    RowStates,
    TableChange,
    patch_of,
)
from kvcache.manager.admission import Admission
from kvcache.manager.forks import Forks
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.request_table import BatchTokens, KnownRequest, RequestTable
from kvcache.manager.row_columns import END, OWN, OWN_END, SETTLED, RunningRows, note_forwards
from kvcache.manager.step_ledger import ClientSteps, Rollback, Seating, StepRecord
from kvcache.manager.step_plan import StepPlan
from kvcache.manager.tiers import TierLink
from kvcache.request import Request
from kvcache.step import NO_SLOT, Refusal, StepResult


@dataclass(slots=True)
class _Answer:
    """The parts of a `StepResult`, as they come up."""

    slots: list[int] = field(default_factory=list)
    num_hit: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    no_room: list[str] = field(default_factory=list)
    waiting_for_load: list[str] = field(default_factory=list)
    retry_later: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    forked_slots: list[int] = field(default_factory=list)
    changes: list[tuple[int, TableChange]] = field(default_factory=list)

    def refuse(self, request_id: str, reasons: list[str]) -> None:
        """Say that a request was not admitted, and why."""
        reasons.append(request_id)
        self.slots.append(NO_SLOT)
        self.num_hit.append(0)
        self.num_scheduled.append(0)


class StepExecutor:
    """Carries out plans on one book and one core."""

    def __init__(
        self,
        table: RequestTable,
        core: Core,
        admission: Admission,
        tiers: TierLink,
        limits: ModelLimits,
    ) -> None:
        """Work on `table` and `core`; `tiers` are asked before a request is admitted."""
        self._table = table
        self._core = core
        self._admission = admission
        self._has_tenants = admission.has_tenants
        self._tiers = tiers
        self._forks = Forks(table, core)
        self._max_model_len = limits.max_model_len
        self._keeps_states = limits.keeps_states

    def execute(self, plan: StepPlan) -> StepResult:
        """Do what the plan says and return what came of it. `seq` of the result is 0."""
        step, client = plan.request, plan.client
        if plan.rollback is not None:
            self._core.fail_steps(client.client_id, plan.rollback.from_step)
            client.fail(plan.rollback.from_step, self._take_back(plan.rollback))
        if step.completed_step > client.completed_step:
            self._core.complete_steps(client.client_id, step.completed_step)
            client.complete(step.completed_step)
        client.last_step = step.step

        record, answer = StepRecord(step.step), _Answer()
        self._core.open_step(client.client_id, step.step)
        if plan.finished or plan.preempted:
            self._let_go(plan, record)
        for request_id, change in self._core.take_merges():
            known = self._table.known.get(request_id)
            if known is not None and known.is_running:
                answer.changes.append((known.slot, change))
        if plan.forks:
            self._fork_all(plan, record, answer)
        is_reserved, patch = EMPTY_INT32, EMPTY_PATCH
        if len(plan.rows.slots):
            is_reserved, patch = self._run_rows(plan, record)
            if self._has_tenants:
                self._refuse_rows(plan.rows, is_reserved, answer)
        if not plan.names_nobody:
            self._admit_all(plan, record, answer)
        self._core.close_step()
        if not record.is_empty:
            client.records.append(record)
        return self._result(plan, answer, is_reserved, patch)

    def forget(self, known: KnownRequest) -> None:
        """Give a request's blocks back, know it no more, and tell the tiers below."""
        if known.is_running:
            self._core.free(known.request)
        self._table.forget(known)
        self._tiers.on_request_finished(known.request.request_id)

    def _take_back(self, rollback: Rollback) -> list[Seating]:
        """Undo what failed; return the requests that had to be preempted for it."""
        for known in rollback.forgotten:
            self.forget(known)
        for row in rollback.preempted_again:
            self._core.free(row.known.request)
            self._table.undo_resume(row.known)
            _take_back_tokens(row.known.request, row.num_tokens)
        for row in rollback.preempted:
            _take_back_tokens(row.known.request, row.num_tokens)
        for row in rollback.rows:
            self._table.roll_back(row.known.slot, row.num_computed, row.num_tokens)
        preempted = []
        for row in rollback.overwritten:
            preempted.append(Seating(row.known, row.known.generation, row.num_tokens))
            self._core.free(row.known.request)
            self._table.preempt(row.known)
            _take_back_tokens(row.known.request, row.num_tokens)
        return preempted

    def _let_go(self, plan: StepPlan, record: StepRecord) -> None:
        for known in plan.finished:
            self.forget(known)
        if not plan.preempted:
            return
        swapped = set(plan.request.preempted_swap)
        for known in plan.preempted:
            if known.request.request_id in swapped:
                self._swap_out(known, plan.client)
            self._core.free(known.request)
            self._table.preempt(known)
            record.preempted.append(Seating(known, known.generation, known.request.num_tokens))

    def _swap_out(self, known: KnownRequest, client: ClientSteps) -> None:
        """Have the tiers keep what only the tables of a request that is preempted hold.

        Not where it does not read the cache: all of its tokens are to be computed.
        """
        swap, request, table = self._tiers.swap, known.request, self._table
        if swap is None or request.skip_reading_prefix_cache:
            return
        table.sync(known.slot)
        num_confirmed = client.num_confirmed(
            known.generation, table.num_computed(known.slot), request.num_tokens
        )
        num_tokens = min(num_confirmed, request.num_tokens - 1)
        num_cached = self._core.look_up(request).num_tokens
        if num_tokens > num_cached:
            ids = self._core.block_ids(request.request_id)
            swap.on_swap_out(request, num_tokens, num_cached, ids)

    def _fork_all(self, plan: StepPlan, record: StepRecord, answer: _Answer) -> None:
        """Seat the children of forks; if this step fails, they go as requests that were new."""
        for parent, child_id in plan.forks:
            seated = self._forks.seat_copy(parent, child_id)
            if seated is None:
                answer.no_room.append(child_id)
                answer.forked_slots.append(NO_SLOT)
                continue
            known = seated.known
            answer.forked_slots.append(known.slot)
            answer.changes.extend((known.slot, change) for change in seated.changes)
            record.new.append(Seating(known, known.generation, known.request.num_tokens))

    def _run_rows(self, plan: StepPlan, record: StepRecord) -> tuple[Int32Array, BlockTablePatch]:
        """Settle the rows and reserve their blocks; say which rows got them."""
        rows, table = plan.rows, self._table
        record.rows = rows
        slots, figures = rows.slots, rows.figures
        confirmed = plan.client.confirmed_tokens(rows, table)
        table.append(slots, rows.offsets, rows.token_ids, is_crowded=rows.is_crowded)
        reserved = self._core.reserve_rows(
            RowBatch(
                table.requests[slots],
                slots,
                confirmed,
                self._slot_tokens(figures, plan.request.num_lookahead_tokens),
                figures[OWN_END],
                BatchTokens(table, slots),
                self._row_states(rows) if self._keeps_states else None,
                are_tokens_known=True,
            )
        )
        note_forwards(table.rows, slots, figures, reserved.is_reserved)
        return reserved.is_reserved, reserved.patches

    def _refuse_rows(self, rows: RunningRows, is_reserved: Int32Array, answer: _Answer) -> None:
        """Say which rows without room have outgrown what their tenant may have."""
        for i in np.flatnonzero(is_reserved == 0).tolist():
            request, num_tokens = self._table.requests[rows.slots[i]], int(rows.figures[OWN_END, i])
            refusal = self._admission.refusal(request, num_tokens, is_counted=True)
            if refusal is not None:
                answer.refused.append(refusal)

    def _row_states(self, rows: RunningRows) -> RowStates:
        """Say where each row's forward ends, if it has one, and where its last one did."""
        figures, last = rows.figures, self._table.rows[rows.slots, OWN]
        ends = np.where(figures[END] > figures[SETTLED], figures[OWN_END], last)
        return RowStates(ends, last, figures[SETTLED] - last)

    def _slot_tokens(self, figures: npt.NDArray[np.int32], num_lookahead_tokens: int) -> Int32Array:
        """Up to where each row needs slots; a row that only settles needs none ahead."""
        ends: Int32Array = figures[END]
        if not num_lookahead_tokens:
            return ends
        ahead = np.int64(min(num_lookahead_tokens, self._max_model_len))
        wanted = ends + ahead * (ends > figures[SETTLED])
        return int32_array(np.minimum(wanted, self._max_model_len))

    def _admit_all(self, plan: StepPlan, record: StepRecord, answer: _Answer) -> None:
        step, index = plan.request, plan.client.index
        ahead = step.num_lookahead_tokens
        for known, max_new in plan.resumed:
            seating = self._admit(
                known.request,
                index,
                answer,
                max_new=max_new,
                num_ahead=ahead,
                num_encoder=known.num_encoder_tokens,
            )
            if seating is not None:
                record.resumed.append(seating)
        for request, new in plan.new:
            seating = self._admit(
                request,
                index,
                answer,
                max_new=new.max_new_tokens,
                num_ahead=new.num_lookahead_tokens,
                num_encoder=new.num_encoder_tokens,
                num_external=new.num_external_computed_tokens,
                delays_caching=new.delay_cache_blocks,
            )
            if seating is not None:
                record.new.append(seating)

    def _admit(
        self,
        request: Request,
        index: int,
        answer: _Answer,
        *,
        max_new: int,
        num_ahead: int,
        num_encoder: int,
        num_external: int = 0,
        delays_caching: bool = False,
    ) -> Seating | None:
        """Let a request in, new or resumed, if there is room; otherwise the answer says why not.

        It computes at most `max_new` tokens and gets slots for `num_ahead` more.
        """
        if self._has_tenants:
            refusal = self._admission.refusal(request, request.num_tokens)
            if refusal is not None:
                answer.refused.append(refusal)
                answer.refuse(request.request_id, answer.no_room)
                return None
        hit = self._core.look_up(request)
        if self._tiers.hooks is not None and not self._is_ready(request, hit, answer):
            return None
        num_tokens, num_hit, loads = request.num_tokens, hit.num_tokens, self._tiers.loads
        held = loads.held_for(request, num_hit) if len(loads) else None
        if held is not None:
            num_hit = held.num_tokens
        start = min(num_hit + num_external, num_tokens - 1)
        num_scheduled = min(max_new, num_tokens - start)
        end = start + num_scheduled
        changes = None
        if self._table.num_free:
            wanted = Reservation(
                start,
                min(end + num_ahead, self._max_model_len),
                0 if delays_caching else end,
                self._admission.num_spare_blocks,
                end,
                None,
                num_encoder,
            )
            if held is None:
                changes = self._core.reserve(request, wanted, hit)
            else:
                changes = loads.hand_over(held.load_id, request, wanted)
        if changes is None:
            answer.refuse(request.request_id, answer.no_room)
            return None
        if self._admission.counts:
            self._admission.record(request, num_hit)
        known = self._table.admit(request, index, end, num_encoder)
        slot = known.slot
        answer.slots.append(slot)
        answer.num_hit.append(num_hit)
        answer.num_scheduled.append(num_scheduled)
        for change in changes:
            answer.changes.append((slot, change))
        return Seating(known, known.generation, num_tokens)

    def _is_ready(self, request: Request, hit: CacheHit, answer: _Answer) -> bool:
        """Ask the tiers below. What they could load is computed unless they are loading it."""
        hooks = self._tiers.hooks
        if hooks is None or request.skip_reading_prefix_cache:
            return True
        below = hooks.look_up(request, hit.num_tokens).answer
        if below is OffloadAnswer.RETRY:
            answer.refuse(request.request_id, answer.retry_later)
        elif below is OffloadAnswer.HIT_PENDING:
            answer.refuse(request.request_id, answer.waiting_for_load)
        else:
            return True
        return False

    def _result(
        self, plan: StepPlan, answer: _Answer, is_reserved: Int32Array, patch: BlockTablePatch
    ) -> StepResult:
        step = plan.request
        if plan.names_nobody and not answer.refused and not answer.changes:
            return StepResult(
                step.client_id,
                step.step,
                step.epoch,
                seq=0,
                running_scheduled=is_reserved,
                patches=patch,
            )
        rolled_back = () if plan.rollback is None else plan.rollback.rows
        withdrawn: tuple[str, ...] = ()
        if plan.rollback is not None:
            lost = (*plan.rollback.preempted_again, *plan.rollback.overwritten)
            again = (row.known for row in lost)
            withdrawn = tuple(
                known.request.request_id for known in (*plan.rollback.forgotten, *again)
            )
        return StepResult(
            step.client_id,
            step.step,
            step.epoch,
            seq=0,
            admitted_slots=_column(answer.slots),
            num_hit_tokens=_column(answer.num_hit),
            num_scheduled_tokens=_column(answer.num_scheduled),
            running_scheduled=is_reserved,
            no_room=tuple(answer.no_room),
            waiting_for_load=tuple(answer.waiting_for_load),
            retry_later=tuple(answer.retry_later),
            refused=tuple(answer.refused),
            withdrawn=withdrawn,
            rolled_back_slots=_column([row.slot for row in rolled_back]),
            rolled_back_computed=_column([row.num_computed for row in rolled_back]),
            rolled_back_tokens=_column([row.num_tokens for row in rolled_back]),
            forked_slots=_column(answer.forked_slots),
            patches=patch_of(answer.changes, patch),
        )


def _column(values: list[int]) -> Int32Array:
    return int32_array(values) if values else EMPTY_INT32


def _take_back_tokens(request: Request, num_tokens: int) -> None:
    if num_tokens < request.num_tokens:
        request.truncate_tokens(num_tokens)
