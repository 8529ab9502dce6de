"""Runs copy tasks in a second thread, or in the worker's own.

transfers.py submits tasks and checks which have ended. Only `wait` and `close` block, with a
deadline. The number of waiting tasks needs no limit: each uses its own host slots or, for a load,
its own device blocks, and the coordinator gives them to one job only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from kvcache.base.logs import get_logger
from kvcache.worker.copies.copy_pool import INLINE, CopyPool, CopyPriority, take_priority
from kvcache.worker.copies.engine import PendingCopy
from kvcache.worker.copies.task import CopyResult, CopyTask

logger = get_logger(__name__)

POLL_S = 0.0005
"""How often to check a copy that another device executes."""


class FinishedCopy(NamedTuple):
    """An ended task; `copy` is what `submit` returned."""

    copy: PendingCopy
    result: CopyResult


class _RunningTask:
    def __init__(self, task: CopyTask) -> None:
        self.task = task
        self.has_begun = False
        self.copied = threading.Event()

    def is_done(self) -> bool:
        """See `PendingCopy.is_done`."""
        return self.copied.is_set()

    def wait(self, timeout_s: float) -> bool:
        """See `PendingCopy.wait`."""
        return self.copied.wait(timeout_s)

    def advance(self, pool: CopyPool = INLINE) -> bool:
        """Begin it if possible, with `pool` for copying; return whether it is copied."""
        if not self.has_begun and self.task.can_begin():
            self.has_begun = True
            self.task.begin(pool)
        if self.has_begun and not self.copied.is_set() and self.task.is_copied():
            self.copied.set()
        return self.copied.is_set()


class _InlineTask(_RunningTask):
    """A task that its caller advances."""

    def is_done(self) -> bool:
        """See `PendingCopy.is_done`."""
        return self.advance()

    def wait(self, timeout_s: float) -> bool:
        """See `PendingCopy.wait`."""
        end_s = time.monotonic() + timeout_s
        if not self.has_begun and not self.task.wait_ready(timeout_s):
            return False
        self.advance()
        return self.task.wait_copied(max(0.0, end_s - time.monotonic())) and self.advance()


class InlineCopies:
    """Runs tasks in the calling thread; equal calls give equal results.

    A task begins in its turn, or after the copies it waits for, and ends independently of others.
    """

    def __init__(self) -> None:
        self._tasks: list[_InlineTask] = []

    def submit(self, task: CopyTask) -> PendingCopy:
        """Take a task; the returned copy is done when no byte is read or written any more."""
        running = _InlineTask(task)
        running.advance()
        self._tasks.append(running)
        return running

    def go_on(self) -> None:
        """Check again whether tasks can begin: something they wait for is done."""
        for running in self._tasks:
            running.advance()

    def pause(self) -> None:
        """Do nothing: the caller copies."""

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` may have something to return."""
        return bool(self._tasks)

    def take_finished(self) -> list[FinishedCopy]:
        """Return the tasks that have ended since the last call. Never blocks."""
        ended = [running for running in self._tasks if running.advance()]
        self._tasks = [running for running in self._tasks if running not in ended]
        return [FinishedCopy(running, running.task.finish()) for running in ended]

    def close(self, timeout_s: float) -> bool:
        """Begin no more tasks; return whether the running ones ended within `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        begun = [running for running in self._tasks if running.has_begun]
        return all(running.wait(max(0.0, end_s - time.monotonic())) for running in begun)


class CopyThread:
    """Runs tasks in its own thread, which ends with `close` or the process.

    `submit`, `has_finished`, `take_finished` and `close` are for one other thread.
    """

    def __init__(
        self,
        on_finished: Callable[[], None],
        name: str = "kvcache-copies",
        priority: CopyPriority = "normal",
        num_threads: int = 1,
    ) -> None:
        """The first task starts the thread, which calls `on_finished` when a task has ended.
        `num_threads` copy one task together."""
        self._on_finished = on_finished
        self._priority: CopyPriority = priority
        self._submitted: SimpleQueue[_RunningTask | None] = SimpleQueue()
        self._finished: deque[FinishedCopy] = deque()
        self._is_closing = False
        self._pool = CopyPool(num_threads - 1, name, priority)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, task: CopyTask) -> PendingCopy:
        """See `InlineCopies.submit`."""
        running = _RunningTask(task)
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:  # the next task tries to start it again
                problem = f"no thread to copy in ({error}): raise the limit of threads"
                running.copied.set()
                self._tell(running, CopyResult(problem))
                return running
        self._submitted.put(running)
        return running

    def go_on(self) -> None:
        """See `InlineCopies.go_on`."""
        self._submitted.put(None)

    def pause(self) -> None:
        """Start no other piece for a moment, because the caller has work. Any thread."""
        self._pool.pause()

    @property
    def has_finished(self) -> bool:
        """See `InlineCopies.has_finished`."""
        return bool(self._finished)

    def take_finished(self) -> list[FinishedCopy]:
        """See `InlineCopies.take_finished`."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self, timeout_s: float) -> bool:
        """See `InlineCopies.close`. A thread whose copies hang is left behind."""
        self._is_closing = True
        self._submitted.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- in the thread

    def _run(self) -> None:
        tasks: list[_RunningTask] = []
        try:
            take_priority(self._priority)
            while tasks or not self._is_closing:
                is_copying = any(running.has_begun for running in tasks)
                tasks += self._take_submitted(POLL_S if is_copying else None)
                tasks = [running for running in tasks if not self._advance(running)]
        finally:
            self._pool.close()

    def _take_submitted(self, timeout_s: float | None) -> Iterator[_RunningTask]:
        """Yield submitted tasks; wait for them, or for a signal, at most `timeout_s`."""
        while True:
            try:
                running = self._submitted.get(timeout=timeout_s)
            except Empty:
                return
            if running is not None:
                yield running
            timeout_s = 0.0

    def _advance(self, running: _RunningTask) -> bool:
        """Advance a task; return whether it has ended. Never raises."""
        if self._is_closing and not running.has_begun:
            return True
        try:
            if not running.advance(self._pool):
                return False
            result = running.task.finish()
        except Exception as error:  # a failed device raises on every call
            logger.exception("a copy cannot be followed: it counts as failed")
            result = CopyResult(f"the copy engine failed: {type(error).__name__}: {error}")
            running.copied.set()
        self._tell(running, result)
        return True

    def _tell(self, running: _RunningTask, result: CopyResult) -> None:
        self._finished.append(FinishedCopy(running, result))
        try:
            self._on_finished()
        except Exception:  # the listener also polls, but later
            logger.exception("the end of a copy could not be reported")


CopyRunner: TypeAlias = InlineCopies | CopyThread
