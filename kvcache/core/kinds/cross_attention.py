"""Cross attention: decoder tokens read the keys and values of an encoder's tokens.

They belong to one request alone: its table is allocated whole when it is admitted, and neither
grows nor shrinks until it is freed. Nothing of it is ever cached.
"""

from __future__ import annotations

from typing import Any

from kvcache.core.kinds.rule import SIZE
from kvcache.core.machine import inner


@inner
def num_columns(rule: Any, num_encoder: int) -> int:
    """Return how long the table of a request with so many encoder tokens is."""
    return (num_encoder + rule[SIZE] - 1) // rule[SIZE]
