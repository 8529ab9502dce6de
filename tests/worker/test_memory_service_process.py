"""The memory service in a process of its own: it starts once, outlives its starter, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.base.errors import ClusterError, StartupError
from kvcache.memory_service import process
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.memory_service.process import end, ensure_service
from kvcache.memory_service.protocol import lock_owner, make_socket, peer_process, socket_name
from kvcache.worker.host_memory.segment import ATTACHED, FRESH, keep_segment, open_segment
from tests.worker.tier_support import SHAPE

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is started finds this tree."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def address() -> Iterator[MemoryServiceAddress]:
    made = MemoryServiceAddress(f"unix:@kvcache-test-{uuid.uuid4().hex[:12]}", "c")
    yield made
    try:
        end(made.address)
    except ClusterError:
        return


def test_the_service_imports_only_what_it_needs() -> None:
    """Numpy alone would triple its memory; with all of kvcache it would be ten times as large."""
    found = modules_after("import kvcache.memory_service.process")
    assert not found & {"numpy", "numba", "pydantic", "kvcache.core", "kvcache.specs"}
    assert modules_after("import kvcache; kvcache.Request") > {"numpy", "kvcache.core"}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, capture_output=True, check=True).stdout.decode().split())


def await_end(address: str) -> None:
    client = MemoryServiceClient(address)
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            client.drop("")
        except ClusterError:
            return
        assert time.monotonic() < deadline_s, "the service does not end"
        time.sleep(0.05)


def test_a_process_that_dies_leaves_its_memory_to_the_next(
    address: MemoryServiceAddress,
) -> None:
    dies = (
        "import os, sys; from tests.worker.tier_support import SHAPE;"
        "from kvcache.memory_service.client import MemoryServiceAddress;"
        "from kvcache.memory_service.process import ensure_service;"
        "from kvcache.worker.host_memory.segment import open_segment;"
        "a = MemoryServiceAddress(sys.argv[1], 'c'); ensure_service(a.address, 600.0);"
        "s = open_segment(SHAPE, a); s.tensors[0][0, 0] = 77; os.kill(os.getpid(), 9)"
    )
    subprocess.run(
        [sys.executable, "-c", dies, address.address], timeout=DEADLINE_S, check=False, cwd=ROOT
    )
    ensure_service(address.address, 600.0)  # it is there
    segment = open_segment(SHAPE, address)
    assert segment.origin == ATTACHED
    assert segment.tensors[0][0, 0] == 77
    segment.close()


def test_a_relative_path_of_modules_means_the_directory_of_the_starter(
    address: MemoryServiceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}tests")
    ensure_service(address.address, 600.0)
    with make_socket(5.0) as asking:
        asking.connect(socket_name(address.address))
        number = peer_process(asking)
    found = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    assert f"PYTHONPATH={ROOT}{os.pathsep}{ROOT / 'tests'}".encode() in found


def test_memory_that_a_living_process_has_taken_is_known(address: MemoryServiceAddress) -> None:
    ensure_service(address.address, 600.0)
    segment = open_segment(SHAPE, address)
    assert segment.origin == FRESH
    asks = (
        "import sys; from kvcache.memory_service.client import *;"
        "from kvcache.memory_service.protocol import lock_owner;"
        "print(lock_owner(MemoryServiceClient(sys.argv[1]).attach(sys.argv[2])))"
    )
    command = [sys.executable, "-c", asks, address.address, address.name_of(SHAPE.rank)]

    def user() -> int:
        told = subprocess.run(
            command, timeout=DEADLINE_S, check=True, capture_output=True, text=True, cwd=ROOT
        )
        return int(told.stdout)

    assert user() == os.getpid()
    assert keep_segment(segment, address) == ""  # again: it stays this process's
    assert user() == os.getpid()
    assert lock_owner(segment.descriptor) == 0  # one's own is no other's
    with segment.lend() as descriptor:
        segment.close()
        assert descriptor == segment.descriptor
        assert user() == os.getpid()
    assert user() == 0
    with segment.lend() as descriptor:
        assert descriptor is None


def test_a_user_in_another_container_is_known_though_not_by_number(
    address: MemoryServiceAddress,
) -> None:
    """The kernel says 0 of a process in another namespace of processes."""
    ensure_service(address.address, 600.0)
    segment = open_segment(SHAPE, address)
    asks = (
        "import sys; from kvcache.memory_service.client import *;"
        "from kvcache.memory_service.protocol import lock_owner, process_text;"
        "owner = lock_owner(MemoryServiceClient(sys.argv[1]).attach(sys.argv[2]));"
        "print(process_text(owner) if owner else 'no process');"
        "import kvcache.memory_service.process as p; p.main([sys.argv[1], '--end'])"
    )
    command = [sys.executable, "-c", asks, address.address, address.name_of(SHAPE.rank)]
    told = subprocess.run(
        ["unshare", "--pid", "--fork", *command],
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if told.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces here: {told.stderr}")
    assert told.stdout == "a process of another container\n"
    assert told.stderr == (
        f"the memory service at {address.address} is a process of another container: end it there\n"
    )
    segment.close()


def test_it_ends_when_nothing_has_been_used_for_a_time(address: MemoryServiceAddress) -> None:
    ensure_service(address.address, 0.2)
    await_end(address.address)


def test_it_does_not_end_while_memory_is_used(address: MemoryServiceAddress) -> None:
    ensure_service(address.address, 0.5)
    segment = open_segment(SHAPE, address)
    assert segment.origin == FRESH
    time.sleep(2.0)  # four times as long as it stays without a user
    client = MemoryServiceClient(address.address)
    descriptor = client.attach(address.name_of(SHAPE.rank))
    assert descriptor is not None
    os.close(descriptor)
    segment.close()
    await_end(address.address)


def test_it_ends_when_told(address: MemoryServiceAddress) -> None:
    ensure_service(address.address, 600.0)
    assert process.main([address.address, "--end"]) == 0
    await_end(address.address)
    assert process.main([address.address, "--end"]) == 1


def test_a_stopped_one_is_named_at_the_start_of_another_and_ends_when_told(
    address: MemoryServiceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_service(address.address, 600.0)
    with make_socket(5.0) as connected:
        connected.connect(socket_name(address.address))
        service = peer_process(connected)
    os.kill(service, signal.SIGSTOP)
    os.waitid(os.P_PID, service, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(process, "START_S", 0.1)
    monkeypatch.setattr(process, "MemoryServiceClient", lambda at: MemoryServiceClient(at, 0.2))
    with pytest.raises(StartupError, match=rf"\(process {service} has the address, and may be"):
        ensure_service(address.address, 600.0)
    assert end(address.address) == service
    await_end(address.address)


def test_a_second_one_at_an_address_ends_at_once(address: MemoryServiceAddress) -> None:
    ensure_service(address.address, 600.0)
    assert process.main([address.address]) == 0


def test_one_that_cannot_start_is_an_error_with_a_remedy(
    address: MemoryServiceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "START_S", 0.1)
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"or set offload\.keeps_memory to false"):
        ensure_service(address.address, 600.0)
