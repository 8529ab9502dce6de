"""Stock `transformers` models on paged blocks: `model.generate(..., past_key_values=cache)`.

    store ── opens ──▶ PagedCache ── rows ──▶ PagedMemory: manager (which blocks), worker (tensors)
      │                   ▲   ▲
      └─ hooks of the ────┘   └── each attention layer's `update`: writes new K/V, reads all
         model's forward          of a row through its block table

Needs `pip install 'kvcache[transformers]'`. Start with store.py.
"""

from __future__ import annotations

from kvcache.integrations.transformers.paged_cache import PagedCache
from kvcache.integrations.transformers.paged_memory import MemorySizes
from kvcache.integrations.transformers.store import PagedCacheStore, StoreStatistics

__all__ = ["MemorySizes", "PagedCache", "PagedCacheStore", "StoreStatistics"]
