"""Threads over files: all jobs end, and no job of a key overtakes another."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache.base.errors import BacklogFullError
from kvcache.worker.copies.checksums import checksum_of
from kvcache.worker.files.file_pool import MAX_UNTAKEN_SCANS, FilePool, FinishedFileJob, ThreadLanes
from kvcache.worker.files.format import FileHead
from kvcache.worker.files.store import FileStore, StoreLimits
from tests.worker.tier_support import (
    SHAPE,
    FaultyFiles,
    files_below,
    is_scanning,
    random_head,
    wait_for_files,
)

TIMEOUT_S = 60.0
NUM_SLOTS = 16


class Memory:
    """Host slots of two pieces each."""

    def __init__(self) -> None:
        self.bytes = bytearray(96 * NUM_SLOTS)

    def views(self, slot: int) -> list[memoryview]:
        whole = memoryview(self.bytes)[96 * slot : 96 * (slot + 1)]
        return [whole[:64], whole[64:]]

    def fill(self, slot: int, payload: bytes) -> None:
        self.bytes[96 * slot : 96 * (slot + 1)] = payload

    def __getitem__(self, slot: int) -> bytes:
        return bytes(self.bytes[96 * slot : 96 * (slot + 1)])


class Bench:
    """A pool over a directory."""

    def __init__(self, directory: Path, threads: int = 3, max_queued_blocks: int = 64) -> None:
        self.memory = Memory()
        self.files = FaultyFiles(directory)
        self.store = FileStore(self.files, SHAPE, StoreLimits(), "me")
        self.pool = FilePool(
            self.store,
            self.memory.views,
            ThreadLanes(threads),
            max_queued_blocks=max_queued_blocks,
        )

    def settle(self) -> dict[int, FinishedFileJob]:
        assert wait_for_files(self.pool, TIMEOUT_S)
        return {job.job_id: job for job in self.pool.get_finished()}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    assert made.pool.close(TIMEOUT_S)
    assert made.files.open_descriptors == set()


def block(rng: np.random.Generator) -> tuple[FileHead, bytes]:
    payload = rng.bytes(96)
    return random_head(rng, payload), payload


def test_what_was_spilled_is_fetched_with_its_heads(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    blocks = [block(rng) for _ in range(8)]
    for slot, (_, payload) in enumerate(blocks):
        bench.memory.fill(slot, payload)
    heads = [head for head, _ in blocks]
    bench.pool.submit_spill(1, list(range(8)), heads)
    bench.pool.submit_fetch(2, [head.key for head in heads], list(range(15, 7, -1)))
    ended = bench.settle()
    assert ended[1] == FinishedFileJob(1, True, 8 * 96, ())
    assert ended[2] == FinishedFileJob(2, True, 8 * 96, (), tuple(heads))
    assert [bench.memory[15 - i] for i in range(8)] == [payload for _, payload in blocks]


def test_a_job_of_nothing_ends_at_once(bench: Bench) -> None:
    bench.pool.submit_spill(4, [], [])
    assert bench.pool.has_finished
    assert bench.settle() == {4: FinishedFileJob(4, True, 0, ())}


def test_one_block_that_fails_fails_its_job_and_no_other(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    (here, _), (gone, _) = block(rng), block(rng)
    bench.pool.submit_spill(1, [0], [replace(here, checksum=checksum_of(bench.memory.views(0)))])
    bench.pool.submit_fetch(2, [gone.key, here.key], [1, 2])
    bench.pool.submit_fetch(3, [here.key], [3])
    ended = bench.settle()
    assert [ended[job].ok for job in (1, 2, 3)] == [True, False, True]
    assert [(f.place, f.key, f.detail) for f in ended[2].failures] == [
        (0, gone.key, f"block {gone.key.hex()[:16]} has no file")
    ]
    assert ended[2].num_bytes == 96
    assert ended[2].heads[0] is None
    assert ended[2].heads[1] is not None


def test_a_job_beyond_the_bound_is_refused_and_discards_never_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Bench(tmp_path, threads=1, max_queued_blocks=2)
    gate = threading.Event()
    hold = made.store.discard
    rng = np.random.default_rng(0)
    blocks = [block(rng)[0] for _ in range(3)]

    def wait(key: bytes) -> bool:
        assert gate.wait(TIMEOUT_S)
        return hold(key)

    monkeypatch.setattr(made.store, "discard", wait)
    made.pool.discard([blocks[0].key])
    made.pool.submit_spill(1, [0, 1], blocks[:2])
    with pytest.raises(BacklogFullError) as caught:
        made.pool.submit_fetch(2, [blocks[2].key], [2])
    assert str(caught.value) == (
        "2 blocks wait for the disk and 1 more exceed max_queued_blocks, 2: send less, or raise it"
    )
    made.pool.discard([head.key for head in blocks] * 3)
    gate.set()
    assert made.settle()[1].ok
    assert files_below(tmp_path) == []
    assert made.store.statistics().problems == {"backlog": 1}
    assert made.pool.close(TIMEOUT_S)


def test_random_jobs_under_faults_equal_a_model(tmp_path: Path) -> None:
    for seed in range(8):
        print("seed", seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        made = Bench(directory, threads=1 + seed % 4)
        rng, chance = np.random.default_rng(seed), random.Random(seed)
        known = [block(rng) for _ in range(6)]
        on_disk: dict[int, bytes] = {}
        for job in range(60):
            which = chance.randrange(6)
            head, payload = known[which]
            act = chance.random()
            if act < 0.15:
                made.files.faults.failing[chance.choice(["write", "create", "rename"])] = (
                    chance.choice([errno.ENOSPC, errno.EIO, errno.EACCES])
                )
            elif act < 0.3:
                made.files.faults.cure()
            elif act < 0.4:
                made.files.faults.short = random.Random(job)
            elif act < 0.5:
                made.files.faults.full_after = chance.randrange(400)
            is_sick = bool(made.files.faults.failing) or made.files.faults.full_after >= 0
            act = chance.random()
            if act < 0.45:
                made.memory.fill(0, payload)
                made.pool.submit_spill(job, [0], [head])
                ended = made.settle()[job]
                assert ended.ok or is_sick, ended
                if ended.ok:
                    on_disk[which] = payload
            elif act < 0.85:
                made.pool.submit_fetch(job, [head.key], [1])
                ended = made.settle()[job]
                assert ended.ok == (which in on_disk), ended
                if ended.ok:
                    assert made.memory[1] == on_disk[which]
                    assert ended.heads == (head,)
            else:
                made.pool.discard([head.key])
                made.settle()
                on_disk.pop(which, None)
            expected = sorted(
                f"{known[i][0].key.hex()[:2]}/{known[i][0].key.hex()}.kvb" for i in on_disk
            )
            assert files_below(directory) == expected
            used = sum(path.stat().st_size for path in directory.rglob("*.kvb"))
            assert made.store.statistics().used_bytes == used
        assert made.pool.close(TIMEOUT_S)
        assert made.files.open_descriptors == set()


def test_what_is_submitted_for_a_key_is_done_in_order(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    head, payload = block(rng)
    bench.memory.fill(0, payload)
    for round_ in range(20):
        bench.pool.submit_spill(3 * round_, [0], [head])
        bench.pool.submit_fetch(3 * round_ + 1, [head.key], [1])
        bench.pool.discard([head.key])
        bench.pool.submit_fetch(3 * round_ + 2, [head.key], [2])
    ended = bench.settle()
    for round_ in range(20):
        assert [ended[3 * round_ + i].ok for i in range(3)] == [True, True, False]


def test_a_scan_returns_every_directory_once_and_only_some_ahead(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    heads = []
    for job in range(12):
        head, payload = block(rng)
        bench.memory.fill(job, payload)
        bench.pool.submit_spill(job, [job], [head])
        heads.append(head)
    bench.settle()
    bench.pool.scan()
    assert wait_for_files(bench.pool, TIMEOUT_S)
    assert is_scanning(bench.pool)
    scanned = bench.pool.take_scanned()
    assert len(scanned) == MAX_UNTAKEN_SCANS
    while is_scanning(bench.pool):
        assert wait_for_files(bench.pool, TIMEOUT_S)
        scanned += bench.pool.take_scanned()
    scanned += bench.pool.take_scanned()
    assert sorted(directory.prefix for directory in scanned) == list(range(256))
    found = [head for directory in scanned for head in directory.heads]
    assert sorted(head.key for head in found) == sorted(head.key for head in heads)


def test_a_scan_that_is_asked_for_again_begins_again(bench: Bench) -> None:
    head, payload = block(np.random.default_rng(0))
    bench.pool.scan([head.key[0]])
    assert wait_for_files(bench.pool, TIMEOUT_S)
    bench.memory.fill(0, payload)
    bench.pool.submit_spill(1, [0], [head])
    bench.settle()
    bench.pool.scan([head.key[0]])
    assert wait_for_files(bench.pool, TIMEOUT_S)
    (scanned,) = bench.pool.take_scanned()
    assert scanned.heads == (head,)


def test_an_unexpected_error_does_not_end_a_thread(bench: Bench) -> None:
    head, _ = block(np.random.default_rng(0))
    bench.pool.submit_spill(1, [10_000], [head])
    ended = bench.settle()[1]
    assert not ended.ok
    bench.memory.fill(0, block(np.random.default_rng(0))[1])
    bench.pool.submit_spill(2, [0], [head])
    assert bench.settle()[2].ok


def test_a_pool_that_is_closed_takes_nothing_more(tmp_path: Path) -> None:
    made = Bench(tmp_path)
    head, payload = block(np.random.default_rng(0))
    made.memory.fill(0, payload)
    made.pool.submit_spill(1, [0], [head])
    assert made.pool.close(TIMEOUT_S)
    assert made.pool.get_finished()[0].ok
    with pytest.raises(BacklogFullError, match=r"the tier is closed$"):
        made.pool.submit_spill(2, [0], [head])
    assert made.pool.close(TIMEOUT_S)
