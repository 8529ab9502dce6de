"""Specs: sizes by hand arithmetic, merging, refusals, and the way to plain values and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.errors import ConfigurationError, MalformedMessageError
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    dtype_size_bytes,
    spec_from_dict,
)


def full(**changes: Any) -> FullAttentionSpec:
    return replace(FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64), **changes)


def window(tokens: int, **changes: Any) -> SlidingWindowSpec:
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, sliding_window=tokens)
    return replace(spec, **changes)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1), ("uint8", 1)]
)
def test_a_dtype_is_known_by_its_name(dtype: str, size: int) -> None:
    assert dtype_size_bytes(dtype) == size


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    message = (
        "dtype 'float61' is not known: use one of float32, float16, bfloat16, float8_e4m3fn, "
        "float8_e5m2, int8, uint8"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        full(dtype="float61")


def test_a_page_holds_a_key_and_a_value_per_token_and_head() -> None:
    # 2 (key, value) * 16 tokens * 2 heads * 64 elements * 2 bytes
    assert full().page_size_bytes == 8192
    assert full().page_shape == (2, 16, 2, 64)
    assert full(dtype="int8").page_size_bytes == 4096


def test_a_page_of_mla_holds_one_vector_per_token() -> None:
    spec = FullAttentionSpec(16, 1, 576, "bfloat16", use_mla=True)
    assert spec.page_shape == (16, 1, 576)
    assert spec.page_size_bytes == 16 * 576 * 2


def test_padding_counts_as_page_but_not_as_content() -> None:
    spec = full(page_size_padded=10_000)
    assert (spec.page_size_bytes, spec.real_page_size_bytes) == (10_000, 8192)


@pytest.mark.parametrize("padded", [8190, 8193])
def test_padding_below_the_content_or_across_elements_is_refused(padded: int) -> None:
    message = (
        f"page_size_padded is {padded} bytes, but a page holds 8192 bytes of float16: pad to at "
        "least that, in multiples of 2"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        full(page_size_padded=padded)


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size", "sliding_window"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "16"])
def test_a_size_that_cannot_be_meant_is_refused(field: str, value: object) -> None:
    message = f"{field} is {value!r}, but must be a whole number of at least 1: raise it"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        window(128, **{field: value})


def test_full_attention_keeps_every_token_in_whole_blocks() -> None:
    assert full().max_memory_usage_bytes(1000, 64) == 63 * 8192  # ceil(1000 / 16)
    assert full().max_memory_usage_bytes(1008, 64) == 63 * 8192
    assert full().max_memory_usage_bytes(1009, 64) == 64 * 8192


def test_a_window_keeps_itself_the_step_and_one_block() -> None:
    # 128 - 1 + 64 = 191 tokens = 12 blocks, one more because the window starts anywhere
    assert window(128).max_memory_usage_bytes(10_000, 64) == 13 * 8192
    # 128 - 1 + 65 = 192 tokens = 12 blocks; one token more starts the next
    assert window(128).max_memory_usage_bytes(10_000, 65) == 13 * 8192
    assert window(128).max_memory_usage_bytes(10_000, 66) == 14 * 8192


def test_a_window_never_keeps_more_than_the_model_length() -> None:
    assert window(128).max_memory_usage_bytes(100, 8192) == (7 + 1) * 8192


def test_equal_specs_merge_to_themselves() -> None:
    assert SlidingWindowSpec.merge([window(128), window(128)]) == window(128)
    assert FullAttentionSpec.merge([full(), full()]) == full()


def test_full_attention_merges_with_and_without_a_remembered_window() -> None:
    standing_in = window(128).as_full_attention()
    assert standing_in == full(sliding_window=128)
    merged = FullAttentionSpec.merge([full(), standing_in, full()])
    assert merged == full(sliding_window=128)


def test_contradicting_remembered_limits_do_not_merge() -> None:
    specs = [full(sliding_window=256), full(sliding_window=128), full(attention_chunk_size=64)]
    message = (
        "full attention layers of one KV cache group remember different limits (window 128, "
        "window 256, chunk 64): give them groups of their own"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        FullAttentionSpec.merge(specs)


@pytest.mark.parametrize(
    ("specs", "difference"),
    [
        ([full(), full(head_size=32)], "head_size (64, 32)"),
        ([full(), full(use_mla=True)], "use_mla (False, True)"),
        ([window(128), window(64)], "sliding_window (128, 64)"),
        ([window(128), full()], "kind (sliding_window, full)"),
    ],
)
def test_specs_that_differ_do_not_merge(specs: list[KVCacheSpec], difference: str) -> None:
    message = f"layers of one KV cache group differ in {difference}: give them groups of their own"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        type(specs[0]).merge(specs)


def test_nothing_does_not_merge() -> None:
    with pytest.raises(ConfigurationError, match="at least one layer"):
        FullAttentionSpec.merge([])


def test_a_window_and_a_chunk_cannot_both_be_remembered() -> None:
    with pytest.raises(ConfigurationError, match="window of 8 tokens and a chunk of 4 tokens"):
        full(sliding_window=8, attention_chunk_size=4)


# ---------------------------------------------------------------------------------------------
# Plain values
# ---------------------------------------------------------------------------------------------

specs = st.one_of(
    st.builds(
        FullAttentionSpec,
        block_size=st.integers(1, 64),
        num_kv_heads=st.integers(1, 8),
        head_size=st.integers(1, 256),
        dtype=st.sampled_from(["float16", "float32", "int8"]),
        use_mla=st.booleans(),
        sliding_window=st.none() | st.integers(1, 4096),
    ),
    st.builds(
        SlidingWindowSpec,
        block_size=st.integers(1, 64),
        num_kv_heads=st.integers(1, 8),
        head_size=st.integers(1, 256),
        sliding_window=st.integers(1, 4096),
    ),
)
configs = st.builds(
    KVCacheConfig,
    num_blocks=st.integers(0, 1000),
    kv_cache_tensors=st.lists(
        st.builds(
            KVCacheTensor,
            size=st.integers(0, 1 << 40),
            shared_by=st.lists(st.text(max_size=5), max_size=3, unique=True),
            offset=st.integers(0, 1 << 40),
        ),
        max_size=3,
    ),
    kv_cache_groups=st.lists(
        st.builds(
            KVCacheGroupSpec,
            layer_names=st.lists(st.text(max_size=5), max_size=3, unique=True),
            kv_cache_spec=specs,
        ),
        max_size=3,
    ),
    host_blocks=st.integers(0, 1000),
    layout=st.sampled_from(["block_first", "layer_first"]),
)


@settings(deadline=None)
@given(configs)
def test_a_plan_survives_the_wire(config: KVCacheConfig) -> None:
    packed = msgpack.packb(config.to_dict())
    restored = KVCacheConfig.from_dict(msgpack.unpackb(packed))
    assert restored == config
    assert hash(restored) == hash(config)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("full"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["kind", "num_blocks", "kv_cache_groups", "kv_cache_tensors", "kv_cache_spec"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    )
)
def test_plain_values_that_are_no_plan_are_refused(data: object) -> None:
    with pytest.raises(MalformedMessageError):
        KVCacheConfig.from_dict({"num_blocks": data, "kv_cache_groups": data})
    with pytest.raises(MalformedMessageError):
        spec_from_dict(data)


def test_a_plan_with_a_wrong_value_is_refused_by_name() -> None:
    group = KVCacheGroupSpec(["a"], full())
    data = KVCacheConfig(1, [KVCacheTensor(8192, ["a"])], [group]).to_dict()
    data["kv_cache_groups"][0]["kv_cache_spec"]["block_size"] = 0
    message = (
        "FullAttentionSpec: block_size is 0, but must be a whole number of at least 1: raise it"
    )
    with pytest.raises(MalformedMessageError, match=f"^{re.escape(message)}$"):
        KVCacheConfig.from_dict(data)


def test_unknown_fields_and_kinds_are_refused_by_name() -> None:
    data = full().to_dict()
    with pytest.raises(MalformedMessageError, match=r"^FullAttentionSpec: unknown fields colour$"):
        spec_from_dict({**data, "colour": 1})
    message = "a KV cache spec of kind 'mamba' is not known: known kinds are full, sliding_window"
    with pytest.raises(MalformedMessageError, match=f"^{re.escape(message)}$"):
        spec_from_dict({**data, "kind": "mamba"})


def test_a_single_name_is_no_list_of_names() -> None:
    with pytest.raises(ConfigurationError, match="shared_by is 'layer': give a list"):
        KVCacheTensor(1, "layer")


def test_a_layer_stands_in_a_list_once() -> None:
    message = "layer_names has a more than once: name every layer once"
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        KVCacheGroupSpec(("a", "b", "a"), full())


def test_more_blocks_than_int32_can_name_are_refused() -> None:
    assert KVCacheConfig(2**31 - 1, (), ()).num_blocks == 2**31 - 1
    with pytest.raises(ConfigurationError, match=r"^num_blocks is 2147483648, but block ids are "):
        KVCacheConfig(2**31, (), ())


def test_a_number_too_long_to_write_out_is_refused_all_the_same() -> None:
    with pytest.raises(ConfigurationError, match=r"^num_blocks is "):
        KVCacheConfig(10**5000, (), ())
    with pytest.raises(MalformedMessageError, match=r"^KVCacheTensor: size is "):
        KVCacheTensor.from_dict({"size": -(10**5000), "shared_by": []})
