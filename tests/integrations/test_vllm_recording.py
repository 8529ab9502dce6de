"""Recordings of an engine's requests: what they have, and that they never stop an engine."""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.cli import app
from kvcache.base.errors import ClusterError, ConfigurationError, TraceError
from kvcache.integrations.vllm import engine_recording
from kvcache.integrations.vllm.engine_recording import EngineRecording, EngineRecordings, new_path
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.integrations.vllm.transfer_params import TransferParams
from kvcache.metrics.engine_socket import EngineSocket, ask_engine, running_engines
from tests.cli.commands import run
from tests.integrations.test_vllm_block_store import TOKENS, request_of, setting_of


def served(name: str, num_tokens: int, content: str = "a", arrival_s: float = 0.0) -> Any:
    """A request that has answered with two tokens."""
    request = request_of(name, num_tokens + 2, content)
    request.num_prompt_tokens, request.num_output_tokens = num_tokens, 2
    request.all_token_ids = [ord(content) * 1000 + i for i in range(num_tokens + 2)]
    request.arrival_time = 1000.0 + arrival_s
    return request


def record(directory: Path, *requests: Any) -> list[dict[str, Any]]:
    """Serve requests one after the other; return the lines."""
    recording = EngineRecording(new_path(directory, "chat-0"), TOKENS)
    for request in requests:
        recording.admitted(request)
        recording.finished(request)
    recording.close()
    assert recording.statistics()["num_requests"] == len(requests)
    return lines_of(recording)


def lines_of(recording: EngineRecording) -> list[dict[str, Any]]:
    path = Path(recording.statistics()["path"])
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_share_the_numbers_of_the_blocks_that_they_share(tmp_path: Path) -> None:
    first, same, longer, other = record(
        tmp_path,
        served("r", 10),
        served("s", 10, arrival_s=0.5),
        served("t", 13, arrival_s=2.0),
        served("u", 8, "b", arrival_s=3.0),
    )
    assert first == {
        "timestamp": 0,
        "input_length": 10,
        "output_length": 2,
        "hash_ids": [0, 1, 2],
        "block_size": TOKENS,
    }
    assert (same["hash_ids"], same["timestamp"]) == ([0, 1, 2], 500)
    assert longer["hash_ids"] == [0, 1, 3, 4]
    assert other["hash_ids"] == [5, 6]


def test_requests_are_in_order_of_admission(tmp_path: Path) -> None:
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)
    slow, quick = served("slow", 10), served("quick", 6, arrival_s=1.0)
    for request in (slow, quick):
        recording.admitted(request)
    recording.finished(quick)
    recording.admitted(slow)  # after a preemption
    recording.finished(slow)
    recording.finished(served("never admitted", 10))
    recording.close()
    assert [line["input_length"] for line in lines_of(recording)] == [10, 6]


def test_a_request_without_end_does_not_delay_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recording, "MAX_HELD", 3)
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)
    recording.admitted(served("endless", 10))
    for i in range(4):
        recording.admitted(served(f"r{i}", 10))
        recording.finished(served(f"r{i}", 10))
    recording.close()
    assert len(lines_of(recording)) == 4
    assert recording.statistics()["num_lost"] == 1


def test_the_end_writes_what_waits_for_an_open_request(tmp_path: Path) -> None:
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)
    recording.admitted(served("endless", 10))
    for name in "ab":
        recording.admitted(served(name, 8, name))
        recording.finished(served(name, 8, name))
    recording.close()
    found = recording.statistics()
    assert (len(lines_of(recording)), found["num_lost"], found["ended_by"]) == (2, 0, "close")


def test_hints_are_recorded(tmp_path: Path) -> None:
    hinted, plain, wrong = served("r", 10), served("s", 10), served("t", 10)
    hinted.kv_transfer_params = {"hints": [{"start": 8, "returns_in_s": 5}]}
    wrong.kv_transfer_params = {"hints": [{"start": -1}]}
    lines = record(tmp_path, hinted, plain, wrong)
    assert [line.get("hints") for line in lines] == [
        [{"start": 8, "returns_in_s": 5.0}],
        None,
        None,
    ]


def test_simulate_and_advise_take_a_recording(tmp_path: Path) -> None:
    requests = [served(f"r{i}", 10 + i % 7, "abc"[i % 3], float(i)) for i in range(60)]
    record(tmp_path, *requests)
    (path,) = tmp_path.glob("chat-0-*.jsonl")
    prices = ["--device-price", "10", "--budget", "100", "--token-size", "1KiB"]
    for command in (
        ["simulate", str(path), "--blocks", "8"],
        ["advise", str(path), *prices, "-p", "lru"],
    ):
        result = CliRunner().invoke(app, [*command, "-j", "1", "--json", "--no-progress"])
        assert result.exit_code == 0, result.output


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)

    def full(*_: object) -> bool:
        raise TraceError("no space is left")

    monkeypatch.setattr(recording._recording, "append", full)
    for i in range(2):
        recording.admitted(served(f"r{i}", 10))
        recording.finished(served(f"r{i}", 10))
    recording._thread.join(10)
    recording.finished(served("later", 10))
    assert recording.statistics()["problem"] == "no space is left"
    assert "recording has ended: no space is left" in caplog.text
    recording.close()


