"""A continuous-batching scheduler that plays a workload: an engine without a model.

    workload ──▶ waiting ──admit──▶ running rows ──plan──▶ StepRequest ──▶ stepper (manager, ranks)
                    ▲                    │    ◀──settle── StepResult ◀──
                    └────── preempt ─────┘

Every step continues all rows (one token each, or a chunk of the prompt) within a budget of tokens,
then admits waiting requests in order. Tokens are "sampled" by a rule, not by a model, so that a
replay is the same every time. If a running request finds no room, the most recently admitted one is
preempted; tokens that tiers do not keep are computed again later. Stops at a wrong byte, and names
the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcache.base.clock import Clock
from kvcache.base.errors import (
    DeadlineError,
    InvariantError,
    OutOfBlocksError,
    RequestError,
    StaleEpochError,
    WorkerLostError,
    WrongBytesError,
)
from kvcache.protocol.step import (
    NO_SLOT,
    NO_STEP,
    NewRequest,
    ResumedRequest,
    StepRequest,
    StepResult,
)
from kvcache.replay.limits import EngineLimits, require_model_len
from kvcache.replay.report import ReplayReport, ReplayTally
from kvcache.replay.rows import PlannedRows, ReplayedRequest, ReplayedRows, RowPositions
from kvcache.replay.stepper import ForwardProgress, Stepper, describe_failures
from kvcache.simulate.tokens import num_encoder_tokens
from kvcache.simulate.workload import Workload, WorkloadRequest


@dataclass(frozen=True, eq=False)
class Before:
    """Where a request goes back to: its row, the preempted ones, or the new ones.

    `keeps_row`: its row has been running since before the failed step, if it still has one.
    `is_new`: the manager forgets it, and it starts over.
    """

    request: ReplayedRequest
    num_computed: int
    num_known: int
    keeps_row: bool
    is_new: bool


@dataclass(frozen=True, eq=False)
class UndoRecord:
    """The changes of one step: rows before it, and admitted requests."""

    step: int
    rows: RowPositions
    admitted: Sequence[Before]


class UndoLog:
    """Records of unfinished steps, oldest first."""

    def __init__(self) -> None:
        self._records: deque[UndoRecord] = deque()

    def add(self, record: UndoRecord) -> None:
        """Add a step that has just been sent."""
        self._records.append(record)

    def drop_finished(self, finished_step: int) -> None:
        """Drop steps up to `finished_step`."""
        while self._records and self._records[0].step <= finished_step:
            self._records.popleft()

    def undo(self, failed_step: int) -> list[Before]:
        """Drop steps from `failed_step` on; return the earlier state of their requests."""
        failed: deque[UndoRecord] = deque()
        while self._records and self._records[-1].step >= failed_step:
            failed.appendleft(self._records.pop())
        before: dict[int, Before] = {}
        for record in failed:
            rows = zip(
                record.rows.requests,
                record.rows.num_computed_tokens.tolist(),
                record.rows.num_known_tokens.tolist(),
                strict=True,
            )
            for request, computed, known in rows:
                before.setdefault(id(request), Before(request, computed, known, True, False))
            for entry in record.admitted:
                first = before.setdefault(id(entry.request), entry)
                before[id(entry.request)] = replace(first, keeps_row=False)
        return list(before.values())


class WaitingRequests:
    """Preempted and new requests. At most `max_parked` step aside; then later ones must wait."""

    def __init__(self, arrivals: Iterable[WorkloadRequest], max_parked: int) -> None:
        self._arrivals = iter(arrivals)
        self._max_parked = max_parked
        self._preempted: deque[ReplayedRequest] = deque()
        self._ready: deque[ReplayedRequest] = deque()
        self._parked: dict[str, list[ReplayedRequest]] = {}  # by the quoted request
        self._num_parked = 0
        self._unanswered: set[str] = set()  # drawn, not finished
        self.num_drawn = 0

    def look_ahead(self, count: int) -> list[ReplayedRequest]:
        """Return up to `count` requests that may run now, in order, without removing them."""
        while len(self._preempted) + len(self._ready) < count and self._draw():
            pass
        heads = list(self._preempted)[:count]
        return heads + [self._ready[i] for i in range(min(count - len(heads), len(self._ready)))]

    def take(self, request: ReplayedRequest) -> None:
        """Remove a request that `look_ahead` returned: it runs now."""
        (self._preempted if request.is_known else self._ready).remove(request)

    def put_preempted(self, request: ReplayedRequest) -> None:
        """Put a preempted request before all others."""
        self._preempted.appendleft(request)

    def put_withdrawn(self, requests: Iterable[ReplayedRequest]) -> None:
        """Let requests that the manager has forgotten start over, before other new ones."""
        for request in sorted(requests, key=lambda request: request.admission, reverse=True):
            if request in self._preempted:
                self._preempted.remove(request)
            self._ready.appendleft(request)

    def take_preempted(self) -> list[ReplayedRequest]:
        """Remove and return all preempted requests, in order: the manager has forgotten them."""
        preempted = list(self._preempted)
        self._preempted.clear()
        return preempted

    def finish(self, request_id: str) -> None:
        """Let the requests that quote the answer of `request_id` run."""
        self._unanswered.discard(request_id)
        ready = self._parked.pop(request_id, [])
        self._num_parked -= len(ready)
        self._ready.extend(ready)

    def _draw(self) -> bool:
        """Draw one request from the workload; False if there is none, or too many are parked."""
        if self._num_parked >= self._max_parked:
            return False
        arrived = next(self._arrivals, None)
        if arrived is None:
            return False
        self.num_drawn += 1
        request = ReplayedRequest(arrived, arrived.num_prompt_tokens)
        if arrived.after is not None and arrived.after in self._unanswered:
            self._parked.setdefault(arrived.after, []).append(request)
            self._num_parked += 1
        else:
            self._ready.append(request)
        self._unanswered.add(arrived.request_id)
        return True


@dataclass(frozen=True, eq=False)
class _Plan:
    """One step, before it is sent."""

    finished: tuple[ReplayedRequest, ...]
    preempted: tuple[ReplayedRequest, ...]
    rows: PlannedRows
    admitting: tuple[ReplayedRequest, ...]
    max_new_tokens: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the step would change nothing."""
        return not (self.finished or self.preempted or self.rows.num_rows or self.admitting)


