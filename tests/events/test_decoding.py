"""Payloads from outside: valid ones are decoded, all others are errors."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from kvcache.base.errors import MalformedMessageError
from kvcache.events import EventCodec
from kvcache.events.decoding import decode_batch
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent

STORED = StoredEvent(
    np.array([2**64 - 1, 7], np.uint64),
    5,
    np.arange(8, dtype=np.int32),
    4,
    "CPU",
    "adapter",
    (("adapter", ("image", 3)), None),
    2,
    "sliding_window",
    128,
    "s3cret",
)
PLAIN = StoredEvent(np.array([9], np.uint64), None, np.arange(4, dtype=np.int32), 4, "GPU")
REMOVED = RemovedEvent(np.array([7, 8], np.uint64), "STORAGE", 1)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_what_was_encoded_is_decoded(encoding: Any) -> None:
    codec = EventCodec((), data_parallel_rank=3, encoding=encoding)
    events: list[WireEvent] = [ClearedEvent(), STORED, PLAIN, REMOVED]
    batch = decode_batch(codec.encode_wire(1.5, events))
    assert (batch.time_s, batch.data_parallel_rank, batch.is_restatement) == (1.5, 3, True)
    assert [plain(event) for event in batch.events] == [plain(event) for event in events]


def test_an_empty_batch_is_a_heartbeat() -> None:
    batch = decode_batch(EventCodec(()).encode_wire(2.0, ()))
    assert (list(batch.events), batch.is_restatement) == ([], False)


def plain(event: WireEvent) -> list[Any]:
    if isinstance(event, ClearedEvent):
        return ["cleared"]
    return [v.tolist() if isinstance(v, np.ndarray) else v for v in vars(event).values()]


def stored(**changes: Any) -> dict[str, Any]:
    fields = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**fields, **changes}


def test_keys_that_are_not_known_are_passed_over() -> None:
    payload = msgpack.packb([1.0, [stored(something="new", block_mask=None)], 0])
    (event,) = decode_batch(payload).events
    assert isinstance(event, StoredEvent)


WRONG_EVENTS = {
    "an unknown tag": {"type": "BlockMoved", "block_hashes": [1], "medium": "GPU"},
    "no tag": {"block_hashes": [1], "medium": "GPU"},
    "text for an event": "BlockStored",
    "hash zero": stored(block_hashes=[0, 1]),
    "a negative hash": stored(block_hashes=[-1, 1]),
    "a hash above 64 bits": None,
    "a hash that is a float": stored(block_hashes=[1, 2.0]),
    "a hash that is a truth value": stored(block_hashes=[True, 2]),
    "hashes that are bytes": stored(block_hashes=[b"1", b"2"]),
    "a hash twice": stored(block_hashes=[2, 2]),
    "no hashes": stored(block_hashes=[]),
    "too few tokens": stored(token_ids=[1, 2, 3]),
    "a negative token": stored(token_ids=[1, 2, 3, -4]),
    "a token beyond 31 bits": stored(token_ids=[1, 2, 3, 2**31]),
    "block size zero": stored(block_size=0),
    "a parent that is zero": stored(parent_block_hash=0),
    "no medium": stored(medium=None),
    "extra keys of another number": stored(extra_keys=[["a"]]),
    "an extra key that is a map": stored(extra_keys=[[{}], None]),
    "a salt that is a number": stored(cache_salt=4),
    "a group that is text": stored(group_idx="0"),
}


@pytest.mark.parametrize("name", [name for name, event in WRONG_EVENTS.items() if event])
def test_an_event_that_is_none_is_an_error(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        decode_batch(msgpack.packb([1.0, [stored(), WRONG_EVENTS[name]], 0]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb([1.0, []]),
        msgpack.packb([1.0, [], 0, 0]),
        msgpack.packb([1.0, [], None]),
        msgpack.packb(["now", [], 0]),
        msgpack.packb([1.0, {}, 0]),
        msgpack.packb([1.0, [], -1]),
        b"\x91" * 2000,
    ],
)
def test_a_payload_that_is_none_is_an_error(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode_batch(payload)


def test_a_payload_beyond_the_limit_is_not_looked_at() -> None:
    payload = EventCodec(()).encode_wire(1.0, [PLAIN])
    with pytest.raises(MalformedMessageError, match=f"{len(payload)} bytes, 10 are read"):
        decode_batch(payload, max_bytes=10)
