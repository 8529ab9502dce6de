"""Who does the work on files: lanes, each of which does one thing after the other.

Below file_pool.py, which says what is to be done and in which lane; a test hands in lanes that do
it when its clock says so. Refuses to know what a task is: a task never raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

Task = Callable[[], None]


class Lanes(Protocol):
    """Some lanes that work in parallel. Every method may be called from any thread."""

    @property
    def num_lanes(self) -> int:
        """How many there are; they are numbered from 0."""

    def put(self, lane: int, task: Task) -> None:
        """Do `task` in `lane`, behind everything put there before. Does not wait."""

    def close(self, timeout_s: float) -> bool:
        """Take nothing more; wait for what was put, and say whether it was done in time."""


class ThreadLanes:
    """A thread for each lane."""

    def __init__(self, num_lanes: int) -> None:
        """Start the threads."""
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
        """One for each thread."""
        return len(self._queues)

    def put(self, lane: int, task: Task) -> None:
        """Queue it."""
        self._queues[lane].put(task)

    def close(self, timeout_s: float) -> bool:
        """End the threads behind what they have to do. Those that hang on a disk are left behind,
        and end with the process."""
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
        except Exception:  # a task's own failures are in its result: others come behind it
            logger.exception("a file task of this rank has failed")
