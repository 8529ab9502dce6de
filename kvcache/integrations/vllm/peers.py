"""What other engines of the same name hold on this node, for the scheduler and for ranks.

A *peer* is another replica: its ranks have host memory under the same name, with the same
fingerprint. A replica writes its own memory only, and runs its own policy; peers read it, by labels
that are next to the bytes. No process waits for another one.

A thread asks the memory service which segments there are, and follows the labels of all ranks of
each peer. What it knows is up to `REFRESH_S` old. That is harmless: a rank looks at the labels
itself before and after it copies a block, and a load that has failed is computed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import BoolArray, Int32Array, int32_array
from kvcache.base.errors import KVCacheError, NotRunningError, PlanMismatchError
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.observer_errors import ObserverErrors
from kvcache.integrations.vllm.step_messages import PeerMemory
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.memory_service.protocol import memory_number
from kvcache.offload.keys import OffloadKey, unpack_keys
from kvcache.worker.host_memory.labels import SlotState
from kvcache.worker.host_memory.segment import SegmentShape
from kvcache.worker.host_memory.segment_reader import SegmentReader

logger = get_logger("vllm.kvcache.peers")  # below vLLM's own, which shows lines of level INFO

REFRESH_S = 0.2
"""How often the labels of peers are looked at."""

LIST_S = 1.0
"""How often the memory service is asked which peers there are."""

ANSWER_S = 1.0
"""How long the memory service may take for an answer."""

AGAIN_S = 5.0
"""How long a rank does not try to map memory that it could not map."""

CHUNK_SLOTS = 1024
"""Labels that are read at once. Between chunks, the scheduler runs on."""


AddressOf = Callable[[int], MemoryServiceAddress]
"""Returns the memory service, and the names of a replica's memory there."""


def read_segment(
    service: MemoryServiceAddress, number: int, expected: SegmentShape
) -> SegmentReader:
    """Return a reader of the segment `number` of a peer's rank, kept at `service` under the peer's
    name.

    Raises PlanMismatchError if the peer has another segment now, or it does not have the shape
    `expected` but for the number of slots; NotRunningError, DeadlineError, ClusterError, OSError.
    """
    client = MemoryServiceClient(service.address, service.timeout_s)
    descriptor = client.attach(service.name_of(expected.rank))
    if descriptor is None:
        raise PlanMismatchError(f"nothing is kept of rank {expected.rank} of {service.cluster!r}")
    try:
        if memory_number(descriptor) != number:
            raise PlanMismatchError(f"rank {expected.rank} of {service.cluster!r} has other memory")
        return SegmentReader(descriptor, expected)
    finally:
        os.close(descriptor)


class _RankLabels:
    """The labels of one rank of a peer, and what they were when they were looked at last."""

    def __init__(self, reader: SegmentReader, num_slots: int) -> None:
        self.reader = reader
        self._rows = reader.rows[:num_slots]
        self.generations = np.zeros(num_slots, np.uint32)
        self.is_sealed = np.zeros(num_slots, np.bool_)

    def look(self) -> BoolArray:
        """Say of each slot whether its label has changed since the last look."""
        generations = self._rows["generation"].copy()
        is_sealed = self._rows["state"] == SlotState.SEALED
        changed: BoolArray = is_sealed != self.is_sealed
        changed |= is_sealed & (generations != self.generations)
        self.generations, self.is_sealed = generations, is_sealed
        return changed

    def keys_at(self, slots: Int32Array) -> tuple[npt.NDArray[np.uint8], BoolArray]:
        """Return the packed keys of slots, and for which of them the label is a good one. A slot
        whose label is changing is looked at again the next time."""
        rows = self.reader.rows_at(slots)
        is_good = rows["state"] == SlotState.SEALED
        is_good &= rows["generation"] == self.generations[slots]
        is_good &= self.are_same(slots)
        self.is_sealed[slots[~is_good]] = False
        is_good &= (rows["group"] >= 0) & (rows["checksum"] >= 0)
        digests = rows["digest"]
        groups = rows["group"].astype(">i4").view(np.uint8).reshape(len(slots), -1)
        return np.concatenate([digests, groups], axis=1), is_good

    def are_same(self, slots: Int32Array) -> BoolArray:
        """Say of each slot whether its label is sealed, and the one that was looked at."""
        same: BoolArray = self._rows["state"][slots] == SlotState.SEALED
        same &= self._rows["generation"][slots] == self.generations[slots]
        return same


