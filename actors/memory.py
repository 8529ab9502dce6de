"""How much memory a worker may plan with, when the configuration does not say.

Read on the node of the worker, at start-up, before anything is allocated. Refuses to guess: where
the figure cannot be read, the configuration has to state it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig

USABLE_SHARE = 0.8
"""Of what is free: the rest is for activations, staging and everybody else."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
MEMORY_INFO = Path("/proc/meminfo")


def free_memory_bytes(config: ClusterConfig) -> int:
    """Return the free bytes of this rank's device, or the configured amount if there is
    one. Raises ConfigurationError if nothing can be found out."""
    configured = config.cache.memory_per_rank
    if configured is not None:
        return configured
    if config.workers.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return _free_host_bytes()


def plannable_bytes(config: ClusterConfig, free_bytes: int, num_sharing: int) -> int:
    """Return the bytes that one of `num_sharing` ranks on the same device may plan with."""
    if config.cache.memory_per_rank is not None:
        return free_bytes
    return int(free_bytes * USABLE_SHARE) // max(1, num_sharing)


def _free_host_bytes() -> int:
    """Return what this machine and the control group around this process still give."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY_INFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"free memory cannot be read from {MEMORY_INFO} ({error!r}): set "
            "cache.memory_per_rank, for instance to 256MiB"
        ) from error
    try:
        limit, used = CGROUP_LIMIT.read_text().strip(), CGROUP_USED.read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))
