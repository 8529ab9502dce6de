"""The protocol's model, explored: no violation with all rules, one without any of them."""

from __future__ import annotations

import json

import pytest

from tests.model.__main__ import main
from tests.model.explorer import STUCK, explore, trace
from tests.model.rules import RULES, Rules
from tests.model.scenarios import BACKED, SAFE, UNSAFE, Scenario, scenario_named
from tests.model.sizes import BUDGET, Model, Sizes

RULES_OFF_BY_DESIGN = {"again", "lost", "doubled"}
"""Kinds of actions that happen only if the rule against them is off."""


QUICK_SAFE = {"a worker and the coordinator die", "pipelined steps, one fails"}
"""The profiles with all rules that every test run explores."""


def cases(scenarios: tuple[Scenario, ...], quick: set[str] | None = None) -> list[object]:
    """Return the scenarios as parameters; long ones, and those not in `quick`, are marked."""
    return [
        pytest.param(
            s,
            id=s.name,
            marks=[pytest.mark.long] if s.is_long or (quick and s.name not in quick) else [],
        )
        for s in scenarios
    ]


def test_the_quick_profiles_exist() -> None:
    assert {s.name for s in SAFE} >= QUICK_SAFE


@pytest.mark.parametrize("scenario", cases(SAFE, QUICK_SAFE))
def test_with_all_rules_nothing_goes_wrong_and_everything_comes_to_rest(scenario: Scenario) -> None:
    found = explore(scenario.model())
    assert found.problem == "", "\n".join(trace(scenario.model(), found.path))
    assert found.is_complete
    assert found.num_quiet > 0
    assert found.unspent == (), "a fault of the budget never happens: the scenario shows less"


@pytest.mark.parametrize("scenario", cases(UNSAFE))
def test_a_removed_rule_is_missed(scenario: Scenario) -> None:
    found = explore(scenario.model())
    assert found.problem != ""
    assert trace(scenario.model(), found.path) or found.num_states == 1


@pytest.mark.long
@pytest.mark.parametrize("scenario", cases(UNSAFE))
def test_the_missing_rule_and_not_the_size_causes_the_violation(scenario: Scenario) -> None:
    found = explore(Model(Rules(), scenario.sizes))
    assert found.problem == "", "\n".join(trace(Model(Rules(), scenario.sizes), found.path))


def test_every_rule_is_removed_by_a_scenario_or_said_to_be_backed() -> None:
    alone = {s.removed[0] for s in UNSAFE if len(s.removed) == 1}
    assert alone | set(BACKED) == set(RULES)
    assert alone & set(BACKED) == set()


@pytest.mark.parametrize("rule", sorted(BACKED))
def test_a_backed_rule_is_not_missed_alone(rule: str) -> None:
    together = [s for s in UNSAFE if rule in s.removed]
    sizes = together[0].sizes if together else Sizes(clients=2, blocks=2, budget={"step": 2})
    assert explore(Model(Rules(**{rule: False}), sizes)).problem == ""


def test_every_kind_of_action_happens_in_a_safe_scenario() -> None:
    happening = {kind for s in SAFE for kind, number in s.sizes.budget.items() if number}
    assert happening | RULES_OFF_BY_DESIGN | {"replace"} == set(BUDGET)


def test_an_unknown_kind_of_action_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no actions \['magic'\]: the kinds are \["):
        Sizes(budget={"magic": 1})


def test_a_trace_tells_the_shortest_way_into_trouble() -> None:
    scenario = scenario_named("seal_late")
    found = explore(scenario.model())
    (line,) = trace(scenario.model(), found.path)
    assert line.startswith("client 10 asks for StepRequest(client=10, number=1, content=1) gets [")
    assert found.problem == "block 0 is offered as 1, a rank has 0 there"


def test_an_exploration_that_is_cut_short_says_so() -> None:
    found = explore(SAFE[0].model(), max_states=100)
    assert (found.problem, found.is_complete) == ("", False)


def test_a_state_that_never_ends_is_found() -> None:
    found = explore(scenario_named("empty_step").model())
    assert found.problem == STUCK


def test_the_command_explores_what_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seal_late", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["removed"] == ["seal_late"]
    assert said["as_expected"] is True
    assert main(["window", "--trace"]) == 0
    assert "the window of messages overflows (after " in capsys.readouterr().out


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["magic"])
    assert "no scenario 'magic': pass a rule, or the whole name" in capsys.readouterr().err


def test_the_command_prints_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RULES)
