"""Statistics of a manager, and hit rates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcache.base.arguments import are_ints, as_bool, as_int, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.core import CoreStatistics
from kvcache.tenants import TenantStatistics


@dataclass(frozen=True)
class ManagerStatistics:
    """The state at one moment, and counters since the manager was made.

    `num_blocks_refusing_reset` blocks were in use when a reset was last refused. Counted look-ups
    queried `num_asked_tokens` tokens and hit `num_hit_tokens`; both leave out requests that come
    back after a preemption, and are 0 without `log_stats`. `tenants` has the tenants that have had
    blocks, if tenants are configured. `num_loads` loads from tiers, and prefixes held for
    `num_holds` clients that come back, use blocks too.
    """

    core: CoreStatistics
    num_running_requests: int
    num_preempted_requests: int
    num_free_slots: int
    num_pins: int
    num_clients: int
    num_unfinished_steps: int
    num_steps: int
    num_failed_step_reports: int
    num_preemptions: int
    num_blocks_refusing_reset: int
    model_epoch: int
    is_draining: bool
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    tenants: tuple[TenantStatistics, ...] = ()
    num_loads: int = 0
    num_holds: int = 0

    def users(self) -> str:
        """Return how many blocks are in use and by which users; a reset waits for these."""
        core = self.core
        users = {
            "running requests": self.num_running_requests,
            "pins": self.num_pins,
            "loads from tiers": self.num_loads,
            "prefixes held for clients that come back": self.num_holds,
            "copies for forks that wait for the next step": core.references.get("fork", 0),
            "transfers": core.num_in_flight_blocks,
        }
        named = [f"{user} ({number:,})" for user, number in users.items() if number]
        num_used = core.num_blocks - core.num_free_blocks
        return f"{num_used:,} blocks are in use by {', '.join(named) or 'no known user'}"


@dataclass
class PrefixCacheStats:
    """Look-ups since the last call for them. `queries` and `hits` count tokens.

    `reset`: the cache was emptied in that time. Requests that come back after a preemption mostly
    hit their own blocks, so they are counted separately.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hit_tokens: int, *, is_preempted: bool) -> None:
        """Count one look-up of `num_tokens` tokens that hit `num_hit_tokens`."""
        num_tokens = as_int("num_tokens", num_tokens)
        num_hit_tokens = as_int("num_hit_tokens", num_hit_tokens)
        if as_bool("is_preempted", is_preempted):
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hit_tokens
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hit_tokens


class PrefixCachingMetrics:
    """The hit rate over the most recent requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        """Average over the last `max_recent_requests` requests, in whole intervals.

        Raises:
            ConfigurationError: that is not a positive integer.
        """
        what = "max_recent_requests"
        self._max_recent_requests = as_int(what, max_recent_requests, 1, error=ConfigurationError)
        self._intervals: deque[tuple[int, int, int]] = deque()

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one interval. If the cache was emptied in it, first forget the earlier ones.

        While there are too many requests, the oldest interval is dropped, but never the newest.
        """
        check_kind("stats", stats, PrefixCacheStats)
        counts = (stats.requests, stats.queries, stats.hits)
        if not are_ints(counts) or min(counts) < 0:
            for name, count in zip(("requests", "queries", "hits"), counts, strict=True):
                as_int(name, count)
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._intervals.append((stats.requests, stats.queries, stats.hits))
        num_requests = sum(requests for requests, _, _ in self._intervals)
        while len(self._intervals) > 1 and num_requests > self._max_recent_requests:
            num_requests -= self._intervals.popleft()[0]

    def reset(self) -> None:
        """Forget everything."""
        self._intervals.clear()

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token; 0.0 without queries."""
        num_queries = sum(queries for _, queries, _ in self._intervals)
        return sum(hits for _, _, hits in self._intervals) / num_queries if num_queries else 0.0
