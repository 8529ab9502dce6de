"""Stores and loads in a second thread: the worker learns of their end, also of failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.base.clock import SystemClock
from kvcache.base.errors import ConfigurationError, DeadlineError
from kvcache.offload.keys import label_keys
from kvcache.protocol.commands import Fetch, Load, SealSlots, Spill, Store, Unlabel
from kvcache.protocol.messages import Ack, JobReport
from kvcache.worker import CpuCopyEngine, KVCacheWorker, PendingCopy, transfers
from kvcache.worker.copies import copy_pool
from kvcache.worker.copies.checksums import ChecksumRule, checksum_of
from kvcache.worker.copies.copy_pool import LONGEST_PAUSE_S, PAUSE_S, CopyPool
from kvcache.worker.copies.runner import CopyThread
from kvcache.worker.copies.task import CopyTask
from kvcache.worker.files.tier import FileTierSettings
from tests.worker.tier_support import random_labels
from tests.worker.worker_support import (
    Harness,
    block_bytes,
    fill_block,
    full_groups,
    ids,
    make_config,
    make_settings,
    patch,
)

TIMEOUT_S = 60.0


class GatedEngine(CpuCopyEngine):
    """Copies when `gate` is open; fails while `problem` says how."""

    copies_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.problem: Exception | None = None
        self.is_lost = False
        self.threads: set[str] = set()

    def copy_blocks(self, *rows_and_ids: Any) -> PendingCopy:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(TIMEOUT_S)
        if self.problem is not None:
            raise self.problem
        if self.is_lost:
            return LostCopy()
        return super().copy_blocks(*rows_and_ids)


class LostCopy:
    """A copy of a device that has failed: every question about it raises."""

    def is_done(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    def wait(self, timeout_s: float) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


class News(threading.Event):
    """Called by a worker when a transfer has ended."""

    does_raise = False

    def __call__(self) -> None:
        self.set()
        if self.does_raise:
            raise OSError("no listener")


class Bench(Harness):
    """A worker on the machine's clock, and its reports."""

    engine: GatedEngine
    news: News

    def settle(self, job_id: int) -> JobReport:
        """Wait until the worker has news, as often as it takes."""
        while job_id not in self.reports:
            assert self.news.wait(TIMEOUT_S)
            self.news.clear()
            self.note(self.worker.on_tick())
        return self.reports[job_id]


def make(**changes: object) -> Bench:
    engine, news = GatedEngine(), News()
    config = make_config(full_groups(), host_blocks=6)
    clock = SystemClock()
    settings = make_settings(config, **changes)
    worker = KVCacheWorker(settings, clock=clock, copy_engine=engine, on_news=news)
    bench = Bench(worker, clock)  # type: ignore[arg-type]
    bench.engine, bench.news = engine, news
    bench.grant()
    for block_id in range(1, 16):
        fill_block(worker, block_id, float(block_id))
    return bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = make()
    yield made
    made.engine.gate.set()
    made.worker.check()
    made.worker.close()


def test_jobs_run_in_a_thread_and_are_reported_when_they_end(bench: Bench) -> None:
    content = block_bytes(bench.worker, 3)
    bench.engine.gate.clear()
    replies = bench.send(Store(1, "host", ids(3), ids(0)))
    assert [type(reply) for reply in replies] == [Ack]
    assert bench.worker.is_transferring
    assert bench.worker.on_tick() == []
    bench.engine.gate.set()
    assert bench.settle(1).ok
    assert not bench.worker.is_transferring
    bench.send(Load(2, "host", ids(0), ids(9)))
    assert bench.settle(2).ok
    assert block_bytes(bench.worker, 9) == content
    assert bench.engine.threads == {"kvcache-copies"}


def test_what_goes_wrong_in_the_thread_fails_its_job_and_no_other(bench: Bench) -> None:
    for job_id, problem in ((1, RuntimeError("the bus is on fire")), (2, KeyError("a bug"))):
        bench.engine.problem = problem
        bench.send(Store(job_id, "host", ids(3), ids(0)))
        report = bench.settle(job_id)
        assert (report.ok, report.detail) == (False, f"the copy engine failed: {problem}")
    bench.engine.problem = None
    bench.news.does_raise = True
    bench.send(Store(3, "host", ids(3), ids(0)))
    assert bench.settle(3).ok
    bench.send(Load(4, "host", ids(0), ids(9)))
    assert bench.settle(4).ok


