"""The index behind a socket: the process that all nodes and engines connect to.

One thread. A message costs at most one answer; one that is wrong is counted, and costs nothing
else. What the index knows is soft: after a restart, nodes tell it again within a second.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Protocol

import zmq

from kvcache.base.curve import CurveGate, CurveKeys, equip_peer, guard_server
from kvcache.base.errors import ConfigurationError, DeadlineError, ProtocolError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import ServingLoop
from kvcache.sharing.access import require_guarded
from kvcache.sharing.block_index import BlockIndex
from kvcache.sharing.messages import (
    MAX_MESSAGE_BYTES,
    Holding,
    Message,
    Question,
    StatusQuestion,
    StatusReport,
    pack,
    unpack,
)

logger = get_logger(__name__)

MAX_AT_ONCE = 256
QUEUED_MESSAGES = 64
"""For each connection and direction; further ones wait at the sender, or are dropped."""

LOOK_S = 0.5


class StreamFollower(Protocol):
    """Passes on the events of sources (`events.stream_proxy`)."""

    def follow(self, streams: dict[str, tuple[str, str]], /) -> None:
        """Pass on these from now on: endpoints, by topic."""

    def statistics(self) -> dict[str, Any]:
        """Return counts as values for JSON."""


def ask_status(address: str, keys: CurveKeys | None, timeout_ms: int) -> dict[str, Any]:
    """Return what the index at an address holds.

    Raises ConfigurationError for the address or keys, DeadlineError without an answer.
    """
    require_guarded(address, keys is not None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.ipv6 = "[" in address
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        if keys is not None:
            equip_peer(socket, keys)
        socket.connect(address)
        socket.send(pack(StatusQuestion()))
        if not socket.poll(timeout_ms):
            raise DeadlineError(
                f"no coordinator answers at {address} within {timeout_ms / 1000:g} s: start "
                "kvcache vllm-coordinator there, with the same keys"
            )
        report = unpack(socket.recv())
    if not isinstance(report, StatusReport):
        raise DeadlineError(f"at {address} there is no coordinator for vLLM")
    return report.values


class IndexServer:
    """Answers nodes and engines until `close`."""

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None = None,
        index: BlockIndex | None = None,
        proxy: StreamFollower | None = None,
    ) -> None:
        """Listen at `address`, with port 0 at a free one; raises ConfigurationError if that is not
        possible.

        `proxy` is told, in the server's thread, which events there are (`BlockIndex.streams`).
        """
        require_guarded(address, keys is not None, first_port=0)
        self._index = BlockIndex() if index is None else index
        self._proxy = proxy
        self._counts: Counter[str] = Counter(malformed_messages=0)
        self._look_at_s = 0.0
        self._begun_s = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if keys is None else CurveGate(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = QUEUED_MESSAGES
        self._socket.ipv6 = "[" in address
        guard_server(self._socket, keys)
        self._loop = ServingLoop("kvcache-index", self._turn)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._end()
            raise ConfigurationError(
                f"cannot listen at {address} ({error}): choose an address of this machine that is "
                "free"
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address to connect to."""

    def start(self) -> None:
        """Begin to answer, in a thread."""
        self._loop.start()

    def close(self) -> None:
        """Stop answering."""
        self._loop.stop()
        self._loop.join()
        self._end()

    def statistics(self) -> dict[str, Any]:
        """Return what the index holds, and counts of messages, as values for JSON."""
        counts = {f"num_{name}": count for name, count in sorted(self._counts.items())}
        uptime_s = time.monotonic() - self._begun_s
        found = {"uptime_s": uptime_s, **self._index.statistics(), **counts}
        if self._proxy is not None:
            found["events"] = self._proxy.statistics()
        return found

    def _turn(self) -> None:
        is_swept = not self._index.sweep()
        if self._socket.poll(int(1000 * LOOK_S) if is_swept else 0):
            for _ in range(MAX_AT_ONCE):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(frames)
            else:
                return  # sources that wait behind these are not silent
        self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        """Now and then, when no message waits, forget silent sources."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        self._index.expire(now_s)
        if self._proxy is not None:
            self._proxy.follow(self._index.streams())

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = unpack(frames[1]) if len(frames) == 2 else None
        except ProtocolError as error:
            if not self._counts["malformed_messages"]:
                logger.warning("a message is refused: %s", error)
            message = None
        answer = None if message is None else self._answer(message)
        if message is None:
            self._counts["malformed_messages"] += 1
        if answer is not None:
            self._socket.send_multipart([frames[0], pack(answer)], zmq.NOBLOCK)

    def _answer(self, message: Message) -> Message | None:
        if isinstance(message, Holding):
            return self._index.hold(message, time.monotonic())
        if isinstance(message, Question):
            return self._index.find(message)
        if isinstance(message, StatusQuestion):
            return StatusReport(self.statistics())
        self._counts["malformed_messages"] += 1
        return None

    def _end(self) -> None:
        self._socket.close(0)
        self._context.term()
        if self._gate is not None:
            self._gate.join()
