"""Reads payloads of cache events: bytes from a network become checked events, or an error.

The codec's counterpart, for subscribers. Reads both encodings, and skips keys that later publishers
may add. Refuses every other deviation from the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgpack
import numpy as np

from kvcache.base.arguments import as_int, check_kind
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import MalformedMessageError, shown
from kvcache.events.codec import NUM_ALWAYS, REMOVED_KEYS, STORED_KEYS
from kvcache.events.wire_events import (
    MAX_RANK,
    ClearedEvent,
    EventBatch,
    Hashes,
    RemovedEvent,
    RouterKey,
    StoredEvent,
    WireEvent,
)

MAX_PAYLOAD_BYTES: Final = 1 << 30
"""Longest payload that is read. A snapshot of a million blocks of 16 tokens has some 100 MB."""

_MAX_TOKEN: Final = 2**31 - 1


def decode_batch(payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> EventBatch:
    """Return the events in a payload.

    Raises:
        InvalidInputError: `data` is not bytes, or the limit is invalid.
        MalformedMessageError: longer than `max_bytes`, not msgpack, or not in the format.
    """
    check_kind("payload", payload, bytes)
    max_bytes = as_int("max_bytes", max_bytes)
    if len(payload) > max_bytes:
        raise MalformedMessageError(
            f"an event payload of {len(payload)} bytes, {max_bytes} are read at most"
        )
    try:
        batch = msgpack.unpackb(payload)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessageError(
            f"an event payload of {len(payload)} bytes is no msgpack: {error}"
        ) from error
    if type(batch) is not list or len(batch) != 3:
        raise MalformedMessageError(
            f"an event payload holds {shown(batch)}: time, events and rank are expected"
        )
    time_s, events, rank = batch
    if type(time_s) not in (float, int) or type(events) is not list:
        raise MalformedMessageError(
            f"an event batch of time {shown(time_s)} and events {shown(events)}"
        )
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise MalformedMessageError(f"an event batch of data-parallel rank {shown(rank)}")
    return EventBatch(float(time_s), [_event(event) for event in events], rank)


def _event(event: object) -> WireEvent:
    fields = _fields(event)
    tag = fields.get("type")
    if tag == "AllBlocksCleared":
        return ClearedEvent()
    hashes = _hashes(fields.get("block_hashes"))
    medium, group = fields.get("medium"), fields.get("group_idx")
    if type(medium) is not str or not medium:
        raise MalformedMessageError(f"a cache event of medium {shown(medium)}: expected a name")
    group_idx = 0 if group is None else _number("group_idx", group)
    if tag == "BlockRemoved":
        return RemovedEvent(hashes, medium, group_idx)
    if not len(hashes):
        raise MalformedMessageError("a BlockStored event of no blocks")
    size = _number("block_size", fields.get("block_size"), least=1)
    tokens = _tokens(fields.get("token_ids"))
    if len(tokens) != len(hashes) * size:
        raise MalformedMessageError(
            f"{len(tokens)} tokens for {len(hashes)} stored blocks of {size} tokens"
        )
    parent, window = fields.get("parent_block_hash"), fields.get("kv_cache_spec_sliding_window")
    return StoredEvent(
        hashes,
        None if parent is None else _number("parent_block_hash", parent, least=1, most=2**64 - 1),
        tokens,
        size,
        medium,
        _text("lora_name", fields.get("lora_name")),
        _extra_keys(fields.get("extra_keys"), len(hashes)),
        group_idx,
        _text("kv_cache_spec_kind", fields.get("kv_cache_spec_kind")),
        None if window is None else _number("sliding window", window),
        _text("cache_salt", fields.get("cache_salt")),
    )


def _fields(event: object) -> dict[str, Any]:
    """Return an event's fields by name, from either encoding; `type` is a known one."""
    if isinstance(event, dict):
        fields = event
    elif isinstance(event, list) and event:
        keys: Sequence[str] = STORED_KEYS if event[0] == "BlockStored" else REMOVED_KEYS
        fields = {"type": event[0], **dict(zip(keys, event[1:], strict=False))}
    else:
        raise MalformedMessageError(f"a cache event is {shown(event)}: expected a map or an array")
    tag = fields.get("type")
    if type(tag) is not str or tag not in NUM_ALWAYS:
        raise MalformedMessageError(
            f"a cache event of type {shown(tag)}: there are {', '.join(NUM_ALWAYS)}"
        )
    return fields


def _hashes(values: object) -> Hashes:
    if type(values) is not list:
        raise MalformedMessageError(f"block hashes {shown(values)}: expected a list of integers")
    try:
        # One float among them makes all of them floats: numpy would round them silently.
        hashes = np.array(values, np.uint64) if set(map(type, values)) <= {int} else None
    except (OverflowError, ValueError, TypeError):
        hashes = None
    if hashes is None or not hashes.all():
        raise MalformedMessageError(
            f"block hashes {shown(values)}: expected integers from 1 to 2**64 - 1"
        )
    if len(set(values)) != len(values):
        raise MalformedMessageError(f"block hashes {shown(values)}: one of them is there twice")
    return hashes


def _tokens(values: object) -> Int32Array:
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise MalformedMessageError(f"token ids {shown(values)}: expected a list of integers")
    if values and not 0 <= min(values) <= max(values) <= _MAX_TOKEN:
        raise MalformedMessageError(f"token ids from {min(values)} to {max(values)}")
    return np.array(values, np.int32)


def _number(name: str, value: object, least: int = 0, most: int = _MAX_TOKEN) -> int:
    if type(value) is not int or not least <= value <= most:
        raise MalformedMessageError(
            f"{name} of a cache event is {shown(value)}: expected {least} to {most}"
        )
    return value


def _text(name: str, value: object) -> str | None:
    if value is not None and type(value) is not str:
        raise MalformedMessageError(f"{name} of a cache event is {shown(value)}: expected text")
    return value


def _extra_keys(values: object, num_blocks: int) -> tuple[tuple[RouterKey, ...] | None, ...]:
    """Return the extra keys of each block; empty if no block has any."""
    if values is None:
        return ()
    if type(values) is not list or len(values) != num_blocks:
        raise MalformedMessageError(
            f"extra keys {shown(values)} for {num_blocks} blocks: expected an entry for each"
        )
    return tuple(None if keys is None else _block_keys(keys) for keys in values)


def _block_keys(keys: object) -> tuple[RouterKey, ...]:
    if type(keys) is not list:
        raise MalformedMessageError(f"extra keys of a block are {shown(keys)}: expected a list")
    found: list[RouterKey] = []
    for key in keys:
        parts = key if type(key) is list else [key]
        if not parts or not set(map(type, parts)) <= {str, int}:
            raise MalformedMessageError(f"extra key {shown(key)}: expected names and numbers")
        found.append(tuple(parts) if type(key) is list else key)
    return tuple(found)
