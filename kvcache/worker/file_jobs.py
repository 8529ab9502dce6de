"""Spills and fetches: jobs between host slots and files, which end later.

Between the worker, which starts a job when its command is applied, and the threads that read and
write. Labels and holds are changed here, in the worker's own thread; the threads see memory and
heads of files only. What cannot be done is reported, not raised: the command has been obeyed by
then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.errors import BacklogFullError, MalformedMessageError
from kvcache.offload.keys import label_keys
from kvcache.offload.specs import FILE_MEDIUM
from kvcache.protocol.commands import Fetch, Spill
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, JobReport
from kvcache.worker.checksums import combined_checksum
from kvcache.worker.file_format import FileHead, heads_of_labels, labels_of_heads
from kvcache.worker.file_pool import FilePool, FinishedFileJob
from kvcache.worker.host_labels import Generations, HostLabels
from kvcache.worker.slot_holds import SlotHolds

MAX_DETAILS = 3
"""How many blocks a report names with what went wrong."""


@dataclass(frozen=True, eq=False)
class _Running:
    """A job and its slots; `unknown` are others that it named, which have no label."""

    job: Spill | Fetch
    slots: Int32Array
    generations: Generations | None = None
    unknown: Int32Array = field(default_factory=lambda: EMPTY_INT32)


class FileJobs:
    """The jobs of one rank's file tier, in the order in which they are started."""

    def __init__(self, pool: FilePool, labels: HostLabels, holds: SlotHolds) -> None:
        """Move between the slots that `labels` and `holds` speak about and the files of `pool`."""
        self.pool = pool
        self._labels = labels
        self._holds = holds
        self._running: dict[int, _Running] = {}
        self._ended: list[JobReport] = []

    @property
    def num_running(self) -> int:
        """Jobs that have not been reported."""
        return len(self._running)

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have something to return."""
        return bool(self._ended) or self.pool.has_finished

    def start(self, job: Spill | Fetch) -> None:
        """Start a job, or note why it cannot be done; `poll` returns its report."""
        if job.medium != FILE_MEDIUM:
            problem = f"medium {job.medium!r} is not served here: only {FILE_MEDIUM!r} is"
        elif job.job_id in self._running:
            problem = f"job {job.job_id} runs already: give every job an id of its own"
        elif isinstance(job, Spill):
            problem = self._start_spill(job)
        else:
            problem = self._start_fetch(job)
        if problem:
            self._ended.append(JobReport(job.job_id, ok=False, detail=problem))

    def discard(self, keys: bytes) -> None:
        """Remove the files of packed keys, behind what was started for them before."""
        self.pool.discard(self._keys(keys))

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call. Never blocks."""
        for finished in self.pool.get_finished():
            running = self._running.pop(finished.job_id)
            to_write = isinstance(running.job, Fetch)
            self._holds.release(running.slots, to_write=to_write)
            if running.generations is not None:
                self._label(running.slots, running.generations, finished)
            self._ended.append(self._report(running, finished))
        ended, self._ended = self._ended, []
        return ended

    def forget_ended(self) -> None:
        """Report nothing of what has ended: its epoch is over. Nothing runs."""
        self._ended.clear()

    def close(self, timeout_s: float) -> bool:
        """End the threads when what was started is done; say whether that was so in time."""
        return self.pool.close(timeout_s)

    # --- starting

    def _start_spill(self, job: Spill) -> str:
        """Start it, or say why not."""
        slots = job.sources
        problem = self._holds.problem(slots, to_write=False)
        if problem:
            return problem
        # A label may have found no room: that is no reason to lose these.
        can_be = self._labels.are_readable(slots) & self._labels.are_labelled(slots)
        slots, unknown = slots[can_be], slots[~can_be]
        if len(unknown) and not len(slots):
            return _about_unknown(unknown)
        labels, every_key = self._labels.labels_of(slots), self._keys(job.keys)
        keys = [every_key[place] for place in np.flatnonzero(can_be).tolist()]
        try:
            held = label_keys(labels)
        except MalformedMessageError as error:
            return f"the content of host slots has no key: {error}"
        wrong = [i for i, key in enumerate(keys) if key != held[i]]
        if wrong:
            return f"host slot {int(slots[wrong[0]])} holds another block than its key says"
        identity = self.pool.store.identity
        heads = heads_of_labels(
            labels,
            b"".join(keys),
            self._labels.checksums(slots).tolist(),
            layout_fingerprint=identity.layout_fingerprint,
            rank=identity.rank,
            block_bytes=identity.block_bytes,
        )
        try:
            self.pool.submit_spill(job.job_id, slots.tolist(), heads)
        except BacklogFullError as error:
            return str(error)
        self._holds.hold(slots, to_write=False)
        self._running[job.job_id] = _Running(job, slots, unknown=unknown)
        return ""

    def _start_fetch(self, job: Fetch) -> str:
        """Start it, or say why not."""
        slots = job.destinations
        problem = self._holds.problem(slots, to_write=True)
        if problem:
            return problem
        generations = self._labels.begin(slots)
        try:
            self.pool.submit_fetch(job.job_id, self._keys(job.keys), slots.tolist())
        except BacklogFullError as error:
            self._labels.withdraw(slots)
            return str(error)
        self._holds.hold(slots, to_write=True)
        self._running[job.job_id] = _Running(job, slots, generations)
        return ""

    def _keys(self, packed: bytes) -> list[bytes]:
        size = self.pool.store.identity.key_bytes
        return [packed[i : i + size] for i in range(0, len(packed), size)]

    # --- ending

    def _label(
        self, slots: Int32Array, generations: Generations, finished: FinishedFileJob
    ) -> None:
        """Write down what fetched slots hold; what failed holds nothing."""
        is_awaited = self._labels.are_awaited(slots, generations).tolist()
        good: list[int] = []
        heads: list[FileHead] = []
        for place, head in enumerate(finished.heads):
            if head is not None and is_awaited[place]:
                good.append(place)
                heads.append(head)
        has_arrived = set(good)
        failed = [i for i, awaited in enumerate(is_awaited) if awaited and i not in has_arrived]
        self._labels.withdraw(slots[failed])
        arrived = slots[good]
        self._labels.describe(arrived, labels_of_heads(heads))
        checksums = np.array([head.checksum for head in heads], dtype=np.int64)
        self._labels.finish(arrived, generations[good], checksums)

    def _report(self, running: _Running, finished: FinishedFileJob) -> JobReport:
        unknown = running.unknown
        if finished.ok and not len(unknown):
            if isinstance(running.job, Spill):
                checksums = self._labels.checksums(running.slots)
            else:
                found = [head.checksum for head in finished.heads if head is not None]
                checksums = np.array(found, dtype=np.int64)
            checksum = combined_checksum(checksums)
            return JobReport(finished.job_id, True, checksum, finished.num_bytes)
        failures = finished.failures
        named = failures[:MAX_REPORTED_BLOCKS]
        failed = [int(running.slots[failure.place]) for failure in named] + unknown.tolist()
        details = [_about_unknown(unknown)] if len(unknown) else []
        details += [failure.detail for failure in failures[:MAX_DETAILS]]
        num_failed = len(failures) + len(unknown)
        return JobReport(
            finished.job_id,
            ok=False,
            num_bytes=finished.num_bytes,
            detail=f"{num_failed} of {len(running.slots) + len(unknown)} blocks failed: "
            + "; ".join(details),
            block_ids=tuple(failed[:MAX_REPORTED_BLOCKS]),
            lost_ids=tuple(int(running.slots[f.place]) for f in named if f.is_lost),
        )


def _about_unknown(slots: Int32Array) -> str:
    more = f" ({len(slots)} such slots)" if len(slots) > 1 else ""
    return f"host slot {int(slots[0])} holds nothing whose content is known{more}"
