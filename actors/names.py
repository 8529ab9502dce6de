"""Under which names a cluster's actors and placement group are found. One Ray namespace for all."""

from __future__ import annotations

import hashlib

RAY_NAMESPACE = "kvcache"
"""Where every named actor of this package lives, so that any driver of the Ray cluster finds it."""

OUR_LOGGERS = ("kvcache", "actors")
"""Loggers above all others of this package."""


def coordinator_name(cluster: str) -> str:
    """Return the coordinator's actor name. Creating it is what makes a launch exclusive."""
    return f"{cluster}/coordinator"


def worker_name(cluster: str, place: int) -> str:
    """Return the name of the worker actor at `place`: its stage times the stage's width, plus its
    number in the stage. Ranks are given to places once it is known where each actor runs."""
    return f"{cluster}/worker-{place}"


def memory_service_prefix(cluster: str) -> str:
    """Return what the names of the cluster's memory services begin with."""
    return f"{cluster}/keeper-"


def memory_service_name(cluster: str, node_id: str) -> str:
    """Return the name of the memory service of a node."""
    return f"{memory_service_prefix(cluster)}{node_id}"


def memory_service_address(cluster: str, node_id: str) -> str:
    """Return where the memory service of a cluster listens on a node."""
    name = hashlib.sha256(f"{cluster}/{node_id}".encode()).hexdigest()[:24]
    return f"unix:@kvcache-keeper-{name}"


def placement_group_name(cluster: str) -> str:
    """Return the placement group's name."""
    return f"{cluster}/workers"


def state_prefix(cluster: str) -> str:
    """Return what the keys of the cluster's small state begin with."""
    return f"kvcache/{cluster}/"


def router_name(router: str) -> str:
    """Return the name of the actor that ranks replicas for the router `router`."""
    return f"router:{router}"
