"""Places workers: one placement group with a bundle per pipeline stage.

The tensor-parallel ranks of a stage share a bundle, and so a node. A stage that fits no node is
refused. The coordinator is not in the group, because it may restart anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from actors.names import placement_group_name
from kvcache.base.errors import StartupError
from kvcache.config import ClusterConfig

POLL_S = 0.05


def stage_resources(config: ClusterConfig) -> dict[str, float]:
    """Return the resources of one pipeline stage, for all its tensor-parallel ranks together."""
    width = config.parallel.tensor_parallel_size
    wanted = {
        "CPU": width * config.workers.num_cpus_per_rank,
        "GPU": width * config.workers.num_gpus_per_rank,
    }
    resources = {name: round(amount, 4) for name, amount in wanted.items() if amount}
    # Ray refuses an empty bundle; this much fits any node.
    return resources or {"CPU": 0.001}


def create_placement(config: ClusterConfig, is_detached: bool, timeout_s: float) -> PlacementGroup:
    """Reserve resources for every stage and return the group.

    Raises StartupError if there is no room within `timeout_s`; nothing stays reserved.
    """
    bundle = stage_resources(config)
    num_stages = config.parallel.pipeline_parallel_size
    group: PlacementGroup = placement_group(
        [dict(bundle) for _ in range(num_stages)],
        strategy="PACK",
        name=placement_group_name(config.name),
        lifetime="detached" if is_detached else None,
    )
    if group.wait(timeout_s):
        return group
    state = placement_group_table(group).get("stats", {}).get("scheduling_state", "PENDING")
    remove_placement(group, timeout_s=timeout_s)
    raise StartupError(
        f"no room for {num_stages} pipeline stage(s) of {bundle} each after {timeout_s:g} s "
        f"(placement is {state}; nodes have {describe_nodes()}): free resources, add nodes, or "
        "lower workers.num_cpus_per_rank or parallel; the ranks of one stage need one node"
    )


def remove_placement(group: PlacementGroup, timeout_s: float) -> None:
    """Remove the group and wait until Ray confirms it. Repeatable."""
    remove_placement_group(group)
    wait_until(lambda: placement_group_table(group).get("state", "REMOVED") == "REMOVED", timeout_s)


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Wait at most `timeout_s` until `is_done()`; return whether it is."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def describe_nodes() -> str:
    """Return CPUs and GPUs of every living node, as text."""
    list_nodes: Any = ray.nodes
    nodes = [node for node in list_nodes() if node["Alive"]]
    statistics = [
        f"{node['Resources'].get('CPU', 0):g} CPU / {node['Resources'].get('GPU', 0):g} GPU"
        for node in nodes
    ]
    return ", ".join(statistics) or "nothing"
