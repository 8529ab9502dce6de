"""The CUDA engine on a GPU: every way of copying against a naive model, and what waits for what.

Long work is a kernel that spins; without the wait for it, bytes would be wrong. Without a GPU, all
of it is skipped; tests that need none are in test_cuda_runtime.py and test_triton_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvcache.base.arrays import int32_array
from kvcache.worker import CudaCopyEngine, make_copy_engine
from kvcache.worker.copies import cuda as cuda_engine_module
from kvcache.worker.copies.cuda import KernelChoice, Pieces, SourceOrder, loaded_cuda_runtime
from kvcache.worker.copies.measurement import (
    NEVER_BYTES,
    MeasureLimits,
    chosen,
    find_kernel,
    measure_cuda,
)
from kvcache.worker.host_memory import host_pool as host_pool_module
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.segment import SegmentShape
from tests.worker.tier_support import make_segment
from tests.worker.worker_support import ids, random_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: NOT TESTED"),
    # Triton's deprecation warnings are not errors of ours.
    pytest.mark.filterwarnings("default::UserWarning", "default::DeprecationWarning"),
]

DEVICE = torch.device("cuda", 0)
LONG_CYCLES = 2_000_000_000
"""About a second."""

WAIT_S = 60.0
MAKERS: dict[str, Callable[[], CudaCopyEngine]] = {
    "copy units": lambda: CudaCopyEngine(DEVICE, KernelChoice(0, 0)),
    "runs": lambda: CudaCopyEngine(DEVICE, KernelChoice(0, 0)),
    "kernel": lambda: CudaCopyEngine(
        DEVICE, KernelChoice(NEVER_BYTES, NEVER_BYTES), find_kernel(DEVICE).kernel
    ),
}


@pytest.fixture(params=list(MAKERS))
def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaCopyEngine]:
    """An engine that uses only one method, if it can be chosen."""
    if request.param == "runs":
        monkeypatch.setattr(cuda_engine_module, "loaded_cuda_runtime", lambda: None)
    if request.param == "kernel" and find_kernel(DEVICE).kernel is None:
        pytest.skip(f"NO KERNEL: {find_kernel(DEVICE).why_not}")
    made = MAKERS[request.param]()
    yield made
    made.close()


def rows_of(
    rng: np.random.Generator, num_rows: int, width: int, gap: int, *, on_device: bool
) -> torch.Tensor:
    """Rows with `gap` bytes between them, on the device or in pinned memory."""
    whole = random_bytes(rng, num_rows, width + gap)
    placed = whole.to(DEVICE) if on_device else whole.pin_memory()
    return placed.as_strided((num_rows, width), (width + gap, 1), 0)


def pairs(rng: np.random.Generator, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids below 24 and 20: scattered, in one run, or in a few."""
    count = int(rng.integers(1, 20))
    if seed % 3 == 0:
        return rng.permutation(24)[:count], rng.permutation(20)[:count]
    first, second = np.arange(count) + 24 - count, np.arange(count)
    if seed % 3 == 2:
        second = np.roll(second, count // 2)
    return first, second


@pytest.mark.parametrize("gap", [0, 16, 40])
@pytest.mark.parametrize("width", [1, 16, 24, 513, 4096, 65536])
@pytest.mark.parametrize(("from_device", "to_device"), [(False, True), (True, False), (True, True)])
def test_every_way_in_every_direction_equals_the_naive_model(
    engine: CudaCopyEngine, width: int, gap: int, from_device: bool, to_device: bool
) -> None:
    for seed in range(6):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        source_gap, target_gap = (gap if side else 0 for side in (from_device, to_device))
        sources = rows_of(rng, 24, width, source_gap, on_device=from_device)
        targets = rows_of(rng, 20, width, target_gap, on_device=to_device)
        from_ids, to_ids = pairs(rng, seed)
        expected = targets.cpu().clone()
        expected[to_ids.tolist()] = sources.cpu()[from_ids.tolist()]
        copy = engine.copy_blocks(sources, int32_array(from_ids), targets, int32_array(to_ids))
        assert copy.wait(WAIT_S)
        assert copy.is_done()
        assert torch.equal(targets.cpu(), expected)


@pytest.mark.parametrize("width", [7, 4096])
def test_copies_within_read_every_source_before_they_write(
    engine: CudaCopyEngine, width: int
) -> None:
    rows = rows_of(np.random.default_rng(1), 8, width, 0, on_device=True)
    before = rows.cpu().clone()
    engine.copy_within(rows, ids(0, 1, 2, 3), ids(1, 2, 3, 0))
    engine.copy_within(rows, ids(6), ids(7))
    assert torch.equal(rows.cpu(), before[[3, 0, 1, 2, 4, 5, 6, 6]])


@pytest.mark.parametrize(("width", "gap"), [(7, 0), (20, 4), (4096, 0), (64, 16)])
def test_zeroes_leave_what_lies_between_rows(engine: CudaCopyEngine, width: int, gap: int) -> None:
    rng = np.random.default_rng(2)
    whole = random_bytes(rng, 8, width + gap).to(DEVICE)
    expected = whole.cpu().clone()
    expected[[1, 5], :width] = 0
    engine.zero_blocks(whole.as_strided((8, width), (width + gap, 1), 0), ids(5, 1))
    assert torch.equal(whole.cpu(), expected)


def test_a_store_waits_for_the_forward_that_writes_its_blocks(engine: CudaCopyEngine) -> None:
    rows, host = torch.zeros((4, 4096), dtype=torch.uint8, device=DEVICE), pinned(4, 4096)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)  # not the current stream of the copy's call
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        rows.fill_(7)
        engine.on_forward_end()
    assert not engine.is_compute_idle()
    assert engine.copy_blocks(rows, ids(0, 1, 2, 3), host, ids(3, 2, 1, 0)).wait(WAIT_S)
    assert host.unique().tolist() == [7]
    assert engine.is_compute_idle()


