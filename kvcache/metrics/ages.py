"""How long cached contents had been out of use when they were hit, and when they were evicted.

The signal of a cache that thrashes: where contents are evicted at an age at which others are still
hit, more room would give more hits. Taken where contents leave use and come back, at the eviction
policy: around it, so that neither the core nor policies know of it.
Refuses to change what a policy decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, index_array
from kvcache.core import Core
from kvcache.manager.core_settings import CoreFactory, CoreSettings, make_core
from kvcache.metrics.histogram import Histogram
from kvcache.policies import EntryBook, EvictionPolicy, PolicyFactory
from kvcache.policies.entry_queue import Entries

_FEW = 16
"""As many victims, and fewer, are counted one by one: between steps numpy's code is out of the
processor's caches, and a dozen calls of it cost as much as a hundred entries here."""


class AgeMeter:
    """Ages in seconds at hit and at eviction, each counted once for every block.

    A hit of contents that somebody uses has no age.
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

    def watching(self, make: CoreFactory = make_core) -> CoreFactory:
        """Return what makes the same core, with policies that tell this meter."""

        def make_watched(settings: CoreSettings) -> Core:
            policies = {name: self._watched(factory) for name, factory in settings.policies.items()}
            return make(replace(settings, policies=policies))

        return make_watched

    def _watched(self, factory: PolicyFactory) -> PolicyFactory:
        @wraps(factory, updated=())
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

    `since_s[e]` says since when entry `e` is out of use, while it is inserted; `left_s[e]` when it
    was chosen last.
    """

    def __init__(self, book: EntryBook, capacity: int) -> None:
        self.book = book
        self.policies: list[WatchedPolicy] = []
        # What is read and written together lies together: most of the cost is memory that the
        # processor has not seen since the entry's last time.
        self.times_s = np.zeros((capacity, 2))
        self.since_s, self.left_s = self.times_s.T


class WatchedPolicy:
    """A policy that notes when entries come out of use, and how old they are when they leave.

    Single entries, which are most, are noted one by one through views that cost less than numpy's
    own indexing: `_times_s` has `since_s[e]` at `2 * e` and `left_s[e]` behind it.
    """

    def __init__(self, policy: EvictionPolicy, notes: _Notes, meter: AgeMeter) -> None:
        """Watch an empty `policy`."""
        self._policy = policy
        self._book = notes.book
        self._meter = meter
        self._notes = notes
        self._times_s = cast("memoryview[float]", notes.times_s.reshape(-1).data)
        self._insert, self._remove = policy.insert, policy.remove
        self._now = meter.now
        self._at_hit, self._at_eviction = meter.at_hit, meter.at_eviction
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
                idle_s[book.blocks_of(entry)] = now_s - self._times_s[2 * entry]

    def insert(self, entries: Entries) -> None:
        """See `EvictionPolicy`."""
        self._insert(entries)
        if len(entries) == 1:
            entry = entries[0]
            self._times_s[2 * entry] = self._now()
            return
        places = index_array(entries)
        self._notes.since_s[places] = self._now()

    def remove(self, entries: Entries) -> None:
        """See `EvictionPolicy`; what is used again was hit."""
        self._remove(entries)
        if len(entries) == 1:
            self._at_hit.observe(self._now() - self._times_s[2 * entries[0]])
            return
        self._at_hit.observe_many(self._now() - self._notes.since_s[index_array(entries)])

    def choose(self, num_entries: int) -> Entries:
        """See `EvictionPolicy`; what is chosen counts as evicted, unless it is put back."""
        chosen = self._policy.choose(num_entries)
        now_s, at_eviction = self._now(), self._at_eviction
        if len(chosen) <= _FEW:
            times_s = self._times_s
            for entry in chosen.tolist() if isinstance(chosen, np.ndarray) else chosen:
                times_s[2 * entry + 1] = now_s
                at_eviction.observe(now_s - times_s[2 * entry])
            return chosen
        places = index_array(chosen)
        self._notes.left_s[places] = now_s
        at_eviction.observe_many(now_s - self._notes.since_s[places])
        return chosen

    def put_back(self, entries: Entries) -> None:
        """See `EvictionPolicy`. What comes back was not evicted after all."""
        self._policy.put_back(entries)
        places = index_array(entries)
        ages_s = self._notes.left_s[places] - self._notes.since_s[places]
        self._at_eviction.observe_many(ages_s, -1)
