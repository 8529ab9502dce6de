"""Threads that read and write a rank's files, so that no step ever waits on a disk.

Between transfers, which submit jobs and ask what has ended, and file_store.py. Each thread serves
the keys whose first byte is its own, in the order in which they came: what is done with one key is
never overtaken by what is done with it later. What waits is bounded; a job beyond the bound fails.
Refuses to know labels or slots: it is handed heads and memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from kvcache.errors import BacklogFullError, KVCacheError
from kvcache.worker.file_books import NUM_DIRECTORIES
from kvcache.worker.file_format import FileHead
from kvcache.worker.file_store import FileStore, ScannedDirectory

MAX_UNTAKEN_SCANS = 64
"""Directories that are scanned ahead of `take_scanned`."""

SlotViews = Callable[[int], list[memoryview]]
"""The bytes of a host slot, writable."""

_Task = Callable[[], None]


@dataclass(frozen=True)
class BlockFailure:
    """What went wrong with the block at `place` of its job."""

    place: int
    key: bytes
    detail: str


@dataclass(frozen=True)
class FinishedFileJob:
    """A job that has ended. `heads[place]` is what a fetched block's file says of it, `None` for
    one that failed; a spill has none."""

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
    """A fixed number of threads. Every method may be called from any thread, none waits on a disk
    but `wait` and `close`, which have a deadline."""

    def __init__(
        self,
        store: FileStore,
        slot_views: SlotViews,
        *,
        threads: int,
        max_queued_blocks: int,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads. `on_finished` is called in one of them when a job has ended."""
        self._store = store
        self._slot_views = slot_views
        self._max_queued = max_queued_blocks
        self._on_finished = on_finished
        self._queues: list[SimpleQueue[_Task | None]] = [SimpleQueue() for _ in range(threads)]
        self._condition = threading.Condition()
        self._num_queued = 0
        self._num_running = 0
        self._num_discards = 0
        self._finished: list[FinishedFileJob] = []
        self._to_scan: deque[int] = deque()
        self._num_scanning = 0
        self._scanned: list[ScannedDirectory] = []
        self._is_closed = False
        self._num_threads = threads
        for i, queue in enumerate(self._queues):
            name = f"kvcache-file-{i}"
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True).start()

    @property
    def store(self) -> FileStore:
        """What the threads work on."""
        return self._store

    @property
    def num_running(self) -> int:
        """Jobs that have not ended. Those that have ended are waiting in `get_finished`."""
        with self._condition:
            return self._num_running

    @property
    def has_finished(self) -> bool:
        """Whether `get_finished` has something to return."""
        return bool(self._finished)

    def submit_spill(self, job_id: int, slots: Sequence[int], heads: Sequence[FileHead]) -> None:
        """Write slot `slots[i]` to the file of `heads[i].key`. The slots stay as they are until
        the job has ended.

        Raises BacklogFullError, nothing submitted.
        """
        job = self._begin(job_id, len(heads))
        for place, (slot, head) in enumerate(zip(slots, heads, strict=True)):
            self._submit(head.key, self._spill_task(job, place, slot, head))

    def submit_fetch(self, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Read the file of `keys[i]` into slot `slots[i]`. Nobody else uses the slots until the job
        has ended; those of blocks that failed may hold anything.

        Raises BacklogFullError, nothing submitted.
        """
        job = self._begin(job_id, len(keys))
        job.heads = [None] * len(keys)
        for place, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            self._submit(key, self._fetch_task(job, place, slot, key))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove files, behind everything submitted before for these keys. Nothing is reported.

        Never refused: there are never more than files, and those waiting to be written.
        """
        for key in keys:
            with self._condition:
                self._num_discards += 1
            self._submit(key, self._discard_task(key))

    def scan(self, prefixes: Iterable[int] = range(NUM_DIRECTORIES)) -> None:
        """Read the heads of all files of directories, a few at a time; see `take_scanned`.

        What was scanned before and not taken is forgotten.
        """
        with self._condition:
            self._scanned.clear()
            self._to_scan.extend(p for p in prefixes if p not in self._to_scan)
            self._scan_more()

    @property
    def is_scanning(self) -> bool:
        """Whether `take_scanned` will have more to return than it has now."""
        with self._condition:
            return bool(self._to_scan or self._num_scanning)

    def take_scanned(self) -> list[ScannedDirectory]:
        """Return the directories that were scanned since the last call, in no order.

        One that was being scanned when it was asked for again comes twice.
        """
        with self._condition:
            scanned, self._scanned = self._scanned, []
            self._scan_more()
            return scanned

    def get_finished(self) -> list[FinishedFileJob]:
        """Return the jobs that have ended since the last call."""
        with self._condition:
            finished, self._finished = self._finished, []
            return finished

    def wait(self, timeout_s: float) -> bool:
        """Block until nothing is queued or running any more; say whether that was so in time."""
        with self._condition:
            return self._condition.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the threads when what was submitted is done; say whether they ended in time.

        Those that hang on a disk are left behind, and end with the process.
        """
        with self._condition:
            is_first, self._is_closed = not self._is_closed, True
            self._to_scan.clear()
            if is_first:
                for queue in self._queues:
                    queue.put(None)
            return self._condition.wait_for(lambda: not self._num_threads, timeout_s)

    # --- submitting

    def _begin(self, job_id: int, num_blocks: int) -> _Job:
        """Take room for a job's blocks; raises BacklogFullError."""
        with self._condition:
            if self._is_closed or self._num_queued + num_blocks > self._max_queued:
                self._store.count("backlog")
                raise BacklogFullError(
                    f"{self._num_queued} blocks wait for the disk and {num_blocks} more exceed "
                    f"max_queued_blocks, {self._max_queued}: "
                    + ("the tier is closed" if self._is_closed else "send less, or raise it")
                )
            self._num_queued += num_blocks
            self._num_running += 1
            if not num_blocks:
                self._end(_Job(job_id, 0))
        return _Job(job_id, num_blocks)

    def _submit(self, key: bytes, task: _Task) -> None:
        self._queues[key[0] % len(self._queues)].put(task)

    def _scan_more(self) -> None:
        """Scan the next directories, as far as there is room for what they hold. Locked."""
        while self._to_scan and self._num_scanning + len(self._scanned) < MAX_UNTAKEN_SCANS:
            prefix = self._to_scan.popleft()
            self._num_scanning += 1
            self._queues[prefix % len(self._queues)].put(self._scan_task(prefix))

    # --- tasks, in the threads

    def _run(self, queue: SimpleQueue[_Task | None]) -> None:
        while (task := queue.get()) is not None:
            task()
        with self._condition:
            self._num_threads -= 1
            self._condition.notify_all()

    def _spill_task(self, job: _Job, place: int, slot: int, head: FileHead) -> _Task:
        def spill() -> None:
            self._do(job, place, head.key, lambda: self._spill(head, slot))

        return spill

    def _fetch_task(self, job: _Job, place: int, slot: int, key: bytes) -> _Task:
        def fetch() -> None:
            self._do(job, place, key, lambda: self._fetch(job, place, key, slot))

        return fetch

    def _discard_task(self, key: bytes) -> _Task:
        def discard() -> None:
            try:
                self._store.discard(key)
            except Exception:  # the file stays, and is found again when somebody looks
                self._store.count("io")
            with self._condition:
                self._num_discards -= 1
                self._condition.notify_all()

        return discard

    def _scan_task(self, prefix: int) -> _Task:
        def scan() -> None:
            try:
                found = self._store.scan(prefix)
            except Exception as error:  # whatever it is, the others are scanned
                problem = f"directory {prefix:02x}: {type(error).__name__} {error}"
                found = ScannedDirectory(prefix, (), 0, (problem,))
            with self._condition:
                self._num_scanning -= 1
                self._scanned.append(found)
                self._condition.notify_all()
            self._on_finished()

        return scan

    def _spill(self, head: FileHead, slot: int) -> int:
        self._store.write(head, self._slot_views(slot))
        return head.block_bytes

    def _fetch(self, job: _Job, place: int, key: bytes, slot: int) -> int:
        head = self._store.read(key, self._slot_views(slot))
        job.heads[place] = head
        return head.block_bytes

    def _do(self, job: _Job, place: int, key: bytes, task: Callable[[], int]) -> None:
        """Do one block of a job; whatever happens, the job gets on."""
        num_bytes, failure = 0, None
        try:
            num_bytes = task()
        except KVCacheError as error:
            failure = BlockFailure(place, key, str(error))
        except Exception as error:  # a thread that ends would leave everything behind it undone
            self._store.count("io")
            failure = BlockFailure(place, key, f"{type(error).__name__} {error}")
        with self._condition:
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
        """Note that a job has ended. Locked."""
        self._num_running -= 1
        failures = tuple(sorted(job.failures, key=lambda failure: failure.place))
        self._finished.append(
            FinishedFileJob(job.job_id, not failures, job.num_bytes, failures, tuple(job.heads))
        )
        self._condition.notify_all()

    def _is_idle(self) -> bool:
        return not (self._num_queued or self._num_discards or self._num_scanning)
