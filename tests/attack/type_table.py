"""Every public function and method, its parameters, and what each parameter may be.

A `Subject` makes a small world, says what its state is and how it is checked, and has a `Case` for
each thing that can be called: good arguments, and the kind of each. What is exported and stands
neither here nor among the exemptions makes test_type_table.py fail, and so does a parameter
without a kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import actors
import kvcache
import kvcache.offload
import kvcache.planner
import kvcache.sequences
from tests.attack.argument_kinds import Kind

World = Any
Arguments = dict[str, Any]


def nothing(world: World) -> object:
    return None


@dataclass(frozen=True)
class Case:
    """One callable: `call(world, arguments)` with `good(world)` works, and the state changes or
    not; with one argument replaced by a wrong value it raises and nothing has changed."""

    name: str
    kinds: Mapping[str, Kind]
    good: Callable[[World], Arguments]
    call: Callable[[World, Arguments], object]
    skips_forms: frozenset[str] = frozenset()
    """Parameters whose other forms cannot be compared."""


@dataclass(frozen=True)
class Subject:
    """Some cases that share a world."""

    name: str
    make: Callable[[], World] = lambda: None
    state: Callable[[World], object] = nothing
    check: Callable[[World], object] = nothing
    cases: tuple[Case, ...] = ()
    alike: Callable[[World], object] | None = None
    """The part of the state in which worlds that went the same way are alike; None: all of it."""


@dataclass
class Builder:
    """Writes the cases of one class down."""

    cls: Any
    target: Callable[[World], Any] = lambda world: world
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def method(
        self,
        name: str,
        good: Callable[[World], Arguments] | Arguments | None = None,
        skips_forms: tuple[str, ...] = (),
        **kinds: Kind,
    ) -> None:
        """A method of the target, called by keyword."""
        names = parameters(inspect.getattr_static(self.cls, name))

        def call(world: World, arguments: Arguments) -> object:
            return getattr(self.target(world), name)(**arguments)

        self._add(name, names, good, kinds, call, skips_forms)

    def made(
        self, good: Callable[[World], Arguments] | Arguments | None = None, **kinds: Kind
    ) -> None:
        """The constructor."""

        def call(world: World, arguments: Arguments) -> object:
            return self.cls(**arguments)

        self._add("__init__", constructor_parameters(self.cls), good, kinds, call, ())

    def attribute(self, name: str, kind: Kind, good: object) -> None:
        """An attribute that can be set."""

        def call(world: World, arguments: Arguments) -> object:
            setattr(self.target(world), name, arguments[name])
            return None

        self._add(f"{name}=", (name,), {name: good}, {name: kind}, call, ())

    def handed_to(
        self,
        call: Callable[[World, Any], object],
        good: Callable[[World], Arguments] | Arguments,
        skips_forms: tuple[str, ...] = (),
        **kinds: Kind,
    ) -> None:
        """A dataclass without checks of its own: `call` takes it and looks at its fields."""

        def make_and_call(world: World, arguments: Arguments) -> object:
            return call(world, self.cls(**arguments))

        names = constructor_parameters(self.cls)
        self._add("__init__", names, good, kinds, make_and_call, skips_forms)

    def _add(  # noqa: PLR0917 - the fields of a case
        self,
        name: str,
        names: tuple[str, ...],
        good: Callable[[World], Arguments] | Arguments | None,
        kinds: Mapping[str, Kind],
        call: Callable[[World, Arguments], object],
        skips_forms: tuple[str, ...],
    ) -> None:
        known = {**self.kinds, **kinds}
        values = good if callable(good) else lambda world: dict(good or {})
        of_call = {each: known[each] for each in names if each in known}
        title = f"{self.cls.__name__}.{name}"
        self.cases.append(Case(title, of_call, values, call, frozenset(skips_forms)))


def function_case(
    function: Callable[..., Any],
    good: Callable[[World], Arguments] | Arguments,
    skips_forms: tuple[str, ...] = (),
    **kinds: Kind,
) -> Case:
    """A function, called by keyword."""

    def call(world: World, arguments: Arguments) -> object:
        return function(**arguments)

    values = good if callable(good) else lambda world: dict(good)
    return Case(function.__name__, kinds, values, call, frozenset(skips_forms))


# --- what there is to be called ------------------------------------------------------------------

MODULES: tuple[ModuleType, ...] = (kvcache, kvcache.planner, kvcache.offload, kvcache.sequences)


def parameters(function: Any) -> tuple[str, ...]:
    """The parameters of a function or method."""
    if isinstance(function, (classmethod, staticmethod)):
        function = function.__func__
    return tuple(p for p in inspect.signature(function).parameters if p not in {"self", "cls"})


def constructor_parameters(cls: type[Any]) -> tuple[str, ...]:
    """The parameters of a constructor."""
    return tuple(inspect.signature(cls).parameters)


def exported() -> dict[str, Any]:
    """All classes and functions that are public, by name."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[name] = value
    for name in ("KVCacheClient", "AsyncKVCacheClient"):
        found[name] = getattr(actors, name)
    return found


def callables() -> Iterator[tuple[str, tuple[str, ...]]]:
    """All that can be called with arguments, as the table names it, and its parameters."""
    for name, value in exported().items():
        if inspect.isfunction(value):
            yield name, parameters(value)
        elif not issubclass(value, (BaseException, Enum)):
            yield from _of_class(value)


