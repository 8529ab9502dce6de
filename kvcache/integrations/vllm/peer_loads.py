"""Loads from peers, as the block store plans them: which of a request's blocks come from whom.

What the own tiers hold is loaded from there. Refuses to look at memory: peers.py knows what peers
hold, and each rank looks for itself before and after a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.integrations.vllm.peers import Peers
from kvcache.integrations.vllm.step_messages import LoadCommand, PeerMemory
from kvcache.offload.hierarchy import Place, PlaceArray
from kvcache.offload.keys import OffloadKey


@dataclass(frozen=True)
class _OpenLoad:
    """A load from a peer that not all ranks have reported."""

    memory: PeerMemory
    keys: dict[int, OffloadKey]  # by slot


class PeerLoads:
    """The loads from peers of one engine, and which blocks they can load."""

    def __init__(self, peers: Peers | None) -> None:
        """Load from `peers`, which is None for an engine that shares nothing."""
        self._peers = peers
        self._open: dict[int, _OpenLoad] = {}

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of open loads."""
        return iter(self._open)

    @property
    def has_peers(self) -> bool:
        """Whether there is a peer, whatever it holds."""
        return self._peers is not None and bool(self._peers.indexes)

    def locate(self, keys: Sequence[OffloadKey], places: PlaceArray) -> PlaceArray:
        """Return the places of keys, `PEER` for those that own tiers lack, or have on disk only,
        and a peer has in memory."""
        if self._peers is None or not self.has_peers:
            return places
        wanted = np.flatnonzero((places == Place.NOWHERE) | (places == Place.DISK)).tolist()
        found = self._peers.find([keys[place] for place in wanted])
        places = places.copy()
        places[[place for place, block in zip(wanted, found, strict=True) if block]] = Place.PEER
        return places

    def plan(
        self,
        request_id: str,
        keys: Sequence[OffloadKey],
        blocks: Sequence[int],
        new_job: Callable[[], int],
    ) -> list[LoadCommand]:
        """Return the loads of those of a request's blocks that peers hold now, one of each peer."""
        if self._peers is None or not keys:
            return []
        slots: dict[PeerMemory, dict[int, int]] = {}  # places in `keys`, by slot
        for place, block in enumerate(self._peers.find(keys)):
            if block is not None:
                slots.setdefault(block.memory, {})[block.slot] = place
        commands = []
        for memory, places in slots.items():
            job_id = new_job()
            self._open[job_id] = _OpenLoad(
                memory, {slot: keys[place] for slot, place in places.items()}
            )
            commands.append(
                LoadCommand(
                    job_id,
                    request_id,
                    tuple(places),
                    tuple(blocks[place] for place in places.values()),
                    tuple(keys[place] for place in places.values()),
                    memory,
                )
            )
        return commands

    def ended(self, job_id: int, *, ok: bool, failed: Collection[int]) -> bool:
        """Take note of a job's end; say whether it was a load from a peer.

        Of a load that is not `ok`, the slots `failed` have gone wrong, or all if there are none.
        Their blocks are not loaded from that peer before it seals them again.
        """
        load = self._open.pop(job_id, None)
        if load is not None and not ok and self._peers is not None:
            slots = failed or load.keys
            self._peers.distrust(load.memory, [load.keys[slot] for slot in slots])
        return load is not None
