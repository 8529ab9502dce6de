from __future__ import annotations

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.manager.statistics import PrefixCacheStats, PrefixCachingMetrics


def test_nothing_observed_is_a_hit_rate_of_zero() -> None:
    assert PrefixCachingMetrics(10).hit_rate == 0.0


def test_the_hit_rate_is_tokens_found_per_token_asked_for() -> None:
    metrics = PrefixCachingMetrics(10)
    metrics.observe(PrefixCacheStats(requests=1, queries=20, hits=9))
    metrics.observe(PrefixCacheStats(requests=4, queries=80, hits=16))
    assert metrics.hit_rate == 0.25


def test_the_oldest_intervals_leave_but_never_the_last_one() -> None:
    metrics = PrefixCachingMetrics(5)
    metrics.observe(PrefixCacheStats(requests=3, queries=10, hits=10))
    metrics.observe(PrefixCacheStats(requests=3, queries=10, hits=0))
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=50, queries=10, hits=5))
    assert metrics.hit_rate == 0.5


def test_a_reset_in_the_stats_clears_what_was_before_them() -> None:
    metrics = PrefixCachingMetrics(100)
    metrics.observe(PrefixCacheStats(requests=3, queries=10, hits=10))
    metrics.observe(PrefixCacheStats(reset=True, requests=1, queries=10, hits=2))
    assert metrics.hit_rate == 0.2
    metrics.observe(PrefixCacheStats(reset=True))
    assert metrics.hit_rate == 0.0


def test_preempted_requests_are_counted_apart() -> None:
    stats = PrefixCacheStats()
    stats.record(10, 4, is_preempted=False)
    stats.record(20, 16, is_preempted=True)
    assert stats == PrefixCacheStats(False, 1, 10, 4, 1, 20, 16)
    metrics = PrefixCachingMetrics(100)
    metrics.observe(stats)
    assert metrics.hit_rate == 0.4


def test_metrics_over_no_request_are_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        PrefixCachingMetrics(0)
    assert str(raised.value) == "max_recent_requests is 0: pass an integer of at least 1"