def test_a_store_waits_for_a_forward_though_another_stream_is_further(
    engine: CudaCopyEngine,
) -> None:
    rows, host = torch.zeros((4, 4096), dtype=torch.uint8, device=DEVICE), pinned(4, 4096)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        torch.cuda._sleep(LONG_CYCLES)
        rows.fill_(7)
        engine.on_forward_end()
    engine.on_forward_end()  # in the stream of the test, which has nothing to do
    assert engine.copy_blocks(rows, ids(0, 1, 2, 3), host, ids(3, 2, 1, 0)).wait(WAIT_S)
    assert host.unique().tolist() == [7]


def test_a_load_waits_for_the_zeroes_and_copies_before_it(engine: CudaCopyEngine) -> None:
    rows = torch.zeros((4, 4096), dtype=torch.uint8, device=DEVICE)
    host = pinned(4, 4096).fill_(9)
    engine.on_forward_end()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        engine.zero_blocks(rows, ids(0, 1, 2, 3))
        engine.copy_within(rows, ids(0), ids(3))
    assert engine.copy_blocks(host, ids(0, 1, 2, 3), rows, ids(0, 1, 2, 3)).wait(WAIT_S)
    stream.synchronize()
    assert rows.cpu().unique().tolist() == [9]


def test_a_transfer_does_not_wait_for_forwards_that_began_after_it(engine: CudaCopyEngine) -> None:
    rows, host = torch.full((64, 4096), 5, dtype=torch.uint8, device=DEVICE), pinned(64, 4096)
    order = int32_array(np.random.default_rng(3).permutation(64))
    engine.on_forward_end()
    torch.cuda.synchronize()
    engine.copy_blocks(rows, order, host, order).wait(WAIT_S)  # compiled, allocated
    host.zero_()
    later = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        torch.cuda._sleep(10 * LONG_CYCLES)
        later.record()
    assert engine.copy_blocks(rows, order, host, order).wait(WAIT_S)
    assert not later.query()
    assert host.unique().tolist() == [5]
    torch.cuda.synchronize()


def test_a_wait_ends_at_its_deadline_and_can_be_repeated(engine: CudaCopyEngine) -> None:
    rows, host = torch.zeros((2, 64), dtype=torch.uint8, device=DEVICE), pinned(2, 64)
    torch.cuda._sleep(LONG_CYCLES)
    engine.on_forward_end()
    copy = engine.copy_blocks(rows, ids(0, 1), host, ids(1, 0))
    assert not copy.wait(0.0)
    assert not copy.is_done()
    assert copy.wait(WAIT_S)


