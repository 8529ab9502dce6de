"""Wrong types at every public interface: our error, an unchanged and consistent state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import pytest

from kvcache.base.errors import KVCacheError
from tests.attack.config_subjects import CONFIG_SUBJECTS
from tests.attack.event_subjects import EVENT_SUBJECTS
from tests.attack.manager_subjects import CLIENT_SUBJECTS, POOL_SUBJECTS, REQUEST_SUBJECTS
from tests.attack.planner_subjects import PLANNER_SUBJECTS
from tests.attack.sequence_subjects import SEQUENCE_SUBJECTS
from tests.attack.tier_subjects import TIER_SUBJECTS
from tests.attack.type_table import (
    Arguments,
    Case,
    Subject,
    World,
    borders,
    exempted,
    exported,
    is_implemented_by_others,
    names_of,
)


def problems_of(subject: Subject, case: Case) -> list[str]:
    """Call one callable with every wrong value of every parameter; return the problems."""

    def begin() -> tuple[World, Arguments, object]:
        world = subject.make()
        good = case.good(world)  # may change the world
        return world, good, subject.state(world)

    found: list[str] = []
    world, good, before = begin()
    for name, kind in case.kinds.items():
        for wrong in kind.wrong:
            problem = _problem_of(partial(case.call, world, {**good, name: wrong}), case.error)
            if subject.state(world) != before:
                problem += " (state changed)"
            if problem:
                found.append(f"{case.name}({name}={shown(wrong)}): {problem}")
                world, good, before = begin()
        try:
            subject.check(world)
        except Exception as error:
            found.append(f"{case.name}({name}): inconsistent state: {type(error).__name__} {error}")
            world, good, before = begin()
    return found


def _problem_of(call: Callable[[], object], expected: type[KVCacheError]) -> str:
    """Make a call that must be refused; return the problem if it was not."""
    try:
        result = call()
    except expected as error:
        return "" if str(error).strip() else "an error without a text"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"accepted, with {shown(result)}"


def shown(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r}"[:80]
    except Exception:
        return type(value).__name__


CASES = [
    (subject, case)
    for subject in (
        *REQUEST_SUBJECTS,
        *CLIENT_SUBJECTS,
        *POOL_SUBJECTS,
        *CONFIG_SUBJECTS,
        *EVENT_SUBJECTS,
        *PLANNER_SUBJECTS,
        *SEQUENCE_SUBJECTS,
        *TIER_SUBJECTS,
    )
    for case in subject.cases
]
IDS = [f"{subject.name}-{case.name}" for subject, case in CASES]


@pytest.mark.parametrize(("subject", "case"), CASES, ids=IDS)
def test_wrong_values_are_refused_and_change_nothing(subject: Subject, case: Case) -> None:
    assert problems_of(subject, case) == []


@pytest.mark.parametrize(("subject", "case"), CASES, ids=IDS)
def test_other_forms_of_a_good_value_act_like_it(subject: Subject, case: Case) -> None:
    for name, kind in case.kinds.items():
        if name in case.skips_forms:
            continue
        world = subject.make()
        good = case.good(world)
        if name not in good:
            continue
        for form in kind.forms(good[name]):
            expected, other = subject.make(), subject.make()
            results = [
                case.call(expected, case.good(expected)),
                case.call(other, {**case.good(other), name: form}),
            ]
            where = f"{case.name}({name}={shown(form)})"
            state = subject.alike or subject.state
            assert state(other) == state(expected), where
            assert _plain(results[1]) == _plain(results[0]), where
            subject.check(other)


def _plain(result: object) -> object:
    """The comparable part of a result, including its type: 5 is not np.int64(5)."""
    if isinstance(result, (int, float, str, bytes, type(None))):
        return type(result), result
    if isinstance(result, (list, tuple)):
        return [_plain(item) for item in result]
    return type(result).__name__


def test_every_public_callable_and_parameter_is_in_the_table_or_exempt() -> None:
    known: dict[str, set[str]] = {}
    for _, case in CASES:
        known.setdefault(case.name, set()).update(case.kinds)
    exempt, missing = exempted(), []
    for border in borders():
        names = names_of(border) & exempt.keys()
        if any(not exempt[name] for name in names):
            continue
        spared = frozenset[str]().union(*(exempt[name] for name in names))
        lacking = border.parameters - known.get(border.name, set()) - spared
        if lacking:
            missing.append(f"{border.name}: {', '.join(sorted(lacking))}")
    assert missing == []


def test_no_exemption_is_out_of_date_or_idle() -> None:
    found: dict[str, frozenset[str]] = {}
    for border in borders():
        for name in names_of(border):
            found[name] = found.get(name, frozenset()) | border.parameters
    exempt = exempted()
    assert exempt.keys() - found.keys() == set()
    assert {name for name, spared in exempt.items() if spared - found[name]} == set()
    driven: dict[str, set[str]] = {}
    for _, case in CASES:
        for name in (case.name, case.name.partition(".")[0]):
            driven.setdefault(name, set()).update(case.kinds)
    idle = [
        name
        for name, spared in exempt.items()
        if (name in driven if not spared else driven.get(name, set()) & spared)
    ]
    assert idle == []


def test_what_others_implement_is_driven_where_the_package_implements_it() -> None:
    """Abstract classes have no interface of their own: each has a class here that implements it."""
    classes = [value for value in exported().values() if inspect.isclass(value)]
    concrete = [cls for cls in classes if not is_implemented_by_others(cls)]
    bare = {
        cls.__name__
        for cls in classes
        if inspect.isabstract(cls)
        and not getattr(cls, "_is_protocol", False)
        and not any(issubclass(each, cls) for each in concrete)
    }
    assert bare == LEFT_TO_OTHERS


LEFT_TO_OTHERS = {"HashFn", "OffloadingHandler", "OffloadingSpec"}
"""Abstract, and implemented by others, or by classes without a public name."""
