"""Missing, torn, damaged and invalid recordings: omissions are reported, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import pytest

from kvcache.base.errors import RecordingError
from kvcache.protocol.messages import Ping
from kvcache.protocol.step import StepRequest
from kvcache.protocol.wire import encode
from kvcache.recorder import open_recording
from kvcache.recorder.frames import FrameReader, frame
from kvcache.recorder.records import EpochBegun, SegmentHead, StateReached, pack_head, pack_record
from tests.recorder.segments_at_rest import head_of, records_of, replay, write

# --- missing recordings ---------------------------------------------------------------------------


def test_without_its_first_segment_a_recording_is_replayed_from_the_next_epoch(
    copied: list[Path],
) -> None:
    epochs = [r.number for p in copied for r in records_of(p) if isinstance(r, EpochBegun)]
    first = records_of(copied[1])[1]
    assert not isinstance(first, SegmentHead)
    copied[0].unlink()
    report = replay(copied[0].parent)
    assert (report.num_epochs, report.difference) == (1, None)
    assert report.num_skipped_records == epochs[1] - first.number
    assert report.notes == (
        f"records {first.number} to {epochs[1] - 1} are left out: the beginning of their epoch, "
        "or what followed it, is not there",
    )
    assert report.state_digest == report.recorded_state_digest


def test_what_follows_a_missing_segment_is_left_out_up_to_the_next_epoch(
    copied: list[Path],
) -> None:
    removed = records_of(copied[1])
    head, last = removed[0], removed[-1]
    assert isinstance(head, SegmentHead)
    assert not isinstance(last, SegmentHead)
    copied[1].unlink()
    report = replay(copied[0].parent)
    assert (report.num_epochs, report.difference) == (2, None)
    assert report.notes[0] == (
        f"records {head.first_number} to {last.number} are not there: they were lost while "
        "recording, or their segment was removed"
    )
    assert report.notes[1].startswith(f"records {last.number + 1} to ")


def test_a_segment_without_any_beginning_cannot_be_replayed(copied: list[Path]) -> None:
    middle = next(p for p in copied if not any(isinstance(r, EpochBegun) for r in records_of(p)))
    message = f"{middle}: no epoch begins in this recording, and only there a replay can: give the"
    with pytest.raises(RecordingError, match=re.escape(message)):
        replay(middle)


def test_one_segment_alone_is_replayed_as_far_as_it_goes(copied: list[Path]) -> None:
    report = replay(copied[0])
    assert (report.num_epochs, report.difference) == (1, None)
    assert report.num_records == len(records_of(copied[0])) - 1
    assert report.recorded_state_digest == ""


def test_a_torn_end_is_cut_off_and_said_wherever_it_is_torn(copied: list[Path]) -> None:
    path = copied[-1]
    whole, records = path.read_bytes(), records_of(path)
    assert isinstance(records[-1], StateReached)
    last_bytes = len(frame(pack_record(records[-1])))
    num_whole = replay(path.parent).num_records
    for num_cut in (1, 7, last_bytes // 2, last_bytes - 9, last_bytes - 8, last_bytes - 1):
        path.write_bytes(whole[:-num_cut])
        report = replay(path.parent)
        assert (report.num_records, report.difference) == (num_whole - 1, None)
        assert (report.notes, report.recorded_state_digest) == (
            (
                f"{path}: the last {last_bytes - num_cut} bytes, from byte "
                f"{len(whole) - last_bytes} on, are no whole record: cut off",
            ),
            "",
        )


def test_damage_in_the_middle_is_an_error_that_says_where(copied: list[Path]) -> None:
    path = copied[1]
    data = bytearray(path.read_bytes())
    head_bytes = len(frame(pack_head(head_of(path))))
    data[head_bytes + 20] ^= 0x04
    path.write_bytes(bytes(data))
    message = f"{path}: damaged at byte {head_bytes} of {len(data)}: a record of "
    with pytest.raises(RecordingError, match=re.escape(message)):
        replay(path.parent)


def test_a_segment_that_was_only_begun_is_left_out(copied: list[Path]) -> None:
    path = copied[0].with_name("00000999-first.kvrec")
    path.write_bytes(b"\x10\x00")
    report = replay(path.parent)
    assert report.notes == (f"{path} was begun and holds no whole record: left out",)
    assert report.state_digest == report.recorded_state_digest


# --- invalid recordings ---------------------------------------------------------------------------


def test_an_invalid_recording_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a recording, so to speak, but not one of ours\n" * 9)
    empty = tmp_path / "empty"
    for name in ("cluster-a", "others"):
        (empty / name).mkdir(parents=True)
    (empty / "cluster-a" / "1.kvrec").write_bytes(b"")
    other = tmp_path / "other.kvrec"
    other.write_bytes(frame(msgpack.packb(["something", 1])))
    bare = tmp_path / "bare.kvrec"
    bare.write_bytes(b"")
    for path, message in (
        (tmp_path / "none.kvrec", "cannot be read (No such file or directory): check the path"),
        (tmp_path / "zero\0byte", "cannot be read (embedded null byte): check the path"),
        (
            text,
            "damaged at byte 0 of 414: a record of 1701978209 bytes begins there, and that cannot "
            "be: use another copy of the file, or a recording (*.kvrec) if this is none",
        ),
        (empty, "holds no recording (*.kvrec): give one of cluster-a in it"),
        (other, "is not a segment of a recording: it does not begin with the head of a segment"),
        (bare, "holds no whole record: nothing was recorded"),
    ):
        legible = str(path).replace("\0", "\\x00")
        with pytest.raises(RecordingError, match=re.escape(f"{legible}: {message}")):
            open_recording(path)


def test_another_version_of_the_format_is_named(copied: list[Path]) -> None:
    values = msgpack.unpackb(pack_head(head_of(copied[0])))
    copied[0].write_bytes(frame(msgpack.packb([values[0], 4, *values[2:]])))
    message = (
        f"{copied[0]}: the recording has format version 4, this package reads versions 1 to 3: "
        "replay it with the release that recorded it"
    )
    with pytest.raises(RecordingError, match=re.escape(message)):
        open_recording(copied[0].parent)


def as_version_2(payload: bytes) -> bytes:
    """Return a record in the format from before there were hints."""
    values = msgpack.unpackb(payload, strict_map_key=False)
    if values[0] == "segment":
        values[1] = 2
    elif values[0] in ("held", "let go", "withdrawn", "load begun", "load finished"):
        assert values.pop() == []
    if values[0] in ("executed", "held"):
        message = msgpack.unpackb(values[2])
        message[0] = 1
        if message[1] == "StepRequest":
            assert message.pop() == []
            new = 2 + [field.name for field in fields(StepRequest)].index("new")
            message[new] = [item[:-1] for item in message[new]]
        values[2] = msgpack.packb(message)
    return bytes(msgpack.packb(values))


def as_version_1(payload: bytes) -> bytes:
    """Return a record in the format from before recordings had tiers."""
    values = msgpack.unpackb(as_version_2(payload), strict_map_key=False)
    if values[0] == "segment":
        values = [values[0], 1, *values[2:-1]]
    elif values[0] in ("executed", "released"):
        assert values.pop() == []
    return bytes(msgpack.packb(values))


@pytest.mark.parametrize("as_older", [as_version_1, as_version_2])
def test_older_versions_are_read_and_replayed(
    copied: list[Path], as_older: Callable[[bytes], bytes]
) -> None:
    expected = replay(copied[0].parent)
    for path in copied:
        with path.open("rb") as file:
            reader = FrameReader(file, path, path.stat().st_size)
            payloads = [found.payload for found in iter(reader.next, None)]
        path.write_bytes(b"".join(frame(as_older(payload)) for payload in payloads))
        assert not head_of(path).has_tiers
    report = replay(copied[0].parent)
    assert (report.difference, report.notes) == (None, ())
    assert replace(report, bytes_read=0) == replace(expected, bytes_read=0)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (["surprise", 2], r"a record of unknown kind \['surprise'\]"),
        (["executed", 2, 3, [], []], "a record of kind executed makes no sense: "),
        (["released", 2, 3, []], "a record of kind released makes no sense: int is not text"),
        (["epoch", 2, 1, 0, [[], [[0]]], []], "a record of kind epoch makes no sense: no labels: "),
        ({"a": 1}, "a record that is dict, not a list"),
        (["executed", 2, b"no message", [], ["", {}, []]], "its message cannot be read: "),
        (["executed", 2, encode(Ping("n", 1)), [], ["", {}, []]], "it holds a Ping, no step or"),
        (["held", 2, encode(Ping("n", 1)), 0], "it holds a Ping, no requests"),
    ],
)
def test_a_record_that_makes_no_sense_is_an_error_that_says_where(
    copied: list[Path], payload: object, what: str
) -> None:
    records = records_of(copied[0])[:2]
    write(copied[0], records)
    offset = copied[0].stat().st_size
    with copied[0].open("ab") as file:
        file.write(frame(msgpack.packb(payload)))
    with pytest.raises(RecordingError, match=what) as caught:
        replay(copied[0])
    assert f"{copied[0]}: " in str(caught.value)
    assert f"at byte {offset}: " in str(caught.value)


def test_a_head_that_no_manager_can_be_made_from_is_an_error(copied: list[Path]) -> None:
    head, first = records_of(copied[0])[:2]
    assert isinstance(head, SegmentHead)
    assert not isinstance(first, SegmentHead)
    write(
        copied[0],
        [
            replace(
                head,
                manager_config=replace(head.manager_config, eviction_policy="of another house"),
            ),
            first,
        ],
    )
    with pytest.raises(RecordingError, match=r"its manager cannot be made: .*of another house"):
        replay(copied[0])
    values = msgpack.unpackb(pack_head(head))
    *place, manager_config, has_tiers = values
    copied[0].write_bytes(
        frame(msgpack.packb([*place, {**manager_config, "core": "flat"}, has_tiers]))
    )
    assert open_recording(copied[0]).segments[0].head == head
    for wrong in ({}, {**manager_config, "max_model_len": "long"}, {**manager_config, "extra": 1}):
        copied[0].write_bytes(frame(msgpack.packb([*place, wrong, has_tiers])))
        with pytest.raises(RecordingError, match="is not a segment of a recording: "):
            open_recording(copied[0])