def test_a_recording_ends_when_it_has_too_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recording, "MAX_BLOCKS", 4)
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)
    recording.admitted(served("endless", 10))
    for name in "abc":
        recording.admitted(served(name, 8, name))
    recording.finished(served("endless", 8, "e"))
    for name in "abc":
        recording.finished(served(name, 8, name))
    recording._thread.join(10)
    assert len(lines_of(recording)) == 2
    assert "has reached 4 different blocks" in recording.statistics()["problem"]
    recording.close()


@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError("none")])
def test_any_error_ends_the_recording_and_frees_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)

    def fail(*_: object) -> bool:
        raise error

    monkeypatch.setattr(recording._recording, "append", fail)
    for name in "ab":
        recording.admitted(served(name, 10))
    recording.finished(served("a", 10))
    recording._thread.join(10)
    assert type(error).__name__ in recording.statistics()["problem"]
    recording.finished(served("b", 10))
    assert not recording._open
    assert recording._queue.empty()
    recording.close()


def test_a_request_that_cannot_be_recorded_ends_the_recording(tmp_path: Path) -> None:
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)
    request = served("r", 10)
    recording.admitted(request)
    request.all_token_ids = None
    recording.finished(request)
    assert "TypeError" in recording.statistics()["problem"]
    recording.close()


def test_what_finds_no_room_in_the_queue_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recording, "MAX_QUEUED", 2)
    recording = EngineRecording(new_path(tmp_path, "chat-0"), TOKENS)
    may_write, append = threading.Event(), recording._recording.append
    monkeypatch.setattr(
        recording._recording, "append", lambda *a: may_write.wait(10) and append(*a)
    )
    for i in range(9):
        recording.admitted(served(f"r{i}", 10))
        recording.finished(served(f"r{i}", 10))
    may_write.set()
    recording.close()
    found = recording.statistics()
    assert found["num_lost"] >= 6
    assert found["num_requests"] == 9 - found["num_lost"]


def test_a_directory_that_is_missing_or_relative_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"record: .*cannot be written"):
        EngineRecording(new_path(tmp_path / "missing", "chat-0"), TOKENS)
    with pytest.raises(ConfigurationError, match="is relative"):
        ConnectorOptions.parse({"record": "traces"})


# --- asked for by a command


class Recorded:
    """An engine's recordings, and the socket through which a command asks for one."""

    def __init__(self, options: ConnectorOptions | None = None) -> None:
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        setting = setting_of()
        if options is not None:
            setting = replace(setting, options=options)
        self.recordings = EngineRecordings(setting, TransferParams())
        self.socket = EngineSocket(self.name, 0, self.recordings.follow)
        self.socket.start()
        while (self.name, 0) not in running_engines():
            time.sleep(0.01)

    def serve(self, *requests: Any) -> None:
        for request in requests:
            self.recordings.admitted(request)
            self.recordings.finished(request)

    def ask(self, act: str, listener: str = "me", **more: Any) -> dict[str, Any]:
        return ask_engine(self.name, 0, {"act": act, "listener": listener, **more})

    def begin(self, file: Path, listener: str = "me", **more: Any) -> dict[str, Any]:
        asked = {"path": str(file), "max_bytes": 1 << 20, "num_requests": None}
        return self.ask("begin", listener, **{**asked, **more})

    def close(self) -> None:
        self.socket.close()
        self.recordings.close()


@pytest.fixture
def engine() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.close()


def serve_while(engine: Recorded, *requests: Any) -> threading.Thread:
    """Serve requests as soon as a recording runs; in a thread that is to be joined."""

    def serve() -> None:
        give_up_s = time.monotonic() + 60
        while engine.recordings.statistics() is None and time.monotonic() < give_up_s:
            time.sleep(0.01)
        engine.serve(*requests)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_command_records_until_its_limit(engine: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    prefetch = served("early", 8)
    prefetch.kv_transfer_params = {"prefetch": True}
    thread = serve_while(engine, prefetch, *(served(f"r{i}", 10) for i in range(4)))
    out, _ = run("record", path, "--vllm", engine.name, "--requests", "3", "--json")
    thread.join(60)
    found = json.loads(out)
    assert (found["num_requests"], found["ended_by"], found["path"]) == (3, "requests", str(path))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["input_length"] for line in lines] == [10, 10, 10]
    assert found["num_bytes"] == path.stat().st_size
    assert not engine.recordings._recording._thread.is_alive()  # type: ignore[union-attr]
    second = tmp_path / "second.jsonl"  # a new one may begin
    run("record", second, "--vllm", engine.name, "--seconds", "0.1")
    assert second.read_text() == ""


