"""The command line without Ray: plan, replay in this process, counting, errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from typer import Exit
from typer.testing import CliRunner

from actors.cli import app, playground
from actors.cli.command import run_command
from actors.cli.playground import Playground
from kvcache.base.errors import (
    ConfigurationError,
    DeadlineError,
    InvariantError,
    NotEnoughMemoryError,
    NotRunningError,
    RequestError,
    StartupError,
    WorkerLostError,
    WrongBytesError,
)
from kvcache.manager import KVCacheManager
from kvcache.protocol.messages import FailedForward
from kvcache.replay import EngineLimits, ForwardProgress
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from tests.cli.commands import KVCACHE, run
from tests.replay.manager_stepper import ManagerStepper

ROOT = Path(__file__).resolve().parents[2]
CPU_TP2 = ROOT / "configs" / "cpu_tp2.yaml"

SMALL = """
name: small
model:
  name: tiny
  max_model_len: 2048
  layers:
    - {kind: full, count: 1, num_kv_heads: 2, head_size: 4}
    - {kind: sliding_window, count: 1, num_kv_heads: 2, head_size: 4, window_tokens: 64}
cache: {block_size: 16, num_blocks: 600, memory_per_rank: 1MiB}
parallel: {tensor_parallel_size: 2}
scheduler: {max_num_batched_tokens: 512, max_num_seqs: 8}
content_check: {enabled: true}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 700, "output_length": 30, "hash_ids": [1, 3]},
        {"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [1, 4]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_plan_shows_blocks_tokens_and_ranks() -> None:
    shown, _ = run("plan", "--config", CPU_TP2)
    for text in ("131,071 and the null block", "2,097,136 tokens", "KV cache groups", "128.0 MiB"):
        assert text in shown


def test_plan_as_json_is_the_report() -> None:
    shown, _ = run("plan", "--config", CPU_TP2, "--json")
    report = json.loads(shown)
    assert (report["name"], report["num_blocks"], len(report["ranks"])) == ("cpu-tp2", 131072, 2)


def test_an_error_of_ours_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    shown, error = run("plan", "--config", path, exit_code=2)
    assert shown == ""
    assert error == (
        f"kvcache: {path}: cannot be read (No such file or directory): check the path\n"
    )


def test_verbose_shows_where_an_error_comes_from_and_ends_with_the_same_code(
    tmp_path: Path,
) -> None:
    path = tmp_path / "none.yaml"
    _, error = run("plan", "-v", "--config", path, exit_code=2)
    assert error.startswith("Traceback (most recent call last):")
    assert error.endswith(
        f"\nkvcache: {path}: cannot be read (No such file or directory): check the path\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WrongBytesError("block 7"), 1),
        (ConfigurationError("a key"), 2),
        (RequestError("a request"), 2),
        (NotEnoughMemoryError("too little"), 2),
        (NotRunningError("none"), 3),
        (StartupError("rank 1"), 3),
        (WorkerLostError("rank 1"), 3),
        (DeadlineError("no answer"), 3),
        (InvariantError("state"), 4),
        (ZeroDivisionError("a slip"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_says_what_kind_of_error_it_was(error: BaseException, code: int) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(Exit) as ended:
        run_command(fail, verbose=False)
    assert ended.value.exit_code == code


@pytest.mark.parametrize("form", [(), pytest.param(("--json",), marks=pytest.mark.long)])
def test_a_closed_reader_of_the_output_is_no_error(form: tuple[str, ...]) -> None:
    command = [*KVCACHE, "plan", "--config", "cpu_tp2", *form]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        _, error = process.communicate()
    assert (process.returncode, error) == (141, "")


def test_help_lists_the_exit_codes() -> None:
    for command in ((), ("replay",)):
        shown, _ = run(*command, "--help")
        flat = " ".join(shown.split())
        assert "Exit codes: 0 done; 1 something is wrong: wrong bytes," in flat
        assert "2 bad input:" in flat
        assert "3 the cluster:" in flat


def test_help_shows_defaults_that_depend_on_the_model() -> None:
    shown, _ = run("plan", "--help")
    flat = " ".join(shown.replace("│", " ").split())
    assert "(default: the model's)" in flat and "(default: none)" in flat


def test_a_name_that_is_typed_is_checked_like_one_in_a_file() -> None:
    for name in ("", "bad name/!"):
        _, error = run("launch", "--config", CPU_TP2, "--name", name, exit_code=2)
        assert error.startswith(f"kvcache: command line: name: {name!r}: "), error


def test_an_unknown_workload_is_refused_before_anything_starts(small: Path) -> None:
    _, error = run("replay", "nonsense", "--config", small, exit_code=2)
    assert error.startswith("kvcache: no workload 'nonsense': give 'conversations', a generator")


def test_a_broken_trace_is_refused_before_anything_starts(small: Path, trace: Path) -> None:
    trace.write_text(trace.read_text() + "\n{}\n", encoding="utf-8")
    _, error = run("replay", trace, "--config", small, exit_code=2)
    assert error == (f"kvcache: {trace}, line 4: has no input_length: repair or remove the line\n")


def test_a_trace_without_a_request_is_refused_before_anything_starts(
    small: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    _, errors = run("replay", empty, "--config", small, exit_code=2)
    assert "empty.jsonl has no requests: give a workload with at least one" in errors


def test_a_replay_needs_something_to_play_on(trace: Path) -> None:
    _, error = run("replay", trace, exit_code=2)
    assert error == (
        "kvcache: nothing to play on: give --config FILE for a new cluster, or --name NAME for a "
        "running one\n"
    )


def test_a_running_cluster_has_its_own_configuration(small: Path, trace: Path) -> None:
    _, error = run("replay", trace, "--config", small, "--name", "x", exit_code=2)
    assert error == (
        "kvcache: --name x plays on a running cluster, --config on a new one: give one of them\n"
    )


def test_prefill_only_counts_without_a_cluster(trace: Path) -> None:
    shown, _ = run("replay", trace, "--prefill-only", "--blocks", "100", "--json")
    count = json.loads(shown)
    assert (count["num_requests"], count["num_block_references"]) == (3, 6)
    assert (count["num_hit_blocks"], count["num_blocks"]) == (2, 100)
    assert count["hit_rate"] == pytest.approx(2 / 6)


def test_prefill_only_shows_a_table(trace: Path) -> None:
    shown, _ = run("replay", trace, "--prefill-only")
    assert "unlimited, blocks of 512 tokens" in shown
    assert "33.33% of blocks" in shown


def test_a_capacity_that_is_no_number_is_refused(trace: Path) -> None:
    _, error = run("replay", trace, "--prefill-only", "--blocks", "many", exit_code=2)
    assert error == (
        "kvcache: --blocks 'many' is not a capacity: give a number of at least 1, or unlimited\n"
    )


def test_a_request_that_is_too_long_is_refused_before_anything_is_started(
    small: Path, trace: Path
) -> None:
    too_long = {"timestamp": 3, "input_length": 2040, "output_length": 9, "hash_ids": [1, 2, 3, 4]}
    trace.write_text(f"{trace.read_text(encoding='utf-8')}\n{json.dumps(too_long)}")
    _, error = run("replay", trace, "--config", small, exit_code=2)  # on Ray, if it came to that
    assert error == (
        "kvcache: request line-4 of trace.jsonl has 2040 prompt and 9 output tokens, 2049 in all, "
        "but max_model_len is 2048: raise it, or leave such requests out (`kvcache replay "
        "--skip-too-long`)\n"
    )


def test_requests_that_are_too_long_are_skipped_and_counted(small: Path, trace: Path) -> None:
    too_long = {"timestamp": 3, "input_length": 2040, "output_length": 9, "hash_ids": [1, 2, 3, 4]}
    trace.write_text(f"{trace.read_text(encoding='utf-8')}\n{json.dumps(too_long)}")
    play = ("replay", trace, "--config", small, "--local", "--skip-too-long", "--no-progress")
    report = json.loads(run(*play, "--json")[0])
    assert (report["num_requests"], report["num_skipped_requests"]) == (3, 1)
    assert (report["num_prompt_tokens"], report["num_wrong_blocks"]) == (2324, 0)
    shown, _ = run(*play)
    assert "3 (1 skipped, longer than max_model_len)" in shown


def test_a_workload_of_nothing_but_too_long_requests_is_refused(small: Path, trace: Path) -> None:
    too_long = {"timestamp": 3, "input_length": 2040, "output_length": 9, "hash_ids": [1, 2, 3, 4]}
    trace.write_text(json.dumps(too_long))
    _, error = run("replay", trace, "--config", small, "--skip-too-long", exit_code=2)
    assert error == (
        "kvcache: every request of trace.jsonl (1) is longer than max_model_len (2048): raise it, "
        "or give another workload\n"
    )


def test_a_count_has_nothing_to_skip(trace: Path) -> None:
    _, error = run("replay", trace, "--prefill-only", "--skip-too-long", exit_code=2)
    assert error == (
        "kvcache: --prefill-only has no model, so no request is too long: omit --skip-too-long\n"
    )


def test_options_that_a_replay_would_not_follow_are_refused(small: Path, trace: Path) -> None:
    _, error = run("replay", trace, "--config", small, "--local", "--blocks", "9", exit_code=2)
    assert error == (
        "kvcache: --blocks and --block-size are for --prefill-only: add it, or set the sizes in "
        "the configuration\n"
    )
    _, error = run("replay", trace, "--prefill-only", "--config", small, exit_code=2)
    assert error == "kvcache: --prefill-only plays on no cluster: omit --config\n"


def test_a_local_replay_checks_every_byte(small: Path, trace: Path) -> None:
    shown, _ = run("replay", trace, "--config", small, "--local", "--json", "--no-progress")
    report = json.loads(shown)
    assert (report["num_requests"], report["num_prompt_tokens"]) == (3, 2324)
    assert report["num_output_tokens"] == 51
    assert report["num_hit_tokens"] == 2 * 512
    assert report["num_wrong_blocks"] == 0
    assert report["bytes_checked"] > 100_000


def test_a_local_replay_under_pressure_still_finds_no_wrong_byte(
    small: Path, tmp_path: Path
) -> None:
    text = small.read_text(encoding="utf-8").replace("num_blocks: 600", "num_blocks: 300")
    small.write_text(text, encoding="utf-8")
    library = tmp_path / "library"
    library.mkdir()
    for i in range(8):
        (library / f"{i}.txt").write_text(f"Volume {i}. " * 90, encoding="utf-8")
    shown, _ = run("replay", library, "--config", small, "--local", "--json")
    report = json.loads(shown)
    assert report["num_requests"] == 16
    assert report["num_wrong_blocks"] == 0
    assert report["num_hit_tokens"] > 0
    assert report["num_evictions"] > 0


class WrongBytesStepper(ManagerStepper):
    """A cluster whose rank 1 finds wrong bytes in step 2."""

    def progress(self) -> ForwardProgress:
        progress = super().progress()
        if progress.finished_step < 2:
            return progress
        failure = FailedForward(2, 1, "block 7, layer 0: written by step 1, read by step 2")
        return replace(progress, bytes_checked=4096, failures=(failure,))


def test_a_wrong_byte_is_exit_code_1_with_the_report_and_the_blocks_history(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1)
    config = KVCacheConfig(500, (), (KVCacheGroupSpec(("layer.0",), spec),))
    stepper = WrongBytesStepper(KVCacheManager(config, 2048))
    ground = Playground("a broken cluster", stepper, EngineLimits(2048, 512, 8))
    monkeypatch.setattr(playground, "open_playground", lambda *choices: nullcontext(ground))
    shown, error = run("replay", trace, "--local", "--no-progress", exit_code=1)
    assert "wrong bytes" in shown and "in 1 blocks" in shown
    assert error == (
        "kvcache: trace.jsonl: wrong bytes in 1 blocks, the replay has ended; what happened to "
        "them:\n  step 2, rank 1: block 7, layer 0: written by step 1, read by step 2\n"
    )


def test_help_imports_neither_ray_nor_torch() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from actors.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(sorted({'ray', 'torch', 'numpy', 'pydantic'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_the_version_is_that_of_the_package() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"kvcache {version('kvcache')}\n")
