"""The copy engine for CUDA: transfers on a stream of their own, ordered by events.

Implements the protocol of `copy_engine.py`. Compute-stream work runs on the stream that
is current on the device when the worker calls, so it is ordered with the model's kernels. Host
tensors must be pinned: otherwise a "non-blocking" copy blocks. Refuses to run without CUDA.

A transfer goes one of three ways. *Batches* (cuda_runtime.py): the device's copy units, with one
call for all pieces; everything to the host goes this way. The *kernel* (triton_engine.py): many
small pages from the host, or within the device. Without a runtime that has batches: a copy of
torch's for each run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import ConfigurationError
from kvcache.worker.copy_descriptors import (
    CopyDescriptors,
    describe_copy,
    is_solid,
    mean_piece_bytes,
)
from kvcache.worker.copy_engine import DoneCopy, PendingCopy, consecutive_runs
from kvcache.worker.cuda_runtime import CudaRuntime, SourceOrder, loaded_cuda_runtime

KERNEL_BELOW_BYTES = 28 * 1024
"""Where nothing was measured: up to this size of a piece the kernel was faster than copy units on
the machines for which measurements are published."""

MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""Between two questions whether a copy is over."""


class RowCopier(Protocol):
    """The kernel: see `triton_engine.RowKernel`."""

    def copy(
        self,
        sources: torch.Tensor,
        source_ids: torch.Tensor,
        destinations: torch.Tensor,
        destination_ids: torch.Tensor,
    ) -> None:
        """Queue copies of distinct rows on the current stream. Ids are int32, on the device."""


@dataclass(frozen=True)
class KernelChoice:
    """What the kernel is used for: copies whose pieces are shorter than this on average, in bytes.

    `from_host_below_bytes` from host memory to the device, `on_device_below_bytes` within it.
    """

    from_host_below_bytes: int = KERNEL_BELOW_BYTES
    on_device_below_bytes: int = KERNEL_BELOW_BYTES


class _Queryable(Protocol):
    """What is asked of `torch.cuda.Event`, whose own method has no types."""

    def query(self) -> bool:
        """Say whether everything before the event is over."""


# Typed names for constructors that have no types of their own.
_make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
_make_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


@dataclass(frozen=True, eq=False)
class _EventCopy:
    """A transfer that is over when `event` is. Keeps alive what the copy still uses."""

    event: torch.cuda.Event
    kept_alive: tuple[object, ...]

    def is_done(self) -> bool:
        """Ask the event; never blocks."""
        return _is_over(self.event)

    def wait(self, timeout_s: float) -> bool:
        """Ask the event again and again: CUDA's own wait knows no time."""
        deadline_s, pause_s = time.monotonic() + timeout_s, MIN_PAUSE_S
        while not _is_over(self.event):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return True


