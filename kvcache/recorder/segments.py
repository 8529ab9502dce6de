"""The files of a recording: numbered segments in one directory, with a limit on their total size.

To stay within the limit, the writer removes whole segments, oldest first, but none of the current
epoch: so the remaining records begin where a replay can begin. If the current epoch alone reaches
the limit, writing fails.

    00000001-5f0c….kvrec  00000002-5f0c….kvrec  00000003-9a41….kvrec
    `- removed first                            `- another process, later
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from kvcache.base.errors import ExhaustedError

SEGMENT_SUFFIX = ".kvrec"


OpenFile = Callable[[Path], FileIO]


def create_file(path: Path) -> FileIO:
    """Create a file that only its owner can read, since it holds prompts. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    return FileIO(os.open(path, flags, 0o600), "wb")


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first. Raises OSError."""
    paths = [path for path in directory.iterdir() if path.suffix == SEGMENT_SUFFIX]
    return sorted(path for path in paths if number_of(path))


def number_of(path: Path) -> int:
    """Return the number in a segment's name, 0 for any other name."""
    digits = path.name.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0


@dataclass(frozen=True)
class SegmentLimits:
    """The directory of segments, and the size limits of one and of all of them, in bytes."""

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
        self._file: FileIO | None = None
        self._size_bytes = self._head_bytes = 0
        self._number = 0
        self._own: list[Path] = []
        self._others: list[tuple[Path, int]] = []
        self._kept_bytes = 0
        self.num_segments = 0
        self.written_bytes = 0

    def end_epoch(self) -> None:
        """Allow the removal of this epoch's segments from now on. Raises OSError."""
        self._own.clear()
        self.close()

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the open segment has room for so many bytes; False if none is open.

        An empty segment has room for any write, so a single write may exceed `segment_bytes`.
        """
        if self._file is None:
            return False
        is_empty = self._size_bytes == self._head_bytes
        return is_empty or self._size_bytes + num_bytes <= self._limits.segment_bytes

    def open_next(self, head: bytes) -> None:
        """Close the open segment and begin the next one with the record `head`.

        Raises:
            OSError: the directory cannot be used.
            ExhaustedError: the segments of this epoch reach the limit already.
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
        """Append whole records to the open segment. After an error, a partial write is cut off.

        Raises:
            OSError: it cannot be written.
            ExhaustedError: the segments of this epoch reach the limit.
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
        """Wait until the disk has all written data. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the open segment, if there is one, even if this raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _look(self, directory: Path) -> None:
        """List the directory: its size, and the segments of other epochs, which may be removed."""
        self._kept_bytes, self._others = 0, []
        own = set(self._own)
        for path in segment_paths(directory):
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError:
                continue  # another process has just removed it
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

    def _cut_back(self, file: FileIO) -> None:
        """Cut off a half-written record. If that fails, readers detect the record."""
        try:
            file.truncate(self._size_bytes)
        except OSError:
            return
