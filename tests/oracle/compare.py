"""Walks on our manager, repeated on the peer's; each difference is attributed to a rule."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.core.slow_core import SlowCore
from tests.oracle.our_side import OurSide
from tests.oracle.rules import RULES, core_of
from tests.oracle.walk import Answer, Operation, Replay, Scenario, Walk, scenario_for

HERE = Path(__file__).resolve().parent

KINDS = {
    "full": "full",
    "window": "window",
    "chunked": "chunked",
    "mla": "mla",
    "hybrid": "full+window",
    "full-eagle": "full+eagle",
    "window-eagle": "window+eagle",
    "mla-eagle": "mla+eagle",
    "hybrid-eagle": "full+window+eagle",
    "hybrid-chunked": "full+chunked",
    "hybrid-three": "full+window+chunked",
    "hybrid-coarse-window": "full+coarse-window",
    "hybrid-coarse-full": "coarse-full+window",
}
"""Groups of each kind of walk; `+eagle` turns EAGLE on."""


class Peer:
    """The peer's process, and its answers to walks."""

    def __init__(self, environment: Path) -> None:
        """Start it; raises FileNotFoundError if the environment has no Python."""
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [str(environment / "bin" / "python"), str(HERE / "peer_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def replay(
        self, scenario: Scenario, operations: Sequence[Operation], answers: Sequence[Answer]
    ) -> list[Answer]:
        """Return the peer's answers, up to the first one that differs from `answers`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps([scenario.to_json(), operations, answers]),
            file=self._process.stdin,
            flush=True,
        )
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the peer has died:\n{self._errors.read()[-2000:]}")
        got: list[Answer] = json.loads(line)
        return got

    def close(self) -> None:
        """End the process."""
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._errors.close()


@dataclass(frozen=True)
class Difference:
    """The first operation of a walk with different answers."""

    seed: int
    index: int
    operation: Operation
    ours: Answer
    theirs: Answer
    rules: tuple[str, ...] = ()
    """Rules whose removal makes the sides agree in the whole walk; empty if there are none."""


@dataclass
class Comparison:
    """All walks of one kind."""

    kind: str
    num_seeds: int = 0
    num_operations: int = 0
    num_hits: int = 0
    num_refused: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def unexplained(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.rules]

    def explained_by(self) -> dict[str, int]:
        """Return how many walks differ by each set of rules."""
        counts: dict[str, int] = {}
        for difference in self.differences:
            if difference.rules:
                name = " and ".join(difference.rules)
                counts[name] = counts.get(name, 0) + 1
        return counts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_kind(
    peer: Peer,
    kind: str,
    seeds: Sequence[int],
    num_operations: int,
    on_seed: Callable[[], None] = lambda: None,
) -> Comparison:
    """Walk every seed of a kind on both sides."""
    comparison = Comparison(kind)
    for seed in seeds:
        scenario = scenario_for(KINDS[kind], seed, num_operations)
        operations, answers, difference = walk(peer, scenario)
        comparison.num_seeds += 1
        comparison.num_operations += len(operations)
        comparison.num_hits += sum(answer[0] > 0 for answer in answers)
        comparison.num_refused += sum(answer[1] == 0 for answer in answers)
        if difference is not None:
            comparison.differences.append(explain(peer, scenario, difference))
        on_seed()
    return comparison


def walk(
    peer: Peer, scenario: Scenario, slow: type[SlowCore] | None = None
) -> tuple[list[Operation], list[Answer], Difference | None]:
    """Walk on our manager with the flat core, or with a slow one; repeat on the peer."""
    side = OurSide(scenario, slow)
    operations, answers = Walk(scenario, Replay(side)).run()
    side.manager.check()
    got = peer.replay(scenario, operations, answers)
    if got == answers:
        return operations, answers, None
    last = len(got) - 1
    difference = Difference(scenario.seed, last, operations[last], answers[last], got[last])
    return operations, answers, difference


def explain(peer: Peer, scenario: Scenario, difference: Difference) -> Difference:
    """Name the fewest rules without which both sides agree in the whole walk. With all rules, the
    slow core differs from the peer exactly as the flat one does."""
    if walk(peer, scenario, SlowCore)[2] != difference:
        return difference
    for count in range(1, len(RULES) + 1):
        for rules in combinations(RULES, count):
            if walk(peer, scenario, core_of(rules))[2] is None:
                names = tuple(rule.name for rule in rules)
                return Difference(**{**vars(difference), "rules": names})
    return difference
