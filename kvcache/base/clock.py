"""Clocks. Code with deadlines takes a `Clock`, so that tests can pass a virtual one."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from kvcache.base.arguments import as_number


class Clock(Protocol):
    """A source of time that never runs backwards."""

    def now(self) -> float:
        """Return seconds since an arbitrary start. Only differences are meaningful."""


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)
    """Return seconds. An attribute, not a method, because a step asks some twenty times."""


class VirtualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = as_number("start_s", start_s)

    def now(self) -> float:
        """Return the present virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`; raises InvalidInputError if they are negative."""
        self._now_s += as_number("seconds by which a clock moves", seconds, 0)


class StallAwareClock:
    """A `Clock` that does not count the time in which this process was stopped.

    A coordinator that was stopped finds the messages of its workers and clients waiting. By the
    machine's clock, all of them have been silent; by this one, they have not. It skips long gaps
    between two readings, so read it often. Any thread may. For a process's own deadlines only.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        """Of a pause between two calls, by `clock`, count `longest_s` at most."""
        self._machine_now = clock.now
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._seen_s = clock.now()
        self._skipped_s = 0.0

    def now(self) -> float:
        """Return seconds; only differences mean something."""
        now_s = self._machine_now()
        if now_s - self._seen_s > self._longest_s:
            self._skip(now_s)
        self._seen_s = now_s
        return now_s - self._skipped_s

    def _skip(self, now_s: float) -> None:
        with self._lock:
            paused_s = now_s - self._seen_s
            if paused_s > self._longest_s:  # otherwise another thread has handled the pause
                self._skipped_s += paused_s - self._longest_s
                self._seen_s = now_s
