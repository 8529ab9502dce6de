"""The recorder's files: content, timing and size; and failures to write."""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import InvariantError
from kvcache.coordinator.step_recorder import EpochEnded
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.recorder import FileStepRecorder, RecordReplay, RecordReplayReport, open_recording
from kvcache.recorder.segments import create_file
from tests.recorder.recorded_life import RecordedLife, make_recorder, manager_config_of

MANAGER_CONFIG = manager_config_of("full")
PROMPT = np.arange(20, dtype=np.int32)


class Disk:
    """Opens files that take `left_bytes` more bytes in total."""

    def __init__(self, left_bytes: int = 1 << 40, at_once_bytes: int = 1 << 20) -> None:
        self.left_bytes = left_bytes
        self.at_once_bytes = at_once_bytes
        self.num_asked_for_sync = 0

    def open(self, path: Path) -> FileIO:
        return _File(self, create_file(path))


class _File:
    def __init__(self, disk: Disk, file: FileIO) -> None:
        self._disk = disk
        self._file = file

    def write(self, data: memoryview, /) -> int:
        num_bytes = min(len(data), self._disk.left_bytes, self._disk.at_once_bytes)
        if not num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.left_bytes -= num_bytes
        return self._file.write(data[:num_bytes])

    def truncate(self, size: int, /) -> int:
        return self._file.truncate(size)

    def fileno(self) -> int:
        self._disk.num_asked_for_sync += 1
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class Served:
    """A recorded coordinator with simple requests, one after another."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.clock = VirtualClock()
        self.directory = directory
        self.recorder: FileStepRecorder = make_recorder(
            directory, MANAGER_CONFIG, self.clock, **options
        )
        self.life = RecordedLife(self.recorder, MANAGER_CONFIG, self.clock)
        self.begin()

    def begin(self) -> None:
        self.step = 0
        self.life.begin()

    def serve(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.step += 1
            new = (NewRequest(f"r{self.step}", PROMPT, 20),)
            finished = (f"r{self.step - 1}",) if self.step > 1 else ()
            self.life.step(
                StepRequest("a#1", self.step, 1, self.step - 1, new=new, finished=finished)
            )

    def flush(self) -> None:
        self.clock.advance(1.0)
        self.recorder.on_tick()

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in bytes, oldest first."""
        return {one.name: one.stat().st_size for one in sorted(self.directory.iterdir())}

    def replay(self) -> RecordReplayReport:
        return RecordReplay(open_recording(self.directory)).run()


Serve = Callable[..., Served]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Serve]:
    """Makes recorded coordinators; options are the directory, and those of `make_recorder`."""
    made: list[Served] = []

    def make(directory: Path = tmp_path / "records", **options: Any) -> Served:
        made.append(Served(directory, **options))
        return made[-1]

    yield make
    for one in made:
        one.recorder.close()


def test_records_wait_in_memory_until_a_tick_finds_them_old_enough(served: Serve) -> None:
    one = served()
    begun = one.sizes()
    one.serve(3)
    one.clock.advance(0.9)
    one.recorder.on_tick()
    assert one.sizes() == begun
    one.clock.advance(0.2)
    one.recorder.on_tick()
    assert sum(one.sizes().values()) == one.recorder.statistics().written_bytes
    assert one.recorder.statistics().num_records == 4
    assert one.replay().num_steps == 3


def test_only_the_owner_may_read_the_files(served: Serve) -> None:
    one = served()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in one.directory.iterdir()}
    assert (modes, stat.S_IMODE(one.directory.stat().st_mode)) == ({0o600}, 0o700)


def test_a_full_segment_is_followed_by_the_next_and_all_of_them_replay(served: Serve) -> None:
    one = served(segment_bytes=3000)
    for _ in range(40):
        one.serve()
        one.flush()
    one.recorder.close()
    sizes = one.sizes()
    assert len(sizes) == one.recorder.statistics().num_segments > 3
    assert max(sizes.values()) <= 3000
    assert list(sizes)[:2] == ["00000001-first.kvrec", "00000002-first.kvrec"]
    report = one.replay()
    assert (report.num_steps, report.notes, report.difference) == (40, (), None)
    assert report.state_digest == report.recorded_state_digest


def test_a_record_larger_than_a_segment_gets_one_of_its_own(served: Serve) -> None:
    one = served(segment_bytes=10)
    one.serve(3)
    one.recorder.close()
    assert len(one.sizes()) == 5  # three steps, the epoch's beginning, and the state at the end
    assert one.replay().num_steps == 3


def test_old_epochs_are_removed_to_stay_within_the_bound_oldest_first(served: Serve) -> None:
    one = served(segment_bytes=4000, max_bytes=20_000)
    for _ in range(6):
        for _ in range(20):
            one.serve()
            one.flush()
            assert sum(one.sizes().values()) <= 20_000
        one.begin()
    one.serve()
    one.recorder.close()
    assert sum(one.sizes().values()) <= 20_000
    assert one.recorder.statistics().problem == "no epoch runs"
    assert one.recorder.statistics().num_lost_records == 0
    assert "00000001-first.kvrec" not in one.sizes()
    report = one.replay()
    assert report.difference is None
    assert report.num_epochs >= 2
    assert report.state_digest == report.recorded_state_digest