def test_ids_and_descriptors_live_until_they_have_been_used(engine: CudaCopyEngine) -> None:
    """Many copies are queued after a forward; their arguments are not overwritten."""
    rng = np.random.default_rng(4)
    host, rows = random_bytes(rng, 512, 256).pin_memory(), torch.zeros((512, 256), device=DEVICE)
    rows = rows.to(torch.uint8)
    expected = torch.zeros((512, 256), dtype=torch.uint8)
    torch.cuda._sleep(LONG_CYCLES)
    engine.on_forward_end()
    copies = []
    for _ in range(200):
        from_ids, to_ids = rng.permutation(512)[:100], rng.permutation(512)[:100]
        expected[to_ids.tolist()] = host[from_ids.tolist()]
        copies.append(engine.copy_blocks(host, int32_array(from_ids), rows, int32_array(to_ids)))
        random_bytes(rng, 64, 64).pin_memory()  # asks torch for the same pinned memory again
    assert all(copy.wait(WAIT_S) for copy in copies)
    assert torch.equal(rows.cpu(), expected)


def test_memory_that_was_registered_in_pieces_is_copied_both_ways(
    engine: CudaCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool_module, "MAX_REGISTERED_BYTES", 2 * 4096)
    shape = SegmentShape(
        "layout", 0, num_slots=16, widths=(1024,), digest_bytes=4, max_block_tokens=4
    )
    pool = HostPool(make_segment(shape), is_pinned=True)
    try:
        slots, blocks = int32_array(range(16)), int32_array(np.arange(16)[::-1])
        assert len(pool.pieces(0, slots)) == 2
        rows = random_bytes(np.random.default_rng(5), 16, 1024).to(DEVICE)
        back = torch.zeros_like(rows)
        for sources, targets in ((rows, pool.tensors[0]), (pool.tensors[0], back)):
            for part in pool.pieces(0, slots):
                copy = engine.copy_blocks(sources, blocks[part], targets, blocks[part])
                assert copy.wait(WAIT_S)
        assert torch.equal(back, rows)
        assert torch.equal(pool.tensors[0], rows.cpu())
    finally:
        engine.close()
        pool.close()


def test_memory_that_was_not_registered_is_loaded(engine: CudaCopyEngine) -> None:
    host = random_bytes(np.random.default_rng(6), 300, 4096)
    order = int32_array(np.random.default_rng(7).permutation(300))
    rows = torch.zeros((300, 4096), dtype=torch.uint8, device=DEVICE)
    copy = engine.copy_blocks(host, order, rows, int32_array(range(300)))
    assert copy.wait(WAIT_S)
    assert torch.equal(rows.cpu(), host[order.tolist()])


def test_an_address_that_cuda_does_not_know_is_an_error_in_its_words() -> None:
    runtime = loaded_cuda_runtime()
    if runtime is None or not runtime.has_batches:
        pytest.skip("NO BATCHES IN THIS CUDA RUNTIME: their errors are NOT TESTED")
    nowhere, size = np.zeros(1, np.uint64), np.full(1, 64, np.uint64)
    stream = torch.cuda.Stream(DEVICE)
    with pytest.raises(
        RuntimeError, match=r"^cudaMemcpyBatchAsync of 1 pieces.* failed: cudaError"
    ):
        runtime.copy_pieces(
            Pieces(nowhere, nowhere, size), SourceOrder.STREAM, int(stream.cuda_stream)
        )
    assert torch.ones(4, device=DEVICE).sum().item() == 4


def test_what_was_measured_is_what_the_engine_is_made_with() -> None:
    found = find_kernel(DEVICE)
    limits = MeasureLimits(num_bytes=2**22, num_repetitions=2)
    measured = measure_cuda(DEVICE, found.kernel, [2048], limits)
    assert all(figure.bytes_per_s > 0 for figure in measured.figures)
    assert measured.way("device to host", 2048) == "copy units"
    choice = chosen(measured)
    assert (choice.from_host_below_bytes > 0) <= (found.kernel is not None)
    engine = make_copy_engine(DEVICE)
    rows, host = torch.zeros((4, 2048), dtype=torch.uint8, device=DEVICE), pinned(4, 2048).fill_(3)
    assert engine.copy_blocks(host, ids(0, 1, 2, 3), rows, ids(2, 0, 3, 1)).wait(WAIT_S)
    assert rows.cpu().unique().tolist() == [3]
    engine.close()


def test_the_kernel_runs_where_triton_and_a_compiler_are() -> None:
    pytest.importorskip("triton", reason="NO TRITON: the kernel is NOT TESTED")
    found = find_kernel(DEVICE)
    assert found.kernel is not None, found.why_not


def pinned(num_rows: int, width: int) -> torch.Tensor:
    return torch.zeros((num_rows, width), dtype=torch.uint8).pin_memory()
