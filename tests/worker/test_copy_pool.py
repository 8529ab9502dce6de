"""Threads that copy one store or load together: helpers, waits, and reports."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.protocol.commands import Load, Store
from kvcache.worker import CpuCopyEngine
from kvcache.worker.copies import copy_pool
from kvcache.worker.copies import task as copy_task
from kvcache.worker.copies.copy_pool import CopyPool, CopyPriority
from kvcache.worker.copies.task import BlockMove, Comparison, CopyResult, CopyTask, CpuBlockMove
from tests.worker.test_copy_thread import make
from tests.worker.test_row_mover import Memories
from tests.worker.worker_support import block_bytes, fill_block, ids

TIMEOUT_S = 60.0
NAME = "kvcache-copy-pool"


def helpers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(NAME + "-")]


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    made = CopyPool(2, NAME, "normal")
    yield made
    made.close()
    for helper in helpers():
        helper.join(TIMEOUT_S)
        assert not helper.is_alive()


def test_all_threads_work_at_once(pool: CopyPool) -> None:
    together, names = threading.Barrier(3), set()

    def work() -> None:
        together.wait(TIMEOUT_S)
        names.add(threading.current_thread().name)

    for _ in range(3):
        names.clear()
        pool.run(work)
        assert names == {threading.current_thread().name, f"{NAME}-1", f"{NAME}-2"}


def test_no_thread_waits_for_a_helper_that_does_not_come(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, calls = threading.Event(), []

    def sleep_in(priority: CopyPriority) -> None:
        assert gate.wait(TIMEOUT_S)

    def work() -> None:
        calls.append(threading.current_thread())

    monkeypatch.setattr(copy_pool, "take_priority", sleep_in)
    for _ in range(3):
        pool.run(work)
    gate.set()
    pool.close()
    for helper in helpers():
        helper.join(TIMEOUT_S)
    assert calls == [threading.current_thread()] * 3


def test_what_is_over_is_not_kept_for_helpers_that_do_not_come(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, works = threading.Event(), []

    class Work:
        def __call__(self) -> None:
            works.append(weakref.ref(self))

    def sleep_in(priority: CopyPriority) -> None:
        assert gate.wait(TIMEOUT_S)

    monkeypatch.setattr(copy_pool, "take_priority", sleep_in)
    for _ in range(20):
        pool.run(Work())
    assert [work() is None for work in works[:-1]] == [True] * 19
    gate.set()


@pytest.mark.parametrize("does_fail", [False, True])
def test_a_helper_that_has_begun_is_waited_for(pool: CopyPool, does_fail: bool) -> None:
    begun, go_on, led = (threading.Event() for _ in range(3))
    ended: list[str] = []

    def work() -> None:
        if threading.current_thread() is thread:
            assert begun.wait(TIMEOUT_S)
            led.set()
            if does_fail:
                raise MemoryError("no room")
            return
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        ended.append("helper")

    def lead() -> None:
        try:
            pool.run(work)
        except MemoryError:
            ended.append("failure")
        ended.append("leader")

    thread = threading.Thread(target=lead)
    thread.start()
    assert led.wait(TIMEOUT_S)
    thread.join(0.05)
    assert ended == []
    go_on.set()
    thread.join(TIMEOUT_S)
    assert ended[-1] == "leader"
    assert ended[0] == "helper"
    assert ("failure" in ended) is does_fail


def test_what_a_helper_raises_is_raised(pool: CopyPool) -> None:
    together, here = threading.Barrier(3), threading.current_thread()

    def work() -> None:
        together.wait(TIMEOUT_S)
        if threading.current_thread() is not here:
            raise ValueError("a bug")

    for _ in range(2):  # and the helpers are still there
        with pytest.raises(ValueError, match="a bug"):
            pool.run(work)


def test_where_no_thread_starts_the_caller_does_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    calls: list[None] = []
    pool = CopyPool(3, NAME, "normal")
    for _ in range(2):
        pool.run(lambda: calls.append(None))
    pool.close()
    assert len(calls) == 2
    assert [record.message for record in caplog.records] == [
        "1 of 4 threads copy: no other starts (can't start new thread)"
    ]


def test_what_was_copied_is_given_back_by_the_one_who_asked(pool: CopyPool) -> None:
    class Work:
        """Reports the thread that drops it last."""

        def __call__(self) -> None:
            together.wait(TIMEOUT_S)

        def __del__(self) -> None:
            dropped.append(threading.current_thread())

    together, dropped = threading.Barrier(3), []  # type: ignore[var-annotated]
    for _ in range(50):
        pool.run(Work())
    assert dropped == [threading.current_thread()] * 50
    threads = helpers()
    assert len(threads) == 2
    pool.close()
    assert not any(thread.is_alive() for thread in threads)


class StartTogether:
    """Lets a pool's threads copy their first piece only when all of them have one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
        self.threads: set[int] = set()
        self._together = threading.Barrier(num_threads)
        monkeypatch.setattr(CpuBlockMove, "copy_piece", self._meeting(CpuBlockMove.copy_piece))

    def _meeting(self, take: object) -> object:
        def met(move: CpuBlockMove, *arguments: object) -> object:
            if threading.get_ident() not in self.threads:
                self.threads.add(threading.get_ident())
                self._together.wait(TIMEOUT_S)
            return take(move, *arguments)  # type: ignore[operator]

        return met


