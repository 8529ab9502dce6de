"""Files that were wrong, kept apart for somebody to look at: the last few of them.

Used by `file_store.py`. A directory or pipe with the name of a file goes the same way. A file that
cannot be moved is removed: it must not be found again under its name. A directory that holds
something is never removed.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from contextlib import suppress
from itertools import count

from kvcache.worker.file_errors import Problem
from kvcache.worker.file_system import FileSystem

SET_ASIDE_DIRECTORY = "set-aside"


class SetAside:
    """Moves wrong files into a directory of their own, from any thread. Bounded."""

    def __init__(self, files: FileSystem, max_files: int) -> None:
        """Keep at most `max_files`."""
        self._files = files
        self._max_files = max_files
        self._names: deque[str] | None = None
        self._lock = threading.Lock()

    def put(self, name: str, kind: Problem) -> None:
        """Move what lies under `name` away; raises OSError when it cannot even be removed."""
        target = f"{SET_ASIDE_DIRECTORY}/{name.rpartition('/')[2]}.{kind}"
        with self._lock:
            names = self._known()
            try:
                target = self._move(name, target)
            except OSError:
                self._files.remove(name)
                return
            if target in names:
                names.remove(target)
            names.append(target)
            while len(names) > self._max_files:
                with suppress(OSError):  # it holds something, or is gone
                    self._files.remove(names.popleft())

    def forget(self) -> None:
        """Look again what is there: the directory is another one."""
        with self._lock:
            self._names = None

    def _move(self, name: str, target: str) -> str:
        """Move it to `target`, or next to it if a directory is in the way; return where to."""
        try:
            self._files.make_directory(SET_ASIDE_DIRECTORY)
            self._files.rename(name, target)
            return target
        except NotADirectoryError:
            with suppress(OSError):  # a file where that directory should be
                self._files.remove(SET_ASIDE_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST):
                raise
        names = self._known()
        target = next(new for n in count(1) if (new := f"{target}.{n}") not in names)
        self._files.make_directory(SET_ASIDE_DIRECTORY)
        self._files.rename(name, target)
        return target

    def _known(self) -> deque[str]:
        """Return what is there, the oldest first; what another process left has no order."""
        if self._names is None:
            try:
                found = self._files.names_in(SET_ASIDE_DIRECTORY)
            except OSError:
                found = []
            self._names = deque(f"{SET_ASIDE_DIRECTORY}/{name}" for name in sorted(found))
        return self._names
