"""Records the requests that an engine serves, as a trace for `kvcache simulate` and `advise`.

    scheduler: admitted ─▶ finished ──queue──▶ a thread ──▶ RequestRecording, a line per request

A recording begins with the engine (the option `record`), or when `kvcache record --vllm` asks for
one; there is one at a time. A line has lengths, the time of arrival, hints, and numbers in place of
block hashes: no tokens. Requests are written in order of admission, so a long one delays those
behind it. The queue is bounded; what finds no room is counted as lost. An error ends the recording,
not the engine.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    InvalidInputError,
    NotRunningError,
    TraceError,
    shown,
)
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import describe_error
from kvcache.config.sections import Location
from kvcache.integrations.vllm.block_labels import DIGEST_BYTES
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.integrations.vllm.transfer_params import TransferParams
from kvcache.recorder.request_tracer import RecordedRequest
from kvcache.simulate.request_recording import RecordingOptions, RequestRecording

logger = get_logger(__name__)

MAX_HELD = 4096
"""Requests that wait for one that was admitted before them."""
MAX_QUEUED = 4096
MAX_BYTES = 256 << 20
MAX_BLOCKS = 2_000_000
"""Different blocks, whose numbers are kept in memory: about 160 bytes each."""
LEASE_S = 30.0
"""A recording that a command asked for ends when the command has been silent for so long."""
CLOSE_S = 5.0
_LOOK_S = 1.0


@dataclass(frozen=True)
class EngineRecordingLimits:
    """When a recording ends: with so many bytes or requests, or when nobody has renewed it for
    `lease_s`."""

    max_bytes: int = MAX_BYTES
    num_requests: float = math.inf
    lease_s: float = math.inf


class EngineRecordings:
    """The recording of an engine, if one runs.

    `follow` and `statistics` may come from the socket's thread, all else from the scheduler's.
    """

    def __init__(self, setting: EngineSetting, params: TransferParams) -> None:
        """Begin a recording if the options ask for one. `params` reads hints.

        Raises ConfigurationError if its file cannot be made.
        """
        self._block_tokens = setting.block_tokens
        self._params = params
        self._listener = ""
        self._recording: EngineRecording | None = None
        options = setting.options
        if options.record is not None:
            directory = Location.of(options.record).path
            path = new_path(directory, f"{options.name}-{setting.replica}")
            self._recording = EngineRecording(path, self._block_tokens, params)

    def admitted(self, request: Any) -> None:
        """Note a request, at its first admission. Prefetch requests are left out."""
        recording = self._recording
        if recording is not None and not self._params.is_prefetch(request):
            recording.admitted(request)

    def finished(self, request: Any) -> None:
        """Note the end of a request."""
        recording = self._recording
        if recording is not None:
            recording.finished(request)

    def follow(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what a command asks; return statistics of its recording.

        `question` has `act` ("begin", "renew" or "end") and `listener`, the command's number; to
        begin, also `path`, `max_bytes` and `num_requests` (None: no limit). Raises
        AlreadyRunningError for a second recording, NotRunningError if the command has none,
        ConfigurationError if the file cannot be made, InvalidInputError for another question.
        """
        act, listener = question.get("act"), question.get("listener")
        if act not in ("begin", "renew", "end") or not isinstance(listener, str) or not listener:
            raise InvalidInputError(
                f"{shown(question)} is no question about a recording: give act (begin, renew or "
                "end) and listener"
            )
        if act == "begin":
            self._begin(listener, question)
        recording = self._recording
        if recording is None or listener != self._listener:
            raise NotRunningError("the engine has no recording of this command")
        recording.renew()
        if act == "end":
            recording.close()
        return recording.statistics()

    def statistics(self) -> dict[str, Any] | None:
        """Return statistics of the newest recording, None if there was none."""
        recording = self._recording
        return None if recording is None else recording.statistics()

    def close(self) -> None:
        """End the recording. May be called again."""
        if self._recording is not None:
            self._recording.close()

    def _begin(self, listener: str, question: dict[str, Any]) -> None:
        path, max_bytes = question.get("path"), question.get("max_bytes")
        most = question.get("num_requests")
        if (
            not (isinstance(path, str) and Path(path).is_absolute())
            or not (isinstance(max_bytes, int) and max_bytes > 0)
            or not (most is None or (isinstance(most, int) and most > 0))
        ):
            raise InvalidInputError(
                f"{shown(question)} begins no recording: give an absolute path, and max_bytes and "
                "num_requests above 0"
            )
        before = self._recording
        if before is not None and before.is_running:
            raise AlreadyRunningError(
                f"the engine records to {before.statistics()['path']} already: wait for the end of "
                "that recording, or start the engine without the option record"
            )
        limits = EngineRecordingLimits(
            min(max_bytes, MAX_BYTES), math.inf if most is None else most, LEASE_S
        )
        self._recording = EngineRecording(Path(path), self._block_tokens, self._params, limits)
        self._listener = listener


