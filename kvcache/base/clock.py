"""Clocks. Code with deadlines takes a `Clock`, so that tests can pass a virtual one."""

from __future__ import annotations

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
        """Start at `start_s`."""
        self._now_s = as_number("start_s", start_s)

    def now(self) -> float:
        """Return the present virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`; raises InvalidInputError if they are negative."""
        self._now_s += as_number("seconds by which a clock moves", seconds, 0)
