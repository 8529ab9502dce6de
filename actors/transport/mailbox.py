"""A bounded queue between threads of one process, for payloads that arrive as calls.

Part of the fallback transport. A payload that does not fit is dropped; the delivery rules repair
the loss.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_TAKEN_AT_ONCE = 256


class Mailbox:
    """A bounded queue of payloads. Thread-safe; a full box refuses."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._is_woken = False
        self.num_refused = 0
        self.on_put: Callable[[], None] | None = None
        """Called after each put, outside the lock."""

    def put(self, item: Any) -> bool:
        """Append `item`; return False, unchanged, if the box is full."""
        with self._changed:
            if len(self._items) >= self._capacity:
                self.num_refused += 1
                return False
            self._items.append(item)
            self._changed.notify_all()
        on_put = self.on_put
        if on_put is not None:
            on_put()
        return True

    def take(self, timeout_s: float) -> list[Any]:
        """Return waiting items, at most `MAX_TAKEN_AT_ONCE`; wait at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_woken, timeout_s)
            self._is_woken = False
            count = min(len(self._items), MAX_TAKEN_AT_ONCE)
            return [self._items.popleft() for _ in range(count)]

    def wake(self) -> None:
        """Make one waiting `take` return."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()
