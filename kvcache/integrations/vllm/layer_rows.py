"""vLLM's KV cache tensors as rows of bytes: one row per block, for copies.

vLLM gives each layer a view of one allocation whose first dimension is the block. How the bytes lie
is the choice of the attention backend (`KVCacheLayout` of vLLM 0.32; B block, L layer, H head):

    LBHNC, LBNHC   a layer's blocks follow each other    one tensor of rows per layer
    LHBNC          so do the blocks of each head         one per layer and head
    BLHNC, BLNHC   a block has all layers                one for all layers
    BHLNC          a block has all heads, with layers    one for all layers and heads

Views may address the same bytes: layers of different KV cache groups share memory. A backend with
smaller blocks than vLLM's has several in the first dimension for each of vLLM's. Imports nothing of
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

import torch

from kvcache.base.errors import ConfigurationError

MIN_PIECE_BYTES = 64
"""Shorter pieces of a block are not moved: a block would have too many."""


@dataclass(frozen=True)
class LayerRows:
    """`rows[k]` is `(num_blocks, width)` uint8; together they have every byte of a block, once.
    `description` says where in the rows each layer has its bytes, for any number of blocks."""

    rows: tuple[torch.Tensor, ...]
    description: str

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.rows[0].device


@dataclass(frozen=True)
class _Extent:
    """Bytes `[start, end)` of block 0 in one allocation; those of block n are `n * stride` on."""

    start: int
    end: int
    stride: int


def layer_rows(kv_caches: Mapping[str, object], num_blocks: int) -> LayerRows:
    """Return the rows of vLLM's tensors; raises ConfigurationError for a layout that cannot be
    moved."""
    tensors: dict[str, torch.Tensor] = {}
    extents: dict[str, list[_Extent]] = {}
    allocations: dict[int, torch.Tensor] = {}
    for layer, tensor in kv_caches.items():
        found = _extents(tensor, num_blocks) if isinstance(tensor, torch.Tensor) else []
        if not isinstance(tensor, torch.Tensor) or not found:
            raise _refusal(layer, tensor, num_blocks)
        tensors[layer], extents[layer] = tensor, found
        allocations.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    if len({tensor.device for tensor in tensors.values()}) != 1:
        raise ConfigurationError(
            f"the KV caches of {len(tensors)} layers are not on one device: remove "
            "--kv-transfer-config"
        )
    rows: list[torch.Tensor] = []
    places: dict[tuple[int, _Extent], tuple[int, int]] = {}
    for address, tensor in allocations.items():
        here = {
            extent
            for layer, each in tensors.items()
            if each.untyped_storage().data_ptr() == address
            for extent in extents[layer]
        }
        for merged in _merged(here, num_blocks):
            for extent in here:
                if merged.start <= extent.start and extent.end <= merged.end:
                    places[address, extent] = len(rows), extent.start - merged.start
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            size, stride = (num_blocks, merged.end - merged.start), (merged.stride, 1)
            rows.append(whole.set_(tensor.untyped_storage(), merged.start, size, stride))
    told = [
        (
            layer,
            tensor.shape[0] // num_blocks,
            tuple(tensor.shape[1:]),
            str(tensor.dtype),
            _order(tensor),
            [places[tensor.untyped_storage().data_ptr(), extent] for extent in extents[layer]],
        )
        for layer, tensor in tensors.items()
    ]
    return LayerRows(tuple(rows), str(told))


def _extents(tensor: torch.Tensor, num_blocks: int) -> list[_Extent]:
    """Return the pieces of block 0, none if the tensor is no such one."""
    if not tensor.dim() or not tensor.numel() or tensor.shape[0] % num_blocks:
        return []
    size = tensor.element_size()
    per_block = tensor.shape[0] // num_blocks
    stride = per_block * tensor.stride(0) * size
    dims = zip((per_block, *tensor.shape[1:]), tensor.stride(), strict=True)
    outer = sorted(((int(n), int(step)) for n, step in dims if n > 1), key=itemgetter(1))
    width = 1
    while outer and outer[0][1] == width:
        width *= outer.pop(0)[0]
    width *= size
    if outer and (width < MIN_PIECE_BYTES or outer[0][1] * size < width):
        return []
    base = int(tensor.storage_offset()) * size
    starts = [
        base + sum(place * step * size for place, (_, step) in zip(index, outer, strict=True))
        for index in product(*(range(count) for count, _ in outer))
    ]
    return [_Extent(start, start + width, stride) for start in sorted(starts)]


def _merged(extents: set[_Extent], num_blocks: int) -> list[_Extent]:
    """Return extents without gaps or overlaps between those of one block.

    Raises ConfigurationError if a byte belongs to two blocks.
    """
    merged: list[_Extent] = []
    for extent in sorted(extents, key=lambda each: (each.start, each.end)):
        last = merged[-1] if merged else None
        if last is not None and extent.start <= last.end and extent.stride == last.stride:
            merged[-1] = _Extent(last.start, max(last.end, extent.end), last.stride)
        else:
            merged.append(extent)
    if num_blocks > 1:
        _require_apart(merged, num_blocks)
    return merged


def _require_apart(extents: Sequence[_Extent], num_blocks: int) -> None:
    """Raise ConfigurationError if a byte belongs to two blocks.

    Extents that reach into each other's blocks are parts of one block, within its stride.
    """
    first, end = extents[0], 0
    for extent in extents:
        if extent.start >= end:
            first = extent
        end = max(end, (num_blocks - 1) * extent.stride + extent.end)
        if extent.stride != first.stride or extent.end - first.start > first.stride:
            raise ConfigurationError(
                f"blocks of vLLM's KV cache overlap: {extent.end - extent.start} bytes from byte "
                f"{extent.start} on, every {extent.stride} bytes, and {first.end - first.start} "
                f"from {first.start} on, every {first.stride}: choose another attention backend, "
                "or remove --kv-transfer-config"
            )


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions behind the block's, from the outermost in memory to the innermost."""
    inner = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] > 1]
    return tuple(sorted(inner, key=lambda dim: tensor.stride()[dim], reverse=True))


def _refusal(layer: str, tensor: object, num_blocks: int) -> ConfigurationError:
    found = type(tensor).__name__
    if isinstance(tensor, torch.Tensor):
        found = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
    return ConfigurationError(
        f"the KV cache of layer {layer} is {found}, the connector moves tensors of {num_blocks} "
        f"blocks, blocks first, in pieces of at least {MIN_PIECE_BYTES} bytes: choose another "
        "attention backend, or remove --kv-transfer-config"
    )
