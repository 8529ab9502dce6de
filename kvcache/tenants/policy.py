"""The eviction policy of all tenants: shares choose the tenant, its own policy the block.

Serves a pool or tier. A victim comes from the tenant that is most over its share, and from a tenant
within its guarantee only if no other is above; a tenant at its limit loses its own. Within a tenant
the configured policy decides.

    insert ──▶ its tenant ──▶ its policy        choose ──▶ most over share ──▶ its policy
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import floor, inf
from typing import NamedTuple, Protocol

import numpy as np

from kvcache.base.arrays import IndexArray, Int32Array, index_array
from kvcache.policies import EntryTable, EvictionPolicy
from kvcache.policies.entry_queue import Entries
from kvcache.policies.hinted import HintedPolicy
from kvcache.requests.hints import CacheHint
from kvcache.tenants.ledger import TenantAccount, TenantLedger

FEW = 8
"""Up to this many blocks, a simulation is faster than the computation."""


class Giver(NamedTuple):
    """A tenant that can lose at most `cap` blocks, and has `excess` above its guarantee."""

    number: int
    excess: int
    weight: float
    cap: int

    @property
    def level(self) -> float:
        """Its blocks above the guarantee, divided by its weight."""
        return self.excess / self.weight


def counts_to_give(givers: Sequence[Giver], num_blocks: int) -> list[int]:
    """Return how many blocks each loses so that `num_blocks` go, or all they can lose.

    As if they went one by one, each from the highest level; among equals from the lowest number.
    O(givers * log givers), and another step for each giver if weights differ.
    """
    if sum([giver.cap for giver in givers]) <= num_blocks:
        return [giver.cap for giver in givers]
    if len(givers) == 1:
        return [num_blocks]
    counts = [0] * len(givers)
    if num_blocks > FEW:
        line = water_line(givers, num_blocks) + 1 / min([giver.weight for giver in givers])
        counts = [
            min(each.cap, max(0, floor(each.excess - line * each.weight) - 1)) for each in givers
        ]
    heap = [
        (-(giver.excess - count) / giver.weight, giver.number, place)
        for place, (giver, count) in enumerate(zip(givers, counts, strict=True))
        if count < giver.cap
    ]
    heapify(heap)
    for _ in range(num_blocks - sum(counts)):
        _, number, place = heap[0]
        giver = givers[place]
        counts[place] += 1
        if counts[place] < giver.cap:
            level = (giver.excess - counts[place]) / giver.weight
            heapreplace(heap, (-level, number, place))
        else:
            heappop(heap)
    return counts


def water_line(givers: Sequence[Giver], num_blocks: int) -> float:
    """Return the level to which all fall when `num_blocks` go, with fractions of blocks.

    Minus infinity if they cannot lose as many.
    """
    edges = []
    for giver in givers:
        if giver.cap:
            edges.append((giver.excess / giver.weight, giver.weight))
            edges.append(((giver.excess - giver.cap) / giver.weight, -giver.weight))
    edges.sort(reverse=True)
    gone = slope = 0.0
    above = inf
    for level, change in edges:
        if slope > 0:
            if gone + slope * (above - level) >= num_blocks:
                return above - (num_blocks - gone) / slope
            gone += slope * (above - level)
        above = level
        slope += change
    return -inf


def is_below(level: float, givers: Sequence[Giver], num_blocks: int) -> bool:
    """Return whether no tenant of this level loses a block if these givers may. May return
    False for such a tenant."""
    return num_blocks > FEW and bool(givers) and level < water_line(givers, num_blocks)


class TenantEntryTable(EntryTable, Protocol):
    """A table that also knows the tenant of each entry."""

    def tenant_numbers(self, entries: IndexArray) -> IndexArray | Int32Array:
        """Return the number of each entry's tenant."""


