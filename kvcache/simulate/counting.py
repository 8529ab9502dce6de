"""The counting rule: the hit rate of a cache of some size, without a cluster.

    each request, one after another:  look up ──▶ allocate the whole prompt ──▶ free, tail first

Prompts only, no decoding. A request holds its blocks (also a partial last one) until the next one
comes; only full blocks are cached; a hit ends at the last token but one, because the last token is
always computed. The rate is hit blocks over all block references. The manager that serves real
requests keeps the state; no bytes are touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from kvcache.base.clock import Clock, VirtualClock
from kvcache.base.errors import OutOfBlocksError
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request
from kvcache.simulate.workload import Workload
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


def count_prefill_hits(
    workload: Workload,
    options: CountingOptions,
    clock: Clock,
    on_progress: Callable[[PrefillCount], None] = lambda count: None,
) -> PrefillCount:
    """Play `workload` by the counting rule and return the statistics.

    `on_progress` is called after every request with the statistics so far.

    Raises:
        OutOfBlocksError: one request needs more blocks than there are.
        TraceError: the workload cannot be read.
    """
    block_size = workload.block_size if options.block_size is None else options.block_size
    num_blocks = options.num_blocks
    if num_blocks is None:
        smallest = min((g.kv_cache_spec.block_size for g in options.groups), default=block_size)
        num_blocks = sum(-(-r.num_prompt_tokens // smallest) for r in workload)
        num_blocks *= max(1, len(options.groups))
    trace_clock = VirtualClock()
    manager = make_counted_manager(options, block_size, num_blocks, clock=trace_clock)
    start_s = clock.now()
    count = PrefillCount(workload.name, options.num_blocks, block_size, 0, 0, 0, 0, 0, 0.0)
    for arrived in workload:
        trace_clock.advance(max(0.0, arrived.arrival_s - trace_clock.now()))
        request = Request(
            arrived.request_id,
            arrived.token_ids,
            cache_salt=arrived.cache_salt,
            tenant=arrived.tenant,
        )
        hit, num_hit_tokens = manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_hit_tokens
        allocated = manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit)
        num_references = -(-request.num_tokens // block_size)
        if allocated is None:
            raise OutOfBlocksError(
                f"request {arrived.request_id} of {workload.name} needs {num_references} blocks of "
                f"{block_size} tokens, the cache has {num_blocks}: count with more blocks"
            )
        if options.follows_hints:
            request.hints = arrived.hints
        manager.free(request)
        count = PrefillCount(
            workload=workload.name,
            num_blocks=options.num_blocks,
            block_size=block_size,
            num_requests=count.num_requests + 1,
            num_input_tokens=count.num_input_tokens + request.num_tokens,
            num_block_references=count.num_block_references + num_references,
            num_hit_blocks=count.num_hit_blocks + num_hit_tokens // block_size,
            num_evictions=0,
            wall_time_s=clock.now() - start_s,
            num_hit_tokens=count.num_hit_tokens + num_hit_tokens,
        )
        on_progress(count)
    return replace(count, num_evictions=manager.statistics().core.num_evictions)


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
