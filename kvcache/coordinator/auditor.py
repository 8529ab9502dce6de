"""Audits while the cluster runs: do the labels of every rank match the coordinator's state?

Called by the epoch state. An audit is the last command of a message, so that every rank compares
its labels at the very point at which the coordinator read its own state; it is reported like any
other job. Blocks that differ are logged with their history and dropped everywhere, with all cached
blocks behind them, and service continues. The auditor does not guess which side is right.

    sealed contents ──Audit──▶ every rank ──JobReport──▶ wrong blocks ──▶ evicted, Unlabel
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.base.logs import get_logger
from kvcache.coordinator.job_table import Job, JobTable
from kvcache.coordinator.settings import AuditCounts, AuditSettings
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Audit, Command

logger = get_logger(__name__)

AUDITED_BLOCKS = 4096
"""Blocks that one audit of the mode `sample` compares; the next one continues after them."""


@dataclass
class Auditor:
    """The audits of one epoch. In mode `sample`, one at a time is in flight."""

    settings: AuditSettings
    manager: KVCacheManager
    jobs: JobTable
    now_s: float
    counts: AuditCounts = field(default_factory=AuditCounts)
    wrong_blocks: set[int] = field(default_factory=set)
    _under_way: dict[int, range] = field(default_factory=dict)
    _next_block: int = 0

    def is_due(self, now_s: float) -> bool:
        """Whether a message should be sent for an audit if there is no other one."""
        is_time = now_s - self.now_s >= self.settings.interval_s
        return self.settings.mode == "sample" and is_time and not self._under_way

    def audit(self, now_s: float) -> tuple[Command, ...]:
        """Return the audit for a message whose other commands have been taken, so that they cover
        all that the coordinator knows. Empty if no audit is due.

        Raises InvariantError if the coordinator's own state is inconsistent.
        """
        if self.settings.mode == "off" or (
            self.settings.mode == "sample" and not self.is_due(now_s)
        ):
            return ()
        self.now_s = now_s
        num_blocks = self.manager.statistics().core.num_blocks
        first, end = 0, num_blocks
        if self.settings.mode == "sample":
            first = self._next_block
            end = min(end, first + AUDITED_BLOCKS)
            self._next_block = end if end < num_blocks else 0
        else:
            self.manager.check()
        contents = self.manager.sealed_contents().between(first, end)
        job_id = self.jobs.open()
        self._under_way[job_id] = range(first, end)
        return (Audit(job_id, first, end, contents.block_ids, contents.groups, contents.digests),)

    def on_ended(self, job: Job) -> bool:
        """Take the reports of all ranks; return whether the job was an audit.

        `wrong_blocks` then has the blocks that differ, which the caller drops.
        """
        audited = self._under_way.pop(job.job_id, None)
        if audited is None:
            return False
        self.counts.num_audits += 1
        wrong = [block_id for block_id in sorted(job.block_ids) if block_id and block_id in audited]
        self.wrong_blocks.update(wrong)
        if wrong:
            finding = "; ".join(
                f"rank {failure.rank}: {failure.detail}" for failure in job.failures
            )
            self.counts.num_wrong_blocks += len(wrong)
            self.counts.last_finding = finding
            logger.error(
                "an audit found %d blocks that ranks label differently: they are withdrawn\n  %s",
                len(wrong),
                finding,
            )
        return True
