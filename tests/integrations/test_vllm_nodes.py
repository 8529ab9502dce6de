"""Engines on several nodes that share their memory through a coordinator: real sockets, no vLLM.

A node is a name here: engines of different names have memory services of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import ClusterError, ConfigurationError
from kvcache.integrations.vllm import block_server, index_finder, nodes, remote_blocks
from kvcache.integrations.vllm.block_server import (
    BlockServer,
    EngineLines,
    ServerSettings,
    open_readers,
)
from kvcache.integrations.vllm.index_finder import IndexSearch, find_index
from kvcache.integrations.vllm.nodes import ServerProcess, memory_of
from kvcache.integrations.vllm.options import ConnectorOptions, CoordinatorOptions
from kvcache.integrations.vllm.remote_blocks import NodeConnections, RemoteStore
from kvcache.memory_service.client import service_address
from kvcache.memory_service.service import HostMemoryService
from kvcache.offload.keys import OffloadKey, make_offload_key
from kvcache.requests.request_content import DEFAULT_NAMESPACE, namespace_name
from kvcache.sharing import block_index, index_server
from kvcache.sharing.access import IndexPlace, make_keys, read_keys
from kvcache.sharing.index_server import IndexServer
from kvcache.sharing.index_updates import REPEAT_S
from kvcache.sharing.messages import SOURCE_BYTES, Given, Wanted, pack, unpack
from kvcache.worker.files.format import FileHead, FileTierError, pack_head
from kvcache.worker.host_memory.segment import SegmentShape
from tests.integrations.test_vllm_replicas import DEADLINE_S, Replica, request_of
from tests.sharing.test_index import free_port
from tests.waiting import wait_until

Start = Callable[..., Replica]


class ServerThread:
    """`ServerProcess`, in this process."""

    def __init__(self, settings: ServerSettings) -> None:
        self.server = BlockServer(settings, open_readers(settings))
        self.index = settings.index
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.is_running = True
        self.has_more = False
        self.counts = self.server.counts

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.server.turn()
            self.server.poller.poll(5)

    def take_given(self) -> list[OffloadKey]:
        return self.server.take_given()

    def take_beliefs(self) -> dict[OffloadKey, bool]:
        beliefs = self.server.beliefs
        return {OffloadKey(key): beliefs.pop(key) for key in tuple(beliefs)}

    def look(self, now_s: float) -> None:
        assert self._thread.is_alive() or not self.is_running

    def close(self) -> None:
        if self.is_running:
            self.is_running = False
            self._is_over.set()
            self._thread.join(10)
            self.server.close()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    monkeypatch.setattr(index_server, "LOOK_S", 0.02)  # it ends as soon
    made = IndexServer(f"tcp://127.0.0.1:{free_port()}")
    made.start()
    yield made
    made.close()


@pytest.fixture
def start(coordinator: IndexServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines, each on a node of its own."""
    monkeypatch.setattr(nodes, "ServerProcess", ServerThread)
    monkeypatch.setattr(block_server, "REFRESH_S", 0.02)
    services: list[HostMemoryService] = []
    started: list[Replica] = []

    def make(**options: Any) -> Replica:
        name = f"test-{uuid.uuid4().hex[:12]}"
        service = HostMemoryService(service_address(name).address, max_segments=9, max_bytes=2**30)
        service.serve()
        services.append(service)
        sharing = {"address": coordinator.endpoint, "answer_s": 10, "silence_s": 20}
        options.setdefault("coordinator", sharing)
        started.append(Replica(name, 0, **options))
        return started[-1]

    yield make
    for replica in started:
        replica.close()
    for service in services:
        service.close()


def await_index(coordinator: IndexServer, *replicas: Replica) -> None:
    """Return when the coordinator knows what these engines hold, and nothing else."""
    for replica in replicas:
        replica.settle()
    held = {server_of(replica).server: replica.held() for replica in replicas}
    deadline_s, num_times = time.monotonic() + DEADLINE_S, 0
    while num_times < 3:  # a server may be between a look and what it says
        is_known = all(
            {key[:32] for key in tuple(server._index.slots)} == digests and server.is_known
            for server, digests in held.items()
        )
        found = coordinator.statistics()["num_blocks"]
        num_times = num_times + 1 if is_known and found == sum(map(len, held.values())) else 0
        assert time.monotonic() < deadline_s, f"{found} blocks are known"
        time.sleep(0.02)


def pair(
    start: Start, index: IndexServer, first: dict[str, Any] | None = None, **second: Any
) -> tuple[Replica, Replica]:
    """Two nodes with these options: the first has computed `a`, and the second can ask for it."""
    made = start(**(first or {})), start(**second)
    made[0].run("a", 17)
    await_index(index, *made)
    return made


def server_of(replica: Replica) -> ServerThread:
    server: Any = replica.nodes._server
    assert isinstance(server, ServerThread)
    return server


