"""Eviction policies by name.

A configuration names a policy; pools and tiers make one. To offer policies of your own, pass an
extended copy of the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvcache.base.errors import ConfigurationError, shown
from kvcache.base.logs import get_logger
from kvcache.policies.adaptive import AdaptivePolicy
from kvcache.policies.lru import LRUPolicy
from kvcache.policies.outside_policy import OutsidePolicy
from kvcache.policies.policy import EntryTable, EvictionPolicy
from kvcache.policies.ranked_policies import ARCPolicy, LRU2Policy, S3FIFOPolicy

logger = get_logger(__name__)

PolicyFactory: TypeAlias = Callable[[int, EntryTable], EvictionPolicy]
"""Makes a policy for entries below a capacity; a table describes the entries."""

EVICTION_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "adaptive": AdaptivePolicy,
        "arc": ARCPolicy,
        "lru": LRUPolicy,
        "lru2": LRU2Policy,
        "s3fifo": S3FIFOPolicy,
    }
)
"""The policies that come with the package."""

SUCCESSORS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("fifo", "hazard", "lfu", "lfu_da", "slru", "twoq"), "adaptive")
)
"""Names of former policies, which are still accepted, and what serves in their place."""


def require_eviction_policy(
    name: str, policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES
) -> str:
    """Return `name`, or its successor with a warning if the policy was removed; raises
    ConfigurationError, which lists the known policies, if it is unknown."""
    if isinstance(name, str) and name not in policies and SUCCESSORS.get(name) in policies:
        logger.warning(
            "the eviction policy %s was removed, and %s takes its place: name that one, because "
            "the next version refuses the old name",
            name,
            SUCCESSORS[name],
        )
        return SUCCESSORS[name]
    if not isinstance(name, str) or name not in policies:
        raise ConfigurationError(
            f"unknown eviction policy {shown(name)}: choose one of {', '.join(sorted(policies))}"
        )
    return name


def make_eviction_policy(
    name: str,
    capacity: int,
    table: EntryTable,
    policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
) -> EvictionPolicy:
    """Return a new, empty policy; raises ConfigurationError for an unknown name.

    A policy that does not come with the package is wrapped in an `OutsidePolicy`.
    """
    make = policies[require_eviction_policy(name, policies)]
    policy = make(capacity, table)
    return (
        policy
        if make in EVICTION_POLICIES.values()
        else OutsidePolicy(name, policy, capacity, table)
    )
