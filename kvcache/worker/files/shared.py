"""One directory of files that several processes of a node write and read.

    rank0/changes     a head: how many files there are, how many changes there were;
                      then a ring of the last changes, each a key and whether it has a file now

Each call that adds or removes the name of a file runs under the lock of `changes`, is counted there
and written down. So the limit holds for all writers together, and a follower learns what others
have written without listing directories. No process owns a file: each may remove any, and a reader
believes only what it finds in the file itself.

The kernel releases the lock of a killed process. The count is raised before a file is made, and
lowered after one is removed: a process that is killed in between leaves it one too high. Each
start, and each write at the limit, lists the directory and corrects the count.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcache.base.logs import get_logger
from kvcache.worker.files.format import FileTierError
from kvcache.worker.files.store import NUM_DIRECTORIES, SUFFIX, UNFINISHED, key_of
from kvcache.worker.files.system import DirectoryFiles

logger = get_logger(__name__)

CHANGES = "changes"
RING = 1 << 15
"""Changes that can be read again. A follower that is further behind lists the directory."""

LOCK_S = 1.0
"""How long a call waits for the lock. Others keep it for microseconds, unless they are stopped."""

AGAIN_S = 10.0
"""How long calls do not wait after one has waited in vain, and files are not listed again."""

_LOOK_S = 0.001
_HEAD = struct.Struct("<8sqqI")
_MAGIC = b"kvcbchg1"
_RING_START = 64

Changes = dict[bytes, bool]
"""Keys, and whether they have a file now."""


class ChangeLog:
    """The file `changes` in an open directory. Thread-safe: everything but `open` and `close` needs
    the lock."""

    def __init__(self, directory: int, key_bytes: int) -> None:
        """Use the directory of this descriptor; keys have `key_bytes`."""
        self._directory = directory
        self._entry_bytes = key_bytes + 1
        self._file = -1
        self._thread_lock = threading.Lock()
        self._no_waiting_until_s = 0.0
        self.num_files = self.num_changes = 0

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Keep other processes and threads out, and read the head; False if that was damaged or
        new. Raises OSError if the lock is not to be had within `LOCK_S`."""
        now_s = time.monotonic()
        give_up_s = now_s if now_s < self._no_waiting_until_s else now_s + LOCK_S
        if not self._thread_lock.acquire(timeout=LOCK_S):
            raise self._no_lock()
        try:
            self._lock(give_up_s)
            try:
                yield self._read_head()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def set_count(self, num_files: int) -> None:
        """Say how many files there are."""
        self.num_files = max(0, num_files)
        packed = _HEAD.pack(_MAGIC, self.num_files, self.num_changes, 0)[:-4]
        os.pwrite(self._file, packed + struct.pack("<I", zlib.crc32(packed)), 0)

    def note(self, key: bytes, is_there: bool, num_more: int = 0) -> None:
        """Write down that a key has a file now, or has none, and count it."""
        offset = _RING_START + self.num_changes % RING * self._entry_bytes
        os.pwrite(self._file, key + bytes([is_there]), offset)
        self.num_changes += 1
        self.set_count(self.num_files + num_more)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lock(self, give_up_s: float) -> None:
        """Lock the file that has the name now: an operator, or the end of the directory, may have
        taken the one before away."""
        while True:
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.open(CHANGES, flags, 0o600, dir_fd=self._directory)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    self._no_waiting_until_s = time.monotonic() + AGAIN_S
                    raise self._no_lock() from None
                time.sleep(_LOOK_S)
                continue
            if os.fstat(self._file).st_nlink:
                return
            self.close()

    def _no_lock(self) -> OSError:
        return OSError(
            errno.EAGAIN, f"another process has locked {CHANGES}, and does not go on: end it"
        )

    def _read_head(self) -> bool:
        found = _head_of(self._file)
        if found is None:  # followers list everything
            self.num_files, self.num_changes = 0, secrets.randbits(60)
            return False
        self.num_files, self.num_changes = found
        return True


