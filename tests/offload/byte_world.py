"""Simulates the workers of a hierarchy: bytes in host slots and files, by their keys.

A job writes nothing at first, garbage while it runs, and its content when it succeeds; it reads its
sources at a random moment before its end. So an operation that the hierarchy allows too early shows
up as wrong content.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvcache.base.arrays import Int32Array
from kvcache.offload import Discards, JobKind, OffloadKey, TransferJob

READING = (JobKind.LOAD, JobKind.SPILL)
GARBAGE = OffloadKey(b"garbage")


@dataclass(eq=False)
class RunningJob:
    """A job, its inputs so far, and the addresses that it writes."""

    job: TransferJob
    has_begun: bool = False
    has_read: dict[int, OffloadKey] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: addresses that failed, none if it succeeded."""

    job: TransferJob
    ok: bool
    failed: tuple[int, ...]


class ByteWorld:
    """Host memory, its seals, and files of one rank."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.host: dict[int, OffloadKey] = {}
        self.sealed: dict[int, OffloadKey] = {}
        self.files: dict[OffloadKey, OffloadKey] = {}
        self.running: dict[int, RunningJob] = {}

    def start(self, job: TransferJob) -> None:
        """Take a job: no other job may touch its destinations, or write its sources."""
        for other in self.running.values():
            assert not _written(other.job) & (_written(job) | _read(job))
            assert not _read(other.job) & _written(job)
            if job.kind in (JobKind.SPILL, JobKind.FETCH) and other.job.kind is JobKind.SPILL:
                assert not set(other.job.keys) & set(job.keys), "two jobs on one file"
            if job.kind is JobKind.SPILL and other.job.kind is JobKind.FETCH:
                assert not set(other.job.keys) & set(job.keys), "two jobs on one file"
        for address in _written(job):
            self.sealed.pop(address, None)
        self.running[job.job_id] = RunningJob(job)

    def proceed(self) -> None:
        """Let some job begin: it writes garbage, and reads its sources."""
        if not self.running:
            return
        running = self.rng.choice(list(self.running.values()))
        if running.has_begun:
            return
        running.has_begun = True
        for address in _written(running.job):
            self.host[address] = GARBAGE
        if running.job.kind is JobKind.SPILL:
            self.files.update(dict.fromkeys(running.job.keys, GARBAGE))
        if running.job.kind in READING:
            for address in running.job.addresses.tolist():
                running.has_read[address] = self.host[address]

    def end(self, job_id: int) -> Outcome:
        """End a job, successfully or not; check its inputs."""
        running = self.running.pop(job_id)
        job = running.job
        ok = self.rng.random() < 0.8
        addresses = job.addresses.tolist()
        failed = () if ok else tuple(self.rng.sample(addresses, self.rng.randrange(len(addresses))))
        all_failed = not ok and not failed
        for key, address in zip(job.keys, addresses, strict=True):
            is_good = address not in failed and not all_failed
            if job.kind is JobKind.STORE:
                self.host[address] = key if ok else GARBAGE
            elif job.kind is JobKind.FETCH:
                assert self.files[key] == key
                self.host[address] = key if is_good else GARBAGE
            else:
                assert running.has_read.get(address, self.host[address]) == key
                if job.kind is JobKind.SPILL and is_good:
                    self.files[key] = key
                elif job.kind is JobKind.SPILL:
                    self.files.pop(key, None)
        return Outcome(job, ok, failed)

    def seal(self, addresses: Int32Array) -> None:
        for address in addresses.tolist():
            self.sealed[address] = self.host[address]

    def discard(self, discards: Discards) -> None:
        for running in self.running.values():
            assert not _written(running.job) & set(discards.addresses.tolist())
            if running.job.kind in (JobKind.SPILL, JobKind.FETCH):
                assert not set(running.job.keys) & set(discards.keys)
        for address in discards.addresses.tolist():
            self.sealed.pop(address, None)
        for key in discards.keys:
            self.files.pop(key, None)


def _written(job: TransferJob) -> set[int]:
    return set() if job.kind in READING else set(job.addresses.tolist())


def _read(job: TransferJob) -> set[int]:
    return set(job.addresses.tolist()) if job.kind in READING else set()
