"""A network inside one process that does what networks do, by a seed and on a virtual clock.

Carries encoded messages between named parties and loses, repeats, delays, reorders and tears some
of them. For simulations and tests of the protocol: the same seed gives the same faults. Refuses to
decode: what arrives torn is the receiver's to refuse.
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
    """Shares of messages, 0.0 to 1.0, that each fault happens to, and the delay of all.

    A message takes `latency_s` and, when `delayed`, up to `max_delay_s` more; `reordered` ones
    overtake or are overtaken within one latency. `torn` ones arrive cut short.
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
    """Messages by what became of them."""

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
    """Payloads under way, in order of arrival. One thread; time is the clock's."""

    def __init__(self, clock: Clock, random_source: random.Random, faults: NetworkFaults) -> None:
        """Carry nothing yet. `faults` may be replaced at any time."""
        self.faults = faults
        self._clock = clock
        self._random = random_source
        self._under_way: list[tuple[float, int, Delivery]] = []
        self._number = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, sender: Hashable, receiver: Hashable, payload: bytes) -> None:
        """Take a payload. Whether, when, how often and how whole it arrives is chance."""
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
        """Return when the next payload arrives, None if none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def arrivals(self) -> list[Delivery]:
        """Return what has arrived by now, in order of arrival; each is handed out once."""
        now_s = self._clock.now()
        arrived = []
        while self._under_way and self._under_way[0][0] <= now_s:
            arrived.append(heapq.heappop(self._under_way)[2])
        self._counts["delivered"] += len(arrived)
        return arrived

    def forget(self, receiver: Hashable) -> None:
        """Lose everything under way to a party that is gone."""
        self._under_way = [entry for entry in self._under_way if entry[2].receiver != receiver]
        heapq.heapify(self._under_way)

    def hang_up(self, party: Hashable) -> None:
        """Lose everything under way to and from a party whose connection has ended."""
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
        """Cut the end off. A turned bit could make another valid message: that is what checksums
        of the transport are for, so it is not simulated here."""
        return payload[: self._random.randrange(len(payload))] if payload else payload
