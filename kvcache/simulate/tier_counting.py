"""The counting rule over several tiers: device, host memory, disk.

    each request, one after another:

    load from tiers ──▶ look up on the device ──▶ allocate ──▶ store ──▶ free

The rule is that of `counting.py`; a loaded block is a hit as well. Real classes keep the state: a
`KVCacheManager` for the device and, through `TierTraffic`, a `TierHierarchy`. No bytes are touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from kvcache.base.clock import Clock
from kvcache.base.errors import ConfigurationError, OutOfBlocksError
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request
from kvcache.simulate.counting import CountingOptions, counted_config, make_counted_manager
from kvcache.simulate.tier_traffic import TierSizes, TierTraffic
from kvcache.simulate.workload import Workload, WorkloadRequest


@dataclass(frozen=True)
class TierPrefillCount:
    """The counts; a hit counts for the tier that had the block when it was requested.

    Hits by tier are in tokens; in blocks they are meaningful if the cache has one group with the
    workload's blocks.
    """

    workload: str
    block_size: int
    num_requests: int = 0
    num_input_tokens: int = 0
    num_block_references: int = 0
    num_device_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_disk_hit_tokens: int = 0
    num_blocks_stored: int = 0
    num_blocks_spilled: int = 0
    wall_time_s: float = 0.0

    @property
    def num_device_hits(self) -> int:
        """Blocks hit on the device."""
        return self.num_device_hit_tokens // self.block_size

    @property
    def num_host_hits(self) -> int:
        """Blocks hit in host memory."""
        return self.num_host_hit_tokens // self.block_size

    @property
    def num_disk_hits(self) -> int:
        """Blocks hit on disk."""
        return self.num_disk_hit_tokens // self.block_size

    @property
    def num_hit_tokens(self) -> int:
        """Hit tokens of all tiers."""
        return self.num_device_hit_tokens + self.num_host_hit_tokens + self.num_disk_hit_tokens

    @property
    def num_hits(self) -> int:
        """Hit blocks of all tiers."""
        return self.num_hit_tokens // self.block_size

    @property
    def hit_rate(self) -> float:
        """Hit blocks over block references, 0 to 1; 0.0 without any."""
        return self.num_hits / max(1, self.num_block_references)

    def to_dict(self) -> dict[str, str | int | float]:
        """Return the statistics by name, the rate included."""
        return {**asdict(self), "hit_rate": self.hit_rate}


class TierCounter:
    """Plays a workload by the counting rule, a request at a time.

    `manager` and `traffic` may be inspected between requests; their `check()` passes then.
    """

    def __init__(
        self, workload: Workload, device: CountingOptions, tiers: TierSizes, clock: Clock
    ) -> None:
        """Make an empty device and empty tiers.

        Raises ConfigurationError for invalid sizes or policies, a device of unlimited size, and
        attention kinds that tiers cannot serve.
        """
        if device.num_blocks is None:
            raise ConfigurationError(
                "a device without a limit needs no tiers: give its number of blocks"
            )
        self._workload = workload
        self._clock = clock
        self._num_device_blocks = device.num_blocks
        self._block_size = workload.block_size if device.block_size is None else device.block_size
        sizes = self._block_size, device.num_blocks
        self.manager: KVCacheManager = make_counted_manager(device, *sizes)
        self.traffic = TierTraffic(self.manager, counted_config(device, *sizes), tiers, clock)
        self._count = TierPrefillCount(workload.name, self._block_size)

    def count(
        self, on_progress: Callable[[TierPrefillCount], None] = lambda statistics: None
    ) -> TierPrefillCount:
        """Play the whole workload and return the statistics; `on_progress` gets them per request.

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
        request = Request(
            arrived.request_id,
            arrived.token_ids,
            cache_salt=arrived.cache_salt,
            tenant=arrived.tenant,
        )
        brought = self.traffic.bring(request)
        num_hit_tokens = self._admit(request)
        if num_hit_tokens is None:
            raise OutOfBlocksError(
                f"request {arrived.request_id} of {self._workload.name} needs "
                f"{-(-request.num_tokens // self._block_size)} blocks of {self._block_size} "
                f"tokens, the device has {self._num_device_blocks}: count with more blocks"
            )
        self.traffic.let_go()
        self.traffic.store(request)
        self.manager.free(request)
        known = self._count
        self._count = replace(
            known,
            num_requests=known.num_requests + 1,
            num_input_tokens=known.num_input_tokens + request.num_tokens,
            num_block_references=known.num_block_references
            - (-request.num_tokens // self._block_size),
            num_device_hit_tokens=known.num_device_hit_tokens
            + (num_hit_tokens - brought.num_tokens),
            num_host_hit_tokens=known.num_host_hit_tokens + brought.num_host_tokens,
            num_disk_hit_tokens=known.num_disk_hit_tokens + brought.num_disk_tokens,
            num_blocks_stored=self.traffic.num_stored,
            num_blocks_spilled=self.traffic.num_spilled,
        )

    def _admit(self, request: Request) -> int | None:
        """Allocate the whole prompt; return its hit, None without room."""
        hit, num_hit_tokens = self.manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_hit_tokens
        allocated = self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit)
        return None if allocated is None else num_hit_tokens