def num_remote(replica: Replica) -> int:
    return replica.store.counts.statistics(time.monotonic()).num_remote_tokens


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_what_one_node_computes_another_one_copies_and_loads(
    start: Start, coordinator: IndexServer, is_asynchronous: bool
) -> None:
    first, second = pair(
        start, coordinator, {"is_asynchronous": is_asynchronous}, is_asynchronous=is_asynchronous
    )
    assert second.run("a", 25) == 16
    assert num_remote(second) == 16
    await_index(coordinator, first, second)
    digests = request_of(0, 24, "a").block_hashes
    assert (first.held(), second.held()) == (set(digests[:4]), set(digests))
    assert first.run("a", 25) == 24  # two blocks of it from the second node
    assert second.run("a", 25) == 24
    assert (num_remote(first), num_remote(second)) == (8, 16)
    for each in (first, second):
        each.settle()
        each.store.check()


def test_a_block_comes_from_any_of_several_nodes(start: Start, coordinator: IndexServer) -> None:
    first, second, third = (start() for _ in range(3))
    first.run("a", 17)
    await_index(coordinator, first, second, third)
    second.run("a", 33)
    second.store.reset(keeps_weights=True)
    await_index(coordinator, first, second, third)
    second.run("a", 33)  # the first half comes from the first node, and both hold it
    first.store.reset(keeps_weights=True)
    await_index(coordinator, first, second, third)
    assert third.run("a", 33) == 32


def test_without_a_coordinator_everything_is_computed_after_one_deadline(
    start: Start, coordinator: IndexServer
) -> None:
    options = {"coordinator": {"address": f"tcp://127.0.0.1:{free_port()}", "answer_s": 0.05}}
    alone = start(**options)
    assert alone.run("a", 17) == 0
    assert alone.run("b", 17) == 0
    assert alone.run("a", 17) == 16  # its own
    statistics = alone.nodes.statistics()
    assert (statistics["num_questions"], statistics["num_unanswered_questions"]) == (1, 1)


def test_a_coordinator_that_starts_again_knows_everything_soon(
    start: Start, coordinator: IndexServer
) -> None:
    first, second = pair(start, coordinator)
    coordinator.close()
    again = IndexServer(coordinator.endpoint)
    again.start()
    await_index(again, first, second)
    assert second.run("a", 17) == 16
    again.close()


def test_a_node_that_is_gone_costs_one_silence_and_its_blocks_are_computed(
    start: Start, coordinator: IndexServer
) -> None:
    options = {"address": coordinator.endpoint, "answer_s": 10, "silence_s": 0.2}
    first, second = pair(start, coordinator, coordinator=options)
    server_of(first).close()
    assert second.run("a", 17) == 0
    assert second.run("a", 17) == 16
    assert num_remote(second) == 0


def test_a_block_that_was_evicted_meanwhile_is_computed(
    start: Start, coordinator: IndexServer
) -> None:
    first, second = pair(start, coordinator)
    first.memories[1]._host.labels.withdraw(np.array([2], np.int32))  # of one rank only
    assert second.run("a", 17) == 8
    assert first.run("b", 9) == 0


def test_a_changed_byte_is_computed_again(start: Start, coordinator: IndexServer) -> None:
    first, second = pair(start, coordinator, offload={"verify": "sample"})
    first.memories[0]._host.segment.tensors[1][1, 9] ^= 1
    assert second.run("a", 17) == 4
    second.settle()
    assert second.run("a", 17) == 16


def test_nodes_with_another_model_do_not_share(start: Start, coordinator: IndexServer) -> None:
    first = start()
    first.run("a", 17)
    shape = first.memories[0].inventory().shape
    other = SegmentShape("x" * 64, 0, 8, shape.widths, 32, 1)
    assert memory_of([shape]) != memory_of([other])
    fewer = SegmentShape(shape.layout_fingerprint, 0, 5, shape.widths, 32, 1)
    assert memory_of([shape]) == memory_of([fewer])


def test_imported_blocks_are_not_written_to_files(
    start: Start, coordinator: IndexServer, tmp_path: Any
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "1MiB", "write": "on_store"}
    _, second = pair(start, coordinator, offload={"disk": disk})
    assert second.run("a", 25) == 16
    second.settle()
    assert second.store.statistics is not None and second.store.statistics.disk is not None
    assert second.store.statistics.disk.num_ready == 2  # what it has computed itself


def test_what_came_from_another_node_is_evicted_before_what_is_only_here(
    start: Start, coordinator: IndexServer
) -> None:
    _, second = pair(start, coordinator, num_slots=6)
    second.run("b", 9)
    assert second.run("a", 17) == 16
    second.settle()
    a, b, c = (set(request_of(0, 17, content).block_hashes) for content in "abc")
    assert a <= second.held() and len(second.held() & b) == 2
    second.run("c", 9)
    second.settle()
    assert len(second.held() & a) == 2
    assert len(second.held() & b) == len(second.held() & c) == 2


def await_marks(coordinator: IndexServer, *replicas: Replica) -> None:
    """Return when the engines know, too, which of their blocks are copies."""
    await_index(coordinator, *replicas)
    expected = coordinator.statistics()["num_copies"]
    wait_until(
        lambda: sum(map(num_copies, replicas)) == expected,
        lambda: [num_copies(each) for each in replicas],
        meanwhile=lambda: [each.step() for each in replicas],
    )


