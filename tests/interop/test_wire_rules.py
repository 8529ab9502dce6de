"""Everything that a cluster publishes under random load follows the routers' rules.

The rules are in `wire_rules.py`, one by one with the router that needs them. They are checked on
recorded frames, live and requested ones, and the resulting state is compared with ours. Planted
mistakes show that each rule can be broken.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvcache import NewRequest, StepRequest
from tests.interop.frame_recorder import FrameRecorder
from tests.interop.published_cluster import PublishedCluster, fixed_places
from tests.interop.wire_rules import BrokenRule, WireRules

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "block_hashes_sha256_cbor.json"
TOPIC = b"kv@interop@tiny"


def number(seq: int) -> bytes:
    return struct.pack(">Q", seq)


def record(cluster: PublishedCluster) -> FrameRecorder:
    return FrameRecorder(cluster.endpoint, cluster.replay_endpoint)


def follow(cluster: PublishedCluster, recorder: FrameRecorder, rules: WireRules) -> None:
    """Check all published messages against the rules, and the resulting state against ours."""
    cluster.settle()
    assert cluster.subscriber.last_seq is not None
    recorder.follow(rules, cluster.subscriber.last_seq)
    assert {m: set(there) for m, there in rules.media.items() if there} == cluster.hashes()


def vectors() -> dict[str, Any]:
    if not VECTORS.exists():
        pytest.skip(f"NOT COMPARED with the peer's hashes: {VECTORS} is absent")
    found: dict[str, Any] = json.loads(VECTORS.read_text())
    return found


@pytest.mark.parametrize(
    ("seed", "encoding", "one_block", "num_host_blocks"),
    [
        (30, "map", False, 120),
        pytest.param(31, "array", True, 0, marks=pytest.mark.long),
        *(
            pytest.param(seed, encoding, one_block, num_host_blocks, marks=pytest.mark.long)
            for seed in (32, 33)
            for encoding in ("map", "array")
            for one_block in (False, True)
            for num_host_blocks in (0, 120)
        ),
    ],
)
def test_a_cluster_under_load_breaks_no_rule(
    tmp_path: Path, seed: int, encoding: str, one_block: bool, num_host_blocks: int
) -> None:
    rules = WireRules(16, encoding, one_block)
    directory = str(tmp_path) if num_host_blocks else None
    with (
        PublishedCluster(
            seed,
            num_host_blocks=num_host_blocks,
            directory=directory,
            encoding=encoding,
            publish_one_block_per_event=one_block,
        ) as cluster,
        record(cluster) as recorder,
    ):
        recorder.listen()
        cluster.settle()
        first = cluster.first_number()
        for reply in recorder.ask(b"", first):
            rules.on_reply(reply)
        for turn in range(3):
            cluster.load(10)
            if turn == 1:
                cluster.settle()
                assert cluster.client.reset_prefix_cache()
            follow(cluster, recorder, rules)
        # All messages are repeated on request, in either form of a request.
        seen = dict(rules.payloads)
        for request in ((b"", first), (first,)):
            again = WireRules(16, encoding, one_block)
            assert [again.on_reply(reply) for reply in recorder.ask(*request)][-1]
            assert seen.items() <= again.payloads.items()
            assert again.media == rules.media
        # A request for a dropped batch gets the whole state, under the newest number.
        fresh = WireRules(16, encoding, one_block)
        (snapshot, _) = recorder.ask(b"", number(0))
        fresh.on_reply(snapshot)
        assert fresh.last_seq >= rules.last_seq
        assert fresh.media == {m: there for m, there in rules.media.items() if there}
        for tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            assert rules.num_events[tag] > 0


def test_a_publisher_that_restarts_breaks_no_rule() -> None:
    rules = WireRules(16)
    with PublishedCluster(33, **fixed_places()) as cluster, record(cluster) as recorder:
        recorder.listen()
        for reply in recorder.ask(b"", number(0)):
            rules.on_reply(reply)
        assert rules.num_events == {"AllBlocksCleared": 1}
        cluster.load(8)
        cluster.settle()
        os.kill(cluster.statistics()["process_id"], signal.SIGKILL)
        cluster.load(4)
        cluster.wait_until(lambda: "last_seq" in cluster.statistics(), "another one is there")
        cluster.load(4)
        follow(cluster, recorder, rules)
        assert rules.num_events["AllBlocksCleared"] >= 2
        # The new publisher's first batch has the whole state, for existing subscribers.
        fresh = WireRules(16)
        for reply in recorder.ask(b"", cluster.first_number()):
            fresh.on_reply(reply)
        assert fresh.media == rules.media


def test_hashes_of_sha256_cbor_are_those_of_vllm() -> None:
    rules = WireRules(16, none_hash=vectors()["none_hash"])
    with (
        PublishedCluster(34, hash_algorithm="sha256_cbor") as cluster,
        record(cluster) as recorder,
    ):
        recorder.listen()
        cluster.settle()
        for reply in recorder.ask(b"", cluster.first_number()):
            rules.on_reply(reply)
        cluster.load(15)
        follow(cluster, recorder, rules)
        assert len(rules._digests) > 40


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_vectors_of_vllm_are_published_under_its_hashes(block_size: int) -> None:
    cases = [case for case in vectors()["cases"] if case["block_size"] == block_size]
    assert cases
    with PublishedCluster(35, hash_algorithm="sha256_cbor", block_size=block_size) as cluster:
        for i, case in enumerate(cases):
            step = cluster.client.submit(StepRequest(new=(vector_request(f"v{i}", case),)))
            cluster.client.wait_finished(step)
            step = cluster.client.submit(StepRequest(finished=(f"v{i}",), completed_step=step))
            cluster.client.wait_finished(step)
            cluster.client.wait_finished(cluster.client.submit(StepRequest(completed_step=step)))
        cluster.settle()
        published = cluster.hashes()["GPU"]
        for case in cases:
            expected = {int(text[-16:], 16) for text in case["hashes"]}
            assert expected <= published, case["name"]


def vector_request(name: str, case: dict[str, Any]) -> NewRequest:
    """A request with the extra keys of a case: items begin where the first block says."""
    keys = [tuple(key) for key in (case["extra_keys"] or [None])[0] or ()]
    named = {key[0]: key[1:] for key in keys}
    lora, salt = named.get("lora", (None, None)), named.get("cache_salt", (None,))
    items = [named["mm"]] if "mm" in named else []
    size = case["block_size"]
    return NewRequest(
        name,
        np.array(case["tokens"], np.int32),
        max_new_tokens=len(case["tokens"]),
        lora_name=lora[0],
        lora_path=lora[1],
        cache_salt=salt[0],
        mm_hashes=tuple(item[0] for item in items),
        mm_offsets=np.array([item[1] for item in items], np.int32),
        mm_lengths=np.array([size for _ in items], np.int32),
    )


def stored(**changes: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
        **changes,
    }


def removed(**changes: Any) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [12],
        "medium": "GPU",
        "group_idx": 0,
        **changes,
    }


def without(event: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != key}


def batch(*events: Any, seq: int = 1, rank: Any = 0) -> list[bytes]:
    return [TOPIC, number(seq), msgpack.packb([1.0, list(events), rank])]


NEXT = {"block_hashes": [13], "token_ids": [5, 6]}
LORA = {"lora_name": "poet", "extra_keys": [["poet"], ["poet"]]}
RIGHT: dict[str, list[bytes]] = {
    "a child": batch(stored(), stored(parent_block_hash=12, **NEXT)),
    "removals": batch(stored(), removed(), stored(medium="CPU"), removed(medium="CPU")),
    "a heartbeat": batch(),
    "an adapter": batch(stored(**LORA)),
    "a salt": batch(stored(cache_salt="s", extra_keys=[["s"], None])),
    "a restatement": batch({"type": "AllBlocksCleared"}, stored(), seq=9),
    "a child in a lower medium": batch(
        stored(), stored(medium="CPU", parent_block_hash=12, **NEXT)
    ),
    "a state with an orphan": batch(
        {"type": "AllBlocksCleared"}, stored(medium="CPU", parent_block_hash=99), seq=9
    ),
}
WRONG: dict[str, tuple[str, list[bytes]]] = {
    "two frames": ("llm-d: 2 frames", batch()[1:]),
    "a short number": ("dynamo: a number of 4 bytes", [TOPIC, b"\0" * 4, batch()[2]]),
    "a number too high": ("dynamo: number", batch(seq=2**63)),
    "a topic": ("llm-d: topic", [b"kv@interop@tiny@1", *batch()[1:]]),
    "a payload of two": ("aibrix: a payload", [*batch()[:2], msgpack.packb([1.0, []])]),
    "a payload of four": ("aibrix: a payload", [*batch()[:2], msgpack.packb([1.0, [], 0, 1])]),
    "no rank": ("llm-d: a rank of None", batch(rank=None)),
    "a whole time": ("dynamo: a time of 1", [*batch()[:2], msgpack.packb([1, [], 0])]),
    "a gap": ("dynamo: 3 follows 0", batch(seq=3)),
    "a tag": ("dynamo: an event of type", batch({"type": "BlockMoved"})),
    "positions": ("dynamo: an event that is no map", batch(["AllBlocksCleared"])),
    "a key missing": ("dynamo: BlockStored without", batch(without(stored(), "lora_id"))),
    "a key more": ("dynamo: BlockStored with ['session_id']", batch(stored(session_id="s"))),
    "a null": ("dynamo: BlockStored with ['extra_keys'] that", batch(stored(extra_keys=None))),
    "a hash in bytes": ("dynamo: hash b'", batch(stored(block_hashes=[11, b"12"]))),
    "hash zero": ("llm-d: hash 0", batch(stored(block_hashes=[11, 0]))),
    "parent zero": ("llm-d: hash 0", batch(stored(parent_block_hash=0))),
    "a hash twice": ("dynamo: a hash twice", batch(stored(block_hashes=[11, 11]))),
    "a hash below zero": ("llm-d: hash -1", batch(stored(block_hashes=[11, -1]))),
    "its own parent": ("dynamo: a block that is", batch(stored(parent_block_hash=12))),
    "no parent": ("every one: a child", batch(stored(parent_block_hash=99))),
    "child before parent": (
        "every one: a child",
        batch(stored(parent_block_hash=12, **NEXT), stored()),
    ),
    "an orphan in a lower medium": (
        "every one: a child",
        batch(stored(), stored(medium="CPU", parent_block_hash=99, **NEXT)),
    ),
    "a state with a child before its parent": (
        "every one: a child",
        batch(
            {"type": "AllBlocksCleared"},
            stored(medium="CPU", parent_block_hash=12, **NEXT),
            stored(medium="STORAGE"),
            seq=9,
        ),
    ),
    "half a block": ("dynamo: 3 tokens for 2 blocks", batch(stored(token_ids=[1, 2, 3]))),
    "no tokens": ("dynamo: 0 tokens", batch(stored(medium="CPU", token_ids=[]))),
    "a token below zero": ("dynamo: tokens", batch(stored(token_ids=[1, 2, 3, -4]))),
    "another size": ("dynamo: blocks of 4 tokens", batch(stored(block_size=4))),
    "no blocks": ("dynamo: a store of no", batch(stored(block_hashes=[], token_ids=[]))),
    "a small medium": ("dynamo: medium 'gpu'", batch(stored(medium="gpu"))),
    "no medium": ("dynamo: medium None", batch(stored(medium=None))),
    "remote": ("dynamo: locality", batch(stored(locality="REMOTE"))),
    "a window": ("llm-d: a window", batch(stored(kv_cache_spec_sliding_window=8))),
    "another kind": ("dynamo: kind", batch(stored(kv_cache_spec_kind="mamba"))),
    "another group": ("llm-d: group 1", batch(stored(group_idx=1))),
    "a salt in the event": ("llm-d: a salt", batch(stored(cache_salt="s"))),
    "another salt": ("llm-d: a salt", batch(stored(cache_salt="s", extra_keys=[["t"], None]))),
    "an adapter once": (
        "llm-d: an adapter",
        batch(stored(**{**LORA, "extra_keys": [["poet"], None]})),
    ),
    "keys of one block": ("llm-d: extra keys", batch(stored(extra_keys=[["poet"]]))),
    "stored twice": ("every one: 11 is stored twice", batch(stored(), stored())),
    "removed twice": ("every one: 12 is removed", batch(stored(), removed(), removed())),
    "removed elsewhere": ("every one: 12 is removed", batch(stored(), removed(medium="CPU"))),
    "one by one": (
        "every one: two removals",
        batch(stored(), removed(), removed(block_hashes=[11])),
    ),
}


def begun(**options: Any) -> WireRules:
    rules = WireRules(2, **options)
    rules.on_live(batch({"type": "AllBlocksCleared"}, seq=0))
    return rules


@pytest.mark.parametrize("name", RIGHT)
def test_valid_messages_break_no_rule(name: str) -> None:
    begun().on_live(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_every_rule_can_be_broken(name: str) -> None:
    text, frames = WRONG[name]
    with pytest.raises(BrokenRule, match="^" + escaped(text)):
        begun().on_live(frames)


def escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "[]()." else c for c in text)


def test_rules_of_some_routers_can_be_broken() -> None:
    with pytest.raises(BrokenRule, match="aibrix: 2 blocks in one event"):
        begun(one_block_per_event=True).on_live(batch(stored()))
    with pytest.raises(BrokenRule, match="mooncake: hash 11 instead of"):
        begun(none_hash="00" * 32).on_live(batch(stored()))
    with pytest.raises(BrokenRule, match="an event of no positions"):
        begun_by_position().on_live(batch(stored()))
    with pytest.raises(BrokenRule, match="BlockRemoved of 2 positions"):
        begun_by_position().on_live(batch(["BlockRemoved", [11]]))


def begun_by_position() -> WireRules:
    rules = WireRules(2, encoding="array")
    rules.on_live(batch(["AllBlocksCleared"], seq=0))
    return rules


WRONG_ANSWERS: dict[str, tuple[str, Callable[[list[bytes]], list[bytes]]]] = {
    "three frames": ("dynamo: an answer of 3 frames", lambda frames: frames[1:]),
    "a full first frame": ("dynamo: an answer does not begin", lambda f: [b"x", *f[1:]]),
    "another payload": ("dynamo: another batch 1", lambda f: [*f[:3], batch(removed())[2]]),
    "an end that says more": ("dynamo: an end mark", lambda f: [*f[:2], b"\xff" * 8, b"x"]),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_rules_of_answers_can_be_broken(name: str) -> None:
    text, change = WRONG_ANSWERS[name]
    rules = begun()
    rules.on_live(batch(stored()))
    right = [b"", *batch(stored())]
    assert not copy.deepcopy(rules).on_reply(right)
    with pytest.raises(BrokenRule, match=text):
        rules.on_reply(change(right))
