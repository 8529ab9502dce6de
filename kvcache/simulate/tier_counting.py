"""The counting rule over several tiers: device, host memory, disk.

    each request, one after another:

    look up on the device ──▶ fetch and load what is in tiers ──▶ allocate ──▶ free ──▶ store

The rule is that of `counting.py`; a block that is loaded is a hit as well. The books are those that
serve real requests, `KVCacheManager` for the device and `TierHierarchy` below; every transfer ends
at once and well. No bytes are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count

from kvcache.clock import Clock
from kvcache.errors import OutOfBlocksError
from kvcache.hashing import get_hash_fn, get_request_block_hasher
from kvcache.manager import KVCacheManager
from kvcache.offload import (
    HierarchyOptions,
    OffloadKey,
    TierHierarchy,
    TierOptions,
    make_offload_keys,
    make_tier,
)
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.request import Request
from kvcache.simulate.counting import CountingOptions, make_counted_manager
from kvcache.simulate.workload import Workload, WorkloadRequest


@dataclass(frozen=True)
class TierCountingOptions:
    """The device as in `CountingOptions`, and the tiers below it; no disk without blocks for it."""

    device: CountingOptions
    host_blocks: int
    disk_blocks: int = 0
    blocks_per_host_slot: int = 1
    host_policy: str = "lru"
    disk_policy: str = "lru"
    movement: HierarchyOptions = field(default_factory=HierarchyOptions)


@dataclass(frozen=True)
class TierPrefillCount:
    """What was counted. Blocks; a hit is counted where the block was when it was asked for."""

    workload: str
    block_size: int
    num_requests: int = 0
    num_block_references: int = 0
    num_device_hits: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_blocks_stored: int = 0
    num_blocks_spilled: int = 0
    wall_time_s: float = 0.0

    @property
    def num_hits(self) -> int:
        """Hit blocks of all tiers."""
        return self.num_device_hits + self.num_host_hits + self.num_disk_hits

    @property
    def hit_rate(self) -> float:
        """Hit blocks over block references, 0 to 1; 0.0 without any."""
        return self.num_hits / max(1, self.num_block_references)

    def to_dict(self) -> dict[str, str | int | float]:
        """Return the figures by name, the rate included."""
        return {**asdict(self), "hit_rate": self.hit_rate}


class TierCounter:
    """Plays a workload by the counting rule, a request at a time.

    `manager` and `hierarchy` may be looked at between requests; their `check()` holds then.
    """

    def __init__(self, workload: Workload, options: TierCountingOptions, clock: Clock) -> None:
        """Make empty tiers.

        Raises ConfigurationError for sizes or policies that cannot be meant, ValueError for a
        device of unlimited size, which would need no tier.
        """
        device = options.device
        if device.num_blocks is None:
            raise ValueError("a device without a limit needs no tiers: give its number of blocks")
        self._workload = workload
        self._clock = clock
        self._num_device_blocks = device.num_blocks
        self._block_size = workload.block_size if device.block_size is None else device.block_size
        self.manager: KVCacheManager = make_counted_manager(
            device, self._block_size, device.num_blocks
        )
        per_slot = options.blocks_per_host_slot
        host = TierOptions(
            HOST_MEDIUM,
            options.host_blocks // per_slot,
            blocks_per_slot=per_slot,
            policy=options.host_policy,
        )
        disk = TierOptions(FILE_MEDIUM, options.disk_blocks, policy=options.disk_policy)
        self.hierarchy = TierHierarchy(
            make_tier(host),
            make_tier(disk) if options.disk_blocks else None,
            count(1).__next__,
            options.movement,
        )
        self._hasher = get_request_block_hasher(
            self._block_size, get_hash_fn(device.hash_algorithm)
        )
        self._count = TierPrefillCount(workload.name, self._block_size)
        self._num_stored = self._num_spilled = 0

    def count(
        self, on_progress: Callable[[TierPrefillCount], None] = lambda figures: None
    ) -> TierPrefillCount:
        """Play the whole workload and return the figures; `on_progress` gets them per request.

        Raises OutOfBlocksError for a request larger than the device, TraceError for a workload that
        cannot be read.
        """
        start_s = self._clock.now()
        for arrived in self._workload:
            self._play(arrived)
            self._count = replace(self._count, wall_time_s=self._clock.now() - start_s)
            on_progress(self._count)
        return self._count

    def _play(self, arrived: WorkloadRequest) -> None:
        size = self._block_size
        request = Request(
            arrived.request_id,
            arrived.token_ids,
            cache_salt=arrived.cache_salt,
            tenant=arrived.tenant,
            block_hasher=self._hasher,
        )
        keys = make_offload_keys(request.block_hashes, 0, request.namespace)
        hit, num_device_tokens = self.manager.get_computed_blocks(request)
        num_on_device = num_device_tokens // size
        num_loaded, num_fetched = self._bring(
            keys[num_on_device : (request.num_tokens - 1) // size]
        )
        num_references = -(-request.num_tokens // size)
        allocated = self.manager.allocate_slots(
            request,
            request.num_tokens - num_device_tokens - num_loaded * size,
            num_device_tokens,
            hit,
            num_external_computed_tokens=num_loaded * size,
        )
        if allocated is None:
            raise OutOfBlocksError(
                f"request {arrived.request_id} of {self._workload.name} needs {num_references} "
                f"blocks of {size} tokens, the device has {self._num_device_blocks}: count with "
                "more blocks"
            )
        self.manager.free(request)
        self._store(keys)
        known = self._count
        self._count = replace(
            known,
            num_requests=known.num_requests + 1,
            num_block_references=known.num_block_references + num_references,
            num_device_hits=known.num_device_hits + num_on_device,
            num_host_hits=known.num_host_hits + num_loaded - num_fetched,
            num_disk_hits=known.num_disk_hits + num_fetched,
            num_blocks_stored=self._num_stored,
            num_blocks_spilled=self._num_spilled,
        )

    def _bring(self, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Load leading keys; return how many, and how many of them came from disk."""
        tiers, now_s = self.hierarchy, self._clock.now()
        num_loaded = num_fetched = 0
        while rest := keys[num_loaded:]:
            hits = tiers.look_up(rest)
            fetch = tiers.plan_fetch(rest[: hits.num_ready], now_s)
            if fetch is not None:
                tiers.fetched(fetch.job_id, ok=True)
                num_fetched += len(fetch.keys)
            load = tiers.plan_load(rest, now_s)
            if load is not None:
                tiers.loaded(load.job_id, ok=True)
                num_loaded += len(load.keys)
            elif not self._spill():
                break
        return num_loaded, num_fetched

    def _store(self, keys: Sequence[OffloadKey]) -> None:
        """Store what can be hit, and spill what has to go for it."""
        tiers = self.hierarchy
        tiers.see(keys)
        tiers.touch(keys)
        while True:
            job = tiers.plan_store(keys, self._clock.now())
            if job is not None:
                tiers.stored(job.job_id, ok=True)
                self._num_stored += len(job.keys)
            if not self._spill() and job is None:
                tiers.take_discards()
                return

    def _spill(self) -> bool:
        """Spill what is due; return whether there was something."""
        before = self._num_spilled
        while (job := self.hierarchy.plan_spills(self._clock.now())) is not None:
            self.hierarchy.spilled(job.job_id, ok=True)
            self._num_spilled += len(job.keys)
        return self._num_spilled > before
