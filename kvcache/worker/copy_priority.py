"""How a thread that copies stands against everything else that wants a processor.

Asked by copy_runner.py, in that thread. A thread may always lower its own priority and, without a
right to, never raise it again. Refuses to fail: where it cannot be lowered it stays as it is.

A step of 0.26 ms, during copies that never pause, on two cores that others use as well, at each
priority: median 2.1, 1.3 and 1.1 times as long; mean 2.8, 0.9 and 0.6 ms.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Literal, TypeAlias

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

CopyPriority: TypeAlias = Literal["normal", "low", "idle"]
"""`low`: goes behind the worker's own thread and others, and keeps about a tenth of a processor
that they would fill. `idle`: gets a processor that is otherwise idle, and may hardly move where
all of them are busy."""

LOW_NICENESS = 10
"""Above the process's own. 5: 1.4 times, 19: 1.5, which is no less than 10 within the noise."""

LEAST_NICENESS = 19


def take_priority(priority: CopyPriority) -> None:
    """Give this thread a priority, where the system has one for threads."""
    if priority == "normal" or sys.platform != "linux":
        return
    try:
        if priority == "idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + LOW_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness, LEAST_NICENESS))
    except OSError as error:
        logger.warning("copies keep the priority of their worker: %s", error)
