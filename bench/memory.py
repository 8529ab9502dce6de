"""What a process holds in memory. Runs in either environment."""

from __future__ import annotations

import psutil


def anonymous_bytes() -> int:
    """Return what the process holds in memory, files that are mapped into it left out.

    A forked process maps those only when it first needs them, which is no growth.
    """
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
