"""Regret: the hits that a policy misses, against the best policy in hindsight and the optimum.

    part of the trace       1      2      3      all
    lru2, best in hindsight 20 %   31 %   36 %   29 %
    lru                     22 %   30 %   23 %   25 %
    regret of lru           -2     +1    +13     +4 points

The best policy in hindsight is the one with the most hits over the whole trace. So its regret is 0,
and that of others is at least 0 over the whole trace, but may be negative in a part. Against the
optimum, too: it may give up hits now for more later.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.base.errors import ConfigurationError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.hinting import NO_HINTS
from kvcache.simulate.simulated_cache import OPTIMUM
from kvcache.simulate.simulation import SimulationResult


def require_parts(trace: BlockTrace, num_parts: int) -> None:
    """Raise ConfigurationError unless every part of the trace has a request."""
    if not 1 <= num_parts <= trace.num_requests:
        raise ConfigurationError(
            f"{num_parts} parts of {trace.name}, which has {trace.num_requests:,} requests: give 1 "
            f"to {trace.num_requests:,}"
        )


def best_in_hindsight(results: Sequence[SimulationResult]) -> SimulationResult:
    """Return the policy with the most hits, the first of equals. `results` are of one trace and
    capacity, at least one of a policy; those with hints count only if there are no others."""
    ruled = [result for result in results if result.cache.policy != OPTIMUM]
    unhinted = [result for result in ruled if result.cache.hints == NO_HINTS]
    return max(unhinted or ruled, key=lambda result: result.hit_rate)


def num_parts_behind(result: SimulationResult, reference: SimulationResult) -> int:
    """Return in how many parts of the trace `result` has fewer hits."""
    return sum(regret > 0 for regret in regret_over_time(result, reference))


def regret_over_time(result: SimulationResult, reference: SimulationResult) -> tuple[float, ...]:
    """Return by how much the hit rate of `reference` is higher, for each part of the trace."""
    pairs = zip(reference.hit_rates_over_time, result.hit_rates_over_time, strict=True)
    return tuple(one - other for one, other in pairs)
