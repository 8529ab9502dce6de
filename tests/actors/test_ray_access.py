"""A Ray that cannot be joined, named in the environment: what commands say, and how soon."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import KVCACHE

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"RAY_AUTH_TOKEN_PATH": "other"}, "the Ray at {0} runs with another token than this"),
        ({"RAY_AUTH_TOKEN": "f" * 64}, "the Ray at {0} runs with another token than this"),
        ({"RAY_AUTH_MODE": "disabled"}, "the Ray at {0} expects a token, and none is sent with"),
        ({"RAY_AUTH_TOKEN_PATH": "missing"}, "Ray's token cannot be read: RAY_AUTH_TOKEN_PATH is"),
    ],
)
def test_a_ray_with_another_token_is_told_from_none(
    ray_cluster: str, tmp_path: Path, settings: dict[str, str], what: str
) -> None:
    done = run(ray_cluster, tmp_path, settings, "status")
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 1  # Ray itself would complain for twenty seconds
    assert said[0].startswith("kvcache: " + what.format(ray_cluster))
    assert "point to the token file" in said[0] and "RAY_AUTH_TOKEN_PATH" in said[0]


def test_doctor_says_that_a_launch_would_not_find_its_ray(ray_cluster: str, tmp_path: Path) -> None:
    done = run(ray_cluster, tmp_path, {"RAY_AUTH_TOKEN_PATH": "other"}, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    problems = json.loads(done.stdout)["problems"]
    (problem,) = [problem for problem in problems if "Ray" in problem["what"]]
    assert "another token" in problem["what"] and "RAY_AUTH_TOKEN_PATH" in problem["remedy"]
    assert problem["prevents_launch"]


def run(
    address: str, directory: Path, settings: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a command where RAY_ADDRESS is `address`; paths in `settings` are below `directory`."""
    other = directory / "other"
    other.touch(mode=0o600)
    other.write_text("e" * 64)
    paths = {k: str(directory / v) if k.endswith("_PATH") else v for k, v in settings.items()}
    return subprocess.run(
        [*KVCACHE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "RAY_ADDRESS": address, **paths},
    )
