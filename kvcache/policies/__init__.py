"""Eviction policies for the pool and the tiers: one protocol, and implementations by name."""

from __future__ import annotations

from kvcache.policies.lru import LRUPolicy
from kvcache.policies.policy import EntryInfo, EntryTable, EvictionPolicy, LooksAhead
from kvcache.policies.registry import (
    EVICTION_POLICIES,
    PolicyFactory,
    make_eviction_policy,
    require_eviction_policy,
)

__all__ = [
    "EVICTION_POLICIES",
    "EntryInfo",
    "EntryTable",
    "EvictionPolicy",
    "LRUPolicy",
    "LooksAhead",
    "PolicyFactory",
    "make_eviction_policy",
    "require_eviction_policy",
]
