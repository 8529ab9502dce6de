"""Which content lies at which address of a tier, in what state, and what works on it.

The tables of a `TierManager`, which decides. A tier has slots; a slot has places for
`blocks_per_slot` device blocks; an *address* is `slot * blocks_per_slot + place`.

                 prepared          stored
    (nothing) ───────────▶ STORING ──────▶ READY ──┐
        ▲                     │  failed      │     │ forgotten, while a job works on it
        ├─────────────────────┘              │     ▼
        ├──────────── evicted, forgotten ────┘  FORGOTTEN
        └──────────── the last job has ended ──────┘

Works on whole arrays where it can. Refuses to choose: which slot goes is the policy's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache.base.arguments import as_byte_strings
from kvcache.base.arrays import IndexArray
from kvcache.base.errors import ConfigurationError, InvariantError
from kvcache.offload.keys import OffloadKey

NOTHING: Final = 0
STORING: Final = 1
READY: Final = 2
FORGOTTEN: Final = 3

NO_ADDRESS: Final = -1

# As numbers of the counters' own type: `np.add.at` is forty times as fast then.
_ONE: Final = np.int32(1)
_MINUS_ONE: Final = np.int32(-1)

BoolArray = npt.NDArray[np.bool_]
StateArray = npt.NDArray[np.uint8]
CountArray = npt.NDArray[np.int32]


class SlotTable:
    """Keys by address and addresses by key, with their states, jobs and slots.

    Invariants: `index` and `keys` say the same; an address without a key is in state NOTHING and
    has no job; a STORING one is written, a READY one is not, and a FORGOTTEN one has a job. Per
    slot: `num_members` addresses with a key, `num_holds` writes and loads, `num_spills`, and
    `num_dirty` are sums over its addresses; a slot without members is free.
    """

    def __init__(self, num_slots: int, blocks_per_slot: int) -> None:
        """Make a table of free slots. Raises ConfigurationError for sizes that cannot be meant."""
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
        """Return the address of each key, NO_ADDRESS for those that are not here.

        Raises InvalidInputError for anything but a list or tuple of keys. A key that is here is
        known to be one, so the others alone make it look at all of them.
        """
        if type(keys) is not list and type(keys) is not tuple:
            as_byte_strings("keys", keys)
        try:
            found = np.fromiter(map(self.index.get, keys, repeat(NO_ADDRESS)), np.intp, len(keys))
        except TypeError:  # one cannot be hashed, and so is no key
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

    def slots_of(self, addresses: IndexArray) -> IndexArray:
        """Return the slot of each address."""
        return addresses if self.blocks_per_slot == 1 else addresses // self.blocks_per_slot

    def distinct(self, addresses: IndexArray) -> IndexArray:
        """Return each of these addresses (or slots) once, where it comes first."""
        if len(addresses) < 2:
            return addresses
        places = np.arange(len(addresses) - 1, -1, -1)
        self._marks[addresses[::-1]] = places
        is_first = self._marks[addresses] == places[::-1]
        return addresses if is_first.all() else addresses[is_first]

    def addresses_in(self, slots: IndexArray) -> IndexArray:
        """Return the addresses of slots that hold something, in order."""
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
        """Put keys that are not here at addresses that are empty; STORING ones are written."""
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
        """Empty addresses that have a key and no job; return the slots that are free by that."""
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
        """Nothing is written any more at these addresses, each of which was."""
        self.is_written[addresses] = False
        np.add.at(self.slot_holds, self.slots_of(addresses), _MINUS_ONE)

    def add_loads(self, addresses: IndexArray, change: int) -> None:
        """Count one load more (1) or less (-1) at each of these addresses."""
        by = np.int32(change)
        np.add.at(self.num_loads, addresses, by)
        np.add.at(self.slot_holds, self.slots_of(addresses), by)

    def add_spills(self, addresses: IndexArray, change: int) -> None:
        """Count one spill more (1) or less (-1) at each of these addresses."""
        by = np.int32(change)
        np.add.at(self.num_spills, addresses, by)
        np.add.at(self.slot_spills, self.slots_of(addresses), by)

    def mark_dirty(self, addresses: IndexArray) -> None:
        """Note that what lies at these addresses, each named once, is in no lower tier."""
        changed = addresses[~self.is_dirty[addresses]]
        self.is_dirty[changed] = True
        np.add.at(self.slot_dirty, self.slots_of(changed), _ONE)

    def mark_clean(self, addresses: IndexArray) -> None:
        """Note that what lies at these addresses, each named once, may be dropped."""
        changed = addresses[self.is_dirty[addresses]]
        self.is_dirty[changed] = False
        np.add.at(self.slot_dirty, self.slots_of(changed), _MINUS_ONE)

    def is_working(self, addresses: IndexArray) -> BoolArray:
        """Say of each address whether a job works on it."""
        found: BoolArray = (
            self.is_written[addresses]
            | (self.num_loads[addresses] > 0)
            | (self.num_spills[addresses] > 0)
        )
        return found

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
