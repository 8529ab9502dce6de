"""One simulation: a trace, a cache, and what the cache would have made of it.

Stands above the ways of counting and picks one: `counting.py` for the device alone,
`tier_counting.py` with tiers below it, `optimum.py` for what no policy can beat. These follow one
rule, so that their figures can stand beside each other; `running_counting.py` has requests run side
by side instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvcache.clock import Clock
from kvcache.errors import ConfigurationError, OutOfBlocksError
from kvcache.policies.registry import EVICTION_POLICIES, require_eviction_policy
from kvcache.simulate.block_trace import BlockTrace, CompactTrace, TraceTokens
from kvcache.simulate.counting import CountingOptions, PrefillCount, count_prefill_hits
from kvcache.simulate.optimum import count_optimal_hits
from kvcache.simulate.running_counting import (
    Pace,
    RunningCounter,
    Waits,
    require_room_for_answers,
)
from kvcache.simulate.tier_counting import TierCounter, TierCountingOptions, TierPrefillCount
from kvcache.specs import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

OPTIMUM = "optimum"
"""Stands where a policy's name would, for what no policy can beat."""

_HASH_ALGORITHM = "xxh3_128"  # nobody attacks a simulation
_REPORT_EVERY = 128
_NUM_PARTS = 10


@dataclass(frozen=True)
class SimulatedCache:
    """A cache to simulate: sizes in blocks, `num_blocks` None for as many as are ever needed.

    With `groups`, the groups of a model, blocks are theirs, and hits are counted in tokens. With a
    `pace`, requests run side by side, answers included.

    Raises ConfigurationError for what cannot be meant.
    """

    policy: str
    num_blocks: int | None
    host_blocks: int = 0
    disk_blocks: int = 0
    groups: tuple[KVCacheGroupSpec, ...] = ()
    pace: Pace | None = None

    def __post_init__(self) -> None:
        if self.policy != OPTIMUM:
            require_eviction_policy(self.policy)
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigurationError(
                f"a cache of {self.num_blocks} blocks cannot serve anything: give at least 1"
            )
        if min(self.host_blocks, self.disk_blocks) < 0:
            raise ConfigurationError(
                f"tiers of {self.host_blocks} and {self.disk_blocks} blocks: give at least 0"
            )
        if self.disk_blocks and not self.host_blocks:
            raise ConfigurationError(
                f"{self.disk_blocks} blocks on disk, none in host memory: what goes to disk comes "
                "from there, so give host blocks too"
            )
        if self.host_blocks and self.num_blocks is None:
            raise ConfigurationError(
                "a device without a limit needs no tiers: give its number of blocks"
            )
        if self.groups and (self.host_blocks or self.policy == OPTIMUM):
            what = "the optimum" if self.policy == OPTIMUM else "tiers"
            raise ConfigurationError(
                f"{what} of several groups, or of blocks that are not the trace's, are not "
                "simulated: leave them out, or the groups"
            )
        if self.pace is not None:
            self._require_plain_device()

    def _require_plain_device(self) -> None:
        if self.policy == OPTIMUM:
            raise ConfigurationError(
                "the optimum of requests that run side by side is not known: leave one of them out"
            )
        if self.host_blocks:
            raise ConfigurationError(
                "tiers below requests that run side by side are not simulated: leave one of them "
                "out"
            )
        if self.num_blocks is None:
            raise ConfigurationError(
                "requests that run side by side without a limit of blocks: give their number"
            )

    @property
    def total_blocks(self) -> int | None:
        """Blocks of all tiers together; None for no limit."""
        if self.num_blocks is None:
            return None
        return self.num_blocks + self.host_blocks + self.disk_blocks

    def require_room(self, trace: BlockTrace) -> None:
        """Raise an error that names the line if a request does not fit: ConfigurationError for a
        prompt, OutOfBlocksError for its answer beside it. Of `groups` only playing tells."""
        if self.num_blocks is None or self.groups:
            return
        if trace.most_blocks <= self.num_blocks:
            if self.pace is not None:
                require_room_for_answers(trace, self.num_blocks)
            return
        raise ConfigurationError(
            f"{trace.place_of(trace.longest)}: the request needs {trace.most_blocks} blocks of "
            f"{trace.block_size} tokens, more than the {self.num_blocks} of the device: simulate "
            f"at least {trace.most_blocks}"
        )


@dataclass(frozen=True)
class SimulationResult:
    """What was counted, in blocks of the trace; hits where the block was when it was asked for."""

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
    hit_rates_over_time: tuple[float, ...] = ()
    """Of each tenth of the requests; none of the optimum, and of traces with fewer than ten."""
    waits: Waits | None = None
    """How requests that ran side by side got along."""

    @property
    def num_hits(self) -> int:
        """Hit blocks of all tiers."""
        return self.num_device_hits + self.num_host_hits + self.num_disk_hits

    @property
    def hit_rate(self) -> float:
        """Hits over references, 0 to 1; of tokens where the cache has groups of its own."""
        if self.cache.groups:
            return self.num_hit_tokens / self.num_input_tokens
        return self.num_hits / self.num_references

    def to_dict(self) -> dict[str, object]:
        """Return the figures by name, and the cache by its policy and sizes."""
        figures = asdict(self)
        del figures["cache"]
        waits = figures.pop("waits") or {}
        return {
            "trace": figures.pop("trace"),
            "policy": self.cache.policy,
            "num_blocks": self.cache.num_blocks,
            "host_blocks": self.cache.host_blocks,
            "disk_blocks": self.cache.disk_blocks,
            "hit_rate": self.hit_rate,
            "hit_rate_of": "tokens" if self.cache.groups else "blocks",
            **figures,
            **waits,
        }


