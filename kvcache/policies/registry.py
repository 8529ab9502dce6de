"""Eviction policies by name.

Stands between configuration, which names a policy, and pools and tiers, which use one. Policies
from outside are offered by passing an extended copy of the mapping. Refuses names it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvcache.base.errors import ConfigurationError, shown
from kvcache.policies.arc import ARCPolicy
from kvcache.policies.fifo import FIFOPolicy
from kvcache.policies.hazard import HazardPolicy
from kvcache.policies.lfu import AgeingLFUPolicy, LFUPolicy
from kvcache.policies.lru import LRUPolicy
from kvcache.policies.lru2 import LRU2Policy
from kvcache.policies.outside_policy import OutsidePolicy
from kvcache.policies.policy import EntryBook, EvictionPolicy
from kvcache.policies.s3fifo import S3FIFOPolicy
from kvcache.policies.slru import SLRUPolicy
from kvcache.policies.twoq import TwoQPolicy

PolicyFactory: TypeAlias = Callable[[int, EntryBook], EvictionPolicy]
"""Makes a policy for entries below a capacity that are described by a book."""

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
    """Return `name`; raises ConfigurationError, with those there are, if there is no such
    policy."""
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

    One that does not come with the package is asked with care.
    """
    make = policies[require_eviction_policy(name, policies)]
    policy = make(capacity, book)
    return (
        policy
        if make in EVICTION_POLICIES.values()
        else OutsidePolicy(name, policy, capacity, book)
    )
