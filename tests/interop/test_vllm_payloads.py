"""Payloads of vLLM are read by us, and ours by vLLM's types, to equal values.

The types are declared as in vLLM's documentation and compared with payloads that vLLM has encoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcache.events.decoding import decode_batch
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent
from tests.interop.frame_recorder import FrameRecorder
from tests.interop.published_cluster import PublishedCluster
from tests.interop.vllm_structs import BATCHES, MapBatch
from tests.interop.wire_rules import WireRules

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "kv_events_vllm.json"


def vectors() -> dict[str, bytes]:
    if not VECTORS.exists():
        pytest.skip(f"NOT COMPARED with the peer's payloads: {VECTORS} is absent")
    cases = json.loads(VECTORS.read_text())["cases"]
    return {case["name"]: bytes.fromhex(case["hex"]) for case in cases}


def as_typed(event: WireEvent) -> dict[str, Any]:
    """Return an event as vLLM's types name its parts."""
    if isinstance(event, ClearedEvent):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, RemovedEvent):
        return {
            "type": "BlockRemoved",
            "block_hashes": event.block_hashes.tolist(),
            "medium": event.medium,
            "group_idx": event.group_idx,
            "locality": None,
        }
    assert isinstance(event, StoredEvent)
    keys = [None if names is None else tuple(names) for names in event.extra_keys]
    return {
        "type": "BlockStored",
        "block_hashes": event.block_hashes.tolist(),
        "parent_block_hash": event.parent_block_hash,
        "token_ids": event.token_ids.tolist(),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": event.lora_name,
        "extra_keys": keys or None,
        "group_idx": event.group_idx,
        "kv_cache_spec_kind": event.spec_kind,
        "kv_cache_spec_sliding_window": event.sliding_window,
        "locality": "LOCAL",
    }


def typed_fields(event: Any) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    return {"type": type(event).__struct_config__.tag, **fields}


def require_equal(payload: bytes, encoding: str) -> int:
    """Compare both decoders' events of a payload; return how many there are."""
    ours = decode_batch(payload)
    theirs = msgspec.msgpack.decode(payload, type=BATCHES[encoding])
    assert (ours.time_s, ours.data_parallel_rank) == (theirs.ts, theirs.data_parallel_rank)
    assert list(map(as_typed, ours.events)) == list(map(typed_fields, theirs.events))
    return len(ours.events)


def test_the_types_encode_what_vllm_encodes() -> None:
    for name, payload in vectors().items():
        typed = msgspec.msgpack.decode(payload, type=MapBatch)
        again = msgspec.msgpack.encode(typed)
        assert again == payload, name


def test_payloads_of_vllm_are_read_to_equal_values() -> None:
    counts = {name: require_equal(payload, "map") for name, payload in vectors().items()}
    assert sorted(counts.values()) == [0, 1, 1, 2]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_what_we_publish_is_read_by_the_types_of_vllm(encoding: str) -> None:
    rules = WireRules(16, encoding)
    with (
        PublishedCluster(40, num_host_blocks=120, encoding=encoding) as cluster,
        FrameRecorder(cluster.endpoint, cluster.replay_endpoint) as recorder,
    ):
        recorder.listen()
        cluster.settle()
        for reply in recorder.ask(b"", cluster.first_number()):
            rules.on_reply(reply)
        cluster.load(15)
        cluster.settle()
        assert cluster.client.reset_prefix_cache()
        cluster.load(2)
        cluster.settle()
        assert cluster.subscriber.last_seq is not None
        recorder.follow(rules, cluster.subscriber.last_seq)
        (snapshot, _) = recorder.ask(b"", bytes(8))
    assert sum(require_equal(payload, encoding) for payload in rules.payloads.values()) > 40
    assert require_equal(snapshot[3], encoding) > 1
    for tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        assert rules.num_events[tag] > 0