class SharedFiles(DirectoryFiles):
    """Files of a directory that other processes write, too: at most `max_files` of them.

    Counts `3f/3fa9….kvb` and files that will get such a name, not those set aside.
    """

    def __init__(self, directory: int, max_files: int, log: ChangeLog) -> None:
        """Use the directory of this descriptor and its `log`, and count its files; raises
        OSError."""
        super().__init__(directory)
        self._max_files = max_files
        self._log = log
        self._count_at_s = 0.0
        with self._log.locked():
            self._log.set_count(self._num_found())

    def is_complete(self, name: str) -> bool:
        """Return whether a file is there already, and tell followers if so."""
        key = key_of(name)
        if key is None or not self._has(name):
            return False
        with self._locked():
            is_there = self._has(name)  # another process may just have removed it
            if is_there:
                self._log.note(key, is_there=True)
        return is_there

    def is_abandoned(self, name: str) -> bool:
        """Return whether an unfinished file's writer has ended: it has no lock on it.

        True also in the moment before the file gets its final name. If it is removed then, its
        writer writes it again.
        """
        with self._locked():
            try:
                file = os.open(
                    name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._directory
                )
            except OSError:
                return False
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            finally:
                os.close(file)
        return True

    def create(self, name: str) -> int:
        """Create a file, unless there are as many as may be; FileTierError then."""
        with self._locked():
            log = self._log
            if log.num_files >= self._max_files and time.monotonic() >= self._count_at_s:
                self._count_at_s = time.monotonic() + AGAIN_S
                log.set_count(self._num_found())
            if log.num_files >= self._max_files:
                raise FileTierError(
                    "quota",
                    f"{log.num_files} files of all writers are as many as may be, "
                    f"{self._max_files}: discard blocks, or raise the tier's size",
                )
            log.set_count(log.num_files + 1)
            try:
                file = super().create(name)
            except OSError:
                log.set_count(log.num_files - 1)
                raise
            with suppress(OSError):  # on a file system without locks, files are never abandoned
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file: give it its final name, or set it aside."""
        with self._locked():
            old, new = key_of(name), key_of(new_name)
            is_there = new is not None and self._has(new_name)
            super().rename(name, new_name)
            if new is not None:
                self._log.note(new, True, -1 if is_there else 0)
            elif old is not None:
                self._log.note(old, False, -1)

    def remove(self, name: str) -> None:
        """Remove a file, or an empty directory."""
        if not _is_counted(name):
            super().remove(name)
            return
        with self._locked():
            super().remove(name)
            key = key_of(name)
            if key is not None:
                self._log.note(key, False, -1)
            else:
                self._log.set_count(self._log.num_files - 1)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._log.locked() as is_known:
            if not is_known:
                self._log.set_count(self._num_found())
            yield

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _num_found(self) -> int:
        num_found = 0
        for prefix in range(NUM_DIRECTORIES):
            directory = f"{prefix:02x}"
            with suppress(FileNotFoundError, NotADirectoryError):
                names = self.names_in(directory)
                num_found += sum(_is_counted(f"{directory}/{name}") for name in names)
        return num_found


class DirectoryFollower:
    """Follows what the writers of a directory do, from any process. Never waits for a lock."""

    def __init__(self, directory: str, position: int, key_bytes: int) -> None:
        """Begin behind the change number `position`."""
        self._directory = Path(directory)
        self._entry_bytes = key_bytes + 1
        self._position = position
        self._file = -1

    def changes(self) -> Changes | None:
        """Return what has changed since the last call; None if that is no longer written down.
        Raises OSError."""
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            self.close()
        if self._file < 0:
            self._file = os.open(self._directory / CHANGES, os.O_RDONLY | os.O_CLOEXEC)
        head = _head_of(self._file)
        if head is None:
            return {}  # it is being made
        end, start = head[1], self._position
        if end == start:
            return {}
        self._position = end
        if not 0 <= start < end <= start + RING:
            return None
        found: Changes = {}
        self._position = -1  # after an error, the directory is listed
        pieces = list(self._read(start, end))
        now = _head_of(self._file)
        self._position = end
        if sum(map(len, pieces)) != (end - start) * self._entry_bytes:
            return None
        for data in pieces:
            for place in range(0, len(data), self._entry_bytes):
                entry = data[place : place + self._entry_bytes]
                found[entry[:-1]] = bool(entry[-1])
        return found if now is not None and now[1] - start < RING else None

    def keys(self) -> set[bytes]:
        """Return all keys that have a file. Lists the directories."""
        found = set()
        for prefix in range(NUM_DIRECTORIES):
            directory = f"{prefix:02x}"
            with suppress(OSError):
                for name in os.listdir(self._directory / directory):
                    if (key := key_of(f"{directory}/{name}")) is not None:
                        found.add(key)
        return found

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the changes with these numbers, in one piece or in two."""
        while start < end:
            first = start % RING
            count = min(end - start, RING - first)
            size = self._entry_bytes
            yield os.pread(self._file, count * size, _RING_START + first * size)
            start += count


def position_in(directory: str) -> int:
    """Return how many changes there were in a directory, -1 if that is not known."""
    try:
        file = os.open(Path(directory) / CHANGES, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        head = _head_of(file)
    finally:
        os.close(file)
    return -1 if head is None else head[1]


def _head_of(file: int) -> tuple[int, int] | None:
    """Return the numbers of files and of changes; None if they are not there, or damaged."""
    data = os.pread(file, _HEAD.size, 0)
    if len(data) < _HEAD.size:
        return None
    magic, num_files, num_changes, crc = _HEAD.unpack(data)
    if magic != _MAGIC or crc != zlib.crc32(data[:-4]):
        return None
    return num_files, num_changes


def _is_counted(name: str) -> bool:
    directory, _, file = name.partition("/")
    return len(directory) == 2 and file.endswith((SUFFIX, UNFINISHED))
