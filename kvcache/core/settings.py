"""What a core is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcache.core.columns import BlockAges
from kvcache.core.interface import EventSink, OffloadHooks
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.requests.hash_algorithms import HashFn
from kvcache.requests.hashing import BlockHash
from kvcache.specs import KVCacheConfig
from kvcache.tenants import TenantLedger


@dataclass(frozen=True, eq=False)
class CoreSettings:
    """What a core is made from.

    `none_hash` is the parent of every first block, `hash_fn` digests the others. `eviction_policy`
    is one of `policies` by name. `events` hears what is stored and removed, of ordered groups, or
    of all groups with `publish_all_groups` or where no group is ordered. `offload` hears what may
    be stored below. `slots` is a live view of the running requests' slots, by request id. With
    `zero_new_blocks` a block's bytes are cleared when a request gets it; without workers no
    commands are kept. With `merge_duplicates` requests give up blocks whose content is in sealed
    ones, when their steps are complete. `tenants` say who may take what; None: whoever comes first.
    `ages` count how long blocks are out of use.
    """

    kv_cache_config: KVCacheConfig
    none_hash: BlockHash
    hash_fn: HashFn
    enable_caching: bool = True
    use_eagle: bool = False
    eviction_policy: str = "lru"
    policies: Mapping[str, PolicyFactory] = field(default_factory=lambda: EVICTION_POLICIES)
    events: EventSink | None = None
    offload: OffloadHooks | None = None
    slots: Mapping[str, int] = field(default_factory=dict)
    zero_new_blocks: bool = False
    has_workers: bool = True
    merge_duplicates: bool = False
    publish_all_groups: bool = False
    tenants: TenantLedger | None = None
    ages: BlockAges | None = None
