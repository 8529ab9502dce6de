"""Messages to bytes and back: the only codec of steps, commands and acknowledgements.

Used by every transport. A message is one msgpack array, `[version, tag, field, ...]`, with the
fields in the order of the dataclass; a command inside is `[tag, field, ...]`, any other dataclass
`[field, ...]`. int32 arrays are little-endian bytes in a msgpack bin, so that no Python runs per
element. The schema is read from the dataclasses once, at import.

Both directions use one table of rules (`_rule_of`): the type of a field, the range of its numbers,
and the length of its texts and lists. `encode` returns bytes exactly if `decode` returns the same
message from them, and raises otherwise: a message that its receiver cannot read would be repeated
forever.

For any input, `decode` returns one of the types named here or raises a `ProtocolError`. It builds
nothing else, and no array longer than its bytes. Contents are not checked: whether a block exists
or a step makes sense is decided where it is applied. Only arrays of one command that do not fit
together are refused here, because no receiver could read them.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.errors import MalformedMessageError, RequestError, VersionMismatchError, shown
from kvcache.protocol.command_shapes import SHAPE_VALIDATORS
from kvcache.protocol.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.protocol.message_headers import UNREADABLE, Envelope
from kvcache.protocol.messages import (
    INT64_MAX,
    INT64_MIN,
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_NAME_CHARS,
    MAX_PROSE_CHARS,
    PROSE_FIELDS,
    READ_WIRE_VERSIONS,
    WIRE_VERSION,
    FromClient,
    FromWorker,
    Message,
    Progress,
    StepCommands,
    ToClient,
    ToWorker,
    wire_tag,
)
from kvcache.protocol.step import EMPTY_RUNNING, RunningRequests, StepRequest, StepResult

_WIRE_INT32 = np.dtype("<i4")
_INT32 = np.dtype(np.int32)
_IS_NATIVE = _WIRE_INT32 == _INT32
_NO_HEAD: tuple[type[Exception], ...] = (*UNREADABLE, IndexError)

_Convert = Callable[[Any], Any]


class Breach(Exception):
    """The problem with a value, and the remedy; follows the name of its field."""


class Leading(NamedTuple):
    """The readable start of a message that cannot be decoded: its kind, and its first fields that
    are plain texts and numbers, by name."""

    kind: type[Any]
    fields: dict[str, Any]


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return bytes that `decode` turns into the same message.

    Raises:
        MalformedMessageError: not a message, a field that breaks its rule, arrays that do not fit
    """
    envelope = _ENVELOPES.get(type(message))
    packed = None if envelope is None else envelope.pack(message)
    if packed is None:
        packed = _packed_in_full(message)
    if len(packed) > max_bytes:
        raise MalformedMessageError(
            f"{type(message).__name__} of {len(packed)} bytes, the limit is {max_bytes}: send less "
            "at once, or raise transport.max_message_bytes"
        )
    return packed


def decode(
    data: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES, *, is_recorded: bool = False
) -> Message:
    """Return the message in `data`. Its int32 arrays are read-only views of `data`.

    A recorded one may have an older format (`READ_WIRE_VERSIONS`).

    Raises:
        MalformedMessageError: too long, truncated, foreign, wrong types, or arrays that do not fit.
        VersionMismatchError: a message of another format version.
    """
    if len(data) > max_bytes:
        raise MalformedMessageError(
            f"message of {len(data)} bytes, the limit is {max_bytes}: send less at once, or raise "
            "transport.max_message_bytes"
        )
    if isinstance(data, bytes) and (envelope := _ENVELOPES_BY_START.get(data[:_START_BYTES])):
        usual: Message | None = envelope.unpack(data)
        if usual is not None:
            return usual
    try:
        values = msgpack.unpackb(
            data, strict_map_key=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS
        )
    except UNREADABLE as error:
        text = f"{type(error).__name__} {error}"[:200]
        raise MalformedMessageError(f"{len(data)} bytes that are not a message: {text}") from error
    if type(values) is not list or len(values) < 2 or type(values[0]) is not int:
        raise MalformedMessageError(f"{len(data)} bytes that are not a message: no version and tag")
    if values[0] not in (READ_WIRE_VERSIONS if is_recorded else (WIRE_VERSION,)):
        raise VersionMismatchError(
            f"message of format version {values[0]}, this package reads version {WIRE_VERSION}: "
            "run the same release everywhere"
        )
    codec = _MESSAGES_BY_TAG.get(values[1]) if type(values[1]) is str else None
    if codec is None:
        raise MalformedMessageError(f"message of unknown kind {str(values[1])[:50]!r}")
    packed = values[2:]
    if values[0] == 1 and codec.cls is StepRequest:
        _add_no_hints(packed)
    message: Message = codec.from_fields(packed)
    return message


