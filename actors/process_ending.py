"""Ending a process that hangs, wherever in the Ray cluster it runs.

Ray's own way is no proof: `ray.kill` counts a stopped process as dead at once, and ends it seconds
later. A signal ends it now, and Ray then says of itself that it is dead. The signal goes to a
process that was compared first: its id may have been given to another one meanwhile.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.connect import this_node
from actors.process_identity import ProcessIdentity
from actors.process_start import started_ticks
from kvcache.config.deadlines import ENDING_S

REACH_TIMEOUT_S = ENDING_S / 3
"""How long another node may take to run what ends the process there."""


def end_process(process: ProcessIdentity) -> str:
    """Send SIGKILL to a process, on its own node; return what could not be done, empty when it was
    sent or the process is gone."""
    if not process.started_ticks:
        return f"it is not known when process {process.process_id} started"
    if process.node_id == this_node().node_id:
        return end_local_process(process.process_id, process.started_ticks)
    make_remote: Any = ray.remote
    there = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    end = make_remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(end_local_process)
    call = end.remote(process.process_id, process.started_ticks)
    try:
        return str(ray.get(call, timeout=REACH_TIMEOUT_S))
    except RayError as error:
        ray.cancel(call, force=True)
        return f"node {process.host} cannot be reached: {type(error).__name__}"


def end_local_process(process_id: int, ticks: int) -> str:
    """Send SIGKILL to a process of this machine that started at `ticks`; return why not."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return ""
    except OSError as error:
        return f"process {process_id} cannot be opened: {error}"
    try:
        # The descriptor stays with the process it was opened for: compare, then signal.
        if started_ticks(process_id) == ticks:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError as error:
        return f"process {process_id} cannot be ended: {error}"
    finally:
        os.close(descriptor)
    return ""
