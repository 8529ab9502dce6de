"""The codec: messages decode to themselves, and foreign bytes are refused."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
import types
import typing
from hashlib import sha256
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import MalformedMessageError, ProtocolError, VersionMismatchError
from kvcache.protocol.commands import (
    EMPTY_PATCH,
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
from kvcache.protocol.messages import (
    WIRE_VERSION,
    Ack,
    Attach,
    Call,
    FromClient,
    FromWorker,
    Message,
    Nack,
    Ping,
    StepCommands,
    ToClient,
    ToWorker,
    wire_tag,
)
from kvcache.protocol.step import NewRequest, RequestHints, StepRequest, StepResult
from kvcache.protocol.wire import decode, encode, leading_fields
from kvcache.requests.hints import CacheHint
from tests.protocol.loose_sender import unchecked

NEW = [f.name for f in dataclasses.fields(StepRequest)].index("new")

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
    optional = {str | None: TEXT, int | None: INT64, float | None: st.floats()}
    if hint in optional:
        return st.none() | optional[hint]
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
def cache_hints(draw: st.DrawFn) -> CacheHint:
    start, seconds = draw(st.integers(0, 9)), draw(st.floats(1e-3, 1e9))
    end = draw(st.none() | st.integers(start + 1, 2**40))
    if draw(st.booleans()):
        return CacheHint(start, end, is_over=True)
    if draw(st.booleans()):
        return CacheHint(start, end, returns_in_s=seconds)
    priority, duration_s = draw(st.integers(0, 100)), draw(st.none() | st.just(seconds))
    return CacheHint(start, end, priority=priority, duration_s=duration_s)


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
    CacheHint: cache_hints(),
}

ANY_MESSAGE: st.SearchStrategy[Message] = st.one_of([instances(cls) for cls in MESSAGES])


def plain(value: Any) -> Any:
    """A value that compares by content and type. Lists count as the tuples that they become."""
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), value.tolist()]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [type(value).__name__, *(plain(getattr(value, f.name)) for f in fields)]
    if type(value) in (tuple, list):
        return tuple(plain(item) for item in value)
    if type(value) is dict:
        return [(plain(key), plain(item)) for key, item in value.items()]
    return (type(value).__name__, repr(value))


@pytest.mark.parametrize(
    ("message", "tag"),
    [
        (Ack("nonce", "process", 0, 1, 2), "Applied"),
        (Nack("nonce", "process", 0, 1, 2), "Missing"),
        (Ping("nonce", 1), "Ping"),
    ],
)
def test_tags_on_the_wire_are_those_of_the_format(message: Message, tag: str) -> None:
    assert msgpack.unpackb(encode(message))[1] == tag


class Text(str):
    """A text that is none of the plain ones."""


MOST_ITEMS = 40
"""The limit in the tests below; messages themselves have up to 21 items."""

INTEGERS = (-(2**63) - 1, -(2**63), -1, 0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70)
TEXTS = ("", "a" * 4096, "a" * 4097, "\u00e4" * 4096, "\U0001f600" * 4097, "\ud800", Text("a"),
    "a" * 16_384, "a" * 16_385)  # fmt: skip
STRANGERS: tuple[Any, ...] = (
    None, True, 1, 1.0, float("nan"), np.int64(1), np.bool_(True), "a", b"a", bytearray(b"1234"),
    (), [], {}, set(), object(), ("a",), [1], (None,), ((),), {1: b"a"}, {"a": b"a"}, {2**63: b""},
    {1: "a"}, np.int32(1), np.zeros(1), np.zeros((1, 1), np.int32), np.zeros(1, np.int64),
    np.zeros(3, ">i4"), np.zeros(6, np.int32)[::2], np.zeros(1, bool), np.array("a"), Ping("n", 1),
)  # fmt: skip


def extremes_of(hint: Any) -> tuple[Any, ...]:
    """Values at the bounds of a field's rule, and beyond."""
    if hint in (int, int | None):
        return INTEGERS
    if hint == float | None:
        return (float("nan"), float("inf"), 0.0, -1.0, 1e300, np.float64(1))
    if hint in (str, str | None):
        return TEXTS
    if hint == dict[int, bytes]:
        return tuple(dict.fromkeys(range(n), b"") for n in (MOST_ITEMS, MOST_ITEMS + 1))
    if hint == Int32Array:
        return tuple(int32_array(range(n)) for n in (1, 2, MOST_ITEMS + 1))
    return ()


