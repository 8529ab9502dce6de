"""Pages of one size with a kind that keeps a state: worked examples, and a slow search."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.planner import get_kv_cache_groups, get_uniform_page_size, unify_page_sizes
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)
PAGE = 8192  # 2 * 16 tokens * 2 heads * 64 elements * 2 bytes


def state(size_bytes: int, **changes: Any) -> MambaSpec:
    spec = MambaSpec(16, shapes=((size_bytes,),), dtypes=("int8",), mamba_cache_mode="align")
    return replace(spec, **changes)


def chunked(num_blocks: int, **changes: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": 64, **changes},
        attention_chunk_size=16 * num_blocks,
    )


def latent(page_size_bytes: int) -> MLAAttentionSpec:
    """A layer with pages of that many bytes, a multiple of 32."""
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=page_size_bytes // 32)


def unify(*specs: KVCacheSpec) -> tuple[list[KVCacheSpec], list[str]]:
    warnings: list[str] = []
    named = {f"l.{index}": spec for index, spec in enumerate(specs)}
    return list(unify_page_sizes(named, warnings.append).values()), warnings


def test_blocks_of_tokens_grow_until_they_reach_a_state_which_is_padded_up_to_them() -> None:
    # ceil(20000 / 8192) = 3 blocks of 16 tokens are 24576 bytes
    (full, padded), warnings = unify(FULL, state(20_000))
    assert full == replace(FULL, block_size=48)
    assert padded == state(20_000, page_size_padded=24_576)
    assert warnings == [
        "pages of 1 layers like l.1 are padded from 20000 to 24576 bytes to share pools: 18.6% of "
        "their memory is wasted"
    ]


def test_a_state_of_whole_blocks_wastes_nothing() -> None:
    (full, same), warnings = unify(FULL, state(3 * PAGE))
    assert (full, same) == (replace(FULL, block_size=48), state(3 * PAGE))
    assert warnings == []


def test_a_state_that_is_smaller_than_a_page_is_padded_to_it() -> None:
    (full, padded), _ = unify(FULL, state(5000))
    assert (full, padded) == (FULL, state(5000, page_size_padded=PAGE))


def test_kinds_that_grow_meet_at_a_common_size() -> None:
    # 3 * 8192 = 4 * 6144 = 24576, the first of either above 20000 that the other has, too
    made, warnings = unify(FULL, latent(6144), state(20_000))
    assert [spec.block_size for spec in made] == [48, 64, 16]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("num_full", "num_latent", "page", "blocks"),
    [
        # Sizes of whole blocks from 20000 to 40000: 24576 and 32768 of 8192, and 20480, 25600,
        # 30720, 35840 of 5120. A state wastes 2%, 19%, 22%, ... of them.
        (1, 1, 20_480, (32, 64)),  # full attention is padded by 4096, a fifth of each page
        (8, 1, 24_576, (48, 64)),  # latent by 4096: less, as it has fewer layers
        (1, 8, 20_480, (32, 64)),
    ],
)
def test_the_common_size_is_the_one_that_pads_the_least(
    num_full: int, num_latent: int, page: int, blocks: tuple[int, int]
) -> None:
    made, _ = unify(*[FULL] * num_full, *[latent(5120)] * num_latent, state(20_000))
    assert get_uniform_page_size(made) == page
    assert (made[0].block_size, made[-2].block_size) == blocks


def test_a_chunk_keeps_consisting_of_whole_blocks() -> None:
    # Three blocks would hold the state, but a chunk of four blocks divides by one, two or four.
    made, _ = unify(chunked(4), state(20_000))
    assert made == [chunked(4, block_size=64), state(20_000, page_size_padded=4 * PAGE)]


def test_a_chunk_of_one_block_cannot_grow_and_is_padded() -> None:
    made, warnings = unify(chunked(1), state(20_000))
    assert made == [replace(chunked(1), page_size_padded=20_000), state(20_000)]
    assert len(warnings) == 1


def test_layers_grow_as_far_as_they_can_before_they_are_padded() -> None:
    # Two blocks of 3072 bytes fit into 8192, and 2048 bytes are left.
    (_, made), warnings = unify(FULL, latent(3072))
    assert made == replace(latent(3072), block_size=32, page_size_padded=PAGE)
    assert warnings == [
        "pages of 1 layers like l.1 are padded from 6144 to 8192 bytes to share pools: 25.0% of "
        "their memory is wasted"
    ]


def test_pages_suit_the_elements_of_states() -> None:
    odd = MLAAttentionSpec(1, 1, 3, "int8")  # 3 bytes a token
    wide = MambaSpec(1, shapes=((5,),), dtypes=("float32",))  # 20 bytes
    (tokens, padded), _ = unify(odd, wide)
    assert tokens == replace(odd, block_size=8)  # 24 bytes: 21 are whole tokens, but not floats
    assert padded == replace(wide, page_size_padded=24)


@dataclass(frozen=True)
class FixedSpec(FullAttentionSpec):
    """An external kind that can be neither resized nor padded."""

    kind = "fixed"

    def with_block_size(self, block_size: int) -> KVCacheSpec | None:
        return None

    def with_page_size_padded(self, page_size_bytes: int) -> KVCacheSpec | None:
        return None


def test_a_layer_that_cannot_reach_the_state_is_named() -> None:
    specs = {"l.0": FULL, "l.1": FixedSpec(16, 1, 64), "l.2": state(20_000)}
    with pytest.raises(
        ConfigurationError,
        match=re.escape(
            "these layers can have neither larger blocks nor padding: l.1 (4096 bytes)"
        ),
    ):
        get_kv_cache_groups(specs)


def test_blocks_that_would_have_to_grow_beyond_reason_are_refused() -> None:
    tiny = MLAAttentionSpec(1, 1, 1, "int8")  # one byte
    assert unify(tiny, state(4096))[0][0] == replace(tiny, block_size=4096)
    message = (
        "a page of layer l.0 (kind mla, 1 tokens) takes 1 bytes, the largest page 4097: the one "
        "would have to grow more than 4096 times to share pools with the other: raise its block "
        "size"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        unify(tiny, state(4097))
    # Pages that do not grow are padded too.
    assert unify(state(1), state(4097))[0][0] == state(1, page_size_padded=4097)


# ---------------------------------------------------------------------------------------------
# Where states are kept
# ---------------------------------------------------------------------------------------------


def block_sizes(*specs: KVCacheSpec) -> list[int]:
    named = {f"l.{index}": spec for index, spec in enumerate(specs)}
    groups = get_kv_cache_groups(named, warn=lambda _: None)
    return [group.kv_cache_spec.block_size for group in groups]


def test_cached_states_are_kept_where_blocks_of_the_others_end() -> None:
    assert block_sizes(FULL, state(3 * PAGE)) == [48, 48]
    assert block_sizes(FULL, state(3 * PAGE, block_size=100)) == [48, 144]  # 3 * 48, not below 100


def test_states_that_cannot_be_hit_stay_as_they_are() -> None:
    assert block_sizes(FULL, state(3 * PAGE, mamba_cache_mode="none")) == [48, 16]


def test_with_blocks_of_several_sizes_states_stand_at_their_common_multiples() -> None:
    # 8192 bytes: 16 tokens of full attention, 48 of the narrow windows.
    narrow = SlidingWindowSpec(16, 1, 42, sliding_window=100)  # 2688 bytes
    assert block_sizes(FULL, narrow, state(PAGE)) == [16, 48, 48]


def test_blocks_of_an_encoder_do_not_decide_where_states_stand() -> None:
    narrow = CrossAttentionSpec(16, 1, 64, max_encoder_tokens=100)  # 4096 bytes: 32 tokens
    assert block_sizes(FULL, narrow, state(PAGE)) == [16, 32, 16]


# ---------------------------------------------------------------------------------------------
# Any mix
# ---------------------------------------------------------------------------------------------


def any_spec(rng: random.Random) -> KVCacheSpec:
    block_size = rng.choice([1, 2, 4, 8])
    heads, size = rng.randint(1, 4), rng.randint(1, 12)
    dtype = rng.choice(["int8", "float16", "float32"])
    return rng.choice(
        [
            FullAttentionSpec(block_size, heads, size, dtype),
            MLAAttentionSpec(block_size, 1, size, dtype),
            SlidingWindowSpec(block_size, heads, size, dtype, sliding_window=9),
            CrossAttentionSpec(block_size, heads, size, dtype, max_encoder_tokens=9),
            ChunkedLocalAttentionSpec(
                block_size, heads, size, dtype, attention_chunk_size=block_size * rng.randint(1, 12)
            ),
        ]
    )


def largest_block(spec: KVCacheSpec, page: int) -> int:
    """The most content of whole blocks, found by trying every size of block."""
    contents = [spec.real_page_size_bytes]
    for ratio in range(2, page // spec.page_size_bytes + 1):
        larger = spec.with_block_size(spec.block_size * ratio)
        if larger is not None and larger.page_size_bytes <= page:
            contents.append(larger.real_page_size_bytes)
    return max(contents)


@pytest.mark.seeds(40)
def test_no_other_size_of_whole_blocks_pads_less(seed: int) -> None:
    rng = random.Random(seed)
    large = MambaSpec(
        4,
        shapes=((rng.randint(50, 300),), (rng.randint(1, 9), 3)),
        dtypes=("int8", rng.choice(["int8", "float32"])),
    )
    counts: Counter[KVCacheSpec] = Counter({large: rng.randint(1, 9)})
    for _ in range(rng.randint(1, 3)):
        counts[any_spec(rng)] += rng.randint(1, 9)
    before = list(counts.elements())
    after, _ = unify(*before)
    page = get_uniform_page_size(after)
    alignment = lcm(*(spec.alignment_bytes for spec in before))
    assert page % alignment == 0
    least = -(-max(spec.page_size_bytes for spec in before) // alignment) * alignment

    def waste(size: int) -> float:
        return sum(1 - largest_block(spec, size) / size for spec in before)

    assert sum(1 - spec.real_page_size_bytes / page for spec in after) == pytest.approx(waste(page))
    possible = {
        larger.page_size_bytes
        for spec in counts.keys() - {large}
        for ratio in range(1, 2 * least // spec.page_size_bytes + 1)
        if (larger := spec.with_block_size(spec.block_size * ratio)) is not None
        and least <= larger.page_size_bytes <= 2 * least
        and larger.page_size_bytes % alignment == 0
    }
    if possible and max(spec.page_size_bytes for spec in before) == large.page_size_bytes:
        assert waste(page) <= min(map(waste, possible)) + 1e-9
    for spec, made in zip(before, after, strict=True):
        assert made.block_size % spec.block_size == 0
        assert made.real_page_size_bytes == largest_block(spec, page)
