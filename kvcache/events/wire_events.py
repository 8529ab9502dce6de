"""Cache events as routers know them: hashes of 64 bits, names in their words, one medium each.

Between the translation of a core's events and everybody behind it: the codec, the mirror and the
subscribers, who all mean the same by them. Data only; arrays are not to be written to.
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
"""Highest data-parallel rank that is written and read."""

RouterKey: TypeAlias = "str | int | tuple[str | int, ...]"
"""An extra key as routers read it: a name or salt bare, a multimodal item as hash and offset."""


@quickly_made
@dataclass(frozen=True, eq=False)
class StoredEvent:
    """A chain of blocks that are in `medium` from now on; each is the parent of the next.

    Shapes: `block_hashes` `(n,)`, none zero and none twice; `token_ids` `(n * block_size,)`.
    `parent_block_hash` is None for the first block of a prompt. `extra_keys` has an entry per
    block, or none at all. `medium`: GPU, CPU or STORAGE.
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
        """Return the blocks `[start, end)` as an event of their own."""
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
    """The last copies of these blocks in `medium` are gone. Shape of `block_hashes`: `(n,)`."""

    block_hashes: Hashes
    medium: str
    group_idx: int = 0


@dataclass(frozen=True)
class ClearedEvent:
    """Nothing is cached any more, in any medium; what still is comes behind it."""


WireEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent


@dataclass(frozen=True, eq=False)
class EventBatch:
    """What one message says: `events` in order, made at `time_s` (seconds since 1970), about the
    cache of one data-parallel rank. No events make a heartbeat."""

    time_s: float
    events: Sequence[WireEvent]
    data_parallel_rank: int = 0

    @property
    def is_restatement(self) -> bool:
        """Whether it states everything that is cached: it begins with a clear."""
        return bool(self.events) and isinstance(self.events[0], ClearedEvent)
