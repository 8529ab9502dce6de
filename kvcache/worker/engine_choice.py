"""Which copy engine a rank uses: by its device, and on CUDA by what was measured there.

Between the worker, which asks once when it starts, and the engines. The measurement takes a
fraction of a second and compiles the kernel, so that no step waits for that. Never chooses a way
that has not just moved bytes on this device. On CPU nothing is measured: there is one way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache.base.clock import Clock
from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.worker.copy_engine import CopyEngine, CpuCopyEngine
from kvcache.worker.copy_measurement import CopyMeasurement, measure_cuda
from kvcache.worker.cuda_engine import CudaCopyEngine, KernelChoice, RowCopier

logger = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class FoundKernel:
    """The kernel for small pages, or None and `why_not`."""

    kernel: RowCopier | None
    why_not: str = ""


def make_copy_engine(device: torch.device, clock: Clock | None = None) -> CopyEngine:
    """Return the engine for `device`; on CUDA, measures first.

    Raises ConfigurationError when there is none, and what CUDA raises.
    """
    if device.type == "cpu":
        return CpuCopyEngine()
    if device.type != "cuda":
        raise ConfigurationError(f"no copy engine for device {device}: use cpu or cuda")
    CudaCopyEngine(device).close()  # says what is missing, before anything else is tried
    found = find_kernel(device)
    if found.kernel is None:
        logger.warning("%s copies small pages without a kernel: %s", device, found.why_not)
        return CudaCopyEngine(device)
    measurement = measure_cuda(device, found.kernel, clock=clock)
    choice = chosen(measurement)
    logger.info("%s (%s) copies by kernel: %s", device, measurement.device, choice)
    return CudaCopyEngine(device, choice, found.kernel)


def chosen(measurement: CopyMeasurement) -> KernelChoice:
    """Return what the kernel is used for after a measurement: nothing where it was not there."""
    from_host = measurement.crossover("host to device")
    on_device = measurement.crossover("device to device")
    return KernelChoice(
        from_host_below_bytes=0 if from_host is None else from_host.piece_bytes,
        on_device_below_bytes=0 if on_device is None else on_device.piece_bytes,
    )


def find_kernel(device: torch.device) -> FoundKernel:
    """Compile the kernel and let it copy a few rows on `device`, from the host and within it.

    Whatever goes wrong there, this machine works without it: no triton, no C compiler, a chip it
    does not know.
    """
    try:
        from kvcache.worker.triton_engine import RowKernel
    except ImportError as error:
        return FoundKernel(None, f"triton cannot be imported ({error}): install it")
    try:
        kernel = RowKernel()
        _try(kernel, device)
    except Exception as error:  # triton raises whatever its compiler, ours, and the driver raise
        first_line = (str(error).splitlines() or [""])[0]
        return FoundKernel(
            None,
            f"it does not run here ({type(error).__name__}: {first_line}): install a C compiler, "
            "and the triton that belongs to this torch",
        )
    return FoundKernel(kernel)


def _try(kernel: RowCopier, device: torch.device) -> None:
    """Copy rows that are told apart, as wide words and as bytes; raise RuntimeError if they do not
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
