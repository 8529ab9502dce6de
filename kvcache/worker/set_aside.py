"""Files that were wrong, kept apart for somebody to look at: the last few of them.

Beside file_store.py. A file that cannot be moved is removed: nobody shall find it again under its
name.
"""

from __future__ import annotations

import threading
from collections import deque

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
        """Move the file `name`, `directory/file`, away; raises OSError when it cannot even be
        removed."""
        target = f"{SET_ASIDE_DIRECTORY}/{name[3:]}.{kind}"
        with self._lock:
            names = self._known()
            try:
                self._files.make_directory(SET_ASIDE_DIRECTORY)
                self._files.rename(name, target)
            except OSError:
                self._files.remove(name)
                return
            if target in names:
                names.remove(target)
            names.append(target)
            while len(names) > self._max_files:
                self._files.remove(names.popleft())

    def _known(self) -> deque[str]:
        """Return what is there, the oldest first; what another process left has no order."""
        if self._names is None:
            try:
                found = self._files.names_in(SET_ASIDE_DIRECTORY)
            except OSError:
                found = []
            self._names = deque(f"{SET_ASIDE_DIRECTORY}/{name}" for name in sorted(found))
        return self._names