def new_path(directory: Path, name: str) -> Path:
    """Return a path in `directory` whose name says engine and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return directory / f"{name}-{stamp}-{secrets.token_hex(2)}.jsonl"


class EngineRecording:
    """One recording. In any thread."""

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        params: TransferParams | None = None,
        limits: EngineRecordingLimits | None = None,
    ) -> None:
        """Begin a new file. `params` reads hints.

        Raises ConfigurationError if it cannot be made.
        """
        self._limits = EngineRecordingLimits() if limits is None else limits
        try:
            self._recording = RequestRecording(
                path, RecordingOptions(self._limits.max_bytes, max_blocks=MAX_BLOCKS)
            )
        except TraceError as error:
            raise ConfigurationError(f"record: {error}") from error
        self._block_tokens = block_tokens
        self._params = TransferParams() if params is None else params
        self._salt = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, RecordedRequest | None] = OrderedDict()
        self._queue: queue.Queue[RecordedRequest | None] = queue.Queue(MAX_QUEUED)
        self._num_lost = 0
        self._ended_by = self._problem = ""
        self._asked_s = time.monotonic()
        self._thread = threading.Thread(target=self._write, name="kvcache-recording", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether further requests are recorded."""
        return not self._ended_by

    def renew(self) -> None:
        """Say that somebody still wants the recording."""
        self._asked_s = time.monotonic()

    def admitted(self, request: Any) -> None:
        """Note a request, at its first admission."""
        with self._lock:
            if self._ended_by:
                self._open.clear()
            else:
                self._open.setdefault(request.request_id, None)

    def finished(self, request: Any) -> None:
        """Note the end of a request; those that were not admitted are skipped."""
        with self._lock:
            if self._ended_by:
                self._open.clear()
            if request.request_id not in self._open:
                return
            try:
                self._open[request.request_id] = self._served(request)
            except Exception as error:
                self._end("error", describe_error(error))
                self._open.clear()
                return
            self._hand_on(MAX_HELD)

    def statistics(self) -> dict[str, Any]:
        recording = self._recording
        return {
            "path": str(recording.path),
            "num_requests": recording.num_requests,
            "num_bytes": recording.num_bytes,
            "num_distinct_blocks": recording.num_distinct_blocks,
            "num_lost": self._num_lost,
            "ended_by": self._ended_by,
            "problem": self._problem,
        }

    def close(self) -> None:
        """Write the requests that have ended, and end. May be called again."""
        with self._lock:
            self._hand_on_ended()
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass
        else:
            self._thread.join(CLOSE_S)
        self._ended_by = self._ended_by or "close"

    def _hand_on_ended(self) -> None:
        """Queue all ended requests; leave out those that still run."""
        for request_id in [name for name, served in self._open.items() if served is None]:
            del self._open[request_id]
        self._hand_on(0)

    def _hand_on(self, most_held: int) -> None:
        """Queue ended requests in order of admission, also behind one that is open if more than
        `most_held` wait."""
        while self._open:
            first, served = next(iter(self._open.items()))
            if served is None and len(self._open) <= most_held:
                return
            del self._open[first]
            try:
                if served is not None:
                    self._queue.put_nowait(served)
                    continue
            except queue.Full:
                pass
            self._num_lost += 1

    def _served(self, request: Any) -> RecordedRequest:
        """Return what is written of a request; the digest of a partly filled block is made here."""
        num_prompt, size = request.num_prompt_tokens, self._block_tokens
        num_full = num_prompt // size
        digests = [*request.block_hashes[:num_full]]
        if len(digests) * size < num_prompt:
            rest = np.array(request.all_token_ids[num_full * size : num_prompt], "<i4").tobytes()
            above = digests[-1] if digests else b""
            key = self._salt
            digests.append(blake2b(above + rest, key=key, digest_size=DIGEST_BYTES).digest())
        return RecordedRequest(
            arrival_s=request.arrival_time,
            num_prompt_tokens=num_prompt,
            num_output_tokens=request.num_output_tokens,
            digests=b"".join(digests),
            tenant=None,
            hints=self._params.hints_of(request),
        )

    def _write(self) -> None:
        with self._recording as recording:
            while True:
                lease_s = self._limits.lease_s
                if not self._ended_by and time.monotonic() - self._asked_s > lease_s:
                    with self._lock:
                        self._hand_on_ended()
                        self._end("silence", f"nobody asked for {lease_s:g} s")
                try:
                    served = self._queue.get(timeout=0 if self._ended_by else _LOOK_S)
                except queue.Empty:
                    if self._ended_by:
                        break
                    continue
                if served is None or not self._append(recording, served):
                    break
        while not self._queue.empty():
            self._queue.get()

    def _append(self, recording: RequestRecording, served: RecordedRequest) -> bool:
        """Write a request; return whether there is room for more."""
        try:
            if not recording.append(served, self._block_tokens):
                has_blocks = recording.num_distinct_blocks > MAX_BLOCKS
                limit = (
                    f"{MAX_BLOCKS:,} different blocks"
                    if has_blocks
                    else f"{self._limits.max_bytes} bytes"
                )
                self._end("size", f"{recording.path} has reached {limit}")
            elif recording.num_requests >= self._limits.num_requests:
                self._ended_by = "requests"
        except TraceError as error:
            self._end("error", str(error))
        except Exception as error:
            self._end("error", describe_error(error))
        return self._ended_by in ("", "close", "silence")

    def _end(self, ended_by: str, problem: str) -> None:
        self._ended_by, self._problem = ended_by, problem
        logger.warning("recording has ended: %s", problem)
