"""`kvcache doctor`: its findings on a node, and its output. Nothing is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from actors.cli import app
from actors.cli.doctor import (
    SYNC_BYTES,
    DirectoryStatistics,
    NodeStatistics,
    Problem,
    RayStatistics,
    device_problems,
    directory_problems,
    limit_problems,
    look_at_directory,
    memory_problems,
    node_problems,
    port_problems,
    ray_problems,
)
from kvcache.base.clock import VirtualClock
from kvcache.config import ClusterConfig, parse_config
from kvcache.config.sections import Location
from kvcache.planner import plan_cluster
from kvcache.worker.copies.measurement import CopyMeasurement, MeasureLimits, measure_cpu

GIB = 2**30
ROOMY = NodeStatistics(64 * GIB, 16 * GIB, None, (80 * GIB, 60 * GIB))
MODEL = """
name: small
model:
  name: tiny
  max_model_len: 2048
  layers: [{kind: full, count: 2, num_kv_heads: 2, head_size: 4}]
cache: {block_size: 16, memory_per_rank: 1MiB}
parallel: {tensor_parallel_size: 2}
offload:
  host_memory_per_rank: 2MiB
  disk: {directory: DIRECTORY, capacity_per_rank: 4MiB}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MODEL.replace("DIRECTORY", str(tmp_path)), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is copied: `test_copy_measurement.py` tests the measurement."""

    def measure(page_bytes: list[int]) -> CopyMeasurement:
        return measure_cpu(page_bytes, MeasureLimits(num_bytes=2**18, num_repetitions=1))

    monkeypatch.setattr("kvcache.worker.copies.measurement.measure_cpu", measure)
    # Independent of a Ray on the test's machine; tests/actors look at a real one.
    monkeypatch.setattr("actors.cli.doctor.look_at_ray", lambda: RayStatistics("2.60.0"))


def run(*arguments: str | Path, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *(str(argument) for argument in arguments)])
    assert result.exit_code == exit_code, result.output
    return result.stdout


def config_of(**workers: object) -> ClusterConfig:
    offload = {
        "host_memory_per_rank": "2GiB",
        "disk": {"directory": "/data", "capacity_per_rank": "4GiB"},
    }
    return parse_config(
        {
            "name": "small",
            "model": {
                "name": "tiny",
                "max_model_len": 2048,
                "layers": [{"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 64}],
            },
            "cache": {"memory_per_rank": "1GiB"},
            "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "workers": workers,
            "offload": offload,
        },
        "test",
    )


CPU = config_of(device="cpu")
CUDA = config_of(device="cuda", num_gpus_per_rank=1)


def whats(problems: Iterable[Problem], *, prevent: bool = True) -> list[str]:
    return [problem.what for problem in problems if problem.prevents_launch == prevent]


def memory_whats(config: ClusterConfig, node: NodeStatistics, *, prevent: bool = True) -> list[str]:
    return whats(memory_problems(config, plan_cluster(config), node), prevent=prevent)


def test_without_a_configuration_the_machine_is_shown() -> None:
    shown = run()
    for text in ("torch", "ray", "available", "/dev/shm free", "kernel", "plain"):
        assert text in shown


def test_the_pages_of_the_plan_are_measured(small: Path) -> None:
    found = json.loads(run("--config", small, "--json"))
    assert found["page_bytes"] == [512]
    pages = {figure["page_bytes"] for figure in found["copies"][0]["figures"]}
    assert 512 in pages
    assert all(figure["bytes_per_s"] > 0 for figure in found["copies"][0]["figures"])
    assert found["prevents_launch"] is False
    assert found["directory"]["sync_bytes_per_s"] > 0
    assert found["machine"]["torch"] == torch.__version__


def test_the_way_that_is_chosen_has_a_star(small: Path) -> None:
    shown = run("--config", small)
    lines = [line for line in shown.splitlines() if "host to host │" in line]
    assert [line.count("*") for line in lines] == [1] * len(lines)
    assert sum("(plan)" in line for line in lines) == 1
    assert "*: how workers copy scattered pages of this size" in shown


def test_a_problem_that_prevents_a_launch_is_exit_code_1(small: Path) -> None:
    gone = small.parent / "gone"
    small.write_text(MODEL.replace("DIRECTORY", str(gone)), encoding="utf-8")
    shown = run("--config", small, exit_code=1)
    assert (
        f"problem: offload.disk.directory {gone} is not a directory: create or mount it, and let "
        "the workers' user write there\n"
    ) in shown
    assert "nothing is wrong" not in shown


def test_a_configuration_without_a_plan_is_a_problem(small: Path) -> None:
    small.write_text(small.read_text().replace("1MiB", "600B"), encoding="utf-8")
    shown = run("--config", small, exit_code=1)
    assert "problem: the configuration has no plan: " in shown


def test_a_configuration_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kvcache: {tmp_path}/none.yaml: cannot be read")


def test_a_warning_is_no_reason_to_fail(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = replace(NodeStatistics.of_this_node(), shared_free_bytes=2**20, gpu_free_bytes=())
    monkeypatch.setattr(NodeStatistics, "of_this_node", lambda: node)
    assert "warning: /dev/shm has 1.0 MiB free, less than 128.0 MiB" in run("--config", small)


def test_a_node_with_room_has_no_problem() -> None:
    for config in (CPU, CUDA):
        assert not [*device_problems(config, ROOMY)]
        assert not [*memory_problems(config, plan_cluster(config), ROOMY)]
    assert not [*node_problems(ROOMY)]
    unknown = NodeStatistics(None, None, None)
    assert not [*node_problems(unknown), *memory_problems(CPU, plan_cluster(CPU), unknown)]


def test_cuda_without_a_gpu_cannot_be_launched() -> None:
    (problem,) = device_problems(CUDA, replace(ROOMY, gpu_free_bytes=()))
    assert problem.prevents_launch
    assert problem.what.startswith("workers.device is cuda, and torch can use no GPU here (torch ")


def test_a_stage_that_is_wider_than_the_node_cannot_be_launched() -> None:
    (problem,) = device_problems(CUDA, replace(ROOMY, gpu_free_bytes=(80 * GIB,)))
    assert problem.what == (
        "the 2 ranks of a pipeline stage share a node and need 2 GPUs, this node has 1"
    )


def test_memory_counts_the_pools_on_cpu_and_only_host_slots_on_gpus() -> None:
    node = replace(ROOMY, available_bytes=5 * GIB)
    assert memory_whats(CPU, node) == [
        "the 2 ranks of a pipeline stage take 6.0 GiB of this node's memory, 5.0 GiB are available"
    ]
    assert memory_whats(CUDA, node) == []
    assert memory_whats(CUDA, replace(ROOMY, available_bytes=3 * GIB)) != []


def test_a_pool_that_no_gpu_holds_is_found() -> None:
    assert memory_whats(CUDA, replace(ROOMY, gpu_free_bytes=(GIB // 2, GIB // 4))) == [
        "a rank's blocks take 1.0 GiB, the GPU with the most room has 512.0 MiB free"
    ]


def test_a_limit_of_locked_memory_is_a_warning_on_gpus_only() -> None:
    node = replace(ROOMY, locked_limit_bytes=2**23)
    (warning,) = memory_whats(CUDA, node, prevent=False)
    assert warning.endswith("the limit of locked memory is 8.0 MiB: some systems refuse that")
    assert memory_whats(CPU, node, prevent=False) == []


def test_a_directory_with_too_little_room_is_a_warning() -> None:
    statistics = DirectoryStatistics(Path("/data"), 7 * GIB, 1e9)
    (warning,) = whats(directory_problems(CPU, statistics), prevent=False)
    assert warning == (
        "the files of the 2 ranks of a pipeline stage may take 8.0 GiB, 7.0 GiB are free in /data"
    )
    assert not [*directory_problems(CPU, replace(statistics, free_bytes=8 * GIB))]


def test_looking_at_a_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    class Ticking(VirtualClock):
        def now(self) -> float:
            self.advance(0.5)
            return super().now()

    statistics = look_at_directory(Location(tmp_path), Ticking())
    assert (statistics.sync_bytes_per_s, statistics.problem) == (2 * SYNC_BYTES, "")
    assert list(tmp_path.iterdir()) == []


def test_what_would_be_made_below_the_root_is_not_made_to_look_at_it(tmp_path: Path) -> None:
    statistics = look_at_directory(Location(tmp_path, "cache/kvcache"), VirtualClock())
    assert (statistics.path, statistics.problem) == (tmp_path, "")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_directory_or_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert look_at_directory(Location(file), VirtualClock()).problem == "is not a directory"
    assert look_at_directory(Location(tmp_path / "gone"), VirtualClock()).problem == (
        "is not a directory"
    )

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    statistics = look_at_directory(Location(tmp_path), VirtualClock())
    assert statistics.problem == "cannot be written (Permission denied)"


def test_a_port_in_use_is_named_before_a_launch_finds_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = with_events(f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:0")
        (problem,) = port_problems(config)
    assert problem.prevents_launch
    assert problem.what == (
        f"events.endpoint tcp://127.0.0.1:{port} cannot be bound: Address already in use"
    )
    assert "choose another port" in problem.remedy
    assert not [*port_problems(config)]
    assert not [*port_problems(CPU)]


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    config = with_events("tcp://192.0.2.1:5557", "ipc:///tmp/replay")
    (problem,) = port_problems(config)
    assert "tcp://192.0.2.1:5557 cannot be bound" in problem.what


def test_few_open_files_are_a_warning() -> None:
    (warning,) = limit_problems(1024)
    assert not warning.prevents_launch
    assert "may open 1,024 files" in warning.what and "ulimit -n" in warning.remedy
    assert not [*limit_problems(None), *limit_problems(65536)]


def test_ray_that_cannot_be_joined_prevents_a_launch() -> None:
    assert not [*ray_problems(RayStatistics("2.60.0"))]
    assert not [*ray_problems(RayStatistics("2.60.0", True, 2, ("chat",)))]
    (problem,) = ray_problems(RayStatistics("2.60.0", problem="Version mismatch"))
    assert problem.prevents_launch and "Version mismatch" in problem.what
    somebodys = RayStatistics("2.60.0", problem="another token", is_wanted=False)
    (warning,) = ray_problems(somebodys)
    assert not warning.prevents_launch and "another token" in warning.what


def with_events(endpoint: str, replay_endpoint: str) -> ClusterConfig:
    events = {"enabled": True, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
    return parse_config({**CPU.model_dump(), "events": events})
