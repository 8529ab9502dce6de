"""The requests that want to run, in the order in which they may.

Stands between a workload and the replay engine. Preempted requests come first, then new ones in
order of arrival, drawn from the workload only when they are looked at. A request that quotes an
answer still to come steps aside until that answer is there. Refuses to know room and tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvcache.replay.rows import ReplayedRequest
from kvcache.simulate.workload import WorkloadRequest


class WaitingRequests:
    """Preempted and new requests. At most `max_parked` step aside; then later ones have to wait."""

    def __init__(self, arrivals: Iterable[WorkloadRequest], max_parked: int) -> None:
        self._arrivals = iter(arrivals)
        self._max_parked = max_parked
        self._preempted: deque[ReplayedRequest] = deque()
        self._ready: deque[ReplayedRequest] = deque()
        self._parked: dict[str, list[ReplayedRequest]] = {}  # by the request they quote
        self._num_parked = 0
        self._unanswered: set[str] = set()  # drawn from the workload, not yet finished
        self.num_drawn = 0

    def look_ahead(self, count: int) -> list[ReplayedRequest]:
        """Return up to `count` requests that may run now, in order, without taking them."""
        while len(self._preempted) + len(self._ready) < count and self._draw():
            pass
        heads = list(self._preempted)[:count]
        return heads + [self._ready[i] for i in range(min(count - len(heads), len(self._ready)))]

    def take(self, request: ReplayedRequest) -> None:
        """Remove a request that `look_ahead` returned: it runs now."""
        (self._preempted if request.is_known else self._ready).remove(request)

    def put_preempted(self, request: ReplayedRequest) -> None:
        """Let a request that was preempted run again before all others."""
        self._preempted.appendleft(request)

    def put_withdrawn(self, requests: Iterable[ReplayedRequest]) -> None:
        """Let requests that the manager has forgotten start over, before other new ones."""
        for request in sorted(requests, key=lambda request: request.admission, reverse=True):
            if request in self._preempted:
                self._preempted.remove(request)
            self._ready.appendleft(request)

    def take_preempted(self) -> list[ReplayedRequest]:
        """Take all preempted requests out, in order: the manager has forgotten them."""
        preempted = list(self._preempted)
        self._preempted.clear()
        return preempted

    def finish(self, request_id: str) -> None:
        """Let the requests that quote the answer of `request_id` run."""
        self._unanswered.discard(request_id)
        ready = self._parked.pop(request_id, [])
        self._num_parked -= len(ready)
        self._ready.extend(ready)

    def _draw(self) -> bool:
        """Draw one request from the workload; False if there is none, or too many stand aside."""
        if self._num_parked >= self._max_parked:
            return False
        arrived = next(self._arrivals, None)
        if arrived is None:
            return False
        self.num_drawn += 1
        request = ReplayedRequest(arrived, arrived.num_prompt_tokens)
        if arrived.after is not None and arrived.after in self._unanswered:
            self._parked.setdefault(arrived.after, []).append(request)
            self._num_parked += 1
        else:
            self._ready.append(request)
        self._unanswered.add(arrived.request_id)
        return True
