"""The memory of a process. Runs in either environment."""

from __future__ import annotations

import psutil


def anonymous_bytes() -> int:
    """Return the memory of the process without mapped files.

    A forked process maps files only when it first needs them, which is no growth.
    """
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
