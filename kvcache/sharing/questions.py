"""An engine's side of the index: questions about the blocks of requests. Never waits.

A question that is not answered in time counts as "no node". Then none is asked for a while, so a
coordinator that is gone costs the first request one deadline, and the others nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zmq

from kvcache.base.curve import CurveKeys, equip_peer
from kvcache.base.errors import ProtocolError
from kvcache.base.logs import get_logger
from kvcache.sharing.messages import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    NO_NODE,
    Answer,
    Question,
    pack,
    unpack,
)

logger = get_logger(__name__)

MAX_QUESTIONS = 64
"""Questions without an answer; requests beyond are not asked about."""

REST_S = 5.0

NodeOfKey = Mapping[bytes, str]
"""By key, the endpoint of a node that holds it."""

_NO_NODES: NodeOfKey = {}


@dataclass(frozen=True)
class _Open:
    number: int
    keys: Sequence[bytes]
    deadline_s: float


class Questions:
    """Asks about requests. One user, one thread."""

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None,
        memory: bytes,
        source: bytes,
        *,
        answer_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask at `address` who but `source` holds blocks of `memory`. Connects later."""
        self._address, self._keys = address, keys
        self._memory, self._source = memory, source
        self._answer_s, self._now = answer_s, now
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connected()
        self._open: dict[str, _Open] = {}
        self._answers: dict[str, NodeOfKey] = {}
        self._names: dict[int, str] = {}
        self._rest_until_s = 0.0
        self._number = 0
        self.num_asked = self.num_unanswered = 0

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited that may still come in time."""
        return bool(self._open) and self._now() < next(reversed(self._open.values())).deadline_s

    def ask(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Ask about a request, of at most `MAX_KEYS` keys; `answer_of` has the answer."""
        now_s, keys = self._now(), keys[:MAX_KEYS]
        self.forget(request_id)
        if now_s < self._rest_until_s or len(self._open) >= MAX_QUESTIONS:
            self._answers[request_id] = _NO_NODES
            return
        self.num_asked += 1
        self._number += 1
        question = Question(self._number, self._memory, self._source, b"".join(keys))
        try:
            self._socket.send(pack(question), zmq.NOBLOCK)
        except zmq.Again:
            self._answers[request_id] = _NO_NODES
            self._rest(now_s)
            return
        self._open[request_id] = _Open(self._number, keys, now_s + self._answer_s)
        self._names[self._number] = request_id

    def answer_of(self, request_id: str) -> NodeOfKey | None:
        """Return, once, who holds a request's blocks; None if the answer is awaited."""
        self._receive()
        opened = self._open.get(request_id)
        if opened is None:
            return self._answers.pop(request_id, _NO_NODES)
        if self._now() < opened.deadline_s:
            return None
        self._rest(self._now())
        return self._answers.pop(request_id, _NO_NODES)

    def forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        opened = self._open.pop(request_id, None)
        if opened is not None:
            del self._names[opened.number]

    def move(self, address: str, keys: CurveKeys | None) -> None:
        """Ask at another address from now on; open questions get no answer."""
        self._address, self._keys = address, keys
        self._rest_until_s = 0.0
        self._begin_again()

    def close(self) -> None:
        """Let go of the connection."""
        self._context.destroy(0)

    def _receive(self) -> None:
        while self._open:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                answer = unpack(frames[0]) if len(frames) == 1 else None
            except zmq.Again:
                return
            except ProtocolError:
                continue
            if isinstance(answer, Answer):
                self._take(answer)

    def _take(self, answer: Answer) -> None:
        request_id = self._names.get(answer.number)
        if request_id is None:
            return  # it came too late
        opened = self._open[request_id]
        if len(answer.places) != len(opened.keys):
            return
        self.forget(request_id)
        self._answers[request_id] = {
            key: answer.endpoints[place]
            for key, place in zip(opened.keys, answer.places, strict=True)
            if place != NO_NODE
        }

    def _rest(self, now_s: float) -> None:
        """Give up all open questions, and ask none for a while."""
        logger.warning(
            "the coordinator at %s does not answer: it is asked again in %g s, and prompts are "
            "computed that other nodes may hold",
            self._address,
            REST_S,
        )
        self.num_unanswered += max(1, len(self._open))
        self._rest_until_s = now_s + REST_S
        self._begin_again()

    def _begin_again(self) -> None:
        """Give up all open questions, and connect again."""
        for request_id in list(self._open):
            self.forget(request_id)
        self._socket.close(0)
        self._socket = self._connected()

    def _connected(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.sndhwm = socket.rcvhwm = 2 * MAX_QUESTIONS
        socket.ipv6 = "[" in self._address
        if self._keys is not None:
            equip_peer(socket, self._keys)
        socket.connect(self._address)
        return socket
