"""Cache events in the routers' format: 64-bit hashes, the routers' names, one medium each.

Used by the codec, the mirror and the subscribers. Data only; do not write to the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.base.arguments import quickly_made
from kvcache.base.arrays import Int32Array

Hashes: TypeAlias = NDArray[np.uint64]

MAX_RANK: Final = 1 << 20
"""Highest data-parallel rank of a payload."""

RouterKey: TypeAlias = "str | int | tuple[str | int, ...]"
"""An extra key as routers read it: a name or salt as text, an item as hash and offset."""


@quickly_made
@dataclass(frozen=True, eq=False)
class StoredEvent:
    """A chain of blocks that `medium` now has; each is the parent of the next.

    Shapes: `block_hashes` `(n,)`, nonzero and different; `token_ids` `(n * block_size,)`.
    `parent_block_hash` is None for the first block of a prompt. `extra_keys` has an entry per
    block, or is empty. `medium`: GPU, CPU or STORAGE.
    """

    block_hashes: Hashes
    parent_block_hash: int | None
    token_ids: Int32Array
    block_size: int
    medium: str
    lora_name: str | None = None
    extra_keys: tuple[tuple[RouterKey, ...] | None, ...] = ()
    group_idx: int = 0
    spec_kind: str | None = None
    sliding_window: int | None = None
    cache_salt: str | None = None

    def part(self, start: int, end: int) -> StoredEvent:
        """Return the blocks `[start, end)` as an event."""
        parent = self.parent_block_hash if start == 0 else int(self.block_hashes[start - 1])
        return StoredEvent(
            self.block_hashes[start:end],
            parent,
            self.token_ids[start * self.block_size : end * self.block_size],
            self.block_size,
            self.medium,
            self.lora_name,
            self.extra_keys[start:end],
            self.group_idx,
            self.spec_kind,
            self.sliding_window,
            self.cache_salt,
        )


@dataclass(frozen=True, eq=False)
class RemovedEvent:
    """`medium` has lost the last copies of these blocks. Shape of `block_hashes`: `(n,)`."""

    block_hashes: Hashes
    medium: str
    group_idx: int = 0


@dataclass(frozen=True)
class ClearedEvent:
    """All media are empty; blocks that are still cached follow."""


WireEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent


@dataclass(frozen=True, eq=False)
class EventBatch:
    """One message: `events` in order, made at `time_s` (seconds since 1970), about the cache of one
    data-parallel rank. A heartbeat has no events."""

    time_s: float
    events: Sequence[WireEvent]
    data_parallel_rank: int = 0

    @property
    def is_restatement(self) -> bool:
        """Whether it has the whole state: it begins with a clear."""
        return bool(self.events) and isinstance(self.events[0], ClearedEvent)
