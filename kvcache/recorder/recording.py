"""Reading a recording: its segments in order, and their records one by one.

A recording is one file, or all files of a directory, which may hold the recordings of several
coordinators, one after another. Reading stops at damage. Everything cut off, left out or missing
becomes a note.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvcache.base.errors import ProtocolError, RecordingError, VersionMismatchError
from kvcache.recorder.frames import FrameReader, TornTail
from kvcache.recorder.records import Record, SegmentHead, unpack_head, unpack_record
from kvcache.recorder.segments import SEGMENT_SUFFIX, number_of, segment_paths


@dataclass(frozen=True)
class Segment:
    """One file of a recording, with its size when it was opened."""

    path: Path
    head: SegmentHead
    size_bytes: int


@dataclass(frozen=True)
class PlacedRecord:
    """A record, its position, and how many bytes of the recording were read up to its end."""

    record: Record
    segment: Segment
    offset: int
    bytes_read: int


class Recording:
    """The segments of a recording in order. Reading adds to `notes`."""

    def __init__(self, segments: Sequence[Segment], notes: Sequence[str] = ()) -> None:
        self.segments = tuple(segments)
        self.notes = list(notes)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def records(self) -> Iterator[PlacedRecord]:
        """Yield the records of all segments in order.

        Raises:
            RecordingError: it is damaged, unreadable, or of another version; names file and byte.
        """
        bytes_before = 0
        for segment in self.segments:
            with open_segment(segment.path) as file:
                reader = FrameReader(file, segment.path, segment.size_bytes)
                reader.next()  # the head
                while (frame := reader.next()) is not None:
                    try:
                        record = unpack_record(frame.payload)
                    except ProtocolError as error:
                        raise RecordingError(
                            f"{segment.path}: at byte {frame.offset}: {error}: replay it with the "
                            "release that recorded it"
                        ) from error
                    done = bytes_before + reader.offset
                    yield PlacedRecord(record, segment, frame.offset, done)
            if reader.tail is not None:
                self.notes.append(_told(reader.tail))
            bytes_before += segment.size_bytes


def open_recording(path: Path) -> Recording:
    """Return the recording in a file, or in all segments of a directory.

    Raises:
        RecordingError: there is no recording, or it cannot be read.
    """
    try:
        is_directory = path.is_dir()
        paths = segment_paths(path) if is_directory else [path]
        inside = sorted({p.parent.name for p in path.glob(f"*/*{SEGMENT_SUFFIX}")})
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        raise RecordingError(f"{path}: cannot be read ({error}): check the path") from error
    if is_directory and not paths:
        remedy = f"give one of {', '.join(inside)} in it" if inside else "check the path"
        raise RecordingError(f"{path}: holds no recording (*{SEGMENT_SUFFIX}): {remedy}")
    segments: list[Segment] = []
    notes: list[str] = []
    for one in paths:
        segment = _open(one)
        if segment is None:
            notes.append(f"{one} was begun and holds no whole record: left out")
        else:
            segments.append(segment)
    if not segments:
        raise RecordingError(f"{path}: holds no whole record: nothing was recorded")
    return Recording(_in_order(segments), notes)


def open_segment(path: Path) -> BinaryIO:
    """Open a segment for reading; raises RecordingError."""
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RecordingError(f"{path}: cannot be read ({reason}): check the path") from error


def _open(path: Path) -> Segment | None:
    """Return a file's head, None if it holds no whole record. Raises RecordingError."""
    with open_segment(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            frame = FrameReader(file, path, size_bytes).next()
        except RecordingError as error:
            remedy = f"or a recording (*{SEGMENT_SUFFIX}) if this is none"
            raise RecordingError(f"{error}, {remedy}") from error
    if frame is None:
        return None
    try:
        return Segment(path, unpack_head(frame.payload), size_bytes)
    except VersionMismatchError as error:
        raise RecordingError(f"{path}: {error}") from error
    except ProtocolError as error:
        raise RecordingError(
            f"{path}: is not a segment of a recording: {error}: give a *{SEGMENT_SUFFIX} file, or "
            "the directory that holds them"
        ) from error


def _in_order(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments by recording, oldest recording first, each in its own order."""
    begun: dict[str, int] = {}
    for segment in segments:
        number = number_of(segment.path)
        first = begun.setdefault(segment.head.recording_id, number)
        begun[segment.head.recording_id] = min(first, number)
    return sorted(
        segments,
        key=lambda s: (begun[s.head.recording_id], s.head.recording_id, s.head.segment_index),
    )


def _told(tail: TornTail) -> str:
    return (
        f"{tail.path}: the last {tail.num_bytes} bytes, from byte {tail.offset} on, are no whole "
        "record: cut off"
    )
