"""The tiers below the device in a configuration: host memory, and behind it files.

One section of `ClusterConfig`. Refuses a disk without host memory: what comes from files passes
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

    `directory`: below which every cluster, plan and rank has one of its own, on each rank's node.
    It must exist, unless it is `~/...`, in the home directory. Choose one that no other program
    cleans: `/tmp` usually is.
    `capacity_per_rank`: of blocks; a file's head, some 250 bytes and its tokens, comes on top.
    `write`: files are written for what leaves host memory (`on_evict`), or for all that is stored
    there (`on_store`). `sync`: what has reached the disk before a file counts as written.
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
    """What is kept of blocks when the device pool is full.

    `host_memory_per_rank` None: nothing. A block is stored once its content was seen `store_after`
    times, in host blocks of `blocks_per_slot` device blocks. A request waits for what the tiers
    have where that is at least `min_load_tokens`, and not longer than `wait_s`; what was loaded
    stays for it for `hold_s`. Jobs that take longer than `job_s` are given up. With
    `keeps_memory`, a process of each node holds the memory, so that it survives its worker.
    `verify`: a checksum is taken of each block that is stored, and compared before it is loaded; or
    of one block in 16; or `never`, and then none is taken. `copy_priority`: who stores and loads
    goes behind steps and everything else on the node (`low`), gets only what processors have to
    spare (`idle`: steps are disturbed least, and on a node whose processors are all busy a load
    may take seconds), or is everybody's equal (`normal`). On CPU, `copy_threads` of a worker copy
    one store or load of 2 MiB or more together.

    `swap` says what becomes of the unsealed tokens of a request that is preempted by swap: they go
    to host memory and come back (`always`), are computed again (`never`), or (`auto`) whatever
    takes less time: computing them at `prefill_tokens_per_s`, or moving their blocks there and
    back at `swap_bandwidth_per_rank`, in bytes per second. With EAGLE nothing is swapped.
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
