"""Copies between a GPU and pinned host memory, against one plain copy of as many bytes. Row GPU.

Pages of 4 KiB to 4 MiB, 16 to 50,000 of them, contiguous and scattered; both layouts; by copy
engines and by the kernel; alone and during a matrix product, with the slowdown of that product.
Needs a GPU. `python -m bench.bench_gpu_copies [--smoke] [--write FILE]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.worker.copies.cuda import CudaCopyEngine, KernelChoice
from kvcache.worker.copies.engine import CopyEngine
from kvcache.worker.copies.measurement import NEVER_BYTES, chosen, find_kernel, measure_cuda

PAGE_BYTES = (4096, 16384, 65536, 262144, 1048576, 4194304)
NUM_PAGES = (16, 256, 4096, 50_000)
MAX_BYTES = 8 * 2**30
"""Limit of one copy; larger combinations are skipped."""

NUM_LAYERS = 32
MATRIX = 8192
WAIT_S = 60.0
GOALS = ((65536, 0.8), (16384, 0.6), (0, 0.0))
"""Goals: share of a plain copy, by page size."""


@dataclass(frozen=True)
class GpuRow:
    """One line. Bandwidths in bytes per second; `stall`: slowdown of a concurrent matrix
    product."""

    direction: str
    layout: str
    way: str
    page_bytes: int
    num_pages: int
    alone: float
    concurrent: float
    plain: float
    stall: float

    @property
    def share(self) -> float:
        """Share of a plain copy, without concurrent work."""
        return self.alone / self.plain

    def cells(self) -> tuple[str, ...]:
        """Write the line for a table."""
        goal = next(share for size, share in GOALS if self.page_bytes >= size)
        return (
            self.direction,
            self.layout,
            self.way,
            f"{self.page_bytes // 1024} KiB",
            f"{self.num_pages:,}",
            *(f"{speed / 1e9:.1f}" for speed in (self.alone, self.concurrent, self.plain)),
            f"{self.share:.0%}",
            f">= {goal:.0%}" if goal else "",
            f"{self.stall:.1%}",
        )


HEADINGS = (
    *("direction", "layout", "way", "page", "pages", "GB/s", "GB/s while computing", "plain GB/s"),
    *("share", "goal", "stall (goal <= 3%)"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few small sizes")
    parser.add_argument("--write", type=Path, help="write the table as Markdown")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to measure", file=sys.stderr)
        return
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in measure_gpu_copies(torch.device("cuda", 0), is_smoke=options.smoke):
        lines.append("| " + " | ".join(row.cells()) + " |")
        print(lines[-1], flush=True)
    if options.write:
        head = ["# Copies on a GPU", "", *facts(torch.device("cuda", 0)), ""]
        options.write.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


def facts(device: torch.device) -> list[str]:
    """Describe the machine, and the choices of the start-up measurement."""
    found = find_kernel(device)
    choice = chosen(measure_cuda(device, found.kernel))
    return [
        f"- GPU: {torch.cuda.get_device_name(device)}; torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}",
        f"- The kernel: {found.why_not or 'runs'}; the start-up measurement uses it for pieces "
        f"below {choice.from_host_below_bytes} bytes from the host, "
        f"{choice.on_device_below_bytes} on the device",
    ]


def measure_gpu_copies(device: torch.device, *, is_smoke: bool = False) -> Iterator[GpuRow]:
    """Yield every line, smallest pages first."""
    kernel = find_kernel(device).kernel
    ways: dict[str, CopyEngine] = {"copy units": CudaCopyEngine(device, KernelChoice(0, 0))}
    if kernel is not None:
        choice = KernelChoice(NEVER_BYTES, NEVER_BYTES)
        ways["kernel"] = CudaCopyEngine(device, choice, kernel)
    for engine in ways.values():
        engine.on_forward_end()  # before the first, copies wait for whatever is queued
    sizes, counts = (PAGE_BYTES[:2], NUM_PAGES[:1]) if is_smoke else (PAGE_BYTES, NUM_PAGES)
    product = _Product(device, MATRIX // 8 if is_smoke else MATRIX)
    for page_bytes in sizes:
        for num_pages in counts:
            if page_bytes * num_pages > MAX_BYTES:
                continue
            for layout in ("block first", "layer first"):
                case = _Case.make(device, layout, page_bytes, num_pages)
                for way, engine in ways.items():
                    for direction in ("host to device", "device to host"):
                        if way == "kernel" and direction == "device to host":
                            continue
                        yield case.measure(direction, way, engine, product)
                del case


class _Product:
    """Matrix products on the compute stream, to measure how copies slow them down."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._left = torch.randn((size, size), device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._left)
        self.seconds = min(self._timed(20) for _ in range(3)) / 20

    def _timed(self, count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            torch.mm(self._left, self._left, out=self._out)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def queue(self, seconds: float) -> Callable[[], float]:
        """Queue products for about this long; return a function for their slowdown, as a
        share."""
        count = max(4, int(seconds / self.seconds))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            torch.mm(self._left, self._left, out=self._out)
        last.record()

        def stall() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3 / count / self.seconds - 1

        return stall


@dataclass(frozen=True, eq=False)
class _Case:
    """One size: tensors of the device with their host partners, and ids that jump about."""

    layout: str
    page_bytes: int
    device_ids: Int32Array
    host_ids: Int32Array
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def make(cls, device: torch.device, layout: str, page_bytes: int, num_pages: int) -> _Case:
        """`page_bytes` is one block over all layers. Layer first, each layer has its own tensor."""
        num_tensors = 1 if layout == "block first" else NUM_LAYERS
        width = page_bytes // num_tensors
        num_rows = 2 * num_pages
        pairs = tuple(
            (
                torch.zeros((num_rows, width), dtype=torch.uint8, device=device),
                torch.zeros((num_pages, width), dtype=torch.uint8, pin_memory=True),
            )
            for _ in range(num_tensors)
        )
        rng = np.random.default_rng(num_pages)
        device_ids = int32_array(rng.permutation(num_rows)[:num_pages])
        return cls(layout, page_bytes, device_ids, int32_array(rng.permutation(num_pages)), pairs)

    def measure(self, direction: str, way: str, engine: CopyEngine, product: _Product) -> GpuRow:
        """Copy alone, plainly, and during matrix products."""
        is_up = direction == "host to device"
        num_bytes = self.page_bytes * len(self.host_ids)
        seconds = _least(lambda: self._copy(engine, is_up=is_up))
        plain = _least(lambda: self._copy_plainly(is_up=is_up))
        repetitions = max(1, int(0.2 / seconds))
        self._copy(engine, is_up=is_up)
        torch.cuda.synchronize()
        stall = product.queue(repetitions * seconds)
        concurrent = _timed(lambda: [self._copy(engine, is_up=is_up) for _ in range(repetitions)])
        return GpuRow(
            direction,
            self.layout,
            way,
            self.page_bytes,
            len(self.host_ids),
            num_bytes / seconds,
            num_bytes * repetitions / concurrent,
            num_bytes / plain,
            stall(),
        )

    def _copy(self, engine: CopyEngine, *, is_up: bool) -> None:
        copies = [
            engine.copy_blocks(host, self.host_ids, rows, self.device_ids)
            if is_up
            else engine.copy_blocks(rows, self.device_ids, host, self.host_ids)
            for rows, host in self.pairs
        ]
        if not all(copy.wait(WAIT_S) for copy in copies):
            raise RuntimeError("a copy does not end")

    def _copy_plainly(self, *, is_up: bool) -> None:
        for rows, host in self.pairs:
            part = rows[: len(host)]
            (part if is_up else host).copy_(host if is_up else part, non_blocking=True)
        torch.cuda.synchronize()


def _timed(work: Callable[[], object]) -> float:
    from time import perf_counter

    start = perf_counter()
    work()
    return perf_counter() - start


def _least(work: Callable[[], object]) -> float:
    work()
    return min(_timed(work) for _ in range(5))


if __name__ == "__main__":
    main()
