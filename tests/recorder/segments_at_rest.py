"""Reads and changes segments of a recording, for tests of replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcache.recorder import RecordReplay, RecordReplayReport, open_recording
from kvcache.recorder.frames import FrameReader, frame
from kvcache.recorder.records import (
    Record,
    SegmentHead,
    pack_head,
    pack_record,
    unpack_head,
    unpack_record,
)


def replay(path: Path) -> RecordReplayReport:
    return RecordReplay(open_recording(path)).run()


def records_of(path: Path) -> list[Record | SegmentHead]:
    """Return the head and the records of a segment."""
    with path.open("rb") as file:
        reader = FrameReader(file, path, path.stat().st_size)
        head = reader.next()
        records: list[Record | SegmentHead] = [unpack_head(head.payload)]
        while (found := reader.next()) is not None:
            records.append(unpack_record(found.payload))
    return records


def write(path: Path, records: Sequence[Record | SegmentHead]) -> None:
    payloads = [pack_head(r) if isinstance(r, SegmentHead) else pack_record(r) for r in records]
    path.write_bytes(b"".join(map(frame, payloads)))


def change(path: Path, which: Callable[[Any], bool], changed: Callable[[Any], Record]) -> Record:
    """Replace the first record for which `which` is true; return the old one."""
    records = records_of(path)
    index = next(i for i, r in enumerate(records) if not isinstance(r, SegmentHead) and which(r))
    was = records[index]
    assert not isinstance(was, SegmentHead)
    records[index] = changed(was)
    write(path, records)
    return was


def head_of(path: Path) -> SegmentHead:
    head = records_of(path)[0]
    assert isinstance(head, SegmentHead)
    return head
