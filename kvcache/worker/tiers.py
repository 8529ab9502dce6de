"""The tiers below a rank's device memory, opened from its settings.

Files are read into host slots and written from them, so a rank without slots has no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.worker.copies.checksums import ChecksumRule
from kvcache.worker.files.file_pool import FilePool
from kvcache.worker.files.tier import FileTier
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.segment import SegmentShape, open_segment
from kvcache.worker.kv_cache_pool import PoolLayout
from kvcache.worker.settings import WorkerSettings

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long to wait for files when a worker ends."""


@dataclass(frozen=True, eq=False)
class Tiers:
    """The tiers of a rank, None if it has none. `files_problem` says why configured files cannot be
    used."""

    host: HostPool | None = None
    files: FilePool | None = None
    file_tier: FileTier | None = None
    files_problem: str = ""

    @property
    def why_no_files(self) -> str:
        """The reply to a job for files if there are none."""
        return f"this rank has no file tier: {self.files_problem or 'configure one'}"

    def close(self) -> None:
        """End the threads, and release memory and directory. No copy may run any more."""
        has_ended = self.files is None or self.files.close(CLOSE_TIMEOUT_S)
        if self.file_tier is not None and has_ended:
            self.file_tier.close()
        if self.host is not None:
            self.host.close()


def make_tiers(
    settings: WorkerSettings,
    layout: PoolLayout,
    device: torch.device,
    rule: ChecksumRule,
    on_news: Callable[[], None],
) -> Tiers:
    """Open the host segment and the directory of files, as configured.

    `rule` is for reads of files; `on_news` is called when a file job has ended.

    Raises ConfigurationError, NotEnoughMemoryError.
    """
    num_slots = settings.kv_cache_config.host_blocks
    if not num_slots:
        if settings.file_tier is not None:
            raise ConfigurationError(
                f"rank {settings.rank} has a file tier and no host slots to read files into: plan "
                "host_blocks above 0"
            )
        return Tiers()
    shape = SegmentShape(
        layout_fingerprint=settings.layout_fingerprint,
        rank=settings.rank,
        num_slots=num_slots,
        widths=tuple(region.width_bytes for region in layout.regions),
        digest_bytes=settings.digest_bytes,
        max_block_tokens=settings.max_block_tokens,
    )
    host = HostPool(open_segment(shape, settings.memory_service), is_pinned=device.type == "cuda")
    logger.info("rank %d has %d host slots: %s", settings.rank, num_slots, host.segment.origin)
    if settings.file_tier is None:
        return Tiers(host)
    try:
        file_tier = FileTier(settings.file_tier, shape, settings.incarnation, rule)
    except ConfigurationError as error:
        if not settings.file_tier.must_work:
            logger.error("rank %d works without files: %s", settings.rank, error)
            return Tiers(host, files_problem=str(error))
        host.close()
        raise
    logger.info("rank %d has its files in %s", settings.rank, file_tier.directory)
    files = FilePool(
        file_tier.store,
        host.segment.slot_views,
        settings.file_tier.access.make_lanes(settings.file_tier.threads),
        max_queued_blocks=settings.file_tier.max_queued_blocks,
        on_finished=on_news,
    )
    return Tiers(host, files, file_tier)
