"""Who copies the pieces of a store or load: one thread, or some at once.

Below copy_runner.py, whose thread has a crew, and block_move.py, which asks it for help. A crew
calls what it is given in several threads; who copies which piece is for them to settle. It also
says when copies rest, because all of its threads do. Refuses to know what is copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from kvcache.logs import get_logger
from kvcache.worker.copy_priority import CopyPriority, take_priority

logger = get_logger(__name__)

PAUSE_S = 0.0005
"""How long copies rest when the worker says that it has something to do: about what a step takes
it, from the message to the answer."""

LONGEST_PAUSE_S = 0.002
"""How long a piece is held up at most, however often the worker says so."""

END_S = 1.0
"""How long the end of helpers is waited for."""


class Crew(Protocol):
    """Threads that copy together. One of them is the caller's."""

    def give_way(self) -> None:
        """Rest while somebody else is wanted more; called between pieces, in any of the threads."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` here and, where there are other threads, there too; return when no call is
        under way. Raises what one of them raised."""


class Alone:
    """The calling thread, and nobody else."""

    def __init__(self, give_way: Callable[[], None] = lambda: None) -> None:
        """Call `give_way` between pieces."""
        self.give_way = give_way

    def run(self, work: Callable[[], None]) -> None:
        """See `Crew.run`."""
        work()


ALONE = Alone()


class CopyCrew:
    """The caller and `num_helpers` threads, which begin with the first work and end with `close` or
    the process. One thread calls `run` and `close`."""

    def __init__(self, num_helpers: int, name: str, priority: CopyPriority) -> None:
        """Start nobody yet."""
        self._num_helpers = num_helpers
        self._name = name
        self._priority: CopyPriority = priority
        self._helpers: list[threading.Thread] = []
        self._shifts: SimpleQueue[_Shift | None] = SimpleQueue()
        self._rests_until_s = 0.0

    def run(self, work: Callable[[], None]) -> None:
        """See `Crew.run`. A helper that comes when the caller has finished does nothing: nobody
        waits for one that gets no processor."""
        self._start_helpers()
        shift = _Shift(work)
        # Of what is over by now the queue keeps nothing: helpers may get no processor for long.
        self._drop_waiting()
        for _ in self._helpers:
            self._shifts.put(shift)
        shift.lead()

    def pause(self) -> None:
        """Let no other piece be copied for a moment. Any thread; never blocks."""
        self._rests_until_s = time.monotonic() + PAUSE_S

    def give_way(self) -> None:
        """Rest while the worker wants it: both need Python's lock, and on a small machine the same
        processor."""
        now_s = time.monotonic()
        end_s = now_s + LONGEST_PAUSE_S
        while now_s < min(self._rests_until_s, end_s):
            time.sleep(min(self._rests_until_s, end_s) - now_s)
            now_s = time.monotonic()

    def close(self) -> None:
        """End the helpers, which have nothing to do; leave one behind that gets no processor."""
        for _ in self._helpers:
            self._shifts.put(None)
        end_s = time.monotonic() + END_S
        for helper in self._helpers:
            helper.join(max(0.0, end_s - time.monotonic()))

    def _drop_waiting(self) -> None:
        """Take out what no helper has come to; each shift is over."""
        with suppress(Empty):
            while True:
                self._shifts.get_nowait()

    def _start_helpers(self) -> None:
        while len(self._helpers) < self._num_helpers:
            name = f"{self._name}-{len(self._helpers) + 1}"
            helper = threading.Thread(target=self._help, name=name, daemon=True)
            try:
                helper.start()
            except RuntimeError as error:  # whoever is there copies all of it
                there, wanted = len(self._helpers) + 1, self._num_helpers + 1
                logger.warning("%d of %d threads copy: no other starts (%s)", there, wanted, error)
                self._num_helpers = len(self._helpers)
                return
            self._helpers.append(helper)

    def _help(self) -> None:
        take_priority(self._priority)
        while (shift := self._shifts.get()) is not None:
            shift.join()


class _Shift:
    """One piece of work and who is at it.

    Invariant: `_num_inside` counts helpers that are in `work`; none enters once `_is_over`.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._is_over = False
        self._num_inside = 0
        self._error: Exception | None = None

    def lead(self) -> None:
        """Work, and wait for those who have begun to: they copy, and end as surely as we do."""
        try:
            self._work()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.wait_for(lambda: not self._num_inside)
            # No helper has the last word on tensors: one that gives them back while the
            # interpreter ends takes the process down.
            self._work = _nothing
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Work, unless it is over. Never raises."""
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
