"""The threads that copy the pieces of a store or load, and their priority.

The thread of `runner.py` has a pool, and `task.py` copies with it. A pool calls one function in
several threads, which divide the pieces among themselves and pause together.

A thread may always lower its own priority, but needs permission to raise it again. Without it, the
thread keeps its priority. Measured: a step of 0.26 ms, during copies that never pause, on two busy
cores, takes 2.1, 1.3 and 1.1 times as long in the median at priority `normal`, `low` and `idle`;
mean 2.8, 0.9 and 0.6 ms.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Literal, TypeAlias

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

CopyPriority: TypeAlias = Literal["normal", "low", "idle"]
"""`low`: yields to the worker's own thread and to others, but keeps about a tenth of a processor
that they would fill. `idle`: uses only idle processors, and may hardly advance if all are busy."""

LOW_NICENESS = 10
"""Above the process's own value. 5: 1.4 times, 19: 1.5 times, like 10 within the noise."""

LEAST_NICENESS = 19


def take_priority(priority: CopyPriority) -> None:
    """Set this thread's priority, if the system has priorities of threads."""
    if priority == "normal" or sys.platform != "linux":
        return
    try:
        if priority == "idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + LOW_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness, LEAST_NICENESS))
    except OSError as error:
        logger.warning("copies keep the priority of their worker: %s", error)


PAUSE_S = 0.0005
"""Pause of copies when the worker has work: about the worker's share of a step, from the message
to the answer."""

LONGEST_PAUSE_S = 0.002
"""Longest pause of a piece, however often the worker asks."""

END_S = 1.0
"""How long to wait for the end of helpers."""


class CopyPool:
    """The caller and `num_helpers` threads, which start with the first work and end with `close` or
    the process. Only one thread calls `run` and `close`."""

    def __init__(
        self, num_helpers: int = 0, name: str = "kvcache-copies", priority: CopyPriority = "normal"
    ) -> None:
        """Set up without starting threads."""
        self._num_helpers = num_helpers
        self._name = name
        self._priority: CopyPriority = priority
        self._helpers: list[threading.Thread] = []
        self._batches: SimpleQueue[_CopyBatch | None] = SimpleQueue()
        self._rests_until_s = 0.0

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` in this thread and in the helpers; return when no call is running.

        A helper that starts after the caller has finished does nothing, so the caller never waits
        for a helper without a processor. Raises an error of any of them.
        """
        self._start_helpers()
        batch = _CopyBatch(work)
        # The queue drops finished batches: helpers may get no processor for long.
        self._drop_waiting()
        for _ in self._helpers:
            self._batches.put(batch)
        batch.lead()

    def pause(self) -> None:
        """Start no other piece for a moment. Any thread; never blocks."""
        self._rests_until_s = time.monotonic() + PAUSE_S

    def give_way(self) -> None:
        """Pause while the worker needs it: both need Python's lock and, on a small machine, the
        same processor. Every copying thread calls this between pieces."""
        now_s = time.monotonic()
        end_s = now_s + LONGEST_PAUSE_S
        while now_s < min(self._rests_until_s, end_s):
            time.sleep(min(self._rests_until_s, end_s) - now_s)
            now_s = time.monotonic()

    def close(self) -> None:
        """End the idle helpers; one without a processor is left behind."""
        for _ in self._helpers:
            self._batches.put(None)
        end_s = time.monotonic() + END_S
        for helper in self._helpers:
            helper.join(max(0.0, end_s - time.monotonic()))

    def _drop_waiting(self) -> None:
        """Remove batches that no helper has taken; all are finished."""
        with suppress(Empty):
            while True:
                self._batches.get_nowait()

    def _start_helpers(self) -> None:
        while len(self._helpers) < self._num_helpers:
            name = f"{self._name}-{len(self._helpers) + 1}"
            helper = threading.Thread(target=self._help, name=name, daemon=True)
            try:
                helper.start()
            except RuntimeError as error:  # the running threads copy everything
                there, wanted = len(self._helpers) + 1, self._num_helpers + 1
                logger.warning("%d of %d threads copy: no other starts (%s)", there, wanted, error)
                self._num_helpers = len(self._helpers)
                return
            self._helpers.append(helper)

    def _help(self) -> None:
        take_priority(self._priority)
        while (batch := self._batches.get()) is not None:
            batch.join()


class _CopyBatch:
    """One call of `run`, and how many helpers are in it.

    Invariant: `_num_inside` counts helpers that are in `work`; none enters once `_is_over`.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._is_over = False
        self._num_inside = 0
        self._error: Exception | None = None

    def lead(self) -> None:
        """Work, then wait for the helpers that have begun."""
        try:
            self._work()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.wait_for(lambda: not self._num_inside)
            # No helper drops the last reference to tensors: freeing them while the interpreter ends
            # crashes the process.
            self._work = _nothing
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Work, unless the batch is finished. Never raises."""
        with self._changed:
            if self._is_over:
                return
            self._num_inside += 1
        try:
            self._work()
        except Exception as error:  # the leader raises it
            self._error = error
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify()


def _nothing() -> None:
    """Do nothing."""


INLINE = CopyPool()
"""Only the calling thread, without pauses."""
