"""`python -m tests.model`: explore every scenario and report the results.

    python -m tests.model                 all of them
    python -m tests.model --quick         those that take only seconds
    python -m tests.model RULE --trace    without one rule, with the shortest trace to a violation
    python -m tests.model --json          one line of JSON for each scenario
    python -m tests.model --rules         the table of rules

Exit code 1 if a safe scenario has a violation, or the removal of a rule is not noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

from tests.model.explorer import Found, explore, trace
from tests.model.rules import RULES
from tests.model.scenarios import BACKED, SAFE, UNSAFE, Scenario, scenario_named
from tests.model.sizes import Model


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario."""

    scenario: Scenario
    found: Found
    took_s: float

    @property
    def is_as_expected(self) -> bool:
        """Whether a safe scenario has no violation, and an unsafe one has one."""
        if self.scenario.removed:
            return bool(self.found.problem)
        return self.found.is_complete and not self.found.problem

    def as_json(self) -> str:
        """Return the statistics as a line."""
        return json.dumps(
            {
                "scenario": self.scenario.name,
                "removed": self.scenario.removed,
                "problem": self.found.problem,
                "steps": max(0, len(self.found.path) - 1),
                "states": self.found.num_states,
                "actions": self.found.num_actions,
                "complete": self.found.is_complete,
                "as_expected": self.is_as_expected,
                "took_s": round(self.took_s, 2),
            }
        )

    def as_text(self) -> str:
        """Return the statistics as text."""
        found = self.found
        verdict = found.problem or ("safe" if found.is_complete else "stopped, too many states")
        if found.problem:
            verdict += f" (after {len(found.path) - 1} actions)"
        mark = "ok " if self.is_as_expected else "BAD"
        statistics = f"{found.num_states:8} states {self.took_s:6.1f} s"
        return f"{mark} {statistics}  {self.scenario.name}: {verdict}"


def run(scenario: Scenario, model: Model, *, is_showing_progress: bool) -> Outcome:
    """Explore the model of one scenario."""

    def show(num_states: int, num_left: int) -> None:
        print(
            f"\r    {scenario.name}: {num_states} states, {num_left} to look at   ",
            end="",
            file=sys.stderr,
            flush=True,
        )

    started_s = time.perf_counter()
    found = explore(model, progress=show if is_showing_progress else None)
    if is_showing_progress:
        print("\r\033[K", end="", file=sys.stderr)
    return Outcome(scenario, found, time.perf_counter() - started_s)


def main(arguments: list[str] | None = None) -> int:
    """Explore the scenarios that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="RULE", help="rules to remove, or safe names")
    parser.add_argument("--quick", action="store_true", help="leave the long ones out")
    parser.add_argument("--trace", action="store_true", help="print the way into trouble")
    parser.add_argument("--json", action="store_true", help="one line of JSON each")
    parser.add_argument("--rules", action="store_true", help="print the rules and do nothing")
    options = parser.parse_args(arguments)
    if options.rules:
        for name, sentence in RULES.items():
            print(f"{name:24} {sentence}" + (f" [{BACKED[name]}]" if name in BACKED else ""))
        return 0
    try:
        chosen = [scenario_named(name) for name in options.names] or [*SAFE, *UNSAFE]
    except KeyError as error:
        parser.error(str(error.args[0]))
    outcomes = []
    for scenario in chosen:
        if options.quick and scenario.is_long:
            continue
        model = scenario.model(is_sorting=not options.trace)
        is_watched = sys.stderr.isatty() and not options.json
        outcome = run(scenario, model, is_showing_progress=is_watched)
        outcomes.append(outcome)
        print(outcome.as_json() if options.json else outcome.as_text(), flush=True)
        if options.trace and not options.json:
            for i, line in enumerate(trace(model, outcome.found.path), 1):
                print(f"{i:6} {line}")
    if not options.json:
        total = sum(outcome.found.num_states for outcome in outcomes)
        bad = sum(not outcome.is_as_expected for outcome in outcomes)
        print(f"{len(outcomes)} scenarios, {total} states, {bad} not as expected")
    return 0 if all(outcome.is_as_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
