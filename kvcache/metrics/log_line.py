"""The summary line: a cluster's activity since the last one.

For people who watch a log. Empty if nothing happened.
"""

from __future__ import annotations

from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.manager.statistics import ManagerStatistics


def log_line(
    name: str, before: CoordinatorStatistics, now: CoordinatorStatistics, seconds: float
) -> str:
    """Return the summary of `seconds` between two moments, empty if no step ran.

    The hit rate covers this interval, or the time since a new epoch began in it.
    """
    num_steps = now.num_steps - before.num_steps
    manager = now.manager
    if manager is None or num_steps <= 0 or seconds <= 0:
        return ""
    last = before.manager if before.epoch == now.epoch else None
    core = manager.core
    num_used = core.num_blocks - core.num_free_blocks
    evicted = core.num_evictions - (0 if last is None else last.core.num_evictions)
    parts = [
        f"{name}: {num_steps / seconds:,.1f} steps/s",
        f"hit rate {_hit_rate(last, manager)}",
        f"{num_used / max(1, core.num_blocks):.1%} of {core.num_blocks:,} blocks in use",
        f"{manager.num_running_requests:,} running",
        f"{manager.num_preempted_requests:,} preempted",
        f"{evicted / seconds:,.1f} evictions/s",
    ]
    if now.num_refused_steps > before.num_refused_steps:
        parts.append(f"{now.num_refused_steps - before.num_refused_steps:,} steps refused")
    if now.problem:
        parts.append(now.problem)
    return ", ".join(parts)


def _hit_rate(last: ManagerStatistics | None, now: ManagerStatistics) -> str:
    asked, hit = now.num_asked_tokens, now.num_hit_tokens
    if last is not None:
        asked, hit = asked - last.num_asked_tokens, hit - last.num_hit_tokens
    return f"{hit / asked:.1%}" if asked > 0 else "-"
