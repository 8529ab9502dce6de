"""Layers of a rank as canonical KV caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.base.errors import ConfigurationError
from kvcache.offload import CanonicalKVCacheRef
from kvcache.specs import FullAttentionSpec, KVCacheGroupSpec
from kvcache.worker.kv_cache_pool import KVCachePool, PoolLayout, split_by_block
from tests.worker.worker_support import make_config

CPU = torch.device("cpu")
FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype="float16")


def test_each_group_says_how_much_of_a_row_is_content() -> None:
    padded = replace(FULL, page_size_padded=FULL.page_size_bytes + 64)
    groups = (KVCacheGroupSpec(("a", "b"), padded), KVCacheGroupSpec(("c",), padded))
    pool = KVCachePool(PoolLayout.from_config(make_config(groups, 3)), CPU)
    caches = pool.canonical
    page = padded.page_size_bytes
    assert list(caches.group_refs[0]) == [CanonicalKVCacheRef(0, page + FULL.page_size_bytes)]
    assert caches.group_refs[1] == (CanonicalKVCacheRef(0, FULL.page_size_bytes),)
    assert caches.num_blocks == 3
    assert caches.block_bytes == 2 * page
    assert caches.tensors[0].tensor.dtype == torch.int8
    pool.kv_caches["a"].fill_(1.0)
    assert torch.equal(caches.rows[0].view(torch.uint8), pool.rows[0])


def test_keys_before_values_are_two_tensors_of_the_same_bytes() -> None:
    layer = torch.arange(2 * 5 * 3 * 4, dtype=torch.float16).reshape(2, 5, 3, 4)
    keys, values = split_by_block(layer, 1)
    assert keys.num_blocks == values.num_blocks == 5
    assert keys.page_bytes == 3 * 4 * 2
    assert torch.equal(keys.tensor[2], layer[0, 2].flatten().view(torch.int8))
    assert torch.equal(values.tensor[4], layer[1, 4].flatten().view(torch.int8))
    values.tensor[1].fill_(0)
    assert bool((layer[1, 1] == 0).all())


def test_blocks_outermost_are_one_tensor_even_with_gaps_between_them() -> None:
    layer = torch.zeros(5, 7, 4, dtype=torch.float32)[:, :3]
    (rows,) = split_by_block(layer, 0)
    assert (rows.num_blocks, rows.page_bytes) == (5, 3 * 4 * 4)
    rows.tensor[3].fill_(1)
    assert bool((layer[3] != 0).all())
    assert bool((layer[[0, 1, 2, 4]] == 0).all())


@pytest.mark.parametrize("block_dim", [-1, 3])
def test_a_block_dimension_that_is_not_there_is_refused(block_dim: int) -> None:
    with pytest.raises(ConfigurationError, match=r"of shape \(2, 3, 4\): pass one from 0 to 2"):
        split_by_block(torch.zeros(2, 3, 4), block_dim)


def test_blocks_that_are_not_contiguous_are_refused() -> None:
    layer = torch.zeros(4, 6, 8).transpose(1, 2)
    with pytest.raises(ConfigurationError, match="its blocks cannot be copied as bytes"):
        split_by_block(layer, 0)
