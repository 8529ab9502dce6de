"""Reads and writes a rank's files in separate lanes, so that no step waits for a disk.

A key's first byte selects its lane. A lane works in order of submission, so operations on one key
never overtake each other. Waiting work is limited; a job beyond the limit fails. Tests pass lanes
that work when their clock says so. The pool handles heads and memory, no labels.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from kvcache.base.errors import BacklogFullError, KVCacheError
from kvcache.base.logs import get_logger
from kvcache.worker.files.format import LOST, FileHead, FileTierError
from kvcache.worker.files.store import NUM_DIRECTORIES, FileStore, ScannedDirectory

logger = get_logger(__name__)

Task = Callable[[], None]


class Lanes(Protocol):
    """Some lanes that work in parallel. Every method may be called from any thread."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes; they are numbered from 0."""

    def put(self, lane: int, task: Task) -> None:
        """Run `task` in `lane`, after everything put there before. Does not wait."""

    def close(self, timeout_s: float) -> bool:
        """Accept no more tasks; wait for the others, and return whether they ended in time."""


class ThreadLanes:
    """A thread for each lane."""

    def __init__(self, num_lanes: int) -> None:
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(num_lanes)]
        self._threads = [
            threading.Thread(target=_run, args=(queue,), name=f"kvcache-file-{i}", daemon=True)
            for i, queue in enumerate(self._queues)
        ]
        self._is_closed = False
        for thread in self._threads:
            thread.start()

    @property
    def num_lanes(self) -> int:
        return len(self._queues)

    def put(self, lane: int, task: Task) -> None:
        self._queues[lane].put(task)

    def close(self, timeout_s: float) -> bool:
        """End the threads after their tasks. Threads that hang on a disk are left behind, and end
        with the process."""
        is_first, self._is_closed = not self._is_closed, True
        if is_first:
            for queue in self._queues:
                queue.put(None)
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _run(queue: SimpleQueue[Task | None]) -> None:
    while (task := queue.get()) is not None:
        try:
            task()
        except Exception:  # a task's result has its own failures; other tasks follow
            logger.exception("a file task of this rank has failed")


MAX_TRIED_AGAIN = 64
"""Files that could not be removed and are tried again together."""

MAX_UNTAKEN_SCANS = 64
"""Limit of scanned directories that `take_scanned` has not returned yet."""

SlotViews = Callable[[int], list[memoryview]]
"""The bytes of a host slot, writable."""


@dataclass(frozen=True)
class BlockFailure:
    """The failure of the block at `place` of its job. `is_lost`: its file is unusable."""

    place: int
    key: bytes
    detail: str
    is_lost: bool = False


@dataclass(frozen=True)
class FinishedFileJob:
    """A job that has ended. `heads[place]` is the head of a fetched block's file, `None` for a
    failed block; a spill has no heads."""

    job_id: int
    ok: bool
    num_bytes: int
    failures: tuple[BlockFailure, ...]
    heads: tuple[FileHead | None, ...] = ()


@dataclass
class _Job:
    job_id: int
    num_left: int
    heads: list[FileHead | None] = field(default_factory=list)
    num_bytes: int = 0
    failures: list[BlockFailure] = field(default_factory=list)


