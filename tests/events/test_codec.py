"""Cache events as payloads: their decoded values, for every kind of event and both encodings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import ConfigurationError, InvalidInputError
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.events import EventCodec
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request import LoRARequest, Namespace
from kvcache.requests.request_content import lora_label
from kvcache.specs import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, sliding_window=9)
GROUPS = (KVCacheGroupSpec(("layer.0",), FULL), KVCacheGroupSpec(("layer.1",), WINDOW))
PLAIN = Namespace(0, None, None, None)
VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "kv_events_vllm.json"


def digest(low: int, high: int = 7) -> BlockHash:
    """A digest of 32 bytes that ends in `low`."""
    return BlockHash(high.to_bytes(24, "big") + low.to_bytes(8, "big"))


def stored(
    *lows: int, parent: int | None = 10, namespace: Namespace = PLAIN, **fields: Any
) -> BlocksStored:
    """Blocks of 4 tokens that count on from 0."""
    return BlocksStored(
        group=fields.pop("group", 0),
        medium=fields.pop("medium", "device"),
        digests=tuple(digest(low) for low in lows),
        parent_digest=None if parent is None else digest(parent),
        token_ids=int32_array(range(4 * len(lows))),
        block_size=4,
        namespace=namespace,
        **fields,
    )


def removed(*lows: int) -> BlocksRemoved:
    return BlocksRemoved(0, "device", tuple(digest(low) for low in lows))


def decoded(*events: CacheEvent, encoding: Any = "map") -> list[Any]:
    codec = EventCodec(GROUPS, encoding=encoding)
    time_s, got, rank = msgpack.unpackb(codec.encode(1.5, events))
    assert (time_s, rank) == (1.5, 0)
    assert isinstance(got, list)
    return got


VECTOR_EVENTS: dict[str, tuple[float, int, list[CacheEvent]]] = {
    "one BlockStored, two blocks of 4": (1.5, 0, [stored(11, 12)]),
    "one BlockRemoved": (1.5, 0, [removed(11, 12)]),
    "AllBlocksCleared then BlockStored": (2.0, 3, [AllBlocksCleared(), stored(11, 12)]),
    "empty batch": (3.0, 0, []),
}


@pytest.mark.parametrize("name", VECTOR_EVENTS)
def test_a_payload_decodes_to_the_values_that_the_peer_encodes(name: str) -> None:
    if not VECTORS.exists():
        pytest.skip(f"NOT COMPARED with the peer's payloads: {VECTORS} is absent")
    cases = {case["name"]: case for case in json.loads(VECTORS.read_text())["cases"]}
    time_s, rank, events = VECTOR_EVENTS[name]
    payload = EventCodec(GROUPS, data_parallel_rank=rank).encode(time_s, events)
    assert msgpack.unpackb(payload) == msgpack.unpackb(bytes.fromhex(cases[name]["hex"]))


def test_every_case_of_the_peer_is_compared() -> None:
    if not VECTORS.exists():
        pytest.skip(f"NOT COMPARED with the peer's payloads: {VECTORS} is absent")
    assert {case["name"] for case in json.loads(VECTORS.read_text())["cases"]} == set(VECTOR_EVENTS)


def test_the_largest_values_arrive_as_they_are() -> None:
    event = BlocksStored(
        0, "device", (digest(2**64 - 1),), None, np.full(4, 2**31 - 1, np.int32), 4, PLAIN
    )
    (got,) = decoded(event)
    assert got["block_hashes"] == [2**64 - 1]
    assert got["token_ids"] == [2**31 - 1] * 4


def test_a_hash_is_never_zero_and_the_same_wherever_the_digest_appears() -> None:
    got = decoded(stored(0, 5, parent=3), stored(6, parent=0), removed(0))
    assert got[0]["block_hashes"] == [1, 5]
    assert got[1]["parent_block_hash"] == 1
    assert got[2]["block_hashes"] == [1]


def test_a_hash_stands_only_once_in_a_stored_event_and_no_token_is_lost() -> None:
    first, second = decoded(stored(11, 12, 11, 13))
    assert (first["block_hashes"], first["parent_block_hash"]) == ([11, 12], 10)
    assert (second["block_hashes"], second["parent_block_hash"]) == ([11, 13], 12)
    assert first["token_ids"] + second["token_ids"] == list(range(16))


def test_a_hash_stands_only_once_in_a_removed_event() -> None:
    (got,) = decoded(removed(11, 12, 11))
    assert got["block_hashes"] == [11, 12]


def test_keys_without_a_value_are_there_and_optional_ones_are_not() -> None:
    (got,) = decoded(stored(11, parent=None))
    assert got == {
        "type": "BlockStored",
        "block_hashes": [11],
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
    }


def test_adapters_items_and_salts_are_told_per_block_and_the_salt_once_more() -> None:
    namespace = Namespace(0, lora_label(LoRARequest("cat", "/cat")), "s3cret", None)
    lora = ("lora", "cat", "/cat")
    keys = ((lora, ("mm", "img", -2), ("cache_salt", "s3cret")), (lora,), None)
    (got,) = decoded(stored(1, 2, 3, namespace=namespace, extra_keys=keys))
    assert got["extra_keys"] == [["cat", ["img", -2], "s3cret"], ["cat"], None]
    assert (got["lora_name"], got["lora_id"], got["cache_salt"]) == ("cat", None, "s3cret")


def test_extra_keys_are_left_out_where_no_block_has_any() -> None:
    (got,) = decoded(stored(1, 2, extra_keys=(None, None)))
    assert "extra_keys" not in got


def test_extra_keys_stay_with_their_blocks_when_an_event_is_cut() -> None:
    keys = ((("mm", "a", 0),), None, (("mm", "b", 0),))
    first, second = decoded(stored(11, 12, 11, extra_keys=keys))
    assert first["extra_keys"] == [[["a", 0]], None]
    assert second["extra_keys"] == [[["b", 0]]]


def test_a_window_group_tells_its_index_kind_and_window() -> None:
    (got,) = decoded(stored(11, group=1))
    assert got["group_idx"] == 1
    assert got["kv_cache_spec_kind"] == "sliding_window"
    assert got["kv_cache_spec_sliding_window"] == 9


@pytest.mark.parametrize(("medium", "name"), [("device", "GPU"), ("host", "CPU")])
def test_media_have_the_names_that_routers_know(medium: str, name: str) -> None:
    assert decoded(stored(11, medium=medium))[0]["medium"] == name


def test_arrays_hold_the_same_values_by_position_without_trailing_nulls() -> None:
    namespace = Namespace(0, None, "salt", None)
    got = decoded(
        stored(11, 12),
        stored(13, parent=12, namespace=namespace, extra_keys=((("cache_salt", "salt"),),)),
        removed(11),
        AllBlocksCleared(),
        encoding="array",
    )
    hashes, tokens = [11, 12], list(range(8))
    head = ["BlockStored", hashes, 10, tokens, 4, None, "GPU", None]
    assert got[0] == [*head, None, 0, "full_attention", None, "LOCAL"]
    assert got[1][8:] == [[["salt"]], 0, "full_attention", None, "LOCAL", "salt"]
    assert got[2] == ["BlockRemoved", [11], "GPU", 0]
    assert got[3] == ["AllBlocksCleared"]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_events_of_many_kinds_in_turn_each_tell_their_own(encoding: Any) -> None:
    # More salts than the codec remembers, twice; a window whose byte stands for something else.
    groups = (GROUPS[0], KVCacheGroupSpec(("w",), SlidingWindowSpec(4, 1, 8, sliding_window=0xC1)))
    salts = [None, *(f"salt {i % 70}" for i in range(140))]
    events = [
        stored(11 + i, parent=i, namespace=Namespace(0, None, salt, None), group=i % 2)
        for i, salt in enumerate(salts)
    ]
    codec = EventCodec(groups, encoding=encoding)
    got = msgpack.unpackb(codec.encode(1.5, events))[1]
    alone = [EventCodec(groups, encoding=encoding).encode(1.5, [event]) for event in events]
    assert got == [msgpack.unpackb(payload)[1][0] for payload in alone]
    if encoding == "map":
        assert [event.get("cache_salt") for event in got] == salts
        assert {event["kv_cache_spec_sliding_window"] for event in got[1::2]} == {0xC1}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            BlocksStored(0, "device", (digest(1),), None, int32_array([1, 2]), 4, PLAIN),
            "2 tokens for 1 stored blocks of 4 tokens: a stored event states all tokens of full "
            "blocks",
        ),
        (
            BlocksStored(0, "device", (), None, int32_array([]), 4, PLAIN),
            "0 tokens for 0 stored blocks of 4 tokens: a stored event states all tokens of full "
            "blocks",
        ),
        (
            BlocksRemoved(2, "device", (digest(1),)),
            "event of KV cache group 2: there are groups 0 to 1",
        ),
        (
            BlocksRemoved(0, "tape", (digest(1),)),
            "event of medium 'tape': there are 'device', 'host', 'storage'",
        ),
        (
            BlocksRemoved(0, "device", (digest(1), BlockHash(b"12345678"))),
            "2 digests of 40 bytes, the first of 32: digests of one event come from one algorithm "
            "and are whole 64-bit words",
        ),
        (object(), None),
    ],
)
def test_an_event_that_cannot_be_meant_is_refused(event: Any, message: str | None) -> None:
    with pytest.raises(InvalidInputError) as caught:
        EventCodec(GROUPS).encode(1.5, [event])
    assert message is None or str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel_rank": -1}, "data_parallel_rank is -1: pass an integer from 0 to 1048576"),
        (
            {"data_parallel_rank": None},
            "data_parallel_rank is None: pass an integer from 0 to 1048576",
        ),
        (
            {"data_parallel_rank": 2**20 + 1},
            "data_parallel_rank is 1048577: pass an integer from 0 to 1048576",
        ),
        (
            {"encoding": "json"},
            "event encoding 'json': choose 'map', or 'array' for consumers that read positions",
        ),
    ],
)
def test_a_codec_that_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EventCodec(GROUPS, **arguments)
    assert str(caught.value) == message
