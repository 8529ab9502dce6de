"""A slow model of a tier: slots are objects, everything is searched for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache.offload import OffloadKey
from kvcache.offload.keys import GROUP_BYTES


@dataclass(eq=False)
class ModelKey:
    key: OffloadKey
    state: str = "storing"
    is_written: bool = True
    num_loads: int = 0
    num_spills: int = 0
    is_dirty: bool = False
    is_copy: bool = False
    own_loads: int = 1
    copy_rank: int = 0

    @property
    def has_job(self) -> bool:
        return self.is_written or self.num_loads > 0 or self.num_spills > 0


@dataclass(eq=False)
class ModelSlot:
    places: dict[int, ModelKey] = field(default_factory=dict)
    next_place: int = 0

    @property
    def is_used(self) -> bool:
        return any(each.is_written or each.num_loads for each in self.places.values())

    @property
    def is_copy(self) -> bool:
        return any(each.is_copy and each.own_loads for each in self.places.values())

    @property
    def copy_rank(self) -> int:
        return max(each.copy_rank for each in self.places.values())

    def may_go(self, drops_dirty: bool) -> bool:
        return not any(
            each.num_spills or (each.is_dirty and not drops_dirty) for each in self.places.values()
        )


class ModelTier:
    """Evicts the slot that came out of use first, copies before others; `idle` has them in the
    order in which they came out of use. Copies are in the order in which they came out of use, or
    were marked later."""

    def __init__(self, num_slots: int, blocks_per_slot: int) -> None:
        self.num_slots, self.size = num_slots, blocks_per_slot
        self.slots: list[ModelSlot] = []
        self.idle: list[ModelSlot] = []
        self.num_ranks = 0

    def rank(self, slots: Sequence[ModelSlot]) -> None:
        """Put copies that come out of use, or are marked, behind the others."""
        for slot in slots:
            self.num_ranks += 1
            for each in slot.places.values():
                each.copy_rank = self.num_ranks

    @property
    def order(self) -> list[ModelSlot]:
        """Idle slots, the next victim first."""
        copies = sorted((s for s in self.idle if s.is_copy), key=lambda slot: slot.copy_rank)
        return copies + [slot for slot in self.idle if not slot.is_copy]

    def find(self, key: OffloadKey) -> tuple[ModelSlot, int, ModelKey] | None:
        found = [
            (s, p, each) for s in self.slots for p, each in s.places.items() if each.key == key
        ]
        assert len(found) <= 1
        return found[0] if found else None

    def get(self, key: OffloadKey) -> ModelKey:
        found = self.find(key)
        return found[2]

    def state(self, key: OffloadKey) -> str:
        found = self.find(key)
        return "nothing" if found is None or found[2].state == "forgotten" else found[2].state

    def slots_of(self, keys: Sequence[OffloadKey]) -> list[ModelSlot]:
        return [found[0] for key in keys if (found := self.find(key)) is not None]

    def settle(self, slots: Sequence[ModelSlot]) -> None:
        """Update `idle` for the present state of these slots."""
        entering = []
        for slot in dict.fromkeys(slots):
            for place, each in list(slot.places.items()):
                if each.state == "forgotten" and not each.has_job:
                    del slot.places[place]
            if not slot.places:
                self.slots.remove(slot)
                if slot in self.idle:
                    self.idle.remove(slot)
            elif slot.is_used and slot in self.idle:
                self.idle.remove(slot)
            elif not slot.is_used and slot not in self.idle:
                entering.append(slot)
        self.idle += reversed(entering)
        self.rank(entering[::-1])

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        touched = [s for s in dict.fromkeys(self.slots_of(keys)) if s in self.idle]
        self.idle = [s for s in self.idle if s not in touched] + touched[::-1]
        self.rank(touched[::-1])

    def mark_copies(self, keys: Sequence[OffloadKey], are_copies: bool) -> None:
        for key in keys:
            if self.state(key) == "ready" and self.get(key).is_copy != are_copies:
                self.get(key).is_copy = are_copies
                self.rank(self.slots_of([key]))

    def reserve(
        self,
        keys: Sequence[OffloadKey],
        drops_dirty: bool,
        needs_all: bool,
        are_copies: bool = False,
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Return the stored positions and the evicted keys; None if not all fit."""
        wanted = [i for i, key in enumerate(keys) if self.find(key) is None and key not in keys[:i]]
        targets = self._targets(keys, wanted)
        here = self.slots_of(keys) + [slot for slot, _ in targets if slot in self.slots]
        self.idle = [slot for slot in self.idle if slot not in here]
        new = list(dict.fromkeys(slot for slot, _ in targets if slot not in self.slots))
        victims = [slot for slot in self.order if slot.may_go(drops_dirty)]
        num_free = self.num_slots - len(self.slots)
        if needs_all and len(new) > num_free + len(victims):
            self.settle(here)
            return None
        had = new[: num_free + len(victims)]
        evicted = []
        for slot in victims[: max(0, len(had) - num_free)]:
            evicted += [slot.places[place].key for place in sorted(slot.places)]
            self.slots.remove(slot)
            self.idle.remove(slot)
        positions = []
        for i, (slot, place) in zip(wanted, targets, strict=True):
            if slot in new and slot not in had:
                break
            positions.append(i)
            slot.places[place] = ModelKey(keys[i], is_copy=are_copies, own_loads=1 + are_copies)
            slot.next_place = max(slot.next_place, place + 1)
            if slot not in self.slots:
                self.slots.append(slot)
        self.settle(here)
        return positions, evicted

    def _targets(
        self, keys: Sequence[OffloadKey], wanted: list[int]
    ) -> list[tuple[ModelSlot, int]]:
        targets: dict[int, tuple[ModelSlot, int]] = {}
        for i in wanted:
            before = keys[i - 1] if i else None
            slot, place = ModelSlot(), 0
            if before is not None and before[-GROUP_BYTES:] == keys[i][-GROUP_BYTES:]:
                found = targets.get(i - 1)
                if found is None and (known := self.find(before)) is not None:
                    is_visible = known[2].state != "forgotten"
                    found = known[:2] if is_visible else None
                if found is not None:
                    end = max(
                        [found[0].next_place]
                        + [p + 1 for other, p in targets.values() if other is found[0]]
                    )
                    if found[1] + 1 == end < self.size:
                        slot, place = found[0], end
            targets[i] = (slot, place)
        return [targets[i] for i in wanted]

    def complete_store(self, keys: Sequence[OffloadKey], success: bool) -> None:
        slots = self.slots_of(keys)
        for key in keys:
            each = self.get(key)
            if each.is_written:
                each.is_written = False
                each.state = "ready" if success and each.state == "storing" else "forgotten"
        self.settle(slots)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        slots = self.slots_of(keys)
        for key in keys:
            if (found := self.find(key)) is not None:
                found[2].state, found[2].is_dirty = "forgotten", False
        self.settle(slots)
