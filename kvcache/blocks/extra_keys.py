"""A block's extra keys as the bytes that labels carry, and back.

Beside the outbox, which writes labels, and the rebuild, which reads them. Refuses bytes that are
no extra keys: they come from other processes.
"""

from __future__ import annotations

from typing import cast

import cbor2

from kvcache.errors import MalformedMessageError
from kvcache.hashing import ExtraKeys


def extra_keys_bytes(keys: ExtraKeys | None) -> bytes:
    """Return the canonical bytes of a block's extra keys; no bytes where it has none."""
    return cbor2.dumps(keys, canonical=True) if keys else b""


def parse_extra_keys(data: bytes) -> ExtraKeys | None:
    """Return the keys that `extra_keys_bytes` wrote; raises MalformedMessageError for others."""
    if not data:
        return None
    try:
        keys = cbor2.loads(data)
    except (cbor2.CBORDecodeError, TypeError, ValueError) as error:
        raise MalformedMessageError(f"extra keys {data!r} are not readable: {error}") from error
    if not isinstance(keys, list) or not keys or not all(map(_is_key, keys)):
        raise MalformedMessageError(f"extra keys {data!r} are no list of kinds and their values")
    return cast("ExtraKeys", tuple(tuple(key) for key in keys))


def _is_key(key: object) -> bool:
    """Say whether it is a kind, a text and perhaps a text or number more."""
    if not isinstance(key, list) or not 2 <= len(key) <= 3:
        return False
    return all(isinstance(part, str) for part in key[:2]) and type(key[-1]) in (str, int)
