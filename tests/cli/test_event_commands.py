"""`kvcache watch` and `kvcache events dump` on the real sockets of a cluster in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import KVCacheClient
from actors.dashboard import observer
from actors.local import LocalCluster
from kvcache import NewRequest, StepRequest
from kvcache.config import load_config, parse_config
from kvcache.events.codec import NUM_ALWAYS, REMOVED_KEYS, STORED_KEYS
from kvcache.events.mirror import CacheMirror
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent
from tests.cli.commands import KVCACHE, run
from tests.cli.local_access import LocalAccess
from tests.waiting import wait_until

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BLOCKS = 6
PROMPT_TOKENS = BLOCKS * 16
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    plain = load_config(CONFIGS / "cpu_tp2.yaml").model_dump()
    plain["cache"]["num_blocks"] = 40
    plain["model"]["max_model_len"] = 256
    anywhere = "tcp://127.0.0.1:0"
    plain["events"] = {
        "enabled": True,
        "endpoint": anywhere,
        "replay_endpoint": anywhere,
        "heartbeat_s": 0.2,
    }
    with LocalCluster(parse_config(plain, "test")) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> KVCacheClient:
    made = cluster.client()
    for i in range(3):
        play(made, f"first-{i}", 1000 * i, salt="pepper" if i == 2 else None)
    return made


def play(client: KVCacheClient, name: str, first_token: int, salt: str | None = None) -> None:
    prompt = np.arange(first_token, first_token + PROMPT_TOKENS, dtype=np.int32)
    new = NewRequest(name, prompt, max_new_tokens=PROMPT_TOKENS, cache_salt=salt)
    completed = -1
    for request in ({"new": (new,)}, {"finished": (name,)}, {}):
        step = client.submit(StepRequest(**request, completed_step=completed))
        client.wait_finished(step)
        completed = step


def addresses(cluster: LocalCluster) -> list[str]:
    there = cluster.coordinator.statistics().events
    return ["--endpoint", there["endpoint"], "--replay-endpoint", there["replay_endpoint"]]


def watch_until(cluster: LocalCluster, holds: Callable[[list[str]], bool], *options: str) -> None:
    """Watch for a second, repeatedly, until the output satisfies `holds`."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        shown, _ = run("watch", *addresses(cluster), "--for", "1.1", *options)
        if holds(shown.splitlines()):
            return
        assert time.monotonic() < give_up_s, shown


@contextmanager
def playing(client: KVCacheClient) -> Iterator[None]:
    """Play one request after another in a thread, so that blocks come and go."""
    is_over = threading.Event()

    def go_on() -> None:
        number = 0
        while not is_over.is_set():
            play(client, f"on-{number}", 5000 + 100 * number)
            number += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def followed(cluster: LocalCluster) -> KVEventSubscriber:
    _, endpoint, _, replay_endpoint = addresses(cluster)
    subscriber = KVEventSubscriber(endpoint, replay_endpoint)
    wait_until(lambda: subscriber.is_exact, meanwhile=lambda: subscriber.poll(0.05))
    return subscriber


def event_of(line: dict[str, Any]) -> WireEvent:
    """Return the event of a dumped line, with all its fields."""
    if line["type"] == "AllBlocksCleared":
        return ClearedEvent()
    hashes = np.array(line["block_hashes"], np.uint64)
    if line["type"] == "BlockRemoved":
        return RemovedEvent(hashes, line["medium"], line.get("group_idx", 0))
    return StoredEvent(
        hashes,
        line["parent_block_hash"],
        np.array(line["token_ids"], np.int32),
        line["block_size"],
        line["medium"],
        line["lora_name"],
        tuple(None if keys is None else tuple(keys) for keys in line.get("extra_keys", ())),
        line.get("group_idx", 0),
        line.get("kv_cache_spec_kind"),
        line.get("kv_cache_spec_sliding_window"),
        line.get("cache_salt"),
    )


def test_a_dump_has_the_whole_state(cluster: LocalCluster, client: KVCacheClient) -> None:
    shown, _ = run("events", "dump", *addresses(cluster))
    lines = [json.loads(line) for line in shown.splitlines()]
    assert lines[0]["type"] == "AllBlocksCleared"
    assert len({line["seq"] for line in lines}) == 1
    mirror = CacheMirror()
    mirror.apply([event_of(line) for line in lines])
    with followed(cluster) as subscriber:
        assert mirror.checksum == subscriber.checksum
        assert mirror.num_blocks() == subscriber.statistics().num_blocks