def test_a_copy_that_cannot_be_followed_fails_its_job_and_no_other(bench: Bench) -> None:
    bench.engine.is_lost = True
    bench.send(Store(1, "host", ids(3), ids(0)))
    report = bench.settle(1)
    assert not report.ok
    assert "illegal memory access" in report.detail
    bench.engine.is_lost = False
    bench.send(Store(2, "host", ids(3), ids(0)))
    assert bench.settle(2).ok
    assert not bench.worker.is_transferring


def test_a_checksum_that_cannot_be_taken_fails_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("kvcache.worker.copies.task.checksums_of_rows", fail)
    bench.send(Store(1, "host", ids(3), ids(0)))
    report = bench.settle(1)
    assert not report.ok
    assert "no room" in report.detail
    bench.send(Load(2, "host", ids(0), ids(9)))
    assert bench.settle(2).detail == "host slot 0 holds nothing that this rank stored"


def test_a_forward_begins_when_the_thread_has_read_what_it_writes(bench: Bench) -> None:
    content = block_bytes(bench.worker, 3)
    bench.engine.gate.clear()
    bench.send(Store(1, "host", ids(3), ids(0)))
    bench.send(Unlabel(ids(3)), patch(0, [3]))
    with pytest.raises(DeadlineError, match="moves its blocks"):
        bench.worker.begin_forward(1, 2, timeout_s=0.01)

    def write() -> None:
        bench.worker.begin_forward(1, 2, TIMEOUT_S)
        fill_block(bench.worker, 3, 77.0)
        bench.worker.end_forward(1, 2)

    forward = threading.Thread(target=write)
    forward.start()
    # A message is applied while the forward waits: the worker is not locked meanwhile.
    assert [type(reply) for reply in bench.send()] == [Ack]
    bench.engine.gate.set()
    forward.join(TIMEOUT_S)
    assert bench.settle(1).ok
    assert bench.worker.statistics().transfers.num_waits >= 1
    bench.send(Load(2, "host", ids(0), ids(9)))
    assert bench.settle(2).ok
    assert block_bytes(bench.worker, 9) == content


def test_a_store_that_came_during_a_forward_runs_when_it_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_begin, has_looked = CopyTask.can_begin, threading.Event()

    def look(task: CopyTask) -> bool:
        may = can_begin(task)
        has_looked.set()
        return may

    monkeypatch.setattr(CopyTask, "can_begin", look)
    bench.send(patch(0, [3]))
    bench.worker.begin_forward(1, 1, TIMEOUT_S)
    bench.send(Store(1, "host", ids(3), ids(0)))
    fill_block(bench.worker, 3, 77.0)
    assert has_looked.wait(TIMEOUT_S)
    assert not bench.engine.threads
    bench.worker.end_forward(1, 1)
    assert bench.settle(1).ok
    bench.send(Load(3, "host", ids(0), ids(9)))
    assert bench.settle(3).ok
    assert block_bytes(bench.worker, 9) == block_bytes(bench.worker, 3)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_closing_drops_what_has_not_begun_and_does_not_wait_for_what_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfers, "CLOSE_TIMEOUT_S", 0.01)
    bench = make()
    before = block_bytes(bench.worker, 9)
    bench.send(patch(0, [3]))
    bench.worker.begin_forward(1, 1, TIMEOUT_S)
    bench.send(Store(1, "host", ids(3), ids(0)))
    bench.worker.close()
    assert not warnings(caplog)
    assert not bench.engine.threads
    bench = make()
    bench.engine.gate.clear()
    bench.send(Store(1, "host", ids(3), ids(0)), Store(2, "host", ids(4), ids(1)))
    while not bench.engine.threads:
        threading.Event().wait(0.001)
    bench.worker.close()
    assert warnings(caplog) == ["a copy is not over after 0.01 s: its memory is kept"]
    host = bench.worker.host_pool
    assert host.segment.descriptor >= 0
    bench.engine.gate.set()
    assert block_bytes(bench.worker, 9) == before


