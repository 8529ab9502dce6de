"""The constant first bytes of one kind of message during an epoch.

Most messages of a running cluster differ from the one before in a number or two. A receiver
compares the first bytes with the expected header. That checks format version, kind, coordinator,
process, epoch and plan at once, and only the rest is unpacked. Uses wire.py's format. A message
with another header is not refused here: wire.py decodes it and names the error. It does the same
with a message that has too many items, before any of them takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter, is_
from typing import Any

import msgpack

from kvcache.protocol.messages import WIRE_VERSION, Message, wire_tag

NO_ITEMS = b"\x90"
"""An empty msgpack array: the last bytes of a message whose last field is an empty list."""

UNREADABLE: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    msgpack.UnpackException,
    RecursionError,
    MemoryError,
)
"""The errors of msgpack for bytes that it cannot unpack."""


class MessageHeader:
    """The first bytes of all messages of `kind` whose first fields have the values `first`."""

    def __init__(self, kind: type[Message], *first: str | int) -> None:
        """Pack the header once. At least one field must follow."""
        packer = msgpack.Packer()
        num_fields = len(fields(kind))
        parts = [packer.pack_array_header(2 + num_fields)]
        parts += [packer.pack(value) for value in (WIRE_VERSION, wire_tag(kind), *first)]
        self.prefix = b"".join(parts)
        self._length = len(self.prefix)
        self._packer = packer
        self._num_left = num_fields - len(first)
        self._rest: bytes = packer.pack_array_header(self._num_left)

    def rest(self, payload: bytes) -> list[Any] | None:
        """Return the following fields, unchecked; None if `payload` is not a whole message with
        this header, or has a list that is longer than a message has fields."""
        if not payload.startswith(self.prefix):
            return None
        data, longest = self._rest + payload[self._length :], self._num_left
        try:
            values: list[Any] = msgpack.unpackb(data, max_array_len=longest, max_map_len=0)
        except UNREADABLE:
            return None
        return values

    def number(self, payload: bytes) -> int | None:
        """Return the one following field if it is a number, for headers that leave one field; None
        as in `rest`."""
        if not payload.startswith(self.prefix):
            return None
        try:
            value = msgpack.unpackb(payload[self._length :], max_array_len=0, max_map_len=0)
        except UNREADABLE:
            return None
        return value if type(value) is int else None

    def with_number(self, number: int) -> bytes:
        """Return the message whose one following field is `number`."""
        packed: bytes = self._packer.pack(number)
        return self.prefix + packed


class Envelope:
    """Messages of one kind in which only the first fields, texts and numbers, vary: their constant
    first and last bytes.

    Benchmark row C1 defends it: without envelopes an empty step takes a quarter longer.
    """

    def __init__(
        self,
        usual: Message,
        num_varying: int,
        packed_fields: list[Any],
        are_sound: Callable[[Sequence[Any]], bool],
    ) -> None:
        """Take the fields after the first `num_varying` from `usual`; `packed_fields` are its
        fields as msgpack packs them. `are_sound` checks whether values of the right types are valid
        for the varying fields."""
        kind = type(usual)
        names = tuple(field.name for field in fields(kind))
        self._packer = msgpack.Packer()
        pack = self._packer.pack
        self.kind = kind
        self.begin = MessageHeader(kind).prefix
        self._end = b"".join(pack(value) for value in packed_fields[num_varying:])
        self._names = names[:num_varying]
        self._get: Callable[[Any], Any] = attrgetter(*names)
        values = self._get(usual)
        self._num_varying = num_varying
        self._are_sound = are_sound
        self._types = tuple(type(value) for value in values[:num_varying])
        self._usual = values[num_varying:]
        self._fields = dict(zip(names, values, strict=True))
        self._rest: bytes = self._packer.pack_array_header(num_varying)
        self._begin_bytes, self._end_bytes = len(self.begin), len(self._end)

    def pack(self, message: Message) -> bytes | None:
        """Return the bytes of `message`; None if another field than the first ones is unusual, or
        one of the first ones is invalid.

        Usual values are recognised by identity, because comparing arrays is slow.
        """
        values = self._get(message)
        varying = values[: self._num_varying]
        is_usual = all(map(is_, values[self._num_varying :], self._usual))
        if not is_usual or tuple(map(type, varying)) != self._types:
            return None
        if not self._are_sound(varying):
            return None
        packed: bytes = self._packer.pack(varying)
        return self.begin + packed[len(self._rest) :] + self._end

    def unpack(self, data: bytes) -> Any | None:
        """Return the message in `data`; None as in `pack`, and for truncated data."""
        if not (data.startswith(self.begin) and data.endswith(self._end)):
            return None
        varying, longest = data[self._begin_bytes : -self._end_bytes], self._num_varying
        try:
            values = msgpack.unpackb(self._rest + varying, max_array_len=longest, max_map_len=0)
        except UNREADABLE:
            return None
        if tuple(map(type, values)) != self._types or not self._are_sound(values):
            return None
        # The constructor of a frozen dataclass, without one call for each field.
        message = object.__new__(self.kind)
        message.__dict__.update(self._fields)
        message.__dict__.update(zip(self._names, values, strict=True))
        return message
