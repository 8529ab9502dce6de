"""What goes into a core and what comes out of it: hits, reservations, changes, events, figures.

A request's way through a core: look up (which prefix is cached), reserve (blocks for tokens to
come), commit (full blocks become hittable), settle (a completed step seals, a failed one
withdraws), free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import methodcaller
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.base.arguments import quickly_made
from kvcache.base.arrays import IndexArray, Int32Array
from kvcache.base.errors import RequestError
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
    """A run of blocks of one group whose bytes are there now, parents first."""

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
    """Where a core says what appears and disappears.

    Called while blocks change: `emit` must not block, nor call the manager. What it raises is
    logged, and the sink has missed that event.
    """

    def emit(self, event: CacheEvent) -> None:
        """Take one event. Batching and numbering happen behind this."""


class OffloadAnswer(Enum):
    """What lies below the device tier for the blocks behind a device hit."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"
    RETRY = "retry"


@dataclass(frozen=True)
class OffloadHit:
    """`num_tokens` behind the device hit can be loaded (HIT), are being loaded (HIT_PENDING: wait
    for the load), or are not known yet (RETRY: ask again in a later step)."""

    answer: OffloadAnswer
    num_tokens: int = 0


class OffloadHooks(Protocol):
    """The tiers below the device, as seen from a step. Never blocks, nor calls the manager.

    Of hooks that `KVCacheManager` is given, what they raise is logged: a look-up is a miss then.
    """

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Say what the tiers hold behind the first `num_device_tokens` tokens. Changes nothing."""

    def on_eviction_candidates(self, group: int, block_ids: Int32Array) -> None:
        """Sealed blocks that are about to be evicted: the last moment to plan a store."""

    def on_sealed(self, group: int, block_ids: Int32Array) -> None:
        """Blocks whose bytes have just been confirmed and may be stored."""

    def on_request_finished(self, request_id: str) -> None:
        """The request has gone."""


class ReferenceKind(Enum):
    """Who may hold a block. Each kind is counted apart; reusable means all are zero."""

    REQUEST = "request"
    PIN = "pin"
    FORK = "fork"
    TRANSFER = "transfer"


_bytes_of = methodcaller("tobytes")


class CacheHit(NamedTuple):
    """What a look-up found, true until the next mutation of the core.

    `block_ids[g]` are the ids of group `g` from position 0 on, null blocks for skipped positions;
    together they cover `num_tokens` tokens in every group. The arrays are a snapshot that nobody
    writes to. Hits of equal content are equal.
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
    """Where the last forward left the state that the next one reads.

    It stands `num_accepted_drafts` columns behind that of the forward's `num_own_tokens`.
    """

    num_own_tokens: int
    num_accepted_drafts: int


@dataclass(frozen=True)
class ForkOrigin:
    """Where a fork leaves its parent: after `num_tokens` tokens. In groups that keep states
    `newest_state` says where the state after them stands in the parent's table."""

    num_tokens: int
    newest_state: NewestState


class Reservation(NamedTuple):
    """How far a request's block tables must reach, in tokens from position 0.

    `num_computed_tokens` are computed before this step, the hit included (skipped blocks before
    them may go); slots are needed for `num_slot_tokens` in all, drafts and lookahead included;
    `num_cached_tokens` is how far full blocks become hittable (0 with delayed caching).
    There is room only if `num_spare_blocks` blocks are still free afterwards.

    Groups that keep states ask where the forward ends: after `num_own_tokens`, drafts and lookahead
    left out (None: all slots are for own tokens). `newest_state` is where a running request's last
    forward ended, None if there was none. `num_encoder_tokens` matters on admission only.
    All numbers are integers of at least 0.
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
        """Tokens after which the forward's own state is kept."""
        return self.num_slot_tokens if self.num_own_tokens is None else self.num_own_tokens


class TableChange(NamedTuple):
    """Blocks that entered one request's table: `block_ids` from column `first_index` on."""

    group: int
    first_index: int
    block_ids: Int32Array


@dataclass(frozen=True, eq=False)
class RowStates:
    """Where the forwards of rows begin and end, for groups that keep states. Shapes `(n,)`.

    `num_own_tokens` means what it means in a `Reservation`; of a row without a forward it is where
    the last one ended. The other two are its `newest_state`.
    """

    num_own_tokens: Int32Array
    num_last_own_tokens: Int32Array
    num_accepted_drafts: Int32Array


