"""A Ray whose control service (GCS) hangs or dies while the rest of it runs: commands report it,
and none ends with exit code 1, which means wrong bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from actors.clusters.placement import wait_until
from tests.actors.conftest import build_config

pytestmark = pytest.mark.faults

SOON_S = 300.0
"""Time that a busy machine may take for an action of a few seconds."""

RAY_WAITS_S = 15
"""How long Ray lets a replay run without the control service."""

HEAD = """
import json, os, sys, psutil
from tests.chaos.own_ray import ray_of_our_own
with ray_of_our_own() as address:
    children = psutil.Process().children(recursive=True)
    (service,) = [process.pid for process in children if process.name() == "gcs_server"]
    print(json.dumps([address, service, os.environ["RAY_AUTH_TOKEN_PATH"]]), flush=True)
    sys.stdin.read()
"""

COMMAND = """
import functools
from ray._private import services
services.find_gcs_addresses = functools.cache(lambda: {{{address!r}}})  # no others of this machine
from actors.cli import main
main()
"""


@dataclass(frozen=True)
class OwnRay:
    """A Ray cluster in processes of its own, which commands find by themselves."""

    address: str
    control_service: int
    token_path: str

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(address=self.address), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RAY_AUTH_TOKEN_PATH": self.token_path,
                "RAY_gcs_rpc_server_reconnect_timeout_s": str(RAY_WAITS_S),
            },
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, stdout and stderr."""
        with self.start(*arguments) as command:
            try:
                shown, told = command.communicate(timeout=SOON_S)
            finally:
                command.kill()
        return command.returncode, shown, told


@pytest.fixture
def own_ray() -> Iterator[OwnRay]:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as head:
        assert head.stdout is not None
        try:
            ray = OwnRay(*json.loads(head.stdout.readline()))
            yield ray
        finally:
            for process in psutil.Process(head.pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            head.kill()
    shutil.rmtree(Path(ray.token_path).parent)


def test_commands_end_with_a_remedy_when_the_control_service_hangs_or_dies(
    own_ray: OwnRay, tmp_path: Path
) -> None:
    config = tmp_path / "lost.json"  # which is YAML, too
    config.write_text(build_config("lost").model_dump_json(exclude_none=True))
    code, _, told = own_ray.run("launch", "--config", str(config), "--detach")
    assert code == 0, told
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 400, "output_length": 100, "hash_ids": [1]}
    trace.write_text("\n".join([json.dumps(line)] * 100_000))
    with own_ray.start("replay", str(trace), "--name", "lost", "--no-progress") as replay:
        try:
            assert wait_until(lambda: num_steps(own_ray) > 0, SOON_S)
            os.kill(own_ray.control_service, signal.SIGSTOP)
            assert own_ray.run("status") == broken(own_ray, "no answer within 10 s")
            os.kill(own_ray.control_service, signal.SIGKILL)
            refused = "[Errno 111] Connection refused"
            assert own_ray.run("status") == broken(own_ray, refused)
            assert own_ray.run("stop") == broken(own_ray, refused)
            _, told = replay.communicate(timeout=SOON_S)
        finally:
            replay.kill()
    assert replay.returncode == 3, told
    assert f"kvcache: the Ray at {own_ray.address} is lost: its control service (GCS) has" in told
    assert "run `ray stop --force`, start Ray again, and launch" in told


def num_steps(own_ray: OwnRay) -> int:
    code, shown, told = own_ray.run("status", "--json")
    assert code == 0, told
    return int(json.loads(shown)["statistics"]["num_steps"])


def broken(own_ray: OwnRay, why: str) -> tuple[int, str, str]:
    """Return the last line of a command."""
    return (
        3,
        "",
        f"kvcache: the Ray at {own_ray.address} is broken: its control service (GCS) does not "
        f"answer ({why}): run `ray stop --force`, start Ray again, and "
        "launch\n",
    )
