"""`kvcache record`, without a cluster: limits, ends, a missing coordinator, the file."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app
from actors.cli.command import handling
from actors.cli.record import RecordingFollower, RecordingLimits, RecordingSummary
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import DeadlineError, TraceError
from kvcache.recorder import RecordedBatch, RecordedRequest
from kvcache.requests.hints import CacheHint
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.request_recording import RecordingOptions, RequestRecording
from tests.cli.commands import run

DIGESTS = b"".join(bytes([i]) * 16 for i in range(3))

OPTIONS = RecordingOptions(10_000)


def request(arrival_s: float, num_tokens: int = 20, digests: bytes = DIGESTS) -> RecordedRequest:
    blocks = -(-num_tokens // 8)
    return RecordedRequest(arrival_s, num_tokens, 4, digests[: 16 * blocks], "tenant-1")


class FakeCluster:
    """Returns batches, one per call; raises items that are errors. Ends the command after the
    last."""

    def __init__(self, *answers: list[RecordedRequest] | Exception) -> None:
        self._answers = list(answers)
        self.clock = VirtualClock()
        self.ended = threading.Event()
        self.num_calls = 0
        self.was_finished = False

    def take(self, is_last: bool) -> RecordedBatch:
        self.num_calls += 1
        self.clock.advance(1.0)
        if is_last:
            self.was_finished = True
            return RecordedBatch((request(90.0),), 2, 8)
        answer = self._answers.pop(0)
        if not self._answers:
            self.ended.set()
        if isinstance(answer, Exception):
            raise answer
        return RecordedBatch(tuple(answer), 2, 8)

    def record(
        self,
        path: Path,
        options: RecordingOptions = OPTIONS,
        *,
        seconds: float | None = None,
        num_requests: int | None = None,
    ) -> tuple[RecordingSummary, list[dict[str, object]]]:
        with RequestRecording(path, options) as recording:
            follower = RecordingFollower(
                recording,
                self.take,
                self.clock,
                RecordingLimits(60.0, seconds, num_requests),
            )
            summary = follower.run(self.ended)
        lines = path.read_text(encoding="utf-8").splitlines()
        return summary, [json.loads(line) for line in lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recorded.jsonl"


def test_lines_hold_numbers_in_place_of_digests(path: Path) -> None:
    other = DIGESTS[:16] + b"x" * 32
    cluster = FakeCluster([request(50.0)], [request(51.5, 17, other)])
    summary, lines = cluster.record(path)
    assert (summary.ended_by, summary.num_requests, summary.num_lost) == ("signal", 3, 2)
    assert lines == [
        {
            "timestamp": 1000 * second,
            "input_length": length,
            "output_length": 4,
            "hash_ids": ids,
            "block_size": 8,
        }
        for second, length, ids in ((0, 20, [0, 1, 2]), (1.5, 17, [0, 3, 3]), (40, 20, [0, 1, 2]))
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert summary.num_bytes == path.stat().st_size


def test_a_recording_is_a_trace(path: Path) -> None:
    FakeCluster([request(0.0), request(1.0, 12)], []).record(path)
    trace = open_block_trace(str(path))
    assert (trace.block_size, trace.num_requests, trace.num_distinct_blocks) == (8, 3, 3)


def test_hints_are_recorded_and_played_by_a_simulation(path: Path) -> None:
    hints = (CacheHint(end=8, priority=90, duration_s=60.0), CacheHint(start=8, is_over=True))
    served = [replace(request(0.0), hints=hints), request(1.0)]
    _, lines = FakeCluster(served, []).record(path)
    assert lines[0]["hints"] == [
        {"end": 8, "priority": 90, "duration_s": 60.0},
        {"start": 8, "is_over": True},
    ]
    assert "hints" not in lines[1]
    assert open_block_trace(str(path)).hints == (hints, (), ())
    arguments = ("simulate", path, "--blocks", "4", "--hints", "session", "--json", "--no-progress")
    hinted, optimum = json.loads(run(*arguments)[0])
    assert (hinted["hints"], optimum["hints"]) == ("session", "none")
    assert hinted["num_hit_tokens"] == optimum["num_hit_tokens"] == 4 * 8


def test_tenants_are_named_only_if_asked_for(tmp_path: Path) -> None:
    cluster = FakeCluster([request(0.0)], [])
    named = tmp_path / "named.jsonl"
    cluster.record(named, RecordingOptions(10_000, has_tenants=True))
    assert '"tenant":"tenant-1"' in named.read_text(encoding="utf-8")
    _, lines = FakeCluster([request(0.0)], []).record(tmp_path / "plain.jsonl")
    assert not any("tenant" in line for line in lines)


def test_it_ends_after_so_many_requests(path: Path) -> None:
    cluster = FakeCluster([request(0.0)], [request(1.0), request(2.0)], [])
    summary, lines = cluster.record(path, num_requests=2)
    assert (summary.ended_by, len(lines), cluster.was_finished) == ("requests", 2, True)


def test_it_ends_after_so_many_seconds(path: Path) -> None:
    cluster = FakeCluster([request(0.0)], [request(1.0)], [request(2.0)], [])
    summary, lines = cluster.record(path, seconds=2)
    assert (summary.ended_by, len(lines)) == ("time", 3)  # with what still waited


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_a_time_in_which_nothing_could_be_recorded_is_refused(path: Path, seconds: str) -> None:
    result = CliRunner().invoke(app, ["record", str(path), "--seconds", seconds])
    assert result.exit_code == 2
    assert result.stderr == (
        f"kvcache: --seconds {seconds} records nothing: give a number above 0, such as "
        "600, or omit it and end the recording with Ctrl-C\n"
    )
    assert not path.exists()


def test_it_ends_with_a_whole_line_before_the_file_is_too_large(path: Path) -> None:
    cluster = FakeCluster([request(0.0), request(1.0), request(2.0)], [])
    summary, lines = cluster.record(path, RecordingOptions(200))
    assert (summary.ended_by, len(lines)) == ("size", 2)
    assert path.stat().st_size <= 200


def test_a_coordinator_that_restarts_is_waited_for_but_not_forever(tmp_path: Path) -> None:
    away = DeadlineError("the coordinator gave no answer within 10 s")
    cluster = FakeCluster([request(5.0)], away, away, [request(3.0)], [])
    _, lines = cluster.record(tmp_path / "a.jsonl")
    assert [line["timestamp"] for line in lines] == [0, 0, 85_000]
    cluster = FakeCluster([request(5.0)], *[away] * 70)
    cluster.take = lambda is_last, take=cluster.take: take(is_last)  # type: ignore[assignment]
    with pytest.raises(DeadlineError):
        _without_waiting(cluster, tmp_path / "b.jsonl")


def _without_waiting(cluster: FakeCluster, path: Path) -> None:
    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return False

    cluster.ended = Impatient()
    cluster.record(path)


def test_a_file_that_exists_is_left_alone(path: Path) -> None:
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        FakeCluster([]).record(path)
    assert str(caught.value) == f"{path} exists already: name another file"
    assert path.read_text(encoding="utf-8") == "mine"


def test_a_name_without_a_suffix_of_traces_is_refused(path: Path) -> None:
    with pytest.raises(TraceError, match=r"names of traces end with .jsonl or .jsonl.gz"):
        FakeCluster([]).record(path.with_suffix(".json"))
    assert not path.with_suffix(".json").exists()


def test_signals_end_it_in_order() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    for kind in (signal.SIGINT, signal.SIGTERM):
        ended = threading.Event()
        with handling(lambda number, frame: ended.set(), signal.SIGINT, signal.SIGTERM):  # noqa: B023
            assert not ended.is_set()
            os.kill(os.getpid(), kind)
            assert ended.wait(10)
    assert signal.getsignal(signal.SIGINT) == before
