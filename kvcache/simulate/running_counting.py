"""Counting with concurrent requests, by the timestamps of a trace, including answers.

    arrival ──▶ waits, first come first served ──▶ admitted ──▶ prefill ──▶ decoding ──▶ freed
                until its prompt and its answer fit    hits counted    └─▶ its blocks go to tiers

Unlike in `counting.py`, all running requests hold their blocks, and those of their answers, for as
long as computing takes at a given pace. So fewer blocks are left for the cache, and under load
requests wait. Room for a whole answer is taken at once, so no request is preempted. A trace has no
content of answers: their blocks are never hit, and no tier keeps them.

With tiers, the first waiting request has its prefix loaded, as far as there is room, and holds it
while it waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.base.clock import Clock
from kvcache.base.errors import ConfigurationError, OutOfBlocksError
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request
from kvcache.simulate.block_trace import BlockTrace, CompactTrace, TraceTokens
from kvcache.simulate.counting import (
    CountingOptions,
    PrefillCount,
    admit,
    counted_config,
    make_counted_manager,
)
from kvcache.simulate.tier_traffic import NOTHING_BROUGHT, Brought, TierSizes, TierTraffic
from kvcache.simulate.workload import WorkloadRequest

MOST_RUNNING = 256
"""Concurrent requests; others wait, as in a cluster with default settings."""


@dataclass(frozen=True)
class Pace:
    """The speed of every running request, in tokens a second.

    Raises ConfigurationError for invalid values.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 40.0

    def __post_init__(self) -> None:
        speeds = (self.prefill_tokens_per_s, self.decode_tokens_per_s)
        if not all(0 < speed < float("inf") for speed in speeds):
            raise ConfigurationError(
                f"a pace of {self.prefill_tokens_per_s:g} tokens of prompts and "
                f"{self.decode_tokens_per_s:g} of answers a second: give numbers above 0"
            )


@dataclass(frozen=True)
class Waits:
    """Waits: how many requests had to wait, how long on average over all, and the most that ran at
    the same time."""

    num_waited: int
    mean_wait_s: float
    most_running: int


