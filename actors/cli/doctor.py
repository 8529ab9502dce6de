"""`kvcache doctor`: examine this machine, measure copies, and say what would make a launch fail.

Needs no cluster. If a Ray runs here, doctor joins it and leaves it again. Each problem has its
values, a remedy, and whether a launch would fail. Only this node is examined: the ranks of one
pipeline stage share a node, other stages may be elsewhere. The copy engines themselves measure the
bandwidths, with a configuration for the pages of its plan.

Nothing is started. A port is bound and released; a file in the directory of the file tier is
written and removed.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from actors.cli.clusters import find_refusal, ray_session, running_clusters
from actors.cli.command import (
    EXIT_PREVENTED,
    JsonOption,
    bytes_text,
    command,
    print_facts,
    print_json,
    print_note,
    print_table,
)
from kvcache.base.errors import KVCacheError, NotRunningError

if TYPE_CHECKING:
    from kvcache.base.clock import Clock
    from kvcache.config import ClusterConfig
    from kvcache.config.sections import Location
    from kvcache.planner import Plan
    from kvcache.worker.copies.measurement import CopyFigure, CopyMeasurement

MAX_MEASURED_PAGE_BYTES = 16 * 2**20
"""Longer pages are not measured: they are as fast as a plain copy."""

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 128 * 2**20
SYNC_BYTES = 4 * 2**20

MIN_OPEN_FILES = 4096
"""Ray recommends at least this: each socket to a worker is a file."""

_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>[0-9]+)")


@command
def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Also check what this cluster needs: a YAML file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Examine this machine: memory, speed of copies; exit code 1 if a launch would fail."""
    from kvcache.config import load_config

    found = examine(None if config is None else load_config(config))
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if found.prevents_launch:
        raise typer.Exit(EXIT_PREVENTED)


@dataclass(frozen=True)
class Problem:
    """A problem with its values, and the remedy. `prevents_launch`: a launch would fail."""

    what: str
    remedy: str
    prevents_launch: bool = True


@dataclass(frozen=True)
class NodeStatistics:
    """What this node has. None: no limit, or it cannot be read.

    `gpu_free_bytes`: one number for each GPU that torch can use.
    """

    available_bytes: int | None
    shared_free_bytes: int | None
    locked_limit_bytes: int | None
    gpu_free_bytes: tuple[int, ...] = ()

    @classmethod
    def of_this_node(cls) -> NodeStatistics:
        """Read them; changes nothing."""
        import torch

        from kvcache.worker.host_memory.shared_memory import available_memory_bytes

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        has_shared = SHARED_MEMORY.is_dir()
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(
            available_memory_bytes(),
            shutil.disk_usage(SHARED_MEMORY).free if has_shared else None,
            None if soft == resource.RLIM_INFINITY else soft,
            tuple(int(torch.cuda.mem_get_info(gpu)[0]) for gpu in range(num_gpus)),
        )


@dataclass(frozen=True)
class DirectoryStatistics:
    """The directory of the file tier. `sync_bytes_per_s`: write and sync to disk; None if nothing
    can be written."""

    path: Path
    free_bytes: int | None = None
    sync_bytes_per_s: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class RayStatistics:
    """The Ray cluster of this machine, as a command would find it. `problem` says why none can be
    used, `remedy` what helps, `is_wanted` that a launch needs it; `clusters` are the kvcache
    clusters that run there."""

    version: str
    is_running: bool = False
    num_nodes: int = 0
    clusters: tuple[str, ...] = ()
    problem: str = ""
    is_wanted: bool = True
    remedy: str = (
        "run the same versions of Python and Ray everywhere, or `ray stop` and start again"
    )


@dataclass(frozen=True)
class Examination:
    """All results. `page_bytes` are those of the plan, empty without a configuration."""

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


def examine(config: ClusterConfig | None) -> Examination:
    """Examine and measure this machine; takes a few seconds."""
    from kvcache.base.clock import SystemClock
    from kvcache.config.sections import Location
    from kvcache.planner import plan_cluster
    from kvcache.worker.copies.measurement import measure_cpu

    node, ray, open_files = NodeStatistics.of_this_node(), look_at_ray(), open_files_limit()
    problems = [*node_problems(node), *ray_problems(ray), *limit_problems(open_files)]
    page_bytes: tuple[int, ...] = ()
    directory: DirectoryStatistics | None = None
    if config is not None:
        problems += (*device_problems(config, node), *port_problems(config))
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
    """Measure the first GPU; append what fails to `problems`."""
    import torch

    from kvcache.worker.copies.measurement import find_kernel, measure_cuda

    device = torch.device("cuda", 0)
    found = find_kernel(device)
    if found.kernel is None:
        what = f"small pages are copied without a kernel: {found.why_not}"
        problems.append(Problem(what, "or accept slower copies", prevents_launch=False))
    try:
        return [measure_cuda(device, found.kernel, page_bytes)]
    except RuntimeError as error:
        remedy = "check nvidia-smi, and end other processes on the GPU"
        problems.append(Problem(f"copies on {device} fail: {error}", remedy))
        return []


