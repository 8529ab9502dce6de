"""Threads that serve: an error costs one message or one turn, never the thread.

Used by everything that reads a socket or watches a peer. Each error is counted, logged with its
traceback, and named in the statistics, which the cluster's status shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
"""Pause after a failed turn, doubled for each further failure in a row."""

MAX_TEXT = 300


@dataclass(frozen=True)
class LoopStatistics:
    """Errors of a loop. `num_faults` errors were survived, `last_fault` names the last one.
    `num_restarts`: how often the thread ended without being stopped, and was started again."""

    name: str
    is_running: bool
    num_faults: int = 0
    last_fault: str = ""
    num_restarts: int = 0

    def problem(self) -> str:
        """Return lines about its errors; none if it has no errors."""
        ended = "" if self.is_running else f"{self.name} does not run"
        faults = f"{self.name} survived {self.num_faults} errors, the last: {self.last_fault}"
        return "; ".join(filter(None, (ended, faults if self.num_faults else "")))


def problems_of(loops: Iterable[LoopStatistics]) -> tuple[str, ...]:
    """Return lines about the errors of these loops."""
    return tuple(filter(None, (loop.problem() for loop in loops)))


class Faults:
    """Counts and logs the errors of single messages or turns. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Start with no errors. `name` is the loop's name."""
        self.name = name
        self.count = 0
        self.last = ""

    def note(self, what: str, error: BaseException) -> str:
        """Count and log an error; return its text. `what` names the operation that failed."""
        self.count += 1
        self.last = f"{what}: {describe_error(error)}"
        logger.error("%s: error in %s", self.name, self.last, exc_info=error)
        return self.last

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Run the block; an error in it is recorded and ends only the block."""
        try:
            yield
        except Exception as error:
            self.note(what, error)


class ServingLoop:
    """Calls `turn()` repeatedly in a thread of its own until stopped.

    An error in a turn is recorded, and the next turn follows after a growing pause. With
    `max_failures`, that many failed turns in a row end the loop: `failure` says how, and
    `on_failure` is called last in the thread. All methods are thread-safe.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        *,
        max_failures: int | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.faults = Faults(name)
        self.failure: BaseException | None = None
        self._turn = turn
        self._max_failures = max_failures
        self._on_failure = on_failure
        self._is_stopping = threading.Event()
        self._is_started = False
        self._num_restarts = 0
        self._restarting = threading.Lock()
        self._thread = self._make_thread()

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopping.is_set()

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._is_started = True
        self._thread.start()

    def pause(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until the loop is stopped; return whether it is."""
        return self._is_stopping.wait(timeout_s)

    def stop(self) -> None:
        """Stop after the present turn. Repeatable."""
        self._is_stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; return whether it has. Do not call it in that thread."""
        if self._is_started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def ensure_running(self) -> None:
        """Start the thread again if it ended without `stop` and without `failure`."""
        with self._restarting:
            is_wanted = self._is_started and self.failure is None and not self.is_stopping
            if is_wanted and not self._thread.is_alive():
                self._num_restarts += 1
                logger.error("%s had ended: its thread is started again", self.faults.name)
                self._thread = self._make_thread()
                self._thread.start()

    def statistics(self) -> LoopStatistics:
        faults = self.faults
        return LoopStatistics(
            faults.name, self.is_running, faults.count, faults.last, self._num_restarts
        )

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=self.faults.name, daemon=True)

    def _run(self) -> None:
        num_failures = 0
        while not self._is_stopping.is_set():
            try:
                self._turn()
                num_failures = 0
            except BaseException as error:  # only `stop` may end this thread
                if self._is_stopping.is_set():
                    return  # its resources are being closed
                self.faults.note("a turn", error)
                num_failures += 1
                if num_failures == self._max_failures:
                    self.failure = error
                    break
                pause_s = FIRST_PAUSE_S * 2 ** min(num_failures - 1, 10)
                self._is_stopping.wait(min(pause_s, LONGEST_PAUSE_S))
        if self.failure is not None:
            logger.error("%s has ended after %d errors in a row", self.faults.name, num_failures)
            if self._on_failure is not None:
                self._on_failure(self.failure)


def describe_error(error: BaseException) -> str:
    """Return an error's type and text on one line, even if its `str` fails."""
    try:
        text = " ".join(str(error).split())
    except Exception as nested:
        text = f"its text cannot be made ({type(nested).__name__})"
    return f"{type(error).__name__}: {text}"[:MAX_TEXT] if text else type(error).__name__
