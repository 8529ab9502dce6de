"""The messages between a worker and its node's memory service, and how both authenticate.

One request and one answer per connection. A message is one packet of msgpack; a descriptor travels
with it. The address is an abstract Unix socket: no file remains, and a second memory service is
refused. Every user can see such a name, so both ends ask the kernel which process and user is at
the other end.

    attach, name               returns the descriptor, or none if nothing is kept
    put, name, + descriptor    keeps the memory, replacing older memory that no other process uses
    drop, name                 drops the memory
    list, prefix               returns the names with the prefix, and the number of each memory
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from typing import Any

import msgpack

from kvcache.base.errors import ConfigurationError, MalformedMessageError, VersionMismatchError
from kvcache.base.serving_loop import describe_error

MEMORY_SERVICE_VERSION = 1
MAX_PACKET_BYTES = 1 << 16
MAX_NAME_BYTES = 512

ADDRESS_SCHEME = "unix:@"
MAX_ADDRESS_BYTES = 107

RETRY_S = 0.01
"""Pause after an attempt to connect that found no room."""

VERBS = frozenset({"attach", "put", "drop", "list"})

_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR = struct.Struct("i")
_LOCK = struct.Struct("hhqqi")
"""`struct flock`: type, whence, start, length, process."""
ROOT = 0
"""Root may do everything anyway."""

HIDDEN_PROCESS = -1
"""Stands for a process of another container: the kernel does not tell its number."""


def socket_name(address: str) -> bytes:
    """Return the socket name of `unix:@name`; raises ConfigurationError."""
    name = b"\0" + address.removeprefix(ADDRESS_SCHEME).encode()
    if not address.startswith(ADDRESS_SCHEME) or not 1 < len(name) <= MAX_ADDRESS_BYTES:
        raise ConfigurationError(
            f"memory service address {address!r}: use {ADDRESS_SCHEME} and a name, together at "
            f"most {MAX_ADDRESS_BYTES} bytes"
        )
    return name


def make_socket(timeout_s: float) -> socket.socket:
    """Return a packet socket with a deadline for every call."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout_s)
    return made


def lock_owner(descriptor: int) -> int:
    """Return the process that uses this memory, 0 if no other one than this does."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, process_id = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(process_id) or HIDDEN_PROCESS


def process_text(process_id: int) -> str:
    """Return what `lock_owner` or `peer_process` has found, in words."""
    return f"process {process_id}" if process_id > 0 else "a process of another container"


def memory_number(descriptor: int) -> int:
    """Return the number of the memory: unique, and the same in every process."""
    return os.fstat(descriptor).st_ino


def peer_process(connected: socket.socket) -> int:
    """Return the process at the other end; 0 if it is in another container."""
    return _peer(connected)[0]


def connect(connected: socket.socket, name: bytes, timeout_s: float) -> None:
    """Connect; try again while too many connections wait. Raises OSError, TimeoutError."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            connected.connect(name)
            return
        except BlockingIOError as error:
            if time.monotonic() > give_up_s:
                raise TimeoutError from error
            time.sleep(RETRY_S)


def is_trusted(connected: socket.socket) -> bool:
    """Say whether the process at the other end belongs to this one's user, or to root.

    Nothing else protects an abstract name: every user can see it, connect to it, and take it once
    its owner is dead.
    """
    return _peer(connected)[1] in (os.geteuid(), ROOT)


def send(connected: socket.socket, values: list[Any], descriptor: int | None = None) -> None:
    """Send one packet. Raises OSError."""
    packed: bytes = msgpack.packb([MEMORY_SERVICE_VERSION, *values])
    socket.send_fds(connected, [packed], [] if descriptor is None else [descriptor])


def receive(connected: socket.socket) -> tuple[list[Any], int | None]:
    """Receive one packet; return its values and its descriptor, which the caller then owns.

    Raises OSError, MalformedMessageError, VersionMismatchError; no descriptor stays open then.
    """
    data, ancillary, flags, _ = connected.recvmsg(
        MAX_PACKET_BYTES, socket.CMSG_SPACE(2 * _DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [
        descriptor
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(packed)
    ]
    try:
        values = _values_of(data, flags)
        if len(descriptors) > 1:
            raise MalformedMessageError(f"{len(descriptors)} descriptors came with one packet")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return values, (descriptors[0] if descriptors else None)


def _peer(connected: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end, from the kernel."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user_id, _ = _CREDENTIALS.unpack(packed)
    return process_id, user_id


def _values_of(data: bytes, flags: int) -> list[Any]:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not data:
        raise MalformedMessageError(f"a packet of {len(data)} bytes that is not whole")
    try:
        values = msgpack.unpackb(data)
    except Exception as error:
        text = describe_error(error)
        raise MalformedMessageError(f"a packet that cannot be read: {text}") from error
    if type(values) is not list or not values or type(values[0]) is not int:
        raise MalformedMessageError("a packet without a version")
    if values[0] != MEMORY_SERVICE_VERSION:
        raise VersionMismatchError(
            f"the other end speaks version {values[0]}, this package {MEMORY_SERVICE_VERSION}: "
            "run the same release everywhere"
        )
    return values[1:]
