"""Simulated schedules of faults with recorded coordinators, and the effect of each record."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.base.clock import Clock
from kvcache.coordinator.step_recorder import (
    EpochBegun,
    EpochEnded,
    Event,
    Gone,
    LookedUp,
    SwappedOut,
)
from kvcache.manager import KVCacheManager
from kvcache.manager.statistics import ManagerStatistics
from kvcache.recorder import (
    FileStepRecorder,
    ManagerConfig,
    RecorderLimits,
    RecordingOrigin,
    RecordReplay,
    RecordReplayReport,
    open_recording,
)
from kvcache.recorder import replay as replay_module
from kvcache.recorder.segments import SegmentLimits
from tests.protocol.scenario import Scenario
from tests.protocol.simulation import Cluster

POLICIES = ("lru", "s3fifo", "arc", "adaptive", "lru2")


class WatchedRecorder(FileStepRecorder):
    """A recorder that also keeps the manager's statistics, record by record."""

    def __init__(self, directory: Path, origin: RecordingOrigin, clock: Clock) -> None:
        limits = RecorderLimits(SegmentLimits(directory, 1 << 16, 1 << 30))
        super().__init__(limits, origin, clock)
        self.directory = directory
        self.seen: list[ManagerStatistics] = []
        self.state: dict[str, object] = {}
        self._watched: KVCacheManager | None = None

    def record(self, event: Event) -> None:
        super().record(event)
        match event:
            case EpochBegun():
                self._watched = event.manager
            case EpochEnded():
                self._watched = None
            case LookedUp() | SwappedOut() | Gone():
                return
        if self._watched is not None:
            self.seen.append(self._watched.statistics())

    def close(self) -> None:
        if self._watched is not None:
            self.state = self._watched.dump_state()
            self.seen.append(self._watched.statistics())
            self._watched = None
        super().close()


class RecordedCluster(Cluster):
    """A schedule with a recorder for each of its coordinators; managers vary with the seed."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.recorders: list[WatchedRecorder] = []
        self._records = directory / "records"
        super().__init__(scenario, directory)

    @property
    def manager_config(self) -> ManagerConfig:
        chance = random.Random(self.scenario.seed * 15485867 + 5)
        return replace(
            super().manager_config,
            log_stats=True,
            eviction_policy=chance.choice(POLICIES),
            watermark=chance.choice((0.0, 0.05)),
        )

    def _make_recorder(self) -> WatchedRecorder:
        name = f"coordinator-{self.num_coordinators}"
        has_tiers = self.scenario.num_host_blocks > 0
        origin = RecordingOrigin(name, "plan", "{}", self.manager_config, has_tiers)
        self.recorders.append(WatchedRecorder(self._records / name, origin, self.clock))
        return self.recorders[-1]


def play_recorded(scenario: Scenario, directory: Path) -> RecordedCluster:
    """Play a schedule to its end, and close all recordings."""
    cluster = RecordedCluster(scenario, directory)
    try:
        cluster.play()
        for recorder in cluster.recorders:
            recorder.close()
    except Exception as error:
        raise AssertionError(f"seed {scenario.seed}: {error} ({scenario})") from error
    finally:
        cluster.close()
    return cluster


def replay_watched(
    recorder: WatchedRecorder, monkeypatch: pytest.MonkeyPatch
) -> RecordReplayReport:
    """Replay a recording; statistics match after each record, and the final state matches."""
    monkeypatch.setattr(replay_module, "PROGRESS_INTERVAL", 1)
    statistics: list[ManagerStatistics] = []

    def look(report: RecordReplayReport) -> None:
        statistics.append(replayed.manager.statistics())

    replayed = RecordReplay(open_recording(recorder.directory), look)
    report = replayed.run()
    assert report.difference is None
    assert (report.notes, report.num_skipped_records) == ((), 0)
    assert report.num_records == recorder.statistics().num_records == len(statistics)
    for number, (then, now) in enumerate(zip(recorder.seen, statistics, strict=True), 1):
        assert now == then, f"record {number}"
    assert replayed.manager is not None
    if recorder.state:  # it was closed while an epoch ran
        assert replayed.manager.dump_state() == recorder.state
        assert report.state_digest == report.recorded_state_digest != ""
    return report