class TenantPolicy:
    """An `EvictionPolicy` over entries of several tenants.

    Invariants: an entry is in the policy of the tenant that `_numbers` has for it; every tenant
    with entries is in `_heap` at its level, unless the level changed and the ledger has recorded
    that.
    """

    def __init__(
        self,
        capacity: int,
        table: TenantEntryTable,
        ledger: TenantLedger,
        make: Callable[[], EvictionPolicy],
        *,
        counts_unheld: bool = False,
    ) -> None:
        """Make an empty order of entries below `capacity`; `make` makes each tenant's own.

        `counts_unheld`: entries are blocks, and the policy reports to the ledger which are unheld.
        """
        self._counts_unheld = counts_unheld
        self._table = table
        self._ledger = ledger
        self._make = make
        self._numbers: Int32Array = np.zeros(capacity, dtype=np.int32)
        self._length = 0
        self._heap: list[tuple[float, int]] = []
        self._plan: list[tuple[TenantAccount, int]] = []
        self._planned = -1
        ledger.served.policy = make()
        self._reads_contents = ledger.served.policy.reads_contents

    @property
    def reads_contents(self) -> bool:
        """Whether the tenants' own policies recognise contents."""
        return self._reads_contents

    def __len__(self) -> int:
        return self._length

    def __contains__(self, entry: object) -> bool:
        return any(entry in policy for policy in self._policies())

    def insert(self, entries: Entries) -> None:
        entries = index_array(entries)
        self._numbers[entries] = self._table.tenant_numbers(entries)
        self._length += len(entries)
        for account, part in self._by_account(entries):
            if account.policy is None:
                account.policy = self._make()
            account.policy.insert(part)
            self._note_unheld(account, len(part))
        self._planned = -1

    def remove(self, entries: Entries) -> None:
        entries = index_array(entries)
        self._length -= len(entries)
        for account, part in self._by_account(entries):
            self._policy(account).remove(part)
            self._note_unheld(account, -len(part))
        self._planned = -1

    def discard(self, entries: Entries) -> None:
        entries = index_array(entries)
        self._length -= len(entries)
        for account, part in self._by_account(entries):
            self._policy(account).discard(part)
            self._note_unheld(account, -len(part))
        self._planned = -1

    def choose(self, num_entries: int) -> Entries:
        parts = [self._choose_from_one(num_entries)]
        missing = num_entries - len(parts[0])
        # Only as planned: evictions are counted when the caller reports them.
        while missing > 0 and len(parts[-1]) and self._plan:
            parts.append(self._choose_from_one(missing))
            missing -= len(parts[-1])
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def put_back(self, entries: Entries) -> None:
        entries = index_array(entries)
        self._length += len(entries)
        for account, part in self._by_account(entries):
            self._policy(account).put_back(part)
            self._note_unheld(account, len(part))

    def wrap(self, wrapper: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Replace the policy of every tenant, present and future, by `wrapper` of it."""
        make = self._make
        self._make = lambda: wrapper(make())
        for account in self._ledger.accounts():
            if account.policy is not None:
                account.policy = wrapper(account.policy)

    def hint(
        self,
        entries: Entries,
        hint: CacheHint,
        *,
        is_needed: bool = True,
        since_s: float | None = None,
    ) -> None:
        """Follow a hint within the tenants that have these inserted entries, after `wrap`."""
        for account, part in self._by_account(index_array(entries)):
            policy = self._policy(account)
            if isinstance(policy, HintedPolicy):
                policy.hint(part, hint, is_needed=is_needed, since_s=since_s)

    def order(self) -> list[int]:
        """Return all entries, those of tenants most over their share first, each in order."""
        accounts = sorted(self._accounts(), key=lambda account: (-account.level, account.number))
        return [entry for account in accounts for entry in self._policy(account).order()]

    # --- inside --------------------------------------------------------------------------------

    def _choose_from_one(self, num_entries: int) -> IndexArray:
        """Choose victims of the tenant whose turn it is; the caller asks again for more."""
        while giver := self._next_giver(num_entries):
            account, count = giver
            chosen = index_array(self._policy(account).choose(min(count, num_entries)))
            if len(chosen):
                self._length -= len(chosen)
                self._note_unheld(account, -len(chosen))
                return chosen
        return index_array(())

    def _next_giver(self, num_blocks: int) -> tuple[TenantAccount, int] | None:
        if self._planned != self._ledger.num_demands or not self._plan:
            self._planned = self._ledger.num_demands
            self._plan = self._make_plan(num_blocks)
        if self._plan or self._ledger.is_own_only:
            return self._plan.pop() if self._plan else None
        return self._anybody()

    def _make_plan(self, num_blocks: int) -> list[tuple[TenantAccount, int]]:
        """Return the tenants and how many blocks each loses, the first one last. Omits zeros."""
        ledger, served = self._ledger, self._ledger.served
        self._note_changes()
        accounts: list[TenantAccount] = []
        givers: list[Giver] = []
        own = 0  # blocks beyond a tenant's own limit go first
        if served.policy is not None and len(served.policy):
            own = num_blocks if ledger.is_own_only else ledger.num_over_limit
            own = min(own, served.num_unheld, num_blocks)
            num_blocks -= own
            excess = served.num_blocks + ledger.demand_blocks - served.share.guaranteed_blocks
            accounts.append(served)
            givers.append(_giver(served, excess - own, served.num_unheld - own))
        seen: list[tuple[float, int]] = []
        num_others = 0
        taken = {served.number}
        while self._heap and not ledger.is_own_only:
            level, number = self._heap[0]
            account = ledger.numbered_or_none(number)
            if (
                number in taken
                or account is None
                or account.policy is None
                or not len(account.policy)
                or -level != account.level
            ):
                entry = heappop(self._heap)
                if number == served.number and number in taken:
                    seen.append(entry)
                continue
            if -level <= 0 or num_others == num_blocks or is_below(-level, givers, num_blocks):
                break
            num_others += 1  # only the first ones may lose a block each
            seen.append(heappop(self._heap))
            taken.add(number)
            excess = account.num_blocks - account.share.guaranteed_blocks
            accounts.append(account)
            givers.append(_giver(account, excess, min(excess, account.num_unheld)))
        for entry in set(seen):
            heappush(self._heap, entry)
        counts = counts_to_give(givers, num_blocks) if givers else []
        if own:
            counts[0] += own
        return [(a, n) for a, n in zip(accounts, counts, strict=True) if n][::-1]

    def _anybody(self) -> tuple[TenantAccount, int] | None:
        """Return the tenant with entries that is most over its share, for one block.

        Never a tenant within its guarantee that asks for room: others above theirs have its room.
        """
        accounts = list(self._accounts())
        if not accounts:
            return None
        return max(accounts, key=lambda account: (account.level, -account.number)), 1

    def _note_unheld(self, account: TenantAccount, change: int) -> None:
        if self._counts_unheld:
            self._ledger.count_unheld(account, change)
        else:
            self._ledger.changed[account] = None

    def _note_changes(self) -> None:
        """Put tenants whose counts changed into the heap at their new levels."""
        for account in self._ledger.changed:
            if account.policy is not None and len(account.policy):
                heappush(self._heap, (-account.level, account.number))
        self._ledger.changed.clear()
        if len(self._heap) > 4 * len(self._ledger) + 64:
            self._heap = sorted((-each.level, each.number) for each in self._accounts())

    def _policy(self, account: TenantAccount) -> EvictionPolicy:
        if account.policy is None:
            account.policy = self._make()
        return account.policy

    def _accounts(self) -> Iterator[TenantAccount]:
        """Yield the tenants that have entries."""
        for account in self._ledger.accounts():
            if account.policy is not None and len(account.policy):
                yield account

    def _policies(self) -> Iterable[EvictionPolicy]:
        return [self._policy(account) for account in self._accounts()]

    def _by_account(self, entries: IndexArray) -> Iterator[tuple[TenantAccount, IndexArray]]:
        """Yield the tenants of these entries, each with its own entries in order."""
        if not len(entries):
            return
        if len(entries) == 1:
            yield self._ledger.numbered(int(self._numbers[entries[0]])), entries
            return
        numbers = self._numbers[entries]
        first = int(numbers[0])
        if np.count_nonzero(numbers == first) == len(entries):
            yield self._ledger.numbered(first), entries
            return
        for number in dict.fromkeys(numbers.tolist()):
            yield self._ledger.numbered(number), entries[numbers == number]


def _giver(account: TenantAccount, excess: int, cap: int) -> Giver:
    return Giver(account.number, excess, account.share.weight, cap)
