"""The coordinator of vLLM engines on Ray, without vLLM: started, asked and ended by the command,
killed in between, and found again by engines that share memory through it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray

from actors.connect import end_actors, find_actor
from actors.names import vllm_coordinator_name
from actors.vllm_coordinator import ask_place
from kvcache.base.errors import ClusterError
from kvcache.integrations.vllm.index_finder import FinderProcess
from kvcache.memory_service.client import service_address
from kvcache.memory_service.service import HostMemoryService
from kvcache.sharing.access import IndexPlace
from kvcache.sharing.index_server import ask_status
from tests.cli.commands import KVCACHE
from tests.integrations.test_vllm_replicas import Replica
from tests.sharing.test_index import free_port

pytestmark = pytest.mark.ray

PATIENCE_S = 90.0


@pytest.fixture
def coordinator(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name for a coordinator; nothing of it is left afterwards."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    actor = find_actor(vllm_coordinator_name(name))
    if actor is not None:
        end_actors([actor])


@pytest.fixture
def start(coordinator: str) -> Iterator[Callable[[], Replica]]:
    """Starts engines, each on a node of its own, with real processes that give blocks."""
    services: list[HostMemoryService] = []
    started: list[Replica] = []

    def make() -> Replica:
        name = f"test-{uuid.uuid4().hex[:12]}"
        service = HostMemoryService(service_address(name).address, max_segments=9, max_bytes=2**30)
        service.serve()
        services.append(service)
        sharing = {"ray": coordinator, "answer_s": 1, "silence_s": 20}
        started.append(Replica(name, 0, coordinator=sharing))
        return started[-1]

    yield make
    for replica in started:
        replica.close()
    for service in services:
        service.close()


def command(name: str, *arguments: str, exit_code: int = 0) -> tuple[str, str]:
    """Run `kvcache vllm-coordinator --ray NAME`; return its stdout and stderr."""
    done = subprocess.run(
        [*KVCACHE, "vllm-coordinator", "--ray", name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout, done.stderr


def process_of(name: str) -> int:
    actor: Any = find_actor(vllm_coordinator_name(name))
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE_S))


def await_blocks(place: IndexPlace, num_blocks: int, *replicas: Replica) -> None:
    """Return when the coordinator knows so many blocks, and these engines ask there."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        for replica in replicas:
            replica.settle()
            replica.nodes.look(time.monotonic())
        found = ask_status(place.address, place.keys, 10_000)["num_blocks"]
        asked = {replica.nodes._index for replica in replicas if replica.nodes is not None}
        if found == num_blocks and asked == {place}:
            return
        assert time.monotonic() < give_up_s, f"{found} blocks are known at {place}"
        time.sleep(0.05)


def test_engines_share_through_a_coordinator_on_ray_that_is_killed_and_ended(
    coordinator: str, start: Callable[[], Replica]
) -> None:
    ports = str(free_port()), str(free_port())
    _, told = command(coordinator, "--events", ports[0], "--events-replay", ports[1])
    place = ask_place(coordinator, PATIENCE_S)
    assert f"coordinator {coordinator} listens at {place.address}" in told
    assert f":{ports[0]}, missed ones at tcp://" in told
    _, refused = command(coordinator, exit_code=3)
    assert f"a coordinator named '{coordinator}' runs on this Ray" in refused

    first, second = start(), start()
    first.run("a", 17)
    await_blocks(place, 4, first, second)
    assert second.run("a", 17) == 16
    await_blocks(place, 8, first, second)

    killed = process_of(coordinator)
    os.kill(killed, signal.SIGKILL)
    killed_s = time.monotonic()
    while (again := ask_place(coordinator, PATIENCE_S)) == place:
        assert time.monotonic() < killed_s + PATIENCE_S, "Ray does not restart it"
    assert again.keys == place.keys
    assert process_of(coordinator) != killed
    first.run("b", 17)
    await_blocks(again, 12, first, second)
    print(f"shared again {time.monotonic() - killed_s:.1f} s after SIGKILL")
    assert second.run("b", 17) == 16

    found = json.loads(command(coordinator, "--status", "--json")[0])
    assert found["num_blocks"] >= 12
    assert found["events"]["endpoint"].endswith(f":{ports[0]}")
    process = psutil.Process(process_of(coordinator))
    command(coordinator, "--stop")
    assert find_actor(vllm_coordinator_name(coordinator)) is None
    process.wait(PATIENCE_S)
    for arguments in (["--stop"], ["--status"]):
        _, refused = command(coordinator, *arguments, exit_code=3)
        assert f"no coordinator named '{coordinator}' runs on this Ray: start it" in refused

    first.run("c", 17)
    assert second.run("c", 17) == 0  # "no node" after one deadline
    finder = FinderProcess(coordinator)
    with pytest.raises(ClusterError, match=f"no coordinator named '{coordinator}' runs .*: start"):
        while finder.answer() is None:
            time.sleep(0.05)


def test_ports_that_are_taken_are_an_error_and_nothing_keeps_running(coordinator: str) -> None:
    taken = str(free_port())
    _, told = command(coordinator, "--events", taken, "--events-replay", taken, exit_code=3)
    assert "events cannot be published at" in told
    assert find_actor(vllm_coordinator_name(coordinator)) is None