def require_room_for_answers(trace: BlockTrace, num_blocks: int) -> None:
    """Raise OutOfBlocksError, naming the line, if a request does not fit with its answer."""
    needed = -(-(trace.input_lengths + trace.output_lengths) // trace.block_size)
    if needed.max() > num_blocks:
        index = int(needed.argmax())
        raise OutOfBlocksError(
            f"{trace.place_of(index)}: the request does not fit into {num_blocks} blocks with its "
            f"answer of {trace.output_lengths[index]} tokens: simulate at least {needed.max()}"
        )


class RunningCounter:
    """Plays a trace by its timestamps, a request at a time.

    Invariant: time only increases, and no event in `_events` is earlier. An event is the end of a
    request, or of its prefill if tiers need it.
    """

    def __init__(
        self,
        trace: BlockTrace,
        options: CountingOptions,
        pace: Pace,
        clock: Clock,
        tiers: TierSizes | None = None,
    ) -> None:
        """Start with an empty cache of `options.num_blocks`, which must be a number.

        Raises ConfigurationError for invalid tiers.
        """
        if options.num_blocks is None:
            raise ConfigurationError(
                "requests that run side by side without a limit of blocks: give their number"
            )
        self._trace = trace
        self._pace = pace
        self._clock = clock
        self._num_blocks = options.num_blocks
        self._is_whole = bool(options.groups)
        self._workload = TraceTokens(trace) if options.groups else CompactTrace(trace)
        size = self._workload.block_size
        self.manager: KVCacheManager = make_counted_manager(
            options, size, options.num_blocks, MOST_RUNNING
        )
        self.traffic: TierTraffic | None = None
        if tiers is not None:
            config = counted_config(options, size, options.num_blocks)
            self.traffic = TierTraffic(self.manager, config, tiers, clock)
        self._events: list[tuple[float, int, bool, Request]] = []
        self._now_s = 0.0
        self._num_running = self._num_waited = self._most_running = 0
        self._waited_s = 0.0
        self._num_hit_tokens = self._num_hit_blocks = self._num_references = 0
        self._brought = NOTHING_BROUGHT

    @property
    def waits(self) -> Waits:
        mean_s = self._waited_s / self._trace.num_requests
        return Waits(self._num_waited, mean_s, self._most_running)

    @property
    def brought(self) -> Brought:
        """Hits in tiers, in tokens of the trace; those of `count` are of all tiers."""
        host, disk = self._brought.num_host_tokens, self._brought.num_disk_tokens
        return Brought(self._of_trace(host), self._of_trace(disk))

    def count(
        self, on_progress: Callable[[PrefillCount], None] = lambda statistics: None
    ) -> PrefillCount:
        """Play the whole trace and return the statistics; `on_progress` gets them per request.

        Raises OutOfBlocksError for a request that does not fit with its answer.
        """
        start_s = self._clock.now()
        num_input_tokens = 0
        statistics = self._statistics(0, 0, 0.0)
        for index, arrived in enumerate(self._workload):
            self._play(index, arrived)
            num_input_tokens += int(self._trace.input_lengths[index])
            statistics = self._statistics(index + 1, num_input_tokens, self._clock.now() - start_s)
            on_progress(statistics)
        return statistics

    def _statistics(
        self, num_requests: int, num_input_tokens: int, wall_time_s: float
    ) -> PrefillCount:
        return PrefillCount(
            workload=self._trace.name,
            num_blocks=self._num_blocks,
            block_size=self._trace.block_size,
            num_requests=num_requests,
            num_input_tokens=num_input_tokens,
            num_block_references=self._num_references,
            num_hit_blocks=self._num_hit_blocks,
            num_evictions=self.manager.statistics().core.num_evictions
            if num_requests == self._trace.num_requests
            else 0,
            wall_time_s=wall_time_s,
            num_hit_tokens=self._num_hit_tokens,
        )

    def _play(self, index: int, arrived: WorkloadRequest) -> None:
        """Advance time until the request arrives and has room, and admit it."""
        self._now_s = max(self._now_s, arrived.arrival_s)
        self._go_on_until(self._now_s)
        request = Request(arrived.request_id, arrived.token_ids, tenant=arrived.tenant)
        num_answer_tokens = self._num_answer_tokens(index, request.num_tokens)
        while True:
            if self.traffic is not None:
                self._brought += self.traffic.bring(request)
            num_hit_tokens = admit(self.manager, request, num_answer_tokens)
            if num_hit_tokens is not None:
                break
            if not self._num_running:
                raise OutOfBlocksError(
                    f"{self._trace.place_of(index)}: the request does not fit into "
                    f"{self._num_blocks} blocks with its answer of "
                    f"{arrived.num_output_tokens} tokens: simulate more"
                )
            self._wait_for_an_end()
        if self.traffic is not None:
            self.traffic.let_go()
        self._take_note(index, arrived, num_hit_tokens)
        self._run(index, request, num_hit_tokens)

    def _take_note(self, index: int, arrived: WorkloadRequest, num_hit_tokens: int) -> None:
        wait_s = self._now_s - arrived.arrival_s
        self._num_waited += wait_s > 0
        self._waited_s += wait_s
        num_blocks = num_hit_tokens // self._workload.block_size
        self._num_hit_blocks += num_blocks
        self._num_references += self._trace.num_blocks_of(index)
        self._num_hit_tokens += self._of_trace(num_hit_tokens)

    def _of_trace(self, num_tokens: int) -> int:
        """Return how many tokens of the trace this many tokens of the workload represent."""
        if self._is_whole:
            return num_tokens
        return num_tokens // self._workload.block_size * self._trace.block_size

    def _num_answer_tokens(self, index: int, num_prompt_tokens: int) -> int:
        """Return how many slots an answer takes, in tokens of the workload."""
        trace = self._trace
        num_output_tokens = int(trace.output_lengths[index])
        if self._is_whole:
            return num_output_tokens
        num_tokens = int(trace.input_lengths[index]) + num_output_tokens
        num_blocks = -(-num_tokens // trace.block_size)
        return num_blocks * self._workload.block_size - num_prompt_tokens

    def _run(self, index: int, request: Request, num_hit_tokens: int) -> None:
        """Schedule the end of the request's prefill, and its own end."""
        trace, pace = self._trace, self._pace
        scale = 1 if self._is_whole else trace.block_size / self._workload.block_size
        num_computed = int(trace.input_lengths[index]) - num_hit_tokens * scale
        prefilled_s = self._now_s + num_computed / pace.prefill_tokens_per_s
        end_s = prefilled_s + int(trace.output_lengths[index]) / pace.decode_tokens_per_s
        if self.traffic is not None:
            heapq.heappush(self._events, (prefilled_s, index, False, request))
        heapq.heappush(self._events, (end_s, index, True, request))
        self._num_running += 1
        self._most_running = max(self._most_running, self._num_running)

    def _go_on_until(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            self._go_on()

    def _wait_for_an_end(self) -> None:
        """Advance time until a request ends, with all that end at the same time."""
        num_running = self._num_running
        while self._num_running == num_running:
            self._now_s = self._events[0][0]
            self._go_on()
        self._go_on_until(self._now_s)

    def _go_on(self) -> None:
        """Process the next event."""
        _, _, is_end, request = heapq.heappop(self._events)
        if is_end:
            self.manager.free(request)
            self._num_running -= 1
        elif self.traffic is not None:
            self.traffic.store(request)