def _of_class(cls: type[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    is_made = not getattr(cls, "_is_protocol", False) and not inspect.isabstract(cls)
    if is_made and (names := constructor_parameters(cls)):
        yield f"{cls.__name__}.__init__", names
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if isinstance(found, property):
            if found.fset is not None:
                yield f"{cls.__name__}.{name}=", (name,)
            continue
        function = getattr(found, "__func__", found)
        if inspect.isfunction(function) and _is_ours(function) and (names := parameters(function)):
            yield f"{cls.__name__}.{name}", names


def _is_ours(function: Any) -> bool:
    return function.__module__.split(".")[0] in {"kvcache", "actors"}


# --- what stands in no table ----------------------------------------------------------------------

INNER_METHODS = frozenset(
    {
        "adopt",
        "append_checked_token_ids",
        "attach",
        "blocks_of",
        "boundaries",
        "cache_runs",
        "can_all_be_cached",
        "can_be_cached",
        "capacity_tokens",
        "columns",
        "connect",
        "describe",
        "extend_table",
        "find_quarantined",
        "finder",
        "forget_copies",
        "forget_request",
        "fork",
        "get_new_blocks_for",
        "give_back",
        "group_hashes",
        "has_blocks",
        "has_room",
        "holders_of",
        "known",
        "leading_token_bytes",
        "longest_hit",
        "longest_hits",
        "longest_match",
        "match_all",
        "match_groups",
        "next_full_tokens",
        "next_skip_tokens",
        "note_cached",
        "note_next_digest",
        "note_own_end",
        "num_cached_blocks",
        "num_unheld",
        "packed_block_hashes",
        "replace_block",
        "require_cacheable",
        "rewind",
        "row_limits",
        "seal",
        "tail_first",
        "take",
        "take_back",
        "take_back_boundaries",
        "take_back_run",
        "take_skipped_blocks",
        "take_uncached_runs",
        "tenant_numbers",
        "token_bytes",
        "weight",
        "weights",
        "withdraw",
        "writes_column",
    }
)
"""Methods for those who run the object, and have checked: they take arguments on their word."""

NO_BORDERS = frozenset(
    {
        "AllocatorStatistics",
        "AttentionSpec",
        "BlockCore",
        "BlocksRemoved",
        "BlocksStored",
        "CacheHit",
        "Core",
        "CoreStatistics",
        "Discards",
        "EventSink",
        "FetchJob",
        "GroupReport",
        "HandlerRoute",
        "HashFn",
        "HierarchyStatistics",
        "KVCacheBlock",
        "KVCacheCoordinator",
        "KVCacheSpec",
        "LoadJob",
        "ManagerStatistics",
        "NullEventSink",
        "NullOffloadHooks",
        "OffloadHit",
        "OffloadHooks",
        "OffloadingEvent",
        "OffloadingHandler",
        "OffloadingManager",
        "OffloadingSpec",
        "OverdueJob",
        "Plan",
        "PlanReport",
        "PrepareStoreOutput",
        "RankReport",
        "Refusal",
        "SingleTypeKVCacheManager",
        "SpillJob",
        "StepResult",
        "StoreJob",
        "TierHits",
        "TierStatistics",
        "TransferResult",
        "TransferSpec",
    }
)
"""What is handed out, what others implement or derive from, and what stands below a manager."""

UNCOVERED = frozenset(
    {
        "*.max_memory_usage_bytes",
        "*.max_table_blocks",
        "*.merge",
        "*.num_skipped_tokens",
        "*.with_block_size",
        "*.with_page_size_padded",
        "HFChoices",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheTensor",
        "PlanOptions",
        "RankCoordinates",
        "RankMemory",
        "check_enough_kv_cache_memory",
        "cluster_from_hf_config",
        "create_kv_cache_group_specs",
        "estimate_max_model_len",
        "get_kv_cache_config",
        "get_kv_cache_configs",
        "get_kv_cache_coordinator",
        "get_kv_cache_groups",
        "get_manager_for_kv_cache_spec",
        "get_max_concurrency_for_kv_cache_config",
        "get_num_blocks",
        "get_uniform_page_size",
        "is_kv_cache_page_size_uniform",
        "is_kv_cache_type_attention_free",
        "is_kv_cache_type_uniform",
        "layer_order",
        "layout_fingerprint",
        "max_memory_usage_bytes",
        "merge_rank_specs",
        "model_from_hf_config",
        "plan_cluster",
        "plan_fingerprint",
        "plan_kv_cache",
        "plan_options",
        "project_groups",
        "rank_coordinates",
        "rank_layout_fingerprint",
        "rank_memory",
        "report_plan",
        "unify_hybrid_kv_cache_specs",
        "unify_kv_cache_configs",
        "unify_page_sizes",
    }
)
"""Borders whose arguments no table drives yet."""


def is_exempt(name: str) -> bool:
    """Whether a callable, as `callables` names it, stands in no table for a reason."""
    owner, _, method = name.partition(".")
    if owner in NO_BORDERS or owner in UNCOVERED or method in INNER_METHODS:
        return True
    return owner.endswith("Spec") and f"*.{method}" in UNCOVERED
