"""Which copy engine a rank uses: by its device, and on CUDA by measurement.

The measurement uses the engines as in service: scattered pages of several sizes, a few milliseconds
each, and one plain copy of as many bytes. It finds the size from which one method is faster than
another. A worker measures at its start, which takes a fraction of a second and compiles the kernel,
so no step waits for that. `kvcache doctor` shows the results. Device memory is freed; pinned memory
stays in torch's pool. A kernel is used only if it has just moved bytes correctly on this device. On
CPU there is one method, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.clock import Clock, SystemClock
from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.worker.copies.cuda import CudaCopyEngine, KernelChoice, RowCopier
from kvcache.worker.copies.engine import CopyEngine, CpuCopyEngine

logger = get_logger(__name__)

Direction = Literal["host to host", "host to device", "device to host", "device to device"]
Way = Literal["kernel", "copy units", "torch", "plain"]

PLAIN: Way = "plain"
"""One copy of all bytes in one piece: the limit of the memory or the bus."""

CPU_PAGE_BYTES = (256, 1024, 4096, 16384, 65536)
CUDA_PAGE_BYTES = (4096, 16384, 65536, 262144)

MAX_WAIT_S = 60.0
"""Timeout of one copy; a longer one will never end."""

NOISE = 1.1
"""Methods that differ by less are equally fast."""

NEVER_BYTES = 2**62
"""A limit above every piece."""


@dataclass(frozen=True)
class MeasureLimits:
    """Limits of a measurement. `num_bytes` are copied at once, but at least two pages."""

    num_bytes: int = 32 * 2**20
    num_repetitions: int = 5
    seed: int = 0


@dataclass(frozen=True)
class CopyFigure:
    """The least `seconds` of one method, for `num_bytes` in pages of `page_bytes`."""

    direction: Direction
    way: Way
    page_bytes: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth; infinite if the clock measured no time."""
        return self.num_bytes / self.seconds if self.seconds > 0 else float("inf")


@dataclass(frozen=True)
class Crossover:
    """In one direction, `below` is faster for pieces shorter than `piece_bytes`, else `above`."""

    direction: Direction
    below: Way
    above: Way
    piece_bytes: int

    def way(self, piece_bytes: int) -> Way:
        """Return the method for pieces of this mean size."""
        return self.below if piece_bytes < self.piece_bytes else self.above


@dataclass(frozen=True)
class CopyMeasurement:
    """The measurements of one device. `notes` say what could not be measured, and why."""

    device: str
    figures: tuple[CopyFigure, ...]
    crossovers: tuple[Crossover, ...]
    notes: tuple[str, ...] = field(default=())

    def crossover(self, direction: Direction) -> Crossover | None:
        """Return the crossover of a direction, None if it has only one method."""
        return next((c for c in self.crossovers if c.direction == direction), None)

    def way(self, direction: Direction, page_bytes: int) -> Way:
        """Return the method for single pages in a direction; raises KeyError if none was
        measured."""
        crossover = self.crossover(direction)
        if crossover is not None:
            return crossover.way(page_bytes)
        ways = [f.way for f in self.figures if f.direction == direction and f.way != PLAIN]
        if not ways:
            raise KeyError(direction)
        return ways[0]

    def figure(self, direction: Direction, way: Way, page_bytes: int) -> CopyFigure | None:
        """Return one measurement, None if there is none."""
        wanted = direction, way, page_bytes
        found = (f for f in self.figures if (f.direction, f.way, f.page_bytes) == wanted)
        return next(found, None)


def crossover_bytes(small: Mapping[int, float], large: Mapping[int, float]) -> int:
    """Return the least size from which `large` is never slower than `small`, except for noise.

    Both are seconds by size, for the same sizes. 0 if `large` always wins, twice the largest size
    if it never does.
    """
    limit = 2 * max(small)
    for size in sorted(small, reverse=True):
        if large[size] > small[size] * NOISE:
            break
        limit = size
    return 0 if limit == min(small) else limit


def measure_cpu(
    page_bytes: Iterable[int] = (), limits: MeasureLimits | None = None, clock: Clock | None = None
) -> CopyMeasurement:
    """Measure the engine between two memories of this machine.

    `page_bytes` are measured in addition to the usual sizes.
    """
    limits = limits or MeasureLimits()
    stopwatch = _Stopwatch(clock or SystemClock(), limits)
    ways: dict[Way, CopyEngine] = {"kernel": CpuCopyEngine()}
    sizes = _sizes(CPU_PAGE_BYTES, page_bytes)
    figures: list[CopyFigure] = []
    for size in sizes:
        pages = _Pages.make(size, limits, torch.device("cpu"), torch.device("cpu"))
        figures += _measure("host to host", ways, pages, stopwatch, lambda: None)
    return CopyMeasurement("cpu", tuple(figures), ())


