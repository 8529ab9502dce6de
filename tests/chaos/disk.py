"""A real disk for one cluster, and real faults while it is in use.

    mount, as root ──▶ fill · forbid · unplug · spoil ──▶ unmount

The disk is a file system in memory of a few MiB, mounted for one test; mounting needs root. Faults
come from outside, on the disk that the processes of the cluster have open.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE_MIB = 8
FILL_BYTES = 1 << 16


class NotHereError(Exception):
    """This user, or this machine, cannot do that."""


@dataclass(frozen=True)
class Disk:
    """Where it is mounted. Ranks have a directory each, `*/*/rank0` and so on."""

    root: Path

    def files_of(self, rank: int) -> list[Path]:
        """Return a rank's files."""
        return sorted(self.root.glob(f"*/*/rank{rank}/??/*.kvb"))

    def fill(self) -> None:
        """Fill the disk completely."""
        with (self.root / "filler").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(FILL_BYTES))
            except OSError:
                return

    def empty(self) -> None:
        """Undo `fill`."""
        (self.root / "filler").unlink()

    def forbid(self) -> None:
        """Make the disk read-only, even for root."""
        self._set_flags("+i")

    def allow(self) -> None:
        """Make the disk writable again."""
        self._set_flags("-i")

    def _set_flags(self, flags: str) -> None:
        _call("chattr", "-R", flags, str(self.root))

    def remove(self) -> None:
        """Remove the directory of one rank with all contents: it can be created again."""
        (directory,) = self.root.glob("*/*/rank1")
        shutil.rmtree(directory)

    def unplug(self) -> None:
        """Remove it permanently: a file takes its place."""
        (directory,) = self.root.glob("*/*/rank1")
        shutil.rmtree(directory)
        directory.touch()

    def spoil(self, do: Callable[[Path], None]) -> None:
        """Apply a function to every file of one rank."""
        for path in self.files_of(1):
            do(path)


def flip_a_bit(path: Path) -> None:
    """Change the content, like a failing disk."""
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    """Remove the last byte, like a crash."""
    os.truncate(path, path.stat().st_size - 1)


@contextmanager
def mounted(root: Path) -> Iterator[Disk]:
    """Mount a disk there, and unmount it again, even if processes have it open."""
    root.mkdir()
    _call("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "kvcache-test", str(root))
    try:
        yield Disk(root)
    finally:
        _call("umount", "-l", str(root))


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotHereError(f"{' '.join(command[:-1])}: {error}") from error
