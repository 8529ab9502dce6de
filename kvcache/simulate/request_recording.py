"""A trace file that grows while a cluster serves: a line per request, no tokens, no digests.

Digests of blocks become numbers in order of appearance. The file is created, readable for its owner
alone, and ends where it would grow beyond its bound.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from kvcache.base.errors import TraceError
from kvcache.simulate.trace_writing import TraceLine, require_trace_name


class DigestedRequest(Protocol):
    """What is known of a request: `digests` has equally many bytes for each of its blocks."""

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


@dataclass(frozen=True)
class RecordingOptions:
    """How much is written, and whether tenants are named."""

    max_bytes: int
    has_tenants: bool = False


class RequestRecording:
    """Writes requests to a new file. Its first request is at time 0, none before another.

    Invariant: the file ends with a whole line, and is `num_bytes` long.
    """

    def __init__(self, path: Path, options: RecordingOptions) -> None:
        """Create the file. Raises TraceError if that cannot be done, or there is one already."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def num_distinct_blocks(self) -> int:
        """How many different blocks have been seen."""
        return len(self._numbers)

    def append(self, request: DigestedRequest, block_size: int) -> bool:
        """Append a request; False where it would pass the bound: then nothing is written.

        Raises TraceError where the disk takes it not.
        """
        if self._first_s is None:
            self._first_s = request.arrival_s
        arrival_ms = max(self._last_ms, int(1000 * (request.arrival_s - self._first_s)))
        line = TraceLine(
            timestamp_ms=arrival_ms,
            input_length=request.num_prompt_tokens,
            output_length=request.num_output_tokens,
            block_ids=self._number(request, block_size),
            tenant=request.tenant if self._options.has_tenants else None,
            block_size=block_size,
        ).to_json()
        if self.num_bytes + len(line) > self._options.max_bytes:
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
