"""The socket through which an engine without a cluster reports its status on its node.

A Unix socket under an abstract name that follows from the engine's, for processes of the same user.
One question for each connection, one answer: a packet of JSON each. The engine's end is one thread
with a deadline for every wait; it never delays a step.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache.base.errors import ClusterError, DeadlineError, InvalidInputError, NotRunningError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import ServingLoop, describe_error
from kvcache.memory_service.client import ENGINE_SERVICES
from kvcache.memory_service.protocol import (
    ADDRESS_SCHEME,
    MAX_PACKET_BYTES,
    connect,
    is_trusted,
    make_socket,
    socket_name,
)

logger = get_logger(__name__)

Answering = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers a question, in the socket's thread. An error becomes the answer."""

ASK_S = 5.0
MAX_ANSWER_BYTES = 1 << 17

_BACKLOG = 8
_WAIT_S = 0.5
_QUESTION_S = 2.0
_BIND_AGAIN_S = 1.0
_SOCKETS = Path("/proc/net/unix")


def engine_address(name: str, replica: int) -> str:
    """Return the address of this user's engine `name` on this node."""
    return f"{ADDRESS_SCHEME}kvcache-engine-{os.getuid()}/{name}/{replica}"


def running_engines() -> list[tuple[str, int]]:
    """Return names and replicas of this user's engines that listen on this node."""
    found = _matching(rf"@kvcache-engine-{os.getuid()}/([^/]+)/([0-9]+)")
    return sorted({(name, int(replica)) for name, replica in found})


def kept_names() -> list[str]:
    """Return the names of engines whose memory a memory service of this node keeps."""
    return sorted({name for (name,) in _matching(f"@{ENGINE_SERVICES}{os.getuid()}-(.+)")})


def ask_engine(
    name: str, replica: int, question: dict[str, Any], timeout_s: float = ASK_S
) -> dict[str, Any]:
    """Return an engine's answer.

    Raises NotRunningError if there is no such engine, DeadlineError if it is silent for
    `timeout_s`, ClusterError if it refuses the question.
    """
    with make_socket(timeout_s) as connected:
        try:
            connect(connected, socket_name(engine_address(name, replica)), timeout_s)
            if not is_trusted(connected):
                raise NotRunningError(f"the engine {name!r} is another user's")
            connected.send(json.dumps(question).encode())
            data = connected.recv(MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise DeadlineError(
                f"the engine {name!r} does not answer within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise NotRunningError(_not_running(name, replica)) from error
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise ClusterError(f"the engine {name!r} gives no answer that can be read") from error
    if not isinstance(answer, dict) or "error" in answer:
        told = answer["error"] if isinstance(answer, dict) else "no answer that can be read"
        raise ClusterError(f"the engine {name!r} refuses: {told}")
    return answer


class EngineSocket:
    """Answers questions to an engine, in a separate thread."""

    def __init__(self, name: str, replica: int, answering: Answering) -> None:
        """Set up; `start` begins to listen."""
        self._address = engine_address(name, replica)
        self._answering = answering
        self._listener: socket.socket | None = None
        self._loop = ServingLoop("kvcache-engine-socket", self._turn)

    def start(self) -> None:
        """Begin to answer. If an earlier engine still has the address, it is tried again."""
        self._loop.start()

    def close(self) -> None:
        """Stop answering. Repeatable."""
        self._loop.stop()
        self._loop.join(_QUESTION_S + _WAIT_S)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _turn(self) -> None:
        if self._listener is None:
            self._bind()
        if self._listener is None:
            return
        try:
            connected, _ = self._listener.accept()
        except TimeoutError:
            return
        with connected:
            connected.settimeout(_QUESTION_S)
            if not is_trusted(connected):
                return
            try:
                question = json.loads(connected.recv(MAX_PACKET_BYTES))
                connected.send(self._answer(question))
            except (OSError, ValueError) as error:
                logger.debug("a question to the engine was not answered: %s", error)

    def _answer(self, question: dict[str, Any]) -> bytes:
        try:
            return json.dumps(self._answering(question)).encode()
        except Exception as error:
            if not isinstance(error, InvalidInputError | ClusterError):  # else the asker's mistake
                self._loop.faults.note("a question", error)
            return json.dumps({"error": describe_error(error)}).encode()

    def _bind(self) -> None:
        listener = make_socket(_WAIT_S)
        try:
            listener.bind(socket_name(self._address))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            logger.debug("%s is not free: %s", self._address, error)
            self._loop.pause(_BIND_AGAIN_S)
        else:
            self._listener = listener


def _not_running(name: str, replica: int) -> str:
    engines = ", ".join(
        f"{each}/{number}" if number else each for each, number in running_engines()
    )
    which = f"{name!r}, replica {replica}," if replica else repr(name)
    told = f"no engine {which} runs on this node: those that run: {engines or 'none'}"
    return f"{told}; memory is kept of: {', '.join(kept_names()) or 'none'}"


def _matching(pattern: str) -> list[tuple[str, ...]]:
    try:
        lines = _SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    words = [line.split()[-1] for line in lines[1:] if line]
    return [match.groups() for word in words if (match := re.fullmatch(pattern, word))]
