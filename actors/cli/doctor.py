"""`kvcache doctor`: what this machine is, how fast it copies, and what would keep a cluster off it.

Works without a cluster and without a running Ray, which is joined where there is one. Problems and
their remedies come from doctor_checks.py and doctor_network.py, bandwidths from the copy engines
themselves. With a configuration, for the pages of its plan.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from actors.cli.doctor_checks import (
    DirectoryStatistics,
    NodeStatistics,
    Problem,
    device_problems,
    directory_problems,
    look_at_directory,
    memory_problems,
    node_problems,
)
from actors.cli.doctor_network import (
    RayStatistics,
    limit_problems,
    look_at_ray,
    open_files_limit,
    port_problems,
    ray_problems,
)
from actors.cli.tables import bytes_text, print_facts, print_json, print_table
from kvcache.base.clock import SystemClock
from kvcache.base.errors import KVCacheError
from kvcache.config import ClusterConfig, load_config
from kvcache.config.sections import Location
from kvcache.planner import Plan, plan_cluster
from kvcache.worker.copies.measurement import (
    PLAIN,
    CopyFigure,
    CopyMeasurement,
    find_kernel,
    measure_cpu,
    measure_cuda,
)
from kvcache.worker.kv_cache_pool import PoolLayout

MAX_MEASURED_PAGE_BYTES = 16 * 2**20
"""Longer pages are as fast as a plain copy; they are not measured."""


@dataclass(frozen=True)
class Examination:
    """All that was found. `page_bytes` are those of the plan, empty without a configuration."""

    machine: dict[str, str]
    node: NodeStatistics
    page_bytes: tuple[int, ...]
    measurements: tuple[CopyMeasurement, ...]
    directory: DirectoryStatistics | None
    ray: RayStatistics
    open_files_limit: int | None
    problems: tuple[Problem, ...]

    @property
    def prevents_launch(self) -> bool:
        """Whether a launch would fail."""
        return any(problem.prevents_launch for problem in self.problems)


def show_examination(config_path: Path | None, as_json: bool) -> bool:
    """Print what this machine is and what is wrong with it; say whether a launch would fail.

    Raises ConfigurationError for a configuration that cannot be read.
    """
    config = None if config_path is None else load_config(config_path)
    found = examine(config)
    if as_json:
        print_json(json.dumps(_as_json(found), indent=2))
        return found.prevents_launch
    console = Console(file=sys.stdout)
    print_facts(console, "machine", found.machine)
    print_facts(console, "memory", _memory_facts(found))
    print_facts(console, "Ray", _ray_facts(found))
    for measurement in found.measurements:
        title = f"copies on {measurement.device}, GB/s: pages here and there, plain in one piece"
        print_table(console, title, _copies(measurement, found.page_bytes))
        for note in (*_choices(measurement), *measurement.notes):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
    for problem in found.problems:
        mark = "problem" if problem.prevents_launch else "warning"
        style = "red" if problem.prevents_launch else "yellow"
        line = f"{mark}: {problem.what}: {problem.remedy}"
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    if not found.problems:
        console.print("nothing is wrong", markup=False)
    return found.prevents_launch


def examine(config: ClusterConfig | None) -> Examination:
    """Look at this machine, and measure; takes a few seconds."""
    node, ray, open_files = NodeStatistics.of_this_node(), look_at_ray(), open_files_limit()
    problems = node_problems(node) + ray_problems(ray) + limit_problems(open_files)
    page_bytes: tuple[int, ...] = ()
    directory: DirectoryStatistics | None = None
    if config is not None:
        problems += device_problems(config, node) + port_problems(config)
        try:
            plan = plan_cluster(config, _memories(config, node))
        except KVCacheError as error:
            problems.append(Problem(f"the configuration has no plan: {error}", "change it"))
        else:
            page_bytes = _pages(plan)
            problems += memory_problems(config, plan, node)
        if config.offload.disk is not None:
            directory = look_at_directory(Location.of(config.offload.disk.directory), SystemClock())
            problems += directory_problems(config, directory)
    measured = [size for size in page_bytes if size <= MAX_MEASURED_PAGE_BYTES]
    measurements = [measure_cpu(measured)]
    if node.gpu_free_bytes:
        measurements += _measure_gpu(measured, problems)
    return Examination(
        _machine(node),
        node,
        page_bytes,
        tuple(measurements),
        directory,
        ray,
        open_files,
        tuple(problems),
    )


def _measure_gpu(page_bytes: Sequence[int], problems: list[Problem]) -> list[CopyMeasurement]:
    """Measure the first GPU; what is missing or fails there becomes a problem."""
    device = torch.device("cuda", 0)
    found = find_kernel(device)
    if found.kernel is None:
        what = f"small pages are copied without a kernel: {found.why_not}"
        problems.append(Problem(what, "or leave it: it is slower", prevents_launch=False))
    try:
        return [measure_cuda(device, found.kernel, page_bytes)]
    except RuntimeError as error:
        remedy = "look at nvidia-smi; end what else runs there"
        problems.append(Problem(f"copies on {device} fail: {error}", remedy))
        return []


def _memories(config: ClusterConfig, node: NodeStatistics) -> list[int] | None:
    """Return what each rank would report; None where the configuration says it.

    A guess, good enough to plan pages with: the launch asks the ranks themselves.
    """
    if config.cache.memory_per_rank is not None:
        return None
    free = min(node.gpu_free_bytes) if node.gpu_free_bytes else node.available_bytes
    return None if free is None else [free // 2] * config.parallel.num_ranks


def _pages(plan: Plan) -> tuple[int, ...]:
    """Return the sizes, in bytes, of what one block is on any rank: a row for each region."""
    layouts = [PoolLayout.from_config(config) for config in plan.configs]
    return tuple(sorted({region.width_bytes for layout in layouts for region in layout.regions}))


def _machine(node: NodeStatistics) -> dict[str, str]:
    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(len(node.gpu_free_bytes))]
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": str(os.cpu_count()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "not in this build of torch",
        "GPUs": ", ".join(gpus) or "none",
        **{name: _version(name) for name in ("triton", "ray", "numpy", "pyzmq")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory_facts(found: Examination) -> dict[str, str]:
    node, directory = found.node, found.directory
    facts = {
        "available": _size(node.available_bytes),
        "/dev/shm free": _size(node.shared_free_bytes),
        "may be locked": _size(node.locked_limit_bytes, "no limit"),
    }
    for gpu, free in enumerate(node.gpu_free_bytes):
        facts[f"GPU {gpu} free"] = bytes_text(free)
    if found.page_bytes:
        facts["pages of the plan"] = ", ".join(bytes_text(size) for size in found.page_bytes)
    if directory is not None:
        speed = directory.sync_bytes_per_s
        facts["files in"] = str(directory.path)
        facts["free there"] = _size(directory.free_bytes)
        facts["synced at"] = "-" if speed is None else f"{bytes_text(speed)}/s"
    return facts


def _ray_facts(found: Examination) -> dict[str, str]:
    ray, limit = found.ray, found.open_files_limit
    runs = f"{ray.num_nodes} nodes" if ray.is_running else "none runs here: `ray start --head`"
    return {
        "version": ray.version,
        "cluster": ray.problem or runs,
        "kvcache there": ", ".join(ray.clusters) or "nothing runs",
        "open files": "no limit" if limit is None else f"{limit:,} for each process",
    }


def _size(size_bytes: int | None, otherwise: str = "unknown") -> str:
    return otherwise if size_bytes is None else bytes_text(size_bytes)


def _copies(measurement: CopyMeasurement, page_bytes: Sequence[int]) -> Table:
    """One line for each direction and size of page; the way that is chosen has a star."""
    ways = list(dict.fromkeys(f.way for f in measurement.figures if f.way != PLAIN))
    table = Table()
    for heading in ("direction", "page"):
        table.add_column(heading, no_wrap=True)
    for way in (*ways, PLAIN, "share"):
        table.add_column(way, justify="right")
    rows = dict.fromkeys((f.direction, f.page_bytes) for f in measurement.figures)
    for direction, size in sorted(rows):
        chosen = measurement.way(direction, size)
        figures = {way: measurement.figure(direction, way, size) for way in (*ways, PLAIN)}
        cells = [_speed(figure, is_chosen=way == chosen) for way, figure in figures.items()]
        mark = " (plan)" if size in page_bytes else ""
        share = _share(figures[chosen], figures[PLAIN])
        table.add_row(direction, f"{bytes_text(size)}{mark}", *cells, share)
    return table


def _speed(figure: CopyFigure | None, *, is_chosen: bool) -> str:
    if figure is None:
        return ""
    return f"{figure.bytes_per_s / 1e9:.2f}{'*' if is_chosen else ' '}"


def _share(figure: CopyFigure | None, plain: CopyFigure | None) -> str:
    if figure is None or plain is None:
        return ""
    return f"{figure.bytes_per_s / plain.bytes_per_s:.0%}"


def _choices(measurement: CopyMeasurement) -> list[str]:
    """Say in words what is chosen."""
    return [
        f"{c.direction}: {c.below} below {bytes_text(c.piece_bytes)} a piece, {c.above} from there"
        for c in measurement.crossovers
    ]


def _as_json(found: Examination) -> dict[str, object]:
    directory = found.directory
    return {
        "prevents_launch": found.prevents_launch,
        "machine": found.machine,
        "node": asdict(found.node),
        "ray": asdict(found.ray),
        "open_files_limit": found.open_files_limit,
        "page_bytes": found.page_bytes,
        "directory": None
        if directory is None
        else asdict(directory) | {"path": str(directory.path)},
        "copies": [
            {
                "device": measurement.device,
                "figures": [
                    asdict(figure) | {"bytes_per_s": figure.bytes_per_s}
                    for figure in measurement.figures
                ],
                "crossovers": [asdict(crossover) for crossover in measurement.crossovers],
                "notes": measurement.notes,
            }
            for measurement in found.measurements
        ],
        "problems": [asdict(problem) for problem in found.problems],
    }
