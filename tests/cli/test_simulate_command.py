"""`kvcache simulate`: its output, files and plots, and errors."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.cli import simulate
from actors.cli.simulate import capacity_range
from kvcache.policies import EVICTION_POLICIES
from kvcache.simulate.opening import open_block_trace
from tests.cli.commands import KVCACHE
from tests.cli.commands import run as run_command
from tests.simulate.traces import trace_line, write_lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three conversations, in turns."""
    lines = []
    for turn in range(1, 6):
        for who in range(3):
            ids = [100 * who + i for i in range(2 * turn)]
            lines.append(trace_line(1_000 * turn, ids, timestamp=1000 * len(lines)))
    return write_lines(tmp_path / "trace.jsonl", *lines)


run = partial(run_command, "simulate")


def refused(*arguments: str | Path) -> str:
    """Run a command that must fail; return its one line."""
    shown, error = run(*arguments, exit_code=2)
    assert shown == "" and error.count("\n") == 1 and error.startswith("kvcache: ")
    return error.removeprefix("kvcache: ").rstrip("\n")


def test_a_table_has_a_row_for_each_policy_and_a_column_for_each_capacity(trace: Path) -> None:
    arguments = ("-p", "lru", "-p", "lru2", "-b", "12", "-b", "1_000", "-b", "unlimited", "-j", "1")
    shown, _ = run(trace, *arguments)
    assert "trace.jsonl: 15 requests, 90 blocks of 512 tokens, 30 of them different" in shown
    for text in ("12", "1,000", "unlimited", "lru", "lru2", "optimum"):
        assert text in shown
    shown, _ = run(trace, *arguments, "--no-optimum")
    assert "optimum" not in shown


