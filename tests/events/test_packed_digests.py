"""Packed digests behave like any sequence of the same digests."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from kvcache.base.errors import InvalidInputError
from kvcache.core import BlocksRemoved
from kvcache.requests.digests import PackedDigests, join_digests
from kvcache.requests.hashing import BlockHash


def digests(count: int, size: int = 4) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([i]) * size) for i in range(count))


def packed(count: int, size: int = 4) -> PackedDigests:
    return PackedDigests(b"".join(digests(count, size)), size)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_they_equal_every_sequence_of_the_same_digests_and_hash_like_the_tuple(count: int) -> None:
    one, plain = packed(count), digests(count)
    assert one == plain
    assert plain == one
    assert one == list(plain)
    assert one == packed(count)
    assert hash(one) == hash(plain)
    assert list(one) == list(plain)
    assert tuple(reversed(one)) == plain[::-1]


def test_they_differ_from_other_digests_and_from_other_sequences() -> None:
    one = packed(3)
    others: list[Any] = [packed(4), packed(3, 8), digests(2), digests(4), (), None, one.data]
    assert not any(one == other for other in others)
    assert PackedDigests(bytes(16), 4) != PackedDigests(bytes(16), 8)
    assert PackedDigests(b"", 4) != b""
    assert PackedDigests(b"", 4) == PackedDigests(b"", 8)


def test_indices_and_slices_are_those_of_a_tuple_and_slices_stay_packed() -> None:
    one, plain = packed(7), digests(7)
    assert [one[i] for i in range(-7, 7)] == [plain[i] for i in range(-7, 7)]
    for index in (7, -8):
        with pytest.raises(IndexError):
            one[index]
    seed = 5
    print("seed", seed)
    source = random.Random(seed)
    edges = [None, *range(-9, 10)]
    for _ in range(300):
        part = slice(*(source.choice(edges) for _ in range(2)), source.choice([None, 1, 2, -1, -3]))
        got = one[part]
        assert isinstance(got, PackedDigests)
        assert (got, got.digest_bytes) == (plain[part], 4)


def test_they_can_be_asked_what_they_hold() -> None:
    one, plain = packed(5), digests(5)
    assert plain[3] in one
    assert BlockHash(b"\x00\x01\x01\x01") not in one  # bytes at the border of two digests
    assert one.index(plain[2]) == 2
    assert repr(one) == "PackedDigests(5 of 4 bytes)"


def test_they_cannot_be_changed() -> None:
    one: Any = packed(2)
    with pytest.raises(FrozenInstanceError):
        one.data = b""
    with pytest.raises(TypeError):
        one[0] = b"\x00\x00\x00\x00"


def test_events_of_packed_and_plain_digests_are_the_same() -> None:
    one = BlocksRemoved(0, "device", packed(2))
    assert one == BlocksRemoved(0, "device", digests(2))
    assert len({one, BlocksRemoved(0, "device", digests(2))}) == 1


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (b"12345", 2, "5 bytes of packed digests of 2 bytes each: pass whole digests"),
        (b"12", 0, "digests of 0 bytes: pass an integer of at least 1"),
        (b"12", True, "digests of True bytes: pass an integer of at least 1"),
        (
            bytearray(b"12"),
            2,
            "packed digests bytearray(b'12'): pass the bytes of all digests joined",
        ),
    ],
)
def test_bytes_that_are_not_packed_digests_are_refused(data: Any, size: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        PackedDigests(data, size)
    assert str(caught.value) == message


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 1000])
def test_joined_is_every_digest_once_and_in_order(count: int) -> None:
    made = [BlockHash(i.to_bytes(4, "big")) for i in range(count)]
    assert np.frombuffer(join_digests(made), ">u4").tolist() == list(range(count))
