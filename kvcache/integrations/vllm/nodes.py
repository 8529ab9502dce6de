"""The other nodes of an engine, for its scheduler: who holds which block, and who is told of ours.

Asks the coordinator's index, and starts the process that announces and gives this engine's blocks.
Never waits: an answer that does not come in time is "no node".
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.block_server import ServerSettings
from kvcache.integrations.vllm.options import CoordinatorOptions, EngineSetting
from kvcache.offload.keys import OffloadKey
from kvcache.sharing.access import IndexPlace
from kvcache.sharing.messages import SOURCE_BYTES, split
from kvcache.sharing.questions import NodeOfKey, Questions
from kvcache.worker.host_memory.segment import SegmentShape

logger = get_logger("vllm.kvcache.nodes")  # below vLLM's own, which shows lines of level INFO

LOOK_S = 1.0
"""How often the process is looked at, when it has told everything."""

RESTART_S = 5.0
MAX_RESTART_S = 320.0
"""Pause before the process is started again, doubled each time."""

CLOSE_S = 2.0
READ_BYTES = 1 << 14
"""At one look: what 340 blocks are costs less than a millisecond. Further lines wait in the pipe,
and then in the process."""


class Nodes:
    """The engines on other nodes. One user, one thread."""

    def __init__(
        self, setting: EngineSetting, index: IndexPlace, stream: tuple[str, str, str] = ("", "", "")
    ) -> None:
        """Know no node before `begin`. `index`: of the coordinator; `stream`: topic and endpoints
        of the engine's events."""
        self._setting, self._index, self._stream = setting, index, stream
        self._options = _options(setting)
        self._questions: Questions | None = None
        self._server: ServerProcess | None = None
        self._look_at_s = 0.0

    def begin(self, shapes: Sequence[SegmentShape], directories: Sequence[str] = ()) -> None:
        """Share the memory of ranks of these shapes, by rank, and the files in `directories`."""
        options, memory = self._options, memory_of(shapes)
        source = source_of(self._setting.options.name, self._setting.replica)
        self._questions = Questions(
            self._index.address, self._index.keys, memory, source, answer_s=options.answer_s
        )
        settings = ServerSettings(
            name=self._setting.options.name,
            replica=self._setting.replica,
            shapes=tuple(shapes),
            source=source.hex(),
            memory=memory.hex(),
            index=self._index,
            ray=options.ray or "",
            host=options.host or "",
            stream=self._stream,
            directories=tuple(directories),
        )
        self._server = ServerProcess(settings)

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return self._questions is not None and self._questions.is_asking

    def ask(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Ask who holds a request's blocks; `answer_of` has the answer."""
        self.look(time.monotonic())
        if self._questions is not None:
            self._questions.ask(request_id, keys)

    def answer_of(self, request_id: str) -> NodeOfKey | None:
        """Return, once, a node's endpoint for each block; None if the answer is awaited."""
        return {} if self._questions is None else self._questions.answer_of(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        if self._questions is not None:
            self._questions.forget(request_id)

    def look(self, now_s: float) -> None:
        """Now and then, start the process again if it has ended, and take what it tells."""
        if self._server is None or now_s < self._look_at_s:
            return
        self._server.look(now_s)
        self._look_at_s = now_s + (0.0 if self._server.has_more else LOOK_S)
        index = self._server.index
        if index != self._index and self._questions is not None:
            self._index = index
            self._questions.move(index.address, index.keys)

    @property
    def peer_keys(self) -> CurveKeys | None:
        """The keys with which ranks connect to other nodes; None on the own machine."""
        keys = self._index.keys
        return None if keys is None else keys.for_peers()

    def take_given(self) -> list[OffloadKey]:
        """Return the blocks that were given to other nodes since the last call, in order."""
        return [] if self._server is None else self._server.take_given()

    def take_beliefs(self) -> dict[OffloadKey, bool]:
        """Return what was said since the last call: which blocks are copies of what another node
        keeps, and which are not."""
        return {} if self._server is None else self._server.take_beliefs()

    def statistics(self) -> dict[str, Any]:
        """Return counts since the start, as values for JSON. In any thread."""
        asked, server = self._questions, self._server
        return {
            "coordinator": self._index.address,
            "num_questions": 0 if asked is None else asked.num_asked,
            "num_unanswered_questions": 0 if asked is None else asked.num_unanswered,
            "is_giving_blocks": server is not None and server.is_running,
            "given_blocks": {} if server is None else server.counts,
        }

    def close(self) -> None:
        """End the process, and the connection to the coordinator."""
        if self._server is not None:
            self._server.close()
        if self._questions is not None:
            self._questions.close()


class ServerProcess:
    """The process of `block_server`. It ends with this one, because its input ends then."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.counts: dict[str, int] = {}
        """What the process has done, as it said last."""
        self.has_more = False
        """Whether there was so much to read that there may be more."""
        self._given: list[OffloadKey] = []
        self._beliefs: dict[OffloadKey, bool] = {}
        self._unread = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at_s, self._pause_s = 0.0, RESTART_S
        self.look(time.monotonic())

    @property
    def is_running(self) -> bool:
        """Whether it runs, as far as was seen."""
        return self._process is not None

    @property
    def index(self) -> IndexPlace:
        """Where the coordinator listens, as the process said last."""
        return self._settings.index

    def take_given(self) -> list[OffloadKey]:
        """Return the blocks that it has given since the last call, in order."""
        given, self._given = self._given, []
        return given

    def take_beliefs(self) -> dict[OffloadKey, bool]:
        """Return what it has said of copies since the last call, of each block the newest."""
        beliefs, self._beliefs = self._beliefs, {}
        return beliefs

    def look(self, now_s: float) -> None:
        """Start it again some time after its end."""
        process = self._process
        if process is not None:
            self._read(process)
        if process is not None and process.poll() is not None:
            logger.warning("the process that gives blocks to other nodes has ended")
            _close_pipes(process)
            self._process, self._unread = None, b""
            self._rest(now_s)
        if self._process is not None or now_s < self._start_at_s:
            return
        command = [sys.executable, "-m", "kvcache.integrations.vllm.block_server"]
        process = None
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None and process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            process.stdin.write(self._settings.to_json())
            process.stdin.flush()
        except OSError as error:
            logger.warning("blocks are not shared with other nodes: %s", error)
            if process is not None:
                process.kill()
                _close_pipes(process)
                process.wait()
            self._rest(now_s)
            return
        self._process = process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Take the whole lines that it has written."""
        assert process.stdout is not None
        self.has_more = False
        with suppress(BlockingIOError):
            read = os.read(process.stdout.fileno(), READ_BYTES)
            self.has_more = len(read) > READ_BYTES // 2
            *lines, self._unread = (self._unread + read).split(b"\n")
            for line in lines:
                with suppress(ValueError):
                    self._take(json.loads(line))

    def _take(self, told: Any) -> None:
        if not isinstance(told, dict):
            return
        self.counts = told.get("counts", self.counts)
        self._given += [OffloadKey(base64.b64decode(key)) for key in told.get("given", ())]
        for what, is_copy in (("copies", True), ("originals", False)):
            keys = split(base64.b64decode(told.get(what, "")))
            self._beliefs.update({OffloadKey(key): is_copy for key in keys})
        if "index" in told:
            index = IndexPlace.of_plain(told["index"])
            self._settings = replace(self._settings, index=index)

    def _rest(self, now_s: float) -> None:
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_RESTART_S)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def source_of(name: str, replica: int) -> bytes:
    """Return what the coordinator knows an engine by.

    It is the same after a restart of the engine, so that the coordinator forgets at once what the
    engine held before. Nodes, and containers with networks of their own, differ. Where the kernel
    does not tell them apart, each start has another one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return uuid.uuid4().bytes
    told = repr((boot, network, os.getuid(), name, replica))
    return sha256(told.encode()).digest()[:SOURCE_BYTES]


def memory_of(shapes: Sequence[SegmentShape]) -> bytes:
    """Return the description of an engine's memory: of two engines it is the same if each rank can
    use the other's blocks."""
    told = [(each.layout_fingerprint, each.rank, each.widths) for each in shapes]
    return sha256(repr(told).encode()).digest()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _options(setting: EngineSetting) -> CoordinatorOptions:
    options = setting.options.coordinator
    if options is None:
        raise ConfigurationError("no coordinator is set: set coordinator.address")
    return options
