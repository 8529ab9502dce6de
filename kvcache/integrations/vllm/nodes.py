"""The other nodes of an engine, for its scheduler: who holds which block, and who is told of ours.

Asks the coordinator's index, and starts the process that announces and gives this engine's blocks.
Never waits: an answer that does not come in time is "no node".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.block_server import ServerSettings
from kvcache.integrations.vllm.options import CoordinatorOptions, EngineSetting
from kvcache.sharing.access import read_keys
from kvcache.sharing.questions import NodeOfKey, Questions
from kvcache.worker.host_memory.segment import SegmentShape

logger = get_logger("vllm.kvcache.nodes")  # below vLLM's own, which shows lines of level INFO

LOOK_S = 1.0
RESTART_S = 5.0
MAX_RESTART_S = 320.0
"""Pause before the process is started again, doubled each time."""

CLOSE_S = 2.0
READ_BYTES = 1 << 16


class Nodes:
    """The engines on other nodes. One user, one thread."""

    def __init__(self, setting: EngineSetting, stream: tuple[str, str, str] = ("", "", "")) -> None:
        """Know no node before `begin`. `stream`: topic and endpoints of the engine's events.

        Raises ConfigurationError for keys that cannot be read.
        """
        self._setting, self._stream = setting, stream
        self._options = _options(setting)
        self._keys = None if self._options.keys is None else read_keys(self._options.keys)
        self._questions: Questions | None = None
        self._server: ServerProcess | None = None
        self._look_at_s = 0.0

    def begin(self, shapes: Sequence[SegmentShape], directories: Sequence[str] = ()) -> None:
        """Share the memory of ranks of these shapes, by rank, and the files in `directories`."""
        source, memory = uuid.uuid4().bytes, memory_of(shapes)
        options = self._options
        self._questions = Questions(
            options.address, self._keys, memory, source, answer_s=options.answer_s
        )
        settings = ServerSettings(
            name=self._setting.options.name,
            replica=self._setting.replica,
            shapes=tuple(shapes),
            source=source.hex(),
            memory=memory.hex(),
            coordinator=options.address,
            keys=options.keys or "",
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
        """Now and then, start the process again if it has ended."""
        if self._server is not None and now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._server.look(now_s)

    def statistics(self) -> dict[str, Any]:
        """Return counts since the start, as values for JSON. In any thread."""
        asked, server = self._questions, self._server
        return {
            "coordinator": self._options.address,
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
        """Start it."""
        self._line = settings.to_json()
        self.counts: dict[str, int] = {}
        """What the process has done, as it said last."""
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at_s, self._pause_s = 0.0, RESTART_S
        self.look(time.monotonic())

    @property
    def is_running(self) -> bool:
        """Whether it runs, as far as was seen."""
        return self._process is not None

    def look(self, now_s: float) -> None:
        """Start it again some time after its end."""
        process = self._process
        if process is not None:
            self._read_counts(process)
        if process is not None and process.poll() is not None:
            logger.warning("the process that gives blocks to other nodes has ended")
            _close_pipes(process)
            self._process = None
            self._rest(now_s)
        if self._process is not None or now_s < self._start_at_s:
            return
        command = [sys.executable, "-m", "kvcache.integrations.vllm.block_server"]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None and process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            process.stdin.write(self._line)
            process.stdin.flush()
        except OSError as error:
            logger.warning("blocks are not shared with other nodes: %s", error)
            self._rest(now_s)
            return
        self._process = process

    def _read_counts(self, process: subprocess.Popen[bytes]) -> None:
        """Take the last whole line that it has written."""
        assert process.stdout is not None
        with suppress(BlockingIOError):
            *lines, _ = os.read(process.stdout.fileno(), READ_BYTES).split(b"\n")
            if lines:
                with suppress(ValueError):
                    self.counts = json.loads(lines[-1])

    def _rest(self, now_s: float) -> None:
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_RESTART_S)

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