def num_copies(replica: Replica) -> int:
    return replica.store.statistics.host.num_copies


def test_of_what_two_nodes_have_computed_one_evicts_its_own_first(
    start: Start, coordinator: IndexServer
) -> None:
    first, second = pair(start, coordinator, num_slots=6)
    with asking_nobody(second):
        second.run("b", 9)
        assert second.run("a", 17) == 0  # computed, and now the last one used
    await_marks(coordinator, first, second)
    assert (num_copies(first), num_copies(second)) == (0, 4)
    a, b, c, d = (set(request_of(0, 17, content).block_hashes) for content in "abcd")
    with asking_nobody(second):
        second.run("c", 9)
        second.settle()
        assert len(second.held() & a) == 2 and len(second.held() & b) == 2
        server_of(first).close()
        await_originals(second)
        second.run("d", 9)
        second.settle()
    assert len(second.held() & a) == 2 and not second.held() & b
    assert len(second.held() & c) == len(second.held() & d) == 2
    second.store.check()


def await_originals(replica: Replica) -> None:
    """Return when an engine knows that none of its blocks is a copy."""
    wait_until(lambda: not num_copies(replica), "some are copies", meanwhile=replica.step)


@contextmanager
def asking_nobody(replica: Replica) -> Iterator[None]:
    """Have an engine compute what others hold, as if it had not been announced yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica.nodes, "ask", lambda *_: None)
        yield


def test_a_copy_on_its_way_to_a_file_is_not_written_and_the_last_one_is(
    start: Start, coordinator: IndexServer, tmp_path: Path
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "1MiB", "write": "on_evict"}
    first, second = pair(start, coordinator, num_slots=4, offload={"disk": disk})
    with asking_nobody(second):
        second.run("a", 17)
        await_marks(coordinator, first, second)
        assert num_copies(second) == 4
        second.run("b", 9)
        second.settle()
        assert not list(tmp_path.rglob("*.kvb"))
        server_of(first).close()
        await_originals(second)
        for content in "cd":
            second.run(content, 17)
            second.settle()
    a = {key.hex() for key in request_of(0, 17, "a").block_hashes}
    assert len([path for path in tmp_path.rglob("*.kvb") if path.name[:64] in a]) == 2 * 2


def test_a_coordinator_and_an_engine_that_start_again_agree_again(
    start: Start, coordinator: IndexServer
) -> None:
    first, second, third = (start() for _ in range(3))
    nodes_of_all = first, second, third
    first.run("a", 17)
    await_index(coordinator, *nodes_of_all)
    for each in (second, third):
        with asking_nobody(each):
            each.run("a", 17)
        await_marks(coordinator, *nodes_of_all)
    assert [num_copies(each) for each in nodes_of_all] == [0, 4, 4]
    coordinator.close()
    again = IndexServer(coordinator.endpoint)
    again.start()
    await_marks(again, *nodes_of_all)
    assert again.statistics()["num_copies"] == 8
    first.store.reset(keeps_weights=True)
    await_marks(again, *nodes_of_all)
    assert sum(num_copies(each) for each in nodes_of_all) == 4
    again.close()


def test_an_engine_that_starts_again_has_no_copies_of_what_it_held_before(
    start: Start, coordinator: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_index, "SILENCE_S", 1000.0)
    options = {"address": coordinator.endpoint, "answer_s": 10, "silence_s": 20}
    first, second = pair(start, coordinator, {"coordinator": options}, coordinator=options)
    with asking_nobody(second):
        second.run("a", 9)
        second.run("b", 9)
    server_of(second).server._updates._seq += 1000  # as after some time
    time.sleep(2 * REPEAT_S)
    await_marks(coordinator, first, second)
    name = second.store._setting.options.name
    second.close()
    again = Replica(name, 0, coordinator=options)
    assert again.num_adopted == 4
    await_marks(coordinator, first, again)
    assert (num_copies(first), num_copies(again)) == (0, 2)
    assert len(coordinator.statistics()["sources"]) == 2
    again.close()


def on_disk(directory: Path, **more: Any) -> dict[str, Any]:
    """The options of an engine that writes each block to a file at once."""
    directory.mkdir()
    disk = {"directory": str(directory), "capacity_per_rank": "1MiB", "write": "on_store"}
    return {"offload": {"disk": {**disk, **more}}}


def await_files(coordinator: IndexServer, replica: Replica, num_blocks: int) -> None:
    """Return when the coordinator knows so many blocks of memory and files together."""
    wait_until(
        lambda: coordinator.statistics()["num_blocks"] == num_blocks,
        coordinator.statistics,
        meanwhile=replica.settle,
    )


@pytest.fixture
def with_files(start: Start, coordinator: IndexServer, tmp_path: Path) -> tuple[Replica, Replica]:
    """A node whose memory has room for half of what its files hold, `a` in files only; another."""
    first, second = start(num_slots=4, **on_disk(tmp_path / "first")), start()
    for content in "ab":
        first.run(content, 17)
        first.settle()
    await_files(coordinator, first, 8)
    assert not first.held() & set(request_of(0, 17, "a").block_hashes)
    return first, second


def test_blocks_that_are_in_files_only_come_from_there(
    with_files: tuple[Replica, Replica],
) -> None:
    first, second = with_files
    assert second.run("a", 17) == 16
    assert num_remote(second) == 16
    assert first.nodes.statistics()["given_blocks"] == {"given_from_files": 8}  # 4 of each rank
    second.run("b", 17)
    assert first.nodes.statistics()["given_blocks"] == {"given_from_files": 8, "given": 8}


def test_a_damaged_or_missing_file_is_computed_and_left_to_its_engine(
    with_files: tuple[Replica, Replica], tmp_path: Path
) -> None:
    first, second = with_files
    digests = request_of(0, 17, "a").block_hashes
    (damaged,) = tmp_path.glob(f"**/rank1/??/{digests[2].hex()}*.kvb")
    content = bytearray(damaged.read_bytes())
    content[-7] ^= 1
    damaged.write_bytes(content)
    assert second.run("a", 17) == 8
    assert damaged.read_bytes() == content
    (missing,) = tmp_path.glob(f"**/rank0/??/{digests[0].hex()}*.kvb")
    missing.unlink()
    second.settle()
    second.store.reset(keeps_weights=True)
    assert second.run("a", 17) == 0
    assert first.nodes.statistics()["given_blocks"]["missing"] == 3


def test_what_is_removed_from_files_is_announced_and_too_many_reads_are_refused(
    with_files: tuple[Replica, Replica], coordinator: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = with_files
    files = server_of(first).server._files
    assert files is not None
    with monkeypatch.context() as patch:
        patch.setattr(files, "ask", lambda *_: False)
        assert second.run("a", 17) == 0
    assert server_of(first).counts["refused_files"] == 8
    first.store.reset(keeps_weights=True)
    first.settle()
    second.settle()
    await_files(coordinator, first, len(second.held()))


def test_a_walk_over_nodes_with_files_and_damage_never_loads_a_wrong_byte(
    start: Start, coordinator: IndexServer, tmp_path: Path
) -> None:
    draw = random.Random(11)
    options = {"address": coordinator.endpoint, "answer_s": 0.2, "silence_s": 0.5}
    engines = []
    for i in range(3):
        disk = on_disk(tmp_path / str(i), capacity_per_rank=f"{draw.randint(8, 16) * 512}B")
        engines.append(start(num_slots=draw.randint(5, 8), coordinator=options, **disk))
    num_loaded = 0
    for _ in range(50):
        engine = draw.choice(engines)
        num_loaded += engine.run(draw.choice("abcd"), draw.randint(2, 8) * 4 + 1)
        if draw.random() < 0.2:
            path = draw.choice([*tmp_path.rglob("*.kvb")] or [None])
            if path is not None:
                content = bytearray(path.read_bytes())
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                path.write_bytes(content)
        if draw.random() < 0.1:
            engine.store.reset(keeps_weights=True)
        time.sleep(0.03)  # directories and labels are looked at
    counts = [server_of(engine).counts for engine in engines]
    assert num_loaded and sum(each["given_from_files"] for each in counts)
    for engine in engines:
        engine.settle()
        engine.store.check()


def test_a_prompt_longer_than_the_memory_is_imported_as_far_as_it_fits(
    start: Start, coordinator: IndexServer
) -> None:
    first, second = start(num_slots=16), start(num_slots=6)
    first.run("a", 49)
    await_index(coordinator, first, second)
    assert 0 < second.run("a", 49) <= 24
    second.settle()


def test_a_walk_over_small_nodes_with_damage_never_loads_a_wrong_byte(
    start: Start, coordinator: IndexServer
) -> None:
    draw = random.Random(7)
    options = {"address": coordinator.endpoint, "answer_s": 0.2, "silence_s": 0.2}
    engines = [start(num_slots=draw.randint(5, 12), coordinator=options) for _ in range(3)]
    num_loaded = 0
    for _ in range(40):
        engine = draw.choice(engines)
        num_loaded += engine.run(draw.choice("abcd"), draw.randint(2, 8) * 4 + 1)
        other = draw.choice(engines)
        if draw.random() < 0.2:
            memory = draw.choice(other.memories)._host
            slot = draw.randrange(memory.num_slots)
            memory.segment.tensors[draw.randrange(2)][slot, draw.randrange(64)] ^= 1
        if draw.random() < 0.1:
            other.store.reset(keeps_weights=True)
        time.sleep(0.03)  # the labels are looked at
    assert num_loaded and sum(map(num_remote, engines))
    await_index(coordinator, *engines)
    held = Counter(digest for engine in engines for digest in engine.held())
    assert held.total() > len(held)
    wait_until(
        lambda: Counter(x for each in engines for x in originals_of(each)) == Counter(set(held)),
        "not each block has one original",
        meanwhile=lambda: [each.step() for each in engines],
    )
    for engine in engines:
        engine.store.check()


def originals_of(replica: Replica) -> set[bytes]:
    """The blocks that an engine does not take for copies."""
    tiers = replica.store._tiers
    slots = tiers.host.slots
    keys = list(slots.index)
    are_copies = tiers.host.eviction.are_copies(slots.addresses_of(keys)).tolist()
    return {key[:32] for key, is_copy in zip(keys, are_copies, strict=True) if not is_copy}


def test_the_process_announces_and_gives_and_ends_with_its_input(
    start: Start, coordinator: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "ServerProcess", ServerProcess)
    first = start()
    first.run("a", 17)
    first.settle()
    deadline_s = time.monotonic() + 60
    while coordinator.statistics()["num_blocks"] != 4:
        assert time.monotonic() < deadline_s, "nothing is announced"
        time.sleep(0.05)
    monkeypatch.setattr(nodes, "ServerProcess", ServerThread)
    second = start()
    assert second.run("a", 17) == 16
    assert first.nodes is not None and first.nodes._server is not None
    given: list[OffloadKey] = []
    while len(given) < 4:
        first.nodes._server.look(time.monotonic())
        given += first.nodes.take_given()
        assert time.monotonic() < deadline_s, "the engine is not told what was given"
        time.sleep(0.05)
    assert sorted(key[:32] for key in given) == sorted(first.held())
    beliefs: dict[OffloadKey, bool] = {}
    while len(beliefs) < 4:
        first.nodes._server.look(time.monotonic())
        beliefs |= first.nodes.take_beliefs()
        assert time.monotonic() < deadline_s, "the engine is not told what are copies"
        time.sleep(0.05)
    assert beliefs == dict.fromkeys(given, False)
    process = first.nodes._server._process
    process.kill()
    process.wait()
    now_s = time.monotonic()
    first.nodes._server.look(now_s)
    assert not first.nodes.statistics()["is_giving_blocks"]
    first.nodes._server.look(now_s + nodes.RESTART_S)
    assert first.nodes.statistics()["is_giving_blocks"]


def test_a_process_that_does_not_read_its_settings_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(nodes.subprocess, "Popen", Noted)
    monkeypatch.setattr(nodes.sys, "executable", "/bin/true")
    more_than_a_pipe_takes = ("x" * 200_000,)
    index = IndexPlace("tcp://127.0.0.1:7")
    settings = ServerSettings("n", 0, (SHAPE,), "", "", index, directories=more_than_a_pipe_takes)
    process = ServerProcess(settings)
    assert not process.is_running
    assert [each.returncode is not None for each in started] == [True]


def test_settings_survive_their_way_to_the_process() -> None:
    index = IndexPlace("tcp://10.0.0.1:7", generate_curve_keys())
    settings = ServerSettings("n", 1, (SHAPE,), "ab", "cd", index, "chat", "h", ("t", "l", "r"))
    assert ServerSettings.of_json(settings.to_json()) == settings


def test_what_is_given_counts_as_a_use_where_it_comes_from(
    start: Start, coordinator: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "TELL_S", 0.0)
    first, second = start(num_slots=6), start()
    a, b = (set(request_of(0, 17, content).block_hashes) for content in "ab")
    first.run("a", 17)
    first.run("b", 9)
    await_index(coordinator, first, second)
    assert second.run("a", 17) == 16
    first.run("c", 9)
    first.settle()
    assert a <= first.held() and not b & first.held()


def test_a_file_that_is_given_counts_as_used_too(
    with_files: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "TELL_S", 0.0)
    first, second = with_files
    assert second.run("a", 17) == 16
    given = first.nodes.take_given()
    assert sorted(key[:32] for key in given) == sorted(request_of(0, 17, "a").block_hashes)


def test_blocks_are_told_of_when_no_more_are_asked_for_and_never_too_many(
    start: Start, coordinator: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "TELL_S", 1000.0)
    monkeypatch.setattr(block_server, "MAX_GIVEN", 3)
    first = start()
    first.run("a", 17)
    await_index(coordinator, first)
    server = server_of(first).server
    keys = [make_offload_key(digest, 0) for digest in request_of(0, 17, "a").block_hashes]
    shape = first.memories[0].inventory().shape
    assert shape is not None
    connections = NodeConnections(shape, None, 10.0)
    for key in keys[:2]:
        connections.fetch(server.endpoint, key)
    assert server.take_given() == []
    for key in keys[1:]:
        connections.fetch(server.endpoint, key)
    assert server.take_given() == keys[:3]
    connections.close()


def test_a_place_is_told_when_the_engine_has_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    moved_to = IndexPlace("tcp://127.0.0.1:9")
    with open(reader, "rb", 0) as engine, open(writer, "wb", 0) as output:
        monkeypatch.setattr(block_server.sys, "stdout", output)
        os.set_blocking(reader, False)
        lines = EngineLines()
        for filler in (b"x" * 2000, b"x"):
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, filler)
        lines.moved_to(moved_to)
        while engine.read(1 << 20):
            pass
        lines._tell_moved()
        assert json.loads(engine.read(1 << 20)) == {"index": moved_to.to_plain()}
        lines._tell_moved()
        assert engine.read(1) is None


def test_beliefs_wait_for_room_each_in_its_newest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(200)]
    beliefs: dict[bytes, bool] = {key: i % 3 == 0 for i, key in enumerate(keys)}
    process = ServerProcess.__new__(ServerProcess)
    process._beliefs = {}
    process.counts, process._given = {}, []
    with open(reader, "rb", 0) as engine, open(writer, "wb", 0) as output:
        monkeypatch.setattr(block_server.sys, "stdout", output)
        os.set_blocking(reader, False)
        lines = EngineLines()
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        lines._tell_beliefs(beliefs)
        assert len(beliefs) == len(keys)
        beliefs[keys[0]] = False
        expected = dict(beliefs)
        while engine.read(1 << 20):
            pass
        lines._tell_beliefs(beliefs)
        assert not beliefs
        told = engine.read(1 << 20)
        for line in told.splitlines():
            assert len(line) < 4096
            process._take(json.loads(line))
    assert process.take_beliefs() == expected
    assert process.take_beliefs() == {}


def test_an_engine_is_known_by_the_same_name_after_its_restart() -> None:
    name = nodes.source_of("chat", 0)
    assert len(name) == SOURCE_BYTES and name == nodes.source_of("chat", 0)
    assert len({name, nodes.source_of("chat", 1), nodes.source_of("talk", 0)}) == 3


# --- a coordinator on Ray, without Ray


def coordinator_on_ray(name: str = "nowhere") -> CoordinatorOptions:
    return CoordinatorOptions(ray=name)


def test_without_ray_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    with pytest.raises(
        ClusterError, match=r"'nowhere': Ray cannot be imported \(no such thing\): install it"
    ):
        find_index(coordinator_on_ray())


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        ClusterError, match=rf"RAY_ADDRESS is {address}, and nothing answers there .*: start Ray"
    ):
        find_index(coordinator_on_ray())


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import time; time.sleep(60)", "Ray has not said within 0.3 s"),
        ("import sys; sys.exit(7)", "the process that asks Ray ended with status 7"),
        ("print('noise'); raise SystemExit", "the process that asks Ray ended with status 0"),
    ],
)
def test_a_process_that_does_not_answer_is_ended(
    program: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    if "0.3" in problem:
        monkeypatch.setattr(index_finder, "FIND_S", 0.3)
    with pytest.raises(ClusterError, match=problem):
        find_index(coordinator_on_ray())


def test_a_coordinator_that_is_not_on_ray_is_where_the_options_say(tmp_path: Path) -> None:
    path = str(tmp_path / "keys")
    with pytest.raises(ConfigurationError, match="name a file in a directory that exists"):
        make_keys(str(tmp_path / "nowhere" / "keys"))
    keys = make_keys(path)
    options = CoordinatorOptions(address="tcp://10.0.0.1:7", keys=path)
    assert find_index(options) == IndexPlace("tcp://10.0.0.1:7", keys)


def test_ray_is_asked_again_only_about_a_silent_coordinator_and_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    place = IndexPlace("tcp://127.0.0.1:7")
    on_ray, elsewhere = IndexSearch("nowhere", place), IndexSearch("", place)
    asked_at_s: list[float] = []
    for now_s in range(60):
        assert elsewhere.moved_to(100.0, now_s) is None and elsewhere._finder is None
        silent_s = 100.0 if now_s else 2.0
        assert on_ray.moved_to(silent_s, now_s) is None
        if on_ray._finder is not None:
            asked_at_s.append(now_s)
            on_ray._finder._process.wait(30)
            assert on_ray.moved_to(silent_s, now_s) is None and on_ray._finder is None
    assert asked_at_s == [1, 6, 16, 36]
    on_ray.moved_to(0.0, 60.0)  # it answers again
    assert on_ray.moved_to(100.0, 100.0) is None and on_ray._finder is not None
    on_ray.close()


# --- answers of a node that are not as they should be

SHAPE = SegmentShape("f" * 64, 0, 4, (48, 16), 32, 1)
KEY = make_offload_key(b"k" * 32, 0)
PARTS = [bytes(range(48)), bytes(range(16))]


def head_of(**other: Any) -> bytes:
    values = {
        "key": KEY,
        "digest": b"k" * 32,
        "group": 0,
        "layout_fingerprint": SHAPE.layout_fingerprint,
        "rank": 0,
        "namespace": namespace_name(DEFAULT_NAMESPACE),
        "parent_digest": bytes(32),
        "token_bytes": b"",
        "extra_keys": b"",
        "block_bytes": 64,
        "checksum": remote_blocks.checksum_of([memoryview(part) for part in PARTS]),
    }
    return pack_head(FileHead(**{**values, **other}))


@contextmanager
def node(*answers: Callable[[int], Sequence[bytes]], port: int | None = None) -> Iterator[str]:
    """A node that gives these answers to a request."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = 10_000
        router.bind(f"tcp://127.0.0.1:{port or '*'}")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)

        def serve() -> None:
            identity, data = router.recv_multipart()
            wanted = unpack(data)
            assert isinstance(wanted, Wanted) and (wanted.rank, wanted.key) == (0, KEY)
            for answer in answers:
                router.send_multipart([identity, *answer(wanted.number)])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield endpoint
        finally:
            thread.join()


