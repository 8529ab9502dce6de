"""Writes a trace file while a cluster serves: a line per request, without tokens and digests.

Digests of blocks become numbers in order of appearance, and are kept in memory. Only the file's
owner can read it. Writing stops before the file or the number of different blocks would exceed its
limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvcache.base.errors import TraceError
from kvcache.requests.hints import CacheHint
from kvcache.simulate.mooncake import MooncakeLine
from kvcache.simulate.trace_writing import require_trace_name


class DigestedRequest(Protocol):
    """The data about a request: `digests` has equally many bytes for each of its blocks."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def digests(self) -> bytes: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def hints(self) -> tuple[CacheHint, ...]: ...


@dataclass(frozen=True)
class RecordingOptions:
    """The limits, and whether tenants are named. Each of at most `max_blocks` different blocks
    takes about 160 bytes of memory."""

    max_bytes: int
    has_tenants: bool = False
    max_blocks: int | None = None


class RequestRecording:
    """Writes requests to a new file. Times are relative to the first request and never decrease.

    Invariant: the file ends with a whole line and has `num_bytes`.
    """

    def __init__(self, path: Path, options: RecordingOptions) -> None:
        """Create the file. Raises TraceError if that fails, or if the file exists."""
        require_trace_name(path)
        self.path = path
        self.num_requests = self.num_bytes = 0
        self._options = options
        self._numbers: dict[bytes, int] = {}
        self._first_s: float | None = None
        self._last_ms = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        except FileExistsError as error:
            raise TraceError(f"{path} exists already: name another file") from error
        except OSError as error:
            raise TraceError(
                f"{path}: cannot be written ({error.strerror or error}): name a file in a "
                "directory that exists"
            ) from error

    def __enter__(self) -> RequestRecording:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def num_distinct_blocks(self) -> int:
        """Number of different blocks so far."""
        return len(self._numbers)

    def append(self, request: DigestedRequest, block_size: int) -> bool:
        """Append a request; return False, and write nothing, if it would exceed a limit.

        Raises TraceError if the disk refuses it.
        """
        if self._first_s is None:
            self._first_s = request.arrival_s
        arrival_ms = max(self._last_ms, int(1000 * (request.arrival_s - self._first_s)))
        line = MooncakeLine(
            self.num_requests + 1,
            timestamp_ms=arrival_ms,
            input_length=request.num_prompt_tokens,
            output_length=request.num_output_tokens,
            hash_ids=self._number(request, block_size),
            tenant=request.tenant if self._options.has_tenants else None,
            block_size=block_size,
            hints=request.hints,
        ).to_json()
        max_blocks = self._options.max_blocks
        has_room = max_blocks is None or len(self._numbers) <= max_blocks
        if not has_room or self.num_bytes + len(line) > self._options.max_bytes:
            return False
        self._write(line)
        self._last_ms = arrival_ms
        self.num_requests += 1
        return True

    def _number(self, request: DigestedRequest, block_size: int) -> list[int]:
        numbers, digests = self._numbers, request.digests
        width = len(digests) // -(-request.num_prompt_tokens // block_size)
        return [
            numbers.setdefault(digests[start : start + width], len(numbers))
            for start in range(0, len(digests), width)
        ]

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self.num_bytes)
            raise TraceError(
                f"{self.path}: cannot be written any further ({error.strerror or error}): its "
                f"{self.num_requests} lines are whole"
            ) from error
        self.num_bytes += len(line)
