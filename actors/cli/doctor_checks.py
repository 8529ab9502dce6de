"""What stands in the way of a cluster on this machine: found before anything is started.

Behind doctor.py, which shows it. Each finding says what, the values and the remedy, and whether a
launch would fail. Looks at this node only: ranks of one pipeline stage share a node, other stages
may be elsewhere. Changes nothing but a file in the directory of the file tier, which it removes.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.cli.tables import bytes_text
from kvcache.base.clock import Clock
from kvcache.config import ClusterConfig
from kvcache.config.sections import Location
from kvcache.planner import Plan
from kvcache.worker.host_memory.shared_memory import available_memory_bytes

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 128 * 2**20
SYNC_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Problem:
    """`what` is wrong, with values, and the `remedy`. `prevents_launch`: a launch would fail."""

    what: str
    remedy: str
    prevents_launch: bool = True


@dataclass(frozen=True)
class NodeStatistics:
    """What this node has. None: no limit, or none that can be read.

    `gpu_free_bytes`: one figure for each GPU that torch can use.
    """

    available_bytes: int | None
    shared_free_bytes: int | None
    locked_limit_bytes: int | None
    gpu_free_bytes: tuple[int, ...] = ()

    @classmethod
    def of_this_node(cls) -> NodeStatistics:
        """Look; changes nothing."""
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
    """The directory of the file tier. `sync_bytes_per_s`: written and brought to the disk; None
    where nothing can be written."""

    path: Path
    free_bytes: int | None = None
    sync_bytes_per_s: float | None = None
    problem: str = ""


def look_at_directory(location: Location, clock: Clock) -> DirectoryStatistics:
    """Write a file there, bring it to the disk, remove it. Never raises for a bad path.

    What would be made below the root is not: the statistics are of the directory that holds it.
    """
    path = location.path
    while path != location.root and not path.exists():
        path = path.parent
    if not path.is_dir():
        return DirectoryStatistics(path, problem="is no directory")
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


def node_problems(node: NodeStatistics) -> list[Problem]:
    """Return what is wrong with a node whatever runs there."""
    free = node.shared_free_bytes
    if free is None or free >= MIN_SHARED_BYTES:
        return []
    return [
        Problem(
            f"{SHARED_MEMORY} has {bytes_text(free)} free, less than {bytes_text(MIN_SHARED_BYTES)}"
            ": Ray's objects go to a disk",
            f"free some of {SHARED_MEMORY}, or start the container with a larger one",
            prevents_launch=False,
        )
    ]


def device_problems(config: ClusterConfig, node: NodeStatistics) -> list[Problem]:
    """Return what is wrong with the GPUs that a configuration wants; none on CPU."""
    workers, parallel = config.workers, config.parallel
    if workers.device != "cuda":
        return []
    if not node.gpu_free_bytes:
        return [
            Problem(
                "workers.device is cuda, and torch can use no GPU here "
                f"(torch {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'})",
                "set workers.device to cpu, or install the driver and a CUDA build of torch on a "
                "machine with a GPU",
            )
        ]
    wanted = parallel.tensor_parallel_size * workers.num_gpus_per_rank
    if wanted <= len(node.gpu_free_bytes):
        return []
    return [
        Problem(
            f"the {parallel.tensor_parallel_size} ranks of a pipeline stage share a node and want "
            f"{wanted:g} GPUs, {len(node.gpu_free_bytes)} are here",
            "lower parallel.tensor_parallel_size or workers.num_gpus_per_rank, or launch where a "
            "node has as many",
        )
    ]


def memory_problems(config: ClusterConfig, plan: Plan, node: NodeStatistics) -> list[Problem]:
    """Return what does not fit: pools on GPUs, pools and host slots in memory."""
    width = config.parallel.tensor_parallel_size
    pool_bytes = max(rank.total_size_bytes for rank in plan.configs)
    host_bytes = config.offload.host_memory_per_rank or 0
    problems: list[Problem] = []
    on_node = host_bytes
    if config.workers.device == "cpu":
        on_node += pool_bytes
    elif node.gpu_free_bytes and pool_bytes > max(node.gpu_free_bytes):
        problems.append(
            Problem(
                f"a rank's blocks take {bytes_text(pool_bytes)}, the GPU with most room has "
                f"{bytes_text(max(node.gpu_free_bytes))} free",
                "lower cache.memory_per_rank, or end what else runs on the GPU",
            )
        )
    if node.available_bytes is not None and width * on_node > node.available_bytes:
        problems.append(
            Problem(
                f"the {width} ranks of a pipeline stage take {bytes_text(width * on_node)} of this "
                f"node's memory, {bytes_text(node.available_bytes)} are available",
                "lower cache.memory_per_rank or offload.host_memory_per_rank, or raise the limit "
                "of the container",
            )
        )
    limit = node.locked_limit_bytes
    if config.workers.device == "cuda" and limit is not None and host_bytes > limit:
        problems.append(
            Problem(
                f"host memory of {bytes_text(host_bytes)} a rank is registered with CUDA, the "
                f"limit of locked memory is {bytes_text(limit)}: some systems refuse that",
                "raise it (ulimit -l unlimited)",
                prevents_launch=False,
            )
        )
    return problems


def directory_problems(config: ClusterConfig, directory: DirectoryStatistics) -> list[Problem]:
    """Return what is wrong with the directory of the file tier."""
    disk = config.offload.disk
    if disk is None:
        return []
    if directory.problem:
        return [
            Problem(
                f"offload.disk.directory {directory.path} {directory.problem}",
                "make or mount it, and let the workers' user write there",
            )
        ]
    wanted = disk.capacity_per_rank * config.parallel.tensor_parallel_size
    if directory.free_bytes is None or directory.free_bytes >= wanted:
        return []
    return [
        Problem(
            f"the files of the {config.parallel.tensor_parallel_size} ranks of a pipeline stage "
            f"may take {bytes_text(wanted)}, {bytes_text(directory.free_bytes)} are free in "
            f"{directory.path}",
            "lower offload.disk.capacity_per_rank, or free some; files that are there already "
            "count twice here",
            prevents_launch=False,
        )
    ]