def read(endpoint: str, silence_s: float = 10.0, patience_s: float = 60.0) -> bytearray:
    connections = NodeConnections(SHAPE, None, silence_s)
    store = RemoteStore(connections, SHAPE)
    store.place([KEY], endpoint, time.monotonic() + patience_s)
    memory = bytearray(64)
    try:
        store.read(KEY, [memoryview(memory)[:48], memoryview(memory)[48:]])
    finally:
        connections.close()
    return memory


def given(*frames: bytes, by: int = 0, is_there: bool = True) -> Callable[[int], list[bytes]]:
    return lambda number: [pack(Given(number + by, is_there)), *frames]


def test_a_right_answer_is_taken_and_a_late_one_before_it_is_not() -> None:
    with node(given(head_of(), bytes(48), bytes(16), by=-1), given(head_of(), *PARTS)) as endpoint:
        assert read(endpoint) == b"".join(PARTS)


def test_a_block_that_two_jobs_copy_is_read_once_for_each() -> None:
    connections = NodeConnections(SHAPE, None, 10.0)
    store = RemoteStore(connections, SHAPE)
    memory = bytearray(64)
    right = given(head_of(), *PARTS)
    with node(right) as first, node(right) as second:
        for endpoint in (first, second, second):
            store.place([KEY], endpoint, time.monotonic() + 60.0)
        store.forget([KEY])  # the last job was refused
        for _ in range(2):
            memory[:] = bytes(64)
            store.read(KEY, [memoryview(memory)[:48], memoryview(memory)[48:]])
            assert memory == b"".join(PARTS)
    connections.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (given(is_there=False), "missing"),
        (given(), "truncated"),
        (given(head_of()), "truncated"),
        (given(head_of(), PARTS[0]), "truncated"),
        (given(head_of(), PARTS[0], PARTS[1][:-1]), "truncated"),
        (given(head_of(), PARTS[0][:-8], bytes(24)), "foreign"),
        (given(head_of(), *PARTS, b"more"), "damaged"),
        (given(head_of(), *PARTS, b"", b"", b""), "damaged"),
        (given(head_of(), PARTS[0], bytes(16)), "damaged"),
        (given(head_of(checksum=1), *PARTS), "damaged"),
        (given(head_of()[:40], *PARTS), "truncated"),
        (given(b"x" + head_of()[1:], *PARTS), "damaged"),
        (given(head_of()[:-1] + b"\xff", *PARTS), "damaged"),
        (given(head_of(layout_fingerprint="g" * 64), *PARTS), "foreign"),
        (given(head_of(rank=1), *PARTS), "foreign"),
        (given(head_of(key=make_offload_key(b"l" * 32, 0)), *PARTS), "wrong_key"),
        (given(head_of(digest=b"l" * 32), *PARTS), "wrong_key"),
        (given(head_of(group=1), *PARTS), "wrong_key"),
        (lambda number: [b"noise"], "damaged"),
        (lambda number: [pack(Given(number - 1, True)), head_of(), *PARTS], "io"),
        (lambda number: [pack(Wanted(number, 0, KEY))], "io"),
    ],
    ids=range(21),
)
def test_a_wrong_answer_is_refused(answer: Any, problem: str) -> None:
    with node(answer) as endpoint, pytest.raises(FileTierError) as caught:
        read(endpoint, 0.5 if problem == "io" else 10.0)
    assert caught.value.kind == problem


