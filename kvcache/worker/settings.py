"""The settings of a worker: one frozen record. All times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.base.errors import ConfigurationError
from kvcache.memory_service.client import MemoryServiceAddress
from kvcache.specs import KVCacheConfig, KVCacheSpec, require_count
from kvcache.worker.copies.checksums import VerifyMode
from kvcache.worker.copies.copy_pool import CopyPriority
from kvcache.worker.files.tier import FileTierSettings


@dataclass(frozen=True)
class WorkerSettings:
    """A worker process's identity, and the plan it obeys.

    `incarnation` is unique to the process. `fingerprint`: of the plan of all ranks.
    `layout_fingerprint`: defines the bytes that labels describe. `device`: a torch device name. A
    report of labels has at most `max_report_bytes`, unless a single label is longer. Without
    `memory_service`, host slots end with the process; without `file_tier` there are no files.
    `verify`: which blocks' checksums are compared before a load (`ChecksumRule`). `held_up_s`: how
    long transfers may delay a content-checked forward before it fails. `copy_priority`: of the
    threads of stores and loads; on CPU, `copy_threads` of them share one.
    """

    rank: int
    kv_cache_config: KVCacheConfig
    fingerprint: str
    layout_fingerprint: str
    incarnation: str
    max_num_seqs: int
    max_model_len: int
    device: str = "cpu"
    digest_bytes: int = 32
    is_content_checking: bool = False
    hello_interval_s: float = 0.2
    repeat_interval_s: float = 0.5
    heartbeat_interval_s: float = 1.0
    held_up_s: float = 30.0
    max_buffered: int = 256
    max_report_bytes: int = 2**20
    memory_service: MemoryServiceAddress | None = None
    file_tier: FileTierSettings | None = None
    verify: VerifyMode = "always"
    copy_priority: CopyPriority = "low"
    copy_threads: int = 1

    def __post_init__(self) -> None:
        require_count("rank", self.rank, at_least=0)
        for name in (
            "max_num_seqs",
            "max_model_len",
            "digest_bytes",
            "max_buffered",
            "max_report_bytes",
            "copy_threads",
        ):
            require_count(name, getattr(self, name))
        for name in ("hello_interval_s", "repeat_interval_s", "heartbeat_interval_s", "held_up_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: set it above 0")
        if not self.incarnation:
            raise ConfigurationError("incarnation is empty: give every process a name of its own")

    @property
    def specs(self) -> tuple[KVCacheSpec, ...]:
        """Spec of each KV cache group."""
        return tuple(group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups)

    @property
    def max_block_tokens(self) -> int:
        return max((spec.block_size for spec in self.specs), default=1)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Columns of each KV cache group's block tables."""
        return tuple(spec.max_table_blocks(self.max_model_len) for spec in self.specs)
