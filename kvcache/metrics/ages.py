"""How long cached contents had been out of use when they were hit, and when they were evicted.

The signal of a cache that thrashes: where contents are evicted at an age at which others are still
hit, more room would give more hits. Taken where contents leave use and come back, at the eviction
policy, which every core has: around the policy, so that neither cores nor policies know of it.
Refuses to change what a policy decides.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from kvcache.arrays import index_array
from kvcache.core import Core
from kvcache.manager.core_registry import CORES, CoreFactory, CoreSettings
from kvcache.metrics.histogram import Histogram
from kvcache.policies import EntryBook, EvictionPolicy, PolicyFactory, Victims
from kvcache.policies.entry_queue import Entries


class AgeMeter:
    """Ages in seconds at hit and at eviction, each counted once for every block.

    A hit of contents that somebody uses has no age. Neither has the first part of a run of blocks
    at the moment when it is cut off the rest: what remains keeps its place in the policy.
    """

    def __init__(
        self, bounds_s: tuple[float, ...], now: Callable[[], float] = time.monotonic
    ) -> None:
        """Count nothing yet. `now`: not a manager's clock, whose readings may be recorded."""
        self.at_hit = Histogram(bounds_s)
        self.at_eviction = Histogram(bounds_s)
        self.now = now

    def cores(self, factories: Mapping[str, CoreFactory] = CORES) -> Mapping[str, CoreFactory]:
        """Return the same cores, with policies that tell this meter."""
        return {name: self._metered(make) for name, make in factories.items()}

    def _metered(self, make: CoreFactory) -> CoreFactory:
        def make_metered(settings: CoreSettings) -> Core:
            policies = {name: self._watched(factory) for name, factory in settings.policies.items()}
            return make(replace(settings, policies=policies))

        return make_metered

    def _watched(self, factory: PolicyFactory) -> PolicyFactory:
        return lambda capacity, book: WatchedPolicy(factory(capacity, book), capacity, book, self)


class WatchedPolicy:
    """A policy that notes when entries come out of use, and how old they are when they leave.

    `_since_s[e]` and `_weights[e]` are of entry `e` while it is inserted: since when it is out of
    use, and its blocks (1 where all are single blocks). `_left_s[e]` and `_counted[e]` are of the
    last time that it was chosen: when, and how many of its blocks were counted as evicted then.
    Single entries, which are most, are written one by one into what numpy sees as arrays.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: int, book: EntryBook, meter: AgeMeter
    ) -> None:
        """Watch an empty `policy` over entries below `capacity`."""
        self._policy = policy
        self._book = book
        self._meter = meter
        self._is_uniform = book.is_uniform
        self._since_s = array("d", bytes(8 * capacity))
        self._left_s = array("d", bytes(8 * capacity))
        self._counted = array("i", bytes(4 * capacity))
        self._weights = array("i", bytes(4 * capacity))
        self._newest = -1  # the last entry of the newest choice
        self.discard = policy.discard
        self.order = policy.order

    @property
    def reads_contents(self) -> bool:
        """Whether the policy tells contents apart."""
        return self._policy.reads_contents

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, entry: object) -> bool:
        return entry in self._policy

    def insert(self, entries: Entries) -> None:
        """See `EvictionPolicy`."""
        self._policy.insert(entries)
        now_s, is_uniform = self._meter.now(), self._is_uniform
        if len(entries) == 1:
            entry = entries[0]
            self._since_s[entry] = now_s
            self._weights[entry] = (
                1 if is_uniform else int(self._book.weights(index_array(entries))[0])
            )
            return
        places = index_array(entries)
        np.frombuffer(self._since_s)[places] = now_s
        weights = 1 if is_uniform else self._book.weights(places)
        np.frombuffer(self._weights, np.int32)[places] = weights

    def remove(self, entries: Entries) -> None:
        """See `EvictionPolicy`; what is used again was hit."""
        self._policy.remove(entries)
        now_s, at_hit = self._meter.now(), self._meter.at_hit
        if len(entries) == 1:
            entry = entries[0]
            at_hit.observe(now_s - self._since_s[entry], self._weights[entry])
            return
        places = index_array(entries)
        weights = np.frombuffer(self._weights, np.int32)[places]
        at_hit.observe_many(now_s - np.frombuffer(self._since_s)[places], weights)

    def choose(self, num_blocks: int) -> Victims:
        """See `EvictionPolicy`; what is chosen counts as evicted, unless it is put back."""
        victims = self._policy.choose(num_blocks)
        entries, num_of_last = victims.entries, victims.num_blocks_of_last
        if not len(entries):
            self._newest = -1
            return victims
        now_s, at_eviction = self._meter.now(), self._meter.at_eviction
        self._newest = last = int(entries[-1])
        if len(entries) == 1:
            self._left_s[last] = now_s
            self._counted[last] = num_of_last
            self._weights[last] -= num_of_last
            at_eviction.observe(now_s - self._since_s[last], num_of_last)
            return victims
        places = index_array(entries)
        # Anew: runs may have been cut meanwhile.
        weights = np.ones_like(places) if self._is_uniform else self._book.weights(places)
        counted = weights.copy()
        counted[-1] = num_of_last
        np.frombuffer(self._left_s)[places] = now_s
        np.frombuffer(self._counted, np.int32)[places] = counted
        np.frombuffer(self._weights, np.int32)[places] = weights - counted
        at_eviction.observe_many(now_s - np.frombuffer(self._since_s)[places], counted)
        return victims

    def put_back(self, entries: Entries) -> None:
        """See `EvictionPolicy`. What comes back alone, at once, is the rest of a run whose tail has
        gone; all others were not evicted after all."""
        self._policy.put_back(entries)
        is_rest = len(entries) == 1 and entries[0] == self._newest and not self._is_uniform
        self._newest = -1
        if is_rest or not len(entries):
            return
        places = index_array(entries)
        counted = np.frombuffer(self._counted, np.int32)[places]
        ages_s = np.frombuffer(self._left_s)[places] - np.frombuffer(self._since_s)[places]
        self._meter.at_eviction.observe_many(ages_s, -counted)
        np.frombuffer(self._weights, np.int32)[places] += counted
