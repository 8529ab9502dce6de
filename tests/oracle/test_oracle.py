"""A few walks of every kind against the peer's manager, if its environment exists."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oracle.compare import KINDS, Peer, compare_kind, walk
from tests.oracle.walk import Scenario, scenario_for

ROOT = Path(__file__).resolve().parents[2]


def peer_environment() -> Path | None:
    """The peer's environment: `KVCACHE_PEER`, or that of `make bench-peer`."""
    named = os.environ.get("KVCACHE_PEER")
    environment = Path(named) if named else ROOT / ".venv-peer"
    return environment if (environment / "bin" / "python").exists() else None


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    environment = peer_environment()
    if environment is None:
        pytest.skip(
            "NOT COMPARED with the peer: set KVCACHE_PEER to its environment, or build it with "
            "make bench-peer"
        )
    process = Peer(environment)
    yield process
    process.close()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A refused reset is logged as a warning, and belongs to every walk here."""
    logger = logging.getLogger("kvcache")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("kind", KINDS)
def test_our_manager_answers_as_the_peer_does_but_for_the_rules_that_are_named(
    peer: Peer, kind: str
) -> None:
    found = compare_kind(peer, kind, range(1000, 1003), num_operations=200)
    assert found.unexplained == []
    assert found.num_operations == 600
    assert found.num_hits > 0


def test_a_window_that_is_one_token_off_is_noticed(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.oracle.our_side.WINDOW_TOKENS", 9)
    scenarios = [scenario_for("window", seed, 200) for seed in range(3)]
    assert all(walk(peer, scenario)[2] is not None for scenario in scenarios)


def test_a_walk_is_the_same_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.oracle.our_side import OurSide
    from tests.oracle.walk import Replay, Walk

    def operations(scenario: Scenario) -> list[list[object]]:
        return Walk(scenario, Replay(OurSide(scenario))).run()[0]

    scenario = scenario_for("full", 7, 50)
    assert operations(scenario) == operations(scenario)
    assert operations(scenario) != operations(scenario_for("full", 8, 50))
