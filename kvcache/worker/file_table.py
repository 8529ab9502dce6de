"""What a file tier has done, what it holds, and how often something was wrong.

Under file_store.py, whose threads all write here. A directory's files are known once it has been
scanned; until then they are those written there since the start. Others may remove files: the books
hold what this tier wrote or found, and take it back when a read, a discard or a scan finds it gone.
Refuses to let the files grow beyond their bound.
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

    `num_vanished` files were removed by others. `used_bytes` is exact once every directory has been
    scanned.
    """

    num_written: int
    num_read: int
    num_discarded: int
    num_set_aside: int
    num_vanished: int
    used_bytes: int
    problems: Mapping[str, int]


class FileTable:
    """Counts, from any thread.

    Invariant: `_used` is the sum of `_sizes[p]`, by key the bytes of the files in directory `p`;
    `_reserved` is what is being written right now.
    """

    def __init__(self, max_bytes: int) -> None:
        """Let files grow to `max_bytes` together; 0 means without a bound."""
        self._max_bytes = max_bytes
        self._sizes: list[dict[bytes, int]] = [{} for _ in range(NUM_DIRECTORIES)]
        self._used = self._reserved = 0
        self._num_written = self._num_read = self._num_discarded = 0
        self._num_set_aside = self._num_vanished = 0
        self._problems: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        """Take room for a file; raises FileTierError (counted) beyond the bound."""
        with self._lock:
            used = self._used + self._reserved
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

    def wrote(self, key: bytes, num_bytes: int) -> None:
        """A file is there that room was reserved for, in place of any other of this key."""
        with self._lock:
            self._reserved -= num_bytes
            self._take_out(key)
            self._sizes[key[0]][key] = num_bytes
            self._used += num_bytes
            self._num_written += 1

    def read(self) -> None:
        """A file was read, and was good."""
        with self._lock:
            self._num_read += 1

    def discarded(self, key: bytes) -> None:
        """A file was removed."""
        with self._lock:
            self._take_out(key)
            self._num_discarded += 1

    def vanished(self, key: bytes) -> bool:
        """There is no file of this key; say whether there should have been one."""
        with self._lock:
            was_known = self._take_out(key)
            self._num_vanished += was_known
            return was_known

    def set_aside(self, key: bytes | None) -> None:
        """A file was wrong, and counts no more. None: it had the name of no key."""
        with self._lock:
            if key is not None:
                self._take_out(key)
            self._num_set_aside += 1

    def scanned(self, prefix: int, sizes: Mapping[bytes, int]) -> int:
        """These are the files of a directory; return how many have vanished from it."""
        with self._lock:
            old = self._sizes[prefix]
            num_vanished = len(old.keys() - sizes.keys())
            self._num_vanished += num_vanished
            self._used += sum(sizes.values()) - sum(old.values())
            self._sizes[prefix] = dict(sizes)
            return num_vanished

    def all_vanished(self) -> None:
        """All directories are gone."""
        for prefix in range(NUM_DIRECTORIES):
            self.scanned(prefix, {})

    def count(self, kind: Problem) -> int:
        """A problem was met; return how often so far."""
        with self._lock:
            self._problems[kind] += 1
            return self._problems[kind]

    def statistics(self) -> FileTierStatistics:
        """Return frozen statistics."""
        with self._lock:
            return FileTierStatistics(
                self._num_written,
                self._num_read,
                self._num_discarded,
                self._num_set_aside,
                self._num_vanished,
                self._used,
                MappingProxyType(dict(self._problems)),
            )

    def _take_out(self, key: bytes) -> bool:
        """Forget the file of a key; say whether one was known. Locked."""
        num_bytes = self._sizes[key[0]].pop(key, None)
        if num_bytes is None:
            return False
        self._used -= num_bytes
        return True
