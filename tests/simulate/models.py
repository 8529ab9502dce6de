"""Small models, as groups of layers."""

from __future__ import annotations

from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from tests.simulate.traces import SIZE


def full(size: int = SIZE) -> KVCacheSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1)


def window(tokens: int, size: int = SIZE) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=size, num_kv_heads=1, head_size=1, sliding_window=tokens)


def chunk(tokens: int, size: int = SIZE) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=1, attention_chunk_size=tokens
    )


def groups_of(*specs: KVCacheSpec) -> tuple[KVCacheGroupSpec, ...]:
    return tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))


MODELS = {
    "window": groups_of(full(), window(6)),
    "window of other blocks": groups_of(full(SIZE), window(5, SIZE // 2)),
    "larger blocks": groups_of(full(2 * SIZE), window(3, SIZE)),
    "blocks across those of the trace": groups_of(full(3), window(4, 6)),
    "two of full": groups_of(full(), full(2), window(4)),
    "chunks": groups_of(full(), chunk(8)),
    "windows alone": groups_of(window(6), window(10)),
    "states": groups_of(
        full(),
        MambaSpec(block_size=SIZE, shapes=((1,),), dtypes=("float32",), mamba_cache_mode="align"),
    ),
}