class ReplayEngine:
    """Plays `workload` on `stepper` within `limits`. `run` may be called once.

    `on_progress` is called with a report of the replay so far about every `statistics_interval_s`.
    """

    def __init__(
        self,
        workload: Workload,
        stepper: Stepper,
        limits: EngineLimits,
        clock: Clock,
        on_progress: Callable[[ReplayReport], None] = lambda report: None,
    ) -> None:
        self._workload = workload
        self._stepper = stepper
        self._limits = limits
        self._clock = clock
        self._on_progress = on_progress
        self._rows = ReplayedRows(limits.max_num_seqs)
        self._tally = ReplayTally(workload.name)
        self._waiting = WaitingRequests(self._arrivals(), max_parked=4 * limits.max_num_seqs)
        self._undo_log = UndoLog()
        self._last_step = 0
        self._finished_step = NO_STEP  # according to the stepper
        self._num_admissions = 0
        self._num_fruitless = 0  # steps in a row that changed nothing
        self._must_preempt = False  # a running row found no room in the last step
        self._is_refused = False  # the first in line found no room
        self._leaving: tuple[ReplayedRequest, ...] = ()  # finished, not reported yet
        self._returning: list[ReplayedRequest] = []  # of an epoch that has ended
        self._has_room_come = False  # a request has ended since
        self._start_s = self._advanced_s = self._statistics_s = clock.now()

    def run(self) -> ReplayReport:
        """Play everything, wait until the last step is sealed, and return the statistics.

        Raises:
            WrongBytesError: a forward found other bytes than the tokens demand; with the history.
            OutOfBlocksError: a request does not fit although nothing else runs.
            RequestError: a request is longer than the model, or the manager refused a step.
            DeadlineError: nothing has advanced for `stall_s`, or a cluster that lost its
                coordinator or a worker has not come back.
            TraceError: the workload cannot be read on.
        """
        self._start_s = self._advanced_s = self._clock.now()
        self._sample_statistics()
        while self._go_on():
            if self._clock.now() - self._statistics_s >= self._limits.statistics_interval_s:
                self._sample_statistics()
                self._on_progress(self.report())
        self._sample_statistics()
        return self.report()

    def _go_on(self) -> bool:
        """Play a step; return whether there are more. Recovers from a loss."""
        try:
            self._await_pipeline(self._limits.pipeline_depth)
            plan = self._plan()
            if not plan.is_empty:
                self._play(plan)
            elif self._finished_step < self._last_step:
                self._await_pipeline(0)  # a failed step would return its requests
            else:
                self._exchange(self._request())  # seals the last step
                self._await_pipeline(0)
                return False
        except (StaleEpochError, WorkerLostError):
            self._come_back()
        return True

    def report(self) -> ReplayReport:
        """Return the statistics of the replay so far."""
        return self._tally.report(self._clock.now() - self._start_s)

    # -- waiting for forwards --------------------------------------------------------------------

    def _await_pipeline(self, depth: int) -> None:
        """Wait until at most `depth` steps are unfinished; undo steps that failed.

        Raises WrongBytesError as soon as a forward has found wrong bytes.
        """
        progress = self._look_at_progress()
        while progress.failed_step == NO_STEP and progress.finished_step < self._last_step - depth:
            self._stepper.wait_finished(self._last_step - depth)
            progress = self._look_at_progress()
        if progress.failed_step != NO_STEP:
            self._undo(progress.failed_step)

    def _look_at_progress(self) -> ForwardProgress:
        progress = self._stepper.progress()
        self._tally.sums.bytes_checked = progress.bytes_checked
        if progress.failures:
            history = describe_failures(progress.failures)
            self._tally.sums.num_wrong_blocks = len(progress.failures)
            self._tally.sums.history = history
            raise WrongBytesError(
                f"{self._workload.name}: wrong bytes in {len(progress.failures)} blocks, the "
                f"replay has ended; what happened to them:\n  " + history.replace("\n", "\n  ")
            )
        self._finished_step = progress.finished_step
        self._undo_log.drop_finished(progress.finished_step)
        return progress

    def _undo(self, failed_step: int) -> None:
        """Void the failed step and all later ones; their requests return to their earlier state."""
        last_step = self._last_step
        result = self._exchange(
            replace(self._request(), completed_step=failed_step - 1, failed_step=failed_step)
        )
        self._tally.sums.num_failed_steps += last_step - failed_step + 1
        withdrawn: list[ReplayedRequest] = []
        seatless: list[str] = []  # the manager must agree about these
        for before in self._undo_log.undo(failed_step):
            request = before.request
            if request.is_gone:
                continue
            row = self._rows.find(request)
            is_lost = self._limits.model.keeps_states and request.request_id in result.withdrawn
            if before.keeps_row and row is not None and not is_lost:
                self._rows.go_back(row, before.num_computed, before.num_known)
                continue
            if row is not None:
                self._rows.remove([row])
            request.num_known_tokens = before.num_known
            if before.is_new:
                request.is_known = False
                withdrawn.append(request)
            elif row is not None:
                self._waiting.put_preempted(request)
            if before.is_new or row is not None:
                seatless.append(request.request_id)
        self._waiting.put_withdrawn(withdrawn)
        if set(seatless) != set(result.withdrawn):
            raise InvariantError(
                f"failed step {failed_step}: the manager has withdrawn {result.withdrawn}, the "
                f"engine {tuple(seatless)}"
            )
        self._must_preempt = self._is_refused = False
        self._await_pipeline(0)

    def _come_back(self) -> None:
        """Continue in the next epoch, because the present one ended and its steps are void.

        A request that ran comes back as a new one, with all of its tokens. All of them are in one
        step, so that their cached blocks are held before any of them takes new ones. Raises
        DeadlineError if no epoch begins in time.
        """
        self._stepper.attach()
        self._tally.sums.num_returns += 1
        self._let_go()
        self._undo_log = UndoLog()
        running = self._rows.remove(range(len(self._rows)))
        unknown = [*running, *self._waiting.take_preempted()]
        for request in unknown:
            request.is_known = False
        self._waiting.put_withdrawn(unknown)
        self._must_preempt = self._is_refused = False
        self._returning = [*running, *self._returning]
        self._advanced_s = self._clock.now()

    # -- one step --------------------------------------------------------------------------------

    def _plan(self) -> _Plan:
        """Decide the next step. Removes finished and preempted rows."""
        finished = tuple(self._rows.remove(self._rows.done()))
        preempted: tuple[ReplayedRequest, ...] = ()
        if finished:
            self._has_room_come = True
        elif self._must_preempt and len(self._rows) > 1:
            # The last admitted request has lost least, and blocks of its prompt may still be cached
            # later.
            preempted = tuple(self._rows.remove([len(self._rows) - 1]))
            self._is_refused, self._has_room_come = True, False
        self._leaving = finished
        for request in finished:
            self._waiting.finish(request.request_id)
        rows = self._rows.plan(
            self._limits.max_num_batched_tokens, self._limits.model.boundary_tokens
        )
        admitting, max_new_tokens = self._pick_admissions(rows.num_tokens)
        for request in preempted:
            self._waiting.put_preempted(request)
        return _Plan(finished, preempted, rows, admitting, max_new_tokens)

    def _pick_admissions(
        self, num_planned_tokens: int
    ) -> tuple[tuple[ReplayedRequest, ...], tuple[int, ...]]:
        """Choose requests to admit, with the tokens and seats that running rows leave."""
        returning = self._returning
        if returning:
            share = max(1, self._limits.max_num_batched_tokens // len(returning))
            return tuple(returning), (share,) * len(returning)
        budget = self._limits.max_num_batched_tokens - num_planned_tokens
        seats = self._limits.max_num_seqs - len(self._rows)
        must_wait = self._is_refused and not self._has_room_come and len(self._rows)
        if self._must_preempt or must_wait:
            return (), ()
        picked, tokens = [], []
        # After a refusal, the first one is tried alone, so that no later one takes its room.
        for request in self._waiting.look_ahead(1 if self._is_refused else seats):
            if budget <= 0:
                break
            share = min(budget, request.num_known_tokens)
            tokens.append(self._first_chunk(share))
            budget -= share
            picked.append(request)
        return tuple(picked), tuple(tokens)

    def _arrivals(self) -> Iterator[WorkloadRequest]:
        """Yield the requests to play. Raises RequestError for one that is too long, unless such
        requests are skipped."""
        limits = self._limits
        for request in self._workload:
            if limits.skips_too_long and request.num_tokens > limits.max_model_len:
                self._tally.sums.num_skipped_requests += 1
                continue
            require_model_len(self._workload.name, request, limits.max_model_len)
            yield request

    def _first_chunk(self, num_tokens: int) -> int:
        """Return how much of `num_tokens` to schedule before the number of hits is known.

        If the ends of chunks matter, at most one boundary interval, so that a chunk that starts
        after a hit does not pass the last boundary.
        """
        return min(num_tokens, self._limits.model.boundary_tokens or num_tokens)

    def _play(self, plan: _Plan) -> None:
        """Send one step and record its result."""
        resumed = [request for request in plan.admitting if request.is_known]
        new = plan.admitting[len(resumed) :]
        max_new = plan.max_new_tokens
        positions = self._rows.positions()
        result = self._exchange(
            replace(
                self._request(),
                finished=tuple(request.request_id for request in plan.finished),
                preempted_swap=tuple(request.request_id for request in plan.preempted),
                running=plan.rows.running,
                resumed=tuple(
                    ResumedRequest(request.request_id, tokens)
                    for request, tokens in zip(resumed, max_new, strict=False)
                ),
                new=tuple(map(self._new_request, new, max_new[len(resumed) :])),
            )
        )
        self._returning = []
        self._let_go()
        self._tally.sums.num_preemptions += len(plan.preempted)
        starved = self._rows.settle(plan.rows, result.running_scheduled)
        self._tally.sums.num_computed_tokens += int(
            plan.rows.running.num_new_tokens[result.running_scheduled != 0].sum()
        )
        admitted = self._admit(plan.admitting, result)
        self._undo_log.add(UndoRecord(self._last_step, positions, admitted))
        self._must_preempt = bool(starved)
        has_advanced = plan.finished or plan.preempted or admitted
        if has_advanced or len(starved) < plan.rows.num_rows:
            self._advanced_s = self._clock.now()
            self._num_fruitless = 0
        else:
            self._raise_if_never_fits(result)

    def _let_go(self) -> None:
        """Count finished requests once the manager has freed them."""
        for request in self._leaving:
            request.is_gone = True
        self._tally.count_finished(self._leaving)
        self._leaving = ()

    def _admit(self, admitting: Sequence[ReplayedRequest], result: StepResult) -> list[Before]:
        """Give rows to the admitted requests; return their earlier state."""
        admitted = []
        outcomes = zip(
            admitting,
            result.admitted_slots.tolist(),
            result.num_hit_tokens.tolist(),
            result.num_scheduled_tokens.tolist(),
            strict=True,
        )
        pending = {*result.waiting_for_load, *result.retry_later}
        is_refused = False
        for request, slot, num_hit_tokens, num_scheduled_tokens in outcomes:
            if slot == NO_SLOT:
                is_refused = is_refused or request.request_id not in pending
                continue
            admitted.append(
                Before(request, 0, request.num_known_tokens, False, not request.is_known)
            )
            self._waiting.take(request)
            self._tally.count_admission(request, num_hit_tokens, num_scheduled_tokens)
            self._num_admissions += 1
            request.is_known, request.admission = True, self._num_admissions
            self._rows.add(request, slot, num_hit_tokens + num_scheduled_tokens)
        if admitting:
            self._is_refused, self._has_room_come = is_refused, False
        return admitted

    def _raise_if_never_fits(self, result: StepResult) -> None:
        """Called after a step without effect: raise unless another one might have one.

        Raises OutOfBlocksError if a request that wants to run has the pool to itself, or exceeds
        its tenant's limit, and DeadlineError if nothing has advanced for `stall_s`.
        """
        self._num_fruitless += 1
        if result.refused:
            refusal = result.refused[0]
            raise OutOfBlocksError(
                f"request {refusal.request_id} of {self._workload.name}: {refusal.reason}"
            )
        if len(self._rows) <= 1 and (self._must_preempt or self._is_refused):
            # Blocks of finished steps become free when they are reported: try once more.
            self._await_pipeline(0)
            if self._num_fruitless > 1:
                raise self._does_not_fit()
        waited_s = self._clock.now() - self._advanced_s
        if waited_s > self._limits.stall_s:
            raise DeadlineError(
                f"{self._workload.name}: nothing has advanced for {waited_s:.0f} s at step "
                f"{self._last_step}: no room for {result.no_room}, waiting for loads "
                f"{result.waiting_for_load}, for look-ups {result.retry_later}"
            )

    def _does_not_fit(self) -> OutOfBlocksError:
        running = self._rows.requests
        request = running[0] if running else self._waiting.look_ahead(1)[0]
        statistics = self._stepper.statistics()
        return OutOfBlocksError(
            f"request {request.request_id} of {self._workload.name} needs room for "
            f"{request.num_target_tokens} tokens and finds none, though nothing else runs: the "
            f"pool has {statistics.num_blocks} blocks, {statistics.usage:.0%} of them in use: "
            "raise num_blocks, or free what pins and other clients hold"
        )

    # -- sending ---------------------------------------------------------------------------------

    def _request(self) -> StepRequest:
        """Return an empty step that reports finished requests."""
        return StepRequest(client_id="", step=0, epoch=0, completed_step=self._finished_step)

    def _exchange(self, request: StepRequest) -> StepResult:
        """Send a step and return its answer. Raises RequestError if it was refused."""
        number = self._stepper.submit(request)
        result = self._stepper.wait_result(number)
        if result.error:
            raise RequestError(f"step {result.step} was refused: {result.error}")
        self._last_step = result.step
        self._tally.sums.num_steps += 1
        return result

    def _sample_statistics(self) -> None:
        self._statistics_s = self._clock.now()
        self._tally.sample(self._stepper.statistics())

    def _new_request(self, request: ReplayedRequest, max_new_tokens: int) -> NewRequest:
        most = self._limits.model.max_encoder_tokens
        return NewRequest(
            request_id=request.request_id,
            token_ids=request.known_token_ids,
            max_new_tokens=max_new_tokens,
            cache_salt=request.request.cache_salt,
            tenant=request.request.tenant,
            num_encoder_tokens=num_encoder_tokens(request.request_id, most) if most else 0,
            hints=request.request.hints,
        )
