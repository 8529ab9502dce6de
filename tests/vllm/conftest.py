"""Real vLLM engines for the tests, each in a process of its own that can be killed."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.base.errors import ClusterError
from kvcache.events.translation import short_hash
from kvcache.memory_service.client import MemoryServiceClient, service_address
from kvcache.memory_service.process import end
from kvcache.memory_service.protocol import make_socket, peer_process, socket_name
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.worker.host_memory.labels import SlotState, row_type
from kvcache.worker.host_memory.segment import HEAD_BYTES, SegmentShape
from tests.vllm.engine_process import MARK
from tests.vllm.programs import ROOT, Program, fork_server, run, spawn
from tests.waiting import wait_until

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""The environment from `make test-vllm`, or a link to one."""

START_S = 300.0
ANSWER_S = 120.0
SERVICE_S = 30.0

_HEAD = struct.Struct("<8sII64sqqqqq")


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """The interpreter of vLLM's environment."""
    if not PYTHON.exists():
        pytest.skip(f"no vLLM in {PYTHON.parent.parent}: run make test-vllm")
    yield str(PYTHON)
    fork_server(str(PYTHON)).close()
    fork_server.cache_clear()


@pytest.fixture(scope="session")
def model(python: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model on disk."""
    return made_model(python, tmp_path_factory.mktemp("model"))


def made_model(python: str, directory: Path, kind: str = "llama", seed: int = 7) -> str:
    """Make a tiny random model there, in place of any other of its kind."""
    run(python, "tests.vllm.make_model", str(directory), kind, str(seed))
    return str(directory)


def make_adapter(python: str, directory: Path, seed: int) -> str:
    """Make a LoRA adapter of the tiny model there, in place of any other."""
    run(python, "tests.vllm.make_adapter", str(directory), str(seed))
    return str(directory)


@dataclass(frozen=True)
class Answer:
    """The output of an engine, and how many tokens of each prompt it did not compute."""

    tokens: list[list[int]]
    cached: list[int]
    first_token_s: list[float]


class ProcessTree:
    """Running processes of one session. `kill` ends all of them like a crash."""

    def __init__(self, process: Program, log: Path) -> None:
        self.process, self.log = process, log
        self._shared: set[Path] = set()  # vLLM's own, which it leaves after a crash

    def kill(self) -> None:
        """Kill every process, and wait until they are gone."""
        self.note_shared_files()
        for process_id in processes_of_session(self.process.pid):
            try:
                os.kill(process_id, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()
        pid = self.process.pid
        wait_until(lambda: not processes_of_session(pid), "a killed engine lives on")
        for path in self._shared:
            path.unlink(missing_ok=True)

    def note_shared_files(self) -> None:
        """Remember the files in /dev/shm that are in use now, to remove them after a kill."""
        for process_id in processes_of_session(self.process.pid):
            self._shared |= shared_files_of(process_id)

    def errors(self) -> str:
        return self.log.read_text(errors="replace")


class Engine(ProcessTree):
    """A running engine, controlled line by line."""

    def __init__(
        self, python: str, options: dict[str, Any], log: Path, *, is_forked: bool = True
    ) -> None:
        start = fork_server(python).fork if is_forked else partial(spawn, python)
        with log.open("ab") as errors:
            process = start("tests.vllm.engine_process", [json.dumps(options)], errors)
        super().__init__(process, log)
        self._unread = b""
        try:
            self.ready_s = self._answer(START_S)["ready_s"]
        except BaseException:
            self.kill()
            raise
        self.note_shared_files()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 40, **options: Any
    ) -> Answer:
        """Generate greedily. Options: `salts`, `images` or `replicas`, one for each prompt;
        `adapter`, `transfer`."""
        told = self.ask(do="generate", prompts=prompts, max_tokens=max_tokens, **options)
        return Answer(told["tokens"], told["cached"], told["first_token_s"])

    def count(self) -> dict[str, int]:
        """vLLM's own counters."""
        return self.ask(do="count")

    def reset(self, *, connector: bool = False) -> None:
        """Reset vLLM's own cache, and the connector's blocks if requested."""
        wait_until(
            lambda: self.ask(do="reset", connector=connector)["reset"],
            "vLLM does not reset its cache",
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; raises AssertionError with the end of the log if none comes."""
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._unread.partition(b"\n")
                if newline:
                    self._unread = rest
                    if line.startswith(MARK.encode()):
                        answer: dict[str, Any] = json.loads(line[len(MARK) :])
                        return answer
                    with self.log.open("ab") as log:
                        log.write(line + newline)
                    continue
                remaining_s = deadline_s - time.monotonic()
                read = b""
                if remaining_s > 0 and selector.select(remaining_s):
                    read = self.process.stdout.read(1 << 16) or b""
                if not read:
                    raise AssertionError(f"the engine does not answer:\n{self.errors()[-30000:]}")
                self._unread += read


def processes_of_session(session: int) -> list[int]:
    """Return the living processes in `session`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def shared_files_of(process_id: int) -> set[Path]:
    """Return the files in /dev/shm that a process maps.

    By inode: the name in a semaphore's mapping is one under which its file was made and removed.
    """
    try:
        lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    except OSError:
        return set()
    inodes = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    with os.scandir("/dev/shm") as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in inodes}


class Starter:
    """Starts engines on the tiny model; kills those that a test leaves running."""

    def __init__(self, python: str, model: str, directory: Path) -> None:
        self._python, self._model, self._directory = python, model, directory
        self._engines: list[Engine] = []

    def __call__(
        self,
        extra: dict[str, Any] | None = None,
        *,
        module: str = "kvcache.integrations.vllm",
        transfer: dict[str, Any] | None = None,
        is_forked: bool = True,
        **options: Any,
    ) -> Engine:
        """Start one, with the connector and its options `extra`, or without it.

        If not `is_forked`, each of its processes is spawned and imports vLLM, as in production.
        """
        if extra is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVCacheConnector",
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
                **(transfer or {}),
            }
        chosen = {
            "model": self._model,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 128 << 20,  # vLLM writes to all of it at start
            **options,
        }
        log = self._directory / f"engine{len(self._engines)}.log"
        engine = Engine(self._python, chosen, log, is_forked=is_forked)
        self._engines.append(engine)
        return engine

    def end_all(self) -> None:
        for engine in self._engines:
            if processes_of_session(engine.process.pid):
                engine.kill()