def _add_no_hints(packed: list[Any]) -> None:
    """Add the fields that steps of version 1 lack."""
    new = packed[_NEW] if len(packed) > _NEW else None
    for fields_of_one in new if type(new) is list else ():
        if type(fields_of_one) is list:
            fields_of_one.append([])
    packed.append([])


def prose(text: str) -> str:
    """Return `text` ready to send: shortened, and without characters that UTF-8 cannot encode."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_PROSE_CHARS else text[: MAX_PROSE_CHARS - 4] + " ..."


def leading_fields(data: bytes) -> Leading | None:
    """Return the start of `data`, which `decode` refused, so that its sender can be told.

    None for truncated data, another version or an unknown kind. A field that breaks its rule is
    left out, and so are all fields after the leading ones: no list is built.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
    unpacker.feed(data)
    try:
        num_values = unpacker.read_array_header()
        version, tag = _plain_value(unpacker, data), _plain_value(unpacker, data)
        codec = _MESSAGES_BY_TAG.get(tag) if type(tag) is str else None
        if version != WIRE_VERSION or codec is None or num_values != 2 + codec.num_fields:
            return None
        leading = {}
        for name, rule in codec.leading:
            value = _plain_value(unpacker, data)
            with contextlib.suppress(Breach):
                leading[name] = rule.unpack(value)
        for _ in range(codec.num_fields - len(codec.leading)):
            unpacker.skip()
    except _NO_HEAD:
        return None
    return Leading(codec.cls, leading) if unpacker.tell() == len(data) else None


def _plain_value(unpacker: msgpack.Unpacker, data: bytes) -> Any:
    """Return the next value, None for a list or a map, which is skipped."""
    code = data[unpacker.tell()]
    if 0x80 <= code <= 0x9F or 0xDC <= code <= 0xDF:
        return unpacker.skip()
    return unpacker.unpack()


def _packed_in_full(message: Message) -> bytes:
    codec = _MESSAGES_BY_TYPE.get(type(message))
    if codec is None:
        raise MalformedMessageError(f"{type(message).__name__} is not a message")
    try:
        packed: bytes = msgpack.packb([WIRE_VERSION, codec.tag, *codec.to_fields(message)])
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessageError(f"{codec.tag} cannot be encoded: {error}") from error
    return packed


# --- the table of rules


class _Rule(NamedTuple):
    """How a field of one kind is sent. `pack` and `unpack` return the value for the other side, or
    raise `Breach`; they refuse the same values.

    Most values have the same type before packing and after unpacking. With `is_type_enough`, that
    type is all there is to check, and the value is sent unchanged.
    """

    value_type: type[Any]
    wire_type: type[Any]
    pack: _Convert
    unpack: _Convert
    is_type_enough: bool = False


def _rule_of(hint: Any, name: str = "") -> _Rule:
    """Return the rule for fields of type `hint` with this name."""
    if hint is str:
        return _PROSE if name in PROSE_FIELDS else _NAME
    if hint == Int32Array:
        return _Rule(np.ndarray, bytes, _array_out, _array_in)
    if hint in _RULES:
        return _RULES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_rule(_rule_of(arguments[0]))
    if origin is types.UnionType:
        return _union_rule(arguments)
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_rule(hint)
    raise TypeError(f"messages cannot carry {hint}")


def _int(value: Any) -> int:
    if type(value) is not int or not INT64_MIN <= value <= INT64_MAX:
        raise Breach(f"is {shown(value)}: pass an integer of 64 bits")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise Breach(f"is {shown(value)}: pass True or False")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise Breach(f"is {shown(value)}: pass bytes")
    return value


def _name(value: Any) -> str:
    if type(value) is str and len(value) <= MAX_NAME_CHARS and value.isascii():
        return value
    return _checked_text(value, MAX_NAME_CHARS)


def _prose(value: Any) -> str:
    return _checked_text(value, MAX_PROSE_CHARS)


def _optional_name(value: Any) -> str | None:
    return None if value is None else _name(value)


def _optional_int(value: Any) -> int | None:
    return None if value is None else _int(value)


def _optional_float(value: Any) -> float | None:
    if value is not None and type(value) is not float:
        raise Breach(f"is {shown(value)}: pass a floating-point number")
    return value