def measure_cuda(
    device: torch.device,
    kernel: RowCopier | None,
    page_bytes: Iterable[int] = (),
    limits: MeasureLimits | None = None,
    clock: Clock | None = None,
) -> CopyMeasurement:
    """Measure the kernel, where there is one, against copy units and torch, in every direction.

    Raises ConfigurationError without such a device, RuntimeError for whatever CUDA says, for
    instance that there is no room for a few times `limits.num_bytes`.
    """
    limits = limits or MeasureLimits()
    stopwatch = _Stopwatch(clock or SystemClock(), limits)
    units = CudaCopyEngine(device, KernelChoice(0, 0), None)
    kernels = CudaCopyEngine(device, KernelChoice(NEVER_BYTES, NEVER_BYTES), kernel)
    host = torch.device("cpu")

    def finish() -> None:
        torch.cuda.synchronize(device)

    figures: list[CopyFigure] = []
    for size in _sizes(CUDA_PAGE_BYTES, page_bytes):
        up = _Pages.make(size, limits, host, device)
        down = up.turned()
        within = _Pages.make(size, limits, device, device)
        to_device: dict[Way, CopyEngine] = {"copy units": units}
        on_device: dict[Way, CopyEngine] = {"torch": units}
        if kernel is not None:
            to_device["kernel"] = on_device["kernel"] = kernels
        figures += _measure("host to device", to_device, up, stopwatch, finish)
        figures += _measure("device to host", {"copy units": units}, down, stopwatch, finish)
        figures += _measure("device to device", on_device, within, stopwatch, finish)
    units.close()
    kernels.close()
    torch.cuda.empty_cache()  # the pool is about to take the free memory
    notes = [] if units.has_batches else [NO_BATCHES]
    crossovers: tuple[Crossover, ...] = ()
    if kernel is not None:
        crossovers = (
            crossover_of("host to device", "kernel", "copy units", figures),
            crossover_of("device to device", "kernel", "torch", figures),
        )
    name = torch.cuda.get_device_name(device)
    return CopyMeasurement(name, tuple(figures), crossovers, tuple(notes))


NO_BATCHES = (
    "torch's CUDA runtime or the driver is older than 12.8, or built into torch: every run of "
    "pages is a call of its own; install a later CUDA build of torch and driver"
)


