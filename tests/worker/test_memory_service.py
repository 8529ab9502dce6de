"""Memory that survives its workers, and ends with its last holder."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    DeadlineError,
    ExhaustedError,
    NotRunningError,
)
from kvcache.memory_service import client as memory_client
from kvcache.memory_service import service as memory_service
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.memory_service.protocol import make_socket, memory_number, receive, send, socket_name
from kvcache.memory_service.service import HostMemoryService
from kvcache.worker.host_memory.labels import SlotState
from kvcache.worker.host_memory.segment import keep_segment, open_segment
from kvcache.worker.host_memory.shared_memory import make_memory
from tests.worker.memory_service_process import PAYLOADS, service_of
from tests.worker.tier_support import SHAPE, fill

TIMEOUT_S = 60.0
NUMBERS = itertools.count()
OF_A_SERVICE = 2
"""Descriptors of a memory service that keeps nothing: its socket and its selector."""


@pytest.fixture
def address() -> str:
    return f"unix:@kvcache-test-{os.getpid()}-{next(NUMBERS)}"


@pytest.fixture
def service(address: str) -> Iterator[HostMemoryService]:
    made = HostMemoryService(address, max_segments=3, max_bytes=2**20, timeout_s=5.0)
    made.serve()
    yield made
    made.close()


def open_descriptors() -> int:
    gc.collect()  # what other tests have left open
    return len(os.listdir("/proc/self/fd"))


def test_what_is_put_is_handed_out_until_it_is_dropped(
    service: HostMemoryService, address: str
) -> None:
    client = MemoryServiceClient(address)
    memory = make_memory("test", 4096)
    before = open_descriptors()
    assert client.attach("a") is None
    client.put("a", memory)
    os.pwrite(memory, b"written later", 0)
    found = client.attach("a")
    assert found is not None
    assert os.pread(found, 13, 0) == b"written later"
    assert not os.get_inheritable(found)
    os.close(found)
    assert (service.statistics().num_segments, service.statistics().num_bytes) == (1, 4096)
    client.drop("a")
    client.drop("a")
    assert client.attach("a") is None
    assert service.statistics().num_segments == 0
    service.close()
    assert open_descriptors() == before - OF_A_SERVICE
    os.close(memory)


def test_another_memory_under_the_name_takes_the_place_of_the_first(
    service: HostMemoryService, address: str
) -> None:
    client = MemoryServiceClient(address)
    for size in (4096, 8192):
        memory = make_memory("test", size)
        client.put("a", memory)
        os.close(memory)
    found = client.attach("a")
    assert found is not None
    assert os.fstat(found).st_size == 8192
    os.close(found)
    assert (service.statistics().num_segments, service.statistics().num_bytes) == (1, 8192)


def test_a_prefix_lists_names_and_which_memory_they_have(
    service: HostMemoryService, address: str
) -> None:
    client = MemoryServiceClient(address)
    assert client.list("") == {}
    first, second = make_memory("first", 4096), make_memory("second", 4096)
    for name, memory in (("a/0", first), ("a/1", second), ("ab", first)):
        client.put(name, memory)
    numbers = memory_number(first), memory_number(second)
    assert numbers[0] != numbers[1]
    assert client.list("a/") == {"a/0": numbers[0], "a/1": numbers[1]}
    assert client.list("") == {"a/0": numbers[0], "a/1": numbers[1], "ab": numbers[0]}
    found = client.attach("a/1")
    assert found is not None
    assert memory_number(found) == numbers[1]
    for descriptor in (first, second, found):
        os.close(descriptor)


def test_a_list_of_very_many_names_fits_into_a_packet(address: str) -> None:
    service = HostMemoryService(address, max_segments=999, max_bytes=2**30)
    service.serve()
    client, memory = MemoryServiceClient(address), make_memory("test", 4096)
    for number in range(300):
        client.put(f"{number:500}", memory)
    listed = client.list("")
    assert list(listed) == [f"{number:500}" for number in range(len(listed))]
    assert len(listed) > 50
    os.close(memory)
    service.close()


def test_no_more_is_kept_than_the_bounds_allow(service: HostMemoryService, address: str) -> None:
    client = MemoryServiceClient(address)
    large, small = make_memory("large", 2**20 + 4096), make_memory("small", 4096)
    with pytest.raises(ExhaustedError) as caught:
        client.put("large", large)
    assert str(caught.value) == (
        f"the memory service at {address} refuses: 'large' would make it 1 segments of 1052672 "
        "bytes, at most 3 of 1048576 are kept"
    )
    for name in "abc":
        client.put(name, small)
    with pytest.raises(ExhaustedError, match="'d' would make it 4 segments"):
        client.put("d", small)
    client.put("a", small)
    assert service.statistics().num_refused == 2
    for descriptor in (large, small):
        os.close(descriptor)


def test_a_pipe_is_no_memory(service: HostMemoryService, address: str) -> None:
    reading, writing = os.pipe()
    with pytest.raises(ExhaustedError, match="the memory put under 'a' is not shared memory"):
        MemoryServiceClient(address).put("a", reading)
    assert service.statistics().num_segments == 0
    os.close(reading)
    os.close(writing)


WORDS: dict[str, Callable[[socket.socket], object]] = {
    "rubbish": lambda to: to.send(b"\xc1rubbish"),
    "nothing, and the end": lambda to: to.shutdown(socket.SHUT_WR),
    "another version": lambda to: to.send(msgpack.packb([9, "attach", "a"])),
    "an unknown verb": lambda to: send(to, ["explode", "a"]),
    "too much": lambda to: to.send(b"x" * 5000),
    "unhashable": lambda to: send(to, [{}, "x"]),
    "unhashable after a verb": lambda to: send(to, ["attach", {}]),
    "far too deep": lambda to: to.send(b"\x91" * 4000 + b"\x01"),
    "deep": lambda to: to.send(b"\x93\x01" + b"\x91" * 900 + b"\x01" + b"\xa1x"),
    "a put of nothing": lambda to: send(to, ["put", "a"]),
    "a put of two": lambda to: socket.send_fds(to, [msgpack.packb([1, "put", "a"])], [0, 1]),
    "an attach with memory": lambda to: send(to, ["attach", "a"], 0),
}


def test_whatever_is_said_the_service_goes_on(service: HostMemoryService, address: str) -> None:
    before = open_descriptors()
    for number, (what, speak) in enumerate(WORDS.items(), 1):
        with make_socket(TIMEOUT_S) as connected:
            connected.connect(socket_name(address))
            speak(connected)
            (is_ok, reason), descriptor = receive(connected)
        assert (is_ok, descriptor) == (False, None), what
        assert reason, what
        assert MemoryServiceClient(address).attach("a") is None, what
        assert service.statistics().num_refused == number, what
    service.close()
    assert open_descriptors() == before - OF_A_SERVICE


def test_connections_that_say_nothing_hold_up_no_other_and_are_cut_off(address: str) -> None:
    service = HostMemoryService(address, max_segments=1, max_bytes=4096, timeout_s=0.2)
    service.serve()
    with ExitStack() as silent:
        connections = [connect(silent, address) for _ in range(50)]
        assert MemoryServiceClient(address, TIMEOUT_S).attach("a") is None
        assert [connected.recv(1) for connected in connections] == [b""] * 50
    assert service.statistics().num_refused == 50
    assert service.statistics().loop.num_faults == 0
    service.close()


def test_more_silent_connections_than_are_kept_hold_up_no_question(
    service: HostMemoryService, address: str
) -> None:
    client = MemoryServiceClient(address, TIMEOUT_S)
    with ExitStack() as silent:
        first = connect(silent, address)
        for _ in range(memory_service.MAX_SILENT):
            connect(silent, address)
        assert client.attach("a") is None
        assert first.recv(1) == b""


def test_an_error_of_any_kind_costs_one_question(
    service: HostMemoryService, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(HostMemoryService, "_obey", raise_memory_error)
        with pytest.raises(ExhaustedError, match=r"a question: MemoryError: far too much$"):
            MemoryServiceClient(address).attach("a")
    assert MemoryServiceClient(address).attach("a") is None
    told = service.statistics()
    assert (told.num_answered, told.num_refused, told.loop.num_faults) == (1, 1, 1)
    assert told.loop.last_fault == "a question: MemoryError: far too much"
    assert told.loop.is_running


def test_without_descriptors_the_service_waits_and_goes_on(
    service: HostMemoryService, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_refused = threading.Event()

    def no_descriptor(_: socket.socket) -> None:
        is_refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with ExitStack() as stack, monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", no_descriptor)
        connect(stack, address)
        assert is_refused.wait(TIMEOUT_S)
    assert MemoryServiceClient(address, TIMEOUT_S).attach("a") is None


def raise_memory_error(*_: object) -> None:
    raise MemoryError("far too much")


def connect(stack: ExitStack, address: str) -> socket.socket:
    connected = stack.enter_context(make_socket(TIMEOUT_S))
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connected.connect(socket_name(address))
            return connected
        except BlockingIOError:  # too many wait to be accepted
            assert time.monotonic() < give_up_s


def test_strangers_are_refused_by_both_ends(
    service: HostMemoryService, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_service, "is_trusted", lambda connected: False)
    with pytest.raises((ExhaustedError, NotRunningError)):
        MemoryServiceClient(address).attach("a")
    assert service.statistics().num_refused == 1
    monkeypatch.setattr(memory_client, "is_trusted", lambda connected: False)
    with pytest.raises(
        NotRunningError, match=f"^the memory service at {address} is another user's$"
    ):
        MemoryServiceClient(address).attach("a")


def test_a_second_service_is_refused(service: HostMemoryService, address: str) -> None:
    with pytest.raises(AlreadyRunningError) as caught:
        HostMemoryService(address, max_segments=1, max_bytes=1)
    assert str(caught.value) == (
        f"no memory service can listen at {address} (Address already in use): end the one that is "
        "there, or use another name"
    )
    assert service.statistics().num_segments == 0


def test_a_service_that_is_absent_or_silent_is_reported(address: str) -> None:
    with pytest.raises(NotRunningError) as caught:
        MemoryServiceClient(address).attach("a")
    assert str(caught.value) == f"no memory service answers at {address} (Connection refused)"
    silent = HostMemoryService(address, max_segments=1, max_bytes=1)
    with pytest.raises(DeadlineError) as late:
        MemoryServiceClient(address, timeout_s=0.01).attach("a")
    assert str(late.value) == f"the memory service at {address} does not answer within 0.01 s"
    silent.close()
    with pytest.raises(NotRunningError):
        MemoryServiceClient(address).attach("a")


@pytest.mark.parametrize("wrong", ["tcp://x", "unix:@", "unix:@" + "x" * 107])
def test_addresses_that_cannot_be_are_refused(wrong: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"^memory service address '{wrong}': use unix:@ and a"
    ):
        MemoryServiceAddress(wrong, "cluster")


# --- segments from a memory service


def test_without_a_service_a_segment_is_private_and_says_so(address: str) -> None:
    assert open_segment(SHAPE).origin == "private: no memory service is configured"
    segment = open_segment(SHAPE, MemoryServiceAddress(address, "cluster"))
    assert segment.origin == f"private: no memory service answers at {address} (Connection refused)"
    segment.close()


def test_a_segment_that_the_service_does_not_take_is_private(
    service: HostMemoryService, address: str
) -> None:
    segment = open_segment(replace(SHAPE, num_slots=4000), MemoryServiceAddress(address, "cluster"))
    assert segment.origin.startswith(
        f"private: the memory service at {address} refuses: 'cluster/rank1' "
    )
    assert service.statistics().num_segments == 0
    segment.close()


def test_a_segment_is_found_again(service: HostMemoryService, address: str) -> None:
    kept_at = MemoryServiceAddress(address, "cluster")
    first = open_segment(SHAPE, kept_at)
    assert first.origin == "fresh"
    fill(first, PAYLOADS)
    first.close()
    again = open_segment(SHAPE, kept_at)
    assert again.origin == "attached"
    assert {slot: b"".join(again.slot_views(slot)) for slot in PAYLOADS} == PAYLOADS
    assert again.labels.num_in(SlotState.SEALED) == 2
    assert again.labels.num_in(SlotState.EMPTY) == 4
    assert service.statistics().num_segments == 1
    again.close()


def test_a_segment_of_another_plan_is_let_go_and_a_new_one_is_kept(
    service: HostMemoryService, address: str
) -> None:
    kept_at = MemoryServiceAddress(address, "cluster")
    first = open_segment(SHAPE, kept_at)
    fill(first, PAYLOADS)
    first.close()
    other = open_segment(replace(SHAPE, layout_fingerprint="new"), kept_at)
    assert other.origin == "fresh: the host segment has layout fingerprint layout, rank 1 needs new"
    assert other.labels.num_in(SlotState.SEALED) == 0
    other.close()
    assert service.statistics().num_segments == 1
    assert open_segment(replace(SHAPE, layout_fingerprint="new"), kept_at).origin == "attached"


def test_a_service_that_was_made_again_is_given_the_segment_again(address: str) -> None:
    kept_at = MemoryServiceAddress(address, "cluster")
    service = serving_at(address)
    segment = open_segment(SHAPE, kept_at)
    fill(segment, PAYLOADS)
    service.close()
    reason = keep_segment(segment, kept_at)
    assert reason == f"no memory service answers at {address} (Connection refused)"
    assert segment.origin == "fresh"
    service = serving_at(address)
    assert MemoryServiceClient(address).attach("cluster/rank1") is None
    for _ in range(2):
        assert keep_segment(segment, kept_at) == ""
    assert service.statistics().names == ("cluster/rank1",)
    segment.close()
    again = open_segment(SHAPE, kept_at)
    assert again.origin == "attached"
    assert {slot: b"".join(again.slot_views(slot)) for slot in PAYLOADS} == PAYLOADS
    again.close()
    service.close()


def test_a_private_segment_is_kept_once_there_is_a_service(address: str) -> None:
    kept_at = MemoryServiceAddress(address, "cluster")
    segment = open_segment(SHAPE, kept_at)
    assert segment.origin.startswith("private: no memory service answers at ")
    service = serving_at(address)
    assert keep_segment(segment, kept_at) == ""
    assert segment.origin == "fresh"
    segment.close()
    again = open_segment(SHAPE, kept_at)
    assert again.origin == "attached"
    again.close()
    service.close()


def serving_at(address: str) -> HostMemoryService:
    service = HostMemoryService(address, max_segments=3, max_bytes=2**20)
    service.serve()
    return service


# --- processes that are killed


@pytest.fixture
def start(address: str) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Start a process and wait for its output."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(role: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.memory_service_process", role, address],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start_one
    for process in processes:
        process.kill()
        process.wait(TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(TIMEOUT_S)


def test_memory_survives_a_killed_worker_and_nothing_survives_all(
    start: Callable[[str], tuple[subprocess.Popen[str], str]], address: str
) -> None:
    before = set(Path("/dev/shm").glob("kvcache*"))  # others have memory there, too
    service, serves = start("service")
    assert serves == "serves, torch False"
    worker, wrote = start("worker")
    origin, digests = wrote.split("; ")
    assert origin == "fresh"
    other = open_segment(replace(SHAPE, rank=2), service_of(address))
    assert other.origin == "fresh"
    kill(worker)
    segment = open_segment(SHAPE, service_of(address))
    assert segment.origin == "attached"
    labels = segment.labels.sealed().labels
    assert labels.block_ids.tolist() == list(PAYLOADS)
    assert labels.digests.hex() == digests
    assert {slot: b"".join(segment.slot_views(slot)) for slot in PAYLOADS} == PAYLOADS
    with pytest.raises(AlreadyRunningError):
        HostMemoryService(address, max_segments=1, max_bytes=1)
    segment.close()
    other.close()
    worker, _ = start("worker")
    kill(service)
    kill(worker)
    assert set(Path("/dev/shm").glob("kvcache*")) == before
    assert not [line for line in Path("/proc/net/unix").read_text().split() if address[6:] in line]
    with pytest.raises(NotRunningError):
        MemoryServiceClient(address).attach("cluster/rank1")


def test_memory_of_a_worker_that_is_still_there_is_left_to_it(
    service: HostMemoryService,
    start: Callable[[str], tuple[subprocess.Popen[str], str]],
    address: str,
) -> None:
    _, wrote = start("worker")
    assert wrote.startswith("fresh; ")
    segment = open_segment(SHAPE, service_of(address))
    assert segment.origin.startswith("fresh: the host segment is another living process's (")
    assert service.statistics().num_segments == 1
    segment.close()


def test_memory_that_a_process_uses_is_not_replaced_under_its_name(
    service: HostMemoryService,
    start: Callable[[str], tuple[subprocess.Popen[str], str]],
    address: str,
) -> None:
    worker, _ = start("worker")
    client = MemoryServiceClient(address)
    before = client.list("")
    memory = make_memory("test", 4096)
    with pytest.raises(ExhaustedError, match=f"process {worker.pid} uses other memory under"):
        client.put("cluster/rank1", memory)
    assert client.list("") == before
    kill(worker)
    client.put("cluster/rank1", memory)
    assert client.list("") != before
    os.close(memory)


@pytest.mark.parametrize("wrong", [0, True, 1.0])
def test_limits_are_integers_of_at_least_one(address: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^max_bytes is .*: set it to an integer"):
        HostMemoryService(address, max_segments=1, max_bytes=wrong)
