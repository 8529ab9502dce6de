"""One simulation: a trace, a cache, and the result.

Chooses the way of counting: `counting.py` for a policy, with or without tiers below the device,
`optimum.py` for the optimum, `hybrid_bound.py` if groups share the blocks. These follow one rule,
so that their results can be compared; `running_counting.py` has concurrent requests instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from kvcache.base.clock import Clock
from kvcache.base.errors import OutOfBlocksError
from kvcache.simulate.block_trace import COMPACT_BLOCK_SIZE, BlockTrace, CompactTrace, TraceTokens
from kvcache.simulate.counting import CountingOptions, PrefillCount, PrefillCounter
from kvcache.simulate.hinting import hints_of
from kvcache.simulate.hybrid_bound import bound_hybrid_hits
from kvcache.simulate.optimum import count_optimal_hits
from kvcache.simulate.running_counting import RunningCounter, Waits
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache
from kvcache.simulate.tier_traffic import TierSizes
from kvcache.simulate.workload import Workload

_HASH_ALGORITHM = "xxh3_128"  # a simulation needs no protection from attackers
_REPORT_EVERY = 128
DEFAULT_NUM_PARTS = 10
"""Parts of a trace for which hits are counted."""


@dataclass(frozen=True)
class SimulationResult:
    """The counts, in blocks of the trace; a hit counts for the tier that had the block when it was
    requested.

    A cache with groups of its own is hit by tokens, `num_hit_tokens` in all tiers: hits in blocks
    are these, divided.
    """

    trace: str
    cache: SimulatedCache
    block_size: int
    num_requests: int
    num_references: int
    num_input_tokens: int
    num_device_hits: int
    num_host_hits: int
    num_disk_hits: int
    num_hit_tokens: int
    num_evictions: int
    wall_time_s: float
    num_hits_over_time: tuple[int, ...] = ()
    """Of each part of the requests (`part_starts`): blocks, or tokens if the cache has groups; none
    if the trace has fewer requests than parts."""
    num_references_over_time: tuple[int, ...] = ()
    num_host_hit_tokens: int = 0
    num_disk_hit_tokens: int = 0
    waits: Waits | None = None
    """Waits of concurrent requests."""

    @property
    def num_device_hit_tokens(self) -> int:
        return self.num_hit_tokens - self.num_host_hit_tokens - self.num_disk_hit_tokens

    @property
    def num_hits(self) -> int:
        """Hit blocks of all tiers."""
        return self.num_device_hits + self.num_host_hits + self.num_disk_hits

    @property
    def hit_rate(self) -> float:
        """Hits over references, 0 to 1; of tokens if the cache has groups of its own."""
        if self.cache.groups:
            return self.num_hit_tokens / self.num_input_tokens
        return self.num_hits / self.num_references

    @property
    def hit_rates_over_time(self) -> tuple[float, ...]:
        """The hit rate of each part of the requests."""
        counts = zip(self.num_hits_over_time, self.num_references_over_time, strict=True)
        return tuple(num_hits / num_references for num_hits, num_references in counts)

    @property
    def hit_rates_by_tier(self) -> tuple[float, float, float]:
        """The parts of `hit_rate`: hits on the device, in host memory, on disk."""
        if self.cache.groups:
            hits = self.num_device_hit_tokens, self.num_host_hit_tokens, self.num_disk_hit_tokens
            num_all = self.num_input_tokens
        else:
            hits = self.num_device_hits, self.num_host_hits, self.num_disk_hits
            num_all = self.num_references
        device, host, disk = (count / num_all for count in hits)
        return device, host, disk

    def to_dict(self) -> dict[str, object]:
        """Return the statistics by name, and the cache by its policy and sizes."""
        statistics = asdict(self)
        statistics["num_device_hit_tokens"] = self.num_device_hit_tokens
        del statistics["cache"]
        waits = statistics.pop("waits") or {}
        return {
            "trace": statistics.pop("trace"),
            "policy": self.cache.policy,
            "hints": self.cache.hints,
            "num_blocks": self.cache.num_blocks,
            "host_blocks": self.cache.host_blocks,
            "disk_blocks": self.cache.disk_blocks,
            "hit_rate": self.hit_rate,
            "hit_rate_of": "tokens" if self.cache.groups else "blocks",
            "hit_rates_over_time": self.hit_rates_over_time,
            **statistics,
            **waits,
        }


def simulate(
    trace: BlockTrace,
    cache: SimulatedCache,
    clock: Clock,
    on_progress: Callable[[int], None] = lambda num_requests: None,
    num_parts: int = DEFAULT_NUM_PARTS,
) -> SimulationResult:
    """Play the whole trace on the cache; `on_progress` gets the number of played requests. Hits are
    also counted for each of `num_parts` parts of the requests.

    Raises ConfigurationError or OutOfBlocksError if the longest request does not fit.
    """
    cache.require_room(trace)
    enough = _enough_blocks(trace, cache)
    start_s = clock.now()
    totals: list[int] = []
    hits = _count(trace, _with_at_most(cache, enough), clock, totals, on_progress)
    references = trace.input_lengths.cumsum() if cache.groups else trace.starts[1:]
    size = trace.block_size
    num_below = hits.host_tokens + hits.disk_tokens
    on_progress(trace.num_requests)
    return SimulationResult(
        trace=trace.name,
        cache=cache,
        block_size=trace.block_size,
        num_requests=trace.num_requests,
        num_references=trace.num_references,
        num_input_tokens=trace.num_input_tokens,
        num_device_hits=(hits.tokens - num_below) // size,
        num_host_hits=hits.host_tokens // size,
        num_disk_hits=hits.disk_tokens // size,
        num_hit_tokens=hits.tokens,
        num_evictions=hits.num_evictions,
        wall_time_s=clock.now() - start_s,
        num_hits_over_time=_by_part(totals, num_parts),
        num_references_over_time=_by_part(references.tolist(), num_parts),
        num_host_hit_tokens=hits.host_tokens,
        num_disk_hit_tokens=hits.disk_tokens,
        waits=hits.waits,
    )


def _enough_blocks(trace: BlockTrace, cache: SimulatedCache) -> int:
    """Return a number of blocks with which none is ever evicted."""
    sizes = [group.kv_cache_spec.block_size for group in cache.groups] or [trace.block_size]
    num_tokens = trace.input_lengths + trace.output_lengths
    num_states = 2 + max((g.kv_cache_spec.num_state_blocks or 0 for g in cache.groups), default=0)
    return sum(int((-(-num_tokens // size) + num_states).sum()) for size in sizes)


def _with_at_most(cache: SimulatedCache, enough: int) -> SimulatedCache:
    """Return a cache with the same hits, whose state needs no more memory than the trace."""
    if cache.num_blocks is None:
        return cache
    num_below = 2 * enough  # then the spare share is always free
    return replace(
        cache,
        num_blocks=min(cache.num_blocks, enough),
        host_blocks=min(cache.host_blocks, num_below),
        disk_blocks=min(cache.disk_blocks, num_below),
    )


def part_starts(num_requests: int, num_parts: int) -> list[int]:
    """Return the first request of each part, and the number of requests. Parts have equally many
    requests, or one more; none if there are fewer requests than parts."""
    if num_requests < num_parts:
        return []
    return [-(-num_requests * part // num_parts) for part in range(num_parts + 1)]


def _by_part(totals: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Return the sum of each part from the sums up to each request."""
    starts = part_starts(len(totals), num_parts)
    return tuple(
        totals[end - 1] - (totals[start - 1] if start else 0) for start, end in pairwise(starts)
    )


