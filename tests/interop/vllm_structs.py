"""Cache events as vLLM declares them, for a decoder that checks every type.

Written from the format: a batch is an array, an event is a map with its name under `type`, or an
array that begins with it. Imports msgspec and nothing of this project, so that it can be loaded in
the routers' environment.
"""

from __future__ import annotations

from typing import Any

import msgspec

BlockHash = bytes | int
ExtraKeys = list[tuple[Any, ...] | None]


class StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, kw_only=True):
    """`BlockStored`, as a map."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, kw_only=True):
    """`BlockRemoved`, as a map."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    """`AllBlocksCleared`, as a map."""


class StoredArray(StoredMap, tag="BlockStored", array_like=True):
    """`BlockStored`, by position."""


class RemovedArray(RemovedMap, tag="BlockRemoved", array_like=True):
    """`BlockRemoved`, by position."""


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    """`AllBlocksCleared`, by position."""


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch of maps."""

    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch of arrays."""

    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


BATCHES = {"map": MapBatch, "array": ArrayBatch}
