"""Eviction policies by name.

A configuration names a policy; pools and tiers make one. To offer policies of your own, pass an
extended copy of the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvcache.base.errors import ConfigurationError, shown
from kvcache.policies.hazard import HazardPolicy
from kvcache.policies.lru import LRUPolicy
from kvcache.policies.outside_policy import OutsidePolicy
from kvcache.policies.policy import EntryBook, EvictionPolicy
from kvcache.policies.ranked_policies import (
    AgeingLFUPolicy,
    ARCPolicy,
    FIFOPolicy,
    LFUPolicy,
    LRU2Policy,
    S3FIFOPolicy,
    SLRUPolicy,
    TwoQPolicy,
)

PolicyFactory: TypeAlias = Callable[[int, EntryBook], EvictionPolicy]
"""Makes a policy for entries below a capacity; a book describes the entries."""

EVICTION_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "arc": ARCPolicy,
        "fifo": FIFOPolicy,
        "hazard": HazardPolicy,
        "lfu": LFUPolicy,
        "lfu_da": AgeingLFUPolicy,
        "lru": LRUPolicy,
        "lru2": LRU2Policy,
        "s3fifo": S3FIFOPolicy,
        "slru": SLRUPolicy,
        "twoq": TwoQPolicy,
    }
)
"""The policies that come with the package."""


def require_eviction_policy(
    name: str, policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES
) -> str:
    """Return `name`; raises ConfigurationError, which lists the known policies, if it is
    unknown."""
    if not isinstance(name, str) or name not in policies:
        raise ConfigurationError(
            f"unknown eviction policy {shown(name)}: choose one of {', '.join(sorted(policies))}"
        )
    return name


def make_eviction_policy(
    name: str,
    capacity: int,
    book: EntryBook,
    policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
) -> EvictionPolicy:
    """Return a new, empty policy; raises ConfigurationError for an unknown name.

    A policy that does not come with the package is wrapped in an `OutsidePolicy`.
    """
    make = policies[require_eviction_policy(name, policies)]
    policy = make(capacity, book)
    return (
        policy
        if make in EVICTION_POLICIES.values()
        else OutsidePolicy(name, policy, capacity, book)
    )
