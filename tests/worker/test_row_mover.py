"""Rows copied, and blocks hashed during the copy, against a naive implementation."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import xxhash

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.worker import CpuCopyEngine, HostPool
from kvcache.worker.copies import rows as row_mover
from kvcache.worker.copies import task as tasks
from kvcache.worker.copies.checksums import checksum_of
from kvcache.worker.copies.copy_pool import CopyPool
from kvcache.worker.copies.rows import (
    ByteRows,
    PieceHashes,
    RowMover,
    Side,
    can_hash,
    copy_rows,
    hashes_of_rows,
)
from kvcache.worker.copies.runner import InlineCopies
from kvcache.worker.copies.task import BlockMove, Comparison, CopyResult, CopyTask
from kvcache.worker.host_memory.segment import HostSegment, SegmentShape
from kvcache.worker.host_memory.shared_memory import make_memory

PIECE_BYTES = 1 << 16
"""Less than in service, so that tests are quick."""

WIDTHS = [8, 12, 4096, 16384, 40_000, 70_000]
NUM_ROWS = 32


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CPU_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(row_mover, "STREAMED_BYTES", PIECE_BYTES)


def some_ids(rng: np.random.Generator, order: str, count: int) -> Int32Array:
    """Ids of one side: consecutive, in short sequences, or scattered."""
    if order == "run":
        return int32_array(np.arange(count) + int(rng.integers(0, NUM_ROWS - count + 1)))
    mixed = rng.permutation(NUM_ROWS)
    if order == "runs":
        mixed = (rng.permutation(NUM_ROWS // 4)[:, None] * 4 + np.arange(4)).reshape(-1)
    return int32_array(mixed[:count])


def noise(rng: np.random.Generator, num_rows: int, width: int, *, stride: int = 0) -> ByteRows:
    """Rows that begin between stripes, as far as `stride` lets them."""
    stride = max(stride, width)
    memory = rng.integers(0, 256, num_rows * stride + 64, np.uint8)
    first = -memory.ctypes.data % 64
    rows: ByteRows = memory[first : first + num_rows * stride].reshape(num_rows, stride)[:, :width]
    return rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("order", ["run", "runs", "apart"])
@pytest.mark.parametrize("gap", [0, 24, 64])
def test_rows_arrive_whatever_their_order(width: int, order: str, gap: int) -> None:
    for other in ("run", "runs", "apart"):
        rng = np.random.default_rng([width, len(order), len(other)])
        count = int(rng.integers(1, NUM_ROWS // 2))
        sources, destinations = (noise(rng, NUM_ROWS, width, stride=width + gap) for _ in range(2))
        source_ids, ids = some_ids(rng, order, count), some_ids(rng, other, count)
        expected = destinations.copy()
        expected[ids] = sources[source_ids]
        copy_rows(sources, source_ids, destinations, ids)
        assert np.array_equal(destinations, expected)


@pytest.mark.parametrize("width", [24, 4096, 50_000])
def test_rows_of_one_memory_arrive_where_no_source_is_written(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = noise(rng, NUM_ROWS, width)
    mixed = int32_array(rng.permutation(NUM_ROWS))
    for sources, ids in (
        (mixed[:10], mixed[10:20]),
        (mixed[mixed >= 16], int32_array(range(16))),
        (int32_array(range(16)), mixed[mixed >= 16]),
    ):
        before = rows.copy()
        copy_rows(rows, sources, rows, ids)
        before[ids] = before[sources]
        assert np.array_equal(rows, before)


HASHED_WIDTHS = [
    *((64 * n,) for n in (4, 5, 15, 16, 17, 31, 32, 33, 48, 49, 1024)),
    (64, 0, 128, 64),
    (1024, 1024),
    (960, 64, 64),
    (64,) * 40,
    (2048, 64, 4096),
]


@pytest.mark.parametrize("widths", HASHED_WIDTHS)
@pytest.mark.parametrize("part_bytes", [64, 320, 1024, PIECE_BYTES])
@pytest.mark.parametrize("streamed_bytes", [1, 1 << 40])
def test_what_is_hashed_on_the_way_has_the_hash_that_others_know(
    widths: tuple[int, ...], part_bytes: int, streamed_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_mover, "STREAMED_BYTES", streamed_bytes)
    assert can_hash(widths)
    rng = np.random.default_rng([*widths, part_bytes])
    count = int(rng.integers(2, 12))
    source_ids, ids = (some_ids(rng, "apart", count) for _ in range(2))
    is_hashed, digests = rng.random(count) < 0.7, np.zeros(count, np.uint64)
    sources = [noise(rng, NUM_ROWS, width) for width in widths]
    destinations = [noise(rng, NUM_ROWS, width) for width in widths]
    starts = [sum(widths[:place]) for place in range(len(widths))]
    cut = int(rng.integers(1, count))
    for first, end in ((cut, count), (0, cut)):
        piece = PieceHashes(is_hashed, digests, first, end)
        for place, width in enumerate(widths):
            sides = Side(sources[place], source_ids), Side(destinations[place], ids)
            mover = RowMover(*sides, starts[place], sum(widths))
            for low in range(0, width, part_bytes):
                mover.copy_hashed(piece, low, min(width, low + part_bytes))
    blocks = [b"".join(bytes(rows[source]) for rows in sources) for source in source_ids]
    assert [b"".join(bytes(rows[i]) for rows in destinations) for i in ids] == blocks
    expected = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    chosen = is_hashed.nonzero()[0].tolist()
    assert digests[chosen].tolist() == [expected[place] for place in chosen]
    stay = [rows for rows in sources if rows.shape[1]]
    assert hashes_of_rows(stay, source_ids).tolist() == expected


def test_the_kernel_leaves_odd_and_short_blocks_to_others() -> None:
    assert not can_hash(())
    assert not can_hash((64, 64, 64))
    assert not can_hash((4096, 8))
    assert can_hash((64,) * 4)


def test_rows_that_are_not_there_are_refused_and_nothing_is_written() -> None:
    rows = np.zeros((4, 64), np.uint8)
    for wrong in ([0, 4], [-1, 0]):
        with pytest.raises(IndexError, match="of 4: ids begin at 0"):
            copy_rows(rows, int32_array(wrong), rows.copy(), int32_array([2, 3]))
        with pytest.raises(IndexError, match="of 4: ids begin at 0"):
            copy_rows(rows + 1, int32_array([2, 3]), rows, int32_array(wrong))
        with pytest.raises(IndexError, match="of 4: ids begin at 0"):
            hashes_of_rows([rows], int32_array(wrong))
    assert not rows.any()
    with pytest.raises(ValueError, match="2 apart"):
        copy_rows(rows[:, ::2], int32_array([0]), np.zeros((1, 32), np.uint8), int32_array([0]))
    with pytest.raises(ValueError, match="64 bytes to rows of 32"):
        copy_rows(rows, int32_array([0]), np.zeros((1, 32), np.uint8), int32_array([0]))
    fixed = rows.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_rows(rows + 1, int32_array([0]), fixed, int32_array([0]))
    with pytest.raises(ValueError, match="1 rows to 2"):
        copy_rows(rows, int32_array([0]), rows.copy(), int32_array([0, 1]))


def test_ids_need_not_lie_side_by_side() -> None:
    rng = np.random.default_rng(1)
    sources, destinations = noise(rng, 8, 64), noise(rng, 8, 64)
    ids = int32_array(range(8))
    copy_rows(sources, ids[::2], destinations, ids[1::2])
    assert np.array_equal(destinations[1::2], sources[::2])


class Memories:
    """Device rows and host slots of some widths, full of noise."""

    def __init__(self, seed: int, widths: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng(seed)
        shape = SegmentShape("test", 0, NUM_ROWS, widths, 16, 16)
        self.host = HostPool(
            HostSegment(make_memory("t", shape.size_bytes), shape), is_pinned=False
        )
        self.device = tuple(
            torch.from_numpy(self.rng.integers(0, 256, (NUM_ROWS, width), np.uint8))
            for width in widths
        )
        for tensor in self.host.tensors:
            tensor.copy_(torch.from_numpy(self.rng.integers(0, 256, tensor.shape, np.uint8)))

    def move(self, to_host: bool) -> BlockMove:
        count = int(self.rng.integers(1, NUM_ROWS))
        orders = [("run", "runs", "apart")[int(self.rng.integers(3))] for _ in range(2)]
        ids = [some_ids(self.rng, order, count) for order in orders]
        return BlockMove(self.device, self.host, ids[0], ids[1], to_host)

    def content(self, side: tuple[torch.Tensor, ...], row: int) -> list[bytes]:
        return [bytes(tensor[row].numpy()) for tensor in side if tensor.shape[1]]

    def checksums(self, slots: Int32Array) -> list[int]:
        return [
            checksum_of(memoryview(part) for part in self.content(self.host.tensors, slot))
            for slot in slots.tolist()
        ]


def run(task: CopyTask) -> CopyResult:
    runner = InlineCopies()
    runner.submit(task)
    (finished,) = runner.take_finished()
    return finished.result


SHAPES = [
    (4096,),
    (16384,),
    (40_000, 8),
    (3 * PIECE_BYTES + 64,),
    (64, 0, 24),
    (PIECE_BYTES, 9),
    (4096,) * 5,
    (16384, 24) * 3,
]


@pytest.mark.parametrize("widths", SHAPES)
def test_a_store_has_the_checksums_of_what_it_wrote(widths: tuple[int, ...]) -> None:
    for seed in range(4):
        memories = Memories(seed, widths)
        move = memories.move(to_host=True)
        result = run(CopyTask(move, CpuCopyEngine(), takes_checksums=True))
        assert result.problem == ""
        for block, slot in zip(move.block_ids.tolist(), move.slots.tolist(), strict=True):
            stored = memories.content(memories.host.tensors, slot)
            assert stored == memories.content(memories.device, block)
        assert result.checksums.tolist() == memories.checksums(move.slots)


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("num_wrong", [0, 1, 3])
def test_a_load_names_all_that_is_wrong_and_leaves_nothing_of_it(
    widths: tuple[int, ...], num_wrong: int
) -> None:
    for seed in range(4):
        memories, chance = Memories(seed, widths), random.Random(seed)
        move = memories.move(to_host=False)
        count = len(move.slots)
        expected = np.array(memories.checksums(move.slots))
        is_chosen = memories.rng.random(count) < (1.0 if seed % 2 else 0.5)
        wrong = sorted(chance.sample(range(count), min(num_wrong, count)))
        for place in wrong:
            memories.host.tensors[0][int(move.slots[place]), 7] ^= 1
        comparison = Comparison(expected, is_chosen)
        result = run(CopyTask(move, CpuCopyEngine(), comparison=comparison))
        found = [place for place in wrong if is_chosen[place]]
        assert result.wrong.tolist() == found
        now = memories.checksums(move.slots)
        assert result.found.tolist() == [now[place] for place in found]
        for place, (block, slot) in enumerate(
            zip(move.block_ids.tolist(), move.slots.tolist(), strict=True)
        ):
            after = memories.content(memories.device, block)
            if place in found:
                assert not any(map(any, after))
            else:
                assert after == memories.content(memories.host.tensors, slot)


def whole_move(memories: Memories, count: int = NUM_ROWS) -> BlockMove:
    every = int32_array(range(count))
    return BlockMove(memories.device, memories.host, every, every, True)


class CountingPool(CopyPool):
    """The caller alone; counts how often it gave way."""

    num_calls = 0

    def give_way(self) -> None:
        self.num_calls += 1


@pytest.mark.parametrize("takes_checksums", [True, False])
def test_a_task_gives_way_between_pieces(takes_checksums: bool) -> None:
    for widths, expected in (
        ((16384,), NUM_ROWS // 4),
        ((4096, 8, 4096), 3 * NUM_ROWS // 16),
        ((PIECE_BYTES, 3 * PIECE_BYTES + 1), 5 * NUM_ROWS),
    ):
        pool = CountingPool()
        task = CopyTask(
            whole_move(Memories(1, widths)), CpuCopyEngine(), takes_checksums=takes_checksums
        )
        task.begin(pool)
        assert pool.num_calls == expected


def test_a_move_of_nothing_is_over_at_once() -> None:
    task = CopyTask(whole_move(Memories(1, (64,)), 0), CpuCopyEngine(), takes_checksums=True)
    task.begin()
    assert task.is_copied()
    assert (task.finish().problem, len(task.finish().checksums)) == ("", 0)


def test_what_goes_wrong_on_the_way_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    memories = Memories(1, (4096,))
    monkeypatch.setattr(tasks.CpuBlockMove, "run", fail)
    result = run(CopyTask(memories.move(to_host=True), CpuCopyEngine(), takes_checksums=True))
    assert "no room" in result.problem


@pytest.mark.parametrize("count", [2, 5])
def test_marks_for_other_blocks_than_those_that_move_are_refused(count: int) -> None:
    memories = Memories(1, (4096,))
    before = [tensor.clone() for tensor in memories.host.tensors]
    with pytest.raises(ValueError, match=f"3 blocks, 3 slots, {count} marks: one for each"):
        tasks.CpuBlockMove(whole_move(memories, 3), np.ones(count, np.bool_), CopyPool())
    assert all(map(torch.equal, memories.host.tensors, before))
