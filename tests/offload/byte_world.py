"""Simulates the workers of a hierarchy: bytes in host slots and files, by their keys.

A job writes nothing at first, garbage while it runs, and its content when it succeeds; it reads its
sources at a random moment before its end. So an operation that the hierarchy allows too early shows
up as wrong content.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvcache.base.arrays import Int32Array
from kvcache.offload import Discards, FetchJob, LoadJob, OffloadKey, SpillJob, StoreJob

Job = StoreJob | LoadJob | SpillJob | FetchJob
GARBAGE = OffloadKey(b"garbage")


@dataclass(eq=False)
class RunningJob:
    """A job, its inputs so far, and the addresses that it writes."""

    job: Job
    has_begun: bool = False
    has_read: dict[int, OffloadKey] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: addresses that failed, none if it succeeded."""

    job: Job
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

    def start(self, job: Job) -> None:
        """Take a job: no other job may touch its destinations, or write its sources."""
        for other in self.running.values():
            assert not _written(other.job) & (_written(job) | _read(job))
            assert not _read(other.job) & _written(job)
            if isinstance(job, SpillJob | FetchJob) and isinstance(other.job, SpillJob):
                assert not set(other.job.keys) & set(job.keys), "two jobs on one file"
            if isinstance(job, SpillJob) and isinstance(other.job, FetchJob):
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
        if isinstance(running.job, SpillJob):
            self.files.update(dict.fromkeys(running.job.keys, GARBAGE))
        if isinstance(running.job, LoadJob | SpillJob):
            for address in running.job.sources.tolist():
                running.has_read[address] = self.host[address]

    def end(self, job_id: int) -> Outcome:
        """End a job, successfully or not; check its inputs."""
        running = self.running.pop(job_id)
        job = running.job
        ok = self.rng.random() < 0.8
        addresses = (
            job.sources if isinstance(job, LoadJob | SpillJob) else job.destinations
        ).tolist()
        failed = () if ok else tuple(self.rng.sample(addresses, self.rng.randrange(len(addresses))))
        all_failed = not ok and not failed
        for key, address in zip(job.keys, addresses, strict=True):
            is_good = address not in failed and not all_failed
            if isinstance(job, StoreJob):
                self.host[address] = key if ok else GARBAGE
            elif isinstance(job, FetchJob):
                assert self.files[key] == key
                self.host[address] = key if is_good else GARBAGE
            else:
                assert running.has_read.get(address, self.host[address]) == key
                if isinstance(job, SpillJob) and is_good:
                    self.files[key] = key
                elif isinstance(job, SpillJob):
                    self.files.pop(key, None)
        return Outcome(job, ok, failed)

    def seal(self, addresses: Int32Array) -> None:
        for address in addresses.tolist():
            self.sealed[address] = self.host[address]

    def discard(self, discards: Discards) -> None:
        for running in self.running.values():
            assert not _written(running.job) & set(discards.addresses.tolist())
            if isinstance(running.job, SpillJob | FetchJob):
                assert not set(running.job.keys) & set(discards.keys)
        for address in discards.addresses.tolist():
            self.sealed.pop(address, None)
        for key in discards.keys:
            self.files.pop(key, None)


def _written(job: Job) -> set[int]:
    return set(job.destinations.tolist()) if isinstance(job, StoreJob | FetchJob) else set()


def _read(job: Job) -> set[int]:
    return set(job.sources.tolist()) if isinstance(job, LoadJob | SpillJob) else set()
