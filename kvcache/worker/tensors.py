"""The rank's memory: one allocation, seen as layers by the model and as rows of bytes by copies.

Stands behind layout.py, which says where things lie. The same code allocates on CPU and CUDA. Pools
are shared by one layer of each group, so views of different layers may be the same bytes; who may
use which block is the coordinator's decision, not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError
from kvcache.worker.canonical import canonical_kv_caches
from kvcache.worker.layout import PoolLayout, TensorLayout

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
"""Torch's own name of each dtype that a spec may have."""

ALLOCATION_ALIGNMENT_BYTES = 64
"""The allocation's length is rounded up to this, so that it can be seen as wider words."""


class KVCachePool:
    """All KV bytes of one rank.

    `kv_caches[layer]` is the tensor that a model runner reads and writes, of shape
    `(num_blocks, *page_shape)` in the layer's dtype. Layers that keep a state have
    `state_caches[layer]` instead: one such tensor for each of the state's. Copies use `rows`: one
    `(num_blocks, width)` uint8 per region, block outermost; `canonical` are the same bytes, with
    what each group has in them. All of them are views of `storage` and live as long as it does.
    """

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        """Allocate zeroed memory on `device`.

        Raises NotEnoughMemoryError when the device has too little, ConfigurationError for a dtype
        torch does not have.
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
