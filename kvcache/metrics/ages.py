"""How long cached contents had been out of use when they were hit, and when they were evicted.

The signal of a cache that thrashes: where contents are evicted at an age at which others are still
hit, more room would give more hits. Taken where contents leave use and come back, at the eviction
policy, which every core has: around the policy, so that neither cores nor policies know of it.
Refuses to change what a policy decides.
"""

from __future__ import annotations

import time
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
    use, and its blocks (None: one each). `_left_s[e]` and `_counted[e]` are of the last time that
    it was chosen: when, and how many of its blocks were counted as evicted then.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: int, book: EntryBook, meter: AgeMeter
    ) -> None:
        """Watch an empty `policy` over entries below `capacity`."""
        self._policy = policy
        self._book = book
        self._meter = meter
        self._since_s = np.zeros(capacity)
        self._left_s = np.zeros(capacity)
        self._counted = np.ones(capacity, np.int32)
        self._weights = None if book.is_uniform else np.zeros(capacity, np.int32)
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
        places = index_array(entries)
        self._since_s[places] = self._meter.now()
        if self._weights is not None:
            self._weights[places] = self._book.weights(places)

    def remove(self, entries: Entries) -> None:
        """See `EvictionPolicy`; what is used again was hit."""
        self._policy.remove(entries)
        places = index_array(entries)
        weights = None if self._weights is None else self._weights[places]
        self._meter.at_hit.observe_many(self._meter.now() - self._since_s[places], weights)

    def choose(self, num_blocks: int) -> Victims:
        """See `EvictionPolicy`; what is chosen counts as evicted, unless it is put back."""
        victims = self._policy.choose(num_blocks)
        if not len(victims.entries):
            self._newest = -1
            return victims
        places, now_s = index_array(victims.entries), self._meter.now()
        self._newest = int(places[-1])
        self._left_s[places] = now_s
        counted = None
        if self._weights is not None:
            weights = self._book.weights(places)  # anew: runs may have been cut meanwhile
            counted = weights.copy()
            counted[-1] = victims.num_blocks_of_last
            self._counted[places] = counted
            self._weights[places] = weights - counted
        self._meter.at_eviction.observe_many(now_s - self._since_s[places], counted)
        return victims

    def put_back(self, entries: Entries) -> None:
        """See `EvictionPolicy`. What comes back alone, at once, is the rest of a run whose tail has
        gone; all others were not evicted after all."""
        self._policy.put_back(entries)
        if not len(entries):
            return
        places = index_array(entries)
        is_rest = len(places) == 1 and places[0] == self._newest and self._weights is not None
        self._newest = -1
        if is_rest:
            return
        counted = self._counted[places]
        ages_s = self._left_s[places] - self._since_s[places]
        self._meter.at_eviction.observe_many(ages_s, -counted)
        if self._weights is not None:
            self._weights[places] += counted
