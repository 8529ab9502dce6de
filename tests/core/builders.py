"""Small plans, requests and cores for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.core import (
    CacheEvent,
    CacheHit,
    CoreSettings,
    NewestState,
    Reservation,
    RowsReserved,
    TableChange,
    joined,
    patch_of,
)
from kvcache.core.audit import free_list
from kvcache.core.columns import FLAGS, IS_SHARING
from kvcache.core.flat_core import FlatCore
from kvcache.core.running import (
    END,
    END_OF_OWN,
    FIRST_IN_RING,
    NO_ROWS,
    NUM_COLUMNS,
    NUM_POSITIONS,
    OWN,
    ROW,
    SETTLED,
    TOKENS,
    RowTable,
    RunningRows,
)
from kvcache.protocol.commands import BlockTablePatch
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.request import Request
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

NONE_HASH = get_request_block_hasher(4, get_hash_fn("sha256")).none_hash


def full(block_size: int = 4) -> KVCacheSpec:
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8)


def window(tokens: int, block_size: int = 4) -> KVCacheSpec:
    return SlidingWindowSpec(block_size, num_kv_heads=1, head_size=8, sliding_window=tokens)


def chunked(tokens: int, block_size: int = 4) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size, num_kv_heads=1, head_size=8, attention_chunk_size=tokens
    )


def mla(block_size: int = 4) -> KVCacheSpec:
    return MLAAttentionSpec(block_size, num_kv_heads=1, head_size=8)


def mamba(mode: str = "align", block_size: int = 4, num_drafts: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size,
        shapes=((8,),),
        dtypes=("float16",),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_drafts,
    )


def cross(max_encoder_tokens: int = 64, block_size: int = 4) -> KVCacheSpec:
    return CrossAttentionSpec(
        block_size, num_kv_heads=1, head_size=8, max_encoder_tokens=max_encoder_tokens
    )


def plan(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    return KVCacheConfig(num_blocks, (), groups)


def make_flat_core(num_blocks: int, *specs: KVCacheSpec, **options: Any) -> FlatCore:
    config = plan(num_blocks, *(specs or (full(),)))
    made: dict[str, Any] = {"none_hash": NONE_HASH, "hash_fn": get_hash_fn("sha256"), **options}
    return FlatCore(CoreSettings(config, **made))


def make_request(name: str, tokens: Sequence[int], block_size: int = 4, **options: Any) -> Request:
    hasher = get_request_block_hasher(block_size, get_hash_fn("sha256"))
    return Request(name, list(tokens), block_hasher=hasher, **options)


def run_request(
    core: FlatCore, request: Request, num_tokens: int | None = None
) -> list[TableChange] | None:
    """Look up, then reserve and cache everything up to `num_tokens`."""
    hit = core.cache.look_up(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    return core.reserve(request, Reservation(hit.num_tokens, end, end), hit)


def extend(core: FlatCore, request: Request, num_tokens: int) -> list[TableChange] | None:
    """Append tokens and reserve for them; all earlier tokens are computed."""
    computed = request.num_tokens
    request.append_output_token_ids(list(range(1000, 1000 + num_tokens)))
    end = request.num_tokens
    return core.reserve(request, Reservation(computed, end, end))


def block_lists(hit: CacheHit) -> list[list[int]]:
    return [block_ids.tolist() for block_ids in hit.block_ids]


class EventLog:
    """An event sink that keeps events until they are taken."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def emit(self, event: CacheEvent) -> None:
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events


def eviction_order(core: FlatCore) -> list[int]:
    """Return the cached blocks without references, the next victim first."""
    if core.cache.order is not None:
        return [int(block) for block in core.cache.order.policy.order()]
    cached = {block for _, _, block, _ in core.store.contents()}
    return [block for block in free_list(core.store) if block in cached]


def append(table: RowTable, rows: RunningRows) -> None:
    """Append the tokens of rows to the ring, one by one."""
    for slot, start, end in zip(rows.slots, rows.offsets, rows.offsets[1:], strict=False):
        for token in rows.token_ids[start:end]:
            table.ring[slot, table.rows[slot, TOKENS] % table.ring.shape[1]] = token
            table.rows[slot, TOKENS] += 1


class FullRequests:
    """A `RowTable` of requests that have all of their tokens. The ring of every second slot has
    their tokens, too."""

    def __init__(self, requests: Mapping[int, Request], unit: int) -> None:
        count = 1 + max(requests, default=0)
        self.rows = np.zeros((count, NUM_COLUMNS), np.int32)
        self.ring = np.zeros((count, 16 * unit), np.int32)
        self.requests = np.full(count, None, object)
        for slot, request in requests.items():
            self.requests[slot] = request
            self.rows[slot, FIRST_IN_RING] = request.num_tokens if slot % 2 else 0
            tokens = np.array(request.all_token_ids, np.int32)
            offsets = np.array([0, len(tokens)], np.int32)
            slots = np.array([slot], np.int32)
            append(self, NO_ROWS._replace(slots=slots, offsets=offsets, token_ids=tokens))

    def sync(self, slot: int) -> None:
        pass


def run(
    core: Any, slots: Sequence[int], requests: Sequence[Request], rows: Sequence[Reservation]
) -> tuple[Int32Array, BlockTablePatch]:
    """Run requests in slots as these reservations say; return who got blocks, and the patch."""
    table = FullRequests(dict(zip(slots, requests, strict=True)), core.hash_block_size)
    positions = np.zeros((NUM_POSITIONS, len(rows)), np.int32)
    for i, (slot, request, row) in enumerate(zip(slots, requests, rows, strict=True)):
        newest = row.newest_state or NewestState(0, 0)
        settled = newest.num_own_tokens + newest.num_accepted_drafts
        has_forward = row.own_end > newest.num_own_tokens
        positions[SETTLED, i], positions[END_OF_OWN, i] = settled, row.num_cached_tokens
        positions[END, i] = max(settled + 1, row.num_slot_tokens) if has_forward else settled
        table.rows[slot, ROW] = core.row_of(request.request_id)
        table.rows[slot, OWN] = newest.num_own_tokens
    columns = [(row.num_computed_tokens, row.num_slot_tokens) for row in rows]
    computed, wanted = np.array(columns, np.int32).reshape(-1, 2).T.copy()
    offsets = np.zeros(len(rows) + 1, np.int32)
    running = NO_ROWS._replace(
        slots=np.array(slots, np.int32), positions=positions, offsets=offsets
    )
    is_reserved, changes = core.run_rows(table, running, computed, wanted)
    return is_reserved, joined(core.take_patch(), patch_of(changes))


RUN_ROWS = FlatCore.run_rows


def run_one_by_one(core: FlatCore, *args: Any) -> RowsReserved:
    """Do `FlatCore.run_rows` as if the rows shared blocks that they may write."""
    core.store.columns.row[:, FLAGS] |= IS_SHARING
    reserved = RUN_ROWS(core, *args)
    core.store.columns.row[:, FLAGS] &= ~IS_SHARING
    return reserved
