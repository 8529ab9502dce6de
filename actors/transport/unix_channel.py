"""One connection between two processes of a node: framed payloads over a Unix stream socket.

A frame is its length (4 bytes, little endian) and the payload. Sending never waits: data that the
other end does not accept yet is kept up to a limit; beyond the limit, sending is refused. Frames
longer than any valid one are refused before they enter memory. The first frame names the sender and
is left to the caller; this module only checks the user of the process.
"""

from __future__ import annotations

import math
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from actors.transport.protocol import HARD_LIMIT_FACTOR, TransportLimits
from kvcache.base.errors import MalformedMessageError

UNIX_SCHEME = "unix:@"
"""Prefix of the addresses: abstract names without files; a second binder is refused."""

CHUNK_BYTES = 64 * 1024
"""Bytes per read: many small payloads, or a part of a large one."""

_LENGTH = struct.Struct("<I")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
DONTWAIT = int(socket.MSG_DONTWAIT)


def socket_name(address: str) -> bytes:
    """Return the socket name of `address`, to bind or connect."""
    return b"\0" + address.removeprefix(UNIX_SCHEME).encode()


def framed(payloads: Sequence[bytes]) -> bytes:
    """Return the frames of `payloads`, for `UnixChannel.send`."""
    if len(payloads) == 1:
        return _LENGTH.pack(len(payloads[0])) + payloads[0]
    return b"".join([_LENGTH.pack(len(payload)) + payload for payload in payloads])


class UnixChannel:
    """A connected socket, owned. Not thread-safe."""

    def __init__(
        self,
        connected: socket.socket,
        limits: TransportLimits,
        chunk: bytearray | None = None,
        first_frame_bytes: int | None = None,
    ) -> None:
        """Carry payloads over `connected`. Channels of one thread may share one read buffer
        `chunk`.

        `first_frame_bytes`: longest first frame before `trust`.
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
        self._waiting: deque[bytes | memoryview] = deque()  # views: unsent rests are not copied
        self._waiting_bytes = 0

    def fileno(self) -> int:
        """Return the descriptor, which is readable when something has arrived."""
        return self._socket.fileno()

    @property
    def has_waiting(self) -> bool:
        """Whether data waits for the other end to read."""
        return bool(self._waiting)

    def send(self, frames: bytes) -> bool:
        """Send what `framed` returned, or keep it for `flush`; return False if there is no room.
        Raises OSError if the connection has ended.
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
        """Send waiting data, as far as the other end accepts it. Raises OSError as `send` does."""
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
        """Return the complete payloads; wait for the first bytes at most `timeout_s`.

        Raises OSError if the connection has ended, MalformedMessageError for an invalid frame: then
        close it.
        """
        # Waiting in the receiving call would save 2 us. But after each signal Python repeats that
        # call with its full timeout, so a profiler's timer would postpone every deadline without
        # end.
        if timeout_s > 0.0 and not self._poller.poll(math.ceil(timeout_s * 1000)):
            return []
        try:
            num_read = self._socket.recv_into(self._chunk, 0, DONTWAIT)
        except BlockingIOError:
            return []
        if not num_read:
            raise ConnectionResetError("the other end has closed the connection")
        # Usually exactly one whole payload has arrived.
        length = num_read - _LENGTH.size
        if not self._partial and length >= 0 and _LENGTH.unpack_from(self._chunk)[0] == length:
            return [bytes(self._view[_LENGTH.size : num_read])]
        self._partial += self._view[:num_read]
        return self._take_frames()

    def trust(self) -> None:
        """Accept frames of any valid length from now on: the sender is known."""
        self._first_frame_bytes = None

    def close(self) -> None:
        """End the connection. Repeatable."""
        self._socket.close()

    def linger(self, timeout_s: float) -> None:
        """Send waiting data within `timeout_s`, for a client's last messages; stops early on
        errors."""
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
