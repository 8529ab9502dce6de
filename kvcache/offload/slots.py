"""The addresses of a tier: their keys, states and jobs.

The tables of a `TierManager`. A tier has slots; a slot has places for `blocks_per_slot` device
blocks; an *address* is `slot * blocks_per_slot + place`.

                 prepared          stored
    (nothing) ───────────▶ STORING ──────▶ READY ──┐
        ▲                     │  failed      │     │ forgotten, while a job works on it
        ├─────────────────────┘              │     ▼
        ├──────────── evicted, forgotten ────┘  FORGOTTEN
        └──────────── the last job has ended ──────┘

Works on whole arrays where possible. A policy chooses the slot to evict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache.base.arguments import as_byte_strings, as_int, as_number, check_kind
from kvcache.base.arrays import BoolArray, IndexArray, Int32Array, Int64Array, index_array
from kvcache.base.errors import ConfigurationError, InvariantError
from kvcache.offload.keys import GROUP_BYTES, OffloadKey
from kvcache.policies import (
    EntryInfo,
    EvictionPolicy,
    LooksAhead,
    PolicyFactory,
    make_eviction_policy,
)
from kvcache.policies.hinted import HintColumns, HintedPolicy
from kvcache.requests.hints import CacheHint
from kvcache.tenants import TenantLedger, TenantPolicy
from kvcache.tenants.ledger import required

NOTHING: Final = 0
STORING: Final = 1
READY: Final = 2
FORGOTTEN: Final = 3

NO_ADDRESS: Final = -1

OWN_LOADS: Final = 1
"""Loads of what another node holds, too, until it is evicted like this node's own."""

IMPORT_LOADS: Final = 2
"""The same for a block that was copied from another node: the first load is for the request that it
was copied for."""

# Numbers of the counters' own type: `np.add.at` is then forty times as fast.
_ONE: Final = np.int32(1)
_MINUS_ONE: Final = np.int32(-1)

StateArray = npt.NDArray[np.uint8]
CountArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Given:
    """A hint of one session, and when it was given. Equal hints of two sessions are different."""

    hint: CacheHint
    since_s: float


