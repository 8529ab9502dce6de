"""Whole buffers to and from a file, however little the system takes at once.

Below file_store.py. Nothing is copied: what is written or read is the caller's memory. Raises what
the file system raises.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvcache.worker.file_system import FileSystem

MAX_BUFFERS = 1024
"""Of one system call."""


def write_all(files: FileSystem, descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write buffers one behind the other from the beginning of a file; raises OSError."""
    left, offset = [buffer for buffer in buffers if len(buffer)], 0
    while left:
        count = files.write(descriptor, left[:MAX_BUFFERS], offset)
        if count <= 0:
            raise OSError(errno.EIO, "the disk takes nothing")
        offset += count
        left = _behind(left, count)


def fill(files: FileSystem, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers from `offset` on, as far as the file goes; return how many bytes that were.

    Raises OSError.
    """
    left, begin = [buffer for buffer in buffers if len(buffer)], offset
    while left:
        count = files.read(descriptor, left[:MAX_BUFFERS], offset)
        if count <= 0:
            break
        offset += count
        left = _behind(left, count)
    return offset - begin


def read_start(files: FileSystem, descriptor: int, num_bytes: int) -> bytes:
    """Return the first `num_bytes` of a file, fewer where it ends earlier; raises OSError."""
    found = bytearray(num_bytes)
    end = fill(files, descriptor, [memoryview(found)], 0)
    return bytes(found[:end])


def _behind(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of buffers behind their first `num_bytes`."""
    for place, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[place + 1 :]]
        num_bytes -= len(buffer)
    return []
