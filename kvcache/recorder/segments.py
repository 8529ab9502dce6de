"""The files of a recording: numbered segments in one directory, together within a bound.

Below the recorder, which decides what is written. To stay within the bound, whole segments are
removed, the oldest first, but none of the present epoch: what is kept begins where a replay can.
When the epoch alone fills the bound, writing is refused.

    00000001-5f0c….kvrec  00000002-5f0c….kvrec  00000003-9a41….kvrec
    `- removed first                            `- another process, later
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvcache.base.errors import ExhaustedError

SEGMENT_SUFFIX = ".kvrec"


class SegmentFile(Protocol):
    """What of a file is needed. All of it may raise OSError."""

    def write(self, data: memoryview, /) -> int:
        """Append `data`, all or part of it; return how many bytes."""

    def truncate(self, size: int, /) -> int:
        """Cut the file to `size` bytes."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def close(self) -> None:
        """Give the descriptor back."""


OpenFile = Callable[[Path], SegmentFile]


def create_file(path: Path) -> SegmentFile:
    """Create a file that only its owner reads: prompts are in it. Raises OSError if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    return os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first. Raises OSError."""
    paths = [path for path in directory.iterdir() if path.suffix == SEGMENT_SUFFIX]
    return sorted(path for path in paths if number_of(path))


def number_of(path: Path) -> int:
    """Return the number in a segment's name, 0 for a file that is named otherwise."""
    digits = path.name.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0


@dataclass(frozen=True)
class SegmentLimits:
    """Where segments lie, how large one gets, and all in the directory together, in bytes."""

    directory: Path
    segment_bytes: int
    max_bytes: int


class SegmentWriter:
    """Appends to the newest segment of one recording.

    Invariant: `_size_bytes` is the length of the open file, and ends with a whole record.
    """

    def __init__(
        self, limits: SegmentLimits, recording_id: str, open_file: OpenFile = create_file
    ) -> None:
        """Write nothing yet. `recording_id` is part of every file's name."""
        self._limits = limits
        self._recording_id = recording_id
        self._open_file = open_file
        self._file: SegmentFile | None = None
        self._size_bytes = self._head_bytes = 0
        self._number = 0
        self._own: list[Path] = []
        self._others: list[tuple[Path, int]] = []
        self._kept_bytes = 0
        self.num_segments = 0
        self.written_bytes = 0

    def end_epoch(self) -> None:
        """Let go of the segments of the epoch: they may be removed from now on. Raises OSError."""
        self._own.clear()
        self.close()

    def has_room(self, num_bytes: int) -> bool:
        """Say whether the open segment takes so many bytes; False without one.

        One that holds nothing yet takes all: a segment is as large as what is written at once.
        """
        if self._file is None:
            return False
        is_empty = self._size_bytes == self._head_bytes
        return is_empty or self._size_bytes + num_bytes <= self._limits.segment_bytes

    def open_next(self, head: bytes) -> None:
        """Close the open segment and begin the next one with the record `head`.

        Raises:
            OSError: the directory cannot be used.
            ExhaustedError: the segments of this epoch fill the bound already.
        """
        self.close()
        directory = self._limits.directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._look(directory)
        self._make_room(len(head))
        path = directory / f"{self._number + 1:08d}-{self._recording_id}{SEGMENT_SUFFIX}"
        self._file = self._open_file(path)
        self._number += 1
        self._size_bytes = 0
        self._own.append(path)
        self.num_segments += 1
        self.append(head)
        self._head_bytes = len(head)

    def append(self, data: bytes | bytearray) -> None:
        """Append whole records to the open segment, all or nothing as far as the disk lets us.

        Raises:
            OSError: it cannot be written.
            ExhaustedError: the segments of this epoch fill the bound.
        """
        self._make_room(len(data))
        file, left = self._file, memoryview(bytes(data))
        if file is None:
            raise ExhaustedError("no segment is open: begin an epoch first")
        try:
            while left:
                num_written = file.write(left)
                left = left[num_written:]
        except OSError:
            self._cut_back(file)
            raise
        self._size_bytes += len(data)
        self._kept_bytes += len(data)
        self.written_bytes += len(data)

    def sync(self) -> None:
        """Have the disk take what was written. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the open segment, if there is one. Raises OSError; it is closed all the same."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _look(self, directory: Path) -> None:
        """Count what is in the directory; others than our own epoch's may be removed."""
        self._kept_bytes, self._others = 0, []
        own = set(self._own)
        for path in segment_paths(directory):
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError:
                continue  # somebody else has just removed it
            self._number = max(self._number, number_of(path))
            self._kept_bytes += size_bytes
            if path not in own:
                self._others.append((path, size_bytes))

    def _make_room(self, num_bytes: int) -> None:
        while self._kept_bytes + num_bytes > self._limits.max_bytes:
            if not self._others:
                raise ExhaustedError(
                    f"the present epoch's {self._kept_bytes} bytes and {num_bytes} more exceed "
                    f"recorder.max_bytes, {self._limits.max_bytes}: raise it"
                )
            path, size_bytes = self._others.pop(0)
            path.unlink(missing_ok=True)
            self._kept_bytes -= size_bytes

    def _cut_back(self, file: SegmentFile) -> None:
        """Take a half-written record off the end; what cannot be is found when it is read."""
        try:
            file.truncate(self._size_bytes)
        except OSError:
            return