def usual(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Instances in which most fields have their usual values."""
    if cls in CONSISTENT:
        return instances(cls)
    hints, missing = typing.get_type_hints(cls), dataclasses.MISSING
    return st.builds(
        cls,
        **{
            f.name: values_of(hints[f.name])
            for i, f in enumerate(dataclasses.fields(cls))
            if i < 4 or f.default is f.default_factory is missing
        },
    )


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """A value in which one field, at any depth, is at its limit, beyond it, or of a wrong type."""
    field = draw(st.sampled_from(dataclasses.fields(value)))
    hint = typing.get_type_hints(type(value))[field.name]
    before = getattr(value, field.name)
    choices: list[st.SearchStrategy[Any]] = [st.sampled_from(STRANGERS)]
    if extremes := extremes_of(hint):
        choices.append(st.sampled_from(extremes))
    if dataclasses.is_dataclass(before):
        choices.append(damaged(before))
    if type(before) is tuple and typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        one = before[0] if before else draw(values_of(item))
        choices.append(st.sampled_from([(one,) * n for n in (MOST_ITEMS, MOST_ITEMS + 1)]))
        wrong = [st.sampled_from((*extremes_of(item), *STRANGERS))]
        if dataclasses.is_dataclass(one):
            wrong.append(damaged(one))
        choices.append(st.one_of(wrong).map(lambda item: (*before, item)))
    changed = object.__new__(type(value))  # `replace` would check hints
    changed.__dict__.update(vars(value), **{field.name: draw(st.one_of(choices))})
    return changed


def assert_encoded_exactly_where_decoded(message: Message, max_bytes: int) -> bool:
    """Check that `encode` accepts exactly what `decode` returns unchanged; return which."""
    try:
        data = encode(message, max_bytes)
    except MalformedMessageError:
        try:
            data = unchecked(message)
        except (TypeError, ValueError, OverflowError):
            return False
        try:
            read = decode(data, max_bytes)
        except ProtocolError:
            return False
        assert plain(read) != plain(message)
        return False
    assert plain(decode(data, max_bytes)) == plain(message)
    return True


@pytest.mark.parametrize("most", [20, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("cls", (*MESSAGES, *COMMANDS), ids=lambda cls: cls.__name__)
def test_decode_returns_exactly_the_encoded_messages(
    cls: type[Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.protocol.wire.MAX_ITEMS", MOST_ITEMS)

    @given(data=st.data())
    @settings(max_examples=most, deadline=None)
    def is_exact(data: st.DataObject) -> None:
        value = data.draw(instances(cls) | usual(cls))
        for _ in range(data.draw(st.integers(0, 2))):
            value = data.draw(damaged(value))
        message = value if cls in MESSAGES else StepCommands("n", "f", 1, 2, "c", 3, (value,))
        if assert_encoded_exactly_where_decoded(message, 2**20):
            size = len(encode(message, 2**20))
            assert assert_encoded_exactly_where_decoded(message, size)
            assert not assert_encoded_exactly_where_decoded(message, size - 1)

    is_exact()


def label_of(num_blocks: int) -> Label:
    column = np.zeros(num_blocks, dtype=np.int32)
    digests, keys = bytes(num_blocks), dict.fromkeys(range(num_blocks), b"k")
    return Label(
        int32_array(range(num_blocks)),
        column,
        column,
        digests,
        digests,
        column,
        EMPTY_INT32,
        column,
        (b"space",),
        keys,
    )


@pytest.mark.parametrize("num_items", [65_536, 65_537])
def test_lists_as_long_as_can_be_travel_and_longer_ones_do_not(num_items: int) -> None:
    new = NewRequest("r", EMPTY_INT32, 1, mm_hashes=("hash",) * num_items)
    for message in (
        StepRequest("c", 1, 1, finished=("r",) * num_items),
        StepRequest("c", 1, 1, new=(new,)),
        StepCommands("n", "f", 1, 2, "c", 3, (label_of(num_items),)),
        StepResult("c", 1, 1, 1, no_room=("r",) * num_items),
    ):
        assert assert_encoded_exactly_where_decoded(message, 2**26) == (num_items == 65_536)


@pytest.mark.parametrize(
    ("message", "leading"),
    [
        (
            StepRequest("c", 7, 2, completed_step=2**63),
            {"client_id": "c", "step": 7, "epoch": 2, "failed_step": -1},
        ),
        (
            StepRequest("c", 7, cast(Any, [[2]]), finished=("r",) * 65_537),
            {"client_id": "c", "step": 7, "completed_step": -1, "failed_step": -1},
        ),
        (
            Call("c", 7, 2, -1, "m" * 5000, b""),
            {"client_id": "c", "step": 7, "epoch": 2, "completed_step": -1},
        ),
        (
            StepResult("c", 7, 2, 9, error="e" * 20_000),
            {"client_id": "c", "step": 7, "epoch": 2, "seq": 9},
        ),
        (
            StepCommands("n", "f", 1, 2, "c", 3, cast(Any, (7,))),
            {"nonce": "n", "fingerprint": "f", "epoch": 1, "seq": 2, "client_id": "c"}
            | {"client_step": 3},
        ),
    ],
)
def test_who_sent_what_cannot_be_read_is_told_by_its_first_fields(
    message: Message, leading: dict[str, Any]
) -> None:
    data = unchecked(message)
    with pytest.raises(MalformedMessageError):
        decode(data)
    assert leading_fields(data) == (type(message), leading)
    for length in range(len(data) - 1, 0, -max(1, len(data) // 50)):
        assert leading_fields(data[:length]) is None
    newer = data.replace(bytes([WIRE_VERSION]), bytes([WIRE_VERSION + 1]), 1)
    for other in (b"", data + b"\0", b"\x91" * 5000, b"\xc1", newer):
        assert leading_fields(other) is None


@given(st.binary(max_size=200), ANY_MESSAGE, st.data())
@settings(max_examples=200, deadline=None)
def test_first_fields_of_anything_raise_nothing(
    noise: bytes, message: Message, data: st.DataObject
) -> None:
    leading_fields(noise)
    turned = bytearray(encode(message))
    turned[data.draw(st.integers(0, len(turned) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    leading_fields(bytes(turned))


def test_the_first_fields_of_a_long_message_are_read_without_building_the_rest() -> None:
    items = b"\xdd" + (2**20).to_bytes(4, "big") + b"\xc0" * 2**20
    head = msgpack.packb([WIRE_VERSION, "StepRequest", "c", 7, 2, -1, -1, *[0] * 9])[:-9]
    for payload in (head + items + b"\0" * 8, head[:-2] + items + b"\xff" + b"\0" * 9):
        tracemalloc.start()
        try:
            found = leading_fields(payload)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert found.fields["step"] == 7
        assert peak_bytes < 4 * len(payload), peak_bytes


def decodes_or_refuses(data: bytes) -> None:
    """The only two possible outcomes."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message) in MESSAGES


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 5000)
@example(b"\x93\x02\xa4Ping\xc7\x04\xff1234")
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
    tag=st.sampled_from([wire_tag(cls) for cls in MESSAGES]) | WORD,
    fields=st.lists(WORD, max_size=10),
)
@settings(max_examples=150, deadline=None)
def test_fields_of_wrong_types_are_refused(tag: object, fields: list[object]) -> None:
    decodes_or_refuses(msgpack.packb([WIRE_VERSION, tag, *fields]))


