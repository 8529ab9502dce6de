"""A sender that checks nothing: it has other rules than ours, or a bug."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgpack
import numpy as np

from kvcache.protocol.commands import Command
from kvcache.protocol.messages import WIRE_VERSION, Message, wire_tag


def unchecked(message: Message, max_bytes: int = 0) -> bytes:
    """Return the bytes of a message, whatever its fields hold, if msgpack can pack them."""
    packed: bytes = msgpack.packb([WIRE_VERSION, wire_tag(type(message)), *written(message)])
    return packed


def written(value: Any, tagged: bool = False) -> Any:
    """Return the packed form of a value; commands are `tagged`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        parts = [
            written(getattr(value, f.name), tagged=hints[f.name] == tuple[Command, ...])
            for f in dataclasses.fields(value)
        ]
        return [type(value).__name__, *parts] if tagged else parts
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, tuple | list):
        return [written(item, tagged) for item in value]
    return value