def test_a_size_ends_it_and_says_so(engine: Recorded, tmp_path: Path) -> None:
    thread = serve_while(engine, *(served(f"r{i}", 10) for i in range(4)))
    path = tmp_path / "load.jsonl"
    out, told = run("record", path, "--vllm", engine.name, "--max-size", "200", "--json")
    thread.join(60)
    assert json.loads(out)["ended_by"] == "size"
    assert 0 < path.stat().st_size <= 200
    assert "has reached 200 bytes" in told


def test_the_end_of_the_engine_ends_it(engine: Recorded, tmp_path: Path) -> None:
    def end() -> None:
        serve_while(engine, served("r", 10)).join(60)
        engine.close()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    path = tmp_path / "load.jsonl"
    out, _ = run("record", path, "--vllm", engine.name, "--json")
    thread.join(60)
    assert json.loads(out)["ended_by"] in ("end of the engine", "close")
    assert len(path.read_text().splitlines()) == 1


def test_one_recording_at_a_time(engine: Recorded, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    engine.begin(first)
    with pytest.raises(ClusterError, match=f"records to {first} already"):
        engine.begin(second, "other")
    for act in ("renew", "end"):
        with pytest.raises(ClusterError, match="no recording of this command"):
            engine.ask(act, "other")
    engine.serve(served("r", 10))
    assert engine.ask("end")["num_requests"] == 1
    assert not second.exists()
    engine.begin(second, "other")
    assert engine.ask("end", "other")["num_requests"] == 0


def test_a_recording_of_the_options_is_not_replaced(tmp_path: Path) -> None:
    engine = Recorded(ConnectorOptions.parse({"name": "chat", "record": str(tmp_path)}))
    try:
        with pytest.raises(ClusterError, match="without the option record"):
            engine.begin(tmp_path / "load.jsonl")
        engine.serve(served("r", 10))
    finally:
        engine.close()
    (path,) = tmp_path.glob("*.jsonl")
    assert path.name.startswith("chat-0-")
    assert len(path.read_text().splitlines()) == 1


def test_a_silent_command_loses_its_recording(
    engine: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recording, "LEASE_S", 0.0)
    monkeypatch.setattr(engine_recording, "_LOOK_S", 0.01)
    engine.begin(tmp_path / "load.jsonl")
    recording = engine.recordings._recording
    recording._thread.join(60)
    assert recording.statistics()["ended_by"] == "silence"
    recording.admitted(served("r", 10))
    assert not recording._open


def test_a_busy_engine_notices_a_silent_command_and_writes_what_has_ended(
    engine: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recording, "_LOOK_S", 600.0)  # the queue is never found empty
    engine.begin(tmp_path / "load.jsonl")
    recording = engine.recordings._recording
    append = recording._recording.append

    def falls_silent(request: Any, block_size: int) -> bool:
        recording._asked_s = -math.inf
        return append(request, block_size)

    monkeypatch.setattr(recording._recording, "append", falls_silent)
    for name in ("first", "endless", "behind"):
        recording.admitted(served(name, 10))
    for name in ("behind", "first"):
        recording.finished(served(name, 10))
    recording._thread.join(10)
    found = recording.statistics()
    assert (found["ended_by"], found["num_lost"]) == ("silence", 0)
    assert len(lines_of(recording)) == 2


def test_files_that_cannot_be_made_are_refused(engine: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text("mine")
    _, told = run("record", path, "--vllm", engine.name, exit_code=3)
    assert "exists already: name another file" in told
    assert path.read_text() == "mine"
    _, told = run("record", tmp_path / "load.txt", "--vllm", engine.name, exit_code=3)
    assert ".jsonl" in told
    _, told = run("record", path, "--vllm", engine.name, "--tenants", exit_code=2)
    assert "--tenants is for clusters" in told
    _, told = run("record", path, "--vllm", "nobody", exit_code=3)
    assert "no engine 'nobody' runs on this node" in told


@pytest.mark.parametrize(
    "wrong",
    [{"path": "load.jsonl"}, {"path": None}, {"max_bytes": 0}, {"num_requests": -1}],
)
def test_wrong_questions_about_recordings_are_refused(
    engine: Recorded, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ClusterError, match="begins no recording: give an absolute path"):
        engine.begin(tmp_path / "load.jsonl", **wrong)
    with pytest.raises(ClusterError, match="give act"):
        engine.ask("rewind")
    assert not [*tmp_path.iterdir()]