def test_another_version_is_named() -> None:
    with pytest.raises(
        VersionMismatchError,
        match="message of format version 4, this package reads version 3: run the same release",
    ):
        decode(msgpack.packb([4, "Ping", "n", 1]))


FIELDS = {3: "20766c149fc4ff27906f098ec6ea68ead3affb95ce9ce231637afd3330a1a5c6"}
"""A digest of all messages' fields, by the version of the format."""


def add_fields(hint: Any, found: dict[str, dict[str, str]]) -> None:
    """Add the fields of the classes in a type, with their types."""
    for part in typing.get_args(hint):
        add_fields(part, found)
    if getattr(hint, "__module__", "").startswith("kvcache.") and hint.__name__ not in found:
        found[hint.__name__] = dict(hint.__annotations__)
        for part in typing.get_type_hints(hint).values():
            add_fields(part, found)


def test_fields_of_messages_change_only_with_the_version() -> None:
    found: dict[str, dict[str, str]] = {}
    for cls in MESSAGES:
        add_fields(cls, found)
    assert {"LabelReport", "Label", "Copy", "NewRequest", "CacheHint"} <= found.keys()
    digest = sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    assert {WIRE_VERSION: digest} == FIELDS, (
        "raise WIRE_VERSION, say what the version before had not, let recorded messages of it be "
        "read, and put the new digest here"
    )


