"""What a core is made from, and how.

Between the manager and its core. What watches a core, or stands in for it, comes in by a factory
that is handed to the manager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcache.core import Core, EventSink, OffloadHooks
from kvcache.core.columns import BlockAges
from kvcache.hash_algorithms import HashFn
from kvcache.hashing import BlockHash
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.specs import KVCacheConfig
from kvcache.tenants import TenantLedger


@dataclass(frozen=True, eq=False)
class CoreSettings:
    """What a core is made from.

    `none_hash` is the parent of every first block, `hash_fn` digests the others. `events` hears
    what is stored and removed, `offload` what may be stored below. `slots` is a live view of the
    running requests' slots, by request id. With `zero_new_blocks` a block's bytes are cleared when
    a request gets it; without workers no commands are kept. With `merge_duplicates` equal sealed
    blocks become one. With `publish_all_groups` events tell of groups, too, that cannot be hit
    alone. `eviction_policy` is one of `policies` by name. `tenants` say who may take what; None:
    whoever comes first. `ages` count how long blocks are out of use.
    """

    kv_cache_config: KVCacheConfig
    none_hash: BlockHash
    hash_fn: HashFn
    slots: Mapping[str, int]
    enable_caching: bool
    use_eagle: bool
    eviction_policy: str
    events: EventSink
    offload: OffloadHooks
    zero_new_blocks: bool
    has_workers: bool
    merge_duplicates: bool = False
    publish_all_groups: bool = False
    policies: Mapping[str, PolicyFactory] = field(default_factory=lambda: EVICTION_POLICIES)
    tenants: TenantLedger | None = None
    ages: BlockAges | None = None


CoreFactory: TypeAlias = Callable[[CoreSettings], Core]


def make_core(settings: CoreSettings) -> Core:
    """Make the core of these settings. It is imported, and compiled, when it is first made."""
    from kvcache.core.flat_core import FlatCore

    return FlatCore(
        settings.kv_cache_config,
        none_hash=settings.none_hash,
        hash_fn=settings.hash_fn,
        enable_caching=settings.enable_caching,
        use_eagle=settings.use_eagle,
        policy_name=settings.eviction_policy,
        policies=settings.policies,
        events=settings.events,
        offload=settings.offload,
        zero_new_blocks=settings.zero_new_blocks,
        has_workers=settings.has_workers,
        slots=settings.slots,
        merge_duplicates=settings.merge_duplicates,
        publish_all_groups=settings.publish_all_groups,
        tenants=settings.tenants,
        ages=settings.ages,
    )