def run(task: CopyTask, pool: CopyPool) -> CopyResult:
    task.begin(pool)
    assert task.is_copied()
    return task.finish()


@pytest.mark.parametrize("widths", [(4096,), (1 << 14, 24), (1 << 16,), (72_000, 9)])
def test_every_block_arrives_and_is_hashed_by_any_thread(
    pool: CopyPool, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_task, "CPU_PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(copy_task, "HELPED_PIECES", 3)
    for seed in range(6):
        memories = Memories(seed, widths)
        to_host = seed % 2 == 0
        move = memories.move(to_host)
        while len(move.slots) < 16:
            move = memories.move(to_host)
        with monkeypatch.context() as only_here:
            threads_at_once = StartTogether(only_here, 3)
            if to_host:
                result = run(CopyTask(move, CpuCopyEngine(), takes_checksums=True), pool)
                assert result.checksums.tolist() == memories.checksums(move.slots)
                wrong = -1
            else:
                comparison = Comparison(
                    np.array(memories.checksums(move.slots)), np.ones(len(move.slots), np.bool_)
                )
                wrong = seed
                memories.host.tensors[0][int(move.slots[wrong]), 7] ^= 1
                result = run(CopyTask(move, CpuCopyEngine(), comparison=comparison), pool)
                assert result.wrong.tolist() == [wrong]
        assert result.problem == ""
        assert len(threads_at_once.threads) == 3
        pairs = zip(move.block_ids.tolist(), move.slots.tolist(), strict=True)
        for place, (block, slot) in enumerate(pairs):
            on_device = memories.content(memories.device, block)
            if place == wrong:
                assert not any(map(any, on_device))
            else:
                assert on_device == memories.content(memories.host.tensors, slot)


def test_one_thread_that_fails_ends_the_move(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_task, "CPU_PIECE_BYTES", 1 << 12)
    StartTogether(monkeypatch, 3)
    meeting, copied = CpuBlockMove.copy_piece, []

    def fail_in_a_helper(move: CpuBlockMove, first: int) -> None:
        meeting(move, first)
        copied.append(first)
        if threading.current_thread().name == f"{NAME}-1":
            raise MemoryError("no room")
        assert failed.wait(TIMEOUT_S)

    failed = threading.Event()
    monkeypatch.setattr(CpuBlockMove, "copy_piece", fail_in_a_helper)
    memories = Memories(1, (4096,))
    every = ids(*range(32))
    move = BlockMove(memories.device, memories.host, every, every, True)
    task = CopyTask(move, CpuCopyEngine(), takes_checksums=True)
    # The others continue when the remaining batches have been dropped.
    monkeypatch.setattr(copy_task, "deque", lambda items: Told(items, failed))
    result = run(task, pool)
    assert "no room" in result.problem
    assert len(copied) == 3


class Told(copy_task.deque):  # type: ignore[type-arg,name-defined,misc]
    """A queue that reports when it was emptied."""

    def __init__(self, items: object, emptied: threading.Event) -> None:
        super().__init__(items)
        self._emptied = emptied

    def clear(self) -> None:
        super().clear()
        self._emptied.set()


def test_few_pieces_are_copied_by_one_thread(pool: CopyPool) -> None:
    memories = Memories(1, (4096,))
    move = memories.move(to_host=True)
    assert run(CopyTask(move, CpuCopyEngine(), takes_checksums=True), pool).problem == ""
    assert helpers() == []


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="NO PRIORITIES HERE")
def test_helpers_have_the_priority_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, together, found = CopyPool(1, NAME, "idle"), threading.Barrier(2), {}

    def work() -> None:
        together.wait(TIMEOUT_S)
        found[threading.current_thread().name] = os.sched_getscheduler(0)

    pool.run(work)
    pool.close()
    assert found[f"{NAME}-1"] == os.SCHED_IDLE


def test_a_worker_with_more_threads_keeps_every_byte_and_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_task, "CPU_PIECE_BYTES", 64)
    monkeypatch.setattr(copy_task, "HELPED_PIECES", 2)
    bench = make(copy_threads=3)
    bench.engine.copies_at_once = True
    blocks, slots = ids(1, 2, 3, 4, 5, 6), ids(0, 1, 2, 3, 4, 5)
    for block_id in blocks.tolist():
        fill_block(bench.worker, block_id, float(block_id))
    before = [block_bytes(bench.worker, block_id) for block_id in blocks.tolist()]
    with monkeypatch.context() as only_here:
        threads_at_once = StartTogether(only_here, 3)
        bench.send(Store(1, "host", blocks, slots))
        assert bench.settle(1).ok
    assert len(threads_at_once.threads) == 3
    bench.send(Load(2, "host", slots, ids(9, 10, 11, 12, 13, 14)))
    assert bench.settle(2).ok
    assert [block_bytes(bench.worker, block_id) for block_id in range(9, 15)] == before
    mine = [each for each in threading.enumerate() if each.name.startswith("kvcache-copies")]
    assert len(mine) >= 3
    bench.worker.close()
    for thread in mine:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="copy_threads is 0"):
        make(copy_threads=0)
