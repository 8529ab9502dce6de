"""The clock of the sides. Runs in either environment.

All sides compute on one thread and wait for nothing, so their cost is processor time. Wall time
would distort it: on a shared machine, the scheduler interrupts calls longer than its time slice but
not shorter ones, so the slower side would look even slower.
"""

from __future__ import annotations

import time


def now_s() -> float:
    """Return the seconds of processor time of this thread."""
    return time.thread_time()
