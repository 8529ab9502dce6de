"""Execution of a checked step: settle, free, extend running rows, resume and admit.

The executor takes a `StepPlan` and returns the `StepResult`. The plan is valid, so a step cannot
fail here; the result names the requests that found no room. Time, epochs and workers are handled
elsewhere.

    failed_step ▶ completed_step ▶ hints ▶ finished ▶ preempted ▶ forks ▶ running ▶ resumed ▶ new
    └── core withdraws, seals ──┘  └── blocks come free ─┘         └── blocks are taken ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.core import (
    CacheHit,
    OffloadAnswer,
    Reservation,
    RowsAdmitted,
    RowsReserved,
    TableChange,
    joined,
    patch_of,
)
from kvcache.core.flat_core import FlatCore
from kvcache.core.running import END, END_OF_OWN, SETTLED, RunningRows
from kvcache.manager.admission import Admission
from kvcache.manager.forks import seat_fork
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.request_table import KnownRequest, RequestTable
from kvcache.manager.step_ledger import ClientSteps, Rollback, SlotAssignment, StepRecord
from kvcache.manager.step_plan import StepPlan
from kvcache.manager.tiers import TierLink
from kvcache.protocol.step import NO_SLOT, NewRequest, Refusal, StepResult
from kvcache.requests.request import Request, copy_request

NO_ROOM, WAITING, LATER = "no_room", "waiting_for_load", "retry_later"
"""Reasons why a request is not admitted: fields of a `StepResult`."""


@dataclass(slots=True)
class _Answer:
    """The parts of a `StepResult`, collected during the step. `admitted`: slot, hit tokens and
    scheduled tokens. `named`: the requests not served, by reason."""

    admitted: list[tuple[int, int, int]] = field(default_factory=list)
    named: dict[str, list[str]] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    forked_slots: list[int] = field(default_factory=list)
    changes: list[tuple[int, TableChange]] = field(default_factory=list)

    def name(self, request_id: str, reason: str) -> None:
        """Note that a request is not served, and why."""
        self.named.setdefault(reason, []).append(request_id)


class StepExecutor:
    """Executes plans on one table and one core."""

    def __init__(
        self,
        table: RequestTable,
        core: FlatCore,
        admission: Admission,
        tiers: TierLink,
        limits: ModelLimits,
    ) -> None:
        """Work on `table` and `core`; ask `tiers` before admitting a request."""
        self._table = table
        self._core = core
        self._admission = admission
        self._tiers = tiers
        self._max_model_len = limits.max_model_len

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the plan and return the result, whose `seq` is 0."""
        step, client, core = plan.request, plan.client, self._core
        if plan.rollback is not None:
            core.fail_steps(client.client_id, plan.rollback.from_step)
            client.fail(plan.rollback.from_step, self._take_back(plan.rollback))
        if step.completed_step > client.completed_step:
            core.complete_steps(client.client_id, step.completed_step)
            client.complete(step.completed_step)
        client.last_step = step.step

        record, answer = StepRecord(step.step), _Answer()
        is_running = len(plan.rows.slots) or plan.new or plan.resumed or plan.preempted
        if is_running or plan.forks:  # otherwise nothing becomes hittable, or is looked up
            core.open_step(client.client_id, step.step)
        for known, hints in plan.hints:
            known.request.hints = hints
        if plan.finished:
            self.forget(plan.finished)
        if plan.preempted:
            self._preempt(plan, record)
        for request_id, change in core.take_merges():
            holder = self._table.known.get(request_id)
            if holder is not None and holder.is_running:
                answer.changes.append((holder.slot, change))
        for parent, child_id in plan.forks:
            self._fork(parent, child_id, record, answer)
        is_reserved, admitted = EMPTY_INT32, None
        if len(plan.rows.slots):
            is_reserved, changes = self._run_rows(plan, record)
            answer.changes += changes
            if self._admission.has_tenants:
                self._refuse_rows(plan.rows, is_reserved, answer)
        if plan.new and not plan.resumed:
            admitted = self._admit_together(plan, record, answer)
        patch = core.take_patch()
        ahead = step.num_lookahead_tokens
        for known, max_new in plan.resumed:
            if known.request.namespace.model_epoch != plan.model_epoch:
                old = known.request  # what tiers keep for this object is of other weights
                known.request = copy_request(old, model_epoch=plan.model_epoch)
                known.request.num_preemptions = old.num_preemptions
            wish = NewRequest(
                known.request.request_id,
                EMPTY_INT32,
                max_new,
                num_lookahead_tokens=ahead,
                num_encoder_tokens=known.num_encoder_tokens,
            )
            self._admit(known.request, wish, client.index, answer, record.resumed)
        if admitted is None:
            for request, wish in plan.new:
                self._admit(request, wish, client.index, answer, record.new)
        if is_running or plan.forks:
            core.close_step()
        if len(record.rows.slots) or record.preempted or record.resumed or record.new:
            client.records.append(record)
        if answer.changes:
            patch = joined(patch, patch_of(answer.changes))
        fields: dict[str, Any] = {"running_scheduled": is_reserved, "patches": patch}
        self._add_fields(fields, plan, answer, admitted)
        return StepResult(step.client_id, step.step, step.epoch, 0, **fields)

    def forget(self, gone: Sequence[KnownRequest], *, are_void: bool = False) -> None:
        """Free the blocks of requests, in order, remove them from the table, and tell the tiers
        below. Follow their hints, unless they `are_void`: then they may come again."""
        hinted = []
        for known in gone:
            if known.request.hints and not are_void:
                if known.is_running:
                    self._table.sync(known.slot)
                hinted.append((known.request, self._core.path_of(known.request)))
        if len(gone) == 1:
            self._core.free(gone[0].request)
        else:
            self._core.free_all([known.request for known in gone])
        for known in gone:
            self._table.forget(known)
        if self._tiers.hooks is not None:
            for known in gone:
                self._tiers.hooks.on_request_finished(known.request.request_id)
        for request, path in hinted:
            self._core.cache.hint(path, request.hints)
            if self._tiers.on_hints is not None:
                self._tiers.on_hints(request)

    def _take_back(self, rollback: Rollback) -> list[SlotAssignment]:
        """Roll back; return the requests that had to be preempted for it."""
        self.forget(rollback.forgotten, are_void=True)
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
            preempted.append(SlotAssignment(row.known, row.known.generation, row.num_tokens))
            self._core.free(row.known.request)
            self._table.preempt(row.known)
            _take_back_tokens(row.known.request, row.num_tokens)
        return preempted

    def _preempt(self, plan: StepPlan, record: StepRecord) -> None:
        swapped = set(plan.request.preempted_swap)
        for known in plan.preempted:
            if known.request.request_id in swapped:
                self._swap_out(known, plan.client)
            self._core.free(known.request)
            self._table.preempt(known)
            record.preempted.append(
                SlotAssignment(known, known.generation, known.request.num_tokens)
            )

    def _swap_out(self, known: KnownRequest, client: ClientSteps) -> None:
        """Make the tiers keep the content that only the tables of a preempted request have.

        A request that does not read the cache is left out, since all its tokens must be computed.
        """
        swap, request, table = self._tiers.swap, known.request, self._table
        if swap is None or request.skip_reading_prefix_cache:
            return
        table.sync(known.slot)
        num_confirmed = client.num_confirmed(
            known.generation, table.num_computed(known.slot), request.num_tokens
        )
        num_tokens = min(num_confirmed, request.num_tokens - 1)
        num_cached = self._core.cache.look_up(request).num_tokens
        if num_tokens > num_cached:
            ids = self._core.block_ids(request.request_id)
            swap.on_swap_out(request, num_tokens, num_cached, ids)

    def _fork(
        self, parent: KnownRequest, child_id: str, record: StepRecord, answer: _Answer
    ) -> None:
        """Admit the child of a fork, with all computed tokens of its parent. If this step fails, it
        is removed as a new request is."""
        table, request = self._table, parent.request
        table.sync(parent.slot)
        num_tokens = min(table.num_computed(parent.slot), request.num_tokens)
        child = copy_request(request, child_id)
        seated = seat_fork(table, self._core, parent, child, num_tokens)
        if seated is None:
            answer.name(child_id, NO_ROOM)
            answer.forked_slots.append(NO_SLOT)
            return
        known, changes = seated
        answer.forked_slots.append(known.slot)
        answer.changes += [(known.slot, change) for change in changes]
        record.new.append(SlotAssignment(known, known.generation, known.request.num_tokens))

    def _run_rows(self, plan: StepPlan, record: StepRecord) -> RowsReserved:
        """Settle the rows and reserve their blocks; see `FlatCore.run_rows`."""
        rows, table = plan.rows, self._table
        record.rows = rows
        confirmed = plan.client.confirmed_tokens(rows, table)
        wanted = self._slot_tokens(rows.positions, plan.request.num_lookahead_tokens)
        if rows.is_crowded:
            rows = table.make_room(rows)
        return self._core.run_rows(table, rows, confirmed, wanted)

    def _refuse_rows(self, rows: RunningRows, is_reserved: Int32Array, answer: _Answer) -> None:
        """Refuse the rows without room that exceed their tenant's limit."""
        for i in np.flatnonzero(is_reserved == 0).tolist():
            request, num_tokens = (
                self._table.requests[rows.slots[i]],
                int(rows.positions[END_OF_OWN, i]),
            )
            refusal = self._admission.refusal(request, num_tokens, is_counted=True)
            if refusal is not None:
                answer.refused.append(refusal)

    def _slot_tokens(self, positions: npt.NDArray[np.int32], num_ahead: int) -> Int32Array:
        """Return how far each row needs slots; a row that only settles needs no lookahead."""
        ends: Int32Array = positions[END]
        if not num_ahead:
            return ends
        wanted = ends + np.int64(min(num_ahead, self._max_model_len)) * (ends > positions[SETTLED])
        return int32_array(np.minimum(wanted, self._max_model_len))

    def _admit_together(
        self, plan: StepPlan, record: StepRecord, answer: _Answer
    ) -> RowsAdmitted | None:
        """Admit all new requests of a step in one call of the core.

        Returns None, unchanged, if they have to be admitted one by one.
        """
        table, admission, tiers = self._table, self._admission, self._tiers
        if admission.has_tenants or tiers.hooks is not None or len(tiers.loads):
            return None
        num_running, slots = table.num_taken, table.take_slots(len(plan.new))
        admitted = self._core.admit_rows(
            table, plan.new, slots, plan.client.index, num_running, admission.watermark_blocks,
            self._max_model_len,
        )  # fmt: skip
        if admitted is None:
            table.give_back_slots(slots)
            return None
        num_seated = 0
        for (request, wish), slot, num_hit in zip(
            plan.new, admitted.slots.tolist(), admitted.num_hit_tokens.tolist(), strict=True
        ):
            if slot == NO_SLOT:
                answer.name(request.request_id, NO_ROOM)
                continue
            if admission.counts:
                admission.record(request, num_hit)
            known = table.seat(request, slot, plan.client.index, wish.num_encoder_tokens)
            record.new.append(SlotAssignment(known, known.generation, request.num_tokens))
            num_seated += 1
        table.give_back_slots(slots[num_seated:])
        return admitted

    def _admit(
        self,
        request: Request,
        wish: NewRequest,
        client_index: int,
        answer: _Answer,
        assignments: list[SlotAssignment],
    ) -> None:
        """Admit a new or resumed request if there is room; otherwise the answer says why not."""
        admission, loads = self._admission, self._tiers.loads
        if admission.has_tenants:
            refusal = admission.refusal(request, request.num_tokens)
            if refusal is not None:
                answer.refused.append(refusal)
                self._leave_out(request, answer, NO_ROOM)
                return
        hit = self._core.cache.look_up(request)
        if self._tiers.hooks is not None and (reason := self._why_to_wait(request, hit)):
            self._leave_out(request, answer, reason)
            return
        num_tokens, num_hit = request.num_tokens, hit.num_tokens
        num_held = loads.num_held_tokens(request, num_hit) if len(loads) else 0
        num_hit = num_held or num_hit
        start = min(num_hit + wish.num_external_computed_tokens, num_tokens - 1)
        num_scheduled = min(wish.max_new_tokens, num_tokens - start)
        end = start + num_scheduled
        has_room = False
        if self._table.num_free_slots:
            wanted = Reservation(
                start,
                min(end + wish.num_lookahead_tokens, self._max_model_len),
                0 if wish.delay_cache_blocks else end,
                admission.num_spare_blocks,
                end,
                None,
                wish.num_encoder_tokens,
            )
            if num_held:
                has_room = loads.hand_over(request, wanted)
            else:
                has_room = self._core.reserve(request, wanted, hit) is not None
        if not has_room:
            self._leave_out(request, answer, NO_ROOM)
            return
        if admission.counts:
            admission.record(request, num_hit)
        row = self._core.row_of(request.request_id)
        known = self._table.admit(request, client_index, end, wish.num_encoder_tokens, row)
        answer.admitted.append((known.slot, num_hit, num_scheduled))
        for change in self._core.tables(request.request_id):
            answer.changes.append((known.slot, change))
        assignments.append(SlotAssignment(known, known.generation, num_tokens))

    def _leave_out(self, request: Request, answer: _Answer, reason: str) -> None:
        """Note that a request is not admitted, and why."""
        answer.admitted.append((NO_SLOT, 0, 0))
        answer.name(request.request_id, reason)

    def _why_to_wait(self, request: Request, hit: CacheHit) -> str | None:
        """Ask the tiers below whether the request must wait, and why; None if it need not."""
        hooks = self._tiers.hooks
        if hooks is None or request.skip_reading_prefix_cache:
            return None
        below = hooks.look_up(request, hit.num_tokens).answer
        if below is OffloadAnswer.RETRY:
            return LATER
        return WAITING if below is OffloadAnswer.HIT_PENDING else None

    def _add_fields(
        self,
        fields: dict[str, Any],
        plan: StepPlan,
        answer: _Answer,
        admitted: RowsAdmitted | None,
    ) -> None:
        """Add the fields that only some results have."""
        for reason, ids in answer.named.items():
            fields[reason] = tuple(ids)
        if admitted is not None:
            fields["admitted_slots"], fields["num_hit_tokens"] = admitted[:2]
            fields["num_scheduled_tokens"] = admitted.num_scheduled_tokens
        elif answer.admitted:
            slots, num_hit, num_scheduled = zip(*answer.admitted, strict=True)
            fields["admitted_slots"] = np.array(slots, np.int32)
            fields["num_hit_tokens"] = np.array(num_hit, np.int32)
            fields["num_scheduled_tokens"] = np.array(num_scheduled, np.int32)
        if answer.refused:
            fields["refused"] = tuple(answer.refused)
        if answer.forked_slots:
            fields["forked_slots"] = int32_array(answer.forked_slots)
        if (rollback := plan.rollback) is not None:
            lost = (row.known for row in (*rollback.preempted_again, *rollback.overwritten))
            fields["withdrawn"] = tuple(
                [known.request.request_id for known in (*rollback.forgotten, *lost)]
            )
            before = [(row.slot, row.num_computed, row.num_tokens) for row in rollback.rows]
            columns = np.array(before, np.int32).reshape(-1, 3).T
            names = ("rolled_back_slots", "rolled_back_computed", "rolled_back_tokens")
            fields |= {n: c.copy() for n, c in zip(names, columns, strict=True)}


def _take_back_tokens(request: Request, num_tokens: int) -> None:
    if num_tokens < request.num_tokens:
        request.truncate_tokens(num_tokens)
