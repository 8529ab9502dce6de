"""A simulated network with faults, from a seed and on a virtual clock.

Carries encoded messages between named peers and loses, repeats, delays, reorders and truncates some
of them. For simulations and tests: the same seed gives the same faults. Decodes nothing: receivers
must refuse truncated messages.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from kvcache.base.clock import Clock
from kvcache.base.errors import ConfigurationError


@dataclass(frozen=True)
class NetworkFaults:
    """The share of messages, 0.0 to 1.0, for each fault, and the delay of all messages.

    A message takes `latency_s` and, when `delayed`, up to `max_delay_s` more. `reordered` messages
    overtake or are overtaken within one latency. `torn` ones are truncated.
    """

    dropped: float = 0.0
    duplicated: float = 0.0
    delayed: float = 0.0
    reordered: float = 0.0
    torn: float = 0.0
    latency_s: float = 0.001
    max_delay_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dropped", "duplicated", "delayed", "reordered", "torn"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: pass a share, 0 to 1")
        for name in ("latency_s", "max_delay_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} is {getattr(self, name)}: pass 0 or more")


@dataclass(frozen=True)
class NetworkStatistics:
    """Counts of messages."""

    sent: int = 0
    delivered: int = 0
    dropped: int = 0
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0
    torn: int = 0


@dataclass(frozen=True)
class Delivery:
    """A payload that arrives now."""

    sender: Hashable
    receiver: Hashable
    payload: bytes


class FaultyNetwork:
    """Payloads in flight, in order of arrival. One thread; uses the clock's time."""

    def __init__(self, clock: Clock, random_source: random.Random, faults: NetworkFaults) -> None:
        """Start empty. `faults` may be replaced at any time."""
        self.faults = faults
        self._clock = clock
        self._random = random_source
        self._under_way: list[tuple[float, int, Delivery]] = []
        self._number = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, sender: Hashable, receiver: Hashable, payload: bytes) -> None:
        """Send a payload. The seed decides whether, when, how often and how whole it arrives."""
        faults, chance = self.faults, self._random.random
        self._counts["sent"] += 1
        if chance() < faults.dropped:
            self._counts["dropped"] += 1
            return
        self._put(Delivery(sender, receiver, payload))
        if chance() < faults.duplicated:
            self._counts["duplicated"] += 1
            self._put(Delivery(sender, receiver, payload))

    def next_arrival_s(self) -> float | None:
        """Return when the next payload arrives, None if none is in flight."""
        return self._under_way[0][0] if self._under_way else None

    def arrivals(self) -> list[Delivery]:
        """Return the payloads that have arrived, in order; each is returned once."""
        now_s = self._clock.now()
        arrived = []
        while self._under_way and self._under_way[0][0] <= now_s:
            arrived.append(heapq.heappop(self._under_way)[2])
        self._counts["delivered"] += len(arrived)
        return arrived

    def forget(self, receiver: Hashable) -> None:
        """Drop everything in flight to a peer that is gone."""
        self._under_way = [entry for entry in self._under_way if entry[2].receiver != receiver]
        heapq.heapify(self._under_way)

    def hang_up(self, party: Hashable) -> None:
        """Drop everything in flight to and from a peer whose connection has ended."""
        self._under_way = [
            entry for entry in self._under_way if party not in (entry[2].sender, entry[2].receiver)
        ]
        heapq.heapify(self._under_way)

    def statistics(self) -> NetworkStatistics:
        """Return the counters, frozen."""
        return NetworkStatistics(**self._counts)

    def _put(self, delivery: Delivery) -> None:
        faults, chance = self.faults, self._random.random
        arrival_s = self._clock.now() + faults.latency_s
        if chance() < faults.reordered:
            arrival_s += faults.latency_s * (2 * chance() - 1)
            self._counts["reordered"] += 1
        if chance() < faults.delayed:
            arrival_s += faults.max_delay_s * chance()
            self._counts["delayed"] += 1
        if chance() < faults.torn:
            payload = self._torn(delivery.payload)
            delivery = Delivery(delivery.sender, delivery.receiver, payload)
            self._counts["torn"] += 1
        self._number += 1
        heapq.heappush(self._under_way, (arrival_s, self._number, delivery))

    def _torn(self, payload: bytes) -> bytes:
        """Cut the end off. A flipped bit could make another valid message; real transports detect
        that by checksums, so it is not simulated here."""
        return payload[: self._random.randrange(len(payload))] if payload else payload
