"""Options of admin commands, and how quickly `kvcache` answers. Without Ray."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from actors.cli import app
from actors.cli.admin import read_tokens
from actors.cli.status import Look, as_plain, rates
from actors.clusters.access import ClusterStatistics
from actors.service import ServiceStatistics
from actors.transport import TransportStatistics
from kvcache.base.errors import ConfigurationError
from tests.cli.commands import run
from tests.metrics.test_log_line import statistics

ROOT = Path(__file__).resolve().parents[2]


def typed(
    tokens: str | None = None,
    token_file: Path | None = None,
    text: Path | None = None,
    tokenizer: str | None = None,
) -> list[int]:
    return list(read_tokens(tokens, token_file, text, tokenizer))


@pytest.mark.parametrize("text", ["1, 2,3", "1 2\n3\n", "[1, 2, 3]", "[1,2,3]\n"])
def test_token_ids_are_read_however_they_are_separated(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    assert typed(token_file=path) == [1, 2, 3]
    assert typed(tokens=text) == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "0 prefixes were given"),
        ({"tokens": "1", "text": Path("x")}, "2 prefixes were given"),
        ({"tokens": "1,x"}, "'x' is not a token id: separate token ids"),
        ({"tokens": "[1, 2"}, "one bracket of a JSON list is missing"),
        ({"tokens": "1 2]"}, "check that the file is complete"),
        ({"tokens": "[1,, 2.5]"}, "'2.5' is not a token id"),
        ({"tokens": ""}, "there are no token ids"),
        ({"tokens": "1,-5"}, "-5 is not a token id"),
        ({"token_file": Path("/nowhere/tokens")}, r"read \(No such file or directory\): "),
        ({"token_file": Path("/")}, r"/ cannot be read \(Is a directory\): pass a text"),
        ({"text": Path("/nowhere/text")}, "pass --tokenizer"),
    ],
)
def test_a_prefix_that_cannot_be_read_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        typed(**given)


@pytest.mark.parametrize("ttl", ["-4", "0", "nan"])
def test_a_pin_has_time(ttl: str) -> None:
    _, errors = run("pin", "--tokens", "1", "--ttl", ttl, exit_code=2)
    assert errors == f"kvcache: --ttl is {ttl}: give a number above 0\n"


@pytest.mark.parametrize("answers", [True, False])
def test_a_tokenizer_comes_from_the_hub_only_if_it_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: bool
) -> None:
    """Transformers alone would ask a hub that is out of reach for most of a minute."""
    asked: list[object] = []

    class Hub:
        def model_info(self, name: str, timeout: float) -> None:
            asked.append((name, timeout))
            if not answers:
                raise RuntimeError("no network.\nCheck it.")

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, local_files_only: bool) -> Any:
            asked.append(local_files_only)
            if local_files_only:
                raise OSError("not found in the cache")
            return lambda text: {"input_ids": [len(text)]}

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Hub))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=AutoTokenizer))
    text = tmp_path / "text"
    text.write_text("four")
    if answers:
        assert typed(text=text, tokenizer="llama") == [4]
        assert typed(text=text, tokenizer=str(tmp_path)) == [4]  # a directory: no question
    else:
        message = (
            "tokenizer llama cannot be loaded, neither from this node nor from the Hugging Face "
            "hub: no network: pass a directory with the tokenizer's files, or token ids"
        )
        with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
            typed(text=text, tokenizer="llama")
    assert asked == [("llama", 5.0), not answers, *([False] if answers else [])]


def look(at_s: float, **values: int) -> Look:
    service = ServiceStatistics(TransportStatistics(), 0, 0, 0, 0)
    epoch = values.pop("epoch", 3)
    known = replace(statistics(**values), epoch=epoch)
    return Look(at_s, None, ClusterStatistics(known, service, (), ()))


def test_rates_are_what_happened_between_two_looks() -> None:
    before = look(10.0, num_steps=100, asked=1000, hit=0, evicted=50)
    now = look(12.0, num_steps=150, asked=1400, hit=300, evicted=70)
    found = rates(before, now)
    assert (found.steps, found.evictions, found.hit_rate) == (25.0, 10.0, 0.75)
    begun = look(12.0, num_steps=150, asked=100, hit=10, evicted=4, epoch=4)
    assert (rates(before, begun).evictions, rates(before, begun).hit_rate) == (2.0, 0.1)
    plain = as_plain("x", now, found)
    assert (plain["num_blocks"], plain["steps_per_s"], plain["state"]) == (1000, 25.0, "unknown")
    nobody = Look(13.0, None, None, "no answer")
    assert as_plain("x", nobody, rates(now, nobody))["problem"] == "no answer"


def commands() -> list[str]:
    return sorted(get_command(app).commands)  # type: ignore[attr-defined]


IMPORTS = """
import json, sys
from typer.testing import CliRunner
from actors.cli import app
for commands, unwanted in json.loads(sys.argv[1]):
    for arguments in commands:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (arguments, result.output)
    assert not {*unwanted} & {*sys.modules}, (commands, {*unwanted} & {*sys.modules})
print(result.stdout)
"""


def test_commands_import_no_more_than_they_need() -> None:
    heavy = ["torch", "ray", "matplotlib"]
    load = ["agents", "-l", "40", "--json", "--no-progress", "-p", "lru"]
    prices = ["--device-price", "20", "--budget", "1000", "--token-size", "128KiB"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            IMPORTS,
            json.dumps(
                [
                    ([["--help"], *([name, "--help"] for name in commands())], [*heavy, "numpy"]),
                    ([["simulate", *load, "-j", "2", "-b", "2000"]], heavy),
                    ([["advise", *load, *prices, "-j", "1"]], heavy),
                    ([["plan", "--config", "cpu_tp2", "--json"]], heavy),
                ]
            ),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["name"] == "cpu-tp2"


WITHOUT_OTHERS = """
from ray._private import services
services._find_address_from_flag = lambda flag: set()  # whatever else runs on this machine
from actors.cli import main
main()
"""


def ask_usage(ray_directory: Path) -> subprocess.CompletedProcess[str]:
    """Ask for the usage of a cluster while Ray sees only this directory."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_OTHERS, "usage"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # Ray itself takes three and a half minutes to give up one that was killed
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(ray_directory)},
    )


def test_a_ray_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    done = ask_usage(tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith(f"kvcache: the Ray that was started last, at {address}, does not")
    assert "ray start --head" in done.stderr and "`ray stop` forgets it" in done.stderr


def test_without_ray_a_command_says_what_to_do(tmp_path: Path) -> None:
    done = ask_usage(tmp_path)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "ray start --head" in done.stderr


def test_an_address_where_nothing_answers_is_an_error_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"  # closed by the time it is tried
    done = subprocess.run(
        [sys.executable, "-c", "from actors.cli import main; main()", "usage"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert f"RAY_ADDRESS is {address}, and nothing answers there" in done.stderr
    assert "unset it" in done.stderr
