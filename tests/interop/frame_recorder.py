"""The frames that a publisher sends, live and on request.

Two bare sockets: nothing is decoded, reordered or repaired.
"""

from __future__ import annotations

import time

import zmq

from tests.interop.wire_rules import WireRules

_PATIENCE_S = 60.0


class FrameRecorder:
    """Subscribes to everything, and sends requests."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        """Connect; the subscription takes effect some time later."""
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, 0)
        self._live.connect(endpoint)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def __enter__(self) -> FrameRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.close(0)
        self._replay.close(0)
        self._context.term()

    def listen(self) -> list[bytes]:
        """Wait for a live message and return it."""
        assert self._live.poll(int(1000 * _PATIENCE_S)), "nothing is published"
        return self._live.recv_multipart()

    def follow(self, rules: WireRules, seq: int) -> None:
        """Check all messages up to number `seq` against `rules`, live ones where possible.

        Messages that the socket lost during a reconnect are requested.
        """
        while rules.last_seq < seq:
            frames = self.listen()
            if int.from_bytes(frames[1], "big") > rules.last_seq + 1:
                for reply in self.ask(b"", (rules.last_seq + 1).to_bytes(8, "big")):
                    rules.on_reply(reply)
            rules.on_live(frames)

    def ask(self, *request: bytes) -> list[list[bytes]]:
        """Send a request; return its answer, including the end mark."""
        self._replay.send_multipart(list(request))
        found: list[list[bytes]] = []
        give_up_s = time.monotonic() + _PATIENCE_S
        while not found or not is_end(found[-1]):
            assert time.monotonic() < give_up_s, f"no end after {len(found)} messages"
            if self._replay.poll(100):
                found.append(self._replay.recv_multipart())
        return found


def is_end(frames: list[bytes]) -> bool:
    return len(frames) == 4 and frames[2] == b"\xff" * 8
