"""Eviction policies by name.

Stands between configuration, which names a policy, and pools and tiers, which use one. Policies
from outside are offered by passing an extended copy of the mapping. Refuses names it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvcache.errors import ConfigurationError
from kvcache.policies.lru import LRUPolicy
from kvcache.policies.policy import EntryBook, EvictionPolicy

PolicyFactory: TypeAlias = Callable[[int, EntryBook], EvictionPolicy]
"""Makes a policy for entries below a capacity that are described by a book."""

EVICTION_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType({"lru": LRUPolicy})
"""The policies that come with the package."""


def make_eviction_policy(
    name: str,
    capacity: int,
    book: EntryBook,
    policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
) -> EvictionPolicy:
    """Return a new, empty policy; raises ConfigurationError for a name that nobody has."""
    factory = policies.get(name)
    if factory is None:
        raise ConfigurationError(
            f"unknown eviction policy {name!r}: choose one of {', '.join(sorted(policies))}"
        )
    return factory(capacity, book)
