"""CURVE keys for connections between machines, and the gate that checks them.

The launcher makes one pair of keys for the coordinator and one that all its peers share, and
hands them out through Ray actor calls. The gate answers libzmq's authentication requests (ZAP,
RFC 27), one per connection, and admits only the cluster's own key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvcache.base.errors import ConfigurationError
from kvcache.base.serving_loop import ServingLoop

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 7


@dataclass(frozen=True)
class CurveKeys:
    """Keys of one cluster, Z85-encoded. `repr` does not show the secrets."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    peer_public: bytes
    peer_secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name, key in vars(self).items():
            if not isinstance(key, bytes):  # a secret is not shown
                raise ConfigurationError(f"{name} is {type(key).__name__}: pass bytes, in Z85")

    def for_peers(self) -> CurveKeys:
        """Return a copy without the server's secret, for workers and clients."""
        return CurveKeys(self.server_public, b"", self.peer_public, self.peer_secret)


def generate_curve_keys() -> CurveKeys:
    """Return fresh keys for one cluster."""
    server_public, server_secret = zmq.curve_keypair()
    peer_public, peer_secret = zmq.curve_keypair()
    return CurveKeys(server_public, server_secret, peer_public, peer_secret)


def guard_server(socket: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    """Make the next sockets that `socket` binds CURVE servers, or open ones without `keys`.

    The context of the socket must have a `CurveGate`.
    """
    socket.curve_server = keys is not None
    if keys is not None:
        socket.curve_publickey = keys.server_public
        socket.curve_secretkey = keys.server_secret


def equip_peer(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Give `socket` the keys for its connections. Call it before the socket connects.

    Raises ConfigurationError for invalid keys.
    """
    try:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.peer_public
        socket.curve_secretkey = keys.peer_secret
    except zmq.ZMQError as error:
        raise ConfigurationError(
            "the keys to connect with cannot be read: pass those of the cluster's discovery record"
        ) from error


class CurveGate:
    """Answers authentication requests of one context, in a thread that blocks on its socket.

    Ends when the context is terminated.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        """Open the gate on `context`; it admits every process that has the peers' key."""
        self._allowed = z85.decode(keys.peer_public)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._loop = ServingLoop("kvcache-gate", self._turn)
        self._loop.start()

    def join(self) -> None:
        """Wait until the thread has ended, after the context was terminated."""
        self._loop.join(1.0)

    def _turn(self) -> None:
        try:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._loop.stop()
            self._socket.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        is_welcome = (
            len(frames) == ZAP_FRAMES
            and frames[0] == ZAP_VERSION
            and frames[5] == b"CURVE"
            and frames[6] == self._allowed
        )
        status = (b"200", b"OK") if is_welcome else (b"400", b"not a key of this cluster")
        return [ZAP_VERSION, request_id, *status, b"", b""]
