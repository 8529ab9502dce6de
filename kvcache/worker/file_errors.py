"""What can go wrong with a block's file, sorted by what it means.

Lowest layer of the file tier. Nothing of this stops a worker: a block that cannot be read is a
miss, one that cannot be written is not stored, and somebody counts it.
"""

from __future__ import annotations

import errno
from typing import Literal, TypeAlias

from kvcache.base.errors import KVCacheError

Problem: TypeAlias = Literal[
    "missing",  # no such file
    "truncated",  # shorter than it says
    "damaged",  # a checksum is wrong, or nothing makes sense
    "foreign",  # another layout, rank or size of blocks
    "wrong_key",  # another block's file under this name
    "version",  # another format
    "quota",  # the tier's own bound
    "no_space",  # the disk is full
    "denied",  # permissions, or a read-only disk
    "unplugged",  # the directory is not there any more
    "backlog",  # too many blocks are waiting already
    "io",  # anything else that the system reports
]

SET_ASIDE: frozenset[Problem] = frozenset(
    ("truncated", "damaged", "foreign", "wrong_key", "version")
)
"""After these a file is kept apart, for somebody to look at."""

LOST = SET_ASIDE | frozenset[Problem](("missing",))
"""After these nothing can be read there again; after any other, perhaps another time."""


class FileTierError(KVCacheError):
    """A block that cannot be written to, or read from, its file. Nothing else is affected."""

    def __init__(self, kind: Problem, message: str) -> None:
        """Say what is wrong; `kind` is for counting."""
        super().__init__(message)
        self.kind: Problem = kind


_KINDS: dict[int, Problem] = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.ENOENT: "unplugged",
    errno.ENODEV: "unplugged",
    errno.ENXIO: "unplugged",
    errno.ENOTCONN: "unplugged",
    errno.ESTALE: "unplugged",
}

_REMEDIES: dict[Problem, str] = {
    "no_space": "free space on the disk, or lower the tier's size",
    "denied": "let the workers' user write there",
    "unplugged": "bring the directory back, and restart the workers",
}


def from_os_error(what: str, error: OSError) -> FileTierError:
    """Return what a system call's failure means; `what` says what was being done."""
    kind = _KINDS.get(error.errno or 0, "io")
    remedy = _REMEDIES.get(kind, "look at the disk")
    return FileTierError(kind, f"{what}: {error.strerror or error}: {remedy}")