@dataclass(frozen=True, eq=False)
class _Pages:
    """Two memories of equally many pages, and the permutations between them, without runs."""

    sources: torch.Tensor
    source_ids: Int32Array
    destinations: torch.Tensor
    destination_ids: Int32Array

    @classmethod
    def make(
        cls, page_bytes: int, limits: MeasureLimits, source: torch.device, destination: torch.device
    ) -> _Pages:
        num_pages = max(2, limits.num_bytes // page_bytes)
        has_pinned = "cuda" in (source.type, destination.type)
        rows = [
            torch.ones(  # zeros may share one page
                (num_pages, page_bytes),
                dtype=torch.uint8,
                device=device,
                pin_memory=has_pinned and device.type == "cpu",
            )
            for device in (source, destination)
        ]
        rng = np.random.default_rng(limits.seed)
        ids = [int32_array(rng.permutation(num_pages)) for _ in rows]
        return cls(rows[0], ids[0], rows[1], ids[1])

    def turned(self) -> _Pages:
        return _Pages(self.destinations, self.destination_ids, self.sources, self.source_ids)

    @property
    def num_bytes(self) -> int:
        return self.sources.numel()


class _Stopwatch:
    """Times work repeatedly; the least disturbed run counts."""

    def __init__(self, clock: Clock, limits: MeasureLimits) -> None:
        self._clock = clock
        self._num_repetitions = limits.num_repetitions

    def seconds(self, work: Callable[[], None]) -> float:
        work()  # once, to compile, map and allocate
        taken: list[float] = []
        for _ in range(self._num_repetitions):
            start = self._clock.now()
            work()
            taken.append(self._clock.now() - start)
        return min(taken)


def _measure(
    direction: Direction,
    ways: Mapping[Way, CopyEngine],
    pages: _Pages,
    stopwatch: _Stopwatch,
    finish: Callable[[], None],
) -> list[CopyFigure]:
    """Measure every method, and the plain copy, at one page size."""

    def by(engine: CopyEngine) -> Callable[[], None]:
        def copy() -> None:
            pending = engine.copy_blocks(
                pages.sources, pages.source_ids, pages.destinations, pages.destination_ids
            )
            if not pending.wait(MAX_WAIT_S):
                raise RuntimeError(f"a copy of {pages.num_bytes} bytes {direction} does not end")
            finish()

        return copy

    def plainly() -> None:
        if direction == "host to host":  # torch's own loop is slower than the system's
            np.copyto(pages.destinations.numpy(), pages.sources.numpy())
        else:
            pages.destinations.copy_(pages.sources, non_blocking=True)
        finish()

    works: dict[Way, Callable[[], None]] = {way: by(engine) for way, engine in ways.items()}
    works[PLAIN] = plainly
    page_bytes = pages.sources.shape[1]
    return [
        CopyFigure(direction, way, page_bytes, pages.num_bytes, stopwatch.seconds(work))
        for way, work in works.items()
    ]


def crossover_of(
    direction: Direction, below: Way, above: Way, figures: Sequence[CopyFigure]
) -> Crossover:
    """Return the crossover of two methods; both were measured at the same sizes."""
    seconds: dict[Way, dict[int, float]] = {below: {}, above: {}}
    for figure in figures:
        if figure.direction == direction and figure.way in seconds:
            seconds[figure.way][figure.page_bytes] = figure.seconds / figure.num_bytes
    limit = crossover_bytes(seconds[below], seconds[above])
    return Crossover(direction, below, above, limit)


def _sizes(usual: Sequence[int], more: Iterable[int]) -> list[int]:
    return sorted({size for size in (*usual, *more) if size > 0})


@dataclass(frozen=True, eq=False)
class FoundKernel:
    """The kernel for small pages, or None and `why_not`."""

    kernel: RowCopier | None
    why_not: str = ""


def make_copy_engine(device: torch.device) -> CopyEngine:
    """Return the engine for `device`; on CUDA, measure first.

    Raises ConfigurationError if there is no such device, and CUDA's errors.
    """
    if device.type == "cpu":
        return CpuCopyEngine()
    if device.type != "cuda":
        raise ConfigurationError(f"no copy engine for device {device}: use cpu or cuda")
    CudaCopyEngine(device).close()  # raises early if something is missing
    found = find_kernel(device)
    if found.kernel is None:
        logger.warning("%s copies small pages without a kernel: %s", device, found.why_not)
        return CudaCopyEngine(device)
    measurement = measure_cuda(device, found.kernel)
    choice = chosen(measurement)
    logger.info("%s (%s) copies by kernel: %s", device, measurement.device, choice)
    return CudaCopyEngine(device, choice, found.kernel)


def chosen(measurement: CopyMeasurement) -> KernelChoice:
    """Return what to use the kernel for after a measurement: nothing if there is none."""
    from_host = measurement.crossover("host to device")
    on_device = measurement.crossover("device to device")
    return KernelChoice(
        from_host_below_bytes=0 if from_host is None else from_host.piece_bytes,
        on_device_below_bytes=0 if on_device is None else on_device.piece_bytes,
    )


def find_kernel(device: torch.device) -> FoundKernel:
    """Compile the kernel and let it copy a few rows on `device`, from the host and within it.

    After any failure this machine works without a kernel: no triton, no C compiler, an unknown
    chip.
    """
    try:
        from kvcache.worker.copies.triton_kernel import RowKernel
    except ImportError as error:
        return FoundKernel(None, f"triton cannot be imported ({error}): install it")
    try:
        kernel = RowKernel()
        _try(kernel, device)
    except Exception as error:  # triton passes on errors of compilers and of the driver
        first_line = (str(error).splitlines() or [""])[0]
        return FoundKernel(
            None,
            f"it does not run here ({type(error).__name__}: {first_line}): install a C compiler, "
            "and the triton that belongs to this torch",
        )
    return FoundKernel(kernel)


def _try(kernel: RowCopier, device: torch.device) -> None:
    """Copy distinguishable rows, as wide words and as bytes; raise RuntimeError if they do not
    arrive."""
    with torch.cuda.device(device):
        for width in (48, 7):
            host = torch.arange(4 * width, dtype=torch.uint8).reshape(4, width).pin_memory()
            rows = torch.zeros((4, width), dtype=torch.uint8, device=device)
            ids = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
            kernel.copy(host, ids[0], rows, ids[1])
            kernel.copy(rows, ids[1], rows, ids[0])
            found = rows.cpu()
            if not torch.equal(found[[1, 2, 3, 0]], host[[3, 0, 3, 0]]):
                raise RuntimeError(f"rows of {width} bytes arrived wrong")
