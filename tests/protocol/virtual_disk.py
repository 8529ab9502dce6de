"""A rank's disk in a simulated schedule: real files, virtual time, faults from a seed.

`VirtualLanes` executes file operations when the virtual clock reaches their time, lane by lane, in
an order drawn by the seed. `SickFiles` is a real directory whose calls sometimes fail, and whose
files are sometimes damaged.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcache.base.clock import Clock
from kvcache.worker.files.file_pool import Task
from kvcache.worker.files.store import SUFFIX
from kvcache.worker.files.system import Buffers, DirectoryFiles
from kvcache.worker.files.tier import DiskAccess

MAX_UNPLUGGED_S = 1.5

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE)
DAMAGE = (
    "cut",
    "bit",
    "gone",
    "directory gone",
    "other file",
    "directory",
    "full directory",
    "pipe",
    "link",
    "file for directory",
)
VANISHED_SHARES = (0.1, 0.5, 1.0)
"""Share of all files that a cleaner removes at a time."""


class VirtualLanes:
    """Lanes that work only on demand."""

    def __init__(self, num_lanes: int, disk: VirtualDisk) -> None:
        self._disk = disk
        self._lanes: list[deque[tuple[float, Task]]] = [deque() for _ in range(num_lanes)]

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lanes))

    def put(self, lane: int, task: Task) -> None:
        self._lanes[lane].append((self._disk.due_s(), task))

    def close(self, timeout_s: float) -> bool:
        while self.num_waiting:
            self.run_due(float("inf"))
        return True

    def run_due(self, now_s: float) -> None:
        """Execute, in each lane, the first operation that is due."""
        order = list(range(len(self._lanes)))
        self._disk.random.shuffle(order)
        for lane in order:
            tasks = self._lanes[lane]
            while tasks and tasks[0][0] <= now_s:
                tasks.popleft()[1]()

    def kill(self) -> None:
        """Stop: the process is dead."""
        for tasks in self._lanes:
            tasks.clear()


class SickFiles(DirectoryFiles):
    """A directory on a disk that fails as often as its `VirtualDisk` says."""

    def __init__(self, directory: int, disk: VirtualDisk) -> None:
        super().__init__(directory)
        self._disk = disk
        self.open_descriptors: set[int] = set()

    def create(self, name: str) -> int:
        self._disk.may_vanish()
        self._disk.may_fail()
        descriptor = super().create(name)
        self.open_descriptors.add(descriptor)
        return descriptor

    def open(self, name: str) -> int:
        self._disk.may_damage(name)
        self._disk.may_fail()
        descriptor = super().open(name)
        self.open_descriptors.add(descriptor)
        return descriptor

    def write(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        self._disk.may_fail()
        data = b"".join(bytes(buffer) for buffer in buffers)
        return super().write(descriptor, [data[: self._disk.part_of(len(data))]], offset)

    def read(self, descriptor: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._disk.may_fail()
        first = memoryview(buffers[0])
        return super().read(descriptor, [first[: self._disk.part_of(len(first))]], offset)

    def sync(self, descriptor: int) -> None:
        self._disk.may_fail()
        super().sync(descriptor)

    def sync_directory(self, name: str) -> None:
        self._disk.may_fail()
        super().sync_directory(name)

    def close(self, descriptor: int) -> None:
        self.open_descriptors.discard(descriptor)
        super().close(descriptor)
        self._disk.may_fail()

    def rename(self, name: str, new_name: str) -> None:
        self._disk.may_fail()
        super().rename(name, new_name)

    def remove(self, name: str) -> None:
        self._disk.may_fail()
        super().remove(name)

    def make_directory(self, name: str) -> None:
        self._disk.may_fail()
        super().make_directory(name)

    def names_in(self, directory: str) -> list[str]:
        self._disk.may_fail()
        return super().names_in(directory)


@dataclass
class VirtualDisk:
    """The disk of one rank, which outlives the rank's processes.

    `fail_share` of the calls fail, or find damage; sometimes all fail for a while. `max_delay_s` is
    the longest delay of a file, `stall_share` how often it is far longer.
    """

    directory: Path
    clock: Clock
    random: random.Random
    fail_share: float = 0.0
    max_delay_s: float = 0.05
    stall_share: float = 0.0
    num_failures: int = 0
    num_damaged: int = 0
    num_unplugged: int = 0
    num_vanished: int = 0
    files: list[SickFiles] = field(default_factory=list)
    lanes: list[VirtualLanes] = field(default_factory=list)
    _unplugged_until_s: float = 0.0

    @property
    def access(self) -> DiskAccess:
        """The interfaces for the present process of the rank."""
        return DiskAccess(self._make_files, self._make_lanes)

    def cure(self) -> None:
        """Stop failing and stalling."""
        self.fail_share = self.stall_share = self._unplugged_until_s = 0.0

    def run_due(self) -> None:
        """Let the lanes work. Work may take time, too: never all at once."""
        if self.lanes:
            self.lanes[-1].run_due(self.clock.now())

    @property
    def num_waiting(self) -> int:
        return self.lanes[-1].num_waiting if self.lanes else 0

    def kill(self) -> None:
        """Handle the death of the process: open files are closed, pending work is dropped."""
        if self.lanes:
            self.lanes[-1].kill()
        for descriptor in list(self.files[-1].open_descriptors) if self.files else ():
            os.close(descriptor)
            self.files[-1].open_descriptors.discard(descriptor)
        if self.files and self.random.random() < 0.5:  # it may have been writing
            self.directory.joinpath("00").mkdir(parents=True, exist_ok=True)
            self.directory.joinpath("00", f".dead.{len(self.lanes)}.tmp").write_bytes(b"half")

    def keys(self) -> set[bytes]:
        """The keys with a file."""
        return {bytes.fromhex(path.name[: -len(SUFFIX)]) for path in self._files()}

    def unfinished(self) -> list[str]:
        """Files that were begun and not finished."""
        return [str(path) for path in self.directory.glob("??/.*")]

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> list[Path]:
        """Everything with the name of a block's file."""
        return sorted(self.directory.glob(f"??/*{SUFFIX}"))

    # --- faults of calls ---

    def due_s(self) -> float:
        """Return when an operation ends that begins now."""
        delay_s = self.random.uniform(0.0, self.max_delay_s)
        if self.random.random() < self.stall_share:
            delay_s += self.random.uniform(0.5, 3.0)
        return self.clock.now() + delay_s

    def part_of(self, num_bytes: int) -> int:
        """Return how many of `num_bytes` are read or written at a time."""
        if self.fail_share and self.random.random() < 0.2:
            return self.random.randint(1, num_bytes)
        return num_bytes

    def may_fail(self) -> None:
        """Raise OSError by chance."""
        if not self.fail_share:
            return
        if self.clock.now() < self._unplugged_until_s:
            self._fail(errno.ENODEV)
        if self.random.random() < self.fail_share / 20:
            self._unplugged_until_s = self.clock.now() + self.random.uniform(0, MAX_UNPLUGGED_S)
            self.num_unplugged += 1
        if self.random.random() < self.fail_share:
            self._fail(self.random.choice(ERRORS))

    def may_damage(self, name: str) -> None:
        """Damage a file by chance, before it is opened."""
        if not self.fail_share or self.random.random() >= self.fail_share:
            return
        path = self.directory / name
        try:
            data = bytearray(path.read_bytes())
        except OSError:
            return
        self.num_damaged += 1
        match self.random.choice(DAMAGE):
            case "cut":
                path.write_bytes(bytes(data[: self.random.randrange(len(data))]))
            case "bit":
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                path.write_bytes(bytes(data))
            case "gone":
                path.unlink()
            case "directory gone":
                shutil.rmtree(path.parent)
            case "other file":
                others = [other for other in self._files() if other.is_file()]
                path.write_bytes(self.random.choice(others).read_bytes())
            case "directory":
                path.unlink()
                path.mkdir()
            case "full directory":
                path.unlink()
                path.mkdir()
                path.joinpath("something").write_bytes(b"else")
            case "pipe":
                path.unlink()
                os.mkfifo(path)
            case "link":
                path.rename(path.with_name("target"))
                path.symlink_to("target")
            case "file for directory":
                shutil.rmtree(path.parent)
                path.parent.write_bytes(b"no directory")

    def may_vanish(self) -> None:
        """Remove files by chance, as a cleaner does, or all of them."""
        if not self.fail_share or self.random.random() >= self.fail_share / 4:
            return
        self.num_vanished += 1
        if self.random.random() < 0.3:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        share = self.random.choice(VANISHED_SHARES)
        for path in self._files():
            if self.random.random() < share and path.is_file():
                path.unlink()

    def _fail(self, number: int) -> None:
        self.num_failures += 1
        raise OSError(number, os.strerror(number))

    def _make_files(self, directory: int) -> SickFiles:
        self.files.append(SickFiles(directory, self))
        return self.files[-1]

    def _make_lanes(self, num_lanes: int) -> VirtualLanes:
        self.lanes.append(VirtualLanes(num_lanes, self))
        return self.lanes[-1]
