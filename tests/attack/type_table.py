"""Every public function and method, with the kinds of its parameters.

A `Subject` makes a small world, returns its state, checks it, and has a `Case` for each callable:
valid arguments, and the kind of each. An exported callable without a case or an exemption makes
test_type_table.py fail, and so does a parameter without a kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import actors
import kvcache
import kvcache.config
import kvcache.events
import kvcache.offload
import kvcache.planner
import kvcache.sequences
import kvcache.specs
from kvcache.base.errors import InvalidInputError, KVCacheError
from tests.attack.argument_kinds import Kind
from tests.attack.parameter_kinds import KINDS

World = Any
Arguments = dict[str, Any]


def nothing(world: World) -> object:
    return None


@dataclass(frozen=True)
class Case:
    """One callable. `call(world, arguments)` with `good(world)` works, and the state may change;
    with one argument replaced by a wrong value it raises, and the state stays the same."""

    name: str
    kinds: Mapping[str, Kind]
    good: Callable[[World], Arguments]
    call: Callable[[World, Arguments], object]
    skips_forms: frozenset[str] = frozenset()
    """Parameters whose other forms cannot be compared."""
    error: type[KVCacheError] = InvalidInputError

    def of_message(self) -> Case:
        """The same for functions that read a message, which raise another error."""
        return replace(self, error=KVCacheError)


@dataclass(frozen=True)
class Subject:
    """Some cases that share a world."""

    name: str
    make: Callable[[], World] = lambda: None
    state: Callable[[World], object] = nothing
    check: Callable[[World], object] = nothing
    cases: tuple[Case, ...] = ()
    alike: Callable[[World], object] | None = None
    """The part of the state that is equal in worlds with equal histories; None: all of it."""


@dataclass
class Builder:
    """Collects the cases of one class. `kinds` adds to `KINDS`, as those of a case do."""

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
        """A dataclass without checks of its own: `call` takes it and checks its fields."""

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
        known = {**KINDS, **self.kinds, **kinds}
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
    known = {name: KINDS[name] for name in parameters(function) if name in KINDS}
    return Case(function.__name__, {**known, **kinds}, values, call, frozenset(skips_forms))


# --- public callables ----------------------------------------------------------------------------

MODULES: tuple[ModuleType, ...] = (
    kvcache,
    kvcache.config,
    kvcache.events,
    kvcache.offload,
    kvcache.planner,
    kvcache.sequences,
    kvcache.specs,
)
CLIENTS = ("AsyncKVCacheClient", "KVCacheClient")


@dataclass(frozen=True)
class Border:
    """A public callable: its name in the table, its parameters, its class."""

    name: str
    parameters: frozenset[str]
    owner: type[Any] | None = None


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
    found = {name: getattr(actors, name) for name in CLIENTS}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[name] = value
    return found


def is_implemented_by_others(cls: type[Any]) -> bool:
    """Return whether a class is only an interface."""
    return bool(getattr(cls, "_is_protocol", False)) or inspect.isabstract(cls)


def borders() -> Iterator[Border]:
    """All callables with arguments, without those of protocols and abstract classes."""
    for name, value in exported().items():
        if inspect.isfunction(value):
            yield Border(name, frozenset(parameters(value)))
        elif not issubclass(value, (BaseException, Enum)) and not is_implemented_by_others(value):
            yield from (each for each in _of_class(value) if each.parameters)


def _of_class(cls: type[Any]) -> Iterator[Border]:
    yield Border(f"{cls.__name__}.__init__", frozenset(constructor_parameters(cls)), cls)
    of_pydantic = dir(BaseModel) if issubclass(cls, BaseModel) else []
    for name in sorted({*dir(cls)} - {*of_pydantic}):
        found = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if isinstance(found, property):
            if found.fset is not None:
                yield Border(f"{cls.__name__}.{name}=", frozenset({name}), cls)
            continue
        function = getattr(found, "__func__", found)
        if inspect.isfunction(function) and _is_ours(function):
            yield Border(f"{cls.__name__}.{name}", frozenset(parameters(function)), cls)


def _is_ours(function: Any) -> bool:
    return function.__module__.split(".")[0] in {"kvcache", "actors"}


# --- exemptions ----------------------------------------------------------------------------------

EXEMPTIONS: dict[str, str] = {
    "made by the package and handed out: statistics, answers, jobs, events": """
        AllocatorStatistics CoreStatistics HierarchyStatistics ManagerStatistics TierStatistics
        GroupReport Plan PlanReport RankReport Difference PageTensor
        CacheHit StepResult Refusal OffloadingEvent PrepareStoreOutput
        Discards TransferJob
        BlocksRemoved BlocksStored KVCacheBlock
        PrefixMatch PublisherStatistics SubscriptionStatistics
    """,
    "made from payloads, which are read as strictly as any message": """
        EventBatch RemovedEvent StoredEvent Update
    """,
    "answers of what others implement, read by the package": """
        HandlerRoute OffloadHit TransferResult TransferSpec
    """,
    "figures that are added up, not arguments": """
        PrefixCacheStats.__init__:reset,requests,queries,hits
        PrefixCacheStats.__init__:preempted_requests,preempted_queries,preempted_hits
        Pin.__init__:num_tokens,num_blocks,expires_at_s
    """,
    "arithmetic and checks, on the package's own numbers and for its own sections": """
        ceil_div require_count parse_bytes
    """,
    "of a layer, for the configuration that it is in": """
        Layer.indivisible Layer.misaligned Layer.spec HeadsLayer.heads_of_rank
    """,
    "of a pool, for managers": "BlockPool.num_unheld",
    "of a manager of one kind, for its coordinator or its base": """
        SingleTypeKVCacheManager.cacheable_columns SingleTypeKVCacheManager.forget_request
        SingleTypeKVCacheManager.longest_hit SingleTypeKVCacheManager.match
        SingleTypeKVCacheManager.new_columns SingleTypeKVCacheManager.num_cached_blocks
        SingleTypeKVCacheManager.require_cacheable
    """,
    "of a request, for the manager that serves it": """
        Request.append_checked_token_ids Request.packed_block_hashes Request.token_bytes
    """,
    "of a block, for its allocator": "PrefixCachingBlock.attach",
    "of a tier, for its hierarchy": """
        TierManager.adopt TierManager.join TierManager.reserve:are_copies
    """,
    "hooks that do nothing unless overridden": """
        OffloadingManager.on_new_request OffloadingManager.on_request_finished
    """,
    "of a hierarchy, for the connector that moves its bytes": """
        TierHierarchy.files_changed TierHierarchy.mark_copies TierHierarchy.plan_import
    """,
    "made by a cluster, of its own parts": """
        KVCacheClient.__init__ AsyncKVCacheClient.__init__ AsyncKVCacheClient.connect
        PublisherSettings.of
    """,
}
"""Names by reason: a class, a method of a class and of derived classes, or parameters."""


def exempted() -> dict[str, frozenset[str]]:
    """The parameters that no table must test, by name; none: all of them."""
    found: dict[str, frozenset[str]] = {}
    for names in EXEMPTIONS.values():
        for each in names.split():
            name, _, of_parameters = each.partition(":")
            listed = frozenset(of_parameters.split(",")) if of_parameters else frozenset()
            found[name] = found.get(name, frozenset()) | listed
    return found


def names_of(border: Border) -> set[str]:
    """The names under which an exemption can be: of the class, and of its bases."""
    if border.owner is None:
        return {border.name}
    method = border.name.partition(".")[2]
    classes = [cls.__name__ for cls in border.owner.__mro__]
    return {border.owner.__name__, *(f"{name}.{method}" for name in classes)}
