"""`kvcache replay-record`: a table or JSON, notes and the first difference, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvcache.recorder.records import StateReached
from tests.cli.commands import run as run_command
from tests.recorder.segments_at_rest import change

COMMAND = "from actors.cli import main; main()"


run = partial(run_command, "replay-record")


def test_a_recording_that_replays_is_identical_and_exit_code_0(recorded: Path) -> None:
    shown, told = run(recorded)
    for text in (f"recording {recorded}", "400 blocks", "as recorded", "identical"):
        assert text in shown
    assert told == ""


def test_as_json_it_is_the_report(recorded: Path) -> None:
    report = json.loads(run(recorded, "--json")[0])
    assert (report["is_identical"], report["num_epochs"], report["notes"]) == (True, 2, [])
    assert report["state_digest"] == report["recorded_state_digest"]


def test_a_difference_is_shown_and_exit_code_1(copied: list[Path]) -> None:
    digests = {"requests": "0"}
    change(copied[-1], lambda r: isinstance(r, StateReached), lambda r: replace(r, digests=digests))
    shown, _ = run(copied[0].parent, exit_code=1)
    assert re.search(r"outcome +│ DIFFERENT", shown)
    assert re.search(
        rf"first difference: record \d+ \(epoch 2; {copied[-1]}, byte \d+\): the manager's state "
        "differs in cache, clients, core",
        shown,
    )
    report = json.loads(run(copied[0].parent, "--json", exit_code=1)[0])
    assert report["difference"]["path"] == str(copied[-1])


def test_omissions_are_reported(copied: list[Path]) -> None:
    copied[0].unlink()
    shown, _ = run(copied[0].parent, "--no-progress")
    assert "note: records " in shown
    assert "are left out: the beginning of their epoch" in shown
    copied[-1].write_bytes(copied[-1].read_bytes()[:-5])
    shown, _ = run(copied[0].parent)
    assert "(none recorded: " in shown
    assert "are no whole record: cut off" in shown


def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    shown, told = run(tmp_path / "none", exit_code=2)
    assert shown == ""
    assert told == (
        f"kvcache: {tmp_path / 'none'}: cannot be read (No such file or directory): check the "
        "path\n"
    )


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_another_process_with_other_hashes_of_strings_comes_to_the_same(
    recorded: Path, hash_seed: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "replay-record", str(recorded), "--json"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["is_identical"]
    assert report["state_digest"] == report["recorded_state_digest"]