def test_dumped_fields_are_those_of_the_wire(cluster: LocalCluster, client: KVCacheClient) -> None:
    shown, _ = run("events", "dump", *addresses(cluster))
    lines = [json.loads(line) for line in shown.splitlines()]
    keys = {"BlockStored": STORED_KEYS, "BlockRemoved": REMOVED_KEYS, "AllBlocksCleared": ()}
    for line in lines:
        there = set(line) - {"seq", "rank", "time_s", "type"}
        known = keys[line["type"]]
        assert set(known[: NUM_ALWAYS[line["type"]]]) <= there <= set(known)
    salted = [line for line in lines if line.get("cache_salt") == "pepper"]
    assert [tokens for line in salted for tokens in line["token_ids"]] == list(
        range(2000, 2000 + PROMPT_TOKENS)
    )
    assert "pepper" in salted[0]["extra_keys"][0]


def test_a_dump_goes_on_with_what_happens(cluster: LocalCluster, client: KVCacheClient) -> None:
    with playing(client):
        shown, _ = run("events", "dump", *addresses(cluster), "--follow", "--limit", "60")
    lines = [json.loads(line) for line in shown.splitlines()]
    assert len(lines) == 60
    assert {"BlockStored", "BlockRemoved"} <= {line["type"] for line in lines}
    numbers = [line["seq"] for line in lines]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 5


def test_a_limit_cuts_the_state(cluster: LocalCluster, client: KVCacheClient) -> None:
    shown, _ = run("events", "dump", *addresses(cluster), "--limit", "2")
    assert len(shown.splitlines()) == 2


def test_a_reader_that_has_had_enough_is_no_error(
    cluster: LocalCluster, client: KVCacheClient
) -> None:
    command = [*KVCACHE, "events", "dump", *addresses(cluster)]
    with subprocess.Popen(
        [*command, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert b"AllBlocksCleared" in process.stdout.readline()
        process.stdout.close()
        with playing(client):
            assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == b""


def test_a_watch_says_once_a_second_what_comes(
    cluster: LocalCluster, client: KVCacheClient
) -> None:
    def is_right(shown: list[str]) -> bool:
        first, last = json.loads(shown[0]), json.loads(shown[-1])
        assert (last["hit_rate"], last["publisher_seq"], last["is_same_state"]) == (None,) * 3
        if not (first["is_exact"] and last["is_exact"] and last["top"]["longest"]):
            return False
        assert last["num_restatements"] == 1
        assert last["num_different_blocks"] == last["blocks"]["GPU"] <= 40
        longest = last["top"]["longest"][0]
        assert (longest["num_blocks"], longest["num_tokens"]) == (BLOCKS, PROMPT_TOKENS)
        return first["per_second"]["stored_blocks"] > 0 < first["per_second"]["removed_blocks"]

    with playing(client):
        watch_until(cluster, is_right, "--json")


def test_a_watch_of_a_quiet_cache_has_its_checksum(
    cluster: LocalCluster, client: KVCacheClient
) -> None:
    with followed(cluster) as subscriber:
        digits = f"{subscriber.checksum:016x}"
        watch_until(cluster, lambda shown: json.loads(shown[-1])["checksum"] == digits, "--json")


def test_a_watch_shows_tables(cluster: LocalCluster, client: KVCacheClient) -> None:
    texts = ("position", ", exact", "blocks stored", "longest", "GPU")
    watch_until(cluster, lambda shown: all(text in "".join(shown) for text in texts))


def test_a_watch_ends_cleanly_on_ctrl_c(cluster: LocalCluster, client: KVCacheClient) -> None:
    command = [*KVCACHE, "watch", *addresses(cluster), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "is_exact" in json.loads(process.stdout.readline())
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize("command", [("watch",), ("events", "dump")])
def test_choices_that_contradict_each_other_are_refused(command: tuple[str, ...]) -> None:
    _, error = run(*command, "--endpoint", "tcp://127.0.0.1:1", exit_code=2)
    assert "--replay-endpoint" in error
    places = ("--endpoint", "tcp://127.0.0.1:1", "--replay-endpoint", "tcp://127.0.0.1:1")
    _, error = run(*command, "name", *places, exit_code=2)
    assert "not both" in error
    _, error = run(*command, "--endpoint", "x", "--replay-endpoint", "y", exit_code=2)
    assert "is not an address" in error
    assert len(error.splitlines()) == 1


def test_the_dashboard_sees_the_pool_the_tree_and_the_events(
    cluster: LocalCluster, client: KVCacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "INTERVAL_S", 0.05)
    with observer.Observer(LocalAccess(cluster)) as watching:
        number, picture = 0, dict[str, Any]()
        give_up_s = time.monotonic() + PATIENCE_S
        while not (picture.get("traffic") and picture["events"].get("is_exact")):
            assert time.monotonic() < give_up_s, picture
            number, text = watching.wait_newer(number, 10.0)
            picture = json.loads(text)
    assert picture["state"] == "ready" and picture["facts"]["running"] == 0
    assert picture["tree"]["num_prefixes"] >= 3
    assert sum(picture["pool"]["counts"].values()) == picture["pool"]["num_blocks"] > 0
    assert sum(picture["events"]["blocks"].values()) > 0
    assert picture["traffic"][-1]["asked"] == 0
