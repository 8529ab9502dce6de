"""Tiers by name.

A configuration names tiers and policies. For tiers and policies of your own, pass extended copies
of the mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from kvcache.base.arguments import check_kind
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import ConfigurationError
from kvcache.offload.keys import OffloadKey
from kvcache.offload.options import TierOptions
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM, FileLoadStoreSpec, LoadStoreSpec
from kvcache.offload.tier_manager import TierManager
from kvcache.policies import EVICTION_POLICIES, PolicyFactory

TierFactory: TypeAlias = Callable[[TierOptions, Mapping[str, PolicyFactory]], TierManager]
"""Makes an empty tier."""


def _files(keys: Sequence[OffloadKey], addresses: Int32Array) -> LoadStoreSpec:
    return FileLoadStoreSpec(keys)


TIERS: Mapping[str, TierFactory] = MappingProxyType(
    {HOST_MEDIUM: TierManager, FILE_MEDIUM: partial(TierManager, spec_of=_files)}
)
"""The tiers that come with the package, by the name of their medium."""


def make_tier(
    options: TierOptions,
    tiers: Mapping[str, TierFactory] = TIERS,
    policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
) -> TierManager:
    """Return a new, empty tier for `options.medium`.

    Raises ConfigurationError for an unknown medium or policy, or invalid sizes.
    """
    check_kind("options", options, TierOptions, ConfigurationError)
    check_kind("tiers", tiers, Mapping, ConfigurationError)
    check_kind("policies", policies, Mapping, ConfigurationError)
    factory = tiers.get(options.medium)
    if factory is None:
        raise ConfigurationError(
            f"unknown tier {options.medium!r}: choose one of {', '.join(sorted(tiers))}"
        )
    return factory(options, policies)
