"""Payloads of packed digests are, byte by byte, those of the plain structure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from kvcache.base.errors import InvalidInputError
from kvcache.core import BlocksRemoved, BlocksStored, CacheEvent
from kvcache.events import EventCodec
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request import Namespace
from kvcache.specs import FullAttentionSpec, KVCacheGroupSpec

GROUPS = (KVCacheGroupSpec(("layer.0",), FullAttentionSpec(4, num_kv_heads=1, head_size=8)),)
SALTED = Namespace(0, None, "s3cret", None)
PLAIN = Namespace(0, None, None, None)

WIDE_TOKENS = (1 << 16, 1 << 31)
"""Token ids that msgpack writes in 32 bits by itself; hashes of random digests take 64."""


class Events:
    """Random events, with the plain structure that routers shall read."""

    def __init__(self, seed: int, tokens: tuple[int, int]) -> None:
        self.random = np.random.default_rng(seed)
        self.token_range = tokens

    def digests(self, count: int) -> PackedDigests:
        size = 16 if self.random.random() < 0.1 else 32
        return PackedDigests(self.random.bytes(size * count), size)

    def stored(self) -> tuple[BlocksStored, dict[str, Any]]:
        count, size = int(self.random.integers(1, 40)), int(self.random.integers(1, 20))
        digests = self.digests(count)
        parent = self.digests(1)[0] if self.random.random() < 0.5 else None
        tokens = self.random.integers(*self.token_range, count * size, dtype=np.int32)
        namespace = SALTED if self.random.random() < 0.5 else PLAIN
        event = BlocksStored(0, "device", digests, parent, tokens, size, namespace)
        plain = {
            "type": "BlockStored",
            "block_hashes": [low(digest) for digest in digests],
            "parent_block_hash": None if parent is None else low(parent),
            "token_ids": tokens.tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "locality": "LOCAL",
        }
        return event, plain if namespace.salt is None else {**plain, "cache_salt": namespace.salt}

    def removed(self) -> tuple[BlocksRemoved, dict[str, Any]]:
        digests = self.digests(int(self.random.integers(1, 40)))
        plain = {
            "type": "BlockRemoved",
            "block_hashes": [low(digest) for digest in digests],
            "medium": "GPU",
            "group_idx": 0,
        }
        return BlocksRemoved(0, "device", digests), plain

    def batches(self, count: int) -> Iterator[tuple[list[CacheEvent], list[dict[str, Any]]]]:
        for _ in range(count):
            pairs = [
                self.stored() if self.random.random() < 0.7 else self.removed()
                for _ in range(int(self.random.integers(0, 8)))
            ]
            yield [event for event, _ in pairs], [plain for _, plain in pairs]


def low(digest: BlockHash) -> int:
    return int.from_bytes(digest, "big") % 2**64


def unpacked(event: CacheEvent) -> CacheEvent:
    """The same event with a tuple of digests."""
    if isinstance(event, BlocksStored):
        return BlocksStored(
            event.group,
            event.medium,
            tuple(event.digests),
            event.parent_digest,
            event.token_ids,
            event.block_size,
            event.namespace,
        )
    assert isinstance(event, BlocksRemoved)
    return BlocksRemoved(event.group, event.medium, tuple(event.digests))


@pytest.mark.seeds(4)
def test_wide_integers_give_the_bytes_that_msgpack_gives_for_the_plain_structure(
    seed: int,
) -> None:
    codec = EventCodec(GROUPS)
    for events, plain in Events(seed, WIDE_TOKENS).batches(30):
        assert codec.encode(1.5, events) == msgpack.packb([1.5, plain, 0])


@pytest.mark.seeds(4)
def test_integers_of_any_size_decode_to_the_plain_structure(seed: int) -> None:
    codec = EventCodec(GROUPS)
    for events, plain in Events(seed, (0, 300)).batches(30):
        assert msgpack.unpackb(codec.encode(1.5, events)) == [1.5, plain, 0]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_packed_and_plain_digests_give_the_same_bytes(encoding: Any) -> None:
    codec = EventCodec(GROUPS, encoding=encoding)
    for events, _ in Events(9, (0, 1 << 31)).batches(30):
        payload = codec.encode(1.5, events)
        assert payload == codec.encode(1.5, [unpacked(e) for e in events])
        mixed = [unpacked(e) if i % 2 else e for i, e in enumerate(events)]
        assert payload == codec.encode(1.5, mixed)


def test_a_payload_does_not_depend_on_those_before_it_however_large_they_were() -> None:
    """Memory is reused: between payloads, and within one that outgrows it."""
    codec = EventCodec(GROUPS)
    events = Events(3, WIDE_TOKENS)
    small, plain = events.stored()
    digests = events.digests(70_000)
    tokens = events.random.integers(*WIDE_TOKENS, 70_000 * 16, dtype=np.int32)
    large = BlocksStored(0, "device", digests, None, tokens, 16, PLAIN)
    expected = msgpack.packb([1.5, [plain], 0])
    kept = codec.encode(1.5, [small])
    first, second, third = msgpack.unpackb(codec.encode(1.5, [small, large, small]))[1]
    assert first == third == plain
    assert second["token_ids"] == tokens.tolist()
    assert second["block_hashes"] == [low(digest) for digest in digests]
    assert kept == codec.encode(1.5, [small]) == expected


def test_a_refused_batch_leaves_nothing_behind() -> None:
    codec = EventCodec(GROUPS)
    event, plain = Events(4, WIDE_TOKENS).stored()
    wrong = BlocksRemoved(0, "tape", PackedDigests(bytes(32), 32))
    with pytest.raises(InvalidInputError):
        codec.encode(1.5, [event, wrong])
    assert codec.encode(1.5, [event]) == msgpack.packb([1.5, [plain], 0])


def test_a_packed_digest_whose_hash_would_be_zero_stands_in_as_one() -> None:
    digests = PackedDigests(b"\x07" * 24 + bytes(8) + b"\x07" * 32, 32)
    payload = EventCodec(GROUPS).encode(1.5, [BlocksRemoved(0, "device", digests)])
    assert msgpack.unpackb(payload)[1][0]["block_hashes"] == [1, 0x0707070707070707]


def test_digests_that_are_no_whole_words_are_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        EventCodec(GROUPS).encode(1.5, [BlocksRemoved(0, "device", PackedDigests(bytes(24), 12))])
    assert str(caught.value) == (
        "2 digests of 24 bytes, the first of 12: digests of one event come from one algorithm "
        "and are whole 64-bit words"
    )
    event, _ = Events(4, WIDE_TOKENS).stored()
    tokens = event.token_ids[: event.block_size]
    orphan = BlocksStored(
        0, "device", event.digests[:1], BlockHash(b"123"), tokens, event.block_size, PLAIN
    )
    with pytest.raises(InvalidInputError) as caught:
        EventCodec(GROUPS).encode(1.5, [orphan])
    assert str(caught.value) == "a digest of 3 bytes: digests are whole 64-bit words"
