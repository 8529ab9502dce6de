"""The small state of a cluster in Ray's key-value store, for coordinators that may move.

It survives actors, drivers and the loss of any node except the head. The store is not public API
of Ray; only this file uses it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ray.experimental import internal_kv

from actors.names import state_prefix
from kvcache.base.errors import ClusterError
from kvcache.protocol.state_store import SmallState, require_saved

KV_NAMESPACE = b"kvcache"

_RECORD = "embedded"

_NUM_KEPT = 4
"""How many numbers below the last one are checked when old states are removed."""

_kv: Any = internal_kv


class RayStateStore:
    """A `StateStore` for one cluster. The process must be connected to Ray."""

    def __init__(self, cluster: str) -> None:
        """Use the keys of the cluster named `cluster`."""
        self._prefix = state_prefix(cluster)
        self._versions = f"{self._prefix}state/".encode()

    def load(self) -> SmallState | None:
        """Return the last saved state. Raises as `SmallState.from_bytes`; ClusterError for Ray's
        errors."""
        return self._load()[1]

    def save(self, state: SmallState, replaces: SmallState | None) -> None:
        """Replace the saved state; see `StateStore`. Each state has its own key with the next
        number, and only one of several coordinators can write it."""
        number, saved = self._load()
        require_saved(saved, replaces, "Ray's key-value store")
        try:
            _kv._internal_kv_put(
                self._key(number + 1), state.to_bytes(), overwrite=False, namespace=KV_NAMESPACE
            )
        except Exception as error:
            raise ClusterError(f"Ray's key-value store cannot be written: {error!r}") from error
        # The number may be another coordinator's, or one that others have passed already.
        require_saved(self._load()[1], state, "Ray's key-value store")
        with contextlib.suppress(Exception):  # the cluster's end removes them at the latest
            for old in range(max(0, number - _NUM_KEPT), number):
                _kv._internal_kv_del(self._key(old), namespace=KV_NAMESPACE)

    def _load(self) -> tuple[int, SmallState | None]:
        """Return the highest number and its state; 0 and None if there is none."""
        try:
            keys: list[bytes] = _kv._internal_kv_list(self._versions, namespace=KV_NAMESPACE)
            if not keys:
                return 0, None
            key = max(keys)
            data = _kv._internal_kv_get(key, namespace=KV_NAMESPACE)
        except Exception as error:
            raise ClusterError(f"Ray's key-value store cannot be read: {error!r}") from error
        if data is None:
            raise ClusterError(f"Ray's key-value store has lost {key!r}: ask again")
        return int(key.rpartition(b"/")[2]), SmallState.from_bytes(data, f"Ray key {key!r}")

    def _key(self, number: int) -> bytes:
        return self._versions + b"%012d" % number

    def clear(self) -> None:
        """Remove everything of the cluster. No effect if there is nothing, or no Ray."""
        if _kv._internal_kv_initialized():
            _kv._internal_kv_del(self._prefix, del_by_prefix=True, namespace=KV_NAMESPACE)


class RayRecordStore:
    """One record of one cluster: the embedded coordinator's (see embedded/record.py) or the named
    one."""

    def __init__(self, cluster: str, record: str = _RECORD) -> None:
        """Use the key of the cluster `cluster`; `RayStateStore.clear` removes it too."""
        self._key = f"{state_prefix(cluster)}{record}".encode()

    def claim(self, record: bytes) -> bool:
        """Write `record` if there is none; return whether it was written. One of several writers
        wins."""
        return not self._put(record, overwrite=False)

    def save(self, record: bytes) -> None:
        self._put(record, overwrite=True)

    def load(self) -> bytes | None:
        try:
            data: bytes | None = _kv._internal_kv_get(self._key, namespace=KV_NAMESPACE)
        except Exception as error:
            raise ClusterError(f"Ray's key-value store cannot be read: {error!r}") from error
        return data

    def remove(self) -> None:
        """Remove the record. No effect if there is none."""
        _kv._internal_kv_del(self._key, namespace=KV_NAMESPACE)

    def _put(self, record: bytes, overwrite: bool) -> bool:
        """Write; return whether a record existed."""
        try:
            return bool(
                _kv._internal_kv_put(self._key, record, overwrite=overwrite, namespace=KV_NAMESPACE)
            )
        except Exception as error:
            raise ClusterError(f"Ray's key-value store cannot be written: {error!r}") from error


def recorded_clusters() -> list[str]:
    """Return the names of the clusters that have a record."""
    prefix, suffix = state_prefix("")[:-1].encode(), f"/{_RECORD}".encode()
    keys: list[bytes] = _kv._internal_kv_list(prefix, namespace=KV_NAMESPACE)
    names = [key.removeprefix(prefix).removesuffix(suffix) for key in keys if key.endswith(suffix)]
    return sorted(name.decode() for name in names)
