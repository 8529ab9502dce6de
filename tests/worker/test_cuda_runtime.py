"""Batches and rectangles, on a library with the CUDA runtime's prototypes.

Needs no CUDA: the library copies this process's memory. `test_cuda_engine.py` uses the real one if
there is one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache.base.arrays import int32_array
from kvcache.worker.copies.cuda import (
    MIN_RECTANGLE_ROWS,
    CudaRuntime,
    RowCopy,
    SourceOrder,
    _copy_runs,
    describe_copy,
    loaded_cuda_runtime,
)
from tests.worker.worker_support import ids, random_bytes

SOURCE = Path(__file__).with_name("cuda_shim.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
STREAM = 0x5EED

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="NO C COMPILER: the calls of the CUDA runtime are NOT TESTED"
)


@dataclass(frozen=True)
class Shim:
    library: ctypes.CDLL
    runtime: CudaRuntime

    def number(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def set_number(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value


@pytest.fixture(scope="module", params=[12080, 13000])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("shim") / f"shim{request.param}.so"
    flags = ["-shared", "-fPIC", "-O1", f"-DSHIM_VERSION={request.param}"]
    subprocess.run([COMPILER, *flags, "-o", path, SOURCE], check=True, timeout=120)
    return path


@pytest.fixture
def shim(built: Path, tmp_path: Path) -> Shim:
    """A separate copy for every test: a library is loaded once, and keeps its counters."""
    library = ctypes.CDLL(shutil.copy(built, tmp_path / built.name))
    return Shim(library, CudaRuntime(library))


def gapped(rng: np.random.Generator, num_rows: int, width: int, gap: int) -> torch.Tensor:
    """Rows with `gap` bytes between them, as pools of a block-first layout are."""
    whole = random_bytes(rng, num_rows, width + gap)
    return whole.as_strided((num_rows, width), (width + gap, 1), gap // 2)


def copy(runtime: CudaRuntime, *arguments: object) -> None:
    copies = describe_copy(RowCopy(*arguments))  # type: ignore[arg-type]
    for rectangle in copies.rectangles:
        runtime.copy_rectangle(rectangle, STREAM)
    runtime.copy_pieces(copies.pieces, SourceOrder.STREAM, STREAM)


@needs_compiler
@pytest.mark.parametrize("width", [1, 24, 513, 4096])
@pytest.mark.parametrize("gaps", [(0, 0), (16, 0), (0, 40), (8, 24)])
def test_batches_and_rectangles_equal_the_naive_model(
    shim: Shim, width: int, gaps: tuple[int, int]
) -> None:
    for seed in range(10):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        sources, destinations = gapped(rng, 24, width, gaps[0]), gapped(rng, 20, width, gaps[1])
        count = int(rng.integers(0, 20))
        if seed % 3:
            from_ids, to_ids = rng.permutation(24)[:count], rng.permutation(20)[:count]
        else:
            from_ids = np.arange(count) + int(rng.integers(0, 24 - count + 1))
            to_ids = np.arange(count) + int(rng.integers(0, 20 - count + 1))
            if count > 8:
                to_ids[3:6] = to_ids[3:6][::-1]
        whole = torch.as_strided(destinations, (20 * (width + gaps[1]),), (1,), 0)
        expected = whole.clone()
        rows = expected.as_strided(
            destinations.shape, destinations.stride(), destinations.storage_offset()
        )
        rows[to_ids.tolist()] = sources[from_ids.tolist()]
        copy(shim.runtime, sources, int32_array(from_ids), destinations, int32_array(to_ids))
        assert torch.equal(whole, expected)


@needs_compiler
def test_many_scattered_rows_are_one_call(shim: Shim) -> None:
    rng = np.random.default_rng(1)
    sources, destinations = random_bytes(rng, 5000, 64), random_bytes(rng, 5000, 64)
    order = int32_array(rng.permutation(5000))
    copy(shim.runtime, sources, order, destinations, int32_array(range(5000)))
    assert torch.equal(destinations, sources[order.tolist()])
    assert shim.number("num_calls") == 1


@needs_compiler
def test_a_run_of_rows_with_gaps_is_one_call(shim: Shim) -> None:
    rng = np.random.default_rng(2)
    sources, destinations = gapped(rng, 64, 32, 16), gapped(rng, 64, 32, 0)
    run = int32_array(range(64))
    copy(shim.runtime, sources, run, destinations, run)
    assert torch.equal(sources, destinations)
    assert shim.number("num_calls") == 1


@needs_compiler
@pytest.mark.parametrize("order", list(SourceOrder))
def test_the_order_of_reads_and_the_stream_are_passed_on(shim: Shim, order: SourceOrder) -> None:
    rows = random_bytes(np.random.default_rng(3), 2, 8)
    copies = describe_copy(RowCopy(rows, ids(0), torch.zeros_like(rows), ids(1)))
    shim.runtime.copy_pieces(copies.pieces, order, STREAM)
    assert (shim.number("last_order"), shim.number("last_hints")) == (int(order), 0)
    assert ctypes.c_void_p.in_dll(shim.library, "last_stream").value == STREAM


@needs_compiler
def test_an_error_says_what_cuda_says_and_is_taken_back(shim: Shim) -> None:
    rows = random_bytes(np.random.default_rng(4), 6, 8)
    copies = describe_copy(RowCopy(rows, ids(0, 2, 4), torch.zeros_like(rows), ids(5, 3, 1)))
    ctypes.c_size_t.in_dll(shim.library, "fail_at").value = 2
    place = ", piece 2" if shim.runtime.version < 13000 else ""
    message = (
        rf"^cudaMemcpyBatchAsync of 3 pieces{place} failed: cudaErrorInvalidValue \(1\): "
        r"invalid argument$"
    )
    with pytest.raises(RuntimeError, match=message):
        shim.runtime.copy_pieces(copies.pieces, SourceOrder.STREAM, STREAM)
    assert shim.number("num_errors_taken") == 1


@needs_compiler
def test_the_default_stream_is_refused_before_anything_is_queued(shim: Shim) -> None:
    rows = random_bytes(np.random.default_rng(5), 2, 8)
    copies = describe_copy(RowCopy(rows, ids(0), torch.zeros_like(rows), ids(1)))
    with pytest.raises(RuntimeError, match=r"^copies in batches need a stream of their own"):
        shim.runtime.copy_pieces(copies.pieces, SourceOrder.STREAM, 0)
    assert shim.number("num_calls") == 0


@needs_compiler
def test_an_older_driver_has_no_batches(shim: Shim) -> None:
    assert shim.runtime.has_batches
    shim.set_number("driver_version", 12040)
    assert not CudaRuntime(shim.library).has_batches


@needs_compiler
def test_memory_that_kernels_do_not_see_has_no_address_for_them(shim: Shim) -> None:
    assert shim.runtime.device_address(0x1000) == 0x1000
    assert shim.runtime.device_address(0x1001) is None
    assert shim.number("num_errors_taken") == 1


def test_no_other_cuda_runtime_is_loaded_than_the_one_of_torch() -> None:
    if torch.version.cuda is None:
        assert loaded_cuda_runtime() is None
    else:
        runtime = loaded_cuda_runtime()
        assert runtime is None or runtime.version // 1000 == int(torch.version.cuda.split(".")[0])


def test_short_runs_of_rows_with_gaps_travel_with_the_batch() -> None:
    rows = gapped(np.random.default_rng(6), 40, 16, 16)
    run = int32_array([*range(MIN_RECTANGLE_ROWS - 1), *range(10, 10 + MIN_RECTANGLE_ROWS)])
    copies = describe_copy(RowCopy(rows, run, torch.zeros(40, 16, dtype=torch.uint8), run))
    assert len(copies.pieces) == MIN_RECTANGLE_ROWS - 1
    assert [r.num_rows for r in copies.rectangles] == [MIN_RECTANGLE_ROWS]


def test_nothing_to_copy_is_no_piece() -> None:
    empty, rows = torch.zeros(4, 0, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8)
    for nothing in (
        describe_copy(RowCopy(empty, ids(1), empty, ids(2))),
        describe_copy(RowCopy(rows, *(ids(), rows, ids()))),
    ):
        assert (len(nothing.pieces), nothing.rectangles) == (0, ())


def test_pieces_are_as_long_as_the_runs_that_nothing_interrupts() -> None:
    solid, gapped = (torch.zeros(9, width, dtype=torch.uint8)[:, :10] for width in (10, 20))
    two_runs = ids(0, 1, 2, 8), ids(4, 5, 6, 7)
    assert RowCopy(solid, two_runs[0], solid, two_runs[1]).mean_piece_bytes == 20
    assert RowCopy(gapped, two_runs[0], solid, two_runs[1]).mean_piece_bytes == 10


def test_runs_end_where_either_side_jumps() -> None:
    rows = torch.zeros(12, 8, dtype=torch.uint8)
    starts, counts = RowCopy(rows, ids(4, 5, 6, 9, 10), rows, ids(1, 2, 5, 6, 7)).runs()
    assert (starts.tolist(), counts.tolist()) == ([0, 2, 3], [2, 1, 2])
    starts, counts = RowCopy(rows, ids(), rows, ids()).runs()
    assert (starts.tolist(), counts.tolist()) == ([], [])


@pytest.mark.parametrize("gap", [0, 8])
def test_without_batches_each_run_is_copied(gap: int) -> None:
    rng = np.random.default_rng(gap)
    sources = gapped(rng, 12, 16, gap)
    destinations = torch.zeros(12, 16, dtype=torch.uint8)
    _copy_runs(RowCopy(sources, ids(4, 5, 6, 9, 10), destinations, ids(1, 2, 5, 6, 7)))
    expected = torch.zeros_like(destinations)
    expected[[1, 2, 5, 6, 7]] = sources[[4, 5, 6, 9, 10]]
    assert torch.equal(destinations, expected)
