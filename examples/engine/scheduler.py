"""Continuous batching: decides which sequences compute how many tokens in the next step.

    waiting ──admit──▶ running ──plan──▶ StepRequest ──▶ coordinator
       ▲                  │    ◀─settle── StepResult ◀──
       └──── preempt ─────┘

First all running sequences continue (one token each, a chunk of a prompt, or a token and drafts)
within a budget, then the first waiting request is admitted. A running sequence that finds no room
preempts the one that was admitted last. A sequence whose next token is being computed may be
scheduled ahead: the unknown token is a *draft* for the coordinator, accepted when it is known. The
scheduler computes nothing and sends nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from examples.engine.drafts import propose
from examples.engine.sequence import Phase, Sequence
from kvcache.protocol.step import (
    NO_SLOT,
    Fork,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    RunningRow,
    StepRequest,
    StepResult,
)


@dataclass(frozen=True)
class SchedulerLimits:
    """See `EngineConfig`. `boundary_tokens`: chunks should end at multiples of it. `can_guess`:
    tokens may be scheduled before they are known."""

    max_num_batched_tokens: int
    max_chunk_tokens: int
    max_num_seqs: int
    max_model_len: int
    boundary_tokens: int | None
    can_guess: bool
    is_swapping: bool


@dataclass(frozen=True)
class PlannedRow:
    """A running sequence: `num_new` positions. The last ones are `drafts`, or one is a token that
    is not known yet (`is_guess`). The step sends the coordinator the tokens `told`, and that
    `num_rejected` drafts were rejected. The values are those of planning: during the step, the step
    before it may end, and the sequence with it."""

    sequence: Sequence
    num_new: int
    told: tuple[int, ...]
    num_rejected: int
    drafts: tuple[int, ...] = ()
    is_guess: bool = False

    @classmethod
    def of(cls, sequence: Sequence, num_new: int, drafts: tuple[int, ...] = ()) -> PlannedRow:
        """Plan `num_new` positions of known tokens, and `drafts`."""
        told = tuple(sequence.tokens[sequence.num_told :])
        return cls(sequence, num_new + len(drafts), told, sequence.num_rejected, drafts)

    @classmethod
    def guessing(cls, sequence: Sequence) -> PlannedRow:
        """Plan the position of the token that is being computed."""
        row = cls.of(sequence, 1)
        return replace(row, is_guess=True)

    @property
    def num_drafts(self) -> int:
        """Positions that are not the sequence's own yet."""
        return len(self.drafts) + self.is_guess


@dataclass(frozen=True)
class PlannedFork:
    """A child that shares the first `num_shared` tokens of its parent."""

    parent: Sequence
    child: Sequence
    num_shared: int