def test_every_flipped_bit_of_an_answer_is_noticed() -> None:
    whole = [head_of(), *PARTS]
    draw = random.Random(3)
    for _ in range(25):
        frames = [bytearray(frame) for frame in whole]
        frame = draw.choice(frames)
        frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
        with node(given(*map(bytes, frames))) as endpoint, pytest.raises(FileTierError):
            read(endpoint)


def test_a_node_that_was_silent_is_not_asked_again_at_once() -> None:
    connections = NodeConnections(SHAPE, None, 0.1)
    with node() as endpoint:
        with pytest.raises(FileTierError, match=r"gives nothing within 0.1 s"):
            connections.fetch(endpoint, KEY)
        with pytest.raises(FileTierError, match="is not asked, because it did not answer"):
            connections.fetch(endpoint, KEY)
    connections.close()


def test_a_node_whose_process_has_ended_is_not_waited_for() -> None:
    connections = NodeConnections(SHAPE, None, 60.0)
    with pytest.raises(FileTierError, match="is gone, or has other keys"):
        connections.fetch(f"tcp://127.0.0.1:{free_port()}", KEY)
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    def end_when_asked() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(endpoint)
            router.poll(10_000)

    thread = threading.Thread(target=end_when_asked)
    thread.start()
    with pytest.raises(FileTierError, match="is gone, or has other keys"):
        connections.fetch(endpoint, KEY)
    thread.join()
    with pytest.raises(FileTierError, match="is not asked, because it did not answer"):
        connections.fetch(endpoint, KEY)
    connections.close()


