"""Garbage for listening sockets.

An attack is one action against one address; callers check afterwards that honest peers are served.
Silent connections stay open until there are many.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgpack
import zmq

from tests.fuzz.mutations import MAX_BYTES, ODD_VALUES, mutate_bytes, mutate_msgpack

MAX_SILENT = 300
CONNECT_S = 5.0
FLOOD = 80
IDENTITIES = (b"c:evil", b"w:0:evil", b"w:999999999:x", b"c:", b"", b"\xff\xfe", b"c:" + b"x" * 253)

Connect = Callable[[], socket.socket]


class Attacker:
    """Plays random attacks. `good` are messages that honest peers send there."""

    def __init__(self, chance: random.Random, good: Sequence[bytes]) -> None:
        self.chance = chance
        self.good = list(good)
        self.played: Counter[str] = Counter()
        self._silent: deque[socket.socket] = deque()

    def attack_stream(self, connect: Connect) -> None:
        """Play one attack on a stream of frames: 4 bytes of length, and a payload."""
        self._play(
            connect,
            {
                "noise": lambda s: s.sendall(self._noise()),
                "a wrong name": lambda s: s.sendall(frame(self._noise()[:300])),
                "noise after a name": lambda s: s.sendall(self._name() + self._noise()),
                "frames of noise": lambda s: s.sendall(self._name() + self._frames(self._noise)),
                "broken messages": lambda s: s.sendall(self._name() + self._frames(self._broken)),
                "a length that never comes": lambda s: s.sendall(
                    self._name() + struct.pack("<I", self.chance.choice((2**32 - 1, 10**6))) + b"x"
                ),
                "half a frame": lambda s: s.sendall((self._name() + frame(b"x" * 999))[:-500]),
                "no reading": self._never_read,
            },
        )

    def attack_packets(self, connect: Connect) -> None:
        """Play one attack on packets that may bring descriptors."""
        self._play(
            connect,
            {
                "noise": lambda s: s.send(self._noise()[:60_000] or b"\0"),
                "a broken packet": lambda s: s.send(self._broken()[:60_000] or b"\0"),
                "odd values": lambda s: s.send(msgpack.packb(self._odd_values())),
                "far too deep": lambda s: s.send(b"\x91" * self.chance.choice((900, 5000))),
                "descriptors": self._bring_descriptors,
                "a packet and no reading": lambda s: s.send(self.chance.choice(self.good)),
            },
        )

    def attack_zmq(self, connect: Connect, endpoint: str) -> None:
        """Play one attack on a ZMQ socket, over a bare connection or from a socket of ZMQ's."""
        if self.chance.random() < 0.4:
            self.played["zmq: odd messages"] += 1
            self._speak_zmq(endpoint)
            return
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
        self._play(
            connect,
            {
                "noise": lambda s: s.sendall(self._noise()),
                "another protocol": lambda s: s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
                "half a greeting": lambda s: s.sendall(greeting[: self.chance.randrange(64)]),
                "noise after a greeting": lambda s: s.sendall(greeting + self._noise()),
                "a length that never comes": lambda s: s.sendall(
                    greeting + b"\x02" + struct.pack(">Q", 2**62) + b"x"
                ),
            },
        )

    def close(self) -> None:
        """Close the silent connections."""
        while self._silent:
            self._silent.popleft().close()

    def _play(self, connect: Connect, deeds: dict[str, Callable[[socket.socket], object]]) -> None:
        name = self.chance.choice((*deeds, "silence", "a flood"))
        self.played[name] += 1
        if name == "a flood":
            for _ in range(FLOOD):
                with suppress(OSError), connect():
                    pass
            return
        with suppress(OSError):
            connected = connect()
            if name == "silence":
                self._silent.append(connected)
                if len(self._silent) > MAX_SILENT:
                    self._silent.popleft().close()
                return
            with connected, suppress(OSError):
                deeds[name](connected)
                if self.chance.random() < 0.5:
                    connected.shutdown(socket.SHUT_WR)
                if self.chance.random() < 0.5:
                    connected.settimeout(0.01)
                    connected.recv(1000)

    def _noise(self) -> bytes:
        return self.chance.randbytes(int(2 ** self.chance.uniform(0, 16)))

    def _name(self) -> bytes:
        return frame(self.chance.choice(IDENTITIES))

    def _frames(self, make: Callable[[], bytes]) -> bytes:
        return b"".join(frame(make()) for _ in range(self.chance.randint(1, 8)))

    def _broken(self) -> bytes:
        good = self.chance.choice(self.good)
        mutate = self.chance.choice((mutate_bytes, mutate_msgpack))
        try:
            return mutate(good, self.good, self.chance)
        except ValueError:  # the good messages are not msgpack
            return mutate_bytes(good, self.good, self.chance)

    def _odd_values(self) -> list[object]:
        return [self.chance.choice((1, *ODD_VALUES[:2])), *self.chance.choices(ODD_VALUES, k=2)]

    def _never_read(self, connected: socket.socket) -> None:
        connected.settimeout(0.05)
        connected.sendall(self._name() + frame(self.chance.choice(self.good)) * 2000)

    def _bring_descriptors(self, connected: socket.socket) -> None:
        ends = os.pipe()
        memory = os.memfd_create("garbage")
        try:
            brought = self.chance.choices((*ends, memory), k=self.chance.randint(1, 4))
            packet = self.chance.choice((self._broken(), msgpack.packb([1, "put", "evil", 7])))
            socket.send_fds(connected, [packet[:4000] or b"\0"], brought)
        finally:
            for descriptor in (*ends, memory):
                os.close(descriptor)

    def _speak_zmq(self, endpoint: str) -> None:
        kind = self.chance.choice((zmq.DEALER, zmq.REQ, zmq.SUB, zmq.PUSH, zmq.ROUTER))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            speaker = context.socket(kind)
            speaker.linger = 0
            if self.chance.random() < 0.3 and kind != zmq.SUB:
                speaker.identity = self.chance.randbytes(self.chance.randint(1, 255))
            speaker.connect(endpoint)
            for _ in range(self.chance.randint(1, 5)):
                with suppress(zmq.ZMQError):
                    if kind == zmq.SUB:
                        speaker.subscribe(self._noise()[:900])
                    else:
                        frames = [self._noise() for _ in range(self.chance.randint(1, 5))]
                        speaker.send_multipart(frames, zmq.DONTWAIT)
            speaker.poll(20)
        finally:
            context.destroy(linger=0)


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload[:MAX_BYTES]


def unix_connector(name: str, kind: socket.SocketKind) -> Connect:
    """Return a function that connects to an abstract name, without its leading NUL or `@`."""

    def connect() -> socket.socket:
        connecting = socket.socket(socket.AF_UNIX, kind)
        try:
            give_up_s = time.monotonic() + CONNECT_S
            while True:
                try:
                    connecting.settimeout(CONNECT_S)
                    connecting.connect(b"\0" + name.encode())
                    return connecting
                except BlockingIOError:  # too many connections are not accepted yet
                    if time.monotonic() > give_up_s:
                        raise
                    time.sleep(0.001)
        except BaseException:
            connecting.close()
            raise

    return connect


def tcp_connector(endpoint: str) -> Connect:
    """Return a function that connects to a `tcp://host:port` endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return lambda: socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