class FilePool:
    """The files of one rank. Thread-safe. No method waits for a disk except `close`, which has a
    deadline."""

    def __init__(
        self,
        store: FileStore,
        slot_views: SlotViews,
        lanes: Lanes,
        *,
        max_queued_blocks: int,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Work in `lanes`, which belong to this pool; they call `on_finished` when a job has
        ended."""
        self.store = store
        self._slot_views = slot_views
        self._max_queued = max_queued_blocks
        self._on_finished = on_finished
        self._lanes = lanes
        self._lock = threading.Lock()
        self._num_queued = 0
        self._undone: dict[bytes, None] = {}
        self._finished: list[FinishedFileJob] = []
        self._to_scan: deque[int] = deque()
        self._num_scanning = self._scan_round = 0
        self._scanned: list[ScannedDirectory] = []
        self._is_closed = False

    @property
    def has_finished(self) -> bool:
        """Whether `get_finished` has something to return."""
        return bool(self._finished)

    def submit_spill(self, job_id: int, slots: Sequence[int], heads: Sequence[FileHead]) -> None:
        """Write slot `slots[i]` to the file of `heads[i].key`. The slots must not change until the
        job has ended.

        Raises BacklogFullError; nothing is submitted then.
        """
        job = self._begin(job_id, len(heads))
        self._discard_again()
        for place, (slot, head) in enumerate(zip(slots, heads, strict=True)):
            self._submit(head.key, partial(self._spill, job, place, slot, head))

    def submit_fetch(self, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Read the file of `keys[i]` into slot `slots[i]`. The slots must not be used otherwise
        until the job has ended; those of failed blocks may hold anything.

        Raises BacklogFullError; nothing is submitted then.
        """
        job = self._begin(job_id, len(keys))
        job.heads = [None] * len(keys)
        for place, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            self._submit(key, partial(self._fetch, job, place, slot, key))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove files, after everything submitted before for these keys. Nothing is reported.

        Never refused: there are at most as many as files and waiting writes. A failed removal is
        tried again later.
        """
        self._discard_again()
        for key in keys:
            self._submit(key, partial(self._discard, key, is_repeat=False))

    def scan(self, prefixes: Iterable[int] = range(NUM_DIRECTORIES)) -> None:
        """Read the heads of all files of directories, a few directories at a time; see
        `take_scanned`.

        Replaces an earlier scan whose results were not taken.
        """
        with self._lock:
            self._scan_round += 1
            self._scanned.clear()
            self._to_scan = deque(prefixes)
            self._scan_more()

    def take_scanned(self) -> list[ScannedDirectory]:
        """Return the directories scanned since the last call, in any order."""
        with self._lock:
            scanned, self._scanned = self._scanned, []
            self._scan_more()
            return scanned

    def get_finished(self) -> list[FinishedFileJob]:
        """Return the jobs that have ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
            return finished

    def close(self, timeout_s: float) -> bool:
        """Refuse new work, and end the lanes after submitted work; return whether they ended in
        time."""
        with self._lock:
            self._is_closed = True
            self._to_scan.clear()
        return self._lanes.close(timeout_s)

    # --- submitting

    def _begin(self, job_id: int, num_blocks: int) -> _Job:
        """Reserve room for a job's blocks; raises BacklogFullError."""
        with self._lock:
            if self._is_closed or self._num_queued + num_blocks > self._max_queued:
                self.store.count("backlog")
                raise BacklogFullError(
                    f"{self._num_queued} blocks wait for the disk and {num_blocks} more exceed "
                    f"max_queued_blocks, {self._max_queued}: "
                    + ("the tier is closed" if self._is_closed else "send less, or raise it")
                )
            self._num_queued += num_blocks
            if not num_blocks:
                self._end(_Job(job_id, 0))
        return _Job(job_id, num_blocks)

    def _submit(self, key: bytes, task: Task) -> None:
        self._lanes.put(key[0] % self._lanes.num_lanes, task)

    def _discard_again(self) -> None:
        """Try again to remove files whose removal failed."""
        with self._lock:
            keys = list(self._undone)[:MAX_TRIED_AGAIN]
        for key in keys:
            self._submit(key, partial(self._discard, key, is_repeat=True))

    def _scan_more(self) -> None:
        """Scan the next directories, as far as there is room for the results. Locked."""
        while self._to_scan and self._num_scanning + len(self._scanned) < MAX_UNTAKEN_SCANS:
            prefix = self._to_scan.popleft()
            self._num_scanning += 1
            self._lanes.put(
                prefix % self._lanes.num_lanes, partial(self._scan, prefix, self._scan_round)
            )

    # --- tasks, in the lanes

    def _spill(self, job: _Job, place: int, slot: int, head: FileHead) -> None:
        def write() -> int:
            self.store.write(head, self._slot_views(slot))
            self._forget_undone([head.key])
            return head.block_bytes

        self._do(job, place, head.key, write)

    def _fetch(self, job: _Job, place: int, slot: int, key: bytes) -> None:
        def read() -> int:
            head = job.heads[place] = self.store.read(key, self._slot_views(slot))
            return head.block_bytes

        self._do(job, place, key, read)

    def _discard(self, key: bytes, *, is_repeat: bool) -> None:
        # A file written or found there since is another one.
        is_done = is_repeat and key not in self._undone
        try:
            if not is_done:
                self.store.discard(key)
            is_done = True
        except KVCacheError:
            pass  # counted
        except Exception:
            self.store.count("io")
        with self._lock:
            if is_done:
                self._undone.pop(key, None)
            else:
                self._undone[key] = None

    def _scan(self, prefix: int, scan_round: int) -> None:
        try:
            found = self.store.scan(prefix)
            # The caller that started the scan has been told about them again.
            self._forget_undone(head.key for head in found.heads)
        except Exception as error:  # the other directories are scanned in any case
            problem = f"directory {prefix:02x}: {type(error).__name__} {error}"
            found = ScannedDirectory(prefix, (), (problem,))
        with self._lock:
            self._num_scanning -= 1
            if scan_round == self._scan_round:
                self._scanned.append(found)
            else:
                self._scan_more()  # the result is obsolete, but there is room again
        self._on_finished()

    def _forget_undone(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._undone.pop(key, None)

    def _do(self, job: _Job, place: int, key: bytes, task: Callable[[], int]) -> None:
        """Process one block of a job; an error fails only this block."""
        num_bytes, failure = 0, None
        try:
            num_bytes = task()
        except KVCacheError as error:
            is_lost = isinstance(error, FileTierError) and error.kind in LOST
            failure = BlockFailure(place, key, str(error), is_lost)
        except Exception as error:  # later blocks must be processed
            self.store.count("io")
            failure = BlockFailure(place, key, f"{type(error).__name__} {error}")
        with self._lock:
            self._num_queued -= 1
            job.num_left -= 1
            job.num_bytes += num_bytes
            if failure is not None:
                job.failures.append(failure)
            has_ended = not job.num_left
            if has_ended:
                self._end(job)
        if has_ended:
            self._on_finished()

    def _end(self, job: _Job) -> None:
        """Record that a job has ended. Locked."""
        failures = tuple(sorted(job.failures, key=lambda failure: failure.place))
        self._finished.append(
            FinishedFileJob(job.job_id, not failures, job.num_bytes, failures, tuple(job.heads))
        )
