"""Measurements, and decisions from them. Clocks are virtual: no test depends on this machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcache.base.arrays import Int32Array
from kvcache.base.clock import VirtualClock
from kvcache.worker import CpuCopyEngine
from kvcache.worker.copies.cuda import KernelChoice
from kvcache.worker.copies.engine import PendingCopy
from kvcache.worker.copies.measurement import (
    CPU_PAGE_BYTES,
    PLAIN,
    CopyFigure,
    CopyMeasurement,
    Crossover,
    MeasureLimits,
    chosen,
    crossover_bytes,
    crossover_of,
    find_kernel,
    measure_cpu,
)

SMALL = MeasureLimits(num_bytes=1 << 18, num_repetitions=3)


@pytest.mark.parametrize(
    ("small", "large", "limit"),
    [
        ((1, 2, 4, 8), (3, 3, 3, 3), 300),
        ((1, 1, 1, 1), (2, 2, 2, 2), 800),
        ((2, 2, 2, 2), (1, 1, 1, 1), 0),
        ((20, 20, 20, 20), (25, 21, 21, 21), 200),  # a twentieth is noise
        ((2, 2, 2, 2), (1, 3, 2, 1), 300),  # slower once more in between: only above counts
    ],
)
def test_the_large_way_begins_where_it_is_never_slower_any_more(
    small: tuple[int, ...], large: tuple[int, ...], limit: int
) -> None:
    sizes = (100, 200, 300, 400)
    seconds = [dict(zip(sizes, map(float, way), strict=True)) for way in (small, large)]
    assert crossover_bytes(*seconds) == limit


def test_every_way_is_measured_at_every_size_and_against_a_plain_copy() -> None:
    measurement = measure_cpu([1536, 256, 0], SMALL, VirtualClock())
    sizes = sorted({*CPU_PAGE_BYTES, 1536})
    expected = {(way, size) for way in ("kernel", PLAIN) for size in sizes}
    assert {(f.way, f.page_bytes) for f in measurement.figures} == expected
    assert len(measurement.figures) == len(expected)
    assert all(f.num_bytes >= 2 * f.page_bytes for f in measurement.figures)
    assert measurement.device == "cpu"


def test_pages_are_here_and_there_and_both_ways_move_the_same_bytes() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    class Watched(CpuCopyEngine):
        def copy_blocks(
            self, sources: torch.Tensor, source_ids: Int32Array, *rest: object
        ) -> PendingCopy:
            seen.append((source_ids.tolist(), rest[1].tolist()))  # type: ignore[attr-defined]
            return super().copy_blocks(sources, source_ids, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcache.worker.copies.measurement.CpuCopyEngine", Watched)
        measure_cpu(limits=SMALL, clock=VirtualClock())
    pages = SMALL.num_bytes // 256
    first = next(ids for ids in seen if len(ids[0]) == pages)
    assert sorted(first[0]) == sorted(first[1]) == list(range(pages))
    neighbours = (np.diff(first[0]) == 1) & (np.diff(first[1]) == 1)
    assert neighbours.sum() < pages // 50


def figures(direction: str, **seconds: float) -> tuple[CopyFigure, ...]:
    return tuple(
        CopyFigure(direction, way.replace("_", " "), 4096, 8192, taken)  # type: ignore[arg-type]
        for way, taken in seconds.items()
    )


def test_the_crossover_is_where_the_dearer_page_no_longer_matters() -> None:
    sizes = (4096, 8192, 16384, 65536)
    found = tuple(
        CopyFigure("host to device", way, size, 2 * size, 2 * (page_s + byte_s * size))
        for way, page_s, byte_s in (("kernel", 0.0, 2.0), ("copy units", 10_000.0, 1.0))
        for size in sizes
    )
    crossover = crossover_of("host to device", "kernel", "copy units", found)
    assert crossover == Crossover("host to device", "kernel", "copy units", 16384)
    measurement = CopyMeasurement("x", found, (crossover,))
    figure = measurement.figure("host to device", "kernel", 4096)
    assert figure.bytes_per_s == 0.5
    assert measurement.way("host to device", 4096) == "kernel"
    assert measurement.way("host to device", 16384) == "copy units"


def test_a_direction_with_one_way_goes_that_way() -> None:
    measured = CopyMeasurement("x", figures("device to host", plain=1.0, copy_units=2.0), ())
    assert measured.way("device to host", 1) == "copy units"
    with pytest.raises(KeyError, match="host to device"):
        measured.way("host to device", 1)


def test_the_kernel_is_used_below_the_sizes_that_were_measured() -> None:
    measured = CopyMeasurement(
        "x",
        (),
        (
            Crossover("host to device", "kernel", "copy units", 16384),
            Crossover("device to device", "kernel", "torch", 8192),
        ),
    )
    assert chosen(measured) == KernelChoice(16384, 8192)
    assert chosen(replace(measured, crossovers=measured.crossovers[1:])) == KernelChoice(0, 8192)
    assert chosen(CopyMeasurement("x", (), ())) == KernelChoice(0, 0)


def test_without_a_gpu_there_is_no_kernel_and_it_is_said_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("A CUDA DEVICE IS THERE")
    found = find_kernel(torch.device("cuda"))
    assert found.kernel is None
    assert found.why_not.startswith(("triton cannot be imported (", "it does not run here ("))
    assert found.why_not.count("\n") == 0


def test_no_time_at_all_is_no_error() -> None:
    assert CopyFigure("host to host", "kernel", 1, 1, 0.0).bytes_per_s == float("inf")