def test_a_node_that_listens_again_is_asked_by_a_new_connection() -> None:
    connections = NodeConnections(SHAPE, None, 60.0)
    port = free_port()
    for _ in range(2):
        with node(given(*PARTS), port=port) as endpoint:
            assert connections.fetch(endpoint, KEY) == PARTS
        wait_until(connections._own()[endpoint].is_lost, "the end of a node is not noticed")
    connections.close()


def test_a_node_is_not_silent_while_the_machine_stands_still() -> None:
    def after_a_pause(number: int) -> list[bytes]:
        ctypes.PyDLL(None).sleep(2)  # of the whole process: it keeps the lock
        return given(head_of(), *PARTS)(number)

    with node(after_a_pause) as endpoint:
        assert read(endpoint, silence_s=1.5) == b"".join(PARTS)


def test_a_block_whose_request_has_waited_too_long_is_not_asked_for() -> None:
    with pytest.raises(FileTierError, match="for too long"):
        read(f"tcp://127.0.0.1:{free_port()}", patience_s=-1.0)


def test_wrong_requests_cost_a_node_nothing(start: Start, coordinator: IndexServer) -> None:
    first = start()
    first.run("a", 17)
    await_index(coordinator, first)
    key = make_offload_key(request_of(0, 17, "a").block_hashes[0], 0)
    endpoint = server_of(first).server.endpoint
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 10_000
        dealer.connect(endpoint)
        dealer.send(b"noise")
        dealer.send(pack(Given(1, True)))
        dealer.send_multipart([pack(Wanted(1, 0, key)), b"more"])
        for number, rank, wanted in ((2, 2, key), (3, -1, key), (4, 0, bytes(36)), (5, 1, key)):
            dealer.send(pack(Wanted(number, rank, wanted)))
        answers = [dealer.recv_multipart() for _ in range(4)]
    assert [unpack(frames[0]) for frames in answers] == [
        Given(2, False),
        Given(3, False),
        Given(4, False),
        Given(5, True),
    ]
    assert [len(frames) for frames in answers] == [1, 1, 1, 4]
    assert server_of(first).server.counts["malformed"] == 3


