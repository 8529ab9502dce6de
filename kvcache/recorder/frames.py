"""Records in a file: `length, crc32c, payload`, one after another without gaps.

The lowest layer of a recording. Both numbers are 4 bytes, little endian; the checksum (CRC-32C) is
the payload's. A payload is one msgpack value, so its end can be checked against `length`.

    | length | crc32c | payload ...... | length | crc32c | payload ...
    0        4        8                8 + length

If the writer dies, the file may end with a torn record, which the reader cuts off. Any other
inconsistency is damage: an error that names the byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import msgpack

from kvcache.base.errors import ExhaustedError, RecordingError

MAX_PAYLOAD_BYTES = 1 << 30
"""Largest record. The labels of all ranks make the largest records."""

HEAD_BYTES = 8
_HEAD = struct.Struct("<II")
_ZEROS_AT_ONCE = 1 << 16


def frame(payload: bytes) -> bytes:
    """Return a record's bytes; raises ExhaustedError for a payload too large to be read."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ExhaustedError(
            f"a record of {len(payload)} bytes, {MAX_PAYLOAD_BYTES} are read at most: record "
            "a smaller cache"
        )
    return _HEAD.pack(len(payload), google_crc32c.value(payload)) + payload


@dataclass(frozen=True)
class Frame:
    """A whole record: its payload, and where in the file it begins."""

    offset: int
    payload: bytes


@dataclass(frozen=True)
class TornTail:
    """The torn end of a file: its last `num_bytes` bytes, from `offset` on."""

    path: Path
    offset: int
    num_bytes: int


class FrameReader:
    """Reads the records of one file in order. At the end, `tail` is the torn record, if any."""

    def __init__(self, file: BinaryIO, path: Path, size_bytes: int) -> None:
        """Read the first `size_bytes` of `file`, whose position must be 0."""
        self._file = file
        self._path = path
        self._size_bytes = size_bytes
        self._offset = 0
        self.tail: TornTail | None = None

    @property
    def offset(self) -> int:
        """Where the next record begins."""
        return self._offset

    def next(self) -> Frame | None:
        """Return the next record, None at the end.

        Raises:
            RecordingError: the file is damaged or cannot be read.
        """
        try:
            return self._next()
        except OSError as error:
            raise RecordingError(
                f"{self._path}: cannot be read at byte {self._offset} ({error.strerror}): copy it "
                "to a disk that works"
            ) from error

    def _next(self) -> Frame | None:
        start, left = self._offset, self._size_bytes - self._offset
        if not left or self.tail is not None:
            return None
        head = self._file.read(min(HEAD_BYTES, left))
        length, checksum = _HEAD.unpack(head) if len(head) == HEAD_BYTES else (0, 0)
        payload = self._file.read(min(length, left - HEAD_BYTES)) if length else b""
        end = start + HEAD_BYTES + length
        is_whole = 0 < length <= MAX_PAYLOAD_BYTES and len(payload) == length
        if is_whole and google_crc32c.value(payload) == checksum:
            self._offset = end
            return Frame(start, payload)
        if is_whole:
            is_torn = self._is_empty_from(end)
        elif length:
            is_torn = end > self._size_bytes and _is_beginning(payload)
        else:
            is_torn = len(head) < HEAD_BYTES or self._is_empty_from(start)
        if not is_torn:
            what = "its checksum does not match" if is_whole else "that cannot be"
            raise RecordingError(
                f"{self._path}: damaged at byte {start} of {self._size_bytes}: a record of "
                f"{length} bytes begins there, and {what}: use another copy of the file"
            )
        self.tail = TornTail(self._path, start, left)
        return None

    def _is_empty_from(self, offset: int) -> bool:
        """Return whether only zeros follow, which a crash may leave in place of data."""
        self._file.seek(offset)
        while offset < self._size_bytes:
            data = self._file.read(min(_ZEROS_AT_ONCE, self._size_bytes - offset))
            if data.count(0) != len(data) or not data:
                return not data
            offset += len(data)
        return True


def _is_beginning(payload: bytes) -> bool:
    """Return whether a payload, without zeros at its end, stops before its value ends."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(payload)))
    unpacker.feed(payload.rstrip(b"\0"))
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        return True
    except (ValueError, msgpack.UnpackException):
        return False
    return False
