"""The core of one pool: which blocks exist, what they cache, and which requests reference them.

Here are its settings, its arguments and results, events, hooks and statistics. The core itself is
`FlatCore` (`flat_core.py`), made from `CoreSettings`.

A request passes through a core in five steps: look up (which prefix is cached), reserve (blocks for
the next tokens), commit (full blocks become hittable), settle (a completed step seals them, a
failed step drops them), free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import methodcaller
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvcache.base.arguments import quickly_made
from kvcache.base.arrays import Ids, Int32Array, int32_array
from kvcache.base.clock import Clock, SystemClock
from kvcache.core.columns import BlockAges
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.protocol.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.requests.hash_algorithms import HashFn
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request import Namespace, Request
from kvcache.specs import KVCacheConfig
from kvcache.tenants import TenantLedger


@quickly_made
@dataclass(frozen=True, eq=False)
class BlocksStored:
    """Consecutive blocks of one group whose bytes have been written, parents first."""

    group: int
    medium: str
    digests: Sequence[BlockHash]
    parent_digest: BlockHash | None
    token_ids: Int32Array
    block_size: int
    namespace: Namespace
    extra_keys: tuple[tuple[tuple[str | int, ...], ...] | None, ...] = ()


@dataclass(frozen=True)
class BlocksRemoved:
    """The last copies of these contents in `medium` are gone."""

    group: int
    medium: str
    digests: Sequence[BlockHash]


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is cached any more, in any medium."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


class EventSink(Protocol):
    """Receives a core's cache events.

    The core calls `emit` while blocks change: `emit` must neither block nor call the manager. If it
    raises, the error is logged, and the sink has missed that event.
    """

    def emit(self, event: CacheEvent) -> None:
        """Take one event. The sink batches and numbers events."""


class OffloadAnswer(Enum):
    """Whether tiers below the device have the blocks that continue a device hit."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"
    RETRY = "retry"


@dataclass(frozen=True)
class OffloadHit:
    """The `num_tokens` tokens after the device hit can be loaded (HIT), are being loaded
    (HIT_PENDING: wait for the load), or are not known yet (RETRY: ask again in a later step)."""

    answer: OffloadAnswer
    num_tokens: int = 0


class StepHooks(Protocol):
    """The tiers below the device, as a step sees them. No hook may block or call the manager."""

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Return how much of the request the tiers have after its first `num_device_tokens` tokens.
        Changes nothing."""

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended."""


class OffloadHooks(StepHooks, Protocol):
    """The tiers of a `KVCacheManager`'s caller, which also learn when blocks are sealed or evicted.

    The manager logs what its hooks raise; a look-up that raises is a miss.
    """

    def on_eviction_candidates(self, group: int, block_ids: Int32Array) -> None:
        """These sealed blocks are about to be evicted; this is the last moment to plan a store."""

    def on_sealed(self, group: int, block_ids: Int32Array) -> None:
        """These blocks have just been sealed and may be stored."""


class ReferenceKind(Enum):
    """What references a block. Each kind is counted separately; a block can be reused when all
    counts are zero."""

    REQUEST = "request"
    PIN = "pin"
    FORK = "fork"
    TRANSFER = "transfer"


_bytes_of = methodcaller("tobytes")

new_tuple: Any = tuple.__new__
"""Makes a named tuple from a tuple, in half the time of its own constructor."""


class CacheHit(NamedTuple):
    """The result of a look-up, valid until the next change of the core.

    `block_ids[g]` are the ids of group `g` from position 0 on, null blocks for skipped positions.
    They cover `num_tokens` tokens in every group. The arrays are a snapshot; do not write to them.
    Hits with equal content are equal.
    """

    block_ids: tuple[Int32Array, ...]
    num_tokens: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheHit):
            return NotImplemented
        return self.num_tokens == other.num_tokens and (
            [*map(_bytes_of, self.block_ids)] == [*map(_bytes_of, other.block_ids)]
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.num_tokens, *(ids.tobytes() for ids in self.block_ids)))


@dataclass(frozen=True)
class NewestState:
    """Where the last forward left the state that the next one reads: `num_accepted_drafts` columns
    after the column of the state after `num_own_tokens` tokens."""

    num_own_tokens: int
    num_accepted_drafts: int


class Reservation(NamedTuple):
    """How far a request's block tables must reach, in tokens from position 0.

    `num_computed_tokens` are computed before this step, the hit included; blocks before them may be
    skipped. `num_slot_tokens` tokens need slots, drafts and lookahead included. Full blocks up to
    `num_cached_tokens` become hittable (0 with delayed caching). The reservation fails unless
    `num_spare_blocks` blocks remain free.

    Groups that keep states need to know where the forward ends: after `num_own_tokens`, drafts and
    lookahead left out (None: all slots are for own tokens). `newest_state` is where a running
    request's last forward ended (None: there was none). `num_encoder_tokens` matters only on
    admission. All numbers are integers of at least 0.
    """

    num_computed_tokens: int
    num_slot_tokens: int
    num_cached_tokens: int
    num_spare_blocks: int = 0
    num_own_tokens: int | None = None
    newest_state: NewestState | None = None
    num_encoder_tokens: int = 0

    @property
    def own_end(self) -> int:
        """The number of tokens after which the forward's own state is kept."""
        return self.num_slot_tokens if self.num_own_tokens is None else self.num_own_tokens


