"""A state store of a coordinator without Ray, whose process is killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcache.base.errors import ClusterError
from kvcache.protocol.state_store import MAX_STATE_BYTES, SmallState, require_saved


class FileStateStore:
    """A file that is replaced as a whole: written, synced, renamed. Only its owner can read it."""

    def __init__(self, path: Path) -> None:
        """Use the file at `path`, which need not exist; its directory must."""
        self.path = path

    def load(self) -> SmallState | None:
        """Return the saved state. Raises as `SmallState.from_bytes`; ClusterError on I/O errors."""
        try:
            with open(self.path, "rb") as file:
                data = file.read(MAX_STATE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClusterError(f"state file {self.path} cannot be read: {error}") from error
        return SmallState.from_bytes(data, f"state file {self.path}")

    def save(self, state: SmallState, replaces: SmallState | None) -> None:
        """Replace the file atomically and durably, one process at a time; see `StateStore`."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with self._locked():
                require_saved(self.load(), replaces, f"state file {self.path}")
                self._write(temporary, state.to_bytes())
                os.replace(temporary, self.path)
                self._sync_directory()
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ClusterError(
                f"state file {self.path} cannot be written: {error}: free space or choose another "
                "directory"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock: the file itself is replaced, not changed."""
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _sync_directory(self) -> None:
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
