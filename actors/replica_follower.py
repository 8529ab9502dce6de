"""Following one replica's cache events in a thread, so that its prefixes can be asked for.

Between a `KVEventSubscriber` and the router. A snapshot is put together apart from the
one that is asked meanwhile. Refuses to rank, and to decide what a silent replica means.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from actors.event_endpoints import EventEndpoints, subscribe
from kvcache.base.arrays import Int32Array
from kvcache.base.clock import Clock
from kvcache.base.serving_loop import ServingLoop, describe_error
from kvcache.events.prefix_index import PrefixIndex, PrefixMatch
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import SubscriptionSettings, SubscriptionStatistics, Update

_POLL_S = 0.1
_SOURCE = "replica"


@dataclass(frozen=True)
class FollowerState:
    """How well a replica is known. `silent_s`: since something was heard of it, None if nothing
    ever was. `num_blocks`: in all media together, each counted once."""

    silent_s: float | None
    num_blocks: int
    events: SubscriptionStatistics
    problem: str


class ReplicaFollower:
    """Knows what one replica caches. Any thread may ask; one of its own listens."""

    def __init__(self, endpoints: EventEndpoints, clock: Clock, silence_s: float) -> None:
        """Connect, and follow from now on.

        Args:
            endpoints: where the replica publishes.
            clock: tells how long it has been silent.
            silence_s: after so long it is asked whether anything was missed.

        Raises:
            ConfigurationError: an address that is none.
        """
        self.endpoints = endpoints
        self._clock = clock
        self._lock = threading.Lock()
        self._index = PrefixIndex()
        self._heard_s: float | None = None
        self._problem = ""
        self._settings = SubscriptionSettings(silence_s=silence_s)
        self._subscriber: KVEventSubscriber | None = subscribe(endpoints, self._settings)
        self._statistics = self._subscriber.statistics()
        self._loop = ServingLoop("replica-follower", self._turn)
        self._loop.start()

    @property
    def silent_s(self) -> float | None:
        """Seconds since something was heard; None if nothing ever was."""
        heard_s = self._heard_s
        return None if heard_s is None else self._clock.now() - heard_s

    @property
    def num_blocks(self) -> int:
        """How many blocks the replica has in all media together, each counted once."""
        with self._lock:
            return self._index.num_blocks(_SOURCE)

    def match(
        self, token_ids: Int32Array, lora_name: str | None, cache_salt: str | None
    ) -> PrefixMatch | None:
        """Return what the replica has of a prompt of shape `(n,)`; None before it was heard."""
        with self._lock:
            found = self._index.match(token_ids, lora_name=lora_name, cache_salt=cache_salt)
        return found[0] if found else None

    def state(self) -> FollowerState:
        """Return how well the replica is known, frozen."""
        with self._lock:
            statistics, problem = self._statistics, self._problem
            num_blocks = self._index.num_blocks(_SOURCE)
        return FollowerState(self.silent_s, num_blocks, statistics, problem)

    def close(self) -> None:
        """Stop following; returns when the thread has ended. May be called again."""
        self._loop.stop()
        self._loop.join()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _turn(self) -> None:
        """Listen for a moment. After an error nothing is known: the replica is followed from the
        beginning."""
        subscriber = self._subscriber
        if subscriber is None:
            subscriber = self._subscriber = subscribe(self.endpoints, self._settings)
        try:
            for update in subscriber.poll(_POLL_S):
                self._take(update)
            statistics = subscriber.statistics()
        except Exception as error:
            with self._lock:
                self._index = PrefixIndex()
                self._problem = f"followed from the beginning after {describe_error(error)}"
            self._subscriber = None
            subscriber.close()
            raise
        with self._lock:
            self._statistics = statistics

    def _take(self, update: Update) -> None:
        if update.is_restatement:
            index = PrefixIndex()
            index.follow(_SOURCE, update)
            with self._lock:
                self._index = index
        else:
            with self._lock:
                self._index.follow(_SOURCE, update)
        self._heard_s = self._clock.now()
