"""A KV connector for stock vLLM: its blocks in our host memory, which survives the engine.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVCacheConnector",
        "kv_connector_module_path": "kvcache.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

vLLM is imported with the class, not with the package, and neither Ray nor a coordinator is. Start
with connector.py; docs/vllm.md has the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.integrations.vllm.connector import KVCacheConnector

__all__ = ["KVCacheConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector when it is asked for; raises AttributeError for other names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llvmlite.binding import ffi

    # When vLLM's CPU worker starts, it asks every value of every loaded module for its `__dict__`,
    # as a dict. llvmlite's library object takes that for the name of a C function.
    ffi.lib._fntab.setdefault("__dict__", {})

    from kvcache.integrations.vllm.connector import KVCacheConnector

    return KVCacheConnector
