"""What the messages of one kind have in common for as long as an epoch lasts: how they begin.

Most messages of a running cluster differ from the one before in a number or two. Who expects such
a message compares its first bytes with those of all of them, which checks format version, kind,
coordinator, process, epoch and plan at once, and unpacks only what is left. Stands beside wire.py
and knows no other format than that. Whatever does not begin so is not refused here: it is decoded
the long way, which says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack

from kvcache.messages import WIRE_VERSION, Message

NO_ITEMS = b"\x90"
"""An empty msgpack array: how a message ends whose last field is an empty list."""

_UNREADABLE = (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError)


class MessageHead:
    """The first bytes of all messages of `kind` whose first fields have the values `first`."""

    def __init__(self, kind: type[Message], *first: str | int) -> None:
        """Pack them once. At least one field must be left over."""
        packer = msgpack.Packer()
        num_fields = len(fields(kind))
        parts = [packer.pack_array_header(2 + num_fields)]
        parts += [packer.pack(value) for value in (WIRE_VERSION, kind.__name__, *first)]
        self.prefix = b"".join(parts)
        self._length = len(self.prefix)
        self._rest: bytes = packer.pack_array_header(num_fields - len(first))

    def rest(self, payload: bytes) -> list[Any] | None:
        """Return the fields that follow, unchecked; None if `payload` is no whole message that
        begins so."""
        if not payload.startswith(self.prefix):
            return None
        try:
            values: list[Any] = msgpack.unpackb(self._rest + payload[self._length :])
        except _UNREADABLE:
            return None
        return values

    def number(self, payload: bytes) -> int | None:
        """Return the one field that follows if it is a number, for heads that leave one over;
        None as in `rest`."""
        if not payload.startswith(self.prefix):
            return None
        try:
            value = msgpack.unpackb(payload[self._length :])
        except _UNREADABLE:
            return None
        return value if type(value) is int else None

    def with_number(self, number: int) -> bytes:
        """Return the message whose one field left over is `number`."""
        packed: bytes = msgpack.packb(number)
        return self.prefix + packed
