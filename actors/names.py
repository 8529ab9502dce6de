"""Names of a cluster's actors and placement group. All clusters share one Ray namespace."""

from __future__ import annotations

import hashlib

RAY_NAMESPACE = "kvcache"
"""Namespace of all named actors of this package, so that any driver finds them."""

OUR_LOGGERS = ("kvcache", "actors")
"""Root loggers of this package."""


def coordinator_name(cluster: str) -> str:
    """Return the coordinator's actor name. Creating that actor makes a launch exclusive."""
    return f"{cluster}/coordinator"


def worker_name(cluster: str, place: int) -> str:
    """Return the name of the worker actor at `place`: stage times stage width plus number in the
    stage. Places get ranks once it is known where each actor runs."""
    return f"{cluster}/worker-{place}"


def memory_service_prefix(cluster: str) -> str:
    """Return the prefix of the names of the cluster's memory services."""
    return f"{cluster}/keeper-"


def memory_service_name(cluster: str, node_id: str) -> str:
    return f"{memory_service_prefix(cluster)}{node_id}"


def memory_service_address(cluster: str, node_id: str) -> str:
    name = hashlib.sha256(f"{cluster}/{node_id}".encode()).hexdigest()[:24]
    return f"unix:@kvcache-keeper-{name}"


def placement_group_name(cluster: str) -> str:
    return f"{cluster}/workers"


def state_prefix(cluster: str) -> str:
    """Return the prefix of the keys of the cluster's small state."""
    return f"kvcache/{cluster}/"


def router_name(router: str) -> str:
    """Return the name of the actor that ranks replicas for the router `router`."""
    return f"router:{router}"


def vllm_coordinator_name(coordinator: str) -> str:
    """Return the name of the actor that coordinates vLLM engines under the name `coordinator`."""
    return f"vllm:{coordinator}"
