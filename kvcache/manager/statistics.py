"""What a manager says about itself at one moment."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcache.base.arguments import are_ints, as_bool, as_int, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.core import CoreStatistics
from kvcache.tenants import TenantStatistics


@dataclass(frozen=True)
class ManagerStatistics:
    """Figures at one moment; counters since the manager was made.

    `num_blocks_refusing_reset` are the blocks that were in use when a reset was refused last. Of
    `num_asked_tokens` of requests that were let in `num_hit_tokens` were cached; requests that come
    back after a preemption do not count, and nothing does without `log_stats`. `tenants` are those
    that have or had something, where tenants are configured. `num_loads` of tiers and `num_holds`,
    for clients that come back, have blocks, too.
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
        """Say how many blocks are in use, and by whom: what a reset waits for."""
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
    """Look-ups since the last time these were taken. `queries` and `hits` count tokens.

    `reset`: the cache was emptied meanwhile. Requests that come back after a preemption mostly hit
    their own blocks and are counted apart.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hit_tokens: int, *, is_preempted: bool) -> None:
        """Count one look-up of `num_tokens` tokens, of which `num_hit_tokens` were cached."""
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
        # Invariant: the three sums are those of the intervals in the queue.
        self._intervals: deque[tuple[int, int, int]] = deque()
        self._num_requests = 0
        self._num_queries = 0
        self._num_hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take one interval in; where it says that the cache was emptied, forget what was before.

        The oldest intervals leave while more requests than wanted are in, but never the last one.
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
        self._add(stats.requests, stats.queries, stats.hits)
        while len(self._intervals) > 1 and self._num_requests > self._max_recent_requests:
            requests, queries, hits = self._intervals.popleft()
            self._add(-requests, -queries, -hits)

    def reset(self) -> None:
        """Forget everything."""
        self._intervals.clear()
        self._num_requests = self._num_queries = self._num_hits = 0

    @property
    def hit_rate(self) -> float:
        """Tokens found per token asked for, 0.0 when nothing was asked."""
        return self._num_hits / self._num_queries if self._num_queries else 0.0

    def _add(self, requests: int, queries: int, hits: int) -> None:
        self._num_requests += requests
        self._num_queries += queries
        self._num_hits += hits
