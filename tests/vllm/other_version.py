"""The connector in a vLLM of another version."""

from __future__ import annotations

import vllm

vllm.__version__ = "0.33.1"

from kvcache.integrations.vllm.connector import KVCacheConnector  # noqa: E402

__all__ = ["KVCacheConnector"]
