"""A recording of two epochs, made once; every test gets a copy of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from tests.recorder.recorded_life import RecordedLife, make_recorder, manager_config_of


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the segments of two epochs, recorded and closed in order."""
    directory = tmp_path_factory.mktemp("recorded")
    clock, manager_config = VirtualClock(), manager_config_of("full, window")
    recorder = make_recorder(directory, manager_config, clock, segment_bytes=8_000)
    life = RecordedLife(recorder, manager_config, clock, "to be looked at")
    for restores in (False, True):
        life.begin(restores=restores)
        life.play()
        life.pin()
        life.hold()
    recorder.close()
    return directory


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> list[Path]:
    """The segments, for changes."""
    return [Path(shutil.copy(path, tmp_path)) for path in sorted(recorded.iterdir())]