def test_recorded_messages_of_older_versions_are_read_and_others_are_not() -> None:
    new = NewRequest("r", int32_array([1, 2]), 2, cache_salt="s")
    step = StepRequest("c", 7, 2, finished=("f",), new=(new, new))
    values = msgpack.unpackb(encode(step))
    old = [1, *values[1:-1]]
    old[2 + NEW] = [item[:-1] for item in old[2 + NEW]]
    data = msgpack.packb(old)
    assert plain(decode(data, is_recorded=True)) == plain(step)
    assert decode(msgpack.packb([1, "Ping", "n", 1]), is_recorded=True) == Ping("n", 1)
    newer = msgpack.packb([2, *values[1:]])
    assert plain(decode(newer, is_recorded=True)) == plain(step)
    for foreign, version in ((data, 1), (newer, 2)):
        with pytest.raises(
            VersionMismatchError, match=f"version {version}, this package reads version 3"
        ):
            decode(foreign)
    with pytest.raises(VersionMismatchError, match="format version 4"):
        decode(msgpack.packb([4, "Ping", "n", 1]), is_recorded=True)
    for bad in (
        [],
        values[2:],
        [*old[2:], []],
        [*old[2 : 2 + NEW], 5, []],
        [*old[2 : 2 + NEW], [5]],
    ):
        with pytest.raises(MalformedMessageError):
            decode(msgpack.packb([1, "StepRequest", *bad]), is_recorded=True)