def _memories(config: ClusterConfig, node: NodeStatistics) -> list[int] | None:
    """Return the memory each rank would report; None if the configuration sets it.

    A guess that is good enough to plan pages. A launch asks the ranks themselves.
    """
    if config.cache.memory_per_rank is not None:
        return None
    free = min(node.gpu_free_bytes) if node.gpu_free_bytes else node.available_bytes
    return None if free is None else [free // 2] * config.parallel.num_ranks


def _pages(plan: Plan) -> tuple[int, ...]:
    """Return the bytes of one block in each region of any rank."""
    from kvcache.worker.kv_cache_pool import PoolLayout

    layouts = [PoolLayout.from_config(config) for config in plan.configs]
    return tuple(sorted({region.width_bytes for layout in layouts for region in layout.regions}))


def look_at_directory(location: Location, clock: Clock) -> DirectoryStatistics:
    """Write, sync and remove a file there. Never raises for a bad path.

    Makes no directory: if the location does not exist yet, its parent is examined.
    """
    import tempfile

    path = location.path
    while path != location.root and not path.exists():
        path = path.parent
    if not path.is_dir():
        return DirectoryStatistics(path, problem="is not a directory")
    try:
        free_bytes = shutil.disk_usage(path).free
        with tempfile.TemporaryFile(dir=path) as file:
            start = clock.now()
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            taken = clock.now() - start
    except OSError as error:
        return DirectoryStatistics(path, problem=f"cannot be written ({error.strerror})")
    return DirectoryStatistics(path, free_bytes, SYNC_BYTES / taken if taken > 0 else float("inf"))


def node_problems(node: NodeStatistics) -> Iterator[Problem]:
    """Yield the problems of a node that affect every configuration."""
    free = node.shared_free_bytes
    if free is not None and free < MIN_SHARED_BYTES:
        yield Problem(
            f"{SHARED_MEMORY} has {bytes_text(free)} free, less than {bytes_text(MIN_SHARED_BYTES)}"
            ": Ray's objects go to a disk",
            f"free some of {SHARED_MEMORY}, or start the container with a larger one",
            prevents_launch=False,
        )


def device_problems(config: ClusterConfig, node: NodeStatistics) -> Iterator[Problem]:
    """Yield problems with the GPUs that a configuration needs; none on CPU."""
    import torch

    workers, parallel = config.workers, config.parallel
    wanted = parallel.tensor_parallel_size * workers.num_gpus_per_rank
    if workers.device != "cuda":
        return
    if not node.gpu_free_bytes:
        yield Problem(
            "workers.device is cuda, and torch can use no GPU here "
            f"(torch {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'})",
            "set workers.device to cpu, or install the driver and a CUDA build of torch on a "
            "machine with a GPU",
        )
    elif wanted > len(node.gpu_free_bytes):
        yield Problem(
            f"the {parallel.tensor_parallel_size} ranks of a pipeline stage share a node and need "
            f"{wanted:g} GPUs, this node has {len(node.gpu_free_bytes)}",
            "lower parallel.tensor_parallel_size or workers.num_gpus_per_rank, or launch on nodes "
            "that have as many",
        )


def memory_problems(config: ClusterConfig, plan: Plan, node: NodeStatistics) -> Iterator[Problem]:
    """Yield what exceeds memory: pools on GPUs, pools and host slots on the node."""
    width = config.parallel.tensor_parallel_size
    pool_bytes = max(rank.total_size_bytes for rank in plan.configs)
    host_bytes = config.offload.host_memory_per_rank or 0
    on_node = width * host_bytes
    if config.workers.device == "cpu":
        on_node += width * pool_bytes
    elif node.gpu_free_bytes and pool_bytes > max(node.gpu_free_bytes):
        yield Problem(
            f"a rank's blocks take {bytes_text(pool_bytes)}, the GPU with the most room has "
            f"{bytes_text(max(node.gpu_free_bytes))} free",
            "lower cache.memory_per_rank, or end other processes on the GPU",
        )
    if node.available_bytes is not None and on_node > node.available_bytes:
        yield Problem(
            f"the {width} ranks of a pipeline stage take {bytes_text(on_node)} of this "
            f"node's memory, {bytes_text(node.available_bytes)} are available",
            "lower cache.memory_per_rank or offload.host_memory_per_rank, or raise the limit "
            "of the container",
        )
    limit = node.locked_limit_bytes
    if config.workers.device == "cuda" and limit is not None and host_bytes > limit:
        yield Problem(
            f"host memory of {bytes_text(host_bytes)} a rank is registered with CUDA, the "
            f"limit of locked memory is {bytes_text(limit)}: some systems refuse that",
            "raise it (ulimit -l unlimited)",
            prevents_launch=False,
        )


def directory_problems(config: ClusterConfig, directory: DirectoryStatistics) -> Iterator[Problem]:
    """Yield problems with the directory of the file tier."""
    disk, width = config.offload.disk, config.parallel.tensor_parallel_size
    free = directory.free_bytes
    if disk is not None and directory.problem:
        yield Problem(
            f"offload.disk.directory {directory.path} {directory.problem}",
            "create or mount it, and let the workers' user write there",
        )
    elif disk is not None and free is not None and free < disk.capacity_per_rank * width:
        yield Problem(
            f"the files of the {width} ranks of a pipeline stage may take "
            f"{bytes_text(disk.capacity_per_rank * width)}, {bytes_text(free)} are free in "
            f"{directory.path}",
            "lower offload.disk.capacity_per_rank, or free some; files that exist already "
            "count twice here",
            prevents_launch=False,
        )


def look_at_ray() -> RayStatistics:
    """Join this machine's Ray cluster, if any, read its facts, and leave. Never raises."""
    try:
        import ray

    except ImportError as error:
        return RayStatistics("not installed", problem=f"Ray cannot be imported: {error}")
    refusal = None if ray.is_initialized() else find_refusal()
    if refusal is not None:
        own = "" if refusal.is_named else "; `kvcache launch` leaves it alone and starts its own"
        found = RayStatistics(ray.__version__, problem=refusal.what, remedy=refusal.remedy + own)
        return replace(found, is_wanted=refusal.is_named)
    try:
        with ray_session(may_start=False):
            list_nodes: Any = ray.nodes
            num_nodes = sum(bool(node["Alive"]) for node in list_nodes())
            return RayStatistics(ray.__version__, True, num_nodes, tuple(running_clusters()))
    except NotRunningError:
        return RayStatistics(ray.__version__)
    except (KVCacheError, RuntimeError, OSError, ValueError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return RayStatistics(ray.__version__, problem=first[0])


def ray_problems(found: RayStatistics) -> Iterator[Problem]:
    """Yield problems with Ray. No running Ray is not a problem: `kvcache launch` starts one."""
    if found.problem:
        what = f"the Ray cluster of this machine cannot be joined: {found.problem}"
        yield Problem(what, found.remedy, prevents_launch=found.is_wanted)


def open_files_limit() -> int | None:
    """Return the limit of open files of a process, None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def limit_problems(limit: int | None) -> Iterator[Problem]:
    """Yield problems with the limit of open files."""
    if limit is not None and limit < MIN_OPEN_FILES:
        yield Problem(
            f"a process may open {limit:,} files, less than {MIN_OPEN_FILES:,}: every connection "
            "is one",
            "raise it (ulimit -n 65536)",
            prevents_launch=False,
        )


def port_problems(config: ClusterConfig) -> Iterator[Problem]:
    """Yield the event ports that cannot be bound on this node."""
    from kvcache.config.events import shifted

    for replica in range(config.parallel.data_parallel_size if config.events.enabled else 0):
        for key in ("endpoint", "replay_endpoint"):
            place = shifted(getattr(config.events, key), replica)
            if why_not := _why_not_bound(place):
                yield Problem(
                    f"events.{key} {place} cannot be bound: {why_not}",
                    "end its user (a cluster? `kvcache stop`), or choose another "
                    "port; 0 lets the system choose",
                )


def _why_not_bound(place: str) -> str:
    """Return why a TCP address cannot be bound; empty if it can, or if it is no TCP address."""
    match = _TCP.fullmatch(place)
    if match is None or match["port"] == "0":
        return ""
    host = match["host"].strip("[]")
    host = "" if host == "*" else host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(match["port"])))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _print(found: Examination) -> None:
    print_facts("machine", found.machine)
    print_facts("memory", _memory_facts(found))
    print_facts("Ray", _ray_facts(found))
    for measurement in found.measurements:
        title = f"copies on {measurement.device}, GB/s, by the size of a page"
        print_table(title, _copies(measurement, found.page_bytes))
        print_note(
            "*: how workers copy scattered pages of this size; plain: one piece of memory; share: "
            "* of plain"
        )
        for note in (*_choices(measurement), *measurement.notes):
            print_note(note)
    for problem in found.problems:
        mark = "problem" if problem.prevents_launch else "warning"
        style = "red" if problem.prevents_launch else "yellow"
        line = f"{mark}: {problem.what}: {problem.remedy}"
        print_note(line, style)
    if not found.problems:
        print_note("nothing is wrong")


def _machine(node: NodeStatistics) -> dict[str, str]:
    import platform

    import torch

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
    from importlib.metadata import PackageNotFoundError, version

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
    """One line per direction and page size; a star marks the chosen method."""
    from kvcache.worker.copies.measurement import PLAIN

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
    """Describe the chosen methods."""
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
