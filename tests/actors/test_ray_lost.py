"""A Ray whose control service (GCS) hangs or dies: commands say so, and none ends with exit code 1,
which means wrong bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.placement import wait_until
from tests.conftest import SCRATCH

pytestmark = pytest.mark.faults

SOON_S = 120.0
"""How long a machine that has too much to do may take for what takes seconds."""

HEAD = """
import json, sys, psutil, ray
made = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False,
                object_store_memory=100 * 2**20, _temp_dir=sys.argv[1])
services = [p for p in psutil.Process().children(recursive=True) if p.name() == "gcs_server"]
print(json.dumps([made.address_info["address"], services[0].pid]), flush=True)
sys.stdin.read()
"""

COMMAND = """
import sys
from ray._private import services
find = services._find_address_from_flag
services._find_address_from_flag = (  # not those of others on this machine
    lambda flag: {address!r} if flag == "--gcs-address" else find(flag)
)
from actors.cli import main, sessions
sessions.GONE_S = 5.0
main()
"""


@dataclass(frozen=True)
class OwnRay:
    """A Ray of its own, in processes of its own."""

    address: str
    control_service: int

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that finds this Ray by itself."""
        return [sys.executable, "-c", COMMAND.format(address={self.address}), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, check=False, timeout=SOON_S
        )


@pytest.fixture
def own_ray() -> Iterator[OwnRay]:
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(SCRATCH / "lost")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert head.stdout is not None
    address, control_service = json.loads(head.stdout.readline())
    family = psutil.Process(head.pid).children(recursive=True)
    yield OwnRay(address, control_service)
    family += psutil.Process(head.pid).children(recursive=True)
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    head.kill()
    head.communicate()


def test_commands_end_with_a_remedy_when_the_control_service_hangs_or_dies(
    own_ray: OwnRay, tmp_path: Path
) -> None:
    config = tmp_path / "lost.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    launched = own_ray.run("launch", "--config", str(config), "--detach")
    assert launched.returncode == 0, launched.stderr
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 400, "output_length": 100, "hash_ids": [1]}
    trace.write_text("\n".join([json.dumps(line)] * 50_000), encoding="utf-8")
    play = own_ray.command("replay", str(trace), "--name", "lost", "--no-progress")
    with subprocess.Popen(play, stderr=subprocess.PIPE, text=True) as replay:
        try:
            assert wait_until(lambda: num_steps(own_ray) > 0, SOON_S)
            os.kill(own_ray.control_service, signal.SIGSTOP)
            assert_is_broken(own_ray.run("status"), own_ray, "no answer within 10 s")
            os.kill(own_ray.control_service, signal.SIGKILL)
            for command in ("status", "stop"):
                assert_is_broken(own_ray.run(command), own_ray, "[Errno 111] Connection refused")
            _, told = replay.communicate(timeout=SOON_S)
        finally:
            replay.kill()
    assert replay.returncode == 3, told
    assert f"kvcache: the Ray at {own_ray.address} is lost: its control service (GCS)" in told
    assert "`ray stop --force`, start Ray again, and launch" in told


def num_steps(own_ray: OwnRay) -> int:
    shown = own_ray.run("status", "--json")
    statistics: Any = json.loads(shown.stdout)["statistics"]
    return int(statistics["num_steps"])


def assert_is_broken(done: subprocess.CompletedProcess[str], own_ray: OwnRay, why: str) -> None:
    assert done.returncode == 3, done.stderr
    assert done.stderr == (
        f"kvcache: the Ray at {own_ray.address} is broken: processes of it run, but its control "
        f"service (GCS) does not answer ({why}): `ray stop --force` ends what is left of it; start "
        "Ray again, and launch\n"
    )


CONFIG = """
name: lost
model:
  name: tiny
  max_model_len: 512
  layers:
    - {kind: full, count: 1, num_kv_heads: 2, head_size: 4}
cache: {num_blocks: 600, memory_per_rank: 1MiB}
parallel: {tensor_parallel_size: 2}
deadlines: {startup_s: 120.0}
content_check: {enabled: true}
"""
