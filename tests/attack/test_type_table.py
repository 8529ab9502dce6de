"""Wrong types at every public border: our error, an unchanged state, books that add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache.errors import InvalidInputError
from tests.attack.manager_subjects import (
    CLIENT_SUBJECTS,
    POOL_SUBJECTS,
    REQUEST_SUBJECTS,
    SPEC_SUBJECTS,
)
from tests.attack.sequence_subjects import SEQUENCE_SUBJECTS
from tests.attack.tier_subjects import TIER_SUBJECTS
from tests.attack.type_table import (
    INNER_METHODS,
    NO_BORDERS,
    UNCOVERED,
    Case,
    Subject,
    callables,
    is_exempt,
)


def problems_of(subject: Subject, case: Case, step: int = 1) -> list[str]:
    """Drive one callable with every wrong value of every parameter; say what went wrong."""
    found: list[str] = []
    world = subject.make()
    for name, kind in case.kinds.items():
        for wrong in kind.wrong[::step]:
            arguments = {**case.good(world), name: wrong}
            before = subject.state(world)
            problem = _problem_of(lambda: case.call(world, arguments))  # noqa: B023 - called at once
            try:
                subject.check(world)
                if subject.state(world) != before:
                    problem += " (state changed)"
            except Exception as error:
                problem += f" (books broken: {type(error).__name__} {error})"
            if problem:
                found.append(f"{case.name}({name}={shown(wrong)}): {problem}")
                world = subject.make()
    return found


def _problem_of(call: Callable[[], object]) -> str:
    """Call what must be refused; say what is wrong with how it was."""
    try:
        result = call()
    except InvalidInputError as error:
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
        *SPEC_SUBJECTS,
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
    """What can be compared of a result, its type included: 5 is not np.int64(5)."""
    if isinstance(result, (int, float, str, bytes, type(None))):
        return type(result), result
    if isinstance(result, (list, tuple)):
        return [_plain(item) for item in result]
    return type(result).__name__


PARTLY = {"Pin.__init__", "PrefixCacheStats.__init__", "AsyncKVCacheClient.connect"}
CONSTRUCTED_ELSEWHERE = {"KVCacheClient.__init__", "AsyncKVCacheClient.__init__"}


def test_every_public_callable_and_parameter_is_in_the_table_or_exempt() -> None:
    known: dict[str, set[str]] = {}
    for _, case in CASES:
        known.setdefault(case.name, set()).update(case.kinds)
    missing = []
    for name, names in callables():
        if name in PARTLY | CONSTRUCTED_ELSEWHERE or (name not in known and is_exempt(name)):
            continue
        lacking = set(names) - known.get(name, set())
        if name not in known or lacking:
            missing.append(f"{name}: {', '.join(sorted(lacking))}")
    assert missing == []


def test_no_exemption_is_out_of_date() -> None:
    names = {name for name, _ in callables()}
    owners = {name.partition(".")[0] for name in names}
    methods = {name.partition(".")[2] for name in names}
    assert NO_BORDERS - owners == set()
    assert INNER_METHODS - methods == set()
    assert {name for name in UNCOVERED if name.partition(".")[0] not in owners | {"*"}} == set()
    driven = {case.name.partition(".")[0] for _, case in CASES}
    assert driven & (NO_BORDERS | UNCOVERED) == set()
