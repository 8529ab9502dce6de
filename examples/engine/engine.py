"""The engine: requests in, tokens out, one step of the coordinator per iteration.

    add_request ──▶ scheduler ──plan──▶ StepRequest ──▶ coordinator ──▶ workers' tables
                       ▲                                     │
    Output ◀── tokens ─┴── executor ◀── StepWork ◀── settle ─┘

With `is_pipelined`, the plan of step n+1 is sent while the ranks compute step n; its forward begins
as soon as step n has chosen its tokens. Keys, values and states are only in the workers' pages, so
the model reads exactly the hits of the coordinator. After a lost coordinator or a failed forward,
every request continues from its tokens and hits the prefix that is still cached. Threads may share
an engine; one of them steps at a time.

Beam search is in beams.py, drafts in drafts.py and scheduler.py; `SamplingParams` selects them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from examples.engine.checkpoint import read_config
from examples.engine.config import EngineConfig
from examples.engine.executor import Executor, LocalExecutor
from examples.engine.model_config import DecoderConfig
from examples.engine.outputs import EngineStatistics, Output
from examples.engine.request_checks import check_limits, check_names, checked_tokens
from examples.engine.request_table import BuiltRow, RequestTable
from examples.engine.sampling import SamplingParams
from examples.engine.scheduler import ScheduledRow, Scheduler, SchedulerLimits, StepPlan
from examples.engine.sequence import Sequence
from examples.engine.stream import TokenStream
from examples.engine.tally import EngineTally
from examples.engine.tokenizer import ByteTokenizer, Tokenizer
from examples.engine.work import StepWork, WorkRow
from kvcache.base.errors import (
    KVCacheError,
    NotRunningError,
    RequestError,
    StaleEpochError,
    WorkerLostError,
)
from kvcache.protocol.step import NO_STEP, StepRequest
from kvcache.requests.hints import CacheHint, checked_hints

MAX_FAILED_FORWARDS = 3
"""Forwards in a row that may fail before the error is raised."""

LOADING_PAUSE_S = 0.001
"""Pause between steps while all requests wait for loads from tiers."""

LOST_PAUSE_S = 0.2
"""Pause between attempts to continue after a loss."""


@dataclass(frozen=True)
class _Asked:
    """A step that has been sent."""

    number: int
    plan: StepPlan


@dataclass(frozen=True)
class _Forward:
    """A submitted forward; `rows[i]` is None if row `i` chooses no token."""

    work: StepWork
    rows: tuple[BuiltRow | None, ...]


class Engine:
    """A running engine. Use `Engine.launch`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Own and drive `executor`; `now_s` is the clock of statistics."""
        self.config = config
        self._now_s = now_s
        self.model: DecoderConfig = config.model
        self.tokenizer = tokenizer
        self.executor = executor
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
                max_chunk_tokens=config.max_chunk_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=self.model.max_model_len,
                boundary_tokens=executor.boundary_tokens,
                # Computing a state ahead needs room for it besides the newest one.
                can_guess=config.is_pipelined and not self.model.keeps_states,
                is_swapping=config.preemption == "swap",
            )
        )
        self._lock = threading.RLock()
        self._abandoned: deque[str] = deque()
        self._forward: _Forward | None = None
        self._completed_step = self._reported_step = NO_STEP
        self._num_failed = 0
        self._is_adrift = False  # the epoch has ended, and the next one has not begun
        self._startup_s = config.cluster_config().deadlines.startup_s
        self._stuck_since_s: float | None = None
        self._tally = EngineTally()
        self._table = RequestTable(
            self._scheduler, tokenizer, self.model.max_model_len, self._tally
        )
        self._is_shut_down = False

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> Engine:
        """Start coordinator and ranks, load the weights, and return when all are ready.

        `tokenizer` makes the text of outputs; bytes by default. `now_s`: clock of statistics.
        Raises ConfigurationError for invalid settings, and as `KVCacheCluster.launch` does.
        """
        if config.checkpoint is not None:
            model = read_config(
                config.checkpoint,
                dtype=config.model.dtype,
                max_model_len=config.model.max_model_len,
            )
            config = replace(config, model=model)
        config = replace(
            config, model=replace(config.model, num_state_drafts=config.max_draft_tokens)
        )
        executor: Executor
        if config.executor == "ray":
            from examples.engine.ray_executor import RayExecutor

            executor = RayExecutor(config)
        else:
            executor = LocalExecutor(config)
        return cls(config, executor, tokenizer or ByteTokenizer(), now_s=now_s)

    # --- requests

    def add_request(
        self,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        *,
        hints: SequenceOf[CacheHint] = (),
    ) -> str:
        """Queue a request and return its id, a new one unless given.

        `lora_name` is one of the configuration's adapters. Requests with different salts share
        nothing. `hints` say when its blocks will be used again. Raises RequestError for a request
        that cannot be served; nothing has changed then.
        """
        params = SamplingParams() if params is None else params
        with self._lock:
            self._require_running()
            tokens = checked_tokens(prompt_token_ids, self.model)
            check_names(request_id, cache_salt)
            if request_id is None:
                request_id = self._table.new_id()
            if request_id in self._table.requests:
                raise RequestError(f"request {request_id} runs already: use another id")
            check_limits(params, lora_name, self.config)
            plain_hints = checked_hints(f"request {request_id}", hints)
            self._table.open(request_id, tokens, params, lora_name, cache_salt, hints=plain_hints)
            return request_id

    def prefetch(self, prompt_token_ids: SequenceOf[int]) -> int:
        """Raise a prompt's prefix from tiers to the device, ahead of its request.

        Returns how many tokens are being loaded. Repeat the call, and step, until it returns 0.
        Raises RequestError for invalid tokens.
        """
        with self._lock:
            self._require_running()
            tokens = checked_tokens(prompt_token_ids, self.model)
            client = self.executor.client
            num_tokens = 0 if self._is_adrift else client.prefetch_prefix(tokens)
            if num_tokens and self._forward is None and self._scheduler.is_idle:
                # The load goes on with the steps of an idle engine, too.
                self._completed_step = client.step(self._request()).step
            return num_tokens

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return whether it existed. The next step frees its blocks;
        its samples end with the reason "abort"."""
        with self._lock:
            request = self._table.requests.get(request_id)
            if request is None:
                return False
            self._table.end(request, "abort")
            return True

    def stream(self, request_id: str) -> TokenStream:
        """Return an iterator over a request's outputs, for `for` or `async for`.

        The reader steps the engine. Closing it early, or leaving the loop, aborts the request.
        Raises RequestError if no such request runs.
        """
        with self._lock:
            request = self._table.requests.get(request_id)
            if request is None:
                raise RequestError(f"request {request_id} does not run: add it first")
            if request.unread is None:
                request.unread = deque()
            return TokenStream(self, request_id, request.unread)

    def runs(self, request_id: str, unread: deque[Output]) -> bool:
        """Say whether the request that writes to `unread` still runs."""
        request = self._table.requests.get(request_id)
        return request is not None and request.unread is unread

    def abandon(self, request_id: str) -> None:
        """Abort a request with the next step. May be called at any moment."""
        self._abandoned.append(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether some request has not ended."""
        return bool(self._table.requests)

    # --- steps

    def step(self) -> list[Output]:
        """Take one step and return its outputs. Without requests, it seals the last step.

        Raises the error of a forward that failed several times, DeadlineError if the
        coordinator does not answer, WorkerLostError if a lost rank was not replaced within
        `deadlines.startup_s`. Step again to continue waiting.
        """
        with self._lock:
            self._require_running()
            start_s = self._now_s()
            self._tally.num_steps += 1
            while self._abandoned:
                self.abort(self._abandoned.popleft())
            if not self._is_adrift:
                try:
                    self._go_on()
                except (StaleEpochError, WorkerLostError):
                    self._is_adrift = True
            if self._is_adrift:
                self._come_back()
            self._give_up_stuck()
            self._tally.step_s += self._now_s() - start_s
            return self._table.take_outputs()

    def generate(
        self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams | None = None
    ) -> list[list[int]]:
        """Run these prompts to the end; return the tokens of each first sample."""
        ids = [self.add_request(prompt, params) for prompt in prompts]
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        while any(request_id in self._table.requests for request_id in ids):
            for output in self.step():
                if output.index == 0 and output.request_id in tokens:
                    tokens[output.request_id] += output.token_ids
        return [tokens[request_id] for request_id in ids]

    def _go_on(self) -> None:
        asked = self._ask() if self._forward and self.config.is_pipelined else None
        if self._forward is not None and not self._finish_forward(self._forward, asked):
            return
        if asked is None:
            asked = self._ask()
        if asked is not None:
            self._begin_forward(asked)
        elif self._completed_step > self._reported_step and self._scheduler.is_idle:
            self.executor.client.step(self._request())

    def _request(self) -> StepRequest:
        self._reported_step = self._completed_step
        return StepRequest(completed_step=self._completed_step)

    def _ask(self) -> _Asked | None:
        """Plan a step and send it; return None if it would change nothing."""
        plan = self._scheduler.plan(self._completed_step)
        if plan.is_empty:
            return None
        self._reported_step = self._completed_step
        start_s = self._now_s()
        number = self.executor.client.submit(plan.request)
        self._tally.coordinator_s += self._now_s() - start_s
        return _Asked(number, plan)

    def _settle(self, asked: _Asked) -> tuple[int, int, int, tuple[ScheduledRow, ...]]:
        """Wait for the answer; return its step, epoch, seq, and the sequences to compute."""
        start_s = self._now_s()
        result = self.executor.client.wait_result(asked.number)
        self._tally.coordinator_s += self._now_s() - start_s
        scheduled = self._scheduler.settle(asked.plan, result)
        self._tally.num_cached_tokens += int(result.num_hit_tokens.sum())
        for refusal in result.refused:  # by its tenant's limit, also if other requests leave
            request = self._table.requests.get(refusal.request_id.rpartition("/")[0])
            if request is not None:
                self._table.end(request, "error", refusal.reason)
        return result.step, result.epoch, result.seq, scheduled

    def _begin_forward(self, asked: _Asked) -> None:
        step, epoch, seq, scheduled = self._settle(asked)
        rows, built = [], []
        for row in scheduled:
            if not row.sequence.is_finished:
                work_row, takers = self._build(row)
                rows.append(work_row)
                built.append(takers)
        if not rows:  # such a step computes nothing, so it is complete
            self._completed_step = step
            if any(sequence.is_loading for sequence in asked.plan.admitting):
                time.sleep(LOADING_PAUSE_S)
            return
        work = StepWork(step, epoch, seq, tuple(rows))
        self._forward = _Forward(work, tuple(built))
        self._tally.num_computed_tokens += sum(len(row.token_ids) for row in rows)
        self.executor.submit(work)

    def _build(self, row: ScheduledRow) -> tuple[WorkRow, BuiltRow | None]:
        """Return a rank's work for a row, and how it chooses tokens, if its end is reached."""
        sequence = row.sequence
        own_end = row.start + row.num_new - len(row.drafts)
        token_ids = np.array((*sequence.tokens[row.start : own_end], *row.drafts), dtype=np.int32)
        takers: tuple[Sequence, ...] = ()
        if own_end == len(sequence.tokens):
            waiting = (c for c in sequence.children if len(c.tokens) == own_end)
            takers = (sequence, *(c for c in waiting if not c.is_finished and not c.is_held))
        num_sampled = 1 + len(row.drafts) if takers else 0
        choices = tuple(taker.params.choice(taker.index) for taker in takers)
        work_row = WorkRow(
            sequence.slot,
            row.start,
            token_ids,
            row.is_new,
            row.num_drafts,
            num_sampled,
            choices,
            sequence.adapter,
        )
        return work_row, BuiltRow(sequence, own_end, row.drafts, takers) if takers else None

    def _finish_forward(self, forward: _Forward, asked: _Asked | None) -> bool:
        """Take the tokens of the running forward; return whether it succeeded."""
        try:
            output = self.executor.collect()
        except (StaleEpochError, WorkerLostError):
            raise
        except (KVCacheError, RuntimeError, ValueError) as error:
            self._void(forward.work.step, asked, error)
            return False
        self._forward, self._num_failed = None, 0
        self._completed_step = forward.work.step
        self._tally.compute_s += output.compute_s
        self._table.digest(forward.rows, output)
        return True

    # --- losses

    def _come_back(self) -> None:
        """Continue in the next epoch with the tokens of every request."""
        self._forward = None
        give_up_s = time.monotonic() + self._startup_s
        while True:
            try:
                # First attach, which waits for replacements of lost ranks, then connect the ranks.
                self.executor.attach()
                self.executor.reset()
                break
            except (StaleEpochError, WorkerLostError):
                if time.monotonic() >= give_up_s:
                    raise
                time.sleep(LOST_PAUSE_S)
        self._is_adrift = False
        self._completed_step = self._reported_step = NO_STEP
        self._scheduler.start_over()
        self._tally.num_restarts += 1

    def _void(self, step: int, asked: _Asked | None, error: Exception) -> None:
        """After a failed forward, undo its step and the next one, and start over."""
        self._forward = None
        self._num_failed += 1
        self.executor.reset()
        if asked is not None:
            self._settle(asked)
        client = self.executor.client
        undo = replace(self._request(), failed_step=step)
        client.step(undo)
        known = tuple(sequence.key for sequence in self._scheduler.known_before(step))
        result = client.step(replace(self._request(), finished=known))
        self._completed_step = result.step
        self._scheduler.start_over()
        self._tally.num_restarts += 1
        if self._num_failed >= MAX_FAILED_FORWARDS:
            self._num_failed = 0
            raise error

    def _give_up_stuck(self) -> None:
        """End a request that finds no room in an otherwise empty pool."""
        sequence = None if self._forward is not None else self._scheduler.stuck()
        if sequence is None:
            self._stuck_since_s = None
            return
        now_s = time.monotonic()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s < self.config.no_room_s:
            return
        self._stuck_since_s = None
        self._table.end(
            self._table.requests[sequence.request_id],
            "error",
            f"request {sequence.request_id} finds no room for its {len(sequence.tokens)} tokens "
            "though nothing else runs: shorten it, raise num_blocks, or free what pins and other "
            "clients hold",
        )

    # --- state

    def statistics(self) -> EngineStatistics:
        """Return frozen statistics."""
        with self._lock:
            return self._tally.statistics(self._scheduler)

    def shutdown(self) -> None:
        """End the engine and everything it started. Repeatable."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                self.executor.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise NotRunningError("the engine is shut down: launch another one")