def test_json_has_every_figure(trace: Path) -> None:
    shown, _ = run(trace, "-b", "unlimited", "-b", "12", "--json", "-j", "1")
    results = json.loads(shown)
    found = [(r["policy"], r["num_blocks"], r["num_device_hits"]) for r in results]
    unlimited = 3 * sum((1_000 * (turn - 1)) // 512 for turn in range(1, 6))
    assert found[0] == ("lru", None, unlimited)
    assert [row[:2] for row in found[1:]] == [("lru", 12), ("optimum", None), ("optimum", 12)]
    assert found[2][2] == unlimited > found[3][2] > found[1][2]
    assert results[0]["hit_rate"] == unlimited / 90


def test_all_policies_over_a_range_of_capacities_by_default(trace: Path) -> None:
    results = json.loads(run(trace, "--policy", "all", "--json", "-j", "1")[0])
    assert {r["policy"] for r in results} >= {"lru", "arc", "s3fifo", "optimum"}
    assert sorted({r["num_blocks"] for r in results}) == [10, 20, 50]
    assert capacity_range([open_block_trace(str(trace))]) == [10, 20, 50]


def test_tiers_and_where_hits_were_found(trace: Path) -> None:
    shown, _ = run(trace, "-b", "12", "--host-blocks", "8", "--disk-blocks", "20", "-j", "1")
    assert "below the device: 8 blocks of host memory, 20 on disk" in shown
    (lru, _) = json.loads(
        run(trace, "-b", "12", "--host-blocks", "8", "--disk-blocks", "20", "--json", "-j", "1")[0]
    )
    assert lru["num_host_hits"] + lru["num_disk_hits"] > 0


def test_a_window_and_a_configuration_are_hybrids_with_a_bound(trace: Path) -> None:
    shown, _ = run(trace, "--window", "600", "-b", "60", "-j", "1")
    assert (
        "hit tokens of prompt tokens; blocks are shared by groups: full (512 tokens a block), "
        "sliding_window (512 tokens a block); optimum: a bound that may be out of reach" in shown
    )
    config = ROOT / "configs" / "cpu_tp2.yaml"
    assert "full (16 tokens a block)" in run(trace, "--config", config, "-j", "1")[0]
    lru, best = json.loads(run(trace, "--config", config, "--json", "-j", "1")[0])
    assert (lru["policy"], best["policy"]) == ("lru", "optimum")
    assert lru["num_blocks"] == 131_071
    assert lru["hit_rate_of"] == best["hit_rate_of"] == "tokens"
    assert best["num_hit_tokens"] == lru["num_hit_tokens"] > 0  # there is room for all


def test_a_window_has_tiers_too(trace: Path) -> None:
    arguments = (trace, "--window", "600", "-b", "30", "--host-blocks", "30", "-j", "1")
    lru, best = json.loads(run(*arguments, "--json")[0])
    tiers = [lru[f"num_{tier}_hit_tokens"] for tier in ("device", "host", "disk")]
    assert sum(tiers) == lru["num_hit_tokens"] <= best["num_hit_tokens"]
    assert tiers[1] > 0
    shares = " + ".join(f"{100 * tokens / lru['num_input_tokens']:.1f}" for tokens in tiers)
    assert f"{lru['hit_rate']:.2%} ({shares})" in run(*arguments)[0]


def test_requests_run_side_by_side_without_an_optimum(trace: Path) -> None:
    shown, _ = run(trace, "--running", "-b", "30", "-j", "1", "--decode-speed", "0.5")
    assert "requests run side by side, answers included" in shown
    assert "optimum" not in shown
    (result,) = json.loads(run(trace, "--running", "-b", "30", "-j", "1", "--json")[0])
    assert result["most_running"] >= 1
    tiers = ("--host-blocks", "30", "--disk-blocks", "60")
    shown, _ = run(trace, "--running", "-b", "12", *tiers, "-j", "1", "--decode-speed", "0.5")
    assert re.search(r"% \(\d+\.\d \+ \d+\.\d \+ \d+\.\d; [\d,.]+ s\)", shown)
    for speed in ("0", "nan", "inf"):
        message = refused(trace, "--running", "-b", "30", "--decode-speed", speed)
        assert message == f"--decode-speed is {speed}: give a number above 0"


def test_a_request_that_does_not_fit_is_named_however_blocks_are_shared(trace: Path) -> None:
    assert refused(
        trace, "--window", "600", "-b", "12", "-b", "60", "--no-progress", "-j", "1"
    ) == (
        "trace.jsonl, line 10: the request of 4000 tokens does not fit into 12 blocks (their "
        "tokens, by group: 512, 512): simulate more"
    )
    path = write_lines(trace.parent / "a.jsonl", {**trace_line(1024, [1, 2]), "output_length": 600})
    # Both simulations are refused, also the valid one: nothing starts.
    assert refused(path, "--running", "-b", "60", "-b", "3") == (
        "a.jsonl, line 1: the request does not fit into 3 blocks with its answer of 600 tokens: "
        "simulate at least 4"
    )


def test_several_traces_have_a_table_each(trace: Path) -> None:
    shown, _ = run(trace, "chat", "--requests", "9", "--seed", "3", "-b", "500", "-j", "1")
    assert "trace.jsonl: 9 requests" in shown
    assert "chat, 9 requests (seed 3): 9 requests" in shown


def test_traces_of_one_name_are_told_apart(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / trace.name
    other.parent.mkdir()
    write_lines(other, trace_line(1024, [7, 8]), trace_line(1024, [9, 10]))
    shown, _ = run(trace, other, trace, "-b", "30", "-j", "1", "--no-optimum")
    assert f"{trace}: 15 requests" in shown and f"{other}: 2 requests" in shown
    (both, alone) = (run(*paths, "-b", "30", "-j", "1") for paths in ((trace, other), (trace,)))
    assert both[0].count("│") == 2 * alone[0].count("│")
    found = json.loads(run(trace, other, trace, "-b", "30", "-j", "1", "--no-optimum", "--json")[0])
    assert [(r["trace"], r["num_requests"]) for r in found] == [(str(trace), 15), (str(other), 2)]


@pytest.mark.parametrize("name", ["made.jsonl", "made.jsonl.gz"])
def test_a_written_trace_simulates_to_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shown, _ = run("agents", "-l", "60", "--seed", "2", "--block-size", "64", "--write-trace", path)
    assert shown.startswith(f"{path}: 60 requests, ")
    made = json.loads(
        run("agents", "-l", "60", "--seed", "2", "--block-size", "64", "--json", "-j", "1")[0]
    )
    read = json.loads(run(path, "--json", "-j", "1")[0])
    for result in (*made, *read):
        del result["trace"], result["wall_time_s"]
    assert made == read and len(made) == 4


def test_a_plot_is_drawn_the_same_each_time(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        run(trace, "-p", "all", "--plot", path, "-j", "1")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = paths[0].read_text(encoding="utf-8")
    for name in ("trace.jsonl", "lru", "optimum", "hit rate", "blocks of the device"):
        assert name in text
    run(trace, "chat", "-l", "12", "--plot", tmp_path / "three.png", "-j", "1")
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_regret_is_told_by_part_against_the_best_in_hindsight_and_the_optimum(
    trace: Path, tmp_path: Path
) -> None:
    arguments = (trace, "-p", "lru", "-p", "lru2", "-b", "12", "-b", "20", "-j", "1")
    oracle = ("--hints", "none", "--hints", "oracle", "--regret", "4")
    results = json.loads(run(*arguments, *oracle, "--json")[0])
    assert len(results) == 2 * 5
    for num_blocks in (12, 20):
        peers = [r for r in results if r["num_blocks"] == num_blocks]
        policies = [r for r in peers if r["policy"] != "optimum" and r["hints"] == "none"]
        best = max(policies, key=lambda r: r["num_device_hits"])
        (optimum,) = [r for r in peers if r["policy"] == "optimum"]
        for result in peers:
            for name, reference in (("best", best), ("optimum", optimum)):
                told = result[f"regret_to_{name}"]
                assert (told["policy"], told["hints"]) == (reference["policy"], "none")
                assert told["whole"] == reference["hit_rate"] - result["hit_rate"]
                for i, points in enumerate(told["over_time"]):
                    missed = reference["num_hits_over_time"][i] - result["num_hits_over_time"][i]
                    assert points * result["num_references_over_time"][i] == pytest.approx(missed)
    shown, _ = run(*arguments, *oracle, "--no-optimum")
    assert re.findall("points missed against (.*), the best in hindsight, with (.*) b", shown) == [
        ("lru2", "12"),
        ("lru2", "20"),
    ]
    assert "optimum" not in shown
    shown, _ = run(*arguments[:-4], "-j", "1", "--regret", "4")
    assert "points missed against the optimum, with 12 blocks" in shown
    (rate,) = [r["hit_rate"] for r in results if r["policy"] == "optimum" and r["num_blocks"] == 12]
    assert re.search(rf"all │ +│ +{rate:.2%} │ +\+[\d.]+ │ +\+[\d.]+ │", shown)
    assert refused(*arguments, "--regret", "16") == (
        "16 parts of trace.jsonl, which has 15 requests: give 1 to 15"
    )
    assert refused(*arguments, "--regret", "0").startswith("0 parts of trace.jsonl")
    assert refused(*arguments, "--regret", "4", "--plot", tmp_path / "a.svg") == (
        "--regret draws one trace with one capacity, 1 and 2 are given: give one --blocks"
    )


def test_tables_of_regret_fit_a_terminal_whole(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    hints = ("--hints", "none", "--hints", "oracle")
    shown, _ = run(
        trace, "-p", "all", "-b", "12", *hints, "--no-optimum", "--regret", "2", "-j", "1"
    )
    tables = shown.split("points missed against ")[1:]
    assert len(tables) > 1
    for table in tables:
        lines = table.splitlines()[1:]
        assert max(map(len, lines)) <= 80
        assert len([line for line in lines if line[0] == "│"]) == 3  # no cell takes two lines
    assert "".join(tables).count("oracle hints") == len(EVICTION_POLICIES)


def test_regret_and_what_hints_bring_are_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    hints = ("--hints", "none", "--hints", "oracle")
    for path in paths:
        run(trace, "-p", "all", "-b", "12", "--regret", "3", *hints, "--plot", path, "-j", "1")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = paths[0].read_text(encoding="utf-8")
    for name in ("points missed against ", "no hints", "oracle hints", "arc, oracle hints"):
        assert name in text


def test_a_plot_without_matplotlib_is_refused_before_anything_is_played(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda name: None)
    assert refused(trace, "--plot", tmp_path / "a.svg") == (
        "--plot needs matplotlib, which is not installed: pip install 'kvcache[plots]'"
    )


def test_invalid_options_are_refused_with_a_remedy(trace: Path, tmp_path: Path) -> None:
    assert refused(trace, "-p", "lra").startswith(
        "unknown eviction policy 'lra': choose one of adaptive, arc, "
    )
    assert refused(trace, "-b", "9") == (
        "trace.jsonl, line 13: the request needs 10 blocks of 512 tokens, more than the 9 of the "
        "device: simulate at least 10"
    )
    assert refused(trace, "-b", "some") == (
        "--blocks 'some' is not a capacity: give a number of at least 1, or unlimited"
    )
    assert refused(trace, "-b", "20", "--disk-blocks", "5").startswith(
        "5 blocks on disk, none in host memory"
    )
    assert refused(trace, "--window", "64").startswith("--window needs --blocks: ")
    assert refused(trace, "--prefill-speed", "64") == (
        "--prefill-speed and --decode-speed are for requests that overlap: add --running, or omit "
        "them"
    )
    assert refused(trace, "--plot", "a.bmp") == (
        "--plot a.bmp: pictures end with .svg, .png or .pdf: choose one"
    )
    assert refused(trace, "chat", "--write-trace", tmp_path / "x.jsonl") == (
        "--write-trace writes one trace, 2 are given: give one"
    )
    assert refused(trace, "--write-trace", tmp_path / "load") == (
        f"{tmp_path / 'load'}: names of traces end with .jsonl or .jsonl.gz, others are read as "
        "text: name it so"
    )
    assert not (tmp_path / "load").exists()
    _, error = run(trace, "--requests", str(2**63), exit_code=2)
    assert "Invalid value for '--requests'" in error
    assert refused("poetry").startswith("no workload 'poetry': give 'conversations', a generator")
    assert refused(tmp_path / "none.jsonl").endswith(
        "cannot be read (No such file or directory): name a Mooncake trace"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "bad.jsonl holds no request: give a trace with at least one"),
        (
            [trace_line(1024, [1, 2]), trace_line(1024, [3, 2])],
            "bad.jsonl, line 2: has block 2 behind another block than line 1, but an id fixes all "
            "before it: give blocks with different pasts different ids",
        ),
        (
            [trace_line(1024, [1, 2]), trace_line(1500, [3, 4, 3])],
            "bad.jsonl, line 2: has block 3 more than once, but an id fixes all before it: give "
            "blocks with different pasts different ids",
        ),
        (
            [trace_line(9, [1], timestamp=9), trace_line(9, [2], timestamp=8)],
            "bad.jsonl, line 2: has timestamp 8, the line before 9: sort the trace by time",
        ),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(
    tmp_path: Path, lines: list[dict[str, Any]], message: str
) -> None:
    assert refused(write_lines(tmp_path / "bad.jsonl", *lines)) == message


def test_a_torn_file_is_refused_with_its_line(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl.gz"
    path.write_bytes(gzip.compress(trace.read_bytes())[:-9])
    assert refused(path).startswith(f"{path}, line ")


def test_the_command_runs_with_several_processes(trace: Path) -> None:
    command = [*KVCACHE, "simulate", str(trace), "--json", "-j", "2", "-b", "20"]
    command.append("--no-progress")  # a busy machine takes long enough for a line
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [r["policy"] for r in json.loads(shown.stdout)] == ["lru", "optimum"]
    assert shown.stderr == ""
