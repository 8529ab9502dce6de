"""Removes files that no engine reads any more, because a rank's layout has changed.

Each layout fingerprint has its own directories (tier.py). An engine of another weight revision or
number of ranks that may take a directory over finds files there which nothing reads and no limit
counts. A rank removes its own old files, and rank 0 also those of ranks that no longer exist. Other
ranks may have other fingerprints, so theirs are not touched.

A directory is first moved away, under its lock: an engine that starts at the same time with the
old layout makes a new one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcache.base.logs import get_logger
from kvcache.worker.copies.copy_pool import take_priority
from kvcache.worker.files.tier import ABOUT, ABOUT_PREFIX

logger = get_logger(__name__)

MAX_DIRECTORIES = 64
"""Limit of removals at one start. The next start continues."""

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_RANK = re.compile(r"rank(\d+)")
_REMOVED = "removed-"


@dataclass(frozen=True)
class RankPlace:
    """A rank's directories: `root` has one per layout, `fingerprint` is the layout in use."""

    root: Path
    fingerprint: str
    rank: int
    num_ranks: int

    def may_remove(self, rank: int) -> bool:
        """Say whether this rank may remove directories of `rank`."""
        return rank == self.rank or (self.rank == 0 and rank >= self.num_ranks)


def remove_old_layouts(place: RankPlace) -> int:
    """Remove the old directories that this rank may remove and that no process uses; return
    how many. Errors of the disk are logged, not raised."""
    num_removed = 0
    try:
        for directory in _old_directories(place):
            if num_removed == MAX_DIRECTORIES:
                break
            num_removed += _remove(directory, place)
        for trash in place.root.glob(f"{_REMOVED}*"):  # left by a killed process
            shutil.rmtree(trash, ignore_errors=True)
    except OSError as error:
        logger.warning("old files below %s are left there: %s", place.root, error.strerror)
    return num_removed


def remove_in_background(place: RankPlace) -> threading.Thread:
    """Remove them in a thread of low priority, which ends with the process."""

    def run() -> None:
        take_priority("low")
        remove_old_layouts(place)

    thread = threading.Thread(target=run, name="kvcache-old-files", daemon=True)
    thread.start()
    return thread


def layouts_in(root: Path) -> list[Path]:
    """Return the directories of all layouts; raises OSError."""
    return _directories_in(root, _FINGERPRINT)


def _old_directories(place: RankPlace) -> Iterator[Path]:
    for layout in layouts_in(place.root):
        if layout.name == place.fingerprint:
            continue
        for directory in _directories_in(layout, _RANK):
            if place.may_remove(int(directory.name.removeprefix("rank"))):
                yield directory


def _directories_in(parent: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the directories with names of this pattern; links are none."""
    found = sorted(parent.iterdir())
    return [
        path
        for path in found
        if pattern.fullmatch(path.name) and not path.is_symlink() and path.is_dir()
    ]


def _remove(directory: Path, place: RankPlace) -> bool:
    """Remove a directory unless a process has its lock, or it is not a rank's."""
    try:
        lock = os.open(directory / ABOUT, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(lock, len(ABOUT_PREFIX), 0) != ABOUT_PREFIX:
            return False
        trash = place.root / f"{_REMOVED}{uuid.uuid4().hex}"
        directory.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
    except OSError as error:  # in use, or an error of the disk
        logger.info("old files in %s are left there: %s", directory, error.strerror)
        return False
    finally:
        os.close(lock)
    with suppress(OSError):  # it is not empty
        directory.parent.rmdir()
    logger.info("rank %d: removed old files in %s", place.rank, directory)
    return True
