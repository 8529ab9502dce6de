"""A thread that runs one state machine, and accepts calls from other threads.

Sockets and state machines belong to one thread. Between two turns that thread runs the functions
that other threads have handed over, so nothing needs a lock. It never sleeps: a turn waits in the
transport, and `wake` ends the wait.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from kvcache.base.errors import BacklogFullError, ClusterError, DeadlineError
from kvcache.base.serving_loop import ServingLoop

T = TypeVar("T")

MAX_WAITING_CALLS = 256

GARBAGE_THRESHOLD = 20_000
"""Allocations between two collections. A step makes some hundred objects, none of them cyclic."""


def calm_garbage_collector() -> None:
    """Make Python's collector run less often, and ignore all objects that exist now.

    For processes of this package, after set-up: a collection delays a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 50, 50)


MAX_FAILURES = 20
"""Failed turns in a row that end a loop: so many failures are not one message's fault."""


class ServiceLoop(ServingLoop):
    """Runs `turn()` repeatedly in its own thread until stopped.

    An error ends one turn; `max_failures` of them in a row end the loop.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        wake: Callable[[], None],
        *,
        max_failures: int = MAX_FAILURES,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Make a loop without starting it. `wake` ends a waiting turn, from any thread;
        `on_failure` is called in the loop's thread when errors have ended the loop."""
        super().__init__(
            name, self._call_and_serve, max_failures=max_failures, on_failure=self._fail
        )
        self._name = name
        self._serve = turn
        self._wake = wake
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._tell = on_failure

    def call(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run `action` in the loop's thread; return its result, or raise its error.

        Raises:
            ClusterError: the loop has ended.
            DeadlineError: no answer in time; the action may still run.
        """
        future: Future[T] = Future()
        if len(self._calls) >= MAX_WAITING_CALLS:
            raise BacklogFullError(f"{MAX_WAITING_CALLS} calls wait for {self._name}: try later")
        self._calls.append((action, future))
        self._wake()
        if self.failure is not None or not self.is_running:
            self._refuse_waiting_calls()
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise DeadlineError(f"{self._name} gave no answer within {timeout_s:g} s") from error

    def end(self, timeout_s: float) -> bool:
        """End the loop after its present turn; return whether it ended within `timeout_s`."""
        self.stop()
        self._wake()
        has_ended = self.join(timeout_s)
        if has_ended:
            self._refuse_waiting_calls()
        return has_ended

    def _call_and_serve(self) -> None:
        while self._calls:
            self._run_call(*self._calls.popleft())
        self._serve()

    def _run_call(self, action: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # for the calling thread
            future.set_exception(error)

    def _fail(self, failure: BaseException) -> None:
        self._refuse_waiting_calls()
        if self._tell is not None:
            self._tell(failure)

    def _refuse_waiting_calls(self) -> None:
        reason = f" ({self.failure!r})" if self.failure is not None else ""
        while self._calls:
            _, future = self._calls.popleft()
            future.set_exception(ClusterError(f"{self._name} has ended{reason}"))


def end_this_process(failure: BaseException) -> None:
    """End the process at once, as a crash would; a new one replaces it, with new state."""
    logging.shutdown()  # flushes
    os._exit(1)
