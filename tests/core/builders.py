"""Small plans, requests and cores for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import IndexArray
from kvcache.core import (
    CacheEvent,
    CacheHit,
    Reservation,
    RowBatch,
    RowStates,
    TableChange,
)
from kvcache.core.audit import free_list
from kvcache.core.flat_core import FlatCore
from kvcache.core.interface import CoreSettings
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
    hit = core.look_up(request)
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


class RequestTokens:
    """The tokens of rows whose requests have all of them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def sync(self, rows: IndexArray) -> None:
        pass

    def num_tokens(self, rows: IndexArray) -> npt.NDArray[np.integer]:
        return np.array([self.requests[row].num_tokens for row in rows.tolist()], dtype=np.int32)

    def newest_units(self, rows: IndexArray, units: IndexArray) -> npt.NDArray[np.int32]:
        tokens = []
        for row, unit in zip(rows.tolist(), units.tolist(), strict=True):
            request = self.requests[row]
            assert request.block_hasher is not None
            size = request.block_hasher.block_size
            tokens.append(request.all_token_ids[unit * size : (unit + 1) * size])
        return np.array(tokens)


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
    if core.order is not None:
        return [int(block) for block in core.order.policy.order()]
    cached = {block for _, _, block, _ in core.contents()}
    return [block for block in free_list(core.store) if block in cached]


def row_batch(
    requests: Sequence[Request], *columns: Sequence[int], states: RowStates | None = None
) -> RowBatch:
    """Rows of `requests`; columns as in `RowBatch`, from the slots on."""
    arrays = [np.array(column, dtype=np.int32) for column in columns]
    rows = np.fromiter(requests, dtype=np.object_, count=len(requests))
    return RowBatch(rows, *arrays, RequestTokens(requests), states)
