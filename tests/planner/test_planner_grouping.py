"""Which layers share a block table: worked examples, and properties for any mix of layers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.base.errors import ConfigurationError, PlanMismatchError
from kvcache.planner import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    get_uniform_page_size,
    is_kv_cache_page_size_uniform,
    is_kv_cache_type_attention_free,
    is_kv_cache_type_uniform,
    layer_order,
    merge_rank_specs,
    project_groups,
    unify_hybrid_kv_cache_specs,
    unify_page_sizes,
)
from kvcache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, sliding_window=128)


@dataclass(frozen=True)
class StateSpec(FullAttentionSpec):
    """An external kind that can be neither resized, padded, nor replaced."""

    kind = "state"

    def with_block_size(self, block_size: int) -> KVCacheSpec | None:
        return None

    def with_page_size_padded(self, page_size_bytes: int) -> KVCacheSpec | None:
        return None

    def as_full_attention(self) -> FullAttentionSpec | None:
        return None


def model(pattern: str, **kinds: KVCacheSpec) -> dict[str, KVCacheSpec]:
    """Layers `l.0`, `l.1`, ... of the kinds in the letters of `pattern`."""
    known = {"f": FULL, "w": WINDOW, **kinds}
    return {f"l.{index}": known[letter] for index, letter in enumerate(pattern)}


def names(specs: dict[str, KVCacheSpec], warnings: list[str] | None = None) -> list[list[str]]:
    taken: list[str] = []
    groups = get_kv_cache_groups(specs, warn=taken.append)
    if warnings is None:
        assert taken == []
    else:
        warnings.extend(taken)
    return [list(group.layer_names) for group in groups]


# ---------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------


def test_a_model_without_layers_is_attention_free() -> None:
    assert is_kv_cache_type_attention_free({})
    assert not is_kv_cache_type_attention_free(model("f"))
    assert get_kv_cache_groups({}) == ()


def test_types_are_uniform_when_all_layers_can_share_a_table() -> None:
    assert is_kv_cache_type_uniform(model("ff"))
    assert is_kv_cache_type_uniform(model("fr", r=replace(FULL, sliding_window=128)))
    assert not is_kv_cache_type_uniform(model("fw"))
    assert not is_kv_cache_type_uniform(model("fh", h=replace(FULL, head_size=32)))
    remembered = model("rs", r=replace(FULL, sliding_window=8), s=replace(FULL, sliding_window=4))
    assert not is_kv_cache_type_uniform(remembered)


def test_page_sizes_are_uniform_when_all_are_equal() -> None:
    assert is_kv_cache_page_size_uniform(model("fw"))
    other = model("fh", h=replace(FULL, head_size=32))
    assert not is_kv_cache_page_size_uniform(other)
    assert get_uniform_page_size([FULL, WINDOW]) == 8192
    message = (
        "pages of one size are needed, got sizes 4096, 8192: make the groups with "
        "get_kv_cache_groups, which makes pages agree"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        get_uniform_page_size(other.values())


# ---------------------------------------------------------------------------------------------
# Dealing layers into groups
# ---------------------------------------------------------------------------------------------


def test_one_type_is_one_group_in_the_order_of_the_model() -> None:
    assert names(model("f" * 12)) == [[f"l.{index}" for index in range(12)]]


def test_full_attention_that_remembers_a_window_joins_the_full_group() -> None:
    specs = model("frf", r=replace(FULL, sliding_window=128))
    (group,) = get_kv_cache_groups(specs)
    assert group.layer_names == ("l.0", "l.1", "l.2")
    assert group.kv_cache_spec == replace(FULL, sliding_window=128)


def test_as_many_layers_of_each_type_make_one_group_each() -> None:
    assert names(model("fwfw")) == [["l.0", "l.2"], ["l.1", "l.3"]]


def test_the_smallest_type_sets_the_size_and_others_are_dealt_out() -> None:
    specs = model("wwwfwwwf")
    assert names(specs) == [["l.0", "l.4"], ["l.1", "l.5"], ["l.2", "l.6"], ["l.3", "l.7"]]


def test_groups_that_stay_short_are_warned_of() -> None:
    warnings: list[str] = []
    assert names(model("fff" + "w" * 7), warnings) == [
        ["l.0", "l.1", "l.2"],
        ["l.3", "l.6", "l.9"],
        ["l.4", "l.7"],
        ["l.5", "l.8"],
    ]
    assert warnings == [
        "2 layers of padding are added to 7 layers like l.3 to make groups of 3: up to 28.6% of "
        "these layers' memory may be wasted"
    ]


@pytest.mark.parametrize(
    ("num_full", "num_window", "groups"),
    [
        (10, 14, 2),  # 14 < 1.5 * 10: the ten are padded to fourteen
        (10, 15, 3),  # 15 is not below: groups of ten, one short
        (2, 3, 3),
        (4, 5, 2),
    ],
)
def test_the_largest_type_sets_the_size_when_it_is_hardly_larger(
    num_full: int, num_window: int, groups: int
) -> None:
    warnings: list[str] = []
    grouped = names(model("f" * num_full + "w" * num_window), warnings)
    assert len(grouped) == groups
    assert len(warnings) == 1


def test_remembered_windows_that_contradict_each_other_make_types_of_their_own() -> None:
    specs = model("frs", r=replace(FULL, sliding_window=8), s=replace(FULL, sliding_window=4))
    assert names(specs) == [["l.0"], ["l.1"], ["l.2"]]


layer_specs = st.sampled_from(
    [FULL, WINDOW, replace(WINDOW, sliding_window=64), replace(FULL, sliding_window=128)]
)
models = st.lists(layer_specs, min_size=1, max_size=24).map(
    lambda specs: {f"l.{index}": spec for index, spec in enumerate(specs)}
)


@settings(deadline=None)
@given(models)
def test_every_layer_is_in_one_group_with_its_like(specs: dict[str, KVCacheSpec]) -> None:
    groups = get_kv_cache_groups(specs, warn=lambda _: None)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    for group in groups:
        assert group.layer_names
        for name in group.layer_names:
            assert specs[name].kind == group.kv_cache_spec.kind


@settings(deadline=None)
@given(models)
def test_padding_is_as_little_as_the_size_of_groups_allows(specs: dict[str, KVCacheSpec]) -> None:
    groups = get_kv_cache_groups(specs, warn=lambda _: None)
    by_type: dict[KVCacheSpec, list[int]] = {}
    for group in groups:
        by_type.setdefault(group.kv_cache_spec, []).append(len(group.layer_names))
    counts = [sum(sizes) for sizes in by_type.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    for sizes in by_type.values():
        assert len(sizes) == -(-sum(sizes) // size)
        assert max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(models, st.randoms(use_true_random=False), st.integers(1, 4))
def test_groups_do_not_depend_on_the_order_of_layers_or_ranks(
    specs: dict[str, KVCacheSpec], rng: Any, num_ranks: int
) -> None:
    shuffled = list(specs.items())
    rng.shuffle(shuffled)
    by_rank = [dict(shuffled[rank::num_ranks]) for rank in range(num_ranks)]
    merged = merge_rank_specs(by_rank)
    assert get_kv_cache_groups(merged, warn=lambda _: None) == get_kv_cache_groups(
        specs, warn=lambda _: None
    )


def test_a_projected_group_may_be_empty() -> None:
    groups = get_kv_cache_groups(model("fw"))
    projected = project_groups(groups, {"l.1": WINDOW})
    assert [group.layer_names for group in projected] == [(), ("l.1",)]
    assert [group.kv_cache_spec for group in projected] == [FULL, WINDOW]


def test_pipeline_stages_hold_as_many_layers_of_every_group() -> None:
    specs = model("wwwfwwwf")
    groups = get_kv_cache_groups(specs)
    stages = [dict(list(specs.items())[:4]), dict(list(specs.items())[4:])]
    for stage in stages:
        assert [len(group.layer_names) for group in project_groups(groups, stage)] == [1] * 4


def test_ranks_that_differ_in_a_layer_are_refused_by_rank_layer_and_field() -> None:
    by_rank = [model("ff"), model("ff"), model("fh", h=replace(FULL, head_size=32))]
    message = (
        "rank 2, layer l.1: head_size is 32, but rank 0 has 64: give every rank that holds the "
        "layer the same spec"
    )
    with pytest.raises(PlanMismatchError, match=f"^{re.escape(message)}$"):
        merge_rank_specs(by_rank)


def test_ranks_that_differ_in_kind_are_refused_by_kind() -> None:
    with pytest.raises(
        PlanMismatchError, match=r"^rank 1, layer l\.0: kind is sliding_window, but rank 0 has full"
    ):
        merge_rank_specs([model("f"), model("w")])


def test_groups_of_layers_that_cannot_merge_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"differ in kind \(full, sliding_window\)"):
        create_kv_cache_group_specs(model("fw"), [["l.0", "l.1"]])
    with pytest.raises(ConfigurationError, match="at least one layer"):
        create_kv_cache_group_specs(model("fw"), [[]])


# ---------------------------------------------------------------------------------------------
# Pages of one size
# ---------------------------------------------------------------------------------------------


def test_a_page_that_divides_the_largest_gets_larger_blocks_and_no_warning() -> None:
    warnings: list[str] = []
    specs = model("fh", h=replace(WINDOW, head_size=16))
    unified = unify_page_sizes(specs, warnings.append)
    assert unified == {"l.0": FULL, "l.1": replace(WINDOW, head_size=16, block_size=64)}
    assert warnings == []


def test_a_page_that_does_not_divide_the_largest_is_padded_with_a_warning() -> None:
    warnings: list[str] = []
    specs = model("fhh", h=replace(WINDOW, head_size=48))
    unified = unify_page_sizes(specs, warnings.append)
    assert unified["l.1"] == replace(WINDOW, head_size=48, page_size_padded=8192)
    assert warnings == [
        "pages of 2 layers like l.1 are padded from 6144 to 8192 bytes to share pools: 25.0% of "
        "their memory is wasted"
    ]


def test_pages_are_aligned_for_every_dtype_that_shares_them() -> None:
    odd = FullAttentionSpec(1, 1, 3, "int8")  # 6 bytes
    wide = SlidingWindowSpec(1, 1, 1, "float32", sliding_window=4)  # 8 bytes
    largest_odd = FullAttentionSpec(1, 1, 5, "int8")  # 10 bytes: 12 suits float32
    unified = unify_page_sizes({"a": odd, "b": wide, "c": largest_odd}, lambda _: None)
    assert [unified["b"].page_size_bytes, unified["c"].page_size_bytes] == [12, 12]
    assert unified["a"] == replace(odd, block_size=2)


def test_layers_whose_pages_cannot_agree_are_named() -> None:
    specs = model("fs", s=StateSpec(16, 1, 64))
    message = (
        "pages of 8192 bytes are needed to share pools, but these layers can have neither larger "
        "blocks nor padding: l.1 (4096 bytes): choose block sizes whose pages agree"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        get_kv_cache_groups(specs)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            replace,
            st.sampled_from([FULL, WINDOW]),
            head_size=st.integers(1, 40),
            block_size=st.integers(1, 8),
            dtype=st.sampled_from(["int8", "float16", "float32"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_pages_end_up_equal_and_keep_their_content(specs: list[KVCacheSpec]) -> None:
    before = {f"l.{index}": spec for index, spec in enumerate(specs)}
    after = unify_page_sizes(before, lambda _: None)
    page = get_uniform_page_size(after.values())
    largest = max(spec.page_size_bytes for spec in specs)
    assert largest <= page < largest + 4
    for name, spec in after.items():
        assert page % spec.alignment_bytes == 0
        assert spec.block_size % before[name].block_size == 0
        assert spec.real_page_size_bytes >= before[name].real_page_size_bytes


# ---------------------------------------------------------------------------------------------
# Without the hybrid manager
# ---------------------------------------------------------------------------------------------


def test_windows_become_full_attention_with_a_warning() -> None:
    warnings: list[str] = []
    unified = unify_hybrid_kv_cache_specs(model("fwfw"), warnings.append)
    assert unified == model("frfr", r=replace(FULL, sliding_window=128))
    assert warnings == [
        "2 of 4 layers keep every token although they read only a window or chunk, because the "
        "hybrid manager is disabled (l.1, ...): their blocks are not freed as the window moves on; "
        "leave disable_hybrid_kv_cache_manager off to save that memory"
    ]
    groups = get_kv_cache_groups(
        model("fwfw"), disable_hybrid_kv_cache_manager=True, warn=lambda _: None
    )
    assert [group.layer_names for group in groups] == [("l.0", "l.1", "l.2", "l.3")]


def test_layers_of_one_type_stay_as_they_are() -> None:
    assert unify_hybrid_kv_cache_specs(model("ww")) == model("ww")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            model("wv", v=replace(WINDOW, sliding_window=64)),
            "layers l.0 (sliding_window), l.1 (sliding_window) cannot become one type, because no "
            "layer of the model has full attention: leave disable_hybrid_kv_cache_manager off",
        ),
        (
            model("fs", s=StateSpec(16, 1, 64)),
            "layer l.1 of kind state cannot be turned into full attention, because it keeps what "
            "no other kind does: leave disable_hybrid_kv_cache_manager off",
        ),
        (
            model("fwh", h=replace(WINDOW, head_size=32)),
            "layers l.0 and l.2 differ even as full attention in head_size (64, 32): leave "
            "disable_hybrid_kv_cache_manager off",
        ),
        (  # either window goes with full attention, but not with the other
            model("fwv", v=replace(WINDOW, sliding_window=64)),
            "layers l.1 and l.2 differ even as full attention in sliding_window (128, 64): leave "
            "disable_hybrid_kv_cache_manager off",
        ),
    ],
)
def test_layers_that_cannot_become_one_are_refused(
    specs: dict[str, KVCacheSpec], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        unify_hybrid_kv_cache_specs(specs)


def test_functions_log_warnings_by_default(caplog: pytest.LogCaptureFixture) -> None:
    unify_hybrid_kv_cache_specs(model("fw"))
    assert [record.name for record in caplog.records] == ["kvcache.planner"]


def test_layers_are_ordered_by_number_whatever_their_names() -> None:
    ordered = ["a.1", "a.01", "a.2", "a.10", "a." + "9" * 5000, "a.b", "\u00b2", "\u0663"]
    backwards = ordered[::-1]
    assert sorted(backwards, key=layer_order)[2:] == ordered[2:]
    assert len({layer_order(name) for name in ordered}) == len(ordered)
    assert layer_order("1\u00b2") != layer_order("1")


def test_a_layer_without_a_spec_cannot_be_grouped() -> None:
    message = "layer ghost is to be grouped, but has no spec: group layers that exist"
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        create_kv_cache_group_specs(model("f"), [["l.0", "ghost"]])


def test_more_stages_than_layers_of_a_kind_leave_groups_empty_on_most() -> None:
    specs = model("wwwfwww")
    groups = get_kv_cache_groups(specs)
    assert [len(group.layer_names) for group in groups] == [1] * 7
    for name in specs:
        stage = project_groups(groups, {name: specs[name]})
        assert [group.layer_names for group in stage if group.layer_names] == [(name,)]
        assert [group.kv_cache_spec for group in stage] == [g.kv_cache_spec for g in groups]