class TableChange(NamedTuple):
    """Blocks that entered one request's table: `block_ids`, from column `first_index` on."""

    group: int
    first_index: int
    block_ids: Int32Array


class RowsAdmitted(NamedTuple):
    """For each new request: its slot, or -1 if there was no room; how many of its tokens were hit;
    how many are computed now. Shapes `(n,)`."""

    slots: Int32Array
    num_hit_tokens: Int32Array
    num_scheduled_tokens: Int32Array


def release_order(
    tables: Sequence[Ids], sizes: Sequence[int], prefix_groups: Collection[int]
) -> Int32Array:
    """Return the blocks of a request's tables in the order in which they are released: blocks of
    windowed groups first, each group from its end, then those of prefix groups, last tokens first.
    So no block outlives those before it, or the prefix that a hit on it needs. `sizes` are tokens
    per block."""
    order: list[tuple[bool, int, int, int]] = []
    for g, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        is_last = g in prefix_groups
        for end, b in enumerate(np.asarray(table).tolist(), 1):
            if b:
                order.append((is_last, *((-end * size, g) if is_last else (g, -end)), b))
    return int32_array([b for *_, b in sorted(order)])


def count_down(counts: Counter[int], block_ids: Int32Array) -> None:
    """Take 1 from the counts of these blocks, and remove counts that reach 0. Unlike `-=` of
    counters, this does not visit the counts of all other blocks."""
    for b in block_ids.tolist():
        counts[b] -= 1
        if not counts[b]:
            del counts[b]


def patch_of(changes: Sequence[tuple[int, TableChange]]) -> BlockTablePatch:
    """Return the changes of rows (slot, change) as one command."""
    if not changes:
        return EMPTY_PATCH
    tables = [each.block_ids for _, each in changes]
    columns = np.array(
        [
            *[slot for slot, _ in changes],
            *[each.group for _, each in changes],
            *[each.first_index for _, each in changes],
            *map(len, tables),
        ],
        np.int32,
    ).reshape(4, -1)
    ids = np.concatenate(tables) if len(tables) > 1 else tables[0]
    slots, groups, first_indices, counts = columns
    return BlockTablePatch(slots, groups, first_indices, counts, ids)


def joined(before: BlockTablePatch, then: BlockTablePatch) -> BlockTablePatch:
    """Return two patches as one."""
    if not len(then.slots):
        return before
    if not len(before.slots):
        return then
    pairs = zip(vars(before).values(), vars(then).values(), strict=True)
    return BlockTablePatch(*map(np.concatenate, pairs))


class RowsReserved(NamedTuple):
    """`is_reserved[i]` is 1 if row `i` got all its blocks, 0 if it got none. `changes` are the
    table changes, by slot, of rows that were served one by one."""

    is_reserved: Int32Array
    changes: list[tuple[int, TableChange]]


@dataclass(frozen=True)
class CoreStatistics:
    """Statistics of a core at one moment. Block counts exclude the null block.

    `num_merged_blocks` counts duplicate blocks that were given up since the start, which saved
    `merged_bytes` in all layers of a tensor-parallel rank.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_sealed_blocks: int
    num_pinned_blocks: int
    num_in_flight_blocks: int
    num_quarantined_blocks: int
    num_evictions: int
    references: dict[str, int] = field(default_factory=dict)
    num_merged_blocks: int = 0
    merged_bytes: int = 0


@dataclass(frozen=True, eq=False)
class CoreSettings:
    """The settings of a core.

    - `none_hash` is the parent of every first block; `hash_fn` makes all other digests.
    - `eviction_policy` names one of `policies`.
    - `events` receives the events of prefix groups (full attention), or of all groups with
      `publish_all_groups` or if there is no prefix group.
    - `offload` is told which blocks may be stored in tiers below.
    - `slot_of` returns the slot of a request by its id, -1 if it does not run.
    - `zero_new_blocks`: a block's bytes are cleared when a request gets it.
    - `has_workers`: commands are kept for workers.
    - `merge_duplicates`: when a step is complete, its requests replace duplicate blocks by sealed
      ones.
    - `tenants` decide which request may take blocks; None: first come, first served.
    - `ages` counts for how long cached blocks are unused.
    - `clock` tells the time for hints; it is not read before the first hint.
    """

    kv_cache_config: KVCacheConfig
    none_hash: BlockHash
    hash_fn: HashFn
    enable_caching: bool = True
    use_eagle: bool = False
    eviction_policy: str = "lru"
    policies: Mapping[str, PolicyFactory] = field(default_factory=lambda: EVICTION_POLICIES)
    events: EventSink | None = None
    offload: OffloadHooks | None = None
    slot_of: Callable[[str], int] = field(default=lambda request_id: -1)
    zero_new_blocks: bool = False
    has_workers: bool = True
    merge_duplicates: bool = False
    publish_all_groups: bool = False
    tenants: TenantLedger | None = None
    ages: BlockAges | None = None
    clock: Clock = field(default_factory=SystemClock)
