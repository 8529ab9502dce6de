"""The counting rule: the hit rate of a cache of some size, without a cluster.

    each request, one after another:

    load from tiers ──▶ look up on the device ──▶ allocate the whole prompt ──▶ store ──▶ free

Prompts only, no decoding. A request holds its blocks (also a partial last one) until the next one
comes; only full blocks are cached; a hit ends at the last token but one, because the last token is
always computed. The rate is hit blocks over all block references. The manager that serves real
requests keeps the state, `TierTraffic` that of host memory and disk below the device, if there are
any; a loaded block is a hit as well. No bytes are touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from kvcache.base.clock import Clock, VirtualClock
from kvcache.base.errors import ConfigurationError, OutOfBlocksError
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request
from kvcache.simulate.tier_traffic import NOTHING_BROUGHT, TierSizes, TierTraffic
from kvcache.simulate.workload import Workload, WorkloadRequest
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

_NUM_NULL_BLOCKS = 1
_NO_LIMIT_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class PrefillCount:
    """The counts. `num_blocks` is the capacity without the null block, None for unlimited."""

    workload: str
    num_blocks: int | None
    block_size: int
    num_requests: int
    num_input_tokens: int
    num_block_references: int
    num_hit_blocks: int
    num_evictions: int
    wall_time_s: float
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit blocks over block references, 0 to 1; 0.0 without any."""
        return self.num_hit_blocks / max(1, self.num_block_references)

    def to_json(self) -> str:
        """Return the counts as JSON, with the fields' names as keys, including the rate."""
        return json.dumps({**asdict(self), "hit_rate": self.hit_rate}, indent=2)


@dataclass(frozen=True)
class CountingOptions:
    """The cache to simulate. `num_blocks` None: as many as would ever be needed.

    `block_size` None: the workload's. `groups` are those of a model, which share the blocks; none:
    one group of full attention. With several kinds, or block sizes other than the workload's, only
    hit tokens are meaningful. `follows_hints`: with the hints of the workload's requests.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    eviction_policy: str = "lru"
    hash_algorithm: str = "sha256"
    groups: tuple[KVCacheGroupSpec, ...] = ()
    follows_hints: bool = False


class PrefillCounter:
    """Plays a workload by the counting rule, a request at a time.

    `brought`: the hits that were loaded from tiers, in tokens; those of `count` are of all tiers.
    `manager` and `traffic` may be inspected between requests; their `check()` passes then.
    """

    def __init__(
        self,
        workload: Workload,
        options: CountingOptions,
        clock: Clock,
        tiers: TierSizes | None = None,
    ) -> None:
        """Make an empty device, and empty tiers below it if there are any.

        Raises ConfigurationError for invalid tiers, tiers below a device of unlimited size, and
        attention kinds that tiers cannot serve.
        """
        size = workload.block_size if options.block_size is None else options.block_size
        num_blocks = options.num_blocks
        if num_blocks is None:
            if tiers is not None:
                raise ConfigurationError(
                    "a device without a limit needs no tiers: give its number of blocks"
                )
            smallest = min((g.kv_cache_spec.block_size for g in options.groups), default=size)
            num_blocks = sum(-(-r.num_prompt_tokens // smallest) for r in workload)
            num_blocks *= max(1, len(options.groups))
        self._workload = workload
        self._options = options
        self._clock = clock
        self._block_size = size
        self._num_blocks = num_blocks
        self._trace_clock = VirtualClock()
        self.manager: KVCacheManager = make_counted_manager(
            options, size, num_blocks, clock=self._trace_clock
        )
        self.traffic: TierTraffic | None = None
        if tiers is not None:
            config = counted_config(options, size, num_blocks)
            self.traffic = TierTraffic(self.manager, config, tiers, clock)
        self.brought = NOTHING_BROUGHT

    def count(
        self, on_progress: Callable[[PrefillCount], None] = lambda count: None
    ) -> PrefillCount:
        """Play the whole workload and return the statistics; `on_progress` gets them per request.

        Raises OutOfBlocksError for a request larger than the device, TraceError for a workload that
        cannot be read.
        """
        size, start_s = self._block_size, self._clock.now()
        count = PrefillCount(
            self._workload.name, self._options.num_blocks, size, 0, 0, 0, 0, 0, 0.0
        )
        for arrived in self._workload:
            self._trace_clock.advance(max(0.0, arrived.arrival_s - self._trace_clock.now()))
            num_tokens, num_hit_tokens = self._play(arrived)
            count = replace(
                count,
                num_requests=count.num_requests + 1,
                num_input_tokens=count.num_input_tokens + num_tokens,
                num_block_references=count.num_block_references - (-num_tokens // size),
                num_hit_blocks=count.num_hit_blocks + num_hit_tokens // size,
                wall_time_s=self._clock.now() - start_s,
                num_hit_tokens=count.num_hit_tokens + num_hit_tokens,
            )
            on_progress(count)
        return replace(count, num_evictions=self.manager.statistics().core.num_evictions)

    def _play(self, arrived: WorkloadRequest) -> tuple[int, int]:
        """Serve one request; return the tokens of its prompt and of its hit."""
        request = Request(
            arrived.request_id,
            arrived.token_ids,
            cache_salt=arrived.cache_salt,
            tenant=arrived.tenant,
        )
        traffic = self.traffic
        if traffic is not None:
            self.brought += traffic.bring(request)
        num_hit_tokens = admit(self.manager, request)
        if num_hit_tokens is None:
            size = self._block_size
            raise OutOfBlocksError(
                f"request {arrived.request_id} of {self._workload.name} needs "
                f"{-(-request.num_tokens // size)} blocks of {size} tokens, the device has "
                f"{self._num_blocks}: count with more blocks"
            )
        if traffic is not None:
            traffic.let_go()
            traffic.store(request)
        if self._options.follows_hints:
            request.hints = arrived.hints
        self.manager.free(request)
        return request.num_tokens, num_hit_tokens


def count_prefill_hits(
    workload: Workload,
    options: CountingOptions,
    clock: Clock,
    on_progress: Callable[[PrefillCount], None] = lambda count: None,
) -> PrefillCount:
    """Play `workload` on the device alone. See `PrefillCounter.count`."""
    return PrefillCounter(workload, options, clock).count(on_progress)


def admit(manager: KVCacheManager, request: Request, num_answer_tokens: int = 0) -> int | None:
    """Allocate a whole prompt, and room for its answer; return the hit in tokens, None without
    room."""
    hit, num_hit_tokens = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request,
        request.num_tokens - num_hit_tokens,
        num_hit_tokens,
        hit,
        num_lookahead_tokens=num_answer_tokens,
    )
    return None if allocated is None else num_hit_tokens


def counted_config(options: CountingOptions, block_size: int, num_blocks: int) -> KVCacheConfig:
    """Return the plan of a model with the given groups and almost no bytes."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1)
    return KVCacheConfig(
        num_blocks=num_blocks + _NUM_NULL_BLOCKS,
        kv_cache_tensors=(),
        kv_cache_groups=options.groups or (KVCacheGroupSpec(("layer.0",), spec),),
    )


def make_counted_manager(
    options: CountingOptions,
    block_size: int,
    num_blocks: int,
    most_running: int = 1,
    clock: Clock | None = None,
) -> KVCacheManager:
    """Make the manager of such a model, with a slot for each concurrent request."""
    return KVCacheManager(
        counted_config(options, block_size, num_blocks),
        _NO_LIMIT_TOKENS,
        caching_hash_algo=options.hash_algorithm,
        eviction_policy=options.eviction_policy,
        max_num_seqs=most_running,
        clock=clock,
    )
