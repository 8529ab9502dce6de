"""Which layers share a block table.

First half of planning. The specs of all ranks are merged, grouped once for the whole model, and
then projected to each rank, so that a group id means the same on all. All groups get pages of equal
size, because one layer of each group shares a pool. Refuses ranks that state different specs for a
layer, and layers whose pages cannot be made equal. Knows nothing of memory sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TypeAlias

from kvcache.base.arguments import as_bool, as_text, as_texts, as_tuple
from kvcache.base.errors import ConfigurationError, PlanMismatchError
from kvcache.planner.options import (
    LayerSpecs,
    Warn,
    as_rank_specs,
    check_layer_specs,
    check_warn,
    log_warning,
)
from kvcache.planner.pages import align_state_blocks, unify_page_sizes
from kvcache.specs import Difference, KVCacheGroupSpec, KVCacheSpec, ceil_div, first_difference
from kvcache.specs.spec import as_specs

LayerOrder: TypeAlias = "tuple[tuple[int, int, str, str], ...]"
"""The sort key of a layer's name."""


def layer_order(layer_name: str) -> LayerOrder:
    """Return a sort key that puts `layers.2` before `layers.10`; different names differ.

    Groups are filled in this order, not in the order in which layers or ranks were stated.
    """
    layer_name = as_text("layer_name", layer_name, ConfigurationError)
    parts = [part for part in re.split("([0-9]+)", layer_name) if part]
    return tuple(_part_order(part) for part in parts)


def _part_order(part: str) -> tuple[int, int, str, str]:
    """Numbers first, by value: without leading zeros, a longer number is larger."""
    if part[0] not in "0123456789":
        return (1, 0, part, "")
    digits = part.lstrip("0")
    return (0, len(digits), digits, part)


# ---------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------


def is_kv_cache_type_attention_free(specs: LayerSpecs) -> bool:
    """Return whether no layer keeps anything."""
    check_layer_specs(specs)
    return not specs


def is_kv_cache_page_size_uniform(specs: LayerSpecs) -> bool:
    """Return whether a block takes the same bytes in every layer."""
    check_layer_specs(specs)
    return len({spec.page_size_bytes for spec in specs.values()}) <= 1


def is_kv_cache_type_uniform(specs: LayerSpecs) -> bool:
    """Return whether all layers can share one block table.

    Full attention counts as one type with and without a remembered window.
    """
    check_layer_specs(specs)
    return len(_layers_by_type(specs)) <= 1


def get_uniform_page_size(specs: Iterable[KVCacheSpec]) -> int:
    """Return the page bytes of all `specs`; raises ConfigurationError if they differ or are
    none."""
    sizes = sorted({spec.page_size_bytes for spec in as_specs(specs)})
    if len(sizes) != 1:
        listed = ", ".join(map(str, sizes)) or "none"
        raise ConfigurationError(
            f"pages of one size are needed, got sizes {listed}: make the groups with "
            "get_kv_cache_groups, which makes pages agree"
        )
    return sizes[0]


# ---------------------------------------------------------------------------------------------
# From specs to groups
# ---------------------------------------------------------------------------------------------


def merge_rank_specs(specs_by_rank: Sequence[LayerSpecs]) -> dict[str, KVCacheSpec]:
    """Return the specs of the whole model, in `layer_order`.

    Ranks of a pipeline hold different layers; ranks that hold the same layer must agree on it.
    Raises PlanMismatchError, naming rank, layer and field, if they do not.
    """
    first_rank: dict[str, int] = {}
    merged: dict[str, KVCacheSpec] = {}
    for rank, specs in enumerate(as_rank_specs(specs_by_rank)):
        for name, spec in specs.items():
            known = merged.setdefault(name, spec)
            first_rank.setdefault(name, rank)
            difference = first_difference(known, spec)
            if difference is not None:
                raise PlanMismatchError(
                    f"rank {rank}, layer {name}: {difference.field} is {difference.other}, but "
                    f"rank {first_rank[name]} has {difference.one}: give every rank that holds "
                    "the layer the same spec"
                )
    return {name: merged[name] for name in sorted(merged, key=layer_order)}


