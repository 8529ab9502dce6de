"""Messages to bytes and back: the only codec of steps, commands and acknowledgements.

Stands between messages.py and every transport. A message is one msgpack array, `[version, tag,
field, ...]`, with the fields in the order of the dataclass; a command inside is `[tag, field,
...]`, any other dataclass `[field, ...]`. int32 arrays are little-endian bytes in a msgpack bin, so
that no Python runs per element. The schema is read from the dataclasses once, at import.

Whatever comes in, `decode` returns one of the types named here or raises a `ProtocolError`; it
builds nothing else, and no array longer than its bytes. Refuses to judge contents: whether a block
exists or a step makes sense is decided where it is applied. Only arrays of one command that do not
fit together are refused here already, as no receiver could read them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from kvcache.arrays import EMPTY_INT32, Int32Array
from kvcache.command_shapes import SHAPE_VALIDATORS
from kvcache.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.errors import MalformedMessageError, VersionMismatchError
from kvcache.heads import Envelope
from kvcache.messages import (
    WIRE_VERSION,
    FromClient,
    FromWorker,
    Message,
    Progress,
    StepCommands,
    ToClient,
    ToWorker,
)
from kvcache.step import EMPTY_RUNNING, RunningRequests, StepRequest, StepResult

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message that is decoded unless the caller sets another limit."""

MAX_ITEMS = 65_536
"""Longest msgpack array or map inside a message (int32 arrays are not msgpack arrays)."""

_WIRE_INT32 = np.dtype("<i4")
_INT32 = np.dtype(np.int32)
_IS_NATIVE = _WIRE_INT32 == _INT32
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

_Convert = Callable[[Any], Any]


def encode(message: Message) -> bytes:
    """Return the bytes of `message`.

    Raises:
        MalformedMessageError: not a message, or a field holds what the format cannot carry.
    """
    envelope = _ENVELOPES.get(type(message))
    usual = None if envelope is None else envelope.pack(message)
    if usual is not None:
        return usual
    codec = _MESSAGES_BY_TYPE.get(type(message))
    if codec is None:
        raise MalformedMessageError(f"{type(message).__name__} is no message")
    try:
        packed: bytes = msgpack.packb([WIRE_VERSION, codec.tag, *codec.to_fields(message)])
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessageError(f"{codec.tag} cannot be encoded: {error}") from error
    return packed


