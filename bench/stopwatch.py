"""The clock of the sides. Runs in either environment.

All sides compute on one thread and wait for nothing, so what they cost is the processor's time. The
time on the wall is not: where others use the machine, a call that is longer than the scheduler's
time slice is interrupted in its middle, a shorter one is not, and the slower side looks slower
still.
"""

from __future__ import annotations

import time


def now_s() -> float:
    """Return the seconds of processor time of this thread."""
    return time.thread_time()