@pytest.fixture(scope="module")
def start(
    python: str,
    model: str,
    tmp_path_factory: pytest.TempPathFactory,
    new_name: Callable[[], str],  # so that services end after the engines, which restart them
) -> Iterator[Starter]:
    starter = Starter(python, model, tmp_path_factory.mktemp("logs"))
    yield starter
    starter.end_all()


@pytest.fixture(scope="module")
def new_name() -> Iterator[Callable[[], str]]:
    """Names for engines; their memory services are ended afterwards."""
    names: list[str] = []

    def make() -> str:
        names.append(f"test-{uuid.uuid4().hex[:12]}")
        return names[-1]

    yield make
    for name in names:
        address = service_address(name)
        try:
            end(address.address)
        except Exception:  # it may have ended, or never started
            continue


def signal_service(name: str, number: int) -> None:
    """Send a signal to the memory service of the engines `name`."""
    with make_socket(1.0) as connected:
        connected.connect(socket_name(service_address(name).address))
        process_id = peer_process(connected)
    os.kill(process_id, number)


def await_memory(name: str, num_ranks: int) -> None:
    """Wait until the memory of all ranks is kept."""
    address = service_address(name)
    names = {address.name_of(rank) for rank in range(num_ranks)}
    deadline_s = time.monotonic() + SERVICE_S
    while True:
        with suppress(ClusterError):
            if names <= MemoryServiceClient(address.address).list("").keys():
                return
        assert time.monotonic() < deadline_s, f"no service keeps the memory of {name}"
        time.sleep(0.05)


class Segment:
    """The kept memory of a rank, seen from outside."""

    def __init__(self, name: str, rank: int, replica: int = 0) -> None:
        address = service_address(name, replica)
        descriptor = MemoryServiceClient(address.address).attach(address.name_of(rank))
        assert descriptor is not None, f"nothing is kept of rank {rank} of {name}"
        try:
            self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        head = _HEAD.unpack_from(self._memory)
        widths = tuple(np.frombuffer(self._memory, "<i8", int(head[6]), 256).tolist())
        self.shape = SegmentShape(
            head[3].rstrip(b"\0").decode(), rank, head[4], widths, head[7], head[8]
        )
        rows = np.frombuffer(self._memory, np.uint8)[HEAD_BYTES:][: self.shape.rows_bytes]
        self._rows = rows.view(row_type(head[7], head[8]))

    def sealed_slots(self) -> list[int]:
        return np.flatnonzero(self._rows["state"] == SlotState.SEALED).tolist()

    def digests(self) -> list[bytes]:
        """The digests of the sealed slots."""
        return [bytes(self._rows["digest"][slot]) for slot in self.sealed_slots()]

    def event_hashes(self) -> set[int]:
        """The hashes of the sealed slots, as events have them."""
        return {short_hash(BlockHash(digest)) for digest in self.digests()}

    def groups(self) -> list[int]:
        """The KV cache group of each sealed slot."""
        return self._rows["group"][self.sealed_slots()].tolist()

    def contents(self) -> dict[tuple[bytes, int], list[bytes]]:
        """The bytes of each sealed slot, tensor by tensor, by digest and group."""
        keys = zip(self.digests(), self.groups(), strict=True)
        tensors = list(zip(self.shape.offsets[2:-1], self.shape.widths, strict=True))
        return {
            key: [
                self._memory[at + slot * width : at + (slot + 1) * width] for at, width in tensors
            ]
            for key, slot in zip(keys, self.sealed_slots(), strict=True)
        }

    def flip_byte(self, slot: int, tensor: int = 0, byte: int = 100) -> None:
        """Change one bit of a slot's bytes."""
        width = self.shape.widths[tensor]
        place = self.shape.offsets[2 + tensor] + slot * width + byte
        self._memory[place] ^= 1
