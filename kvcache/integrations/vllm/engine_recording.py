"""Records the requests that an engine serves, as a trace for `kvcache simulate` and `advise`.

    scheduler: admitted ─▶ finished ──queue──▶ a thread ──▶ RequestRecording, a line per request

A line has lengths, the time of arrival, hints, and numbers in place of block hashes: no tokens.
Requests are written in order of admission, so a long one delays those behind it. The queue is
bounded; what finds no room is counted as lost. An error ends the recording, not the engine.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.base.errors import ConfigurationError, TraceError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import describe_error
from kvcache.integrations.vllm.block_labels import DIGEST_BYTES
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
CLOSE_S = 5.0


class EngineRecording:
    """One recording. All calls come from the scheduler's thread, but `statistics`."""

    def __init__(
        self, directory: str, name: str, block_tokens: int, params: TransferParams | None = None
    ) -> None:
        """Begin a new file in `directory`, whose name says engine and time. `params` reads hints.

        Raises ConfigurationError if it cannot be made.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = Path(directory) / f"{name}-{stamp}-{secrets.token_hex(2)}.jsonl"
        try:
            self._recording = RequestRecording(
                path, RecordingOptions(MAX_BYTES, max_blocks=MAX_BLOCKS)
            )
        except TraceError as error:
            raise ConfigurationError(f"record: {error}") from error
        self._block_tokens = block_tokens
        self._params = TransferParams() if params is None else params
        self._salt = secrets.token_bytes(32)
        self._open: OrderedDict[str, RecordedRequest | None] = OrderedDict()
        self._queue: queue.Queue[RecordedRequest | None] = queue.Queue(MAX_QUEUED)
        self._num_lost = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._write, name="kvcache-recording", daemon=True)
        self._thread.start()

    def admitted(self, request: Any) -> None:
        """Note a request, at its first admission."""
        if self._problem:
            self._open.clear()
        else:
            self._open.setdefault(request.request_id, None)

    def finished(self, request: Any) -> None:
        """Note the end of a request; those that were not admitted are skipped."""
        if self._problem:
            self._open.clear()
        if request.request_id not in self._open:
            return
        try:
            self._open[request.request_id] = self._served(request)
        except Exception as error:
            self._end(describe_error(error))
            self._open.clear()
            return
        while self._open:
            first, served = next(iter(self._open.items()))
            if served is None and len(self._open) <= MAX_HELD:
                return
            del self._open[first]
            if served is not None:
                self._put(served)
            else:
                self._num_lost += 1

    def statistics(self) -> dict[str, Any]:
        """Return what was recorded. In any thread."""
        return {
            "path": str(self._recording.path),
            "num_requests": self._recording.num_requests,
            "num_bytes": self._recording.num_bytes,
            "num_lost": self._num_lost,
            "problem": self._problem,
        }

    def close(self) -> None:
        """Write what waits, and end. May be called again."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _put(self, served: RecordedRequest) -> None:
        try:
            self._queue.put_nowait(served)
        except queue.Full:
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
            while (served := self._queue.get()) is not None:
                try:
                    if recording.append(served, self._block_tokens):
                        continue
                    has_blocks = recording.num_distinct_blocks > MAX_BLOCKS
                    limit = (
                        f"{MAX_BLOCKS:,} different blocks" if has_blocks else f"{MAX_BYTES} bytes"
                    )
                    self._end(f"{recording.path} has reached {limit}")
                except TraceError as error:
                    self._end(str(error))
                except Exception as error:
                    self._end(describe_error(error))
                break
        while self._problem and not self._queue.empty():
            self._queue.get()

    def _end(self, problem: str) -> None:
        self._problem = problem
        logger.warning("recording has ended: %s", problem)
