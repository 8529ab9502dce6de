"""Cross attention: decoder tokens read the keys and values of an encoder's tokens.

Encoder tokens belong to one request. Its table is allocated as a whole on admission and does not
change until the request is freed. Nothing is cached.
"""

from __future__ import annotations

from typing import Any

from kvcache.core.kinds.rule import SIZE
from kvcache.core.machine import inner


@inner
def num_columns(rule: Any, num_encoder: int) -> int:
    """Return the length of a table for `num_encoder` encoder tokens."""
    return (num_encoder + rule[SIZE] - 1) // rule[SIZE]
