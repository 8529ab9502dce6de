"""A thread that serves one party, and what other threads may ask of it.

Sockets and state machines belong to one thread. That thread takes turns; between two turns it runs
whatever other threads have handed it, so that nothing needs a lock. It never sleeps: a turn waits
in the transport, and `wake` ends the wait.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from kvcache.errors import BacklogFullError, ClusterError, DeadlineError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING_CALLS = 256

GARBAGE_THRESHOLD = 20_000
"""Objects made between two looks for cycles. A step makes some hundred and none of them cyclic."""


def calm_garbage_collector() -> None:
    """Have Python look for cycles less often, and never again among what exists now.

    For processes that are wholly ours, once they are set up: a collection is a delay of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 50, 50)


class ServiceLoop:
    """Runs `turn()` again and again in a thread of its own until stopped or `turn` raises."""

    def __init__(self, name: str, turn: Callable[[], object], wake: Callable[[], None]) -> None:
        """Make a loop that does not run yet. `wake` ends a waiting turn, from any thread."""
        self._name = name
        self._turn = turn
        self._wake = wake
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop although nobody stopped it, if anything did."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether the loop still takes turns and calls."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to take turns."""
        self._thread.start()

    def call(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run `action` in the loop's thread and return what it returns, or raise what it raises.

        Raises:
            ClusterError: the loop has ended.
            DeadlineError: no answer in time; the action may still run.
        """
        future: Future[T] = Future()
        if len(self._calls) >= MAX_WAITING_CALLS:
            raise BacklogFullError(f"{MAX_WAITING_CALLS} calls wait for {self._name}: try later")
        self._calls.append((action, future))
        self._wake()
        if not self.is_running:
            self._refuse_waiting_calls()
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise DeadlineError(f"{self._name} gave no answer within {timeout_s:g} s") from error

    def stop(self, timeout_s: float) -> bool:
        """End the loop after its present turn; return whether it ended within `timeout_s`."""
        self._is_stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                while self._calls:
                    self._run_call(*self._calls.popleft())
                self._turn()
        except BaseException as error:  # kept for whoever asks; the party is dead from here on
            self._failure = error
            logger.exception("%s ended by an error", self._name)
        finally:
            self._refuse_waiting_calls()

    def _run_call(self, action: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)

    def _refuse_waiting_calls(self) -> None:
        reason = f" ({self._failure!r})" if self._failure is not None else ""
        while self._calls:
            _, future = self._calls.popleft()
            future.set_exception(ClusterError(f"{self._name} has ended{reason}"))
