"""The directory of a rank's files, and the lock on it.

Each cluster, layout and rank has its own directory, so files that cannot be exchanged never meet:

    root / cluster / layout fingerprint / rank<k> / about

`about` describes the directory, and is locked by the process that uses it. A directory with another
description, or in use by another process, is refused. A shared directory may be in use by several,
which all share it (shared.py).

A directory that is removed while in use is recreated, empty. It is not recreated if the root is
gone or its place is on another device: then a disk was unplugged, and nothing may be written in its
place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import xxhash

from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.specs import require_count
from kvcache.worker.copies.checksums import ChecksumRule
from kvcache.worker.files.file_pool import Lanes, ThreadLanes
from kvcache.worker.files.format import FORMAT_VERSION, FileTierError
from kvcache.worker.files.shared import ChangeLog, SharedFiles
from kvcache.worker.files.store import FileStore, StoreLimits, Sync
from kvcache.worker.files.system import DirectoryFiles
from kvcache.worker.host_memory.segment import SegmentShape

logger = get_logger(__name__)

ABOUT = "about"
ABOUT_PREFIX = b"blocks of kvcache"
MAX_ABOUT_BYTES = 4096


@dataclass(frozen=True)
class DiskAccess:
    """How a rank accesses its files: `make_files` takes the open directory, `make_lanes` the number
    of lanes. Tests pass others, which fail or are late on demand."""

    make_files: Callable[[int], DirectoryFiles] = DirectoryFiles
    make_lanes: Callable[[int], Lanes] = ThreadLanes


@dataclass(frozen=True)
class FileTierSettings:
    """The file tier of one rank. `cluster` names the directory `below` the `root`, which exists.

    `threads` read and write; at most `max_queued_blocks` wait for them. A rank whose directory is
    unusable does not start. Unless `must_work`: then it starts without files, and every job for
    them reports the reason. With `max_shared_files`, other processes may use the directory, too,
    and all together write at most so many files; `max_bytes` is 0 then. The other fields are
    `StoreLimits`.
    """

    root: Path
    cluster: str
    threads: int = 4
    max_queued_blocks: int = 1024
    max_bytes: int = 0
    sync: Sync = "never"
    max_set_aside: int = 16
    must_work: bool = True
    access: DiskAccess = DiskAccess()
    below: str = ""
    max_shared_files: int = 0

    def __post_init__(self) -> None:
        for name in ("threads", "max_queued_blocks"):
            require_count(name, getattr(self, name))
        for name in ("max_bytes", "max_set_aside", "max_shared_files"):
            require_count(name, getattr(self, name), at_least=0)
        if self.sync not in get_args(Sync):
            raise ConfigurationError(
                f"sync is {self.sync!r}: choose one of {', '.join(get_args(Sync))}"
            )
        if not self.cluster or "/" in self.cluster or self.cluster.startswith("."):
            raise ConfigurationError(
                f"cluster {self.cluster!r} cannot name a directory: use a name without / that does "
                "not begin with a dot"
            )

    @property
    def limits(self) -> StoreLimits:
        return StoreLimits(self.max_bytes, self.sync, self.max_set_aside, self.max_shared_files > 0)


class FileTier:
    """A rank's store, its directory and the lock on it."""

    def __init__(
        self,
        settings: FileTierSettings,
        shape: SegmentShape,
        writer: str,
        rule: ChecksumRule | None = None,
    ) -> None:
        """Create or open the directory. `rule` says which reads to compare, by default all.

        Raises ConfigurationError if it is unusable, has another layout, or is in use by another
        process.
        """
        place = settings.root / settings.below / settings.cluster / shape.layout_fingerprint
        self.directory = place / f"rank{shape.rank}"
        if not os.path.isdir(settings.root):  # a failing disk does not raise here
            raise ConfigurationError(
                f"the file tier's root {settings.root} is not a directory: make or mount it first"
            )
        self._root = settings.root
        self._max_shared_files = settings.max_shared_files
        self._log: ChangeLog | None = None
        self._about = _about(shape)
        self._again = threading.Lock()
        self._device = 0
        try:
            self._directory = self._open()
            self._device = os.fstat(self._directory).st_dev
        except OSError as error:
            raise ConfigurationError(
                f"the file tier's directory {self.directory} cannot be used ({error.strerror}): "
                "let the workers' user write there, or choose another root"
            ) from error
        try:
            self._lock = self._take(self._directory)
            files = self._make_files(settings, shape)
        except BaseException:
            os.close(self._directory)
            raise
        self.store = FileStore(
            files,
            shape,
            settings.limits,
            xxhash.xxh3_64_hexdigest(writer.encode()),
            rule,
            make_again=self._make_again,
        )

    def close(self) -> None:
        """Release directory and lock. No thread may use the store any more."""
        if self._log is not None:
            self._log.close()
        os.close(self._lock)
        os.close(self._directory)

    def _make_files(self, settings: FileTierSettings, shape: SegmentShape) -> DirectoryFiles:
        """Return the calls of a directory; raises ConfigurationError."""
        if not settings.max_shared_files:
            return settings.access.make_files(self._directory)
        try:
            self._log = ChangeLog(self._directory, shape.key_bytes)
            return SharedFiles(self._directory, settings.max_shared_files, self._log)
        except OSError as error:
            raise ConfigurationError(
                f"the file tier's directory {self.directory} cannot be shared ({error.strerror}): "
                "use a local file system, and end processes of this name that hang"
            ) from error

    def _open(self) -> int:
        """Create the directory if necessary, and open it; raises OSError.

        Raises ConfigurationError for another user's directory in which others may write: their
        files would be read as cache.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(directory)
        if found.st_uid != os.geteuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(directory)
            raise ConfigurationError(
                f"the file tier's directory {self.directory} belongs to user {found.st_uid}, and "
                "others may write there: remove it, or choose a root in which only the workers' "
                "user may write"
            )
        return directory

    def _take(self, directory: int) -> int:
        """Lock a directory and compare its description; return the lock's descriptor.

        Raises ConfigurationError.
        """
        expected = self._about
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(ABOUT, flags, 0o600, dir_fd=directory)
        except OSError as error:
            raise ConfigurationError(
                f"{self.directory / ABOUT} cannot be written ({error.strerror}): let the workers' "
                "user write there, or choose another root"
            ) from error
        try:
            kind = fcntl.LOCK_SH if self._max_shared_files else fcntl.LOCK_EX
            fcntl.lockf(lock, kind | fcntl.LOCK_NB)
            found = os.pread(lock, MAX_ABOUT_BYTES, 0)
            if not found:
                os.pwrite(lock, expected, 0)
        except OSError as error:
            os.close(lock)
            raise ConfigurationError(
                f"the file tier's directory {self.directory} is in use by another process, or "
                f"cannot be written ({error.strerror}): give every cluster a root or name of its "
                "own"
            ) from error
        if found and found != expected:
            os.close(lock)
            raise ConfigurationError(
                f"the file tier's directory {self.directory} holds {_shown(found)}, this rank "
                f"needs {_shown(expected)}: choose another root, or remove the directory"
            )
        return lock

    def _make_again(self) -> None:
        """Replace the removed directory by an empty one, unless another thread has done so. Raises
        FileTierError."""
        with self._again:
            try:
                self._replace()
            except (OSError, ConfigurationError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise FileTierError(
                    "unplugged",
                    f"the file tier's directory {self.directory} is gone, and cannot be made again "
                    f"({why}): bring it back, or restart the workers",
                ) from error

    def _replace(self) -> None:
        place = self.directory
        while place != self._root and not place.exists():
            place = place.parent
        if os.stat(place).st_dev != self._device:
            raise OSError(errno.ENODEV, f"{place} is on another device now")
        if self.directory.exists() and os.path.samestat(
            os.stat(self.directory), os.fstat(self._directory)
        ):
            return
        made = self._open()
        try:
            if os.listdir(made) and not self._max_shared_files:
                raise OSError(errno.ENOTEMPTY, "another one is in its place, and is not empty")
            lock = self._take(made)
            self.store.forget_all()
            os.dup2(made, self._directory, inheritable=False)
        finally:
            os.close(made)
        os.close(self._lock)
        self._lock = lock
        logger.warning(
            "files of rank %d: directory %s was removed by another process, and is made again",
            self.store.shape.rank,
            self.directory,
        )


def _about(shape: SegmentShape) -> bytes:
    text = (
        f"{ABOUT_PREFIX.decode()}, format {FORMAT_VERSION}, layout {shape.layout_fingerprint}, "
        f"rank {shape.rank}, {shape.slot_bytes} bytes each, keys of {shape.key_bytes} "
        "bytes\n"
    )
    return text.encode()


def _shown(about: bytes) -> str:
    return repr(about.decode(errors="replace").strip()[:300])