class SlotTable:
    """Keys by address and addresses by key, with their states, jobs and slots.

    Invariants: `index` and `keys` agree; an address without a key is in state NOTHING and has no
    job; a STORING one is written, a READY one is not, and a FORGOTTEN one has a job. Per slot:
    `num_members` addresses with a key, `num_holds` writes and loads, `num_spills`, and `num_dirty`
    are sums over its addresses; a slot without members is free.
    """

    def __init__(self, num_slots: int, blocks_per_slot: int) -> None:
        """Make a table of free slots. Raises ConfigurationError for invalid sizes."""
        if num_slots < 1 or blocks_per_slot < 1 or num_slots * blocks_per_slot >= 2**31:
            raise ConfigurationError(
                f"a tier of {num_slots} slots of {blocks_per_slot} blocks: both must be at least "
                f"1, and together below {2**31} blocks"
            )
        num_addresses = num_slots * blocks_per_slot
        self.num_slots: Final = num_slots
        self.blocks_per_slot: Final = blocks_per_slot
        self.index: dict[OffloadKey, int] = {}
        self.keys: list[OffloadKey | None] = [None] * num_addresses
        self.states: StateArray = np.zeros(num_addresses, np.uint8)
        self.is_written: BoolArray = np.zeros(num_addresses, np.bool_)
        self.is_dirty: BoolArray = np.zeros(num_addresses, np.bool_)
        self.num_loads: CountArray = np.zeros(num_addresses, np.int32)
        self.num_spills: CountArray = np.zeros(num_addresses, np.int32)
        self.slot_members: CountArray = np.zeros(num_slots, np.int32)
        self.slot_holds: CountArray = np.zeros(num_slots, np.int32)
        self.slot_spills: CountArray = np.zeros(num_slots, np.int32)
        self.slot_dirty: CountArray = np.zeros(num_slots, np.int32)
        self.next_places: CountArray = np.zeros(num_slots, np.int32)
        self.free_slots: list[int] = list(range(num_slots - 1, -1, -1))
        self._marks: IndexArray = np.empty(num_addresses, np.intp)

    def addresses_of(self, keys: Sequence[OffloadKey]) -> IndexArray:
        """Return the address of each key, NO_ADDRESS for missing ones.

        Raises InvalidInputError for anything but a list or tuple of keys. Keys that are found are
        valid, so only missing ones are checked.
        """
        if type(keys) is not list and type(keys) is not tuple:
            as_byte_strings("keys", keys)
        try:
            found = np.fromiter(map(self.index.get, keys, repeat(NO_ADDRESS)), np.intp, len(keys))
        except TypeError:  # an unhashable value is not a key
            as_byte_strings("keys", keys)
            raise
        if NO_ADDRESS in found:
            as_byte_strings("keys", keys)
        return found

    def states_of(self, addresses: IndexArray) -> StateArray:
        """Return the state at each address, NOTHING for NO_ADDRESS."""
        states = self.states[addresses]
        states[addresses == NO_ADDRESS] = NOTHING
        return states

    def ready(self, keys: Sequence[OffloadKey]) -> IndexArray:
        """Return the addresses of the ready ones of these keys, each once."""
        addresses = self.addresses_of(keys)
        return self.distinct(addresses[self.states_of(addresses) == READY])

    def present_keys(self) -> list[OffloadKey]:
        """Return all keys that are ready or being stored."""
        return self.keys_at(np.flatnonzero((self.states == STORING) | (self.states == READY)))

    def slots_of(self, addresses: IndexArray) -> IndexArray:
        return addresses if self.blocks_per_slot == 1 else addresses // self.blocks_per_slot

    def distinct(self, addresses: IndexArray) -> IndexArray:
        """Return each of these addresses (or slots) once, in order of first appearance."""
        if len(addresses) < 2:
            return addresses
        places = np.arange(len(addresses) - 1, -1, -1)
        self._marks[addresses[::-1]] = places
        is_first = self._marks[addresses] == places[::-1]
        return addresses if is_first.all() else addresses[is_first]

    def addresses_in(self, slots: IndexArray) -> IndexArray:
        """Return the addresses of slots that have a key, in order."""
        if self.blocks_per_slot > 1:
            places = np.arange(self.blocks_per_slot)
            slots = (slots[:, None] * self.blocks_per_slot + places).ravel()
        occupied: IndexArray = slots[self.states[slots] != NOTHING]
        return occupied

    def keys_at(self, addresses: IndexArray) -> list[OffloadKey]:
        """Return the keys at addresses that all have one."""
        keys = self.keys
        return [key for address in addresses.tolist() if (key := keys[address]) is not None]

    def enter(self, keys: Sequence[OffloadKey], addresses: IndexArray, state: int) -> None:
        """Put new keys at empty addresses; STORING ones are being written."""
        places = addresses.tolist()
        self.index.update(zip(keys, places, strict=True))
        for key, address in zip(keys, places, strict=True):
            self.keys[address] = key
        self.states[addresses] = state
        slots = self.slots_of(addresses)
        np.add.at(self.slot_members, slots, _ONE)
        ends = addresses - slots * self.blocks_per_slot + 1
        np.maximum.at(self.next_places, slots, ends.astype(np.int32))
        if state == STORING:
            self.is_written[addresses] = True
            np.add.at(self.slot_holds, slots, _ONE)

    def vacate(self, addresses: IndexArray) -> IndexArray:
        """Empty addresses that have a key and no job; return the slots that become free."""
        for key in self.keys_at(addresses):
            del self.index[key]
        for address in addresses.tolist():
            self.keys[address] = None
        self.mark_clean(addresses)
        self.states[addresses] = NOTHING
        slots = self.slots_of(addresses)
        np.add.at(self.slot_members, slots, _MINUS_ONE)
        freed = self.distinct(slots[self.slot_members[slots] == 0])
        self.next_places[freed] = 0
        self.free_slots += freed[::-1].tolist()
        return freed

    def end_writes(self, addresses: IndexArray) -> None:
        """End the writes to these addresses; all were written."""
        self.is_written[addresses] = False
        np.add.at(self.slot_holds, self.slots_of(addresses), _MINUS_ONE)

    def add_loads(self, addresses: IndexArray, change: int) -> None:
        """Count another load (1) or the end of one (-1) at each of these addresses."""
        by = np.int32(change)
        np.add.at(self.num_loads, addresses, by)
        np.add.at(self.slot_holds, self.slots_of(addresses), by)

    def add_spills(self, addresses: IndexArray, change: int) -> None:
        """Count another spill (1) or the end of one (-1) at each of these addresses."""
        by = np.int32(change)
        np.add.at(self.num_spills, addresses, by)
        np.add.at(self.slot_spills, self.slots_of(addresses), by)

    def mark_dirty(self, addresses: IndexArray) -> None:
        """Mark these different addresses as dirty: no lower tier has their content."""
        changed = addresses[~self.is_dirty[addresses]]
        self.is_dirty[changed] = True
        np.add.at(self.slot_dirty, self.slots_of(changed), _ONE)

    def mark_clean(self, addresses: IndexArray) -> None:
        """Mark these different addresses as clean: their content may be dropped."""
        changed = addresses[self.is_dirty[addresses]]
        self.is_dirty[changed] = False
        np.add.at(self.slot_dirty, self.slots_of(changed), _MINUS_ONE)

    def is_working(self, addresses: IndexArray) -> BoolArray:
        """Return for each address whether a job uses it."""
        found: BoolArray = (
            self.is_written[addresses]
            | (self.num_loads[addresses] > 0)
            | (self.num_spills[addresses] > 0)
        )
        return found

    def num_jobs(self) -> tuple[int, int, int]:
        """Return how many keys are written, loaded (each load counts) and spilled."""
        return int(self.is_written.sum()), int(self.num_loads.sum()), int(self.num_spills.sum())

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        size = self.blocks_per_slot
        named = {key: address for address, key in enumerate(self.keys) if key is not None}
        if named != self.index:
            differing = sorted({a for _, a in named.items() ^ self.index.items()})
            raise InvariantError(f"keys and index differ at addresses {differing[:5]}")
        occupied = np.zeros(len(self.keys), np.bool_)
        occupied[list(named.values())] = True
        working = self.is_working(np.arange(len(self.keys)))
        rules: dict[str, BoolArray] = {
            "have a state and no key, or a key and no state": occupied != (self.states != NOTHING),
            "are empty and a job works on them": ~occupied & working,
            "are empty and dirty": ~occupied & self.is_dirty,
            "are being stored and not written": (self.states == STORING) & ~self.is_written,
            "are ready and written": (self.states == READY) & self.is_written,
            "are forgotten without a job": (self.states == FORGOTTEN) & ~working,
            "have a negative number of jobs": (self.num_loads < 0) | (self.num_spills < 0),
        }
        for what, is_wrong in rules.items():
            if is_wrong.any():
                raise InvariantError(f"addresses {np.flatnonzero(is_wrong)[:5].tolist()} {what}")
        sums: dict[str, tuple[CountArray, CountArray]] = {
            "members": (self.slot_members, occupied.astype(np.int32)),
            "holds": (self.slot_holds, self.num_loads + self.is_written),
            "spills": (self.slot_spills, self.num_spills),
            "dirty places": (self.slot_dirty, self.is_dirty.astype(np.int32)),
        }
        for what, (counted, parts) in sums.items():
            expected = parts.reshape(-1, size).sum(axis=1)
            wrong = np.flatnonzero(counted != expected)
            if len(wrong):
                slot = int(wrong[0])
                raise InvariantError(
                    f"slot {slot} counts {int(counted[slot])} {what}, it has {int(expected[slot])}"
                )
        free, empty = sorted(self.free_slots), np.flatnonzero(self.slot_members == 0).tolist()
        if free != empty:
            raise InvariantError(f"{len(free)} slots are free, {len(empty)} have no member")
        last = np.where(occupied, np.arange(len(self.keys)) % size + 1, 0)
        if bool((last.reshape(-1, size).max(axis=1) > self.next_places).any()):
            raise InvariantError("a slot would be filled up where it holds something")


