"""Identifies a process anywhere in the Ray cluster, checks whether it lives, and ends it.

A process id is reused sooner or later; together with its start time it is unique. A stopped
process is alive, and so is one that cannot be checked. `ray.kill` does not prove an end: it reports
a stopped process as dead at once and ends it seconds later. A signal ends it now, and then Ray
notices the death.

Ray is imported on use: `started_ticks` reads only /proc and works without Ray.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.config.deadlines import ENDING_S

ASK_TIMEOUT_S = 20.0
"""How long another node may take to check a process; it may have to start a process for it."""

REACH_TIMEOUT_S = ENDING_S / 3
"""How long another node may take to end a process."""

_STARTED_FIELD = 19
"""Field of /proc/PID/stat, counted after the name: start time of the process in ticks since
boot."""


def started_ticks(process_id: int) -> int:
    """Return when a process of this machine started, 0 if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[_STARTED_FIELD])


@dataclass(frozen=True)
class ProcessIdentity:
    """One process: its node, its id there, and when it started, in clock ticks since boot."""

    node_id: str
    host: str
    process_id: int
    started_ticks: int


def this_process() -> ProcessIdentity:
    """Return the identity of this process, which must be connected to Ray."""
    from actors.connect import this_node

    node, process_id = this_node(), os.getpid()
    return ProcessIdentity(node.node_id, node.host, process_id, started_ticks(process_id))


def is_process_alive(process: ProcessIdentity) -> bool:
    """Say whether a process still lives. A process of a lost node does not."""
    import ray
    from ray.exceptions import RayError

    from actors.connect import this_node

    if process.node_id == this_node().node_id:
        return started_ticks(process.process_id) == process.started_ticks
    list_nodes: Any = ray.nodes
    if not any(n["NodeID"] == process.node_id and n["Alive"] for n in list_nodes()):
        return False
    call = _begin_on(process.node_id, started_ticks, process.process_id)
    try:
        started = ray.get(call, timeout=ASK_TIMEOUT_S)
    except RayError:
        return True
    return bool(started == process.started_ticks)


def end_process(process: ProcessIdentity) -> str:
    """Send SIGKILL to a process, from its own node. Return the error, empty if it was sent or the
    process is gone."""
    import ray
    from ray.exceptions import RayError

    from actors.connect import this_node

    if not process.started_ticks:
        return f"it is not known when process {process.process_id} started"
    if process.node_id == this_node().node_id:
        return end_local_process(process.process_id, process.started_ticks)
    arguments = process.process_id, process.started_ticks
    call = _begin_on(process.node_id, end_local_process, *arguments)
    try:
        return str(ray.get(call, timeout=REACH_TIMEOUT_S))
    except RayError as error:
        ray.cancel(call, force=True)
        return f"node {process.host} cannot be reached: {type(error).__name__}"


def _begin_on(node_id: str, function: Callable[..., Any], *arguments: int) -> Any:
    """Start a process on a node that runs `function`; return the call."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    make_remote: Any = ray.remote
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return make_remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(function).remote(
        *arguments
    )


def end_local_process(process_id: int, ticks: int) -> str:
    """Send SIGKILL to the process of this machine that started at `ticks`; return the error."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return ""
    except OSError as error:
        return f"process {process_id} cannot be opened: {error}"
    try:
        # The descriptor stays bound to its process, so compare first, then signal.
        if started_ticks(process_id) == ticks:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError as error:
        return f"process {process_id} cannot be ended: {error}"
    finally:
        os.close(descriptor)
    return ""
