"""Transfers between a simulated device and the tiers below it, for one request after another.

    bring ──▶ fetch from disk, load into blocks of the device, hold ──▶ let_go after admission
    store ──▶ store a request's blocks; spill victims to make room, then drop them

Uses the parts that serve real requests: the coordinator's `TierHitFinder` finds hits over all
groups, the manager's `PrefixLoads` takes blocks, a `TierHierarchy` keeps contents. Every transfer
succeeds at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import BoolArray
from kvcache.base.clock import Clock
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.manager import KVCacheManager
from kvcache.offload import HierarchyOptions, OffloadKey, TierHierarchy, TierOptions, make_tier
from kvcache.offload.hierarchy import Place
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.requests.request import Request
from kvcache.specs import KVCacheConfig


@dataclass(frozen=True)
class TierSizes:
    """Sizes of the tiers in blocks, and their rules; no disk without blocks for it."""

    host_blocks: int
    disk_blocks: int = 0
    blocks_per_host_slot: int = 1
    host_policy: str = "lru"
    disk_policy: str = "lru"
    movement: HierarchyOptions = field(default_factory=HierarchyOptions)

    def make(self) -> TierHierarchy:
        """Return empty tiers. Raises ConfigurationError for invalid sizes or policies."""
        per_slot = self.blocks_per_host_slot
        host = TierOptions(
            HOST_MEDIUM,
            self.host_blocks // per_slot,
            blocks_per_slot=per_slot,
            policy=self.host_policy,
        )
        disk = TierOptions(FILE_MEDIUM, self.disk_blocks, policy=self.disk_policy)
        return TierHierarchy(
            make_tier(host),
            make_tier(disk) if self.disk_blocks else None,
            count(1).__next__,
            self.movement,
        )


@dataclass(frozen=True)
class Brought:
    """Tokens of a request that were loaded from each tier."""

    num_host_tokens: int = 0
    num_disk_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_host_tokens + self.num_disk_tokens

    def __add__(self, other: Brought) -> Brought:
        return Brought(
            self.num_host_tokens + other.num_host_tokens,
            self.num_disk_tokens + other.num_disk_tokens,
        )


NOTHING_BROUGHT = Brought()


class TierTraffic:
    """The tiers of one simulation. Between calls no job is open.

    Blocks of a hit that were not in host memory count for the disk. With several groups, which may
    differ, its tokens are divided as its blocks are.
    """

    def __init__(
        self, manager: KVCacheManager, config: KVCacheConfig, sizes: TierSizes, clock: Clock
    ) -> None:
        """Start with empty tiers below `manager`, whose plan is `config`.

        Raises ConfigurationError for invalid sizes or policies, and for an attention kind whose
        blocks cannot be loaded by content.
        """
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._finder = TierHitFinder(config, math.gcd(*(spec.block_size for spec in specs)))
        self._specs = specs
        self._manager = manager
        self._loads = manager.tiers.loads
        self._clock = clock
        self._held: int | None = None
        self.hierarchy: TierHierarchy = sizes.make()
        self.num_stored = 0
        self.num_spilled = 0

    def bring(self, request: Request) -> Brought:
        """Load all that the tiers add to a request's device hit, as far as there is room.

        Loaded blocks are hittable, and held until `let_go`; no block that the request itself does
        not need. Blocks that cannot be fetched from disk at once come piece by piece; with several
        groups, only as far as host memory has the blocks of all of them.
        """
        tiers, brought = self.hierarchy, NOTHING_BROUGHT
        num_tokens = self._loads.num_device_tokens(request)
        from_disk: set[OffloadKey] = set()
        while (hit := self._finder.find(request, num_tokens, tiers.locate, _is_ready)) is not None:
            fetch = tiers.plan_fetch(hit.keys, self._clock.now())
            if fetch is not None:
                tiers.end(fetch.job_id, ok=True)
                from_disk.update(fetch.keys)
            reached = self._load(request, num_tokens, from_disk)
            if reached is not None:
                num_tokens, piece = reached
                brought += piece
            elif not self._spill():
                break
        return brought

    def let_go(self) -> None:
        """Release the loaded blocks."""
        if self._held is not None:
            self._loads.release(self._held)
        self._held = None

    def store(self, request: Request) -> None:
        """Store a request's blocks, computed or hit, and spill victims to make room."""
        for keys in self._held_keys(request):
            self.hierarchy.host.sightings.see(keys)
            for tier in self.hierarchy:
                tier.touch(keys)
            self._store(keys)
        self.hierarchy.discards.take()

    def check(self) -> None:
        """Raise InvariantError if the state is inconsistent, or a job is open."""
        self.hierarchy.check()
        assert not len(self.hierarchy.transfers)

    def _load(
        self, request: Request, num_device_tokens: int, from_disk: set[OffloadKey]
    ) -> tuple[int, Brought] | None:
        """Load from host memory; return how far the prefix reaches then. None: nothing, or no
        room."""
        tiers = self.hierarchy
        there = self._finder.find(request, num_device_tokens, tiers.locate, _is_in_host)
        if there is None:
            return None
        load = self._loads.begin(request, there.num_tokens)
        if load is None:
            return None
        keys = [
            key
            for group, columns in enumerate(load.columns)
            for key in self._finder.keys_of(request, group, columns.tolist())
        ]
        job = tiers.plan_load(keys, self._clock.now())
        assert job is not None and len(job.keys) == len(keys), "found in host memory just now"
        tiers.end(job.job_id, ok=True)
        self._loads.finish(load.load_id)
        self.let_go()  # the piece before, which this one holds too if needed
        self._held = load.load_id
        num_loaded = load.num_tokens - load.num_device_tokens
        num_fetched = num_loaded * sum(key in from_disk for key in keys) // len(keys)
        return load.num_tokens, Brought(num_loaded - num_fetched, num_fetched)

    def _held_keys(self, request: Request) -> list[list[OffloadKey]]:
        """Return, for each group, the keys of the full blocks in the request's table."""
        found = []
        tables = self._manager.get_block_ids(request.request_id)
        for group, (spec, table) in enumerate(zip(self._specs, tables, strict=True)):
            columns: Sequence[int] = range(request.num_tokens // spec.block_size)
            if not spec.reads_whole_prefix:
                columns = np.flatnonzero(table[: len(columns)]).tolist()
            found.append(self._finder.keys_of(request, group, columns))
        return found

    def _store(self, keys: list[OffloadKey]) -> None:
        tiers = self.hierarchy
        while True:
            job = tiers.plan_store(keys, self._clock.now())
            if job is not None:
                tiers.end(job.job_id, ok=True)
                self.num_stored += len(job.keys)
            has_room_come = self._spill() or job is not None
            if not (tiers.num_without_room and has_room_come):
                return

    def _spill(self) -> bool:
        """Start due spills; return whether there were any."""
        before = self.num_spilled
        while (job := self.hierarchy.plan_spills(self._clock.now())) is not None:
            self.hierarchy.end(job.job_id, ok=True)
            self.num_spilled += len(job.keys)
        return self.num_spilled > before


def _is_ready(places: npt.NDArray[np.uint8]) -> BoolArray:
    found: BoolArray = (places == Place.HOST) | (places == Place.DISK)
    return found


def _is_in_host(places: npt.NDArray[np.uint8]) -> BoolArray:
    found: BoolArray = places == Place.HOST
    return found
