"""The summary line."""

from __future__ import annotations

from dataclasses import replace

from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.core import CoreStatistics
from kvcache.manager.statistics import ManagerStatistics
from kvcache.metrics import log_line


def statistics(num_steps: int, *, asked: int, hit: int, evicted: int) -> CoordinatorStatistics:
    core = CoreStatistics(1000, 600, 500, 500, 0, 0, 0, evicted)
    manager = ManagerStatistics(core, 7, 1, 9, 0, 1, 0, num_steps, 0, 0, 0, 0, False, asked, hit)
    return CoordinatorStatistics("running", 3, num_steps=num_steps, manager=manager)


def test_a_line_says_what_happened_since_the_last_one() -> None:
    before = statistics(100, asked=1000, hit=0, evicted=50)
    now = statistics(150, asked=1400, hit=300, evicted=70)
    assert log_line("chat", before, now, 10.0) == (
        "chat: 5.0 steps/s, hit rate 75.0%, 40.0% of 1,000 blocks in use, 7 running, 1 preempted, "
        "2.0 evictions/s"
    )


def test_a_line_counts_requests_without_room_since_the_last_one() -> None:
    before = replace(statistics(100, asked=0, hit=0, evicted=0), num_no_room=4)
    now = replace(statistics(150, asked=0, hit=0, evicted=0), num_no_room=7)
    assert log_line("chat", before, now, 10.0).endswith(", 3 times no room")
    assert "no room" not in log_line("chat", before, replace(now, num_no_room=4), 10.0)


def test_counts_of_another_epoch_are_not_taken_off() -> None:
    before = replace(statistics(100, asked=1000, hit=900, evicted=50), epoch=2)
    now = statistics(150, asked=100, hit=50, evicted=10)
    assert "hit rate 50.0%" in log_line("chat", before, now, 10.0)


def test_nothing_is_said_where_no_step_ran() -> None:
    now = statistics(100, asked=1000, hit=0, evicted=50)
    assert log_line("chat", now, now, 10.0) == ""
    assert log_line("chat", CoordinatorStatistics(), CoordinatorStatistics(), 10.0) == ""
