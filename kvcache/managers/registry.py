"""Which manager serves which kind of spec; open to kinds from outside.

Asked once per group when a coordinator is built. Refuses kinds that nobody registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvcache.arguments import check_kind
from kvcache.errors import ConfigurationError
from kvcache.managers.base import SingleTypeKVCacheManager
from kvcache.managers.chunked_local_attention import ChunkedLocalAttentionManager
from kvcache.managers.cross_attention import CrossAttentionManager
from kvcache.managers.full_attention import FullAttentionManager
from kvcache.managers.mamba import MambaManager
from kvcache.managers.sliding_window import SlidingWindowManager
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

MANAGERS: Mapping[str, type[SingleTypeKVCacheManager]] = MappingProxyType(
    {
        FullAttentionSpec.kind: FullAttentionManager,
        MLAAttentionSpec.kind: FullAttentionManager,
        SlidingWindowSpec.kind: SlidingWindowManager,
        ChunkedLocalAttentionSpec.kind: ChunkedLocalAttentionManager,
        MambaSpec.kind: MambaManager,
        CrossAttentionSpec.kind: CrossAttentionManager,
    }
)
"""Manager by kind of spec. Pass an extended copy where kinds of your own are used."""


def get_manager_for_kv_cache_spec(
    spec: KVCacheSpec, managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS
) -> type[SingleTypeKVCacheManager]:
    """Return the manager class for a spec; raises ConfigurationError if its kind has none."""
    check_kind("spec", spec, KVCacheSpec, ConfigurationError)
    check_kind("managers", managers, Mapping, ConfigurationError)
    manager = managers.get(spec.kind)
    if manager is None:
        raise ConfigurationError(
            f"no manager serves KV cache specs of kind {spec.kind!r}: use one of "
            f"{', '.join(sorted(managers))}, or register a manager for it"
        )
    return manager