def test_an_oversized_message_is_refused_before_it_is_read() -> None:
    data = encode(Ping("n" * 100, 1))
    assert decode(data, len(data)) == Ping("n" * 100, 1)
    with pytest.raises(MalformedMessageError, match=f"message of {len(data)} bytes, the limit is"):
        decode(data, len(data) - 1)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ([WIRE_VERSION, "Nobody"], "message of unknown kind 'Nobody'"),
        ([WIRE_VERSION, "Ping", "n"], "Ping: 1 fields, expected 2"),
        ([WIRE_VERSION, "Ping", "n", True], "Ping.epoch is True: pass an integer of 64 bits"),
        ([WIRE_VERSION, "Ping", "n", 2**63], f"Ping.epoch is {2**63}: pass an integer of 64 bits"),
        ([WIRE_VERSION, "Ping", b"n", 1], "Ping.nonce is b'n': pass text"),
        (
            [WIRE_VERSION, "Ping", "n" * 4097, 1],
            "Ping.nonce has 4097 characters, at most 4096 travel: shorten it",
        ),
        (
            [WIRE_VERSION, "StepCommands", "n", "f", 1, 1, "", 0, [["Explode", b""]]],
            "StepCommands.commands holds something that is of the unknown kind 'Explode': pass one "
            "of those known here",
        ),
        (
            [WIRE_VERSION, "StepCommands", "n", "f", 1, 1, "", 0, [["Zero", b"123"]]],
            "Zero.block_ids is b'123': pass whole int32 numbers as bytes",
        ),
        (
            [
                WIRE_VERSION,
                "StepCommands",
                "n",
                "f",
                1,
                1,
                "",
                0,
                [["BlockTablePatch", *[b"\1\0\0\0"] * 3, b"", b""]],
            ],
            "BlockTablePatch with unequal lengths "
            "{'slots': 1, 'groups': 1, 'first_indices': 1, 'counts': 0}",
        ),
        (
            [
                WIRE_VERSION,
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
def test_the_error_names_the_problem(packed: list[object], said: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        decode(msgpack.packb(packed))
    assert str(caught.value) == said


def step_of(tokens: list[Any]) -> StepRequest:
    """A step whose tokens are not an int32 array."""
    return StepRequest("c", 1, 1, new=(NewRequest("r", cast(Int32Array, np.array(tokens)), 1),))


def bad_hint(**changes: Any) -> CacheHint:
    """A hint that no constructor makes."""
    hint = object.__new__(CacheHint)
    hint.__dict__.update(vars(CacheHint(is_over=True)), **changes)
    return hint


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hello", "str is not a message"),
        (Ping("n", 2**63), f"Ping.epoch is {2**63}: pass an integer of 64 bits"),
        (Ping("n", 10**5000), "Ping.epoch is an int too long to show: pass an integer of 64 bits"),
        (Ping("n", 2**64), f"Ping.epoch is {2**64}: pass an integer of 64 bits"),
        (Ping("n", cast(int, True)), "Ping.epoch is True: pass an integer of 64 bits"),
        (Ping("n", cast(int, float("nan"))), "Ping.epoch is nan: pass an integer of 64 bits"),
        (
            StepRequest("c", 1, 1, hints=(RequestHints("r", (bad_hint(end=0),)),)),
            "CacheHint: end of a hint is 0: pass an integer of at least 1",
        ),
        (
            StepRequest("c", 1, 1, hints=(RequestHints("r", (bad_hint(returns_in_s=3),)),)),
            "CacheHint.returns_in_s is 3: pass a floating-point number",
        ),
        (
            StepRequest("c", 1, 1, completed_step=2**63),
            f"StepRequest.completed_step is {2**63}: pass an integer of 64 bits",
        ),
        (
            StepRequest("c", 1, 1, finished=cast(Any, "abc")),
            "StepRequest.finished is 'abc': pass a tuple",
        ),
        (
            StepRequest("c", 1, 1, finished=cast(Any, None)),
            "StepRequest.finished is None: pass a tuple",
        ),
        (
            StepRequest("c", 1, 1, finished=("r",) * 65_537),
            "StepRequest.finished has 65537 items, at most 65536 travel: send fewer at once",
        ),
        (
            StepRequest("c", 1, 1, finished=("r", cast(Any, 7))),
            "StepRequest.finished holds something that is 7: pass text",
        ),
        (
            StepRequest("c", 1, 1, new=cast(Any, ("r",))),
            "StepRequest.new holds something that is 'r': pass a NewRequest",
        ),
        (
            StepRequest("c", 1, 1, new=(NewRequest("r", EMPTY_INT32, 1, lora_name="x" * 5000),)),
            "NewRequest.lora_name has 5000 characters, at most 4096 travel: shorten it",
        ),
        (
            step_of([2**40]),
            "NewRequest.token_ids is an array of int64 with shape (1,): pass a one-dimensional "
            "int32 array",
        ),
        (
            step_of([1.5]),
            "NewRequest.token_ids is an array of float64 with shape (1,): pass a one-dimensional "
            "int32 array",
        ),
        (
            StepCommands("n", "f", 1, 1, "", 0, (cast(Zero, Attach("c", 1)),)),
            "StepCommands.commands holds something that is Attach(client_id='c', next_step=1, "
            "nonce=''): "
            "pass one of Zero, Copy, BlockTablePatch, Label, Unlabel, Store, Load, Spill, Fetch, "
            "SealSlots, Discard, Reset, Fence, WriteExpected, Audit",
        ),
        (
            StepCommands(
                "n", "f", 1, 1, "", 0, (dataclasses.replace(EMPTY_PATCH, counts=int32_array([1])),)
            ),
            "BlockTablePatch with unequal lengths "
            "{'slots': 0, 'groups': 0, 'first_indices': 0, 'counts': 1}",
        ),
        (Ping("\ud800", 1), "Ping.nonce is '\\ud800': pass text that UTF-8 can encode"),
    ],
)
def test_messages_that_no_receiver_could_read_are_refused_by_encode(
    message: Any, said: str
) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        encode(message)
    assert str(caught.value) == said


def test_arrays_are_read_only_views() -> None:
    message = decode(encode(StepCommands("n", "f", 1, 1, "", 0, (Copy(*[int32_array([1])] * 2),))))
    assert isinstance(message, StepCommands)
    copy = message.commands[0]
    assert isinstance(copy, Copy)
    assert not copy.sources.flags.writeable
