"""Recordings of coordinators with tiers: random schedules of faults replay exactly, with all
effects of the tiers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.protocol.scenario import Scenario, random_scenario
from tests.protocol.test_swap_schedules import scenario_of as swapping
from tests.protocol.test_tier_schedules import faulty, with_files
from tests.recorder.recorded_schedule import RecordedCluster, play_recorded, replay_watched
from tests.recorder.segments_at_rest import records_of

SEEDS_PER_TEST = 3
NUM_SEEDS = 90
KINDS = {"swaps": swapping, "disks": faulty, "files": with_files, "all": random_scenario}
QUICK = {"swaps": 3, "disks": 3, "files": 0, "all": 3}
"""Seeds of each kind that every run plays."""


def kinds_in(cluster: RecordedCluster) -> Counter[str]:
    """Count records by kind, and the manager's calls of its tiers."""
    counts: Counter[str] = Counter()
    for recorder in cluster.recorders:
        for path in sorted(recorder.directory.iterdir()) if recorder.directory.exists() else ():
            for record in records_of(path)[1:]:
                counts[type(record).__name__] += 1
                counts.update(type(call).__name__ for call in getattr(record, "calls", ()))
    return counts


def play_and_replay(
    scenario: Scenario, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    print(f"seed {scenario.seed}")
    directory.mkdir(exist_ok=True)
    cluster = play_recorded(scenario, directory)
    for recorder in cluster.recorders:
        if recorder.statistics().num_records:  # a coordinator may have been followed at once
            replay_watched(recorder, monkeypatch)
    return kinds_in(cluster)


WALKS = [
    pytest.param(kind, first, marks=[] if first < QUICK[kind] else [pytest.mark.long])
    for kind in KINDS
    for first in range(0, NUM_SEEDS, SEEDS_PER_TEST)
]


@pytest.mark.parametrize(("kind", "first"), WALKS)
def test_every_schedule_replays_exactly(
    tmp_path: Path, kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario = KINDS[kind](seed)
        play_and_replay(scenario, tmp_path / str(seed), monkeypatch)


def test_all_that_tiers_can_do_is_in_the_walks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(3):
        counts += play_and_replay(swapping(seed), tmp_path / str(seed), monkeypatch)
    for kind in ("LookedUp", "SwappedOut", "Gone", "LoadBegun", "LoadFinished", "LoadReleased"):
        assert counts[kind] > 0, kind
