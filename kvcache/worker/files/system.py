"""The system calls of the file tier, on names below one directory.

The directory is held by a descriptor: if it is moved, its files stay in use, and nothing is written
in the place of an unplugged disk. All calls may raise OSError. Tests pass files that fail on
demand.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

Buffers = Sequence[bytes | bytearray | memoryview]

MAX_BUFFERS = 1024
"""Limit of one system call."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class IrregularFileError(OSError):
    """A directory, link, pipe or socket has the name of a file."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EISDIR, "it is not a regular file", name)


class DirectoryFiles:
    """Files below an open directory. Names are relative to it."""

    def __init__(self, directory: int) -> None:
        """Use the directory of this descriptor, which the caller keeps and closes."""
        self._directory = directory

    def is_complete(self, name: str) -> bool:
        """Return whether a file need not be written, because another process has done so. Here
        none has: a write replaces the file."""
        return False

    def is_abandoned(self, name: str) -> bool:
        """Return whether nothing writes an unfinished file any more."""
        return True

    def create(self, name: str) -> int:
        """Create a file that only its owner can read; return its descriptor. It must not exist."""
        return os.open(name, _CREATE, 0o600, dir_fd=self._directory)

    def open(self, name: str) -> int:
        """Open a file for reading; links are not followed, and pipes are not waited for.

        Raises IrregularFileError for anything but a regular file.
        """
        try:
            descriptor = os.open(name, _READ | os.O_NONBLOCK, dir_fd=self._directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise IrregularFileError(name) from error
            raise
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise IrregularFileError(name)

    def write(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        """Write buffers in order at `offset`, all or a part; return the number of bytes."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill buffers from `offset` on, all or a part; return the number of bytes, 0 at the
        end."""
        return os.preadv(descriptor, buffers, offset)

    def size(self, descriptor: int) -> int:
        """Return the bytes of an open file."""
        return os.fstat(descriptor).st_size

    def sync(self, descriptor: int) -> None:
        """Sync a file's data to disk."""
        os.fdatasync(descriptor)

    def sync_directory(self, name: str) -> None:
        descriptor = os.open(name, _READ | os.O_DIRECTORY, dir_fd=self._directory)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, replacing any file with the new name."""
        os.rename(name, new_name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def remove(self, name: str) -> None:
        """Remove a file, or an empty directory."""
        try:
            os.unlink(name, dir_fd=self._directory)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=self._directory)

    def make_directory(self, name: str) -> None:
        """Make a directory unless it exists; NotADirectoryError if something else has its name."""
        try:
            os.mkdir(name, 0o700, dir_fd=self._directory)
        except FileExistsError as error:
            found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "it is not a directory", name) from error

    def names_in(self, directory: str) -> list[str]:
        """Return the names in a directory, in any order."""
        descriptor = os.open(directory, _READ | os.O_DIRECTORY, dir_fd=self._directory)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    # --- whole buffers

    def write_all(self, descriptor: int, buffers: Sequence[memoryview]) -> None:
        """Write buffers in order from the beginning of a file; raises OSError."""
        left, offset = [buffer for buffer in buffers if len(buffer)], 0
        while left:
            count = self.write(descriptor, left[:MAX_BUFFERS], offset)
            if count <= 0:
                raise OSError(errno.EIO, "the disk takes nothing")
            offset += count
            left = _behind(left, count)

    def fill(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from `offset` on, up to the end of the file; return the number of bytes.

        Raises OSError.
        """
        left, begin = [buffer for buffer in buffers if len(buffer)], offset
        while left:
            count = self.read(descriptor, left[:MAX_BUFFERS], offset)
            if count <= 0:
                break
            offset += count
            left = _behind(left, count)
        return offset - begin

    def read_start(self, descriptor: int, num_bytes: int) -> bytes:
        """Return the first `num_bytes` of a file, fewer if it is shorter; raises OSError."""
        found = bytearray(num_bytes)
        end = self.fill(descriptor, [memoryview(found)], 0)
        return bytes(found[:end])


def _behind(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the rest of buffers after their first `num_bytes`."""
    for place, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[place + 1 :]]
        num_bytes -= len(buffer)
    return []