def test_a_worker_that_copies_nothing_starts_no_thread() -> None:
    runner = CopyThread(lambda: None, "kvcache-idle")
    assert runner.close(0.0)
    assert "kvcache-idle" not in [thread.name for thread in threading.enumerate()]


def test_without_a_thread_a_job_fails_and_the_next_one_tries_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch_only_here:
        patch_only_here.setattr(threading.Thread, "start", refuse)
        bench.send(Store(1, "host", ids(3), ids(0)))
        report = bench.settle(1)
    assert not report.ok
    assert report.detail == (
        "no thread to copy in (can't start new thread): raise the limit of threads"
    )
    assert not bench.worker.is_transferring
    bench.send(Store(2, "host", ids(3), ids(0)))
    assert bench.settle(2).ok


class SleptTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.slept.append(pause_s)
        self.now_s += pause_s
        self.on_sleep()


def test_copies_rest_while_the_worker_is_busy_but_only_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SleptTime()
    monkeypatch.setattr(copy_pool, "time", clock)
    pool = CopyPool(0, "kvcache-copies", "normal")
    pool.give_way()
    assert clock.slept == []
    pool.pause()
    pool.give_way()
    assert clock.slept == pytest.approx([PAUSE_S])
    pool.give_way()
    assert len(clock.slept) == 1
    clock.slept.clear()
    clock.on_sleep = pool.pause  # a message comes in every pause
    pool.pause()
    pool.give_way()
    assert sum(clock.slept) == pytest.approx(LONGEST_PAUSE_S)


def corrupt(bench: Bench, slots: range) -> None:
    host = bench.worker.host_pool
    assert host is not None
    for slot in slots:
        host.tensors[0][slot, 0] ^= 1


def test_of_a_sample_one_block_in_sixteen_is_compared() -> None:
    rule = ChecksumRule("sample")
    chosen = [rule.chosen(count).tolist() for count in (3, 14, 20)]
    assert [places.index(True) for places in chosen] == [0, 13, 15]
    assert [sum(places) for places in chosen] == [1, 1, 1]
    bench = make(verify="sample")
    bench.send(Store(1, "host", ids(1, 2, 3, 4, 5, 6), ids(0, 1, 2, 3, 4, 5)))
    bench.settle(1)
    corrupt(bench, range(6))
    bench.send(Load(2, "host", ids(0, 1), ids(9, 10)), Load(3, "host", ids(0, 1), ids(9, 10)))
    assert bench.settle(2).block_ids == (0,)
    assert bench.settle(3).ok
    bench.worker.close()


def test_never_takes_no_checksum_and_compares_none() -> None:
    bench = make(verify="never")
    bench.send(Store(1, "host", ids(1), ids(0)))
    assert (bench.settle(1).ok, bench.reports[1].checksum) == (True, 0)
    corrupt(bench, range(1))
    bench.send(Load(2, "host", ids(0), ids(9)))
    assert (bench.settle(2).ok, bench.reports[2].checksum) == (True, 0)
    bench.worker.close()


def test_a_file_has_a_checksum_also_where_slots_have_none(tmp_path: Path) -> None:
    bench = make(verify="never", file_tier=FileTierSettings(tmp_path, "cluster"))
    labels = random_labels(np.random.default_rng(0), [3])
    (key,) = label_keys(labels)
    content = block_bytes(bench.worker, 3)
    bench.send(labels)
    bench.send(Store(1, "host", ids(3), ids(0)))
    assert bench.settle(1).ok
    bench.send(SealSlots("host", ids(0)), Spill(2, "file", ids(0), key))
    assert bench.settle(2).ok
    bench.send(Fetch(3, "file", key, ids(1)))
    assert bench.settle(3).ok
    host, pool = bench.worker.host_pool, bench.worker._executor.tiers.files
    assert pool is not None
    assert host.labels.checksums(ids(1)).tolist() == [checksum_of([memoryview(content)])]
    (path,) = tmp_path.rglob("*.kvb")
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(bytes(data))
    bench.send(Fetch(4, "file", key, ids(2)))
    assert bench.settle(4).ok  # no checksum is compared
    bench.worker.close()


def test_an_unknown_way_to_verify_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="verify is 'often': choose one of always, sample"):
        make(verify="often")
