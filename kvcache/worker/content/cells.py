"""The bytes that a position requires in the layers of a group, written and compared.

A page has a cell per token, or one cell that is a whole state. Layers whose pages lie at a constant
distance are handled together, as one strided tensor of words. CPU and CUDA run the same torch code
(int64 arithmetic wraps alike). Layouts that are neither pages of tokens nor states are refused.

For a cell with sum S, layer seed L and word k of its K and V (heads and all) or of its state:

    h = (mix(S) ^ L) * ODD;  h ^= h >> 29;  word[k] = top bits of h * odd(k)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch

from kvcache.base.arrays import UInt64Array, mix
from kvcache.base.errors import ConfigurationError
from kvcache.worker.content.rows import name_seed
from kvcache.worker.kv_cache_pool import KVCachePool, LayerLayout

SPREAD = -0x61C8864680B583EB  # odd: 2^64 / golden ratio, as int64

WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PageCells:
    """How one page's content is divided: `num_cells` tokens of `parts` (keys, values) each."""

    num_cells: int
    parts: int
    part_bytes: int

    @classmethod
    def of(cls, layer: LayerLayout) -> PageCells:
        """Return the cells of a layer's pages; raises ConfigurationError if it has none."""
        if layer.is_state:
            return cls(1, 1, layer.content_bytes)
        (tensor,) = layer.tensors
        shape = tensor.page_shape
        if len(shape) not in (3, 4):
            raise ConfigurationError(
                f"layer {layer.name}: pages of shape {shape} have no bytes per token"
            )
        return cls(shape[-3], prod(shape[:-3]), shape[-2] * shape[-1] * tensor.element_bytes)


@dataclass(frozen=True)
class WrongCell:
    """The first wrong cell of a comparison."""

    block_index: int
    offset: int
    layer: str
    expected: bytes
    found: bytes


def _seeds(names: Sequence[str], rank: int) -> torch.Tensor:
    rank_seed = mix(np.array([rank + 1], dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    seeds = np.array([name_seed(name.encode()) for name in names], dtype=np.uint64) ^ rank_seed
    return torch.from_numpy(seeds.view(np.int64))


class LayerBundle:
    """Layers of one group with equal pages at a constant distance, as one tensor of words.

    `pages` has shape `(num_blocks, layers, parts, num_cells, words)` and `cells` the same bytes
    as `(num_blocks, num_cells, layers, parts, words)`; parts are keys and values.
    """

    def __init__(self, pool: KVCachePool, layers: Sequence[LayerLayout], rank: int) -> None:
        """View `layers` of `pool`; the caller has checked that they can be viewed together."""
        first, cells = layers[0], PageCells.of(layers[0])
        self.names = tuple(layer.name for layer in layers)
        self.num_cells, parts, part_bytes = cells.num_cells, cells.parts, cells.part_bytes
        distance = layers[1].offset_bytes - first.offset_bytes if len(layers) > 1 else 0
        self._word_bytes = gcd(
            8, part_bytes, first.offset_bytes, first.block_stride_bytes, distance
        )
        words = part_bytes // self._word_bytes
        self.cell_bytes = parts * part_bytes * len(layers)
        block, layer, offset = (
            length // self._word_bytes
            for length in (first.block_stride_bytes, distance, first.offset_bytes)
        )
        self.pages = pool.words(WORD_DTYPES[self._word_bytes]).as_strided(
            (pool.layout.num_blocks, len(layers), parts, self.num_cells, words),
            (block, layer, self.num_cells * words, words, 1),
            offset,
        )
        self.cells = self.pages.permute(0, 3, 1, 2, 4)
        self._seeds = _seeds(self.names, rank).to(pool.device)
        index = np.arange(1, parts * words + 1, dtype=np.uint64)
        odds = torch.from_numpy((mix(index) | np.uint64(1)).view(np.int64))
        self._odds = odds.reshape(parts, words).to(pool.device)
        self._device = pool.device

    def write(self, block_ids: torch.Tensor, offsets: torch.Tensor, mixed: torch.Tensor) -> None:
        """Write cell `offsets[i]` of block `block_ids[i]`; `mixed`: int64 sums; shapes `(n,)`."""
        hashes = self._hashes(mixed[:, None] ^ self._seeds)
        words = self._narrow(hashes[:, :, None, None] * self._odds)
        self.cells[block_ids.to(self._device), offsets.to(self._device)] = words

    def find_wrong(
        self, block_ids: torch.Tensor, mixed: torch.Tensor, ends: torch.Tensor
    ) -> WrongCell | None:
        """Compare cells `[0, ends[i])` of block `block_ids[i]`; `mixed` is `(n, num_cells)`.

        Returns the first difference, in order of blocks, layers and cells, or None.
        """
        hashes = self._hashes(mixed[:, None, :] ^ self._seeds[:, None])
        expected = self._narrow(hashes[:, :, None, :, None] * self._odds[:, None, :])
        found = self.pages.index_select(0, block_ids.to(self._device))
        if torch.equal(found, expected):
            return None
        cell = torch.arange(self.num_cells, device=self._device)
        is_live = cell < ends.to(self._device)[:, None]
        is_wrong = (found != expected).any(4).any(2) & is_live[:, None, :]
        if not bool(is_wrong.any()):
            return None
        block, layer, offset = (int(i) for i in is_wrong.nonzero()[0])
        return WrongCell(
            block_index=block,
            offset=offset,
            layer=self.names[layer],
            expected=expected[block, layer, :, offset].cpu().numpy().tobytes(),
            found=found[block, layer, :, offset].cpu().numpy().tobytes(),
        )

    def mixed(self, sums: UInt64Array) -> torch.Tensor:
        """Return sums ready for `write` and `find_wrong`, on the device."""
        return torch.from_numpy(mix(sums).view(np.int64)).to(self._device)

    def _hashes(self, seeded: torch.Tensor) -> torch.Tensor:
        hashes = seeded.mul_(SPREAD)
        return hashes.bitwise_xor_(hashes >> 29)

    def _narrow(self, words: torch.Tensor) -> torch.Tensor:
        if self._word_bytes == 8:
            return words
        return (words >> (64 - 8 * self._word_bytes)).to(WORD_DTYPES[self._word_bytes])


def bundle_layers(pool: KVCachePool, group: int, rank: int) -> list[LayerBundle]:
    """Return the layers of `group` in as few bundles as their layout allows."""
    layers = sorted(
        (layer for layer in pool.layout.layers if layer.group == group),
        key=lambda layer: layer.offset_bytes,
    )
    bundles: list[list[LayerLayout]] = []
    for layer in layers:
        if bundles and _continues(bundles[-1], layer):
            bundles[-1].append(layer)
        else:
            bundles.append([layer])
    return [LayerBundle(pool, bundle, rank) for bundle in bundles]


def _continues(bundle: Sequence[LayerLayout], layer: LayerLayout) -> bool:
    last = bundle[-1]
    is_alike = (
        PageCells.of(layer) == PageCells.of(last)
        and layer.block_stride_bytes == last.block_stride_bytes
    )
    return is_alike and (
        len(bundle) == 1
        or layer.offset_bytes - last.offset_bytes == last.offset_bytes - bundle[-2].offset_bytes
    )
