"""Traces the requests that a coordinator serves, for clients that record them.

    steps ──▶ RequestTracer: admitted ─▶ counts output ─▶ finished ──take──▶ digests, a file

While no client records, it costs one comparison per step. While one does, prompts wait here until
it takes them. `TracerLimits` bounds how many; the tracer counts the others as lost, and service
continues. A client that has not asked for `lease_s` is considered gone. Requests are handed out in
the order of admission, so a long request delays those admitted after it, at most `most_held`.

Only salted digests of their blocks leave the coordinator. A digest covers its block, all before it,
and what sets the content apart (LoRA, images, salt, tenant). It is keyed with a secret of the
recording, so tokens cannot be found by hashing guesses, and two recordings cannot be compared. A
trace does not even hold the digests: its writer puts numbers in order of appearance in their place.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvcache.base.clock import Clock
from kvcache.base.errors import AlreadyRunningError
from kvcache.coordinator.step_recorder import (
    EpochEnded,
    Event,
    Executed,
    RecorderStatistics,
    Released,
    StepRecorder,
)
from kvcache.protocol.step import NO_SLOT, NewRequest, StepRequest, StepResult
from kvcache.requests.hints import CacheHint

DIGEST_BYTES = 16
SALT_BYTES = 32


@dataclass(frozen=True)
class TracerLimits:
    """How many requests and prompt tokens wait to be taken, and for how long a silent client."""

    most_held: int = 4_096
    most_requests: int = 16_384
    most_tokens: int = 16 * 2**20
    lease_s: float = 30.0


@dataclass(frozen=True, eq=False)
class SeenRequest:
    """A served request: its time of admission, its content, the number of its output tokens and
    its last hints.

    `num_output_tokens` counts those that reached the coordinator: usually all but the last.
    """

    arrival_s: float
    request: NewRequest
    num_output_tokens: int
    hints: tuple[CacheHint, ...] = ()


@dataclass(frozen=True, eq=False)
class SeenRequests:
    """The requests of one call. `num_lost` requests found no room since the recording began."""

    requests: tuple[SeenRequest, ...]
    num_lost: int


@dataclass(slots=True, eq=False)
class _Open:
    """A request that was not handed out yet. `is_void`: its step failed, and it comes again."""

    arrival_s: float
    request: NewRequest
    hints: tuple[CacheHint, ...]
    num_output_tokens: int = 0
    is_done: bool = False
    is_void: bool = False


class RequestTracer:
    """Keeps the requests of executed steps for one listener at a time.

    Invariant: every value of `_running` and `_slots` that is not void waits in `_waiting`, or was
    handed out before its end.
    """

    def __init__(self, clock: Clock, limits: TracerLimits | None = None) -> None:
        """Keep nothing before the first listener asks."""
        self._clock = clock
        self._limits = TracerLimits() if limits is None else limits
        self._listener = ""
        self._asked_s = 0.0
        self._forget()

    def take(self, listener: str, most: int) -> SeenRequests:
        """Return up to `most` ended requests, in order of admission.

        The first call starts tracing. Raises AlreadyRunningError while there is another listener.
        """
        now_s = self._clock.now()
        if self._listener and self._listener != listener:
            silent_s = now_s - self._asked_s
            if silent_s <= self._limits.lease_s:
                raise AlreadyRunningError(
                    "the cluster's requests are being recorded already: wait until that recording "
                    f"ends, or {self._limits.lease_s - silent_s:.0f} s if it has died"
                )
            self._forget()
        self._listener, self._asked_s = listener, now_s
        return SeenRequests(tuple(self._given_out(most)), self._num_lost)

    def finish(self, listener: str) -> SeenRequests:
        """Return all waiting requests, ended or not, and stop tracing."""
        if listener != self._listener:
            return SeenRequests((), 0)
        for waiting in self._waiting:
            waiting.is_done = True
        seen = SeenRequests(tuple(self._given_out(len(self._waiting))), self._num_lost)
        self._listener = ""
        self._forget()
        return seen

    def executed(self, step: StepRequest, result: StepResult) -> None:
        if not self._listener or result.error:
            return
        now_s = self._clock.now()
        if now_s - self._asked_s > self._limits.lease_s:
            self._listener = ""
            self._forget()
            return
        for hinted in step.hints:
            running = self._running.get((step.client_id, hinted.request_id))
            if running is not None:
                running.hints = hinted.hints
        self._end(step)
        self._count_output(step)
        self._admit(step, result, now_s)

    def released(self, client_id: str) -> None:
        """Note that all requests of a client have ended."""
        for key in [key for key in self._running if key[0] == client_id]:
            self._running.pop(key).is_done = True

    def end_epoch(self) -> None:
        """Note that all requests have ended."""
        for running in self._running.values():
            running.is_done = True
        self._running.clear()
        self._slots.clear()

    def _forget(self) -> None:
        self._waiting: deque[_Open] = deque()
        self._running: dict[tuple[str, str], _Open] = {}
        self._slots: dict[int, _Open] = {}
        self._num_waiting_tokens = 0
        self._num_lost = 0

    def _given_out(self, most: int) -> list[SeenRequest]:
        waiting = self._waiting
        given: list[SeenRequest] = []
        while waiting and len(given) < most:
            first = waiting[0]
            if not (first.is_done or first.is_void or len(waiting) > self._limits.most_held):
                break
            waiting.popleft()
            self._num_waiting_tokens -= len(first.request.token_ids)
            if not first.is_void:
                given.append(
                    SeenRequest(
                        first.arrival_s, first.request, first.num_output_tokens, first.hints
                    )
                )
        return given

    def _end(self, step: StepRequest) -> None:
        client_id = step.client_id
        for request_id in step.finished:
            ended = self._running.pop((client_id, request_id), None)
            if ended is not None:
                ended.is_done = True

    def _count_output(self, step: StepRequest) -> None:
        running, slots = step.running, self._slots
        counts = np.diff(running.token_offsets)
        rows = counts.nonzero()[0]
        for slot, count in zip(running.slots[rows].tolist(), counts[rows].tolist(), strict=True):
            row = slots.get(slot)
            if row is not None:
                row.num_output_tokens += count

    def _admit(self, step: StepRequest, result: StepResult, now_s: float) -> None:
        slots = result.admitted_slots.tolist()
        num_resumed = len(step.resumed)
        for resumed, slot in zip(step.resumed, slots[:num_resumed], strict=True):
            if slot != NO_SLOT:
                self._sit(slot, self._running.get((step.client_id, resumed.request_id)))
        for request, slot in zip(step.new, slots[num_resumed:], strict=True):
            if slot != NO_SLOT:
                self._sit(slot, self._open(step.client_id, request, now_s))
        for slot in result.forked_slots.tolist():
            self._slots.pop(slot, None)

    def _sit(self, slot: int, row: _Open | None) -> None:
        """Put a row into a slot, whose earlier request has left it."""
        self._slots.pop(slot, None)
        if row is not None:
            self._slots[slot] = row

    def _open(self, client_id: str, request: NewRequest, now_s: float) -> _Open | None:
        key = (client_id, request.request_id)
        before = self._running.pop(key, None)
        if before is not None:
            before.is_void = True  # the step it was admitted in has failed
        limits, num_tokens = self._limits, len(request.token_ids)
        if (
            len(self._waiting) >= limits.most_requests
            or self._num_waiting_tokens + num_tokens > limits.most_tokens
        ):
            self._num_lost += 1
            return None
        opened = _Open(now_s, request, request.hints)
        self._waiting.append(opened)
        self._num_waiting_tokens += num_tokens
        self._running[key] = opened
        return opened


class TracedRecorder(StepRecorder):
    """Passes all events on to `recorder`, and those of requests to `tracer`."""

    def __init__(self, recorder: StepRecorder, tracer: RequestTracer) -> None:
        self._recorder = recorder
        self._tracer = tracer

    def record(self, event: Event) -> None:
        self._recorder.record(event)
        match event:
            case Executed(StepRequest() as step, StepResult() as result):
                self._tracer.executed(step, result)
            case Released(client_id):
                self._tracer.released(client_id)
            case EpochEnded():
                self._tracer.end_epoch()

    def on_tick(self) -> None:
        self._recorder.on_tick()

    def close(self) -> None:
        self._recorder.close()

    def statistics(self) -> RecorderStatistics | None:
        return self._recorder.statistics()


# --- requests that leave the coordinator


@dataclass(frozen=True)
class RecordedRequest:
    """A request without its tokens. `digests` has `DIGEST_BYTES` for each block, including a partly
    filled last one."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    digests: bytes
    tenant: str | None
    hints: tuple[CacheHint, ...] = ()


