"""Answers to requests, sent a few messages at a time, as fast as the client reads them.

Part of the publisher's process. No answer delays the live stream, and a client that does not read
cannot make this process grow: a client has one answer at a time, a socket's queue is short, and has
at most one long message. Never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import zmq

from kvcache.base.serving_loop import Faults

QUEUED_MESSAGES: Final = 256
"""Messages that the socket queues for one client."""

_AT_ONCE: Final = 128
_MAX_ANSWERS: Final = 16
_LONG_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 30.0


class Answers:
    """Unsent answers to clients of a ROUTER socket. One user, one thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Send answers by `socket`, which is not bound yet."""
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # reports a full queue
        socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket = socket
        self._answers: dict[bytes, deque[list[bytes]]] = {}
        self._moved_s: dict[bytes, float] = {}
        self._unread: dict[bytes, zmq.MessageTracker] = {}
        self.faults = Faults("answers to followers")
        self.num_given_up = 0
        """Answers that were not read in time, or whose client had gone."""

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def has_room(self) -> bool:
        """Whether more requests can be taken: others wait in the socket."""
        return max(len(self._answers), len(self._unread)) < _MAX_ANSWERS

    def put(self, replies: Iterable[list[bytes]], now_s: float) -> None:
        """Add an answer; it replaces the rest of an earlier one to that client."""
        answer = deque(replies)
        if answer:
            client = answer[0][0]
            self._answers[client], self._moved_s[client] = answer, now_s

    def go_on(self, now_s: float) -> bool:
        """Send some messages; return whether more can be sent at once."""
        self._unread = {c: tracker for c, tracker in self._unread.items() if not tracker.done}
        share = max(1, _AT_ONCE // max(1, len(self._answers)))
        can_go_on = False
        for client in list(self._answers):
            try:
                can_go_on |= self._hand_over(client, share, now_s)
            except Exception as error:
                self.faults.note("an answer", error)
                self._give_up(client)
        return can_go_on

    def _hand_over(self, client: bytes, share: int, now_s: float) -> bool:
        answer = self._answers[client]
        for place in range(share):
            try:
                is_taken = self._send(client, answer[0])
            except zmq.Again:
                is_taken = False
            except zmq.ZMQError:
                self._give_up(client)  # the client has gone
                return False
            if not is_taken:
                if place:
                    self._moved_s[client] = now_s
                elif now_s - self._moved_s[client] > _PATIENCE_S:
                    self._give_up(client)
                return False
            answer.popleft()
            if not answer:
                del self._answers[client], self._moved_s[client]
                return False
        self._moved_s[client] = now_s
        return True

    def _send(self, client: bytes, message: list[bytes]) -> bool:
        """Send a message; return whether the client has room for it. Raises zmq.ZMQError."""
        if len(message[-1]) < _LONG_BYTES:
            self._socket.send_multipart(message, zmq.DONTWAIT)
            return True
        if client in self._unread:
            return False
        tracker = self._socket.send_multipart(message, zmq.DONTWAIT, copy=False, track=True)
        if tracker is not None:
            self._unread[client] = tracker
        return True

    def _give_up(self, client: bytes) -> None:
        self._answers.pop(client, None)
        self._moved_s.pop(client, None)
        self.num_given_up += 1
