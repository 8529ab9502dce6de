"""What a file tier has done, what it holds, and how often something was wrong.

Beside file_store.py, whose threads all write here. A directory's bytes are known once it has been
scanned; until then they are what was written there since the start. Refuses to let the files grow
beyond their bound.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvcache.worker.file_errors import FileTierError, Problem

NUM_DIRECTORIES = 256


@dataclass(frozen=True)
class FileTierStatistics:
    """What was done so far; `problems` says how often each kind was met.

    `used_bytes` is exact once every directory has been scanned.
    """

    num_written: int
    num_read: int
    num_discarded: int
    num_set_aside: int
    used_bytes: int
    problems: Mapping[str, int]


class FileBooks:
    """Counts, from any thread.

    Invariant: `_used[p]` is what directory `p` holds, as far as known; `_reserved` is what is being
    written right now.
    """

    def __init__(self, max_bytes: int) -> None:
        """Let files grow to `max_bytes` together; 0 means without a bound."""
        self._max_bytes = max_bytes
        self._used = [0] * NUM_DIRECTORIES
        self._reserved = 0
        self._num_written = self._num_read = self._num_discarded = self._num_set_aside = 0
        self._problems: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        """Take room for a file; raises FileTierError (counted) beyond the bound."""
        with self._lock:
            used = sum(self._used) + self._reserved
            if not self._max_bytes or used + num_bytes <= self._max_bytes:
                self._reserved += num_bytes
                return
            self._problems["quota"] += 1
        raise FileTierError(
            "quota",
            f"a file of {num_bytes} bytes beside {used} exceeds the tier's max_bytes, "
            f"{self._max_bytes}: discard blocks, or raise it",
        )

    def release(self, num_bytes: int) -> None:
        """Give room back: nothing was written."""
        with self._lock:
            self._reserved -= num_bytes

    def wrote(self, prefix: int, num_bytes: int, replaced_bytes: int) -> None:
        """A file is there that room was reserved for."""
        with self._lock:
            self._reserved -= num_bytes
            self._used[prefix] += num_bytes - replaced_bytes
            self._num_written += 1

    def read(self) -> None:
        """A file was read, and was good."""
        with self._lock:
            self._num_read += 1

    def discarded(self, prefix: int, num_bytes: int) -> None:
        """A file was removed."""
        with self._lock:
            self._used[prefix] -= num_bytes
            self._num_discarded += 1

    def set_aside(self, prefix: int, num_bytes: int) -> None:
        """A file was wrong, and counts no more."""
        with self._lock:
            self._used[prefix] -= num_bytes
            self._num_set_aside += 1

    def scanned(self, prefix: int, num_bytes: int) -> None:
        """This is what a directory holds."""
        with self._lock:
            self._used[prefix] = num_bytes

    def count(self, kind: Problem) -> int:
        """A problem was met; return how often so far."""
        with self._lock:
            self._problems[kind] += 1
            return self._problems[kind]

    def statistics(self) -> FileTierStatistics:
        """Return the figures, frozen."""
        with self._lock:
            return FileTierStatistics(
                self._num_written,
                self._num_read,
                self._num_discarded,
                self._num_set_aside,
                max(0, sum(self._used)),
                MappingProxyType(dict(self._problems)),
            )
