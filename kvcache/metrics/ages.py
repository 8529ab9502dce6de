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
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, index_array
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
        self._notes: _Notes | None = None

    def idle_s(self, num_blocks: int) -> npt.NDArray[np.float32]:
        """Return for how many seconds each block, by id, is out of use; -1 for those in use, and
        for those that hold nothing. Shape `(num_blocks,)`. Reads all of the newest pool's order."""
        idle = np.full(num_blocks, -1.0, dtype=np.float32)
        for policy in [] if self._notes is None else self._notes.policies:
            policy.note_idle(idle)
        return idle

    def cores(self, factories: Mapping[str, CoreFactory] = CORES) -> Mapping[str, CoreFactory]:
        """Return the same cores, with policies that tell this meter."""
        return {name: self._metered(make) for name, make in factories.items()}

    def _metered(self, make: CoreFactory) -> CoreFactory:
        def make_metered(settings: CoreSettings) -> Core:
            policies = {name: self._watched(factory) for name, factory in settings.policies.items()}
            return make(replace(settings, policies=policies))

        return make_metered

    def _watched(self, factory: PolicyFactory) -> PolicyFactory:
        def watched(capacity: int, book: EntryBook) -> EvictionPolicy:
            notes = self._notes
            if notes is None or notes.book is not book:
                notes = self._notes = _Notes(book, capacity)
            policy = WatchedPolicy(factory(capacity, book), notes, self)
            notes.policies.append(policy)
            return policy

        return watched


@runtime_checkable
class BlockBook(Protocol):
    """A book that can say which blocks an entry stands for: a device pool's."""

    def blocks_of(self, entry: int) -> IndexArray:
        """Return the ids of the blocks of an inserted entry."""


class _Notes:
    """What is noted of the entries of one pool, whose policies (one, or one for each tenant) share
    it: an entry is in one of them at a time.

    `since_s[e]` and `weights[e]` are of entry `e` while it is inserted: since when it is out of
    use, and its blocks (1 where all are single blocks). `left_s[e]` and `counted[e]` are of the
    last time that it was chosen: when, and how many of its blocks were counted as evicted then.
    """

    def __init__(self, book: EntryBook, capacity: int) -> None:
        self.book = book
        self.policies: list[WatchedPolicy] = []
        self.since_s = np.zeros(capacity)
        self.left_s = np.zeros(capacity)
        self.counted = np.zeros(capacity, np.int32)
        self.weights = np.zeros(capacity, np.int32)


class WatchedPolicy:
    """A policy that notes when entries come out of use, and how old they are when they leave.

    Single entries, which are most, are noted one by one through views that cost less than numpy's
    own indexing.
    """

    def __init__(self, policy: EvictionPolicy, notes: _Notes, meter: AgeMeter) -> None:
        """Watch an empty `policy`."""
        self._policy = policy
        self._book = notes.book
        self._meter = meter
        self._notes = notes
        self._is_uniform = notes.book.is_uniform
        self._since_s = cast("memoryview[float]", notes.since_s.data)
        self._left_s = cast("memoryview[float]", notes.left_s.data)
        self._counted, self._weights = notes.counted.data, notes.weights.data
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

    def note_idle(self, idle_s: npt.NDArray[np.float32]) -> None:
        """Write down since when each block of an inserted entry is out of use."""
        now_s, book = self._meter.now(), self._book
        if isinstance(book, BlockBook):
            for entry in self._policy.order():
                idle_s[book.blocks_of(entry)] = now_s - self._since_s[entry]

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
        self._notes.since_s[places] = now_s
        weights = 1 if is_uniform else self._book.weights(places)
        self._notes.weights[places] = weights

    def remove(self, entries: Entries) -> None:
        """See `EvictionPolicy`; what is used again was hit."""
        self._policy.remove(entries)
        now_s, at_hit = self._meter.now(), self._meter.at_hit
        if len(entries) == 1:
            entry = entries[0]
            at_hit.observe(now_s - self._since_s[entry], self._weights[entry])
            return
        places = index_array(entries)
        weights = self._notes.weights[places]
        at_hit.observe_many(now_s - self._notes.since_s[places], weights)

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
        self._notes.left_s[places] = now_s
        self._notes.counted[places] = counted
        self._notes.weights[places] = weights - counted
        at_eviction.observe_many(now_s - self._notes.since_s[places], counted)
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
        counted = self._notes.counted[places]
        ages_s = self._notes.left_s[places] - self._notes.since_s[places]
        self._meter.at_eviction.observe_many(ages_s, -counted)
        self._notes.weights[places] += counted