def test_an_epoch_that_fills_the_bound_alone_keeps_its_beginning_and_stops(
    served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    one = served(segment_bytes=4000, max_bytes=12_000)
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            one.serve()
            one.flush()
    statistics = one.recorder.statistics()
    assert "more exceed recorder.max_bytes, 12000: raise it" in statistics.problem
    assert statistics.num_records + statistics.num_lost_records == 101
    assert statistics.num_failures == len(caplog.records) == 1
    assert sum(one.sizes().values()) <= 12_000
    report = one.replay()
    assert report.num_steps == statistics.num_records - 1 > 5
    one.begin()
    one.serve(2)
    one.recorder.close()
    assert one.recorder.statistics().problem == "no epoch runs"
    assert one.replay().num_epochs >= 1


@pytest.mark.parametrize("left_bytes", [0, 100, 1901, 2500, 3000, 5000])
def test_a_full_disk_stops_the_recording_and_nothing_else(
    served: Serve, caplog: pytest.LogCaptureFixture, left_bytes: int
) -> None:
    disk = Disk(left_bytes)
    with caplog.at_level(logging.ERROR):
        one = served(open_file=disk.open)
        for _ in range(30):
            one.serve()
            one.flush()
    statistics = one.recorder.statistics()
    assert statistics.problem == "OSError: [Errno 28] No space left on device"
    assert statistics.num_failures == 1
    assert statistics.num_lost_records >= 31 - statistics.num_records > 0
    assert [record.getMessage() for record in caplog.records] == [
        f"recording in {one.directory} stops until the next epoch: {statistics.problem}"
    ]
    assert one.life.manager.statistics().num_steps == 30
    if statistics.num_records:
        report = one.replay()  # a half-written record was taken off again
        assert (report.num_records, report.notes) == (statistics.num_records, ())


def test_the_next_epoch_is_recorded_again_and_lost_records_are_reported(served: Serve) -> None:
    disk = Disk()
    one = served(open_file=disk.open)
    one.serve(5)
    one.flush()
    disk.left_bytes = 0
    one.serve(7)
    one.flush()
    one.serve(2)
    disk.left_bytes = 1 << 30
    one.begin()
    one.serve(3)
    one.recorder.close()
    assert one.recorder.statistics().num_lost_records == 9
    report = one.replay()
    assert (report.num_epochs, report.num_steps, report.num_skipped_records) == (2, 8, 0)
    assert report.notes == (
        "records 7 to 15 are not there: they were lost while recording, or their segment was "
        "removed",
    )
    assert report.state_digest == report.recorded_state_digest


def test_a_disk_that_takes_little_at_once_gets_all_of_it(served: Serve) -> None:
    one = served(open_file=Disk(at_once_bytes=3).open)
    one.serve(4)
    one.recorder.close()
    assert one.replay().num_steps == 4


def test_a_directory_that_cannot_be_made_stops_the_recording(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    one = Served(tmp_path / "file" / "records")
    one.serve(2)
    one.recorder.close()
    statistics = one.recorder.statistics()
    assert statistics.problem.startswith("NotADirectoryError: ")
    assert (statistics.num_records, statistics.num_failures) == (0, 1)
    assert one.life.manager.statistics().num_steps == 2


def test_writes_are_synced_where_that_is_asked_for(served: Serve, tmp_path: Path) -> None:
    quick, careful = Disk(), Disk()
    one = served(open_file=quick.open)
    two = served(tmp_path / "careful", open_file=careful.open, is_synced=True)
    for each in (one, two):
        each.serve()
        each.flush()
    assert (quick.num_asked_for_sync, careful.num_asked_for_sync) == (0, 2)


def test_what_broke_the_manager_is_the_last_thing_recorded(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = served()
    one.serve(2)

    def broken(request: StepRequest) -> None:
        raise InvariantError("two and two are five")

    monkeypatch.setattr(one.life.manager, "step", broken)
    with pytest.raises(InvariantError, match="two and two are five"):
        one.serve()
    one.recorder.close()
    report = one.replay()
    assert (report.difference.client_id, report.difference.step) == ("a#1", 3)
    assert report.difference.what == "no error, recorded: InvariantError: two and two are five"


def test_closing_twice_or_without_an_epoch_is_harmless(tmp_path: Path) -> None:
    clock = VirtualClock()
    recorder = make_recorder(tmp_path / "records", MANAGER_CONFIG, clock)
    recorder.on_tick()
    recorder.record(EpochEnded())
    recorder.close()
    assert recorder.statistics().problem == "no epoch has begun"
    assert not (tmp_path / "records").exists()
    one = Served(tmp_path / "records")
    one.recorder.close()
    one.recorder.close()
    assert one.replay().num_records == 2


def test_two_coordinators_in_one_directory_do_not_mix_their_records(served: Serve) -> None:
    one = served(recording_id="aaaa", segment_bytes=2500)
    two = served(one.directory, recording_id="bbbb", segment_bytes=2500)
    for _ in range(20):
        for each in (one, two):
            each.serve()
            each.flush()
    one.recorder.close()
    two.recorder.close()
    report = one.replay()
    assert (report.num_epochs, report.num_steps, report.notes) == (2, 40, ())
    assert report.difference is None