def _checked_text(value: Any, max_chars: int) -> str:
    if type(value) is not str:
        raise Breach(f"is {shown(value)}: pass text")
    if len(value) > max_chars:
        raise Breach(f"has {len(value)} characters, at most {max_chars} travel: shorten it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Breach(f"is {value[:50]!a}: pass text that UTF-8 can encode") from None
    return value


def _int_to_bytes(value: Any) -> dict[int, bytes]:
    if type(value) is not dict:
        raise Breach(f"is {shown(value)}: pass a map of bytes by number")
    _require_few(value)
    try:
        return {_int(key): _bytes(item) for key, item in value.items()}
    except Breach as breach:
        raise Breach(f"holds something that {breach}") from None


def _array_out(array: Any) -> bytes:
    if array is EMPTY_INT32:
        return b""
    # Identity first: comparing types of arrays takes longer than packing them.
    is_int32 = type(array) is np.ndarray and (
        array.dtype is _WIRE_INT32 or array.dtype in (_WIRE_INT32, _INT32)
    )
    if not is_int32 or array.ndim != 1:
        raise Breach(f"is {_described(array)}: pass a one-dimensional int32 array")
    if not _IS_NATIVE:
        array = array.astype(_WIRE_INT32)
    packed: bytes = array.tobytes()
    return packed


def _array_in(value: Any) -> Int32Array:
    if type(value) is not bytes or len(value) % 4:
        raise Breach(f"is {shown(value)}: pass whole int32 numbers as bytes")
    if not value:
        return EMPTY_INT32
    array: Int32Array = np.frombuffer(value, _WIRE_INT32)
    return array if _IS_NATIVE else array.astype(np.int32)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return shown(value)


_NAME = _Rule(str, str, _name, _name)
_PROSE = _Rule(str, str, _prose, _prose)
_RULES: dict[Any, _Rule] = {
    int: _Rule(int, int, _int, _int),
    bool: _Rule(bool, bool, _bool, _bool, is_type_enough=True),
    bytes: _Rule(bytes, bytes, _bytes, _bytes, is_type_enough=True),
    str | None: _Rule(str, str, _optional_name, _optional_name),
    int | None: _Rule(int, int, _optional_int, _optional_int),
    float | None: _Rule(float, float, _optional_float, _optional_float),
    dict[int, bytes]: _Rule(dict, dict, _int_to_bytes, _int_to_bytes),
}


def _require_few(items: Sized) -> None:
    if len(items) > MAX_ITEMS:
        raise Breach(f"has {len(items)} items, at most {MAX_ITEMS} travel: send fewer at once")


def _tuple_rule(item: _Rule) -> _Rule:
    """Tuples of any length up to the limit; `encode` accepts lists, too."""

    def tuple_out(values: Any) -> list[Any]:
        if type(values) is not tuple and type(values) is not list:
            raise Breach(f"is {shown(values)}: pass a tuple")
        if not values:
            return []
        _require_few(values)
        pack = item.pack
        try:
            return [pack(value) for value in values]
        except Breach as breach:
            raise Breach(f"holds something that {breach}") from None

    def tuple_in(values: Any) -> tuple[Any, ...]:
        if type(values) is not list:
            raise Breach(f"is {shown(values)}: pass a list")
        if not values:
            return ()
        _require_few(values)
        unpack = item.unpack
        try:
            return tuple([unpack(value) for value in values])
        except Breach as breach:
            raise Breach(f"holds something that {breach}") from None

    return _Rule(tuple, list, tuple_out, tuple_in)


def _dataclass_rule(cls: type[Any]) -> _Rule:
    codec = _Codec(cls)

    def dataclass_out(value: Any) -> list[Any]:
        if type(value) is not cls:
            raise Breach(f"is {shown(value)}: pass a {cls.__name__}")
        return codec.to_fields(value)

    return _Rule(cls, list, dataclass_out, codec.from_fields)


def _union_rule(members: Iterable[type[Any]]) -> _Rule:
    by_type = {cls: _Codec(cls) for cls in members}
    by_tag = {codec.tag: codec for codec in by_type.values()}

    def union_out(value: Any) -> list[Any]:
        codec = by_type.get(type(value))
        if codec is None:
            raise Breach(f"is {shown(value)}: pass one of {', '.join(by_tag)}")
        return [codec.tag, *codec.to_fields(value)]

    def union_in(values: Any) -> Any:
        if type(values) is not list or not values or type(values[0]) is not str:
            raise Breach(f"is {shown(values)}: pass a tagged list")
        codec = by_tag.get(values[0])
        if codec is None:
            raise Breach(f"is of the unknown kind {values[0][:50]!r}: pass one of those known here")
        return codec.from_fields(values[1:])

    return _Rule(object, list, union_out, union_in)


# --- dataclasses by the rules of their fields


class _Codec:
    """How one dataclass is sent.

    In most messages, all fields have the usual types. So the types of all fields are checked
    together first; then only fields whose rules demand more are checked one by one. A field's most
    frequent value (an empty one) is recognised by identity in `encode`, and by equality in
    `decode`.
    """

    def __init__(self, cls: type[Any]) -> None:
        hints = typing.get_type_hints(cls)
        self.cls = cls
        self.tag = wire_tag(cls)
        self._names = tuple(f.name for f in fields(cls))
        self.num_fields = len(self._names)
        self._get: Callable[[Any], Any] = attrgetter(*self._names)
        rules = tuple(_rule_of(hints[name], name) for name in self._names)
        self._rules = rules
        self._value_types = tuple(rule.value_type for rule in rules)
        self._wire_types = tuple(rule.wire_type for rule in rules)
        closer = [(i, rule) for i, rule in enumerate(rules) if not rule.is_type_enough]
        self._closer_out = tuple((i, rule.pack) for i, rule in closer)
        self._closer_in = tuple((i, rule.unpack) for i, rule in closer)
        plain = itertools.takewhile(lambda name: hints[name] in (int, str), self._names)
        self.leading = tuple(zip(plain, rules, strict=False))
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
        packed = self._packed(value)
        if not self._is_bare:
            self.from_fields(list(packed))
        if self._validate is not None:
            try:
                self._validate(value)
            except TypeError:  # compiled functions need a contiguous copy
                self.from_fields(list(packed))
        return packed

    def from_fields(self, values: Any) -> Any:
        """Build the dataclass from unpacked fields; raises MalformedMessageError."""
        if type(values) is not list or len(values) != self.num_fields:
            count = len(values) if type(values) is list else type(values).__name__
            raise MalformedMessageError(f"{self.tag}: {count} fields, expected {self.num_fields}")
        if values == self._usual_fields:
            return self._usual
        index = 0
        try:
            if tuple(map(type, values)) == self._wire_types:
                for index, unpack in self._closer_in:
                    values[index] = unpack(values[index])
            else:
                for index, rule in enumerate(self._rules):
                    values[index] = rule.unpack(values[index])
        except Breach as breach:
            raise MalformedMessageError(f"{self.tag}.{self._names[index]} {breach}") from None
        if self._is_bare:
            # The constructor of a frozen dataclass, without one call for each field.
            result = object.__new__(self.cls)
            result.__dict__.update(zip(self._names, values, strict=True))
        else:
            try:
                result = self.cls(*values)
            except RequestError as error:
                raise MalformedMessageError(f"{self.tag}: {error}") from None
        if self._validate is not None:
            self._validate(result)
        return result

    def are_sound(self, num_first: int) -> Callable[[Sequence[Any]], bool]:
        """Return a function that checks whether the first fields, of the usual types, are valid."""
        closer = tuple((i, pack) for i, pack in self._closer_out if i < num_first)

        def are_sound(values: Sequence[Any]) -> bool:
            try:
                for index, check in closer:
                    check(values[index])
            except Breach:
                return False
            return True

        return are_sound

    def _packed(self, value: Any) -> list[Any]:
        got = self._get(value)
        values = list(got) if self.num_fields > 1 else [got]
        index = 0
        try:
            if tuple(map(type, values)) == self._value_types:
                for index, pack in self._closer_out:
                    values[index] = pack(values[index])
            else:
                for index, rule in enumerate(self._rules):
                    values[index] = rule.pack(values[index])
        except Breach as breach:
            raise MalformedMessageError(f"{self.tag}.{self._names[index]} {breach}") from None
        return values


_USUAL: dict[type[Any], Any] = {RunningRequests: EMPTY_RUNNING, BlockTablePatch: EMPTY_PATCH}
"""The value of that type in most messages: one shared object."""

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
"""Constant parts of usual messages, whose first fields vary."""


def envelope_of(usual: Message, num_varying: int) -> Envelope:
    """Return a fast codec for messages like `usual`, with other values in the first fields."""
    codec = _MESSAGES_BY_TYPE[type(usual)]
    return Envelope(usual, num_varying, codec.to_fields(usual), codec.are_sound(num_varying))


_ENVELOPES: dict[type[Message], Envelope] = {
    type(usual): envelope_of(usual, num_varying) for usual, num_varying in _USUAL_MESSAGES
}

_NEW = [f.name for f in fields(StepRequest)].index("new")
_START_BYTES = 8  # distinguish kinds
_ENVELOPES_BY_START = {envelope.begin[:_START_BYTES]: envelope for envelope in _ENVELOPES.values()}

_MESSAGES_BY_TAG = {codec.tag: codec for codec in _MESSAGES_BY_TYPE.values()}