class CudaCopyEngine:
    """Asynchronous copies between device blocks and pinned host memory, and on the device.

    What is copied from host memory must have been finished before the call, and must not be written
    until the copy is over: it may be read ahead of what the transfer stream still has to do. Sealed
    host slots are; that a load holds them, the caller sees to.
    """

    copies_at_once = False

    def __init__(
        self,
        device: torch.device,
        choice: KernelChoice | None = None,
        kernel: RowCopier | None = None,
    ) -> None:
        """Make the transfer stream; raises ConfigurationError when there is no such device.

        Without `kernel` everything goes by copy units and torch, whatever `choice` says.
        """
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigurationError(
                f"device {device} is not a usable CUDA device: set the device to cpu, or install a "
                "CUDA build of torch on a machine with a GPU"
            )
        self._device = device
        self._choice = choice or KernelChoice()
        self._kernel = kernel
        self._stream = _make_stream(device)
        self._marks: dict[int, torch.cuda.Event] = {}  # by stream: how far it must get
        runtime = loaded_cuda_runtime()
        self._runtime: CudaRuntime | None = runtime
        self._has_batches = runtime is not None and runtime.has_batches

    @property
    def has_batches(self) -> bool:
        """Whether many pieces are copied with one call."""
        return self._has_batches

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Start the transfer behind the forwards that have ended, and behind all compute-stream
        work that this engine has queued, on whichever streams.

        Raises RuntimeError with CUDA's words; nothing of the transfer runs any more then.
        """
        if not len(source_ids) or not sources.shape[1]:
            return DoneCopy()
        with torch.cuda.device(self._device):
            marks = list(self._marks.values())
            for mark in marks:
                self._stream.wait_event(mark)
            if not marks:  # the pool's first zeroes may be on their way
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                try:
                    kept = self._start(sources, source_ids, destinations, destination_ids)
                except BaseException:
                    self._stream.synchronize()  # a part may have been queued
                    raise
                end = _make_event()
                end.record(self._stream)
        return _EventCopy(end, (sources, destinations, kept))

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        """Copy on the compute stream."""
        if len(source_ids) and rows.shape[1]:
            with torch.cuda.device(self._device):
                self._copy_on_device(rows, source_ids, rows, destination_ids)
                self._mark()

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        """Fill on the compute stream."""
        if len(ids) and rows.shape[1]:
            as_words(rows).index_fill_(0, self._upload(ids.astype(np.int64)), 0)
            self._mark()

    def on_forward_end(self) -> None:
        """Record an event on the compute stream."""
        self._mark()

    def is_compute_idle(self) -> bool:
        """Ask the last event of every stream."""
        return all(_is_over(mark) for mark in list(self._marks.values()))

    def wait_compute(self) -> None:
        """Wait for the last event of every stream."""
        for mark in list(self._marks.values()):
            mark.synchronize()

    def close(self) -> None:
        """Wait for the transfers and for the compute stream."""
        self._stream.synchronize()
        self.wait_compute()

    def _mark(self) -> None:
        """Note how far the current stream must get before a transfer begins.

        A model may run on several streams, and the worker's thread on another: what one of them
        still has to do is not forgotten because another is further.
        """
        stream = torch.cuda.current_stream(self._device)
        event = _make_event()
        event.record(stream)
        self._marks[int(stream.cuda_stream)] = event

    # --- on the current stream

    def _start(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> object:
        """Queue the copy; return what it uses until it is over."""
        if sources.device == destinations.device:
            return self._copy_on_device(sources, source_ids, destinations, destination_ids)
        is_from_host = sources.device.type == "cpu"
        below_bytes = self._choice.from_host_below_bytes if is_from_host else 0
        is_small = _mean_bytes(sources, source_ids, destinations, destination_ids) < below_bytes
        if is_small and self._kernel is not None and self._is_seen_by_kernels(sources):
            return self._run_kernel(
                self._kernel, sources, source_ids, destinations, destination_ids
            )
        if self._runtime is None or not self._has_batches:
            _copy_runs(sources, source_ids, destinations, destination_ids)
            return None
        copies = describe_copy(sources, source_ids, destinations, destination_ids)
        order = SourceOrder.ANY if is_from_host else SourceOrder.STREAM
        self._run_batch(self._runtime, copies, order)
        return copies

    def _run_batch(self, runtime: CudaRuntime, copies: CopyDescriptors, order: SourceOrder) -> None:
        stream = int(self._stream.cuda_stream)
        for rectangle in copies.rectangles:
            runtime.copy_rectangle(rectangle, stream)
        runtime.copy_pieces(copies.pieces, order, stream)

    def _copy_on_device(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> object:
        """Copy rows of the device: at once where no source is written, else through a copy of all
        sources."""
        mean_bytes = _mean_bytes(sources, source_ids, destinations, destination_ids)
        is_apart = (
            sources.untyped_storage().data_ptr() != destinations.untyped_storage().data_ptr()
            or not np.isin(source_ids, destination_ids).any()
        )
        if (
            self._kernel is not None
            and mean_bytes < self._choice.on_device_below_bytes
            and is_apart
        ):
            return self._run_kernel(
                self._kernel, sources, source_ids, destinations, destination_ids
            )
        ids = self._upload(np.stack((source_ids, destination_ids)).astype(np.int64))
        word_bytes = min(word_bytes_of(sources), word_bytes_of(destinations))
        staging = as_words(sources, word_bytes).index_select(0, ids[0])
        as_words(destinations, word_bytes).index_copy_(0, ids[1], staging)
        return ids, staging

    def _run_kernel(
        self,
        kernel: RowCopier,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> object:
        ids = self._upload(np.stack((source_ids, destination_ids)))
        kernel.copy(sources, ids[0], destinations, ids[1])
        return ids

    def _upload(self, ids: np.typing.NDArray[np.integer]) -> torch.Tensor:
        """Return ids on the device, without waiting for it.

        Torch's own pool of pinned memory hands a buffer out again only when the stream that reads
        it has got there; what it holds on the device, it reuses in the stream's order.
        """
        pinned = torch.from_numpy(ids).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _is_seen_by_kernels(self, rows: torch.Tensor) -> bool:
        """Say whether a kernel may use the address that the host has for pinned memory."""
        if self._runtime is None:
            return False
        address = rows.data_ptr()
        return self._runtime.device_address(address) == address


def word_bytes_of(rows: torch.Tensor) -> int:
    """Return 8, 4, 2 or 1: the widest words of which every row is made."""
    places = (rows.data_ptr(), rows.storage_offset(), rows.stride(0), rows.shape[1])
    return next(size for size in (8, 4, 2, 1) if all(place % size == 0 for place in places))


def as_words(rows: torch.Tensor, word_bytes: int | None = None) -> torch.Tensor:
    """See `(num_rows, width)` uint8 rows as wider integers: torch indexes one element at a time."""
    dtypes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return rows.view(dtypes[word_bytes or word_bytes_of(rows)])


def _mean_bytes(
    sources: torch.Tensor,
    source_ids: Int32Array,
    destinations: torch.Tensor,
    destination_ids: Int32Array,
) -> float:
    is_gapless = is_solid(sources) and is_solid(destinations)
    row_bytes = sources.shape[1]
    return mean_piece_bytes(source_ids, destination_ids, row_bytes, is_gapless=is_gapless)


def _is_over(event: _Queryable) -> bool:
    return event.query()


def _copy_runs(
    sources: torch.Tensor,
    source_ids: Int32Array,
    destinations: torch.Tensor,
    destination_ids: Int32Array,
) -> None:
    """Queue one contiguous copy per run; rows that are not side by side go one by one."""
    is_gapless = is_solid(sources) and is_solid(destinations)
    for source, destination, count in consecutive_runs(source_ids, destination_ids):
        step = count if is_gapless else 1
        for i in range(0, count, step):
            destinations[destination + i : destination + i + step].copy_(
                sources[source + i : source + i + step], non_blocking=True
            )
