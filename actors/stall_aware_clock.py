"""A clock that does not count the time in which this process stood still.

A coordinator that was stopped, or whose machine was, finds all the words of its workers and clients
waiting when it goes on. By the machine's clock all of them have been silent for as long: it would
refuse steps, and give up clients, for what it has slept through itself. By this one they have not.
Refuses to say what time it is: for deadlines only, and not for those that others keep.
"""

from __future__ import annotations

import threading

from kvcache.base.clock import Clock


class StallAwareClock:
    """A `Clock` that skips long gaps between two readings. Read it often. Any thread may."""

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
            if paused_s > self._longest_s:  # the first thread to go on has seen to it otherwise
                self._skipped_s += paused_s - self._longest_s
                self._seen_s = now_s
