"""Unifies the plans of all ranks.

Last step of planning. Block ids are global: block 7 of the coordinator is block 7 on every rank
and in every tier. So all ranks get the smallest number of blocks that fits on any of them, and the
same groups in the same order. Refuses plans that cannot be made to agree, naming rank, group and
field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from kvcache.base.arguments import as_tuple
from kvcache.base.errors import PlanMismatchError
from kvcache.planner.grouping import LayerOrder, layer_order
from kvcache.specs import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    Layout,
    first_difference,
)


@dataclass(frozen=True)
class Pool:
    """Layers that share pages of one size: at most one of each group."""

    page_size_bytes: int
    shared_by: tuple[str, ...]


def pools_of(groups: Sequence[KVCacheGroupSpec]) -> list[Pool]:
    """Return the pools of a rank: pool `i` is shared by the `i`-th layer of each group."""
    count = max((len(group.layer_names) for group in groups), default=0)
    pools = []
    for index in range(count):
        sharers = [group for group in groups if index < len(group.layer_names)]
        page = sharers[0].kv_cache_spec.page_size_bytes
        pools.append(Pool(page, tuple(group.layer_names[index] for group in sharers)))
    return pools


def lay_out(pools: Sequence[Pool], num_blocks: int, layout: Layout) -> tuple[KVCacheTensor, ...]:
    """Return a tensor per pool, all in one allocation of `num_blocks` blocks.

    Offsets and strides are multiples of the page sizes, which are multiples of the element sizes.
    """
    block_bytes = sum(pool.page_size_bytes for pool in pools)
    tensors = []
    before = 0
    for pool in pools:
        page = pool.page_size_bytes
        is_block_first = layout == "block_first"
        tensors.append(
            KVCacheTensor(
                size=num_blocks * page,
                shared_by=pool.shared_by,
                offset=before if is_block_first else num_blocks * before,
                block_stride=block_bytes if is_block_first else page,
                layer_stride=page if is_block_first else num_blocks * page,
            )
        )
        before += page
    return tuple(tensors)


def unify_kv_cache_configs(configs: Sequence[KVCacheConfig]) -> list[KVCacheConfig]:
    """Return the plans, in the given order, made to agree; `configs` stay unchanged.

    Groups of equal specs are matched across ranks by their layer names, and ordered by the first
    layer that any rank has of them. Device, host and disk blocks become the smallest of all ranks,
    and tensors are laid out again. Raises PlanMismatchError if ranks differ in layout, in the specs
    of their groups, or in the grouping of layers that they share.
    """
    configs = as_tuple("configs", configs, PlanMismatchError, KVCacheConfig)
    if not configs:
        raise PlanMismatchError("there are no plans to unify: give the plan of every rank")
    _require_same_layout(configs)
    _require_same_specs(configs)
    aligned = _align_groups([config.kv_cache_groups for config in configs])
    _require_same_names(aligned)
    num_blocks = min(config.num_blocks for config in configs)
    host_blocks = min(config.host_blocks for config in configs)
    disk_blocks = min(config.disk_blocks for config in configs)
    return [
        replace(
            config,
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            kv_cache_groups=groups,
            kv_cache_tensors=lay_out(_pools(rank, config, groups), num_blocks, config.layout),
        )
        for rank, (config, groups) in enumerate(zip(configs, aligned, strict=True))
    ]


# ---------------------------------------------------------------------------------------------
# Agreement
# ---------------------------------------------------------------------------------------------


def _require_same_layout(configs: Sequence[KVCacheConfig]) -> None:
    for rank, config in enumerate(configs):
        if config.layout != configs[0].layout:
            raise PlanMismatchError(
                f"rank {rank}: layout is {config.layout}, but rank 0 has {configs[0].layout}: "
                "plan all ranks with one layout"
            )


def _require_same_specs(configs: Sequence[KVCacheConfig]) -> None:
    """Raise unless every rank has the same specs, equally often, in any order."""
    reference = configs[0].kv_cache_groups
    expected = Counter(group.kv_cache_spec for group in reference)
    for rank, config in enumerate(configs):
        groups = config.kv_cache_groups
        if len(groups) != len(reference):
            raise PlanMismatchError(
                f"rank {rank}: number of KV cache groups is {len(groups)}, but rank 0 has "
                f"{len(reference)}: plan all ranks from the merged specs of the model"
            )
        found = Counter(group.kv_cache_spec for group in groups)
        if found != expected:
            _raise_spec_mismatch(rank, groups, found - expected, reference, expected - found)


def _raise_spec_mismatch(
    rank: int,
    groups: Sequence[KVCacheGroupSpec],
    surplus: Counter[KVCacheSpec],
    reference: Sequence[KVCacheGroupSpec],
    missing: Counter[KVCacheSpec],
) -> None:
    """Name the first group of `rank` that rank 0 lacks, and the difference to its nearest group."""
    index, group = next((i, g) for i, g in enumerate(groups) if g.kv_cache_spec in surplus)
    candidates = [g for g in reference if g.kv_cache_spec in missing]
    names = set(group.layer_names)
    kin = max(  # most likely the group with the same layers, else of that kind
        candidates,
        key=lambda g: (
            len(names & set(g.layer_names)),
            g.kv_cache_spec.kind == group.kv_cache_spec.kind,
        ),
    )
    difference = first_difference(kin.kv_cache_spec, group.kv_cache_spec)
    if difference is not None:
        raise PlanMismatchError(
            f"rank {rank}, group {index}: {difference.field} is {difference.other}, but rank 0 "
            f"has {difference.one}: give all ranks the same specs"
        )


def _require_same_names(aligned: Sequence[Sequence[KVCacheGroupSpec]]) -> None:
    """Raise unless ranks that share a layer have it in the same group, with the same layers."""
    seen: dict[str, tuple[int, int, frozenset[str]]] = {}
    for rank, groups in enumerate(aligned):
        for index, group in enumerate(groups):
            names = frozenset(group.layer_names)
            for name in group.layer_names:
                first_rank, first_index, first_names = seen.setdefault(name, (rank, index, names))
                if (first_index, first_names) != (index, names):
                    raise PlanMismatchError(
                        f"rank {rank}, group {index}: layer_names are {_listed(names)}, but rank "
                        f"{first_rank} has {name} in group {first_index} of "
                        f"{_listed(first_names)}: ranks that hold the same layers must group "
                        "them alike"
                    )


# ---------------------------------------------------------------------------------------------
# Order
# ---------------------------------------------------------------------------------------------


def _align_groups(
    groups_by_rank: Sequence[Sequence[KVCacheGroupSpec]],
) -> list[tuple[KVCacheGroupSpec, ...]]:
    """Return the groups of every rank so that the same index means the same group on all.

    Groups of equal specs are interchangeable, but ranks that share layers must pair them alike.
    Sorting by layer name ensures that. Empty groups come last among their equals.
    """
    sorted_by_rank = [sorted(groups, key=_group_order) for groups in groups_by_rank]
    columns = list(zip(*sorted_by_rank, strict=True))
    columns.sort(key=lambda column: min(map(_first_layer, column)))
    return [tuple(column[rank] for column in columns) for rank in range(len(groups_by_rank))]


def _group_order(group: KVCacheGroupSpec) -> tuple[str, str, object]:
    """Equal specs together, in a fixed order, then by first layer."""
    return (group.kv_cache_spec.kind, repr(group.kv_cache_spec), _first_layer(group))


def _first_layer(group: KVCacheGroupSpec) -> tuple[int, LayerOrder]:
    if not group.layer_names:
        return (1, ())
    return (0, min(map(layer_order, group.layer_names)))


def _pools(rank: int, config: KVCacheConfig, groups: Sequence[KVCacheGroupSpec]) -> list[Pool]:
    """Return the pools of a plan in the order of their bytes, sharers in the order of `groups`."""
    group_of = {name: index for index, g in enumerate(groups) for name in g.layer_names}
    pools = []
    placed: set[str] = set()
    for index, tensor in enumerate(sorted(config.kv_cache_tensors, key=lambda t: t.offset)):
        _require_sharers(f"rank {rank}, tensor {index}", tensor.shared_by, group_of, placed)
        placed.update(tensor.shared_by)
        sharers = sorted(tensor.shared_by, key=lambda name: group_of[name])
        pages = [groups[group_of[name]].kv_cache_spec.page_size_bytes for name in sharers]
        pools.append(Pool(max(pages), tuple(sharers)))
    missing = sorted(group_of.keys() - placed, key=layer_order)
    if pools and missing:
        raise PlanMismatchError(
            f"rank {rank}, group {group_of[missing[0]]}: layer {missing[0]} has no tensor: plan "
            "the rank again"
        )
    return pools


def _require_sharers(
    where: str, sharers: Sequence[str], group_of: Mapping[str, int], placed: Set[str]
) -> None:
    """Raise unless a tensor has layers, each of another group, none of them `placed`."""
    if not sharers:
        raise PlanMismatchError(f"{where}: shared_by is empty: plan the rank again")
    first_of: dict[int, str] = {}
    for name in sharers:
        if name not in group_of:
            raise PlanMismatchError(
                f"{where}: layer {name} is in none of the rank's KV cache groups: plan the rank "
                "again"
            )
        if name in placed:
            raise PlanMismatchError(
                f"{where}: layer {name} is in another tensor already: plan the rank again"
            )
        other = first_of.setdefault(group_of[name], name)
        if other != name:
            raise PlanMismatchError(
                f"{where}: layers {other} and {name} of group {group_of[name]} share it, and would "
                "overwrite each other: plan the rank again"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names, key=layer_order))