class PeerBlock(NamedTuple):
    """A block that a peer holds in a slot on every rank."""

    memory: PeerMemory
    slot: int


class PeerIndex:
    """Which blocks all ranks of one peer have sealed in the same slot.

    `refresh` runs in one thread, everything else in another.
    """

    def __init__(self, memory: PeerMemory, readers: Sequence[SegmentReader]) -> None:
        """Know nothing until `refresh`. Ranks have as many slots as the one with the fewest."""
        self.memory = memory
        num_slots = min(reader.shape.num_slots for reader in readers)
        self._ranks = [_RankLabels(reader, num_slots) for reader in readers]
        self.slots: dict[OffloadKey, int] = {}
        """By key, the slot that held it at the last look."""
        self._keys: dict[int, OffloadKey] = {}
        self.changed: set[OffloadKey] | None = None
        """If not None, keys that have come or gone are added; the caller takes them out."""

    def __len__(self) -> int:
        return len(self.slots)

    def slots_of(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the slot of each key, -1 for a block that the peer does not hold now."""
        get = self.slots.get
        slots = [get(key, -1) for key in keys]
        if max(slots, default=-1) < 0:
            return slots
        asked = int32_array(slots)
        is_held = asked >= 0
        for rank in self._ranks:
            is_held &= rank.are_same(asked)
        held: list[int] = np.where(is_held, asked, -1).tolist()
        return held

    def distrust(self, keys: Iterable[OffloadKey]) -> None:
        """Forget these keys until the peer seals them again: they could not be loaded."""
        for key in keys:
            self.slots.pop(key, None)

    def refresh(self) -> None:
        """Look at all labels, and read those that have changed."""
        is_changed = self._ranks[0].look()
        for rank in self._ranks[1:]:
            is_changed |= rank.look()
        changed = int32_array(np.flatnonzero(is_changed))
        for slot in changed.tolist() if self._keys else ():
            old = self._keys.pop(slot, None)
            if old is not None and self.slots.get(old) == slot:
                self.slots.pop(old, None)
                if self.changed is not None:
                    self.changed.add(old)
        for first in range(0, len(changed), CHUNK_SLOTS):
            self._read(changed[first : first + CHUNK_SLOTS])
            time.sleep(0)

    def _read(self, slots: Int32Array) -> None:
        """Take over the keys that all ranks have in these slots."""
        packed, is_good = self._ranks[0].keys_at(slots)
        for rank in self._ranks[1:]:
            others, are_good = rank.keys_at(slots)
            is_good &= are_good & (others == packed).all(axis=1)
        keys = unpack_keys(packed[is_good].tobytes(), packed.shape[1])
        for slot, key in zip(slots[is_good].tolist(), keys, strict=True):
            self._keys[slot] = key
            self.slots[key] = slot
        if self.changed is not None:
            self.changed.update(keys)


class Peers:
    """All peers of an engine. `refresh` runs in a thread of its own, everything else in the
    scheduler's."""

    def __init__(self, address_of: AddressOf, replica: int, *, is_threaded: bool = True) -> None:
        """Know no peer before `begin`. The engine itself is `replica`. If not `is_threaded`, the
        caller refreshes."""
        self._address_of = address_of
        self._replica = replica
        self._is_threaded = is_threaded
        self._shapes: tuple[SegmentShape, ...] = ()
        self._indexes: tuple[PeerIndex, ...] = ()
        self._refused: set[PeerMemory] = set()
        self._list_at_s = 0.0
        self._problem = ""
        self._errors = ObserverErrors()
        self._ended = threading.Event()

    def begin(self, shapes: Sequence[SegmentShape]) -> None:
        """Look for peers of an engine whose ranks have such memory."""
        self._shapes = tuple(shapes)
        if self._is_threaded:
            threading.Thread(target=self._run, name="kvcache-peers", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    @property
    def indexes(self) -> tuple[PeerIndex, ...]:
        return self._indexes

    def find(self, keys: Sequence[OffloadKey]) -> list[PeerBlock | None]:
        """Return where each key can be loaded from, None where from no peer."""
        found: list[PeerBlock | None] = [None] * len(keys)
        for index in self._indexes:
            for place, slot in enumerate(index.slots_of(keys)):
                if slot >= 0 and found[place] is None:
                    found[place] = PeerBlock(index.memory, slot)
        return found

    def distrust(self, memory: PeerMemory, keys: Iterable[OffloadKey]) -> None:
        """Do not load these keys from this memory until the peer seals them again."""
        for index in self._indexes:
            if index.memory == memory:
                index.distrust(keys)

    def refresh(self) -> None:
        """Look which peers there are, now and then, and what they hold."""
        now_s = time.monotonic()
        if now_s >= self._list_at_s:
            self._list_at_s = now_s + (LIST_S if self._is_threaded else 0.0)
            self._find()
        for index in self._indexes:
            index.refresh()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.refresh()
            except Exception as error:
                self._errors.note("the look at other engines' memory", error)
                self._indexes = ()  # the next look begins again
            self._ended.wait(REFRESH_S if self._indexes else LIST_S)

    def _find(self) -> None:
        """Attach to new peers, and let go of those that the memory service has no more."""
        try:
            found = self._memories()
        except KVCacheError as error:  # what is mapped is there, whatever became of the service
            if str(error) != self._problem:
                logger.warning("other engines of this name are not looked for: %s", error)
            self._problem = str(error)
            return
        self._problem = ""
        indexes = [index for index in self._indexes if index.memory in found]
        known = {index.memory for index in indexes} | self._refused
        for memory in found:
            if memory not in known and (index := self._attached(memory)) is not None:
                indexes.append(index)
        self._indexes = tuple(indexes)
        self._refused &= set(found)

    def _memories(self) -> list[PeerMemory]:
        """Return the memory of other replicas all of whose ranks have some."""
        own = self._address_of(0)
        kept = MemoryServiceClient(own.address, ANSWER_S).list(f"{own.cluster}/")
        found = []
        for replica in {_replica_in(name) for name in kept} - {self._replica}:
            name_of = self._address_of(replica).name_of
            names = [name_of(shape.rank) for shape in self._shapes]
            if all(name in kept for name in names):
                found.append(PeerMemory(replica, tuple(kept[name] for name in names)))
        return found

    def _attached(self, memory: PeerMemory) -> PeerIndex | None:
        """Return an index of a peer's memory, None if it cannot be read."""
        service = replace(self._address_of(memory.replica), timeout_s=ANSWER_S)
        try:
            readers = [
                read_segment(service, number, shape)
                for number, shape in zip(memory.numbers, self._shapes, strict=True)
            ]
        except PlanMismatchError as error:
            logger.info("blocks of replica %d are not shared: %s", memory.replica, error)
            self._refused.add(memory)
            return None
        except (KVCacheError, OSError) as error:
            logger.warning("replica %d cannot be read now: %s", memory.replica, error)
            return None
        logger.info("blocks of replica %d are shared", memory.replica)
        return PeerIndex(memory, readers)


class PeerReaders:
    """Peers' memory of one rank, in its worker: mapped while loads run.

    Not longer: a mapping keeps memory that its owner may have replaced.
    """

    def __init__(self, address_of: AddressOf, shape: SegmentShape) -> None:
        """Map nothing yet; the rank's own memory has this shape."""
        self._address_of = address_of
        self._shape = shape
        self._readers: WeakValueDictionary[PeerMemory, SegmentReader] = WeakValueDictionary()
        self._again_at_s: dict[PeerMemory, float] = {}

    def reader_of(self, memory: PeerMemory) -> SegmentReader:
        """Return a reader of the peer's memory, which is mapped as long as the caller keeps it.

        Asks the memory service for it, within `ANSWER_S`; after a failure not before `AGAIN_S` have
        passed. Raises NotRunningError with what is wrong.
        """
        replica, now_s = memory.replica, time.monotonic()
        reader = self._readers.get(memory)
        if reader is not None:
            return reader
        if now_s < self._again_at_s.get(memory, 0.0):
            raise NotRunningError(f"the memory of replica {replica} could not be read just now")
        service = replace(self._address_of(replica), timeout_s=ANSWER_S)
        try:
            reader = read_segment(service, memory.numbers[self._shape.rank], self._shape)
        except (KVCacheError, OSError) as error:
            waits = {each: at_s for each, at_s in self._again_at_s.items() if at_s > now_s}
            self._again_at_s = {**waits, memory: now_s + AGAIN_S}
            raise NotRunningError(
                f"the memory of replica {replica} cannot be read: {error}"
            ) from error
        self._readers[memory] = reader
        return reader


def _replica_in(name: str) -> int:
    """Return the replica in a segment's name: `engine/rank0` or `engine/replica1/rank0`."""
    part = name.split("/")[1]
    number = part.removeprefix("replica")
    return int(number) if part != number and number.isdecimal() else 0
