"""One connection between two processes of a node: payloads, framed, over a Unix stream socket.

Each frame is its length (4 bytes, little endian) and the payload. Sending never waits: what the
other end does not take yet is kept up to a limit, and beyond it refused. Refuses frames that are
longer than any honest end sends before they enter memory. Who is at the other end is said by its
first frame, which is left to others to read; here it is only known which user that is.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from actors.transport.zmq_server import HARD_LIMIT_FACTOR, ZmqLimits
from kvcache.base.errors import MalformedMessageError

UNIX_SCHEME = "unix:@"
"""How the addresses begin: abstract names, no file; a second binder is refused."""

ROOT = 0
"""The user that may do everything anyway."""

CHUNK_BYTES = 64 * 1024
"""Read at once: many small payloads, or a piece of a large one."""

_LENGTH = struct.Struct("<I")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_CREDENTIALS = struct.Struct("3i")
DONTWAIT = int(socket.MSG_DONTWAIT)


def socket_name(address: str) -> bytes:
    """Return what to bind or connect to for `address`."""
    return b"\0" + address.removeprefix(UNIX_SCHEME).encode()


def is_trusted(connected: socket.socket) -> bool:
    """Say whether the process at the other end belongs to this one's user, or to root.

    An abstract name is protected by nothing else: everybody can see it, connect to it, and take it
    once its owner is dead.
    """
    size = _CREDENTIALS.size
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user_id, _ = _CREDENTIALS.unpack(packed)
    return user_id in (os.geteuid(), ROOT)


def framed(payloads: Sequence[bytes]) -> bytes:
    """Return the bytes that carry `payloads`, for `UnixChannel.send`."""
    if len(payloads) == 1:
        return _LENGTH.pack(len(payloads[0])) + payloads[0]
    return b"".join([_LENGTH.pack(len(payload)) + payload for payload in payloads])


class UnixChannel:
    """A connected socket, which it owns. One thread."""

    def __init__(
        self,
        connected: socket.socket,
        limits: ZmqLimits,
        chunk: bytearray | None = None,
        first_frame_bytes: int | None = None,
    ) -> None:
        """Carry payloads over `connected`. Channels of one thread may read into one `chunk`.

        `first_frame_bytes`: more than that is not kept of a first frame before `trust`.
        """
        connected.settimeout(None)
        self._socket = connected
        self._max_frame_bytes = HARD_LIMIT_FACTOR * limits.max_message_bytes
        self._first_frame_bytes = first_frame_bytes
        self._max_waiting = limits.high_water_mark
        self._poller = select.poll()
        self._poller.register(connected.fileno(), select.POLLIN)
        self._chunk = bytearray(CHUNK_BYTES) if chunk is None else chunk
        self._view = memoryview(self._chunk)
        self._partial = bytearray()
        self._waiting: deque[bytes | memoryview] = deque()  # views: a rest is not copied
        self._waiting_bytes = 0

    def fileno(self) -> int:
        """Return the descriptor; readable when something has arrived."""
        return self._socket.fileno()

    @property
    def has_waiting(self) -> bool:
        """Whether something waits for the other end to read."""
        return bool(self._waiting)

    def send(self, frames: bytes) -> bool:
        """Send what `framed` returned, or keep it for `flush`; False when there is no room for it
        either. Raises OSError when the connection has ended.
        """
        if self._waiting:
            is_full = len(self._waiting) >= self._max_waiting
            if is_full or self._waiting_bytes + len(frames) > self._max_frame_bytes:
                return False
        else:
            try:
                num_sent = self._socket.send(frames, _SEND_FLAGS)
            except BlockingIOError:
                num_sent = 0
            if num_sent == len(frames):
                return True
            rest = memoryview(frames)[num_sent:]
            self._waiting.append(rest)
            self._waiting_bytes += len(rest)
            return True
        self._waiting.append(frames)
        self._waiting_bytes += len(frames)
        return True

    def flush(self) -> None:
        """Send what waits, as far as the other end takes it. Raises OSError as `send` does."""
        try:
            while self._waiting:
                frame = self._waiting[0]
                num_sent = self._socket.send(frame, _SEND_FLAGS)
                self._waiting_bytes -= num_sent
                if num_sent == len(frame):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = memoryview(frame)[num_sent:]
        except BlockingIOError:
            return

    def receive(self, timeout_s: float = 0.0) -> list[bytes]:
        """Return the payloads that are complete; wait for the first bytes at most `timeout_s`.

        Raises OSError when the connection has ended, MalformedMessageError for a frame that no
        honest end sends: then close it.
        """
        # Waiting in the call that receives would save 2 us, but after each signal Python begins it
        # anew, with all of its time: a profiler's timer would put off every deadline without end.
        if timeout_s > 0.0 and not self._poller.poll(math.ceil(timeout_s * 1000)):
            return []
        try:
            num_read = self._socket.recv_into(self._chunk, 0, DONTWAIT)
        except BlockingIOError:
            return []
        if not num_read:
            raise ConnectionResetError("the other end has closed the connection")
        # Most of the time one whole payload has arrived and nothing else.
        length = num_read - _LENGTH.size
        if not self._partial and length >= 0 and _LENGTH.unpack_from(self._chunk)[0] == length:
            return [bytes(self._view[_LENGTH.size : num_read])]
        self._partial += self._view[:num_read]
        return self._take_frames()

    def trust(self) -> None:
        """Take frames of any honest length from now on: it is known who is at the other end."""
        self._first_frame_bytes = None

    def close(self) -> None:
        """End the connection. Repeatable."""
        self._socket.close()

    def linger(self, timeout_s: float) -> None:
        """Send what waits within `timeout_s`. For the last words; ends early when it cannot."""
        if not self._waiting:
            return
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(b"".join(self._waiting))
        except OSError:
            return
        finally:
            self._waiting.clear()

    def _take_frames(self) -> list[bytes]:
        partial, payloads, start = self._partial, [], 0
        first_limit = self._first_frame_bytes
        limit = self._max_frame_bytes if first_limit is None else first_limit
        while len(partial) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(partial, start)
            if length > limit:
                raise MalformedMessageError(f"a frame of {length} bytes, the limit is {limit}")
            limit = self._max_frame_bytes
            first = start + _LENGTH.size
            if first + length > len(partial):
                break
            payloads.append(bytes(partial[first : first + length]))
            start = first + length
        del partial[:start]
        return payloads