@dataclass(frozen=True, eq=False)
class Placement:
    """New key `i` is `positions[i]` of the caller's keys and goes to place `places[i]` of slot
    `slots[i]`; numbers from the table's `num_slots` on are new slots, in order."""

    positions: IndexArray
    slots: IndexArray
    places: IndexArray
    num_new_slots: int

    def leading(self, num_slots: int, num_new_slots: int) -> Placement:
        """Return the part before a new slot that is not available, with `num_new_slots`."""
        if num_new_slots >= self.num_new_slots:
            return self
        beyond = np.flatnonzero(self.slots >= num_slots + num_new_slots)
        end = int(beyond[0])
        return Placement(self.positions[:end], self.slots[:end], self.places[:end], num_new_slots)


def place_keys(
    table: SlotTable, keys: Sequence[OffloadKey], addresses: IndexArray, positions: IndexArray
) -> Placement:
    """Return a place for each key at `positions`; none is in the table.

    `addresses` are those of all keys. A key goes behind the one before it if that is the last of
    its slot, and of the same group.
    """
    size, next_slot = table.blocks_per_slot, table.num_slots
    if size == 1:
        count = len(positions)
        return Placement(positions, next_slot + np.arange(count), np.zeros(count, np.intp), count)
    slots: list[int] = []
    places: list[int] = []
    filled: dict[int, int] = {}
    wanted = set(positions.tolist())
    slot, place = -1, size
    for i, address in enumerate(addresses.tolist()):
        if address != NO_ADDRESS:
            slot, before = divmod(address, size)
            is_last = before + 1 == filled.get(slot, int(table.next_places[slot]))
            place = before + 1 if is_last and table.states[address] != FORGOTTEN else size
        elif i not in wanted:
            place = size
        else:
            if place == size or keys[i - 1][-GROUP_BYTES:] != keys[i][-GROUP_BYTES:]:
                slot, place, next_slot = next_slot, 0, next_slot + 1
            slots.append(slot)
            places.append(place)
            place += 1
            filled[slot] = place
    num_new = next_slot - table.num_slots
    return Placement(positions, index_array(slots), index_array(places), num_new)