def test_a_node_far_away_needs_the_keys(
    start: Start, tmp_path: Any, coordinator: IndexServer
) -> None:
    path = str(tmp_path / "keys")
    guarded = IndexServer(f"tcp://127.0.0.1:{free_port()}", make_keys(path))
    guarded.start()
    options = {"address": guarded.endpoint, "answer_s": 10, "silence_s": 20, "keys": path}
    first, second = start(coordinator=options), start(coordinator=options)
    first.run("a", 17)
    await_index(guarded, first, second)
    assert second.run("a", 17) == 16
    shape = first.memories[0].inventory().shape
    assert shape is not None
    stranger = NodeConnections(shape, None, 60.0)
    key = make_offload_key(request_of(0, 17, "a").block_hashes[0], 0)
    with pytest.raises(FileTierError, match="has other keys"):
        stranger.fetch(server_of(first).server.endpoint, key)
    friend = NodeConnections(shape, read_keys(path), 10.0)
    assert len(friend.fetch(server_of(first).server.endpoint, key)) == 3
    friend.close()
    stranger.close()
    guarded.close()


EVENTS = {"enabled": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": {"address": "here"}}, "no address"),
        ({"coordinator": {"address": "tcp://10.0.0.1:7"}}, "there are no keys"),
        ({"coordinator": {"address": "tcp://[::1]:7", "keys": "keys"}}, "relative"),
        ({"coordinator": {"address": "tcp://[::1]:7", "host": "a b"}}, "host"),
        ({"coordinator": {"address": "tcp://[::1]:7", "host": "10.0.0.1"}}, "there are no keys"),
        ({"coordinator": {}}, "set address, where the coordinator listens, or ray"),
        (
            {"coordinator": {"address": "tcp://[::1]:7", "ray": "chat"}},
            "set address, where the coordinator listens, or ray",
        ),
        ({"coordinator": {"ray": "a/b"}}, "'a/b' is no name"),
        ({"coordinator": {"ray": "chat", "keys": "/k"}}, "keys: Ray hands out those"),
        ({"coordinator": {"ray": "chat", "host": "0.0.0.0"}}, "is every address of this node"),
        (
            {"coordinator": {"address": "tcp://[::1]:7", "events": True}, "events": EVENTS},
            "coordinator.events has the same published",
        ),
        (
            {"coordinator": {"address": "tcp://[::1]:7"}, "offload": {"keeps_memory": False}},
            "other nodes could not use this memory",
        ),
        (
            {"coordinator": {"address": "tcp://[::1]:7"}, "offload": {"verify": "never"}},
            "other nodes could not use this memory",
        ),
        (
            {"coordinator": {"address": "tcp://127.0.0.1:7", "keys": "/k", "host": "0.0.0.0"}},
            r"host '0\.0\.0\.0' is every address of this node",
        ),
        (
            {"coordinator": {"address": "tcp://127.0.0.1:7", "keys": "/k", "host": "[::0]"}},
            r"host '\[::0\]' is every address of this node",
        ),
        (
            {
                "coordinator": {"address": "tcp://127.0.0.1:7", "events": True},
                "events": {"topic": "kv@all"},
            },
            r"events\.topic: 'kv@all': engines with the same options need different topics",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ConnectorOptions.parse(options)