def simulate(
    trace: BlockTrace,
    cache: SimulatedCache,
    clock: Clock,
    on_progress: Callable[[int], None] = lambda num_requests: None,
) -> SimulationResult:
    """Play the whole trace on the cache; `on_progress` hears how many requests were played.

    Raises ConfigurationError or OutOfBlocksError where the longest request does not fit.
    """
    cache.require_room(trace)
    start_s = clock.now()
    tenths = _Tenths(trace, cache)
    hits = _count(trace, cache, clock, tenths, on_progress)
    on_progress(trace.num_requests)
    return SimulationResult(
        trace=trace.name,
        cache=cache,
        block_size=trace.block_size,
        num_requests=trace.num_requests,
        num_references=trace.num_references,
        num_input_tokens=trace.num_input_tokens,
        num_device_hits=hits.device,
        num_host_hits=hits.host,
        num_disk_hits=hits.disk,
        num_hit_tokens=hits.tokens,
        num_evictions=hits.num_evictions,
        wall_time_s=clock.now() - start_s,
        hit_rates_over_time=tuple(tenths.rates),
        waits=hits.waits,
    )


class _Tenths:
    """Hit rates of each tenth of the requests, from figures that add up."""

    def __init__(self, trace: BlockTrace, cache: SimulatedCache) -> None:
        self._num_requests = trace.num_requests
        self._is_of_tokens = bool(cache.groups)
        self._last = (0, 0)
        self.rates: list[float] = []

    def hear(self, count: PrefillCount | TierPrefillCount) -> None:
        """Take the figures after a request."""
        num_parts = _NUM_PARTS if self._num_requests >= _NUM_PARTS else 0
        if count.num_requests * num_parts < self._num_requests * (len(self.rates) + 1):
            return
        if isinstance(count, TierPrefillCount):
            now = (count.num_hits, count.num_block_references)
        elif self._is_of_tokens:
            now = (count.num_hit_tokens, count.num_input_tokens)
        else:
            now = (count.num_hit_blocks, count.num_block_references)
        self.rates.append((now[0] - self._last[0]) / (now[1] - self._last[1]))
        self._last = now


@dataclass(frozen=True)
class _Hits:
    """What one way of counting found; blocks but for `tokens`."""

    device: int
    host: int
    disk: int
    tokens: int
    num_evictions: int
    waits: Waits | None = None


def _count(
    trace: BlockTrace,
    cache: SimulatedCache,
    clock: Clock,
    tenths: _Tenths,
    on_progress: Callable[[int], None],
) -> _Hits:
    if cache.policy == OPTIMUM:
        # Tiers are one pool here, as large as all of them: better than any way to use them.
        best = count_optimal_hits(trace, cache.total_blocks, on_progress)
        num_hits = best.num_hit_blocks
        return _Hits(num_hits, 0, 0, num_hits * trace.block_size, best.num_evictions)

    def report(count: PrefillCount | TierPrefillCount) -> None:
        tenths.hear(count)
        if count.num_requests % _REPORT_EVERY == 0:
            on_progress(count.num_requests)

    device = CountingOptions(
        num_blocks=cache.num_blocks,
        eviction_policy=cache.policy,
        hash_algorithm=_HASH_ALGORITHM,
        groups=cache.groups,
    )
    if cache.pace is not None:
        running = RunningCounter(trace, device, cache.pace, clock)
        count = running.count(report)
        hits = count.num_hit_blocks, 0, 0, count.num_hit_tokens, count.num_evictions
        return _Hits(*hits, running.waits)
    if cache.host_blocks:
        options = TierCountingOptions(
            device,
            cache.host_blocks,
            cache.disk_blocks,
            host_policy=cache.policy,
            disk_policy=cache.policy,
        )
        counter = TierCounter(CompactTrace(trace), options, clock)
        tiers = counter.count(report)
        return _Hits(
            tiers.num_device_hits,
            tiers.num_host_hits,
            tiers.num_disk_hits,
            tiers.num_hits * trace.block_size,
            counter.manager.statistics().core.num_evictions,
        )
    if cache.groups:
        count = _count_groups(trace, device, clock, report)
        return _Hits(count.num_hit_blocks, 0, 0, count.num_hit_tokens, count.num_evictions)
    count = count_prefill_hits(CompactTrace(trace), device, clock, report)
    num_hits = count.num_hit_blocks
    return _Hits(num_hits, 0, 0, num_hits * trace.block_size, count.num_evictions)


def _count_groups(
    trace: BlockTrace,
    device: CountingOptions,
    clock: Clock,
    on_progress: Callable[[PrefillCount], None],
) -> PrefillCount:
    num_played = 0

    def report(count: PrefillCount) -> None:
        nonlocal num_played
        num_played = count.num_requests
        on_progress(count)

    try:
        return count_prefill_hits(TraceTokens(trace), device, clock, report)
    except OutOfBlocksError as error:
        sizes = ", ".join(str(group.kv_cache_spec.block_size) for group in device.groups)
        raise OutOfBlocksError(
            f"{trace.place_of(num_played)}: the request of {trace.input_lengths[num_played]} "
            f"tokens does not fit into {device.num_blocks} blocks (their tokens, by group: "
            f"{sizes}): simulate more"
        ) from error


def window_groups(block_size: int, window_tokens: int) -> tuple[KVCacheGroupSpec, ...]:
    """Return the groups of a model with full attention and a sliding window, in equal shares.

    Raises ConfigurationError for a window that cannot be meant.
    """
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1)
    window = SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, sliding_window=window_tokens
    )
    return KVCacheGroupSpec(("layer.0",), full), KVCacheGroupSpec(("layer.1",), window)


def all_policies() -> tuple[str, ...]:
    """Return the names of all policies, sorted, without the optimum."""
    return tuple(sorted(EVICTION_POLICIES))
