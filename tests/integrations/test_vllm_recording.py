"""Recordings of an engine's requests: what they have, and that they never stop an engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.cli import app
from kvcache.base.errors import ConfigurationError, TraceError
from kvcache.integrations.vllm import engine_recording
from kvcache.integrations.vllm.engine_recording import EngineRecording
from kvcache.integrations.vllm.options import ConnectorOptions
from tests.integrations.test_vllm_block_store import TOKENS, request_of


def served(name: str, num_tokens: int, content: str = "a", arrival_s: float = 0.0) -> Any:
    """A request that has answered with two tokens."""
    request = request_of(name, num_tokens + 2, content)
    request.num_prompt_tokens, request.num_output_tokens = num_tokens, 2
    request.all_token_ids = [ord(content) * 1000 + i for i in range(num_tokens + 2)]
    request.arrival_time = 1000.0 + arrival_s
    return request


def record(directory: Path, *requests: Any) -> list[dict[str, Any]]:
    """Serve requests one after the other; return the lines."""
    recording = EngineRecording(str(directory), "chat-0", TOKENS)
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
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)
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
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)
    recording.admitted(served("endless", 10))
    for i in range(4):
        recording.admitted(served(f"r{i}", 10))
        recording.finished(served(f"r{i}", 10))
    recording.close()
    assert len(lines_of(recording)) == 4
    assert recording.statistics()["num_lost"] == 1


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
    for command in (
        ["simulate", str(path), "--blocks", "8", "--json"],
        [
            "advise",
            str(path),
            "--device-price",
            "10",
            "--budget",
            "100",
            "--token-size",
            "1KiB",
            "--json",
        ],
    ):
        result = CliRunner().invoke(app, [*command, "--no-progress"])
        assert result.exit_code == 0, result.output


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)

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
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)
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
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)

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
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)
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
    recording = EngineRecording(str(tmp_path), "chat-0", TOKENS)
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
        EngineRecording(str(tmp_path / "missing"), "chat-0", TOKENS)
    with pytest.raises(ConfigurationError, match="is relative"):
        ConnectorOptions.parse({"record": "traces"})
