"""Which process, and whether it still lives, wherever in the Ray cluster it runs.

A process id alone is given to another process sooner or later; with its start time it is not. A
process that is stopped lives. Refuses to guess: who cannot be asked counts as alive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.connect import this_node
from actors.process_start import started_ticks

ASK_TIMEOUT_S = 20.0
"""How long another node may take to look: it may have to start a process for it."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process: its node, its id there, and when it started, in clock ticks since boot."""

    node_id: str
    host: str
    process_id: int
    started_ticks: int


def this_process() -> ProcessIdentity:
    """Return the identity of this process, which is connected to Ray."""
    node, process_id = this_node(), os.getpid()
    return ProcessIdentity(node.node_id, node.host, process_id, started_ticks(process_id))


def is_process_alive(process: ProcessIdentity) -> bool:
    """Say whether a process still lives; one of a node that is gone does not."""
    if process.node_id == this_node().node_id:
        return started_ticks(process.process_id) == process.started_ticks
    list_nodes: Any = ray.nodes
    if not any(n["NodeID"] == process.node_id and n["Alive"] for n in list_nodes()):
        return False
    make_remote: Any = ray.remote
    there = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    look = make_remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(started_ticks)
    try:
        started = ray.get(look.remote(process.process_id), timeout=ASK_TIMEOUT_S)
    except RayError:
        return True
    return bool(started == process.started_ticks)
