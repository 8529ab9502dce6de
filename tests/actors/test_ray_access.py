"""A Ray that cannot be joined, named in the environment: errors of commands, and their delay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.commands import KVCACHE

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"RAY_AUTH_TOKEN_PATH": "other"}, "the Ray at {0} expects another token than this"),
        ({"RAY_AUTH_TOKEN": "f" * 64}, "the Ray at {0} expects another token than this"),
        (
            {"RAY_AUTH_MODE": "disabled"},
            "the Ray at {0} expects a token, and this command sends none",
        ),
        ({"RAY_AUTH_TOKEN_PATH": "missing"}, "Ray's token cannot be read: RAY_AUTH_TOKEN_PATH is"),
    ],
)
def test_a_ray_with_another_token_is_told_from_none(
    ray_cluster: str, tmp_path: Path, settings: dict[str, str | None], what: str
) -> None:
    done = run(ray_cluster, tmp_path, settings, "status")
    assert done.returncode == 3, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 1  # Ray itself would complain for twenty seconds
    assert said[0].startswith("kvcache: " + what.format(ray_cluster))
    assert "point to the token file" in said[0] and "RAY_AUTH_TOKEN_PATH" in said[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"RAY_AUTH_MODE": None},  # left to Ray: on where there is a token
        {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN_PATH": None, "HOME": "home"},  # `ray start`'s file
    ],
)
def test_a_ray_whose_token_is_here_is_not_refused(
    ray_cluster: str, tmp_path: Path, settings: dict[str, str | None]
) -> None:
    (tmp_path / "home" / ".ray").mkdir(parents=True)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
    (tmp_path / "home" / ".ray" / "auth_token").write_text(token)
    script = f"from actors.cli.clusters import refusal_at; print(refusal_at({ray_cluster!r}))"
    found = process("", tmp_path, settings, [sys.executable, "-c", script])
    assert (found.stdout, found.stderr) == ("None\n", "")


def test_a_ray_without_a_node_on_this_machine_is_refused_at_once(
    ray_cluster: str, tmp_path: Path
) -> None:
    """As after the death of its raylet: Ray waits for another one for a minute."""
    script = (
        "import functools\n"
        "from ray._private import services\n"
        "services.find_gcs_addresses = functools.cache(lambda: {'192.0.2.9:1'})  # of others\n"
        f"from actors.cli.clusters import refusal_at; print(refusal_at({ray_cluster!r}))"
    )
    found = process(ray_cluster, tmp_path, {}, [sys.executable, "-c", script])
    assert found.stderr == ""
    assert found.stdout == (
        f"the Ray at {ray_cluster} has no node on this machine, or its raylet has died: `ray start "
        f"--address={ray_cluster}` adds one; if one has died, run `ray stop --force`, "
        "start Ray again, and launch\n"
    )


def test_a_ray_that_is_named_is_joined(ray_cluster: str, tmp_path: Path) -> None:
    done = run(ray_cluster, tmp_path, {}, "usage", "--name", "none")
    assert done.stderr.startswith("kvcache: no cluster")


def test_doctor_says_that_a_launch_would_not_find_its_ray(ray_cluster: str, tmp_path: Path) -> None:
    done = run(ray_cluster, tmp_path, {"RAY_AUTH_TOKEN_PATH": "other"}, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    problems = json.loads(done.stdout)["problems"]
    (problem,) = [problem for problem in problems if "Ray" in problem["what"]]
    assert "another token" in problem["what"] and "RAY_AUTH_TOKEN_PATH" in problem["remedy"]
    assert problem["prevents_launch"]


def run(
    address: str, directory: Path, settings: Mapping[str, str | None], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Do `process` with a command."""
    return process(address, directory, settings, [*KVCACHE, *arguments])


def process(
    address: str, directory: Path, settings: Mapping[str, str | None], command: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run with RAY_ADDRESS `address` and the given `settings` of the environment (None: unset);
    paths are below `directory`."""
    other = directory / "other"
    other.touch(mode=0o600)
    other.write_text("e" * 64)
    environment = {**os.environ, "RAY_ADDRESS": address}
    for name, value in settings.items():
        environment.pop(name, None)
        if value is not None:
            is_path = name in ("RAY_AUTH_TOKEN_PATH", "HOME")
            environment[name] = str(directory / value) if is_path else value
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
