"""Between threads of one process: a pipe that wakes a waiting end, and a bounded queue.

The queue is for payloads that arrive as calls. A payload that does not fit is dropped; the delivery
rules repair the loss.
"""

from __future__ import annotations

import os
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


class WakePipe:
    """A pipe through which another thread wakes a waiting one."""

    def __init__(self) -> None:
        self._signalling = threading.Lock()  # a closed descriptor may be reused
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._read_end

    def signal(self) -> None:
        """Make the pipe readable. Any thread; harmless when full or closed."""
        with self._signalling:
            try:
                os.write(self._write_end, b"\0")
            except OSError:
                return

    def drain(self) -> None:
        """Make the pipe unreadable again."""
        try:
            while os.read(self._read_end, 4096):
                pass
        except (BlockingIOError, OSError):
            return

    def close(self) -> None:
        """Close both descriptors. Repeatable."""
        with self._signalling:
            ends, self._read_end, self._write_end = (self._read_end, self._write_end), -1, -1
            for end in ends:
                if end >= 0:
                    os.close(end)