def decode(data: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Return the message in `data`. Its int32 arrays are read-only views of the bytes received.

    Raises:
        MalformedMessageError: too long, torn, foreign, of wrong types, or arrays that do not fit.
        VersionMismatchError: a message of another format version.
    """
    if len(data) > max_bytes:
        raise MalformedMessageError(
            f"message of {len(data)} bytes, the limit is {max_bytes}: raise the limit on both sides"
        )
    if isinstance(data, bytes) and (envelope := _ENVELOPES_BY_START.get(data[:_START_BYTES])):
        usual: Message | None = envelope.unpack(data)
        if usual is not None:
            return usual
    try:
        values = msgpack.unpackb(
            data, strict_map_key=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        text = f"{type(error).__name__} {error}"[:200]
        raise MalformedMessageError(f"{len(data)} bytes that are no message: {text}") from error
    if type(values) is not list or len(values) < 2 or type(values[0]) is not int:
        raise MalformedMessageError(f"{len(data)} bytes that are no message: no version and tag")
    if values[0] != WIRE_VERSION:
        raise VersionMismatchError(
            f"message of format version {values[0]}, this package reads version {WIRE_VERSION}: "
            "run the same release everywhere"
        )
    codec = _MESSAGES_BY_TAG.get(values[1]) if type(values[1]) is str else None
    if codec is None:
        raise MalformedMessageError(f"message of unknown kind {str(values[1])[:50]!r}")
    message: Message = codec.from_fields(values[2:])
    return message


class _Wrong(Exception):
    """What was expected where something else stood."""


class _Codec:
    """How one dataclass travels. A field of a wrong type is refused on the way out already: a
    message that nobody can read would be repeated for ever.

    Most messages are small and all of their fields are what they should be, so that is looked at
    first, for all fields together. Only when it does not hold is each field looked at, to say
    which one is wrong. A value that travels most of the time (an empty one) is told by identity
    on its way out, and by comparing its fields on its way in.
    """

    def __init__(self, cls: type[Any]) -> None:
        hints = typing.get_type_hints(cls)
        self.tag = cls.__name__
        self._cls = cls
        self._names = tuple(f.name for f in fields(cls))
        self._get: Callable[[Any], Any] = attrgetter(*self._names)
        converters = [_converters(hints[name]) for name in self._names]
        self._out = tuple(encode_field for encode_field, _ in converters)
        self._types = tuple(_type_of(hints[name]) for name in self._names)
        self._not_plain = tuple(
            (i, out) for i, (out, into) in enumerate(converters) if out is not into
        )
        self._in = tuple(decode_field for _, decode_field in converters)
        self._wire_types = tuple(_wire_type_of(hints[name]) for name in self._names)
        self._checked_in = tuple(
            (i, into) for i, (_, into) in enumerate(converters) if into not in _EXACT
        )
        self._is_bare = not hasattr(cls, "__post_init__")
        self._validate = SHAPE_VALIDATORS.get(cls)
        self._usual = _USUAL.get(cls)
        self._usual_fields = None if self._usual is None else self._packed(self._usual)

    def to_fields(self, value: Any) -> list[Any]:
        """Return the fields as msgpack can pack them; raises MalformedMessageError.

        The list belongs to the codec: do not change it.
        """
        if value is self._usual and self._usual_fields is not None:
            return self._usual_fields
        return self._packed(value)

    def from_fields(self, values: Any) -> Any:
        """Build the dataclass from unpacked fields; raises MalformedMessageError."""
        if type(values) is not list or len(values) != len(self._names):
            count = len(values) if type(values) is list else type(values).__name__
            raise MalformedMessageError(f"{self.tag}: {count} fields, expected {len(self._names)}")
        if values == self._usual_fields:
            return self._usual
        index = 0
        try:
            if tuple(map(type, values)) == self._wire_types:
                for index, convert in self._checked_in:
                    values[index] = convert(values[index])
            else:
                for index, convert in enumerate(self._in):
                    values[index] = convert(values[index])
        except _Wrong as wrong:
            name = self._names[index]
            raise MalformedMessageError(f"{self.tag}.{name} is not {wrong}") from None
        if self._is_bare:
            # What the constructor of a frozen dataclass does, without one call for each field.
            result = object.__new__(self._cls)
            result.__dict__.update(zip(self._names, values, strict=True))
        else:
            result = self._cls(*values)
        if self._validate is not None:
            self._validate(result)
        return result

    def _packed(self, value: Any) -> list[Any]:
        got = self._get(value)
        values = list(got) if len(self._names) > 1 else [got]
        # Plain fields of the right type are packed as they are; all others are looked at.
        is_as_hinted = tuple(map(type, values)) == self._types
        index = 0
        try:
            for index, convert in self._not_plain if is_as_hinted else enumerate(self._out):
                values[index] = convert(values[index])
        except _Wrong as wrong:
            name = self._names[index]
            raise MalformedMessageError(f"{self.tag}.{name} is not {wrong}") from None
        return values


def _converters(hint: Any) -> tuple[_Convert, _Convert]:
    """Return how values of type `hint` go out and come in."""
    if hint == Int32Array:
        return _array_out, _array_in
    if hint in _PLAIN:
        return _PLAIN[hint], _PLAIN[hint]
    if hint == str | None:
        return _optional_str, _optional_str
    if hint == dict[int, bytes]:
        return _int_to_bytes, _int_to_bytes
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_converters(arguments[0])
    if origin is types.UnionType:
        return _union_converters(arguments)
    if is_dataclass(hint) and isinstance(hint, type):
        codec = _Codec(hint)

        def dataclass_out(value: Any) -> list[Any]:
            if type(value) is not hint:
                raise _Wrong(f"a {hint.__name__}")
            return codec.to_fields(value)

        return dataclass_out, codec.from_fields
    raise TypeError(f"messages cannot carry {hint}")


def _type_of(hint: Any) -> type[Any]:
    """Return the type that values of `hint` have, for fields that may have others too: one."""
    if hint == Int32Array:
        return np.ndarray
    if hint == str | None:
        return str
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return object
    found: type[Any] = origin or hint
    return found


def _wire_type_of(hint: Any) -> type[Any]:
    """Return the type that values of `hint` have after unpacking, of several one."""
    if hint == Int32Array:
        return bytes
    if hint in _PLAIN:
        plain: type[Any] = hint
        return plain
    if hint == str | None:
        return str
    return dict if typing.get_origin(hint) is dict else list


def _tuple_converters(item: Any) -> tuple[_Convert, _Convert]:
    item_out, item_in = _converters(item)

    def tuple_in(values: Any) -> tuple[Any, ...]:
        if type(values) is not list:
            raise _Wrong("a list")
        if not values:
            return ()
        return tuple([item_in(value) for value in values])

    def tuple_out(values: Any) -> list[Any]:
        if not values:
            return []
        if type(values) not in (tuple, list):
            raise _Wrong("a tuple")
        return [item_out(value) for value in values]

    return tuple_out, tuple_in


def _union_converters(members: Iterable[type[Any]]) -> tuple[_Convert, _Convert]:
    by_type = {cls: _Codec(cls) for cls in members}
    by_tag = {codec.tag: codec for codec in by_type.values()}

    def union_out(value: Any) -> list[Any]:
        codec = by_type.get(type(value))
        if codec is None:
            raise _Wrong(f"one of {', '.join(by_tag)}")
        return [codec.tag, *codec.to_fields(value)]

    def union_in(values: Any) -> Any:
        if type(values) is not list or not values or type(values[0]) is not str:
            raise _Wrong("a tagged list")
        codec = by_tag.get(values[0])
        if codec is None:
            raise _Wrong(f"of a known kind but {values[0][:50]!r}")
        return codec.from_fields(values[1:])

    return union_out, union_in


def _array_out(array: Any) -> bytes:
    if array is EMPTY_INT32:
        return b""
    # Asking for identity first: comparing types of arrays takes longer than packing them.
    is_int32 = type(array) is np.ndarray and (
        array.dtype is _WIRE_INT32 or array.dtype in (_WIRE_INT32, _INT32)
    )
    if not is_int32 or array.ndim != 1:
        raise _Wrong("a one-dimensional int32 array")
    if not _IS_NATIVE:
        array = array.astype(_WIRE_INT32)
    packed: bytes = array.tobytes()
    return packed


def _array_in(value: Any) -> Int32Array:
    if type(value) is not bytes or len(value) % 4:
        raise _Wrong("whole int32 numbers as bytes")
    if not value:
        return EMPTY_INT32
    array: Int32Array = np.frombuffer(value, _WIRE_INT32)
    return array if _IS_NATIVE else array.astype(np.int32)


def _int(value: Any) -> int:
    if type(value) is not int or not _INT64_MIN <= value <= _INT64_MAX:
        raise _Wrong("a 64-bit integer")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _Wrong("a truth value")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise _Wrong("text")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _Wrong("bytes")
    return value


def _optional_str(value: Any) -> str | None:
    return None if value is None else _str(value)


def _int_to_bytes(value: Any) -> dict[int, bytes]:
    if type(value) is not dict:
        raise _Wrong("a map of bytes by number")
    return {_int(key): _bytes(item) for key, item in value.items()}


_PLAIN: dict[Any, _Convert] = {int: _int, bool: _bool, str: _str, bytes: _bytes}

_EXACT: tuple[_Convert, ...] = (_bool, _str, _bytes, _optional_str)
"""What changes nothing and refuses nothing once the type is right. Integers have bounds too."""

_USUAL: dict[type[Any], Any] = {RunningRequests: EMPTY_RUNNING, BlockTablePatch: EMPTY_PATCH}
"""What most messages carry in a field of that type: one object, never made anew."""

_MESSAGES_BY_TYPE: dict[type[Any], _Codec] = {
    cls: _Codec(cls)
    for direction in (ToWorker, FromWorker, FromClient, ToClient)
    for cls in typing.get_args(direction)
}
_USUAL_MESSAGES: tuple[tuple[Message, int], ...] = (
    (StepRequest(), 4),
    (StepResult("", 0, 0, 0), 4),
    (StepCommands("", "", 0, 0, "", 0, ()), 6),
    (Progress("", 0, 0, 0), 5),
)
"""What is the same from step to step but for its first fields, as long as nothing happens."""

_ENVELOPES: dict[type[Message], Envelope] = {
    type(usual): Envelope(usual, num_varying, _MESSAGES_BY_TYPE[type(usual)].to_fields(usual))
    for usual, num_varying in _USUAL_MESSAGES
}

_START_BYTES = 8  # tell their kinds apart
_ENVELOPES_BY_START = {envelope.begin[:_START_BYTES]: envelope for envelope in _ENVELOPES.values()}

_MESSAGES_BY_TAG = {codec.tag: codec for codec in _MESSAGES_BY_TYPE.values()}
