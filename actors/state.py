"""The small state of a cluster in Ray's own key-value store, for coordinators that may move.

Survives actors, drivers and the loss of any node but the head's. That store is not public API of
Ray: nothing outside this file touches it.
"""

from __future__ import annotations

from typing import Any

from ray.experimental import internal_kv

from actors.names import state_prefix
from kvcache.errors import ClusterError
from kvcache.state_store import SmallState

KV_NAMESPACE = b"kvcache"

_kv: Any = internal_kv


class RayStateStore:
    """A `StateStore` for one cluster. Needs a process that is connected to Ray."""

    def __init__(self, cluster: str) -> None:
        """Use the keys of the cluster named `cluster`."""
        self._prefix = state_prefix(cluster)
        self._key = f"{self._prefix}state".encode()

    def load(self) -> SmallState | None:
        """Return what was saved last. Raises as `SmallState.from_bytes`; ClusterError for Ray's."""
        try:
            data = _kv._internal_kv_get(self._key, namespace=KV_NAMESPACE)
        except Exception as error:
            raise ClusterError(f"Ray's key-value store cannot be read: {error!r}") from error
        return None if data is None else SmallState.from_bytes(data, f"Ray key {self._key!r}")

    def save(self, state: SmallState) -> None:
        """Replace what is saved. Raises ClusterError when Ray does not take it."""
        try:
            _kv._internal_kv_put(self._key, state.to_bytes(), namespace=KV_NAMESPACE)
        except Exception as error:
            raise ClusterError(f"Ray's key-value store cannot be written: {error!r}") from error

    def clear(self) -> None:
        """Forget everything of the cluster. Harmless when there is nothing, or no Ray any more."""
        if _kv._internal_kv_initialized():
            _kv._internal_kv_del(self._prefix, del_by_prefix=True, namespace=KV_NAMESPACE)
