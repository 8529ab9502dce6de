"""A rank's layers as canonical KV caches: what tiers and their handlers are given.

Between layout and tensors of this worker and `kvcache.offload.canonical`, which knows no torch.
Every result is a view. Refuses layouts whose blocks are not contiguous: they cannot be copied as
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from kvcache.base.errors import ConfigurationError
from kvcache.offload.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvcache.worker.layout import PoolLayout, Region


def canonical_kv_caches(
    rows: Sequence[torch.Tensor], layout: PoolLayout
) -> CanonicalKVCaches[torch.Tensor]:
    """Return a pool's rows of bytes with what each group has in them.

    `rows[i]` is `(num_blocks, width)` uint8, region `i` of `layout`. A group's reference to a
    tensor ends with the content of its last layer there: padding behind it is left out.
    """
    group_refs: list[dict[int, int]] = []
    for layer in layout.layers:
        while len(group_refs) <= layer.group:
            group_refs.append({})
        index = _region_of(layer.offset_bytes, layout.regions)
        end = layer.offset_bytes - layout.regions[index].offset_bytes + layer.content_bytes
        refs = group_refs[layer.group]
        refs[index] = max(refs.get(index, 0), end)
    return CanonicalKVCaches(
        tuple(CanonicalKVCacheTensor(each.view(torch.int8)) for each in rows),
        tuple(
            tuple(CanonicalKVCacheRef(index, size) for index, size in sorted(refs.items()))
            for refs in group_refs
        ),
    )


def split_by_block(
    tensor: torch.Tensor, block_dim: int
) -> tuple[CanonicalKVCacheTensor[torch.Tensor], ...]:
    """Return a layer's tensor, whose dimension `block_dim` counts blocks, as rows of bytes.

        (2, num_blocks, 16, 8, 128), block_dim 1     keys before values: two tensors
        (num_blocks, 2, 16, 8, 128), block_dim 0     one tensor

    One for each index of the dimensions before it, in order. Raises ConfigurationError if there is
    no such dimension, or what lies behind it is not contiguous.
    """
    if not 0 <= block_dim < tensor.dim():
        raise ConfigurationError(
            f"block dimension {block_dim} of a tensor of shape {tuple(tensor.shape)}: pass one "
            f"from 0 to {tensor.dim() - 1}"
        )
    outer, inner = tensor.shape[:block_dim], tensor.shape[block_dim + 1 :]
    expected = 1
    for length, stride in zip(reversed(inner), reversed(tensor.stride()), strict=False):
        if length != 1 and stride != expected:
            raise ConfigurationError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                f"contiguous behind dimension {block_dim}: its blocks cannot be copied as bytes"
            )
        expected *= length
    num_blocks, block_stride = tensor.shape[block_dim], tensor.stride(block_dim)
    split = []
    for index in product(*map(range, outer)):
        offset = tensor.storage_offset() + sum(
            i * stride for i, stride in zip(index, tensor.stride(), strict=False)
        )
        rows = tensor.as_strided((num_blocks, expected), (block_stride, 1), offset)
        split.append(CanonicalKVCacheTensor(rows.view(torch.int8)))
    return tuple(split)


def _region_of(offset_bytes: int, regions: Sequence[Region]) -> int:
    """Return which region's first row a byte is in."""
    for index, region in enumerate(regions):
        if 0 <= offset_bytes - region.offset_bytes < region.width_bytes:
            return index
    raise ConfigurationError(f"byte {offset_bytes} of a block is in no region: plan again")
