"""Records in a file: a torn end is cut off, other damage is an error."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import msgpack
import pytest

from kvcache.base.errors import RecordingError
from kvcache.recorder.frames import FrameReader, frame

PATH = Path("some.kvrec")
PAYLOADS = [msgpack.packb([kind, i, b"x" * i]) for i, kind in enumerate(["a", "b", "c", "d"])]
WHOLE = b"".join(frame(payload) for payload in PAYLOADS)
LAST = len(WHOLE) - len(frame(PAYLOADS[-1]))


def read(data: bytes) -> tuple[list[bytes], int | None]:
    """Return the payloads, and where the file was cut off."""
    reader = FrameReader(io.BytesIO(data), PATH, len(data))
    payloads = []
    while (found := reader.next()) is not None:
        payloads.append(found.payload)
    if reader.tail is not None:
        assert reader.tail.offset + reader.tail.num_bytes == len(data)
    return payloads, None if reader.tail is None else reader.tail.offset


def test_records_come_back_as_they_were_written() -> None:
    assert read(WHOLE) == (PAYLOADS, None)
    assert read(b"") == ([], None)


def test_the_bytes_are_length_then_crc32c_then_payload() -> None:
    assert frame(b"123456789").hex() == "09000000" + "839206e3" + b"123456789".hex()


@pytest.mark.parametrize("size_bytes", range(LAST + 1, len(WHOLE)))
def test_a_torn_record_is_cut_off_wherever_it_was_torn(size_bytes: int) -> None:
    assert read(WHOLE[:size_bytes]) == (PAYLOADS[:-1], LAST)


@pytest.mark.parametrize("num_zeros", [1, 4, 7, 8, 9, 4096, 200_000])
@pytest.mark.parametrize("num_torn", [0, 3, 9])
def test_zeros_where_data_was_to_be_are_cut_off(num_zeros: int, num_torn: int) -> None:
    torn = frame(PAYLOADS[0])[:num_torn]
    payloads, offset = read(WHOLE + torn + bytes(num_zeros))
    assert (payloads, offset) == (PAYLOADS, len(WHOLE))


@pytest.mark.parametrize("offset", range(LAST))
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_in_the_middle_is_damage_and_never_a_shorter_file(
    offset: int, flip: int
) -> None:
    data = bytearray(WHOLE)
    data[offset] ^= flip
    starts = [sum(len(frame(p)) for p in PAYLOADS[:i]) for i in range(len(PAYLOADS))]
    start = max(s for s in starts if s <= offset)
    with pytest.raises(
        RecordingError, match=rf"^some\.kvrec: damaged at byte {start} of {len(WHOLE)}: a record of"
    ):
        read(bytes(data))


@pytest.mark.parametrize("offset", range(LAST, len(WHOLE)))
def test_a_flipped_byte_in_the_last_record_never_passes(offset: int) -> None:
    data = bytearray(WHOLE)
    data[offset] ^= 0x10
    try:
        assert read(bytes(data)) == (PAYLOADS[:-1], LAST)
    except RecordingError as error:
        assert f"damaged at byte {LAST} of {len(WHOLE)}" in str(error)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_recording(seed: int) -> None:
    print(f"seed {seed}")
    data = random.Random(seed).randbytes(400)
    try:
        payloads, offset = read(data)
    except RecordingError as error:
        assert re.match(r"some\.kvrec: damaged at byte 0 of 400: ", str(error))
    else:
        assert (payloads, offset) == ([], 0)


def test_a_disk_that_cannot_be_read_is_an_error_that_says_where() -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    reader = FrameReader(Broken(), PATH, 100)
    message = r"some\.kvrec: cannot be read at byte 0 \(Input/output error\): copy it"
    with pytest.raises(RecordingError, match=message):
        reader.next()
