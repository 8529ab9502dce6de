"""What a rank tells its coordinator: how jobs ended, and what its blocks hold.

`ReportQueue` repeats reports of jobs until the coordinator acknowledges them. `LabelReporter` sends
the labels of blocks, host slots and files to a new coordinator, in small pieces. It changes
nothing, so a piece that is requested twice is the same. The worker locks around both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvcache.offload.specs import DEVICE_MEDIUM, FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Label
from kvcache.protocol.delivery import CommandReceiver
from kvcache.protocol.label_agreement import NO_LABELS
from kvcache.protocol.labels import LABEL_VERSION, LabelSet
from kvcache.protocol.messages import ClientStep, Finished, JobReport, LabelReport
from kvcache.protocol.wire import prose
from kvcache.worker.execution import CommandExecutor
from kvcache.worker.files.file_pool import FilePool
from kvcache.worker.files.format import FileHead, labels_of_heads
from kvcache.worker.files.store import NUM_DIRECTORIES, ScannedDirectory
from kvcache.worker.host_memory.labels import SealedLabels
from kvcache.worker.settings import WorkerSettings

MAX_REPORTS_IN_MESSAGE = 512
"""Reports per message; more go into further messages, so that no message grows with a backlog."""


@dataclass
class _Report:
    report: JobReport
    sent_s: float | None = None


class ReportQueue:
    """Unacknowledged reports of the present epoch, in the order in which the jobs ended."""

    def __init__(self, receiver: CommandReceiver) -> None:
        """Send as `receiver`'s rank, process, coordinator and epoch."""
        self._receiver = receiver
        self._reports: dict[int, _Report] = {}
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: JobReport) -> None:
        """Keep `report`; the next `take_due` returns it."""
        self.num_failed += not report.ok
        if report.detail:
            report = replace(report, detail=prose(report.detail))
        self._reports[report.job_id] = _Report(report)

    def leave_details_out(self) -> None:
        """Shorten the reports to how the jobs ended."""
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
        """Drop all reports: they belong to another epoch."""
        self._reports.clear()


HEAD_BYTES = 256
"""Approximate bytes of a file's label in a report."""

NOTHING = SealedLabels(NO_LABELS, b"")


def _key_bytes(labels: Label) -> int:
    """Return the bytes that namespaces and extra keys add to a report."""
    names = sum(map(len, labels.namespace_names))
    return names + sum(map(len, labels.extra_keys.values()))


class LabelReporter:
    """Reports the labels of one worker, which locks around it."""

    def __init__(
        self, settings: WorkerSettings, receiver: CommandReceiver, executor: CommandExecutor
    ) -> None:
        self._settings = settings
        self._receiver = receiver
        self._executor = executor
        self._directories: dict[int, ScannedDirectory] = {}
        self._are_files_read = False
        self._are_labels_left_out = False

    def collect(self, first_block: int = 0, end_block: int | None = None) -> LabelSet:
        """Return the labels of blocks `[first_block, end_block)` as of the last applied message."""
        return self._executor.labels.collect(
            self._settings.rank,
            self._receiver.epoch,
            self._receiver.applied_seq,
            self._settings.layout_fingerprint,
            first_block=first_block,
            end_block=end_block,
        )

    def report(self, first_block: int, medium: str = DEVICE_MEDIUM) -> LabelReport:
        """Report labels from `first_block` on, as many as fit into one message.

        In host memory blocks are slots, in files directories. Directories are read in the
        background, and only those read so far are reported. A missing tier reports nothing.
        """
        host, files = self._executor.tiers.host, self._executor.tiers.files
        if medium == DEVICE_MEDIUM:
            table = self._executor.labels
            return self._report_rows(
                medium, first_block, table.num_blocks, table.label_bytes, self._blocks
            )
        if medium == HOST_MEDIUM and host is not None:
            labels = host.labels
            return self._report_rows(
                medium, first_block, host.num_slots, labels.label_bytes, labels.sealed
            )
        if medium == FILE_MEDIUM and files is not None:
            return self._report_files(first_block, files)
        return self._piece(medium, 0, 0, 0, NOTHING)

    def leave_labels_out(self) -> None:
        """Report no labels until another coordinator asks, so that it keeps no block of this
        rank."""
        self._are_labels_left_out = True

    def forget_files(self) -> None:
        """Forget what was read, because another coordinator asks: files are read again then."""
        self._directories.clear()
        self._are_files_read = self._are_labels_left_out = False

    def _blocks(self, first_block: int, end_block: int) -> SealedLabels:
        found = self.collect(first_block, end_block)
        return SealedLabels(found.labels, found.checksums)

    def _report_rows(
        self,
        medium: str,
        first: int,
        num_rows: int,
        label_bytes: int,
        collect: Callable[[int, int], SealedLabels],
    ) -> LabelReport:
        """Report rows from `first` on, as many as fit into one message."""
        first = min(max(0, first), num_rows)
        end = min(first + max(1, self._settings.max_report_bytes // label_bytes), num_rows)
        found, most = collect(first, end), 2 * self._settings.max_report_bytes
        while end - first > 1 and (_key_bytes(found.labels) + (end - first) * label_bytes > most):
            end = first + (end - first) // 2
            found = collect(first, end)
        return self._piece(medium, first, end, num_rows, found)

    def _report_files(self, first: int, files: FilePool) -> LabelReport:
        """Report the directories from `first` on that have been read, as many as fit into one
        message.

        Each coordinator's first question starts the reading."""
        first = min(max(0, first), NUM_DIRECTORIES)
        if not self._are_files_read:
            self._are_files_read = True
            files.scan()
        for scanned in files.take_scanned():
            self._directories[scanned.prefix] = scanned
        for prefix in [prefix for prefix in self._directories if prefix < first]:
            del self._directories[prefix]  # its content is not requested
        heads: list[FileHead] = []
        end, most = first, max(1, self._settings.max_report_bytes // HEAD_BYTES)
        while end in self._directories and (end == first or len(heads) < most):
            heads += self._directories[end].heads
            end += 1
        checksums = np.array([head.checksum for head in heads], dtype="<i8").tobytes()
        found = SealedLabels(labels_of_heads(heads), checksums)
        return self._piece(FILE_MEDIUM, first, end, NUM_DIRECTORIES, found)

    def _piece(
        self, medium: str, first: int, end: int, total: int, found: SealedLabels
    ) -> LabelReport:
        """Return one message. Whose steps were applied is in the first one about the device."""
        if self._are_labels_left_out:
            found = NOTHING
        is_first = first == 0 and medium == DEVICE_MEDIUM
        steps = self._executor.gate.client_steps if is_first else {}
        return LabelReport(
            self._receiver.nonce,
            self._settings.incarnation,
            self._settings.rank,
            self._receiver.epoch,
            first,
            end,
            total,
            self._executor.model_epoch,
            LABEL_VERSION,
            self._settings.layout_fingerprint,
            self._settings.digest_bytes,
            found.labels,
            found.checksums,
            tuple(ClientStep(client_id, step) for client_id, step in steps.items()),
            medium,
            found.generations,
        )
