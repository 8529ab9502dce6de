"""Frames from a coordinator to its publisher: events with their arrays as they are in memory.

They travel between two processes of one user on one machine, over a private pair of sockets. The
publisher encodes them for routers, so that no step waits for that. Refuses frames that are too
long, and invalid bytes.

    frame   length (4 bytes, big endian), msgpack of [kind, ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import msgpack
import numpy as np

from kvcache.base.errors import MalformedMessageError
from kvcache.base.serving_loop import describe_error
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.offload.events import OffloadingEvent, cache_events
from kvcache.protocol.commands import Label
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request_content import Namespace

MAX_FRAME_BYTES: Final = 1 << 30

_LENGTH: Final = Struct(">I")
_STORED: Final = 0
_REMOVED: Final = 1
_CLEARED: Final = 2


def pack_frame(kind: str, *values: Any) -> bytes:
    """Return a frame.

    Raises:
        MalformedMessageError: values that msgpack cannot pack, or a frame too long for a reader.
    """
    try:
        body: bytes = msgpack.packb([kind, *values])
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessageError(f"a frame of kind {kind} cannot be packed: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise MalformedMessageError(
            f"a frame of kind {kind} of {len(body)} bytes, at most {MAX_FRAME_BYTES} are read: "
            "cache fewer blocks, or switch events off"
        )
    return _LENGTH.pack(len(body)) + body


class FeedReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take more bytes; return the frames that are complete, as `[kind, ...]`.

        Raises:
            MalformedMessageError: invalid bytes; the stream cannot be read on.
        """
        self._data += data
        found: list[list[Any]] = []
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > MAX_FRAME_BYTES:
                raise MalformedMessageError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            found.append(_unpacked(bytes(self._data[start + _LENGTH.size : end])))
            start = end
        del self._data[:start]
        return found


def pack_events(events: Sequence[CacheEvent]) -> list[Any]:
    """Return events as values for a frame."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, BlocksStored):
            data, size = _joined(event.digests)
            namespace = event.namespace
            found.append(
                (
                    _STORED,
                    event.group,
                    event.medium,
                    data,
                    size,
                    event.parent_digest,
                    np.ascontiguousarray(event.token_ids, "<i4").tobytes(),
                    event.block_size,
                    namespace.lora,
                    namespace.salt,
                    event.extra_keys if any(event.extra_keys) else None,
                )
            )
        elif isinstance(event, BlocksRemoved):
            found.append((_REMOVED, event.group, event.medium, *_joined(event.digests)))
        else:
            found.append((_CLEARED,))
    return found


def unpack_events(values: Sequence[Any]) -> list[CacheEvent]:
    """Return the events from `pack_events`."""
    return [_event(*value) for value in values]


def pack_state(
    held: Sequence[OffloadingEvent], block_sizes: Sequence[int], none_hash: bytes
) -> list[Any]:
    """Return the contents of media as values for a frame; `block_sizes` and `none_hash` as for
    `cache_events`. The receiver does the work per block."""
    media = [(e.medium, *_columns(e.contents)) for e in held if e.contents is not None]
    return [list(block_sizes), none_hash, media]


def unpack_state(values: Sequence[Any]) -> list[CacheEvent]:
    """Return stored events for all contents from `pack_state`."""
    block_sizes, none_hash, media = values
    found: list[CacheEvent] = []
    for medium, *columns in media:
        event = OffloadingEvent((), medium, False, _label(*columns))
        found += cache_events(event, block_sizes, none_hash)
    return found


def _columns(label: Label) -> tuple[Any, ...]:
    arrays = (label.groups, label.token_counts, label.token_ids, label.namespaces)
    return (
        *(np.ascontiguousarray(array, "<i4").tobytes() for array in arrays),
        label.digests,
        label.parent_digests,
        label.namespace_names,
        list(label.extra_keys.items()),
    )


def _label(groups: bytes, counts: bytes, tokens: bytes, spaces: bytes, *others: Any) -> Label:
    """Return labels without meaningful block ids."""
    digests, parents, names, extra_keys = others
    nowhere = np.full(len(groups) // 4, -1, "<i4")
    return Label(
        nowhere,
        np.frombuffer(groups, "<i4"),
        nowhere,
        digests,
        parents,
        np.frombuffer(counts, "<i4"),
        np.frombuffer(tokens, "<i4"),
        np.frombuffer(spaces, "<i4"),
        tuple(names),
        dict(extra_keys),
    )


def _event(kind: int, *parts: Any) -> CacheEvent:
    if kind == _CLEARED:
        return AllBlocksCleared()
    group, medium, data, size, *rest = parts
    digests = PackedDigests(data, size)
    if kind == _REMOVED:
        return BlocksRemoved(group, medium, digests)
    parent, tokens, block_size, lora, salt, extra_keys = rest
    keys = () if extra_keys is None else tuple(map(_keys, extra_keys))
    return BlocksStored(
        group,
        medium,
        digests,
        None if parent is None else BlockHash(parent),
        np.frombuffer(tokens, "<i4"),
        block_size,
        Namespace(0, lora, salt, None),
        keys,
    )


def _keys(keys: Any) -> tuple[tuple[str | int, ...], ...] | None:
    return None if keys is None else tuple(tuple(key) for key in keys)


def _joined(digests: Sequence[BlockHash]) -> tuple[bytes, int]:
    if isinstance(digests, PackedDigests):
        return digests.data, digests.digest_bytes
    return b"".join(digests), len(digests[0]) if digests else 1


def _unpacked(body: bytes) -> list[Any]:
    try:
        values = msgpack.unpackb(body)
    except Exception as error:
        text = describe_error(error)
        raise MalformedMessageError(f"a frame of {len(body)} bytes: {text}") from error
    if type(values) is not list or not values or type(values[0]) is not str:
        raise MalformedMessageError(f"a frame of {len(body)} bytes names no kind")
    return values
