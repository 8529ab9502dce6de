"""Where bytes lie: arithmetic of layouts, aliasing, and refusals of impossible plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.base.errors import ConfigurationError
from kvcache.offload import CanonicalKVCacheRef
from kvcache.planner.unify import lay_out, pools_of
from kvcache.specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from kvcache.worker.kv_cache_pool import KVCachePool, PoolLayout, split_by_block
from tests.worker.worker_support import (
    FULL,
    Harness,
    block_bytes,
    fill_block,
    full_groups,
    hybrid_groups,
    make_config,
)

CPU = torch.device("cpu")
STATE = MambaSpec(
    block_size=8,
    shapes=((3, 5), (2, 2, 2)),
    dtypes=("float16", "float32"),
    num_speculative_blocks=2,
    page_size_padded=FULL.page_size_bytes,
)


def test_block_first_keeps_a_block_of_all_layers_in_one_row() -> None:
    layout = PoolLayout.from_config(make_config(full_groups(3), num_blocks=5))
    page = FULL.page_size_bytes
    assert [region.width_bytes for region in layout.regions] == [3 * page]
    assert [layer.offset_bytes for layer in layout.layers] == [0, page, 2 * page]
    assert layout.layers[1].tensors[0].strides == (3 * page // 2, 32, 8, 4, 1)
    assert layout.block_bytes == 3 * page


def test_layer_first_has_a_row_per_pool() -> None:
    layout = PoolLayout.from_config(make_config(full_groups(3), 5, layout="layer_first"))
    page = FULL.page_size_bytes
    assert [(r.offset_bytes, r.stride_bytes, r.width_bytes) for r in layout.regions] == [
        (0, page, page),
        (5 * page, page, page),
        (10 * page, page, page),
    ]
    assert layout.block_bytes == 3 * page


@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_what_the_planner_lays_out_is_understood(layout: str) -> None:
    groups = hybrid_groups()
    tensors = lay_out(
        pools_of(groups), 7, "block_first" if layout == "block_first" else "layer_first"
    )
    pool = KVCachePool(PoolLayout.from_config(KVCacheConfig(7, tensors, groups)), CPU)
    assert set(pool.kv_caches) == {"full.0", "full.1", "window.0", "window.1"}
    assert pool.kv_caches["full.0"].shape == (7, 2, 4, 2, 4)
    assert pool.kv_caches["window.0"].shape == (7, 2, 2, 4, 4)


@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_every_layer_has_bytes_of_its_own_in_every_block(layout: str) -> None:
    config = make_config(
        full_groups(3), 5, "block_first" if layout == "block_first" else "layer_first"
    )
    pool = KVCachePool(PoolLayout.from_config(config), CPU)
    value = 0
    for tensor in pool.kv_caches.values():
        for block in range(5):
            value += 1
            tensor[block].fill_(value)
    value = 0
    for tensor in pool.kv_caches.values():
        for block in range(5):
            value += 1
            assert bool((tensor[block] == value).all())


def test_canonical_rows_are_the_bytes_of_the_layers() -> None:
    pool = KVCachePool(PoolLayout.from_config(make_config(full_groups(2), 4)), CPU)
    pool.kv_caches["layer.1"][3].fill_(1.5)
    row = pool.canonical.rows[0][3].numpy().tobytes()
    page = FULL.page_size_bytes
    assert row[:page] == bytes(page)
    assert row[page:] == pool.kv_caches["layer.1"][3].numpy().tobytes()
    assert pool.canonical.block_bytes == 2 * page


def test_layers_of_different_groups_share_the_bytes_of_their_pool() -> None:
    pool = KVCachePool(PoolLayout.from_config(make_config(hybrid_groups(), 6)), CPU)
    pool.kv_caches["full.1"][2].fill_(2.0)
    assert bool((pool.kv_caches["window.1"][2] == 2.0).all())
    assert bool((pool.kv_caches["window.0"] == 0).all())
    assert bool((pool.kv_caches["window.1"][3] == 0).all())


def test_mla_pages_have_no_key_value_axis() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, use_mla=True)
    groups = (KVCacheGroupSpec(("mla",), spec),)
    pool = KVCachePool(PoolLayout.from_config(make_config(groups, 3)), CPU)
    assert pool.kv_caches["mla"].shape == (3, 4, 1, 8)


@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_a_state_is_several_tensors_in_one_page(layout: str) -> None:
    groups = (KVCacheGroupSpec(("a", "b"), STATE), KVCacheGroupSpec(("c", "d"), FULL))
    tensors = lay_out(
        pools_of(groups), 5, "block_first" if layout == "block_first" else "layer_first"
    )
    pool = KVCachePool(PoolLayout.from_config(KVCacheConfig(5, tensors, groups)), CPU)
    assert set(pool.kv_caches) == {"c", "d"}
    assert {name: [t.shape[1:] for t in ts] for name, ts in pool.state_caches.items()} == {
        "a": [(3, 5), (2, 2, 2)],
        "b": [(3, 5), (2, 2, 2)],
    }
    first, second = pool.state_caches["b"]
    assert (first.dtype, second.dtype) == (torch.float16, torch.float32)
    pool.storage.zero_()
    first[3].fill_(1.0)
    page = pool.kv_caches["d"][3].contiguous().view(torch.uint8).flatten()
    assert page[:30].tolist() == [0x00, 0x3C] * 15
    assert int((page != 0).sum()) == 15
    second[3].fill_(1.0)
    page = pool.kv_caches["d"][3].contiguous().view(torch.uint8).flatten()
    assert page[30:64].tolist() == [0, 0] + [0x00, 0x00, 0x80, 0x3F] * 8  # aligned to the float
    assert not bool(page[64:].any())
    for tensor in (first, second):
        tensor[3].zero_()
    assert not bool(pool.storage.any())


def test_states_that_do_not_start_at_their_elements_are_refused() -> None:
    groups = (KVCacheGroupSpec(("a",), STATE),)
    config = make_config(groups, 4)
    (tensor,) = config.kv_cache_tensors
    broken = replace(config, kv_cache_tensors=(replace(tensor, block_stride=130),), num_blocks=1)
    with pytest.raises(
        ConfigurationError,
        match=r"^layer a: pool 0 starts at byte 0 with block stride 130, float16, float32 needs "
        r"multiples of 4$",
    ):
        PoolLayout.from_config(broken)


def test_a_kind_that_names_no_tensors_has_no_layout() -> None:
    class Unseen(FullAttentionSpec):
        page_tensors = ()

    groups = (KVCacheGroupSpec(("a",), Unseen(4, 2, 4)),)
    with pytest.raises(
        ConfigurationError, match=r"^layer a: specs of kind full say 0 page_tensors: say one where"
    ):
        PoolLayout.from_config(make_config(groups, 4))


def test_tables_are_as_wide_as_each_kind_needs() -> None:
    specs = {
        FULL: 8,
        replace(STATE, mamba_cache_mode="align"): 4 + 2,
        STATE: 1 + 2,
        CrossAttentionSpec(4, 2, 4, max_encoder_tokens=10): 3,
    }
    groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    tables = Harness.make(make_config(groups), max_model_len=32).worker.block_tables
    assert [tables[group].shape for group in range(4)] == [(4, n) for n in specs.values()]


def test_padded_pages_leave_their_padding_alone() -> None:
    spec = replace(FULL, page_size_padded=FULL.page_size_bytes + 64)
    groups = (KVCacheGroupSpec(("a", "b"), spec),)
    pool = KVCachePool(PoolLayout.from_config(make_config(groups, 3)), CPU)
    pool.kv_caches["a"].fill_(1.0)
    pool.kv_caches["b"].fill_(1.0)
    row = pool.canonical.rows[0][1]
    assert int((row != 0).sum()) == 2 * FULL.page_size_bytes // 2  # 1.0 is 00 3c
    assert bool((row[FULL.page_size_bytes : FULL.page_size_bytes + 64] == 0).all())


def test_a_model_without_attention_has_no_bytes() -> None:
    pool = KVCachePool(PoolLayout.from_config(KVCacheConfig(1, (), ())), CPU)
    assert pool.canonical.tensors == ()
    assert pool.layout.block_bytes == 0


def test_overlapping_pools_are_refused() -> None:
    config = make_config(full_groups(2), 4)
    first, second = config.kv_cache_tensors
    broken = replace(config, kv_cache_tensors=(first, replace(second, offset=2)))
    with pytest.raises(ConfigurationError, match=r"pools 0 and 1 overlap \(bytes 0 and 2"):
        PoolLayout.from_config(broken)


def test_a_layer_without_a_pool_is_refused() -> None:
    config = make_config(full_groups(2), 4)
    broken = replace(config, kv_cache_groups=full_groups(3))
    with pytest.raises(
        ConfigurationError, match=r"^layer layer\.2 of group 0 has no pool: plan one$"
    ):
        PoolLayout.from_config(broken)


def test_two_layers_of_one_group_in_one_pool_are_refused() -> None:
    config = make_config(hybrid_groups(), 4)
    groups = (KVCacheGroupSpec(("full.0", "full.1", "window.0", "window.1"), FULL),)
    with pytest.raises(ConfigurationError, match="share pool 0"):
        PoolLayout.from_config(replace(config, kv_cache_groups=groups))


def test_pages_that_leave_the_allocation_are_refused() -> None:
    config = make_config(full_groups(1), 4)
    (tensor,) = config.kv_cache_tensors
    broken = replace(config, kv_cache_tensors=(replace(tensor, block_stride=1000),))
    with pytest.raises(ConfigurationError, match="do not fit"):
        PoolLayout.from_config(broken)


def test_block_bytes_reads_what_was_written() -> None:
    worker = Harness.make().worker
    fill_block(worker, 3, 1.0)
    assert block_bytes(worker, 3) == b"\x00\x3c" * (FULL.page_size_bytes)


# --- canonical KV caches


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
