"""`kvcache advise`: a table, JSON, a picture, and errors."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app
from kvcache.base.clock import VirtualClock
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.simulated_cache import SimulatedCache
from kvcache.simulate.simulation import simulate
from tests.cli.commands import run as run_command
from tests.simulate.traces import block_trace, random_requests

ROOT = Path(__file__).resolve().parents[2]
LOAD = ("agents", "-l", "60", "-p", "lru", "-p", "arc", "-j", "1", "--no-progress")
PRICES = ("--device-price", "20", "--host-price", "2", "--disk-price", "0.1")
SIZE = ("--token-size", "128KiB")


run = partial(run_command, "advise")


def refused(*arguments: str | Path) -> str:
    shown, error = run(*arguments, exit_code=2)
    assert shown == "" and error.count("\n") == 1
    return error.removeprefix("kvcache: ").rstrip("\n")


def test_advice_is_within_the_budget_and_says_what_it_rests_on() -> None:
    shown, _ = run(*LOAD, *PRICES, *SIZE, "--budget", "1000")
    for text in (
        "advised",
        "Advice: ",
        "GiB of device memory",
        "points per GiB added",
        "How sure is this?",
        "the trace has only 60 requests: record more",
        "Assumed:",
        "a token takes 128.0 KiB",
    ):
        assert text in shown
    assert "…" not in shown  # a narrow terminal cuts no number


def test_a_small_memory_is_not_rounded_to_nothing() -> None:
    shown, _ = run(*LOAD, *PRICES, "--token-size", "128B", "--budget", "1")
    assert re.search(r"Advice: 0\.0*[1-9]\d* GiB of device memory", shown)
    assert " 0.0 " not in shown


def test_json_has_the_curves_and_all_that_was_compared(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    shown, _ = run(*LOAD, *PRICES, *SIZE, "--budget", "1000", "--json", "--plot", picture)
    report = json.loads(shown)
    advice = report["advice"]
    assert advice in report["compared"]
    assert advice["cost"] <= 1000
    cost = 20 * advice["device_gib"] + 2 * advice["host_gib"] + 0.1 * advice["disk_gib"]
    assert cost == pytest.approx(advice["cost"])
    parts = [advice[f"{tier}_hit_rate"] for tier in ("device", "host", "disk")]
    assert sum(parts) == pytest.approx(advice["hit_rate"])
    assert set(report["curves"]) == {"lru", "arc", "optimum"}
    assert report["steadiness"]["least"] <= report["steadiness"]["most"]
    assert "GiB of one pool" in picture.read_text(encoding="utf-8")


def test_the_policy_and_hints_are_chosen_by_what_they_bring(tmp_path: Path) -> None:
    load = ("scans", "-l", "400", "--seed", "1", "-p", "lru", "-p", "lru2", "-j", "1")
    prices = ("--device-price", "1", *SIZE, "--budget", "40", "--no-progress")
    report = json.loads(run(*load, *prices, "--json")[0])
    advice = report["advice"]
    trace = open_block_trace("scans", limit=400, seed=1)
    results = {
        policy: simulate(trace, SimulatedCache(policy, advice["device_blocks"]), VirtualClock())
        for policy in ("lru", "lru2", "optimum")
    }
    behind = sum(
        ours < theirs
        for ours, theirs in zip(
            results["lru2"].num_hits_over_time, results["lru"].num_hits_over_time, strict=True
        )
    )
    told = {each["policy"]: each for each in report["policies"]}
    assert {policy: each["num_parts_behind"] for policy, each in told.items()} == {
        "lru": 0,
        "lru2": behind,
    }
    for policy, each in told.items():
        assert each["hit_rate"] == each["saved_prefill"] == results[policy].hit_rate
    wins = told["lru2"]["hit_rate"] > told["lru"]["hit_rate"] + 0.002
    assert report["usual_policy"] == "lru" and wins and behind <= 5
    assert advice["policy"] == "lru2" and advice in report["compared"]
    rates = report["device_hit_rate_by_hints"]
    assert list(rates) == ["none", "session", "oracle", "optimum"]
    assert (rates["none"], rates["optimum"]) == (
        results["lru2"].hit_rate,
        results["optimum"].hit_rate,
    )
    hinted = SimulatedCache("lru2", advice["device_blocks"], hints="session")
    assert rates["session"] == simulate(trace, hinted, VirtualClock()).hit_rate
    shown, _ = run(*load, *prices)
    points = 100 * (rates["session"] - rates["none"])
    assert f"it has fewer hits in {behind} of 10 parts of the trace." in shown
    assert f"session hints would bring {points:+.1f} points on the device alone" in shown
    assert [line in shown.splitlines() for line in report["reasons"]] == [True, True]


def test_hints_of_a_trace_without_sessions_are_those_that_know_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    block_trace(path, random_requests(random.Random(1), 200))
    load = (path, "--block-size", "4", "-p", "lru", "-j", "1", "--no-progress")
    shown, _ = run(*load, "--device-price", "1", "--token-size", "256MiB", "--budget", "60")
    assert "Policy: with this memory, no policy saves notably more than lru." in shown
    assert "Hints: hints that know every return exactly would bring +" in shown
    assert "send what your engine knows of its sessions, docs/hints.md." in shown


def test_a_configuration_says_how_large_a_token_is() -> None:
    config = ROOT / "configs" / "cpu_tp2.yaml"
    shown, _ = run(*LOAD, "--device-price", "20", "--budget", "9", "--config", config, "--json")
    (advice,) = json.loads(shown)["compared"]
    gib_per_block = advice["device_gib"] / advice["device_blocks"]
    # 4 layers of 4 heads of 16 values: keys and values of 2 bytes, 512 tokens
    plan = json.loads(CliRunner().invoke(app, ["plan", "-c", str(config), "--json"]).stdout)
    per_token = plan["allocated_bytes"] / plan["num_blocks"] / 16
    assert gib_per_block * 2**30 == pytest.approx(512 * per_token)


def test_invalid_options_are_refused_with_a_remedy() -> None:
    assert refused(*LOAD, *PRICES, *SIZE, "--budget", "-1") == (
        "--budget is -1: give a number above 0"
    )
    for option in ("--prefill-speed", "--host-bandwidth", "--disk-bandwidth"):
        assert refused(*LOAD, *PRICES, *SIZE, "--budget", "20", option, "0") == (
            f"{option} is 0: give a number above 0"
        )
    assert refused(*LOAD, *PRICES, *SIZE, "--budget", "20").startswith(
        "a budget of 20 buys 16 blocks of the device, the longest request needs "
    )
    assert refused(*LOAD, *PRICES, "--budget", "20").startswith("the size of a token on all ranks")
    assert refused(*LOAD, *PRICES, *SIZE, "--budget", "20", "--config", "cpu_tp2") == (
        "--token-size and --config both size a token: give one of them"
    )
    assert refused(*LOAD, *PRICES, "--budget", "20", "--token-size", "big").startswith(
        "--token-size 'big': 'big' is no"
    )
    assert refused(
        "agents", "--device-price", "2", "--disk-price", "1", "--budget", "9"
    ).startswith("--disk-price without --host-price")
    assert refused("none.jsonl", *PRICES, *SIZE, "--budget", "9").endswith(
        "(No such file or directory): name a Mooncake trace"
    )
