"""A cluster that publishes: real sockets, a real publisher's process, exact followers."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from actors import KVCacheClient
from actors.local import LocalCluster
from kvcache import NewRequest, StepRequest
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig, load_config, parse_config
from kvcache.events.prefix_index import PrefixIndex
from kvcache.events.subscriber import KVEventSubscriber
from tests import waiting

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ANY_PORT = "tcp://127.0.0.1:0"
PATIENCE_S = 60.0
PROMPT_TOKENS = 30 * 16


def config_of(**changes: Any) -> ClusterConfig:
    plain = load_config(CONFIGS / "cpu_tp2.yaml").model_dump()
    plain["cache"]["num_blocks"] = 100
    plain["model"]["max_model_len"] = 1024
    plain["events"] = {
        "enabled": True,
        "endpoint": ANY_PORT,
        "replay_endpoint": ANY_PORT,
        "heartbeat_s": 0.2,
        **changes.pop("events", {}),
    }
    return parse_config({**plain, **changes}, "test")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(config_of()) as made:
        yield made


def statistics(cluster: LocalCluster) -> dict[str, Any]:
    found = cluster.coordinator.statistics().events
    assert found is not None
    return found


def follow(cluster: LocalCluster) -> KVEventSubscriber:
    there = statistics(cluster)
    return KVEventSubscriber(there["endpoint"], there["replay_endpoint"])


def play(client: KVCacheClient, name: str, first_token: int, salt: str | None = None) -> None:
    prompt = np.arange(first_token, first_token + PROMPT_TOKENS, dtype=np.int32)
    new = NewRequest(name, prompt, max_new_tokens=PROMPT_TOKENS, cache_salt=salt)
    completed = -1
    for request in ({"new": (new,)}, {"finished": (name,)}, {}):
        step = client.submit(StepRequest(**request, completed_step=completed))
        client.wait_finished(step)
        completed = step


def wait_until(cluster: LocalCluster, holds: Callable[[], bool]) -> None:
    waiting.wait_until(holds, lambda: statistics(cluster), meanwhile=cluster.pump)


def is_exact(cluster: LocalCluster, subscriber: KVEventSubscriber) -> bool:
    subscriber.poll(0.0)
    there = statistics(cluster)
    return (
        subscriber.is_exact
        and subscriber.last_seq == there.get("last_seq")
        and subscriber.checksum == there["checksum"]
    )


def become_exact(cluster: LocalCluster, subscriber: KVEventSubscriber) -> None:
    wait_until(cluster, lambda: is_exact(cluster, subscriber))
    cluster.coordinator.manager.check()


def test_a_follower_knows_cached_and_evicted_blocks(cluster: LocalCluster) -> None:
    index = PrefixIndex()
    with follow(cluster) as subscriber, cluster.client() as client:
        for i in range(6):
            play(client, f"r{i}", 1000 * i)
        become_exact(cluster, subscriber)
        late = follow(cluster)
        wait_until(cluster, lambda: is_exact(cluster, late))
        for update in late.poll(0.0):
            index.follow("a", update)
        assert late.statistics().num_blocks == subscriber.statistics().num_blocks
        late.close()
    num_cached = cluster.coordinator.manager.statistics().core.num_sealed_blocks
    assert subscriber.statistics().num_blocks == {"GPU": num_cached}
    assert num_cached < 6 * 30


def test_prompts_are_found_by_their_tokens(cluster: LocalCluster) -> None:
    index = PrefixIndex()
    there = statistics(cluster)
    with (
        KVEventSubscriber(
            there["endpoint"],
            there["replay_endpoint"],
            on_update=lambda update: index.follow("a", update),
        ) as subscriber,
        cluster.client() as client,
    ):
        play(client, "plain", 0)
        play(client, "salted", 5000, salt="s3cret")
        become_exact(cluster, subscriber)
        prompt = np.arange(PROMPT_TOKENS + 7, dtype=np.int32)
        assert [m.device_blocks for m in index.match(prompt)] == [30]
        assert [m.device_blocks for m in index.match(prompt + 1)] == [0]
        assert [m.device_blocks for m in index.match(prompt + 5000)] == [0]
        salted = index.match(prompt + 5000, cache_salt="s3cret")
        assert [m.num_tokens for m in salted] == [PROMPT_TOKENS]


def test_a_restarted_coordinator_goes_on_above(cluster: LocalCluster) -> None:
    with follow(cluster) as subscriber:
        with cluster.client("before") as client:
            play(client, "r0", 0)
            become_exact(cluster, subscriber)
        before, known = subscriber.last_seq, subscriber.statistics().num_blocks
        cluster.coordinator.close()
        cluster.restart_coordinator()
        with follow(cluster) as late:
            become_exact(cluster, late)
            assert before is not None
            assert late.last_seq is not None
            assert late.last_seq > before
            assert late.statistics().num_blocks == known


@pytest.mark.launches
def test_a_publisher_that_is_killed_is_made_again_and_told_everything() -> None:
    ports = [free_port(), free_port()]
    config = config_of(
        events={
            "endpoint": f"tcp://127.0.0.1:{ports[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
        }
    )
    with LocalCluster(config) as cluster, follow(cluster) as subscriber, cluster.client() as client:
        play(client, "r0", 0)
        become_exact(cluster, subscriber)
        os.kill(statistics(cluster)["process_id"], signal.SIGKILL)
        play(client, "r1", 1000)
        wait_until(cluster, lambda: statistics(cluster)["num_publisher_restarts"] == 1)
        wait_until(cluster, lambda: statistics(cluster)["is_alive"])
        play(client, "r2", 2000)
        become_exact(cluster, subscriber)
        assert subscriber.statistics().num_blocks == {"GPU": 90}
        assert subscriber.statistics().num_restarts == 0  # numbers went on


def test_a_publisher_that_stands_still_delays_no_step(cluster: LocalCluster) -> None:
    with follow(cluster) as subscriber, cluster.client() as client:
        process_id = statistics(cluster)["process_id"]
        os.kill(process_id, signal.SIGSTOP)
        try:
            for i in range(8):
                play(client, f"r{i}", 1000 * i)
        finally:
            os.kill(process_id, signal.SIGCONT)
        become_exact(cluster, subscriber)


def test_a_publisher_that_falls_behind_gets_the_whole_state() -> None:
    config = config_of(events={"queue_bytes": "1KiB"})
    with LocalCluster(config) as cluster, follow(cluster) as subscriber, cluster.client() as client:
        process_id = statistics(cluster)["process_id"]
        os.kill(process_id, signal.SIGSTOP)
        try:
            name = 0
            while not statistics(cluster)["num_overflows"]:
                play(client, f"r{name}", 1000 * name)
                name += 1
        finally:
            os.kill(process_id, signal.SIGCONT)
        become_exact(cluster, subscriber)


def test_nonsense_on_both_sockets_changes_nothing(cluster: LocalCluster) -> None:
    there = statistics(cluster)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with follow(cluster) as subscriber, cluster.client() as client:
        dealer, pusher = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        for each, place in ((dealer, "replay_endpoint"), (pusher, "endpoint")):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(there[place])
        pusher.setsockopt(zmq.SUBSCRIBE, b"x" * 900)
        for frames in ([b"what"], [b"", b"12345678", b""], [b"x" * 500], [b"", b"1" * 9]):
            dealer.send_multipart(frames)
        wait_until(cluster, lambda: statistics(cluster).get("num_malformed_requests") == 4)
        dealer.send(b"y" * 100_000)
        play(client, "r0", 0)
        become_exact(cluster, subscriber)
        for each in (dealer, pusher):
            each.close()
    context.term()


@pytest.mark.launches
def test_a_port_that_is_taken_is_named_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"{place}.*events.endpoint"):
            LocalCluster(config_of(events={"endpoint": place}))


@pytest.mark.parametrize("place", ["127.0.0.1:5557", "tcp://127.0.0.1", "tcp://a:70000", "ipc://"])
def test_an_address_that_is_none_is_an_error(place: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an address"):
        config_of(events={"endpoint": place})


def test_two_sockets_cannot_be_at_one_place() -> None:
    place = "tcp://127.0.0.1:5557"
    with pytest.raises(ConfigurationError, match="a port of its own"):
        config_of(events={"endpoint": place, "replay_endpoint": place})


def test_without_events_nothing_is_published() -> None:
    with LocalCluster(config_of(events={"enabled": False})) as cluster:
        assert cluster.coordinator.statistics().events is None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
