"""The codec: everything that goes in comes out the same; nothing foreign comes through."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.commands import (
    Audit,
    BlockTablePatch,
    Command,
    Copy,
    Fetch,
    Label,
    Load,
    Spill,
    Store,
    WriteExpected,
    Zero,
)
from kvcache.errors import MalformedMessageError, ProtocolError, VersionMismatchError
from kvcache.messages import FromClient, FromWorker, Message, Ping, StepCommands, ToClient, ToWorker
from kvcache.step import NewRequest, StepRequest
from kvcache.wire import decode, encode

MESSAGES: tuple[type[Any], ...] = tuple(
    cls
    for direction in (ToWorker, FromWorker, FromClient, ToClient)
    for cls in typing.get_args(direction)
)
COMMANDS: tuple[type[Any], ...] = typing.get_args(Command)

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8)
ARRAYS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(int32_array)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint == Int32Array:
        return ARRAYS
    plain = {int: INT64, str: TEXT, bytes: st.binary(max_size=8), bool: st.booleans()}
    if hint in plain:
        return plain[hint]
    if hint == str | None:
        return st.none() | TEXT
    if hint == dict[int, bytes]:
        return st.dictionaries(INT64, st.binary(max_size=4), max_size=3)
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is types.UnionType:
        return st.one_of([instances(cls) for cls in typing.get_args(hint)])
    return instances(hint)


def instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    if cls in CONSISTENT:
        return CONSISTENT[cls]
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(cls)})


@st.composite
def patches(draw: st.DrawFn) -> BlockTablePatch:
    counts = draw(st.lists(st.integers(0, 3), max_size=3))
    n = len(counts)
    column = st.lists(st.integers(0, 9), min_size=n, max_size=n).map(int32_array)
    total = sum(counts)
    return BlockTablePatch(
        draw(column), draw(column), draw(column), int32_array(counts), int32_array(range(total))
    )


@st.composite
def copies(draw: st.DrawFn, cls: type[Any]) -> Any:
    sources = draw(ARRAYS)
    if cls is Copy:
        return Copy(sources, sources[::-1])
    return cls(draw(INT64), draw(TEXT), sources, sources[::-1])


@st.composite
def labels(draw: st.DrawFn) -> Label:
    counts = draw(st.lists(st.integers(0, 3), max_size=3))
    n = len(counts)
    ids = int32_array(range(n))
    digests = bytes(range(4 * n))
    keys = {i: b"k" for i in range(n) if draw(st.booleans())}
    zeros = np.zeros(n, dtype=np.int32)
    tokens = int32_array(range(sum(counts)))
    return Label(
        ids, ids, ids, digests, digests, int32_array(counts), tokens, zeros, (b"space",), keys
    )


@st.composite
def spills(draw: st.DrawFn) -> Spill:
    slots = draw(ARRAYS)
    return Spill(
        draw(INT64), draw(TEXT), slots, b"digestgroup"[: draw(st.integers(0, 11))] * len(slots)
    )


@st.composite
def fetches(draw: st.DrawFn) -> Fetch:
    spill = draw(spills())
    return Fetch(spill.job_id, spill.medium, spill.keys, spill.sources)


@st.composite
def forwards(draw: st.DrawFn) -> WriteExpected:
    counts = draw(st.lists(st.integers(0, 3), max_size=3))
    rows, verified = int32_array(range(len(counts))), draw(ARRAYS)
    tokens = int32_array(range(sum(counts)))
    per_row = draw(st.sampled_from((rows, EMPTY_INT32)))
    return WriteExpected(
        draw(INT64),
        verified,
        verified,
        rows,
        rows,
        rows,
        rows,
        rows,
        int32_array(counts),
        tokens,
        (b"key",) * len(counts),
        per_row,
        EMPTY_INT32,
        per_row,
        (b"sound",) * len(per_row),
    )


@st.composite
def audits(draw: st.DrawFn) -> Audit:
    blocks = draw(ARRAYS)
    return Audit(draw(INT64), draw(INT64), draw(INT64), blocks, blocks, b"dig" * len(blocks))


CONSISTENT: dict[type[Any], st.SearchStrategy[Any]] = {
    BlockTablePatch: patches(),
    Copy: copies(Copy),
    Store: copies(Store),
    Load: copies(Load),
    Spill: spills(),
    Fetch: fetches(),
    Label: labels(),
    WriteExpected: forwards(),
    Audit: audits(),
}

ANY_MESSAGE: st.SearchStrategy[Message] = st.one_of([instances(cls) for cls in MESSAGES])


def plain(value: Any) -> Any:
    """A value that compares by content, arrays included."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int32
        return ["int32", *value.tolist()]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [type(value).__name__, *(plain(getattr(value, f.name)) for f in fields)]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_message_comes_out_as_it_went_in(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    assert plain(decode(encode(message))) == plain(message)


@pytest.mark.parametrize("cls", COMMANDS, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_command_comes_out_as_it_went_in(cls: type[Any], data: st.DataObject) -> None:
    message = StepCommands("n", "f", 1, 2, "c", 3, (data.draw(instances(cls)),))
    assert plain(decode(encode(message))) == plain(message)


def decodes_or_refuses(data: bytes) -> None:
    """The only two things that may happen."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message) in MESSAGES


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 5000)
@example(b"\x93\x01\xa4Ping\xc7\x04\xff1234")
@example(b"\x82\x90\x01\x01\x02")
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    decodes_or_refuses(data)


@given(message=ANY_MESSAGE, share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_a_torn_message_is_refused(message: Message, share: float) -> None:
    data = encode(message)
    with pytest.raises(MalformedMessageError):
        decode(data[: int(share * len(data))])


@given(message=ANY_MESSAGE, position=st.integers(0), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_a_message_with_a_turned_bit_raises_nothing_else(
    message: Message, position: int, bit: int
) -> None:
    data = bytearray(encode(message))
    data[position % len(data)] ^= 1 << bit
    decodes_or_refuses(bytes(data))


WORD = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | INT64, inner, max_size=3),
    max_leaves=6,
)


@given(
    tag=st.sampled_from([cls.__name__ for cls in MESSAGES]) | WORD,
    fields=st.lists(WORD, max_size=10),
)
@settings(max_examples=150, deadline=None)
def test_fields_of_wrong_types_are_refused(tag: object, fields: list[object]) -> None:
    decodes_or_refuses(msgpack.packb([1, tag, *fields]))


def test_another_version_is_named() -> None:
    with pytest.raises(
        VersionMismatchError,
        match="message of format version 2, this package reads version 1: run the same release",
    ):
        decode(msgpack.packb([2, "Ping", "n", 1]))


def test_an_oversized_message_is_refused_before_it_is_read() -> None:
    data = encode(Ping("n" * 100, 1))
    assert decode(data, len(data)) == Ping("n" * 100, 1)
    with pytest.raises(MalformedMessageError, match=f"message of {len(data)} bytes, the limit is"):
        decode(data, len(data) - 1)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ([1, "Nobody"], "message of unknown kind 'Nobody'"),
        ([1, "Ping", "n"], "Ping: 1 fields, expected 2"),
        ([1, "Ping", "n", True], "Ping.epoch is not a 64-bit integer"),
        ([1, "Ping", "n", 2**63], "Ping.epoch is not a 64-bit integer"),
        ([1, "Ping", b"n", 1], "Ping.nonce is not text"),
        (
            [1, "StepCommands", "n", "f", 1, 1, "", 0, [["Explode", b""]]],
            "StepCommands.commands is not of a known kind but 'Explode'",
        ),
        (
            [1, "StepCommands", "n", "f", 1, 1, "", 0, [["Zero", b"123"]]],
            "Zero.block_ids is not whole int32 numbers as bytes",
        ),
        (
            [1, "StepCommands", "n", "f", 1, 1, "", 0, [["Copy", b"1234", b""]]],
            "Copy with unequal lengths {'sources': 1, 'destinations': 0}",
        ),
        (
            [1, "StepCommands", "n", "f", 1, 1, "", 0, [["Spill", 1, "m", b"1" * 8, b"123"]]],
            "Spill of 2 slots with 3 bytes of keys",
        ),
        (
            [1, "StepCommands", "n", "f", 1, 1, "", 0, [["Fetch", 1, "m", b"123", b""]]],
            "Fetch of 0 slots with 3 bytes of keys",
        ),
        (
            [
                1,
                "StepCommands",
                "n",
                "f",
                1,
                1,
                "",
                0,
                [["BlockTablePatch", *[b"\1\0\0\0"] * 4, b""]],
            ],
            "BlockTablePatch announces 1 block ids and brings 0",
        ),
    ],
)
def test_what_is_wrong_is_said(packed: list[object], said: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        decode(msgpack.packb(packed))
    assert str(caught.value) == said


def step_of(tokens: list[Any]) -> StepRequest:
    """A step whose tokens are no int32 array."""
    return StepRequest("c", 1, 1, new=(NewRequest("r", cast(Int32Array, np.array(tokens)), 1),))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hello", "str is no message"),
        (Ping("n", 2**64), "Ping cannot be encoded: Integer value out of range"),
        (Ping("n", cast(int, True)), "Ping.epoch is not a 64-bit integer"),
        (Ping("n", cast(int, float("nan"))), "Ping.epoch is not a 64-bit integer"),
        (Ping("n", cast(int, np.int64(1))), "Ping.epoch is not a 64-bit integer"),
        (StepRequest("c", 1, 1, finished=cast(Any, "abc")), "StepRequest.finished is not a tuple"),
        (StepRequest("c", 1, 1, new=cast(Any, ("r",))), "StepRequest.new is not a NewRequest"),
        (step_of([2**40]), "NewRequest.token_ids is not a one-dimensional int32 array"),
        (step_of([1.5]), "NewRequest.token_ids is not a one-dimensional int32 array"),
        (
            StepCommands("n", "f", 1, 1, "", 0, (cast(Zero, Ping("n", 1)),)),
            "StepCommands.commands is not one of Zero, Copy, BlockTablePatch, Label, Unlabel, "
            "Store, Load, Spill, Fetch, SealSlots, Discard, Reset, Fence, WriteExpected, Audit",
        ),
    ],
)
def test_what_nobody_could_read_is_refused_when_it_is_encoded(message: Any, said: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        encode(message)
    assert str(caught.value) == said


def test_text_that_is_no_unicode_is_refused_when_it_is_encoded() -> None:
    with pytest.raises(MalformedMessageError, match=r"^Ping cannot be encoded: "):
        encode(Ping("\ud800", 1))


def test_arrays_are_views_that_nobody_can_change() -> None:
    message = decode(encode(StepCommands("n", "f", 1, 1, "", 0, (Copy(*[int32_array([1])] * 2),))))
    assert isinstance(message, StepCommands)
    copy = message.commands[0]
    assert isinstance(copy, Copy)
    assert not copy.sources.flags.writeable
