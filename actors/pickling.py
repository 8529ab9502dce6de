"""Classes and actor handles as bytes, the way Ray itself makes them travel.

For what stays inside one Ray cluster: arguments of actors, notes in Ray's key-value store. Nothing
that arrives by a socket of ours is ever read this way.
"""

from __future__ import annotations

from typing import Any

from ray import cloudpickle

_cloudpickle: Any = cloudpickle


def pickled(value: object) -> bytes:
    """Return `value` as bytes; a class that can be imported goes by its name."""
    return bytes(_cloudpickle.dumps(value))


def unpickled(data: bytes) -> Any:
    """Return what `pickled` was given. Raises whatever another release's objects may raise."""
    return _cloudpickle.loads(data)
