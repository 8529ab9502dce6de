"""Small messages between supervisor, fork server and forked processes: JSON, whole or not at
all."""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_BYTES = 2**17


class Control:
    """One end of a message-preserving socket. Never waits; one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        """Own `end`."""
        self._end = end
        self._end.setblocking(False)
        self.is_over = False

    @classmethod
    def pair(cls) -> tuple[Control, socket.socket]:
        """Return one end, and the other one to pass on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the descriptor, -1 if it is closed."""
        return self._end.fileno()

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        """Send `message` with descriptors; dropped if the other end is closed."""
        try:
            socket.send_fds(self._end, [json.dumps(message).encode()], descriptors)
        except OSError:
            self.is_over = True

    def receive(self) -> list[dict[str, Any]]:
        """Return what has arrived; `is_over` says whether more can come."""
        return [message for message, _ in self.receive_with_descriptors()]

    def receive_with_descriptors(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the messages that have arrived, each with its descriptors."""
        arrived: list[tuple[dict[str, Any], list[int]]] = []
        while not self.is_over:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._end, MAX_BYTES, 4)
            except BlockingIOError:
                break
            except OSError:
                data, descriptors = b"", []
            if data:
                arrived.append((json.loads(data), list(descriptors)))
            else:
                self.is_over = True
        return arrived

    def close(self) -> None:
        """Close the socket. Repeatable."""
        self.is_over = True
        self._end.close()
