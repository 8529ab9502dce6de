"""Actor handles as bytes, in Ray's own format: for notes in Ray's key-value store.

Ray has no public way to keep the handle of an actor without a name; what it sends of one itself is
a record of its own, that brings nothing to be executed. Nothing outside this file touches it.
"""

from __future__ import annotations

from typing import Any

from ray._private import worker as ray_worker


def handle_to_bytes(actor: Any) -> bytes:
    """Return an actor's handle as bytes. In a process that is connected to Ray."""
    data, _ = _core_worker().serialize_actor_handle(actor._ray_actor_id)
    return bytes(data)


def handle_from_bytes(data: bytes) -> Any:
    """Return the handle that `handle_to_bytes` was given, whether its actor lives or not."""
    return _core_worker().deserialize_and_register_actor_handle(data, None, False)


def _core_worker() -> Any:
    connected: Any = ray_worker.global_worker
    connected.check_connected()
    return connected.core_worker
