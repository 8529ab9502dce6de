"""Specs: sizes by hand arithmetic, merging, refusals, and conversion to plain values and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.base.errors import ConfigurationError, MalformedMessageError
from kvcache.specs import (
    SPEC_KINDS,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    dtype_size_bytes,
    spec_from_dict,
)


def full(**changes: Any) -> FullAttentionSpec:
    return replace(FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64), **changes)


def window(tokens: int, **changes: Any) -> SlidingWindowSpec:
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, sliding_window=tokens)
    return replace(spec, **changes)


def chunked(tokens: int, **changes: Any) -> ChunkedLocalAttentionSpec:
    spec = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, attention_chunk_size=tokens
    )
    return replace(spec, **changes)


def cross(tokens: int, **changes: Any) -> CrossAttentionSpec:
    spec = CrossAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, max_encoder_tokens=tokens
    )
    return replace(spec, **changes)


def mla(**changes: Any) -> MLAAttentionSpec:
    return replace(MLAAttentionSpec(16, 1, 576, "bfloat16"), **changes)


def mamba(**changes: Any) -> MambaSpec:
    spec = MambaSpec(16, shapes=((64, 3), (64, 16)), dtypes=("float16", "float32"))
    return replace(spec, **changes)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1), ("uint8", 1), ("float64", 8)],
)
def test_a_dtype_is_known_by_its_name(dtype: str, size: int) -> None:
    assert dtype_size_bytes(dtype) == size


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    message = (
        "dtype 'float61' is not known: use one of float32, float16, bfloat16, float8_e4m3fn, "
        "float8_e5m2, int8, uint8, float64"
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
    message = f"{field} is {value!r}: pass an integer of at least 1"
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
# MLA, chunks, cross attention
# ---------------------------------------------------------------------------------------------


def test_latent_attention_keeps_one_vector_per_token() -> None:
    assert mla().page_shape == (16, 1, 576)
    assert mla().page_size_bytes == 16 * 576 * 2
    assert mla().max_memory_usage_bytes(1000, 64) == 63 * 16 * 576 * 2  # ceil(1000 / 16)
    assert mla().reads_whole_prefix
    assert mla().can_prefix_cache
    assert mla().as_full_attention() == mla()


def test_latent_attention_cannot_be_turned_off_in_its_own_kind() -> None:
    message = "use_mla is False in a spec of kind 'mla': leave it out, or use FullAttentionSpec"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        mla(use_mla=False)


def test_a_chunk_keeps_itself_and_the_step() -> None:
    # 128 + 64 = 192 tokens = 12 blocks; a chunk begins at a block, so that none is added
    assert chunked(128).max_memory_usage_bytes(10_000, 64) == 12 * 8192
    assert chunked(128).max_memory_usage_bytes(10_000, 65) == 13 * 8192
    assert chunked(128).max_memory_usage_bytes(100, 8192) == 7 * 8192  # the model's length


def test_a_chunk_drops_what_lies_before_the_chunk_of_the_next_token() -> None:
    skipped = [chunked(32).num_skipped_tokens(computed) for computed in (0, 31, 32, 63, 64, 100)]
    assert skipped == [0, 0, 32, 32, 64, 96]
    assert not chunked(32).reads_whole_prefix


def test_a_window_drops_what_the_next_token_does_not_read() -> None:
    skipped = [window(4).num_skipped_tokens(computed) for computed in (0, 3, 4, 10)]
    assert skipped == [0, 0, 1, 7]


def test_a_chunk_that_would_begin_inside_a_block_is_refused() -> None:
    message = (
        "attention_chunk_size is 40 tokens, no multiple of the block size 16, so that a chunk "
        "would begin inside a block: choose a block size that divides it"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        chunked(40)
    assert chunked(96).with_block_size(48) == chunked(96, block_size=48)
    assert chunked(96).with_block_size(64) is None


def test_cross_attention_keeps_the_encoder_and_does_not_grow() -> None:
    # ceil(1500 / 16) = 94 blocks, whatever the length of the request
    assert cross(1500).max_memory_usage_bytes(1, 1) == 94 * 8192
    assert cross(1500).max_memory_usage_bytes(10**6, 10**4) == 94 * 8192
    assert cross(1500).keeps_encoder_tokens
    assert not cross(1500).can_prefix_cache
    assert cross(1500).num_skipped_tokens(10**6) == 0
    assert cross(1500).as_full_attention() is None


def test_what_stands_in_for_a_chunk_remembers_it() -> None:
    assert chunked(128).as_full_attention() == full(attention_chunk_size=128)
    padded = chunked(128, page_size_padded=10_000).as_full_attention()
    assert padded == full(attention_chunk_size=128, page_size_padded=10_000)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_limits_that_cannot_be_meant_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^attention_chunk_size is .* at least 1$"):
        chunked(128, attention_chunk_size=value)
    with pytest.raises(ConfigurationError, match=r"^max_encoder_tokens is .* at least 1$"):
        cross(128, max_encoder_tokens=value)


# ---------------------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------------------


def test_a_page_holds_the_tensors_of_one_state() -> None:
    # 64 * 3 * 2 = 384 bytes, then 64 * 16 * 4 = 4096
    assert mamba().state_offsets_bytes == (0, 384)
    assert mamba().real_page_size_bytes == 384 + 4096
    assert mamba().page_size_bytes == 4480
    assert mamba(block_size=1024).page_size_bytes == 4480  # tokens do not matter


def test_each_tensor_of_a_state_starts_at_a_multiple_of_its_element() -> None:
    spec = mamba(shapes=((3,), (5,), (1,)), dtypes=("int8", "float32", "float16"))
    # 3 bytes, one to align, 5 * 4, then 2; the page ends where the next one can start
    assert spec.state_offsets_bytes == (0, 4, 24)
    assert (spec.real_page_size_bytes, spec.alignment_bytes, spec.page_size_bytes) == (26, 4, 28)


@pytest.mark.parametrize(
    ("mode", "speculative", "states"),
    [("none", 0, 1), ("none", 3, 4), ("align", 0, 2), ("align", 3, 5)],
)
def test_a_request_holds_few_states_whatever_its_length(
    mode: str, speculative: int, states: int
) -> None:
    spec = mamba(mamba_cache_mode=mode, num_speculative_blocks=speculative)
    assert spec.num_state_blocks == states
    assert spec.max_memory_usage_bytes(1, 1) == states * 4480
    assert spec.max_memory_usage_bytes(10**6, 10**4) == states * 4480


def test_only_states_at_the_ends_of_blocks_can_be_cached_and_skipped() -> None:
    assert not mamba().can_prefix_cache
    assert mamba().num_skipped_tokens(1000) == 0
    aligned = mamba(mamba_cache_mode="align")
    assert aligned.can_prefix_cache
    # The newest state after 16 tokens is in block 0, after 17 in block 1.
    skipped = [aligned.num_skipped_tokens(computed) for computed in (0, 1, 16, 17, 32, 33)]
    assert skipped == [0, 0, 0, 16, 16, 32]


def test_a_state_can_be_kept_at_other_places_without_a_larger_page() -> None:
    assert mamba().with_block_size(80) == mamba(block_size=80)
    assert mamba().with_page_size_padded(8192) == mamba(page_size_padded=8192)
    assert mamba(page_size_padded=8192).page_size_bytes == 8192
    assert mamba(page_size_padded=8192).real_page_size_bytes == 4480


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtypes": ("float16",)},
            "a state of 2 shapes and 1 dtypes: give one dtype per shape, and at least one of each",
        ),
        (
            {"shapes": (), "dtypes": ()},
            "a state of 0 shapes and 0 dtypes: give one dtype per shape, and at least one of each",
        ),
        ({"dtypes": "float16"}, "dtypes is 'float16': give one dtype per state tensor"),
        ({"dtypes": None}, "dtypes is None: give one dtype per state tensor"),
        ({"shapes": (3, 4)}, "shapes is (3, 4): give one list of sizes per state tensor"),
        ({"shapes": None}, "shapes is None: give one list of sizes per state tensor"),
        (
            {"shapes": ((64, 0), (1,))},
            "a size of a state's shape is 0: pass an integer of at least 1",
        ),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode is 'all': use one of none, align"),
        (
            {"num_speculative_blocks": -1},
            "num_speculative_blocks is -1: pass an integer of at least 0",
        ),
        (
            {"page_size_padded": 4476},
            "page_size_padded is 4476 bytes, but a state takes 4480 bytes of float16, float32: pad "
            "to at least that, in multiples of 4",
        ),
        (
            {"page_size_padded": 4482},
            "page_size_padded is 4482 bytes, but a state takes 4480 bytes of float16, float32: pad "
            "to at least that, in multiples of 4",
        ),
    ],
)
def test_a_state_that_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        mamba(**changes)


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        (full(), 63),  # ceil(1000 / 16), as for every kind that has a column per block of tokens
        (mla(), 63),
        (window(128), 63),
        (chunked(128), 63),
        (cross(100), 7),  # ceil(100 / 16)
        (mamba(), 1),
        (mamba(num_speculative_blocks=2), 3),
        (mamba(mamba_cache_mode="align", num_speculative_blocks=2), 65),
    ],
)
def test_block_tables_have_as_many_columns_as_a_request_can_need(
    spec: KVCacheSpec, columns: int
) -> None:
    assert spec.max_table_blocks(1000) == columns


def test_only_states_limit_drafts_and_only_cross_attention_has_an_encoder() -> None:
    assert [spec.max_draft_tokens for spec in (full(), window(128), mla())] == [None] * 3
    assert mamba(num_speculative_blocks=2).max_draft_tokens == 2
    assert mamba().max_draft_tokens == 0
    assert cross(100).encoder_token_limit == 100
    assert [spec.encoder_token_limit for spec in (full(), mamba())] == [0, 0]


def test_every_kind_merges_with_its_equals_only() -> None:
    kinds: list[KVCacheSpec] = [full(), mla(), window(128), chunked(128), mamba(), cross(100)]
    assert {spec.kind for spec in kinds} == set(SPEC_KINDS)
    for spec in kinds:
        assert type(spec).merge([spec, spec]) == spec
        for other in kinds:
            if other.kind != spec.kind:
                with pytest.raises(ConfigurationError, match=f"kind .{spec.kind}, {other.kind}"):
                    type(spec).merge([spec, other])


@pytest.mark.parametrize(
    ("specs", "difference"),
    [
        ([chunked(128), chunked(64)], "attention_chunk_size (128, 64)"),
        ([cross(100), cross(200)], "max_encoder_tokens (100, 200)"),
        ([mamba(), mamba(mamba_cache_mode="align")], "mamba_cache_mode (none, align)"),
        ([mamba(), mamba(num_speculative_blocks=1)], "num_speculative_blocks (0, 1)"),
    ],
)
def test_layers_of_a_kind_that_differ_do_not_merge(
    specs: list[KVCacheSpec], difference: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"differ in {difference}: ")):
        type(specs[0]).merge(specs)


# ---------------------------------------------------------------------------------------------
# Plain values
# ---------------------------------------------------------------------------------------------

sizes = {
    "block_size": st.integers(1, 64),
    "num_kv_heads": st.integers(1, 8),
    "head_size": st.integers(1, 256),
}
tensors = st.lists(
    st.tuples(
        st.lists(st.integers(1, 64), min_size=1, max_size=3),
        st.sampled_from(["float16", "float32", "int8"]),
    ),
    min_size=1,
    max_size=3,
)
specs = st.one_of(
    st.builds(MLAAttentionSpec, **sizes),
    st.builds(CrossAttentionSpec, **sizes, max_encoder_tokens=st.integers(1, 4096)),
    st.tuples(st.integers(1, 64), st.integers(1, 64)).map(
        lambda drawn: ChunkedLocalAttentionSpec(
            drawn[0], 1, 8, attention_chunk_size=drawn[0] * drawn[1]
        )
    ),
    st.tuples(tensors, st.sampled_from(["none", "align"]), st.integers(0, 4)).map(
        lambda drawn: MambaSpec(
            16,
            shapes=tuple(tuple(shape) for shape, _ in drawn[0]),
            dtypes=tuple(dtype for _, dtype in drawn[0]),
            mamba_cache_mode=drawn[1],
            num_speculative_blocks=drawn[2],
        )
    ),
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
            shared_by=st.lists(st.text(min_size=1, max_size=5), max_size=3, unique=True),
            offset=st.integers(0, 1 << 40),
        ),
        max_size=3,
    ),
    kv_cache_groups=st.lists(
        st.builds(
            KVCacheGroupSpec,
            layer_names=st.lists(st.text(min_size=1, max_size=5), max_size=3, unique=True),
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
    message = "FullAttentionSpec: block_size is 0: pass an integer of at least 1"
    with pytest.raises(MalformedMessageError, match=f"^{re.escape(message)}$"):
        KVCacheConfig.from_dict(data)


def test_unknown_fields_and_kinds_are_refused_by_name() -> None:
    data = full().to_dict()
    with pytest.raises(MalformedMessageError, match=r"^FullAttentionSpec: unknown fields colour$"):
        spec_from_dict({**data, "colour": 1})
    message = (
        "a KV cache spec of kind 'hyena' is not known: known kinds are chunked_local, cross, full, "
        "mamba, mla, sliding_window"
    )
    with pytest.raises(MalformedMessageError, match=f"^{re.escape(message)}$"):
        spec_from_dict({**data, "kind": "hyena"})
    message = "MambaSpec: unknown fields attention_chunk_size, dtype, head_size, num_kv_heads"
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


def test_a_dtype_can_be_the_object_of_torch() -> None:
    torch = pytest.importorskip("torch")
    spec = FullAttentionSpec(
        np.int32(16), num_kv_heads=np.int64(2), head_size=8, dtype=torch.bfloat16
    )
    assert spec == FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype="bfloat16")
    assert {type(spec.block_size), type(spec.num_kv_heads)} == {int}
    state = MambaSpec(4, shapes=((8,),), dtypes=(torch.float32,))
    assert state.dtypes == ("float32",)
    for wrong in (torch.complex64, torch, float, np.float32):
        with pytest.raises(ConfigurationError, match="is not known: use one of float32"):
            FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype=wrong)
