"""Where a rank's files lie, and who may use them.

Between a worker's settings and file_store.py. One directory for each cluster, layout and rank, so
that what cannot be exchanged never meets:

    root / cluster / layout fingerprint / rank<k> / about

The directory says what it holds, and is locked by the process that uses it. Refuses a directory
that says something else, or that a living process has.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import xxhash

from kvcache.errors import ConfigurationError
from kvcache.specs import require_count
from kvcache.worker.checksums import ChecksumRule
from kvcache.worker.file_format import FORMAT_VERSION
from kvcache.worker.file_lanes import Lanes, ThreadLanes
from kvcache.worker.file_store import BlockIdentity, FileStore, StoreLimits, Sync
from kvcache.worker.file_system import DirectoryFiles, FileSystem

ABOUT = "about"
MAX_ABOUT_BYTES = 4096


@dataclass(frozen=True)
class DiskAccess:
    """By what a rank gets at its files: `make_files` is given the open directory, `make_lanes` how
    many lanes there are to be. Tests hand in others, which fail and come late as they are told."""

    make_files: Callable[[int], FileSystem] = DirectoryFiles
    make_lanes: Callable[[int], Lanes] = ThreadLanes


@dataclass(frozen=True)
class FileTierSettings:
    """The file tier of one rank. `cluster` names the directory below `root`, which exists.

    `threads` read and write; at most `max_queued_blocks` wait for them. A rank whose directory
    cannot be used does not start, or, unless `must_work`, starts without it and says why in every
    job for it. `access` says by what it gets at the disk. The other fields are `StoreLimits`.
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

    def __post_init__(self) -> None:
        for name in ("threads", "max_queued_blocks"):
            require_count(name, getattr(self, name))
        for name in ("max_bytes", "max_set_aside"):
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
        """What the store keeps to."""
        return StoreLimits(self.max_bytes, self.sync, self.max_set_aside)


class FileTier:
    """A rank's store, its directory and the lock on it."""

    def __init__(
        self,
        settings: FileTierSettings,
        identity: BlockIdentity,
        writer: str,
        rule: ChecksumRule | None = None,
    ) -> None:
        """Make the directory, or use the one that is there. `rule`: what is compared on reading,
        all by default.

        Raises ConfigurationError when it cannot be used, is another layout's, or another process's.
        """
        self.directory = (
            settings.root / settings.cluster / identity.layout_fingerprint / f"rank{identity.rank}"
        )
        if not os.path.isdir(settings.root):  # a sick disk raises nothing here
            raise ConfigurationError(
                f"the file tier's root {settings.root} is no directory: make or mount it first"
            )
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"the file tier's directory {self.directory} cannot be used ({error.strerror}): "
                "let the workers' user write there, or choose another root"
            ) from error
        try:
            self._lock = self._take(identity)
        except BaseException:
            os.close(self._directory)
            raise
        self.store = FileStore(
            settings.access.make_files(self._directory),
            identity,
            settings.limits,
            xxhash.xxh3_64_hexdigest(writer.encode()),
            rule,
        )

    def close(self) -> None:
        """Give directory and lock back. No thread uses the store any more."""
        os.close(self._lock)
        os.close(self._directory)

    def _take(self, identity: BlockIdentity) -> int:
        """Lock the directory and compare what it says; return the lock's descriptor."""
        expected = _about(identity)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(ABOUT, flags, 0o600, dir_fd=self._directory)
        except OSError as error:
            raise ConfigurationError(
                f"{self.directory / ABOUT} cannot be written ({error.strerror}): let the workers' "
                "user write there, or choose another root"
            ) from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _about(identity: BlockIdentity) -> bytes:
    text = (
        f"blocks of kvcache, format {FORMAT_VERSION}, layout {identity.layout_fingerprint}, "
        f"rank {identity.rank}, {identity.block_bytes} bytes each, keys of {identity.key_bytes} "
        "bytes\n"
    )
    return text.encode()


def _shown(about: bytes) -> str:
    return repr(about.decode(errors="replace").strip()[:300])