@dataclass(frozen=True)
class RecordedBatch:
    """A coordinator's answer to a client that records requests.

    `num_lost` requests found no room since the recording began; `block_size` is tokens per block.
    """

    requests: tuple[RecordedRequest, ...]
    num_lost: int
    block_size: int


def record_request(seen: SeenRequest, block_size: int, salt: bytes) -> RecordedRequest:
    """Return the parts of a request that may leave; `salt` is the recording's secret."""
    request = seen.request
    return RecordedRequest(
        arrival_s=seen.arrival_s,
        num_prompt_tokens=len(request.token_ids),
        num_output_tokens=seen.num_output_tokens,
        digests=block_digests(request, block_size, salt),
        tenant=request.tenant,
        hints=seen.hints,
    )


def block_digests(request: NewRequest, block_size: int, salt: bytes) -> bytes:
    """Return the digests of all blocks of a prompt, one after another."""
    apart = [request.lora_name, request.lora_path, request.cache_salt, request.tenant]
    digest = _digest(json.dumps(apart).encode(), salt)
    tokens = np.ascontiguousarray(request.token_ids, dtype="<i4").tobytes()
    items = _items(request)
    digests = []
    width = 4 * block_size
    for start in range(0, len(tokens), width):
        end_token = start // 4 + block_size
        content = tokens[start : start + width]
        while items and items[-1][0] < end_token:
            content += json.dumps(items.pop()).encode()
        digest = _digest(digest + content, salt)
        digests.append(digest)
    return b"".join(digests)


def _items(request: NewRequest) -> list[tuple[int, int, str]]:
    """Return offset, length and hash of multimodal items, the first one last."""
    items = zip(
        request.mm_offsets.tolist(), request.mm_lengths.tolist(), request.mm_hashes, strict=True
    )
    return sorted(items, reverse=True)


def _digest(data: bytes, salt: bytes) -> bytes:
    return blake2b(data, key=salt, digest_size=DIGEST_BYTES).digest()