@dataclass(frozen=True)
class StepPlan:
    """One step, before it is sent. `admitting` in the order of the request's answer."""

    request: StepRequest
    finished: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    forks: tuple[PlannedFork, ...]
    rows: tuple[PlannedRow, ...]
    admitting: tuple[Sequence, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it would change nothing."""
        return not (self.finished or self.preempted or self.forks or self.rows or self.admitting)


@dataclass(frozen=True)
class ScheduledRow:
    """A step's part of a sequence: positions `[start, start + num_new)`."""

    sequence: Sequence
    start: int
    num_new: int
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    is_new: bool = False


class Scheduler:
    """The sequences of an engine, in order. Invariant: a sequence that has not finished is in
    exactly one of `waiting` and `running`, or is the child of one that is."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Begin without sequences."""
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._forking: tuple[PlannedFork, ...] = ()  # of the step in flight
        self._returning = 0  # number of `waiting` that come back from an ended epoch
        self._must_preempt = False  # a running sequence found no room in the last step
        self._is_refused = False  # the first waiting one found no room: admit it before all others
        self._has_room_come = False  # a sequence has ended since then
        self.num_fruitless = 0  # steps in a row that changed nothing
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in any state; the next step tells the coordinator."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self._returning -= sequence in list(self.waiting)[: self._returning]
            self.waiting.remove(sequence)
        sequence.phase, sequence.is_loading = Phase.FINISHED, False
        self._release_children(sequence)
        if sequence.is_known:
            self._leaving.append(sequence)

    def stuck(self) -> Sequence | None:
        """Return a sequence that found no room in the last steps although nothing else runs."""
        if self.num_fruitless < 3 or len(self.running) > 1:
            return None
        if self.running and self._must_preempt:
            return self.running[0]
        return self.waiting[0] if not self.running and self._is_refused and self.waiting else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to send or to compute."""
        return not (self.waiting or self.running or self._leaving)

    # --- planning

    def plan(self, completed_step: int) -> StepPlan:
        """Plan the next step. Removes finished and preempted sequences."""
        finished, self._leaving = tuple(self._leaving), []
        preempted: tuple[Sequence, ...] = ()
        if finished:
            self._has_room_come = True
        elif len(self.running) > 1 and (self._must_preempt or self._is_held_up()):
            preempted = (self._preempt(self.running[-1]),)
        forks = self._forking = tuple(self._take_forks())
        rows = tuple(self._plan_rows())
        budget = self._limits.max_num_batched_tokens - sum(row.num_new for row in rows)
        admitting, shares = self._pick_admissions(budget, len(forks))
        resumed = [i for i, sequence in enumerate(admitting) if sequence.is_known]
        new = [i for i, sequence in enumerate(admitting) if not sequence.is_known]
        names = tuple(sequence.key for sequence in preempted)
        request = StepRequest(
            completed_step=completed_step,
            finished=tuple(sequence.key for sequence in finished),
            preempted_recompute=() if self._limits.is_swapping else names,
            preempted_swap=names if self._limits.is_swapping else (),
            running=_running(rows),
            resumed=tuple(ResumedRequest(admitting[i].key, shares[i]) for i in resumed),
            new=tuple(_new_request(admitting[i], shares[i]) for i in new),
            forks=tuple(Fork(fork.parent.key, fork.child.key) for fork in forks),
        )
        in_order = tuple(admitting[i] for i in (*resumed, *new))
        return StepPlan(request, finished, preempted, forks, rows, in_order)

    def _is_held_up(self) -> bool:
        """Return whether beams wait for one that finds no room besides them."""
        is_waiting = self._is_refused and self.num_fruitless > 1
        return is_waiting and all(sequence.is_held for sequence in self.running)

    def _preempt(self, sequence: Sequence) -> Sequence:
        self.running.remove(sequence)
        self._release_children(sequence)
        sequence.phase, sequence.slot = Phase.PREEMPTED, NO_SLOT
        sequence.num_computed = sequence.num_rejected = 0
        sequence.is_fresh = True
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._is_refused, self._has_room_come = True, False
        return sequence

    def _release_children(self, sequence: Sequence) -> None:
        """Let children that can no longer share compute for themselves."""
        for child in reversed(sequence.children):
            if not child.is_finished:
                child.phase = Phase.WAITING
                self.waiting.insert(self._returning, child)
        sequence.children = []

    def _take_forks(self) -> Iterable[PlannedFork]:
        """Yield children that can share their parent's tokens now."""
        seats = self._limits.max_num_seqs - len(self.running)
        for parent in list(self.running):
            children = [child for child in parent.children if not child.is_finished]
            if not children or parent.num_computed < parent.num_told:
                continue
            is_in_time = parent.num_told == parent.num_computed and not parent.num_rejected
            forked = children[: max(0, seats)] if is_in_time else []
            parent.children = children[len(forked) :]
            seats -= len(forked)
            self._release_children(parent)
            for child in forked:
                yield PlannedFork(parent, child, parent.num_computed)

    def _plan_rows(self) -> Iterable[PlannedRow]:
        budget = self._limits.max_num_batched_tokens
        for sequence in self.running:
            if budget <= 0:
                return
            row = None if sequence.is_held else self._plan_row(sequence, budget)
            if row is not None:
                budget -= row.num_new
                yield row

    def _plan_row(self, sequence: Sequence, budget: int) -> PlannedRow | None:
        limits = self._limits
        needed = len(sequence.tokens) - sequence.num_computed
        if needed < 0:  # drafts are being checked
            return None
        if needed == 0:  # its next token is being computed
            is_last = sequence.num_output + 1 >= sequence.params.max_tokens
            is_longest = len(sequence.tokens) + 1 >= limits.max_model_len
            uses_drafts = sequence.params.num_draft_tokens or sequence.params.beam_width
            if not limits.can_guess or is_last or is_longest or uses_drafts:
                return None
            return PlannedRow.guessing(sequence)
        if needed == 1 and sequence.params.num_draft_tokens:
            most = min(
                sequence.params.num_draft_tokens,
                budget - 1,
                sequence.params.max_tokens - sequence.num_output - 1,
                limits.max_model_len - len(sequence.tokens) - 1,
            )
            drafts = propose(sequence.tokens, most)
            return PlannedRow.of(sequence, 1, drafts)
        granted = min(needed, budget, limits.max_chunk_tokens or needed)
        if limits.boundary_tokens is not None:
            end = sequence.num_computed + granted
            cut = end // limits.boundary_tokens * limits.boundary_tokens - sequence.num_computed
            granted = cut if cut > 0 else granted
        return PlannedRow.of(sequence, granted)

    def _pick_admissions(
        self, budget: int, num_forks: int
    ) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
        """Choose the admissions for the remaining tokens and seats, with their numbers of
        tokens."""
        limits = self._limits
        if self._returning:
            returning = list(self.waiting)[: self._returning]
            share = max(1, limits.max_num_batched_tokens // len(returning))
            return tuple(returning), (self._first_chunk(share),) * len(returning)
        moves = any(not sequence.is_held for sequence in self.running)
        must_wait = self._is_refused and not self._has_room_come and moves
        if self._must_preempt or must_wait:
            return (), ()
        seats = limits.max_num_seqs - len(self.running) - num_forks
        # After a refusal the first one is tried alone, so that no later one takes its room.
        seats = min(seats, 1) if self._is_refused else seats
        picked, shares = [], []
        ready = (sequence for sequence in self.waiting if not sequence.is_held)
        for sequence in itertools.islice(ready, max(0, seats)):
            if budget <= 0:
                break
            picked.append(sequence)
            shares.append(self._first_chunk(min(budget, len(sequence.tokens))))
            budget -= shares[-1]
        return tuple(picked), tuple(shares)

    def _first_chunk(self, num_tokens: int) -> int:
        """Return the number of tokens to request before the hit is known.

        If ends of chunks matter, at most their distance, so that a chunk that starts after a hit
        does not pass the last boundary.
        """
        limits = self._limits
        limited = min(num_tokens, limits.max_chunk_tokens or num_tokens)
        return min(limited, limits.boundary_tokens or limited)

    # --- results

    def settle(self, plan: StepPlan, result: StepResult) -> tuple[ScheduledRow, ...]:
        """Apply the coordinator's answer; return the sequences to compute, in order."""
        for sequence in plan.finished:
            sequence.is_known = False
        scheduled = []
        starved = 0
        for row, is_scheduled in zip(plan.rows, result.running_scheduled.tolist(), strict=True):
            sequence = row.sequence
            sequence.num_told += len(row.told)
            sequence.num_rejected -= row.num_rejected
            if is_scheduled:
                scheduled.append(_scheduled(row))
                sequence.num_computed += row.num_new
                sequence.is_fresh = False
            else:
                starved += 1
        self._seat_forks(plan, result)
        admitted = self._admit(plan, result)
        self._must_preempt = starved > 0
        if plan.finished or plan.preempted or plan.forks or admitted or scheduled:
            self.num_fruitless = 0
        elif starved or (plan.admitting and not any(s.is_loading for s in plan.admitting)):
            self.num_fruitless += 1
        return (*scheduled, *admitted)

    def _seat_forks(self, plan: StepPlan, result: StepResult) -> None:
        self._forking = ()
        for fork, slot in zip(plan.forks, result.forked_slots.tolist(), strict=True):
            child = fork.child
            if slot == NO_SLOT:
                if not child.is_finished:
                    self.waiting.insert(self._returning, child)
                continue
            child.slot, child.is_known, child.known_since = slot, True, result.step
            child.num_told = child.num_computed = fork.num_shared
            if child.is_finished:
                self._leaving.append(child)
            else:
                child.phase = Phase.RUNNING
                self.running.append(child)

    def _admit(self, plan: StepPlan, result: StepResult) -> list[ScheduledRow]:
        admitting = plan.admitting
        num_told = {new.request_id: len(new.token_ids) for new in plan.request.new}
        pending = {*result.waiting_for_load, *result.retry_later}
        admitted, is_refused = [], False
        outcomes = zip(
            admitting,
            result.admitted_slots.tolist(),
            result.num_hit_tokens.tolist(),
            result.num_scheduled_tokens.tolist(),
            strict=True,
        )
        for sequence, slot, num_hit, num_scheduled in outcomes:
            sequence.is_loading = slot == NO_SLOT and sequence.key in pending
            if slot == NO_SLOT:
                is_refused = is_refused or not sequence.is_loading
                continue
            if sequence.key in num_told:
                sequence.num_told, sequence.num_cached = num_told[sequence.key], num_hit
                sequence.is_known, sequence.known_since = True, result.step
            sequence.slot = slot
            sequence.num_computed = num_hit + num_scheduled
            if sequence.is_finished:  # aborted during the step
                if sequence not in self._leaving:
                    self._leaving.append(sequence)
                continue
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.phase, sequence.is_fresh = Phase.RUNNING, False
            admitted.append(ScheduledRow(sequence, num_hit, num_scheduled, is_new=True))
        if admitting:
            self._is_refused, self._has_room_come = is_refused, False
            self._returning = 0
        return admitted

    def known_before(self, step: int) -> list[Sequence]:
        """Return the sequences known to the coordinator since before `step`, including leaving
        ones."""
        everybody = (*self.running, *self.waiting, *self._leaving)
        return [s for s in everybody if s.is_known and s.known_since < step]

    def start_over(self) -> None:
        """Make all sequences wait as new ones: everything scheduled is void."""
        running = [*self.running]
        running += [fork.child for fork in self._forking if not fork.child.is_finished]
        self._forking = ()
        for parent in (*self.running, *self.waiting):
            running += [child for child in parent.children if not child.is_finished]
            parent.children = []
        everybody = [*running, *self.waiting]
        for sequence in everybody:
            sequence.forget()
        self.running, self._leaving = [], []
        self.waiting = deque(everybody)
        self._returning = min(len(running), self._limits.max_num_seqs)
        self._must_preempt = self._is_refused = False
        self.num_fruitless = 0


def _scheduled(row: PlannedRow) -> ScheduledRow:
    sequence = row.sequence
    return ScheduledRow(
        sequence,
        sequence.num_computed,
        row.num_new,
        row.drafts,
        row.num_drafts,
        sequence.is_fresh,
    )


def _running(rows: SequenceOf[PlannedRow]) -> RunningRequests:
    return RunningRequests.from_rows(
        [
            RunningRow(
                row.sequence.slot,
                row.num_new,
                row.told,
                row.num_drafts,
                row.num_rejected,
            )
            for row in rows
        ]
    )


def _new_request(sequence: Sequence, max_new_tokens: int) -> NewRequest:
    return NewRequest(
        request_id=sequence.key,
        token_ids=np.array(sequence.tokens, dtype=np.int32),
        max_new_tokens=max_new_tokens,
        lora_name=sequence.adapter,
        cache_salt=sequence.cache_salt,
        hints=sequence.hints,
    )
