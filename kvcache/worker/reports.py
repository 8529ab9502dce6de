"""Reports of jobs that have ended, repeated until the coordinator says that they arrived.

Stands between jobs and messages. Knows no sockets and no clock of its own. Refuses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcache.protocol.delivery import CommandReceiver
from kvcache.protocol.messages import Finished, JobReport
from kvcache.protocol.wire import prose

MAX_REPORTS_IN_MESSAGE = 512
"""More go into several messages, so that one never grows with a backlog."""


@dataclass
class _Report:
    report: JobReport
    sent_s: float | None = None


class ReportQueue:
    """Unacknowledged reports of the present epoch, in the order in which the jobs ended."""

    def __init__(self, receiver: CommandReceiver) -> None:
        """Speak in the name of `receiver`'s rank, process, coordinator and epoch."""
        self._receiver = receiver
        self._reports: dict[int, _Report] = {}
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: JobReport) -> None:
        """Keep `report`; it leaves with the next `take_due`."""
        self.num_failed += not report.ok
        if report.detail:
            report = replace(report, detail=prose(report.detail))
        self._reports[report.job_id] = _Report(report)

    def leave_details_out(self) -> None:
        """Say of these jobs no more than how they ended."""
        for entry in self._reports.values():
            entry.report = replace(entry.report, detail="")

    def acknowledge(self, job_ids: tuple[int, ...]) -> None:
        """Forget these reports; unknown ids are acknowledgements of repeats."""
        for job_id in job_ids:
            self._reports.pop(job_id, None)

    def take_due(self, now_s: float, repeat_after_s: float | None = None) -> list[Finished]:
        """Return messages with reports never sent, and those sent `repeat_after_s` ago or earlier
        (None: no repeats). They count as sent at `now_s`."""
        if not self._reports:
            return []
        due = [
            entry
            for entry in self._reports.values()
            if entry.sent_s is None
            or (repeat_after_s is not None and now_s - entry.sent_s >= repeat_after_s)
        ]
        for entry in due:
            entry.sent_s = now_s
        receiver = self._receiver
        return [
            Finished(
                receiver.nonce,
                receiver.incarnation,
                receiver.rank,
                receiver.epoch,
                tuple(entry.report for entry in due[i : i + MAX_REPORTS_IN_MESSAGE]),
            )
            for i in range(0, len(due), MAX_REPORTS_IN_MESSAGE)
        ]

    def clear(self) -> None:
        """Forget everything: another epoch's reports mean nothing."""
        self._reports.clear()
