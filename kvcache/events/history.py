"""The last batches that were published, for subscribers that missed some of them.

Inside the publisher. Bounded in batches and bytes: the oldest go first. Refuses to fill a gap in
its numbers: what is not held without one is not held.
"""

from __future__ import annotations

from collections import deque
from itertools import islice


class BatchHistory:
    """Payloads of consecutive numbers, the newest always among them."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        """Hold `max_batches` payloads of `max_bytes` together at most, the newest in any case."""
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._next_seq = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def oldest_seq(self) -> int:
        """The lowest number that is held; the next one to come where nothing is."""
        return self._next_seq - len(self._payloads)

    def append(self, seq: int, payload: bytes) -> None:
        """Hold another payload; one that does not follow the last begins a new history."""
        if seq != self._next_seq:
            self._payloads.clear()
            self.num_bytes = 0
        self._payloads.append(payload)
        self.num_bytes += len(payload)
        self._next_seq = seq + 1
        while len(self) > 1 and (len(self) > self._max_batches or self.num_bytes > self._max_bytes):
            self.num_bytes -= len(self._payloads.popleft())

    def since(self, seq: int) -> list[tuple[int, bytes]] | None:
        """Return all payloads from number `seq` on, None if one of them is not held any more."""
        first = self.oldest_seq
        if not first <= seq <= self._next_seq:
            return None
        return list(enumerate(islice(self._payloads, seq - first, None), start=seq))
