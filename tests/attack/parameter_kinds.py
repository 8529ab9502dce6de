"""The kinds of parameters that mean the same in every call, by name.

A case names only the kinds of its other parameters, and those that differ from this table.
"""

from __future__ import annotations

import numpy as np

from kvcache import BlockPool, KVCacheConfig, LoRARequest, Namespace, Request
from kvcache.config import ClusterConfig
from kvcache.core import Reservation
from kvcache.requests.hashing import HashFn
from kvcache.specs import KVCacheSpec
from tests.attack.argument_kinds import (
    BOOL,
    BYTES,
    COUNT,
    COUNTS,
    DIGESTS,
    HOSTILE,
    IDS,
    MAPPING,
    NAME,
    OPTIONAL_TEXT,
    POSITIVE,
    TEXT,
    TEXTS,
    TIME_LIMIT,
    TOKENS,
    Kind,
    instance_of,
    list_of,
)

REQUEST = instance_of(Request)
REQUEST_ID = TEXT.without("")
NAMESPACE = instance_of(Namespace)
SPEC = instance_of(KVCacheSpec)
CONFIG = instance_of(KVCacheConfig)
EXTRA_HASH = Kind(
    "extra hash",
    (1.5, True, b"x", [1], {}, HOSTILE, np.array([1]), ("a",), (("a",),), (("a", 1.5),), "\ud800"),
    lambda good: (np.int64(good), np.uint8(good)),
)


def each(kind: Kind, names: str) -> dict[str, Kind]:
    """The same kind for several names."""
    return dict.fromkeys(names.split(), kind)


KINDS: dict[str, Kind] = {
    **each(
        BOOL,
        "delay_cache_blocks drain enable_caching enable_kv_cache_events has_workers is_preempted"
        " log_stats merge_duplicates publish_all_groups skip_reading_prefix_cache use_eagle"
        " zero_new_blocks",
    ),
    **each(
        COUNT,
        "block_bytes device_bytes max_length model_epoch num_computed_tokens num_hit_tokens"
        " num_lookahead_tokens num_running_requests num_tokens offset",
    ),
    **each(
        POSITIVE,
        "block_size max_new_tokens max_num_seqs pipeline_parallel_size tensor_parallel_size",
    ),
    **each(IDS, "block_ids"),
    **each(TOKENS, "token_ids"),
    **each(COUNTS, "group_ids"),
    **each(TEXT, "client_id medium"),
    **each(OPTIONAL_TEXT, "cache_salt tenant"),
    **each(TEXT.without(""), "hash_seed seed"),
    **each(TEXTS, "mm_hashes"),
    **each(NAME, "caching_hash_algo encoding eviction_policy"),
    **each(BYTES, "block_hash digest"),
    **each(DIGESTS, "block_hashes"),
    **each(MAPPING, "managers policies"),
    **each(TIME_LIMIT, "ttl_s"),
    **each(REQUEST, "child_request parent_request request"),
    "request_id": REQUEST_ID,
    "namespace": NAMESPACE,
    "lora": instance_of(LoRARequest).without(None),
    "kv_cache_config": CONFIG,
    "config": instance_of(ClusterConfig),
    "pool": instance_of(BlockPool),
    "reservation": instance_of(Reservation),
    "spec": SPEC,
    "specs": list_of("specs"),
    "hash_fn": instance_of(HashFn),
    "extra_hash": EXTRA_HASH,
}