def create_kv_cache_group_specs(
    specs: LayerSpecs, grouped_layer_names: Sequence[Sequence[str]]
) -> tuple[KVCacheGroupSpec, ...]:
    """Return one group per list of names, each with the merged spec of its layers.

    Raises ConfigurationError if layers of a group cannot be merged.
    """
    check_layer_specs(specs)
    what, groups = "grouped_layer_names", []
    for index, listed in enumerate(as_tuple(what, grouped_layer_names, ConfigurationError)):
        names = as_texts(f"{what}[{index}]", listed, ConfigurationError)
        unknown = [name for name in names if name not in specs]
        if unknown:
            raise ConfigurationError(
                f"layer {unknown[0]} is to be grouped, but has no spec: group layers that exist"
            )
        members = [specs[name] for name in names]
        merged = type(members[0]).merge(members) if members else KVCacheSpec.merge(members)
        groups.append(KVCacheGroupSpec(names, merged))
    return tuple(groups)


def get_kv_cache_groups(
    specs: LayerSpecs, *, disable_hybrid_kv_cache_manager: bool = False, warn: Warn = log_warning
) -> tuple[KVCacheGroupSpec, ...]:
    """Return the groups of a model with these layers; none for a model without a cache.

    Layers of one type make one group. Several types make groups of equal layer count (see
    `_group_size`), after pages have been made equal and states aligned with the other layers'
    blocks. Warns of memory that padding may waste. Raises ConfigurationError for layers that cannot
    be combined.
    """
    is_alike = as_bool(
        "disable_hybrid_kv_cache_manager", disable_hybrid_kv_cache_manager, ConfigurationError
    )
    check_warn(warn)
    if is_kv_cache_type_attention_free(specs):
        return ()
    ordered = {name: specs[name] for name in sorted(specs, key=layer_order)}
    if is_alike:
        ordered = unify_hybrid_kv_cache_specs(ordered, warn)
    if is_kv_cache_type_uniform(ordered):
        return create_kv_cache_group_specs(ordered, [list(ordered)])
    ordered = align_state_blocks(unify_page_sizes(ordered, warn))
    types = _layers_by_type(ordered)
    for names in types:  # one spec per type, with any remembered window
        members = [ordered[name] for name in names]
        ordered |= dict.fromkeys(names, type(members[0]).merge(members))
    return create_kv_cache_group_specs(ordered, _deal_into_groups(types, warn))


def project_groups(
    groups: Sequence[KVCacheGroupSpec], specs: LayerSpecs
) -> tuple[KVCacheGroupSpec, ...]:
    """Return `groups` with only the layers of one rank; a group may come out empty."""
    check_layer_specs(specs)
    return tuple(
        KVCacheGroupSpec(
            tuple(name for name in group.layer_names if name in specs), group.kv_cache_spec
        )
        for group in as_tuple("groups", groups, ConfigurationError, KVCacheGroupSpec)
    )


