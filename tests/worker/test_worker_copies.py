"""Copy engines against a naive model, and block tables against nested lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache.base.arrays import int32_array
from kvcache.base.errors import BlockError, ConfigurationError, MalformedMessageError
from kvcache.protocol.commands import BlockTablePatch
from kvcache.worker import CopyEngine, CpuCopyEngine, CudaCopyEngine, make_copy_engine
from kvcache.worker.block_tables import BlockTables
from tests.worker.worker_support import ids, patch, random_bytes

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


def devices() -> list[object]:
    has_cuda = torch.cuda.is_available()
    skip = pytest.mark.skipif(not has_cuda, reason="NO CUDA DEVICE: CudaCopyEngine is NOT TESTED")
    return ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, skip])]


def naive_copy(
    sources: torch.Tensor, source_ids: list[int], destinations: torch.Tensor, targets: list[int]
) -> torch.Tensor:
    """The right result of a copy, row by row, from a snapshot."""
    before, after = sources.clone(), destinations.clone()
    for source, target in zip(source_ids, targets, strict=True):
        after[target] = before[source]
    return after


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("width", [16, 4096])
def test_copies_and_zeroes_equal_the_naive_model(device: str, width: int) -> None:
    engine: CopyEngine = make_copy_engine(torch.device(device))
    for seed in range(40):
        rng = np.random.default_rng(seed)
        print("seed", seed)
        rows = int(rng.integers(2, 24))
        pool = random_bytes(rng, rows, width).to(device)
        count = int(rng.integers(0, rows))
        if rng.random() < 0.5:
            targets = rng.permutation(rows)[:count]
        else:
            targets = np.arange(count) + int(rng.integers(0, rows - count + 1))
        shift = int(rng.integers(-2, 3))
        sources = rng.integers(0, rows, count) if rng.random() < 0.5 else (targets + shift) % rows
        expected = naive_copy(pool, sources.tolist(), pool, targets.tolist())
        engine.copy_within(pool, int32_array(sources), int32_array(targets))
        assert torch.equal(pool, expected)
        zeroed = rng.permutation(rows)[: rows // 3]
        expected[zeroed.tolist()] = 0
        engine.zero_blocks(pool, int32_array(zeroed))
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("device", devices())
def test_transfers_between_two_memories_equal_the_naive_model(device: str) -> None:
    engine = make_copy_engine(torch.device(device))
    for seed in range(40):
        rng = np.random.default_rng(seed)
        print("seed", seed)
        pool = random_bytes(rng, 20, 512).to(device)
        host = random_bytes(rng, 12, 512)
        if device == "cuda":
            host = host.pin_memory()
        count = int(rng.integers(1, 12))
        start = int(rng.integers(0, 20 - count))
        blocks = rng.permutation(20)[:count] if seed % 2 else np.arange(start, start + count)
        slots = rng.permutation(12)[:count] if seed % 3 else np.arange(count)
        expected = naive_copy(pool.cpu(), blocks.tolist(), host, slots.tolist())
        stored = engine.copy_blocks(pool, int32_array(blocks), host, int32_array(slots))
        assert stored.wait(TIMEOUT_S)
        assert stored.is_done()
        assert torch.equal(host, expected)
        back = naive_copy(host, slots.tolist(), pool.cpu(), blocks.tolist())
        engine.copy_blocks(host, int32_array(slots), pool, int32_array(blocks)).wait(TIMEOUT_S)
        assert torch.equal(pool.cpu(), back)
    engine.close()


def test_a_chain_of_copies_reads_every_source_before_writing() -> None:
    rows = torch.arange(5, dtype=torch.uint8).reshape(5, 1).repeat(1, 9000)
    CpuCopyEngine().copy_within(rows, ids(0, 1, 2, 3), ids(1, 2, 3, 4))
    assert rows[:, 0].tolist() == [0, 0, 1, 2, 3]


def test_a_swap_of_two_blocks_swaps_them() -> None:
    rows = torch.arange(3, dtype=torch.uint8).reshape(3, 1).repeat(1, 9000)
    CpuCopyEngine().copy_within(rows, ids(1, 2), ids(2, 1))
    assert rows[:, 0].tolist() == [0, 2, 1]


def test_without_cuda_the_cuda_engine_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("A CUDA DEVICE IS THERE")
    with pytest.raises(ConfigurationError, match="device cuda is not a usable CUDA device: set"):
        CudaCopyEngine(torch.device("cuda"))


def test_there_is_no_engine_for_other_devices() -> None:
    with pytest.raises(ConfigurationError, match=r"^no copy engine for device meta: use cpu or"):
        make_copy_engine(torch.device("meta"))


def make_tables() -> BlockTables:
    return BlockTables((5, 9), num_blocks=50, max_num_seqs=3, device=CPU)


def test_tables_have_as_many_columns_as_they_are_given() -> None:
    tables = make_tables()
    assert [tables[group].shape for group in range(len(tables))] == [(3, 5), (3, 9)]


def test_patches_equal_a_naive_model() -> None:
    tables = make_tables()
    model = [np.zeros((3, 5), np.int32), np.zeros((3, 9), np.int32)]
    rng = np.random.default_rng(5)
    for _ in range(200):
        runs = int(rng.integers(0, 5))
        slots, groups, firsts, counts, blocks = [], [], [], [], []
        for _ in range(runs):
            group, slot = int(rng.integers(2)), int(rng.integers(3))
            width = model[group].shape[1]
            first = int(rng.integers(0, width))
            count = 1 if rng.random() < 0.5 else int(rng.integers(0, width - first + 1))
            new = rng.integers(0, 50, count).tolist()
            model[group][slot, first : first + count] = new
            slots.append(slot)
            groups.append(group)
            firsts.append(first)
            counts.append(count)
            blocks.extend(new)
        change = BlockTablePatch(
            ids(*slots), ids(*groups), ids(*firsts), ids(*counts), ids(*blocks)
        )
        tables.validate(change)
        tables.apply(change)
        for group in range(2):
            assert np.array_equal(tables[group], model[group])
            assert np.array_equal(tables.tensor(group).numpy(), model[group])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (patch(3, [1]), BlockError, "slot 3..3, this rank has 0..2"),
        (patch(0, [1], group=2), BlockError, "group 2..2, this rank has 0..1"),
        (patch(0, [50]), BlockError, "block id 50..50, this rank has 0..49"),
        (patch(0, [1, 2], first=4), BlockError, "columns 4..5 of slot 0, group 0, which has 5"),
        (patch(0, [1], first=-1), BlockError, "columns -1..-1 of slot 0"),
        (
            BlockTablePatch(ids(0), ids(0), ids(0), ids(2), ids(1)),
            MalformedMessageError,
            r"announces \[2\] ids and brings 1",
        ),
        (
            BlockTablePatch(ids(0), ids(0, 1), ids(0), ids(1), ids(1)),
            MalformedMessageError,
            r"patch of 1 runs has \(2, 1, 1\) groups",
        ),
    ],
)
def test_patches_that_do_not_fit_are_refused(
    change: BlockTablePatch, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_tables().validate(change)