@dataclass(frozen=True)
class _Hits:
    """The result of one way of counting, in tokens of the trace."""

    tokens: int
    num_evictions: int
    host_tokens: int = 0
    disk_tokens: int = 0
    waits: Waits | None = None


def _count(
    trace: BlockTrace,
    cache: SimulatedCache,
    clock: Clock,
    totals: list[int],
    on_progress: Callable[[int], None],
) -> _Hits:
    """Play the trace; `totals` gets the hits up to each request."""
    if cache.policy == OPTIMUM:
        return _best(trace, cache, totals, on_progress)

    def report(count: PrefillCount) -> None:
        totals.append(count.num_hit_tokens if cache.groups else count.num_hit_blocks)
        if count.num_requests % _REPORT_EVERY == 0:
            on_progress(count.num_requests)

    device = CountingOptions(
        num_blocks=cache.num_blocks,
        eviction_policy=cache.policy,
        hash_algorithm=_HASH_ALGORITHM,
        groups=cache.groups,
        follows_hints=True,
    )
    tiers = None
    if cache.host_blocks:
        tiers = TierSizes(
            cache.host_blocks, cache.disk_blocks, host_policy=cache.policy, disk_policy=cache.policy
        )
    if cache.pace is not None:
        running = RunningCounter(trace, device, cache.pace, clock, tiers)
        count = running.count(report)
        brought = running.brought
        return _Hits(
            count.num_hit_tokens,
            count.num_evictions,
            brought.num_host_tokens,
            brought.num_disk_tokens,
            running.waits,
        )
    workload = _workload(trace, cache)
    counter = PrefillCounter(workload, device, clock, tiers)
    with _naming_lines(trace, cache, totals):
        count = counter.count(report)
    hits = (count.num_hit_tokens, counter.brought.num_host_tokens, counter.brought.num_disk_tokens)
    tokens, host, disk = (n * trace.block_size // workload.block_size for n in hits)
    return _Hits(tokens, count.num_evictions, host, disk)


def _workload(trace: BlockTrace, cache: SimulatedCache) -> Workload:
    """Return the requests with their hints. If blocks are the trace's, two tokens for each
    determine all hits."""
    if cache.groups:
        return TraceTokens(trace, hints_of(trace, cache.hints, trace.block_size))
    return CompactTrace(trace, hints_of(trace, cache.hints, COMPACT_BLOCK_SIZE))


def _best(
    trace: BlockTrace, cache: SimulatedCache, totals: list[int], on_progress: Callable[[int], None]
) -> _Hits:
    """Return the optimum.

    It treats the tiers as one pool of their total size, which is better than any use of them.
    """
    if cache.groups:
        bound = bound_hybrid_hits(trace, cache.groups, cache.total_blocks, on_progress)
        totals.extend(bound.hit_totals)
        return _Hits(bound.num_hit_tokens, bound.num_evictions)
    best = count_optimal_hits(trace, cache.total_blocks, on_progress)
    totals.extend(best.hit_totals)
    return _Hits(best.num_hit_blocks * trace.block_size, best.num_evictions)


@contextmanager
def _naming_lines(
    trace: BlockTrace, cache: SimulatedCache, totals: Sequence[int]
) -> Iterator[None]:
    """Return the error for a request that does not fit with its groups, with its line."""
    try:
        yield
    except OutOfBlocksError as error:
        index = len(totals)
        specs = [group.kv_cache_spec for group in cache.groups]
        sizes = ", ".join(str(spec.block_size) for spec in specs) or trace.block_size
        raise OutOfBlocksError(
            f"{trace.place_of(index)}: the request of {trace.input_lengths[index]} tokens does not "
            f"fit into {cache.num_blocks} blocks (their tokens, by group: {sizes}): simulate more"
        ) from error