def unify_hybrid_kv_cache_specs(
    specs: LayerSpecs, warn: Warn = log_warning
) -> dict[str, KVCacheSpec]:
    """Return `specs` with every other kind replaced by full attention, so that they are one type.

    Warns of the memory that this costs. Specs of one type are returned unchanged. Raises
    ConfigurationError if no layer has full attention, a layer cannot be replaced, or the results
    still differ.
    """
    check_warn(warn)
    if is_kv_cache_type_uniform(specs):
        return dict(specs)
    advice = "leave disable_hybrid_kv_cache_manager off"
    if not any(spec.reads_whole_prefix for spec in specs.values()):
        examples = [names[0] for names in _layers_by_type(specs)]
        listed = ", ".join(f"{name} ({specs[name].kind})" for name in examples)
        raise ConfigurationError(
            f"layers {listed} cannot become one type, because no layer of the model has full "
            f"attention: {advice}"
        )
    unified: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        full = spec.as_full_attention()
        if full is None:
            raise ConfigurationError(
                f"layer {name} of kind {spec.kind} cannot be turned into full attention, because "
                f"it keeps {_kept_instead(spec)}: {advice}"
            )
        unified[name] = full
    if not is_kv_cache_type_uniform(unified):
        one, other, difference = _contradiction(unified)
        raise ConfigurationError(
            f"layers {one} and {other} differ even as full attention in {difference}: {advice}"
        )
    changed = [name for name, spec in specs.items() if unified[name] != spec]
    warn(
        f"{len(changed)} of {len(specs)} layers keep every token although they read only a "
        f"window or chunk, because the hybrid manager is disabled ({changed[0]}, ...): their "
        f"blocks are not freed as the window moves on; {advice} to save that memory"
    )
    return unified


def _kept_instead(spec: KVCacheSpec) -> str:
    """Return what a layer keeps that full attention cannot keep."""
    if spec.num_state_blocks is not None:
        return "a state instead of tokens"
    if spec.keeps_encoder_tokens:
        return "an encoder's tokens, not those of the request"
    return "what no other kind does"


def _contradiction(specs: LayerSpecs) -> tuple[str, str, Difference | None]:
    """Return two layers that cannot share a block table, and the field in which they differ."""
    examples = [names[0] for names in _layers_by_type(specs)]
    pairs = list(combinations(examples, 2))
    one, other = next(
        (pair for pair in pairs if not _can_merge([specs[name] for name in pair])), pairs[0]
    )
    return one, other, first_difference(specs[one], specs[other])


# ---------------------------------------------------------------------------------------------
# Types and dealing
# ---------------------------------------------------------------------------------------------


def _layers_by_type(specs: LayerSpecs) -> list[list[str]]:
    """Return the names of layers that can share a table, types in order of their first layer.

    A layer joins a type if all its layers can be merged. If remembered windows contradict each
    other, only equal specs stay together.
    """
    loose: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        loose.setdefault(spec.without_remembered_limit(), []).append(name)
    types: list[list[str]] = []
    for names in loose.values():
        if _can_merge([specs[name] for name in names]):
            types.append(names)
            continue
        strict: dict[KVCacheSpec, list[str]] = {}
        for name in names:
            strict.setdefault(specs[name], []).append(name)
        types.extend(strict.values())
    position = {name: index for index, name in enumerate(specs)}
    return sorted(types, key=lambda names: position[names[0]])


def _can_merge(specs: Sequence[KVCacheSpec]) -> bool:
    try:
        type(specs[0]).merge(specs)
    except ConfigurationError:
        return False
    return True


def _group_size(layer_counts: Sequence[int]) -> int:
    """Return the layers per group: the smallest count of any type, which pads the least.

    If the largest count is below 1.5 times the smallest, padding the smaller types to it wastes
    less than splitting the larger ones.
    """
    smallest, largest = min(layer_counts), max(layer_counts)
    return largest if 2 * largest < 3 * smallest else smallest


def _deal_into_groups(types: Sequence[Sequence[str]], warn: Warn) -> list[list[str]]:
    """Split each type into groups of `_group_size`, and warn of groups that remain smaller.

    Layers are dealt round-robin. Each pipeline stage holds consecutive layers, so it has about as
    many of one group as of another, and its pools are well used.
    """
    size = _group_size([len(names) for names in types])
    grouped: list[list[str]] = []
    for names in types:
        num_groups = ceil_div(len(names), size)
        grouped.extend(list(names[start::num_groups]) for start in range(num_groups))
        padding = num_groups * size - len(names)
        if padding:
            warn(
                f"{padding} layers of padding are added to {len(names)} layers like {names[0]} to "
                f"make groups of {size}: up to {padding / len(names):.1%} of these layers' memory "
                "may be wasted"
            )
    return grouped
