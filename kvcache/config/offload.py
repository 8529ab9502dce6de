"""Tiers below the device: host memory and files.

One section of `ClusterConfig`. Refuses a disk without host memory, because blocks from files pass
through it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvcache.base.errors import ConfigurationError
from kvcache.config.sections import (
    Bytes,
    Count,
    EvictionPolicyName,
    FewThousand,
    Seconds,
    Section,
    Share,
    require_directory,
)


class DiskConfig(Section):
    """Files of offloaded blocks, which outlive the cluster.

    `directory`: on each rank's node; every cluster, plan and rank has a subdirectory. It must
    exist, unless it is `~/...`, in the home directory. Choose one that no other program cleans, as
    many systems clean `/tmp`. `capacity_per_rank`: bytes of blocks; the head of each file (some 250
    bytes and its tokens) is not counted. `write`: files are written for blocks that leave host
    memory (`on_evict`), or for all blocks that are stored there (`on_store`). `sync`: what must
    reach the disk before a file counts as written.
    """

    directory: Annotated[str, Field(min_length=1)]
    capacity_per_rank: Bytes
    policy: EvictionPolicyName = "lru"
    write: Literal["on_evict", "on_store"] = "on_evict"
    sync: Literal["never", "file", "directory"] = "never"
    num_threads: Annotated[int, Field(ge=1, le=64)] = 4

    @model_validator(mode="after")
    def _is_absolute(self) -> DiskConfig:
        require_directory(self.directory, "workers")
        return self


class OffloadConfig(Section):
    """Blocks that are kept outside the device pool.

    `host_memory_per_rank` None: none. A block is stored once its content was seen `store_after`
    times. A host slot holds `blocks_per_slot` device blocks. A request waits for a load of at least
    `min_load_tokens`, at most `wait_s`; the loaded blocks are kept for it for `hold_s`. Loads and
    stores that take longer than `job_s` are given up, transfers of files after four times as long.
    With `keeps_memory`, a process of each node holds the memory, so that it survives its worker.
    `verify`: `always` computes a checksum of each stored block and compares it at each load,
    `sample` for one block in 16, `never` for none. `copy_priority` is that of the copying threads:
    `low` yields to steps and other programs; `idle` uses only idle processors, so steps are
    disturbed least, but on a busy node a load may take seconds; `normal` yields to nothing. On CPU,
    `copy_threads` of a worker together copy a store or load of 2 MiB or more.

    `swap` decides about the unsealed tokens of a request that is preempted by swap: `always` moves
    them to host memory and back, `never` computes them again, `auto` takes the faster way, by
    `prefill_tokens_per_s` and `swap_bandwidth_per_rank` (bytes per second). With EAGLE nothing is
    swapped.
    """

    host_memory_per_rank: Bytes | None = None
    policy: EvictionPolicyName = "lru"
    store_after: FewThousand = 1
    blocks_per_slot: FewThousand = 1
    spare_share: Share = 1 / 16
    min_load_tokens: Count = 1
    wait_s: Seconds = 30.0
    hold_s: Seconds = 5.0
    job_s: Seconds = 30.0
    keeps_memory: bool = True
    verify: Literal["always", "sample", "never"] = "always"
    copy_priority: Literal["normal", "low", "idle"] = "low"
    copy_threads: Annotated[int, Field(ge=1, le=64)] = 1
    swap: Literal["never", "auto", "always"] = "auto"
    prefill_tokens_per_s: Count = 10_000
    swap_bandwidth_per_rank: Bytes = 10_000_000_000
    disk: DiskConfig | None = None

    @model_validator(mode="after")
    def _disk_needs_memory(self) -> OffloadConfig:
        if self.disk is not None and self.host_memory_per_rank is None:
            raise ConfigurationError(
                "disk is set, but host_memory_per_rank is not: what comes from files passes "
                "through host memory, set it, for instance to 256MiB"
            )
        return self