class RowTokens(Protocol):
    """The tokens of a batch's rows.

    The request objects of rows may lack their newest tokens, which are kept aside in arrays: a core
    reads a row's tokens from its request only after `sync`. The requests of all other calls have
    all their tokens.
    """

    def sync(self, rows: IndexArray) -> None:
        """Bring the request objects of these rows of the batch up to date with all tokens."""

    def num_tokens(self, rows: IndexArray) -> npt.NDArray[np.integer]:
        """Return how many tokens each of these rows has, shape `(k,)`."""

    def newest_units(self, rows: IndexArray, units: IndexArray) -> npt.NDArray[np.int32]:
        """Return the tokens of unit `units[i]` of row `rows[i]`, shape `(k, unit_tokens)`.

        Unit `u` is the tokens `[u * unit_tokens, (u + 1) * unit_tokens)`, all of which the row has;
        `unit_tokens` is what divides every group's block size. No request needs to be up to date
        for that. Quick for a row's newest units; older ones are read from its request, one by one.
        """


class RowBatch(NamedTuple):
    """Running requests that want slots for more tokens, in the order in which they are served.

    Row `i` is `requests[i]` in slot `slots[i]`, each slot once; a request keeps its slot until it
    is freed. The other fields mean what they mean in a `Reservation`; `states` is needed where a
    group keeps states. `are_tokens_known`: each row has the tokens to cache. Shapes: all `(n,)`.
    """

    requests: npt.NDArray[np.object_]
    slots: Int32Array
    num_computed_tokens: Int32Array
    num_slot_tokens: Int32Array
    num_cached_tokens: Int32Array
    tokens: RowTokens
    states: RowStates | None = None
    are_tokens_known: bool = False

    def require_columns(self) -> None:
        """Raise RequestError if a column has not one entry per request."""
        _, slots, computed, wanted, cached, _, states, _ = self
        num_rows = len(self.requests)
        fits = num_rows == len(slots) == len(computed) == len(wanted) == len(cached)
        if fits and states is None:
            return
        of_states = [] if states is None else [*vars(states).values()]
        lengths = list(map(len, [slots, computed, wanted, cached, *of_states]))
        if lengths.count(num_rows) != len(lengths):
            raise RequestError(
                f"a batch of {num_rows} rows has columns of {lengths} entries: give one per row"
            )


class NewRows(NamedTuple):
    """The new requests of a step, all without extra keys and of one namespace if a core is to take
    them, in the order in which they are served.

    `wishes` are, in tokens: how many a request has, how many of them may be found in the cache, how
    many are computed at most, how many come from elsewhere, for how many more it wants slots, and
    those of its encoder; whether nothing of it becomes hittable; a slot. Shape `(n, 8)`.
    Those that find room get the first of `slots`, which stand in the first lines, as rows of client
    `client_index`. While some request runs, of which there are `num_running` before, `num_spare`
    blocks must stay free. Slots are given for `max_model_len` tokens at most.
    """

    requests: Sequence[Request]
    wishes: npt.NDArray[np.int32]
    slots: Sequence[int]
    client_index: int
    num_running: int
    num_spare: int
    max_model_len: int


class RowsAdmitted(NamedTuple):
    """For each new request its slot, or -1 without room; how many of its tokens were found, and how
    many are computed now. `patches` are all of the tables of those that have one. Shapes `(n,)`."""

    slots: Int32Array
    num_hit_tokens: Int32Array
    num_scheduled_tokens: Int32Array
    patches: BlockTablePatch


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
    """`is_reserved[i]` is 1 where row `i` got everything, 0 where it got nothing; `patches` are the
    changes of all rows' tables together."""

    is_reserved: Int32Array
    patches: BlockTablePatch


@dataclass(frozen=True)
class CoreStatistics:
    """Figures of a core at one moment. Block counts leave the null block out.

    `num_merged_blocks` were given up since the start because another block had their content,
    which saved `merged_bytes` in all layers of a tensor-parallel rank.
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
    """What a core is made from.

    `none_hash` is the parent of every first block, `hash_fn` digests the others. `eviction_policy`
    is one of `policies` by name. `events` hears what is stored and removed, of ordered groups, or
    of all groups with `publish_all_groups` or where no group is ordered. `offload` hears what may
    be stored below. `slots` is a live view of the running requests' slots, by request id. With
    `zero_new_blocks` a block's bytes are cleared when a request gets it; without workers no
    commands are kept. With `merge_duplicates` requests give up blocks whose content is in sealed
    ones, when their steps are complete. `tenants` say who may take what; None: whoever comes first.
    `ages` count how long blocks are out of use.
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
    slots: Mapping[str, int] = field(default_factory=dict)
    zero_new_blocks: bool = False
    has_workers: bool = True
    merge_duplicates: bool = False
    publish_all_groups: bool = False
    tenants: TenantLedger | None = None
    ages: BlockAges | None = None
