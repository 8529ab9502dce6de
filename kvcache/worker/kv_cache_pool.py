"""The rank's KV memory: one allocation, seen as layers by the model and as rows by copies.

`PoolLayout` computes the position of every byte from the plan (`KVCacheConfig`). A *region* is the
unit of copies: rows of bytes, one per block. With the block-first layout, all layers of a block are
one row of one region; otherwise each pool is a region. A plan is refused if its pages overlap,
leave the allocation or are not aligned, or if a layer has no pool.

`KVCachePool` allocates on CPU and CUDA. One layer of each group shares a pool, so views of
different layers may be the same bytes; the coordinator decides which block belongs to which layer.
`canonical_kv_caches` describes the same bytes to offloading handlers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from types import MappingProxyType

import torch

from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError
from kvcache.offload.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvcache.specs import KVCacheConfig, KVCacheSpec, KVCacheTensor, dtype_size_bytes


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a layer, over all blocks. `shape` starts with the block; `strides` count
    elements."""

    dtype: str
    offset_bytes: int
    block_stride_bytes: int
    page_shape: tuple[int, ...]
    num_blocks: int

    @property
    def element_bytes(self) -> int:
        return dtype_size_bytes(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_blocks, *self.page_shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor, in elements: contiguous inside a block."""
        inner = tuple(prod(self.page_shape[i + 1 :]) for i in range(len(self.page_shape)))
        return (self.block_stride_bytes // self.element_bytes, *inner)


@dataclass(frozen=True)
class LayerLayout:
    """The position of one layer's pages in its pool, and their tensors.

    `content_bytes` of a page belong to the layer, the rest is padding. `is_state`: the page is a
    state of several tensors; otherwise it is one tensor with a row per token.
    """

    name: str
    group: int
    offset_bytes: int
    block_stride_bytes: int
    content_bytes: int
    is_state: bool
    tensors: tuple[TensorLayout, ...]


@dataclass(frozen=True)
class Region:
    """Rows of bytes: row `n` starts at `offset_bytes + n * stride_bytes`, `width_bytes` long."""

    offset_bytes: int
    stride_bytes: int
    width_bytes: int


@dataclass(frozen=True)
class PoolLayout:
    """The whole allocation of one rank. `block_bytes`: one block over all regions."""

    num_blocks: int
    size_bytes: int
    layers: tuple[LayerLayout, ...]
    regions: tuple[Region, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the rank: what one block copy moves."""
        return sum(region.width_bytes for region in self.regions)

    @classmethod
    def from_config(cls, config: KVCacheConfig) -> PoolLayout:
        """Return the layout of a plan; raises ConfigurationError for an invalid one."""
        tensors = config.kv_cache_tensors
        for index, tensor in enumerate(tensors):
            _validate_pool(config, index, tensor)
        _validate_apart(config)
        return cls(
            num_blocks=config.num_blocks,
            size_bytes=config.total_size_bytes,
            layers=_layers(config),
            regions=_regions(config),
        )


def _page_bytes(config: KVCacheConfig, tensor: KVCacheTensor) -> int:
    return tensor.size // config.num_blocks


def _validate_pool(config: KVCacheConfig, index: int, tensor: KVCacheTensor) -> None:
    if config.num_blocks < 1 or tensor.size % config.num_blocks or not tensor.size:
        raise ConfigurationError(
            f"pool {index} has {tensor.size} bytes for {config.num_blocks} blocks: plan a whole "
            "page for each of at least one block"
        )
    page = _page_bytes(config, tensor)
    end = tensor.offset + (config.num_blocks - 1) * tensor.block_stride + page
    if end > config.total_size_bytes or (config.num_blocks > 1 and tensor.block_stride < page):
        raise ConfigurationError(
            f"pool {index}: {config.num_blocks} pages of {page} bytes from byte {tensor.offset}, "
            f"{tensor.block_stride} bytes apart, do not fit {config.total_size_bytes} bytes "
            "without overlap: plan again"
        )


def _validate_apart(config: KVCacheConfig) -> None:
    """Raise if a byte belongs to two pools.

    Pools are interleaved (one block stride, offsets tile it) or stored one after the other.
    """
    spans = sorted(
        (tensor.offset, _page_bytes(config, tensor), tensor.block_stride, index)
        for index, tensor in enumerate(config.kv_cache_tensors)
    )
    for (offset, page, stride, index), (next_offset, next_page, next_stride, other) in pairwise(
        spans
    ):
        is_behind = next_offset >= offset + (config.num_blocks - 1) * stride + page
        is_interleaved = (
            stride == next_stride
            and next_offset >= offset + page
            and next_offset + next_page <= spans[0][0] + stride
        )
        if not (is_behind or is_interleaved):
            raise ConfigurationError(
                f"pools {index} and {other} overlap (bytes {offset} and {next_offset}, pages of "
                f"{page} and {next_page}, block strides {stride} and {next_stride}): plan again"
            )


def _layers(config: KVCacheConfig) -> tuple[LayerLayout, ...]:
    pool_of: dict[str, int] = {}
    for index, tensor in enumerate(config.kv_cache_tensors):
        for name in tensor.shared_by:
            if name in pool_of:
                raise ConfigurationError(
                    f"layer {name} is in pools {pool_of[name]} and {index}: plan it once"
                )
            pool_of[name] = index
    layers: list[LayerLayout] = []
    for group, group_spec in enumerate(config.kv_cache_groups):
        used: dict[int, str] = {}
        for name in group_spec.layer_names:
            if name not in pool_of:
                raise ConfigurationError(f"layer {name} of group {group} has no pool: plan one")
            pool = pool_of.pop(name)
            if pool in used:
                raise ConfigurationError(
                    f"layers {used[pool]} and {name} of group {group} share pool {pool}: layers of "
                    "one group need pools of their own"
                )
            used[pool] = name
            layers.append(_layer(config, name, group, pool, group_spec.kv_cache_spec))
    if pool_of:
        raise ConfigurationError(f"layers {', '.join(pool_of)} have a pool but no KV cache group")
    return tuple(layers)


def _layer(
    config: KVCacheConfig, name: str, group: int, pool: int, spec: KVCacheSpec
) -> LayerLayout:
    tensor = config.kv_cache_tensors[pool]
    page = _page_bytes(config, tensor)
    is_state = spec.num_state_blocks is not None
    if not spec.page_tensors or (len(spec.page_tensors) > 1 and not is_state):
        raise ConfigurationError(
            f"layer {name}: specs of kind {spec.kind} say {len(spec.page_tensors)} page_tensors: "
            "say one where tokens are kept, or those of a state"
        )
    if spec.real_page_size_bytes > page:
        raise ConfigurationError(
            f"layer {name} needs {spec.real_page_size_bytes} bytes a block, pool {pool} has pages "
            f"of {page}"
        )
    alignment = spec.alignment_bytes
    if tensor.offset % alignment or tensor.block_stride % alignment:
        dtypes = ", ".join(dict.fromkeys(part.dtype for part in spec.page_tensors))
        raise ConfigurationError(
            f"layer {name}: pool {pool} starts at byte {tensor.offset} with block stride "
            f"{tensor.block_stride}, {dtypes} needs multiples of {alignment}"
        )
    return LayerLayout(
        name=name,
        group=group,
        offset_bytes=tensor.offset,
        block_stride_bytes=tensor.block_stride,
        content_bytes=spec.real_page_size_bytes,
        is_state=is_state,
        tensors=tuple(
            TensorLayout(
                dtype=part.dtype,
                offset_bytes=tensor.offset + part.offset_bytes,
                block_stride_bytes=tensor.block_stride,
                page_shape=part.shape,
                num_blocks=config.num_blocks,
            )
            for part in spec.page_tensors
        ),
    )


def _regions(config: KVCacheConfig) -> tuple[Region, ...]:
    """Return one region if the pages of a block are adjacent, else one per pool."""
    pages = sorted(
        (tensor.offset, tensor.block_stride, _page_bytes(config, tensor))
        for tensor in config.kv_cache_tensors
    )
    if not pages:
        return ()
    start = end = pages[0][0]
    for offset, stride, page in pages:
        if offset != end or stride != pages[0][1]:
            return tuple(Region(o, s, p) for o, s, p in pages)
        end = offset + page
    return (Region(start, pages[0][1], end - start),)


def canonical_kv_caches(
    rows: Sequence[torch.Tensor], layout: PoolLayout
) -> CanonicalKVCaches[torch.Tensor]:
    """Return a pool's rows of bytes with the layers of each group in them.

    `rows[i]` is `(num_blocks, width)` uint8, region `i` of `layout`. A group's reference to a
    tensor ends with the content of its last layer there, without the padding behind it.
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
    no such dimension, or the dimensions after it are not contiguous.
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
    """Return the index of the region whose first row contains a byte."""
    for index, region in enumerate(regions):
        if 0 <= offset_bytes - region.offset_bytes < region.width_bytes:
            return index
    raise ConfigurationError(f"byte {offset_bytes} of a block is in no region: plan again")


TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }
)
"""Torch's name of each dtype of a spec."""

ALLOCATION_ALIGNMENT_BYTES = 64
"""The allocation's length is rounded up to this, so that it can be viewed as wider words."""


class KVCachePool:
    """All KV bytes of one rank.

    `kv_caches[layer]` is the tensor that a model runner reads and writes, of shape
    `(num_blocks, *page_shape)` in the layer's dtype. Layers with a state have
    `state_caches[layer]` instead, one such tensor for each tensor of the state. Copies use `rows`:
    one `(num_blocks, width)` uint8 per region, block outermost; `canonical` are the same bytes with
    the layers of each group. All are views of `storage` and live as long as it.
    """

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        """Allocate zeroed memory on `device`.

        Raises NotEnoughMemoryError if the device has too little, ConfigurationError for a dtype
        that torch does not have.
        """
        self.layout = layout
        self.device = device
        dtypes = {tensor.dtype for layer in layout.layers for tensor in layer.tensors}
        unknown = dtypes - set(TORCH_DTYPES)
        if unknown:
            raise ConfigurationError(f"no torch dtype for {', '.join(sorted(unknown))}")
        size = -(-layout.size_bytes // ALLOCATION_ALIGNMENT_BYTES) * ALLOCATION_ALIGNMENT_BYTES
        try:
            self.storage = torch.zeros(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise NotEnoughMemoryError(
                f"{size} bytes for {layout.num_blocks} blocks do not fit on {device}: plan fewer "
                f"blocks ({error})"
            ) from error
        self.kv_caches: Mapping[str, torch.Tensor] = MappingProxyType(
            {
                layer.name: self._view(layer.tensors[0])
                for layer in layout.layers
                if not layer.is_state
            }
        )
        self.state_caches: Mapping[str, tuple[torch.Tensor, ...]] = MappingProxyType(
            {
                layer.name: tuple(self._view(tensor) for tensor in layer.tensors)
                for layer in layout.layers
                if layer.is_state
            }
        )
        self.rows: tuple[torch.Tensor, ...] = tuple(
            self.storage.as_strided(
                (layout.num_blocks, region.width_bytes),
                (region.stride_bytes, 1),
                region.offset_bytes,
            )
            for region in layout.regions
        )
        self.canonical = canonical_kv_caches(self.rows, layout)

    def words(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the whole allocation as one-dimensional `dtype`; a view."""
        return self.storage.view(dtype)

    def _view(self, tensor: TensorLayout) -> torch.Tensor:
        return self.words(TORCH_DTYPES[tensor.dtype]).as_strided(
            tensor.shape, tensor.strides, tensor.offset_bytes // tensor.element_bytes
        )
