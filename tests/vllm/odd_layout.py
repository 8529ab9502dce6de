"""A connector whose tensors do not have the blocks first: no rank can move them."""

from __future__ import annotations

from typing import Any

from kvcache.integrations.vllm import KVCacheConnector as RealConnector


class KVCacheConnector(RealConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches({name: each.transpose(0, 1) for name, each in kv_caches.items()})