class SlotEviction:
    """The eviction order of idle slots. Also the policy's `EntryTable`.

    *Copies* of what another node holds go first, the longest unused first, until they are loaded
    here or a hint comes: so the last one in a group of nodes lives longer. They keep their places
    in the policy, for the time when they are copies no more.

    Invariant: a slot is in the policy exactly when it has members and no holds (writes or loads).
    It is among `_copies`, too, exactly when `_is_copy` and `_own_loads` above 0 say so. Slots
    without members have `_is_copy` false, and `OWN_LOADS`.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: str,
        policies: Mapping[str, PolicyFactory],
        tenants: TenantLedger | None = None,
    ) -> None:
        """Order the slots of `table`, by tenants if there are any.

        Raises ConfigurationError for an unknown policy.
        """
        self._table = table
        self._tenants = tenants
        make = partial(make_eviction_policy, policy, table.num_slots, self, policies)
        self._policy: EvictionPolicy = (
            make()
            if tenants is None
            else TenantPolicy(table.num_slots, self, tenants, make, counts_unheld=True)
        )
        self._is_in: BoolArray = np.zeros(table.num_slots, np.bool_)
        # Until the first copy, these are unused.
        self._copies: OrderedDict[int, None] = OrderedDict()
        self._is_copy: BoolArray = np.zeros(table.num_slots, np.bool_)
        self._own_loads: CountArray = np.full(table.num_slots, OWN_LOADS, np.int32)
        """After how many loads a slot is evicted by the policy even if it has a copy."""
        self._has_copies = False
        # Until the first hint, the rest is unused.
        self._hints: HintColumns | None = None
        self._later: dict[int, _Given] = {}
        self._claimed: dict[int, _Given] = {}
        """What was said about the next use of slots, until it comes."""
        self._is_shared: BoolArray = np.zeros(0, np.bool_)
        self._followers: Int64Array = np.zeros(0, np.int64)

    def follow_time(self, now_s: float) -> None:
        """Let hints end by this time."""
        if self._hints is not None:
            self._hints.now_s = max(self._hints.now_s, now_s)

    def hint(
        self, keys: Sequence[OffloadKey], start: int, end: int, hint: CacheHint, now_s: float
    ) -> None:
        """Follow a hint for those of the keys `keys[start:end]` that are here. `keys` is the chain
        of a request in one group, from its beginning.

        Slots that are being written follow it when they have been. What chains of several hints
        share and go on from differently is shared: low priorities and claims do not apply there.
        """
        check_kind("hint", hint, CacheHint)
        start, end = as_int("start", start), as_int("end", end)
        now_s = as_number("now_s", now_s)
        table = self._table
        addresses = table.addresses_of(keys)
        self._follow_hints(now_s)
        slots = table.slots_of(addresses)
        self._note_followers(keys, slots)
        meant = (slots != NO_ADDRESS) & (table.states[addresses] != FORGOTTEN)
        if not hint.is_for_shared:
            meant &= ~self._is_shared[slots]
        meant[:start], meant[end:] = False, False
        is_written = table.is_written[addresses[meant]]
        given = _Given(hint, now_s)
        self._later.update(dict.fromkeys(slots[meant][is_written].tolist(), given))
        waiting = table.distinct(slots[meant])
        self._tell(waiting[self._is_in[waiting]], given)

    def hand_on(self, keys: Sequence[OffloadKey], other: SlotEviction) -> None:
        """Have another tier, which has just got these keys, follow their hints, too: priorities,
        and what was said about a use that has not come. `keys` is in the order of its prefix."""
        if self._hints is None:
            return
        now_s = self._hints.now_s
        known: dict[_Given, list[OffloadKey]] = {}
        priorities: dict[tuple[int, float], _Given] = {}
        for key, slot in zip(
            keys, self._table.slots_of(self._table.addresses_of(keys)), strict=True
        ):
            given = self._claimed.get(int(slot))
            priority, until_s = self._hints.lasting.get(int(slot), (0, 0.0))
            if until_s > now_s:
                duration_s = None if until_s == inf else until_s - now_s
                hint = CacheHint(priority=priority, duration_s=duration_s)
                given = priorities.setdefault((priority, until_s), _Given(hint, now_s))
            if given is not None and slot != NO_ADDRESS:
                known.setdefault(given, []).append(key)
        for given, meant in known.items():
            other._follow_hints(now_s)
            slots = other._table.distinct(other._table.slots_of(other._table.addresses_of(meant)))
            here = slots[slots != NO_ADDRESS]
            other._tell(here[other._is_in[here]], given)

    def _follow_hints(self, now_s: float) -> None:
        """Follow hints from now on, and the time."""
        if self._hints is None:
            num_slots = self._table.num_slots
            self._hints = columns = HintColumns(num_slots, now_s)
            self._is_shared = np.zeros(num_slots, np.bool_)
            self._followers = np.zeros(num_slots, np.int64)

            def hinted(inner: EvictionPolicy) -> EvictionPolicy:
                return HintedPolicy(inner, self, columns)

            if isinstance(self._policy, TenantPolicy):
                self._policy.wrap(hinted)
            else:
                self._policy = hinted(self._policy)
        self.follow_time(now_s)

    def _note_followers(self, keys: Sequence[OffloadKey], slots: IndexArray) -> None:
        """Note the key behind each slot of a chain; slots before a fork of chains are shared."""
        ends = np.flatnonzero((slots[:-1] != slots[1:]) & (slots[:-1] != NO_ADDRESS))
        following = np.array([hash(keys[i + 1]) for i in ends.tolist()], np.int64)
        known = self._followers[slots[ends]]
        forks = ends[(known != 0) & (known != following)]
        if len(forks):
            before = slots[: forks[-1] + 1]
            self._is_shared[before[before != NO_ADDRESS]] = True
        self._followers[slots[ends]] = following

    def _tell(self, slots: IndexArray, given: _Given) -> None:
        if self._hints is None or not len(slots):
            return
        if isinstance(self._policy, (HintedPolicy, TenantPolicy)):
            self._own_loads[slots] = 0
            self._drop_copies(slots)
            self._policy.hint(slots, given.hint, since_s=given.since_s)
        if given.hint.priority is None:
            self._claimed.update(dict.fromkeys(slots.tolist(), given))

    def _forget_hints(self, slots: IndexArray) -> None:
        """Forget the hints of slots whose content is gone."""
        self._followers[slots] = 0
        self._is_shared[slots] = False
        for slot in slots.tolist() if self._later else ():
            self._later.pop(slot, None)
        self._forget_claims(slots)

    def _forget_claims(self, slots: IndexArray) -> None:
        for slot in slots.tolist() if self._claimed else ():
            self._claimed.pop(slot, None)

    def describe(self, entry: int) -> EntryInfo:
        """Return the policy's data about a slot: the key of its last block."""
        table = self._table
        place = int(table.next_places[entry])
        last = entry * table.blocks_per_slot + place - 1
        return EntryInfo(content=table.keys[last] if place else None)

    def tenant_numbers(self, entries: IndexArray) -> Int32Array:
        """Return the tenants of these slots. Only with tenants."""
        numbers: Int32Array = required(self._tenants).owners[entries]
        return numbers

    def update(self, slots: IndexArray) -> None:
        """Update the policy for these slots, given in order of the chain.

        Slots that came out of use enter as the most recently used, the last ones to be evicted
        first.
        """
        slots = self._table.distinct(slots)
        table, is_in = self._table, self._is_in[slots]
        is_used = table.slot_holds[slots] > 0
        is_empty = table.slot_members[slots] == 0
        self._leave(slots[is_in & is_used])
        gone = slots[is_in & is_empty]
        if len(gone):
            self._policy.discard(gone)
            self._drop_copies(gone)
            self._is_in[gone] = False
        if self._hints is not None:
            self._forget_hints(slots[is_empty])
        self._forget_copies(slots[is_empty])
        entering = slots[~is_in & ~is_used & ~is_empty]
        self.enter(entering[::-1])
        if self._later:
            hints = [self._later.pop(slot, None) for slot in entering.tolist()]
            for given in dict.fromkeys(hints):
                if given is not None:
                    self._tell(entering[[each is given for each in hints]], given)

    def enter(self, slots: IndexArray) -> None:
        """Insert slots that have just come out of use; the first of them is evicted first."""
        if len(slots):
            self._insert(slots)
            self._is_in[slots] = True

    def mark_imports(self, slots: IndexArray) -> None:
        """Note that these slots, which are being written, get copies from another node."""
        if self._can_mark:
            self._own_loads[slots] = IMPORT_LOADS
            self.mark_copies(slots, are_copies=True)

    def mark_copies(self, slots: IndexArray, *, are_copies: bool) -> IndexArray:
        """Note of these different slots, which have members, whether another node is the one that
        keeps what they hold; return those of which something else was noted."""
        changed: IndexArray = slots[self._is_copy[slots] != are_copies]
        if not self._can_mark or not len(changed):
            return index_array(())
        self._has_copies = True
        self._is_copy[changed] = are_copies
        if are_copies:
            self._add_copies(changed[self._is_in[changed]])
        else:
            self._drop_copies(changed)
        return changed

    def are_copies(self, slots: IndexArray) -> BoolArray:
        """Return for each slot whether it is noted that another node keeps what it holds."""
        found: BoolArray = self._is_copy[slots]
        return found

    def num_copies(self) -> int:
        """Return how many slots are noted as copies."""
        return int(np.count_nonzero(self._is_copy)) if self._has_copies else 0

    def note_loads(self, slots: IndexArray) -> None:
        """Count a load of these slots, which are in use now."""
        if self._has_copies:
            self._own_loads[slots] = np.maximum(self._own_loads[slots] - 1, 0)

    def withhold(self, slots: IndexArray) -> None:
        """Remove those slots that are in the policy, until `update` inserts them again."""
        slots = self._table.distinct(slots)
        self._leave(slots[self._is_in[slots]])

    def touch(self, slots: IndexArray) -> None:
        """Make those slots that are in the policy the most recently used."""
        slots = self._table.distinct(slots)
        waiting = slots[self._is_in[slots]]
        if len(waiting):
            self._policy.remove(waiting)
            self._drop_copies(waiting)
            self._forget_claims(waiting)
            self._insert(waiting[::-1])

    def num_evictable(self, *, drops_dirty: bool) -> int:
        """Return how many slots `choose` can take."""
        table = self._table
        if not table.slot_spills.any() and (drops_dirty or not table.slot_dirty.any()):
            return len(self._policy)
        must_stay = table.slot_spills > 0
        if not drops_dirty:
            must_stay |= table.slot_dirty > 0
        return int(np.count_nonzero(self._is_in & ~must_stay))

    def num_obtainable(self, tenants: TenantLedger, *, drops_dirty: bool) -> int:
        """Return how many slots the served tenant could get now, including free ones."""
        table = self._table
        must_stay = table.slot_spills > 0
        if not drops_dirty:
            must_stay |= table.slot_dirty > 0
        owners = tenants.owners[self._is_in & ~must_stay]
        can_go = index_array(np.bincount(owners, minlength=tenants.num_numbers))
        return max(0, tenants.num_obtainable(len(table.free_slots), can_go))

    def choose(self, num_slots: int, *, drops_dirty: bool) -> IndexArray:
        """Remove and return the next `num_slots` victims; there are enough."""
        table, policy = self._table, self._policy
        victims: list[IndexArray] = []
        kept: list[IndexArray] = []
        if self._copies:
            victims.append(self._choose_copies(num_slots, drops_dirty=drops_dirty))
        missing, num_kept = num_slots - sum(map(len, victims)), 0
        while missing > 0 and len(policy):
            chosen = index_array(policy.choose(missing + num_kept))
            if not len(chosen):
                break
            must_stay = table.slot_spills[chosen] > 0
            if not drops_dirty:
                must_stay |= table.slot_dirty[chosen] > 0
            may_go = np.flatnonzero(~must_stay)[:missing]
            victims.append(chosen[may_go])
            if self._tenants is not None:
                self._tenants.evicted(victims[-1])
                self._tenants.freed(victims[-1])
            self._drop_copies(victims[-1])
            kept.append(np.delete(chosen, may_go))
            missing -= len(may_go)
            num_kept += len(kept[-1])
        if num_kept:
            policy.put_back(np.concatenate(kept))
        result = np.concatenate(victims) if victims else index_array(())
        self._is_in[result] = False
        if self._hints is not None:
            self._forget_hints(result)
        self._forget_copies(result)
        if missing > 0:
            raise InvariantError(f"{missing} of {num_slots} slots to evict could not be found")
        return result

    def dirty_ahead(self, num_slots: int) -> IndexArray:
        """Return which of the next `num_slots` victims are dirty and not being spilled, in order.

        With a policy of several lines, this many of each: their shares show later. Copies are not
        dirty, so those that go before others leave the rest more time. Changes nothing.
        """
        if num_slots < 1 or not len(self._policy):
            return index_array(())
        slots, table = self._next(num_slots), self._table
        is_owed = (table.slot_dirty[slots] > 0) & (table.slot_spills[slots] == 0)
        ahead: IndexArray = slots[is_owed]
        return ahead

    def _next(self, num_slots: int) -> IndexArray:
        """Return the next `num_slots` slots, as defined by `LooksAhead`. Changes nothing."""
        policy = self._policy
        if isinstance(policy, LooksAhead):
            return index_array(policy.look_ahead(num_slots))
        if self._tenants is not None:
            self._tenants.demand(num_slots)
        chosen = index_array(policy.choose(num_slots))
        policy.put_back(chosen)
        return chosen

    def order(self) -> list[int]:
        """Return all idle slots, the next victim first. For audits; changes nothing."""
        own = [slot for slot in self._policy.order() if slot not in self._copies]
        return [*self._copies, *own]

    def check(self) -> None:
        """Raise InvariantError unless the policy has exactly the idle slots."""
        table = self._table
        idle = np.flatnonzero((table.slot_members > 0) & (table.slot_holds == 0)).tolist()
        found = sorted(self._policy.order())
        if found != idle or len(self._policy) != len(idle):
            raise InvariantError(
                f"the policy has {len(found)} slots, {len(idle)} are idle; they differ in "
                f"{sorted(set(found) ^ set(idle))[:5]}"
            )
        if np.flatnonzero(self._is_in).tolist() != idle:
            raise InvariantError("slots are noted as waiting that are not, or the reverse")
        if not self._claimed.keys() <= set(idle):
            raise InvariantError("slots are said to be used later that are in use, or empty")
        first = self._is_in & self._is_copy & (self._own_loads > 0)
        is_empty = table.slot_members == 0
        if (
            sorted(self._copies) != np.flatnonzero(first).tolist()
            or self._is_copy[is_empty].any()
            or (self._own_loads[is_empty] != OWN_LOADS).any()
        ):
            raise InvariantError("slots are noted as copies that are none, or the reverse")

    @property
    def _can_mark(self) -> bool:
        """Whether copies go first: not with tenants, whose shares decide, or several blocks to a
        slot, which may differ."""
        return self._tenants is None and self._table.blocks_per_slot == 1

    def _leave(self, slots: IndexArray) -> None:
        if len(slots):
            self._policy.remove(slots)
            self._drop_copies(slots)
            self._forget_claims(slots)
            self._is_in[slots] = False

    def _insert(self, slots: IndexArray) -> None:
        self._policy.insert(slots)
        if self._has_copies:
            self._add_copies(slots[self._is_copy[slots]])

    def _add_copies(self, slots: IndexArray) -> None:
        """Put idle copies behind the others, unless they have been loaded often enough."""
        self._copies.update(dict.fromkeys(slots[self._own_loads[slots] > 0].tolist()))

    def _drop_copies(self, slots: IndexArray) -> None:
        """Take slots out of the copies, as far as they are among them."""
        for slot in slots.tolist() if self._copies else ():
            self._copies.pop(slot, None)

    def _forget_copies(self, slots: IndexArray) -> None:
        """Forget what is noted of slots whose content is gone."""
        if self._has_copies or self._hints is not None:
            self._is_copy[slots] = False
            self._own_loads[slots] = OWN_LOADS

    def _choose_copies(self, num_slots: int, *, drops_dirty: bool) -> IndexArray:
        """Remove and return up to `num_slots` copies that may go."""
        table = self._table

        def may_go(slot: int) -> bool:
            return not table.slot_spills[slot] and (drops_dirty or not table.slot_dirty[slot])

        chosen = index_array(list(islice(filter(may_go, self._copies), num_slots)))
        if len(chosen):
            self._policy.discard(chosen)
            self._drop_copies(chosen)
        return chosen
