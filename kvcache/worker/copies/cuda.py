"""The copy engine for CUDA: transfers on a separate stream, ordered by events.

Compute-stream work runs on the device's current stream at the call, so it is ordered with the
model's kernels. Host tensors should be pinned: copies from other memory block their thread, and
copies to it are not served.

A transfer uses one of three methods. *Batches* (`CudaRuntime`): one call for all pieces that
`describe_copy` finds, executed by the device's copy units; all copies to the host use it. The
*kernel* (triton_kernel.py): many small pages from the host, or within the device. If the runtime
has no batches, torch copies each run.

`CudaRuntime` calls the library that torch has loaded, so it shares torch's device, context and
streams. Every error becomes a RuntimeError with CUDA's text. `cudaMemcpyBatchAsync` came with CUDA
12.8; 13.0 removed one argument, the index of the failed piece. The layout of the attributes is the
same in both.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.base.arrays import Int32Array, Int64Array, UInt64Array
from kvcache.base.errors import ConfigurationError
from kvcache.worker.copies.engine import DoneCopy, PendingCopy

MIN_RECTANGLE_ROWS = 4
"""Shorter runs of rows with gaps are pieces of the batch: a rectangle needs a call of its own."""

MAX_PITCH_BYTES = 2**31 - 1
"""CUDA's limit for the pitch of a rectangle."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Copies of `sizes[i]` bytes from `sources[i]` to `destinations[i]`, all addresses.

    No piece is empty, and none reads what another writes: they may run in any order.
    """

    sources: UInt64Array
    destinations: UInt64Array
    sizes: UInt64Array

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Rectangle:
    """`num_rows` rows of `width_bytes`, `source_pitch` and `destination_pitch` bytes apart."""

    source: int
    source_pitch: int
    destination: int
    destination_pitch: int
    width_bytes: int
    num_rows: int


@dataclass(frozen=True, eq=False)
class CopyDescriptors:
    """One transfer: pieces for a batch, and rectangles to copy one by one."""

    pieces: Pieces
    rectangles: tuple[Rectangle, ...]


class RowCopy(NamedTuple):
    """Row `source_ids[i]` to row `destination_ids[i]` of `(num_rows, width)` uint8 tensors."""

    sources: torch.Tensor
    source_ids: Int32Array
    destinations: torch.Tensor
    destination_ids: Int32Array

    @property
    def is_empty(self) -> bool:
        """Whether there are no bytes to copy."""
        return not len(self.source_ids) or not self.sources.shape[1]

    @property
    def is_gapless(self) -> bool:
        """Whether rows follow each other without gaps, on both sides."""
        return all(
            rows.shape[0] <= 1 or rows.stride(0) == rows.shape[1]
            for rows in (self.sources, self.destinations)
        )

    @property
    def mean_piece_bytes(self) -> float:
        """Mean length of a piece, which decides which method is fastest."""
        num_rows = len(self.source_ids)
        num_pieces = len(self.runs()[0]) if self.is_gapless else num_rows
        return num_rows * self.sources.shape[1] / max(1, num_pieces)

    def runs(self) -> tuple[Int64Array, Int64Array]:
        """Return start and length of each run in which both ids rise by 1."""
        is_first = np.ones(len(self.source_ids), np.bool_)
        is_first[1:] = (np.diff(self.source_ids) != 1) | (np.diff(self.destination_ids) != 1)
        starts = np.flatnonzero(is_first)
        return starts, np.diff(np.append(starts, len(self.source_ids)))

    def pieces(self, chosen: npt.NDArray[np.integer | np.bool_], sizes: npt.ArrayLike) -> Pieces:
        """Return pieces of these sizes that start at the chosen rows."""
        source_ids, destination_ids = self.source_ids[chosen], self.destination_ids[chosen]
        return Pieces(
            _addresses(self.sources, source_ids),
            _addresses(self.destinations, destination_ids),
            np.ascontiguousarray(np.broadcast_to(sizes, len(source_ids)), dtype=np.uint64),
        )


def describe_copy(copy: RowCopy) -> CopyDescriptors:
    """Return addresses and sizes of a copy between two memories, valid while both tensors live. A
    run of rows without gaps is one piece; a long one with gaps is one rectangle."""
    width = copy.sources.shape[1]
    starts, counts = copy.runs()
    if copy.is_empty:
        return CopyDescriptors(copy.pieces(starts[:0], 0), ())
    if copy.is_gapless:
        return CopyDescriptors(copy.pieces(starts, counts * width), ())
    pitches = _pitch(copy.sources), _pitch(copy.destinations)
    is_long = (counts >= MIN_RECTANGLE_ROWS) & (max(pitches) <= MAX_PITCH_BYTES)
    rectangles = tuple(
        Rectangle(
            copy.sources.data_ptr() + int(copy.source_ids[start]) * pitches[0],
            pitches[0],
            copy.destinations.data_ptr() + int(copy.destination_ids[start]) * pitches[1],
            pitches[1],
            width,
            count,
        )
        for start, count in zip(starts[is_long].tolist(), counts[is_long].tolist(), strict=True)
    )
    return CopyDescriptors(copy.pieces(~np.repeat(is_long, counts), width), rectangles)


def _addresses(rows: torch.Tensor, ids: Int32Array) -> UInt64Array:
    addresses: UInt64Array = ids.astype(np.uint64) * np.uint64(_pitch(rows))
    addresses += np.uint64(rows.data_ptr())
    return addresses


def _pitch(rows: torch.Tensor) -> int:
    """Return the bytes from one row to the next; the stride of a single row is meaningless."""
    return int(rows.stride(0) if rows.shape[0] > 1 else rows.shape[1])


FIRST_VERSION_WITH_BATCHES = 12080
FIRST_VERSION_WITHOUT_FAIL_INDEX = 13000

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say which memories
_NO_INDEX = ctypes.c_size_t(-1).value  # SIZE_MAX

_INT_POINTER = ctypes.POINTER(ctypes.c_int)
_POINTER_POINTER = ctypes.POINTER(ctypes.c_void_p)
_SIZE, _ADDRESS = ctypes.c_size_t, ctypes.c_void_p


class SourceOrder(IntEnum):
    """When the bytes of a source may be read (`cudaMemcpySrcAccessOrder`).

    `ANY`: also before earlier work of the stream has run. Only for host memory that was complete
    before the call and is not written until the copy is done.
    """

    STREAM = 1
    ANY = 3


class _MemoryLocation(ctypes.Structure):
    """`cudaMemLocation`; zero: no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes`, 24 bytes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _MemoryLocation),
        ("destination_hint", _MemoryLocation),
        ("flags", ctypes.c_uint),
    )


class CudaRuntime:
    """One loaded `libcudart`. Calls go to the device that is current in the calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Use `library`; raises RuntimeError if it does not respond."""
        self._library = library
        library.cudaGetErrorName.restype = ctypes.c_char_p
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaRuntimeGetVersion.argtypes = (_INT_POINTER,)
        library.cudaDriverGetVersion.argtypes = (_INT_POINTER,)
        library.cudaHostGetDevicePointer.argtypes = (_POINTER_POINTER, _ADDRESS, ctypes.c_uint)
        library.cudaMemcpy2DAsync.argtypes = (
            *(_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _SIZE),
            *(ctypes.c_int, _ADDRESS),
        )
        self.version = self._version_of("cudaRuntimeGetVersion")
        self.driver_version = self._version_of("cudaDriverGetVersion")
        if self._has_batch_call:
            fail_index = () if self._is_without_fail_index else (ctypes.POINTER(_SIZE),)
            library.cudaMemcpyBatchAsync.argtypes = (
                *(_ADDRESS, _ADDRESS, _ADDRESS, _SIZE),
                *(ctypes.POINTER(_CopyAttributes), ctypes.POINTER(_SIZE), _SIZE),
                *fail_index,
                _ADDRESS,
            )

    @property
    def has_batches(self) -> bool:
        """Whether runtime and driver can copy in batches; both must be CUDA 12.8 or later."""
        return self._has_batch_call and self.driver_version >= FIRST_VERSION_WITH_BATCHES

    def copy_pieces(self, pieces: Pieces, order: SourceOrder, stream: int) -> None:
        """Queue all pieces on `stream` with one call. Needs `has_batches`.

        Keep the arrays of `pieces` and their memory until the stream has executed the copies.
        Raises RuntimeError; some pieces may be queued nevertheless.
        """
        if not len(pieces):
            return
        _require_stream(stream)
        attributes = _CopyAttributes(source_order=int(order))
        first = _SIZE(0)
        fail_index = _SIZE(_NO_INDEX)
        arrays = (pieces.destinations, pieces.sources, pieces.sizes)
        error = self._library.cudaMemcpyBatchAsync(
            *(np.ascontiguousarray(array).ctypes.data for array in arrays),
            len(pieces),
            *(ctypes.byref(attributes), ctypes.byref(first), 1),
            *(() if self._is_without_fail_index else (ctypes.byref(fail_index),)),
            stream,
        )
        if error:
            piece = "" if fail_index.value == _NO_INDEX else f", piece {fail_index.value}"
            self._raise(error, f"cudaMemcpyBatchAsync of {len(pieces)} pieces{piece}")

    def copy_rectangle(self, rectangle: Rectangle, stream: int) -> None:
        """Queue rows with gaps between them on `stream`, with one call; raises RuntimeError."""
        _require_stream(stream)
        error = self._library.cudaMemcpy2DAsync(
            rectangle.destination,
            rectangle.destination_pitch,
            rectangle.source,
            rectangle.source_pitch,
            rectangle.width_bytes,
            rectangle.num_rows,
            _MEMCPY_DEFAULT,
            stream,
        )
        if error:
            self._raise(error, f"cudaMemcpy2DAsync of {rectangle}")

    def device_address(self, host_address: int) -> int | None:
        """Return the kernels' address of registered host memory, None if they cannot access it."""
        found = ctypes.c_void_p()
        error = self._library.cudaHostGetDevicePointer(ctypes.byref(found), host_address, 0)
        if error:
            self._library.cudaGetLastError()  # or torch would raise it elsewhere
            return None
        return found.value

    @property
    def _has_batch_call(self) -> bool:
        return self.version >= FIRST_VERSION_WITH_BATCHES

    @property
    def _is_without_fail_index(self) -> bool:
        return self.version >= FIRST_VERSION_WITHOUT_FAIL_INDEX

    def _version_of(self, call: str) -> int:
        version = ctypes.c_int()
        error = getattr(self._library, call)(ctypes.byref(version))
        if error:
            self._raise(error, call)
        return version.value

    def _raise(self, error: int, what: str) -> None:
        """Raise RuntimeError for `error`, and clear it in CUDA; otherwise an unrelated call would
        raise it later."""
        name, text = (
            (call(error) or b"?").decode(errors="replace")
            for call in (self._library.cudaGetErrorName, self._library.cudaGetErrorString)
        )
        self._library.cudaGetLastError()
        raise RuntimeError(f"{what} failed: {name} ({error}): {text}")


def loaded_cuda_runtime() -> CudaRuntime | None:
    """Return the runtime that torch has loaded, None if it cannot be called.

    A build of torch may contain it; then torch copies, with one call per run.
    """
    if torch.version.cuda is None:
        return None
    name = f"libcudart.so.{torch.version.cuda.split('.', maxsplit=1)[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return CudaRuntime(library)


def _require_stream(stream: int) -> None:
    if not stream:
        raise RuntimeError("copies in batches need a stream of their own: 0 is the default stream")


KERNEL_BELOW_BYTES = 28 * 1024
"""Without a measurement: up to this size of a piece, the kernel was faster than copy units in
published measurements."""

MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""Pause between two checks whether a copy is done."""


class RowCopier(Protocol):
    """The kernel: see `triton_kernel.RowKernel`."""

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
    """Use the kernel for copies whose mean piece is shorter than this, in bytes.

    `from_host_below_bytes`: from host memory to the device; `on_device_below_bytes`: within it.
    """

    from_host_below_bytes: int = KERNEL_BELOW_BYTES
    on_device_below_bytes: int = KERNEL_BELOW_BYTES


class _Queryable(Protocol):
    """A typed view of `torch.cuda.Event`, whose method has no types."""

    def query(self) -> bool:
        """Say whether everything before the event is done."""


# Typed names for constructors without types.
_make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
_make_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


@dataclass(frozen=True, eq=False)
class _EventCopy:
    """A transfer that is done when `event` is. Keeps the memory of the copy alive."""

    event: torch.cuda.Event
    kept_alive: tuple[object, ...]

    def is_done(self) -> bool:
        """Query the event; never blocks."""
        return _is_over(self.event)

    def wait(self, timeout_s: float) -> bool:
        """Query the event repeatedly: CUDA's own wait has no timeout."""
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

    Host memory must be complete before the call, and must not be written until the copy is done: it
    may be read before earlier work of the transfer stream. Sealed host slots are complete; the
    caller protects a load's slots from writes.
    """

    copies_at_once = False

    def __init__(
        self,
        device: torch.device,
        choice: KernelChoice | None = None,
        kernel: RowCopier | None = None,
    ) -> None:
        """Make the transfer stream; raises ConfigurationError if there is no such device.

        Without `kernel`, copy units and torch copy everything, whatever `choice` says.
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
        self._marks: dict[int, torch.cuda.Event] = {}  # by stream: the event that it must reach
        runtime = loaded_cuda_runtime()
        self._runtime: CudaRuntime | None = runtime
        self._has_batches = runtime is not None and runtime.has_batches

    @property
    def has_batches(self) -> bool:
        """Whether one call can copy many pieces."""
        return self._has_batches

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Start the transfer behind ended forwards, and behind all compute-stream work that this
        engine has queued on any stream.

        Raises RuntimeError with CUDA's text; no part of the transfer runs then.
        """
        copy = RowCopy(sources, source_ids, destinations, destination_ids)
        if copy.is_empty:
            return DoneCopy()
        with torch.cuda.device(self._device):
            marks = list(self._marks.values())
            for mark in marks:
                self._stream.wait_event(mark)
            if not marks:  # the pool's initial zeroing may not be done
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                try:
                    kept = self._start(copy)
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
        copy = RowCopy(rows, source_ids, rows, destination_ids)
        if not copy.is_empty:
            with torch.cuda.device(self._device):
                self._copy_on_device(copy)
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
        """Query the last event of every stream."""
        return all(_is_over(mark) for mark in list(self._marks.values()))

    def close(self) -> None:
        """Wait for the transfers and for the compute stream."""
        self._stream.synchronize()
        for mark in list(self._marks.values()):
            mark.synchronize()

    def _mark(self) -> None:
        """Record the event that the current stream must reach before a transfer begins.

        A model may run on several streams, and the worker's thread on another, so each stream has
        its own event.
        """
        stream = torch.cuda.current_stream(self._device)
        event = _make_event()
        event.record(stream)
        self._marks[int(stream.cuda_stream)] = event

    # --- on the current stream

    def _start(self, copy: RowCopy) -> object:
        """Queue the copy; return the objects to keep alive until it is done."""
        if copy.sources.device == copy.destinations.device:
            return self._copy_on_device(copy)
        is_from_host = copy.sources.device.type == "cpu"
        below_bytes = self._choice.from_host_below_bytes if is_from_host else 0
        is_small = copy.mean_piece_bytes < below_bytes
        if is_small and self._kernel is not None and self._is_seen_by_kernels(copy.sources):
            return self._run_kernel(self._kernel, copy)
        # Another process's memory is not registered here; torch stages it before the call returns.
        is_pageable = is_from_host and not copy.sources.is_pinned()
        if self._runtime is None or not self._has_batches or is_pageable:
            _copy_runs(copy)
            return None
        copies = describe_copy(copy)
        order = SourceOrder.ANY if is_from_host else SourceOrder.STREAM
        self._run_batch(self._runtime, copies, order)
        return copies

    def _run_batch(self, runtime: CudaRuntime, copies: CopyDescriptors, order: SourceOrder) -> None:
        stream = int(self._stream.cuda_stream)
        for rectangle in copies.rectangles:
            runtime.copy_rectangle(rectangle, stream)
        runtime.copy_pieces(copies.pieces, order, stream)

    def _copy_on_device(self, copy: RowCopy) -> object:
        """Copy rows of the device: directly if no source is written, else through a copy of all
        sources."""
        sources, source_ids, destinations, destination_ids = copy
        is_apart = (
            sources.untyped_storage().data_ptr() != destinations.untyped_storage().data_ptr()
            or not np.isin(source_ids, destination_ids).any()
        )
        is_small = copy.mean_piece_bytes < self._choice.on_device_below_bytes
        if self._kernel is not None and is_small and is_apart:
            return self._run_kernel(self._kernel, copy)
        ids = self._upload(np.stack((source_ids, destination_ids)).astype(np.int64))
        word_bytes = min(word_bytes_of(sources), word_bytes_of(destinations))
        staging = as_words(sources, word_bytes).index_select(0, ids[0])
        as_words(destinations, word_bytes).index_copy_(0, ids[1], staging)
        return ids, staging

    def _run_kernel(self, kernel: RowCopier, copy: RowCopy) -> object:
        ids = self._upload(np.stack((copy.source_ids, copy.destination_ids)))
        kernel.copy(copy.sources, ids[0], copy.destinations, ids[1])
        return ids

    def _upload(self, ids: np.typing.NDArray[np.integer]) -> torch.Tensor:
        """Return ids on the device, without waiting for it.

        Torch reuses a buffer of its pinned pool only when the reading stream has passed it, and
        device memory in the stream's order.
        """
        pinned = torch.from_numpy(ids).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _is_seen_by_kernels(self, rows: torch.Tensor) -> bool:
        """Say whether kernels can use the host's address of pinned memory."""
        if self._runtime is None:
            return False
        address = rows.data_ptr()
        return self._runtime.device_address(address) == address


def word_bytes_of(rows: torch.Tensor) -> int:
    """Return 8, 4, 2 or 1: the widest word in which all rows can be divided."""
    places = (rows.data_ptr(), rows.storage_offset(), rows.stride(0), rows.shape[1])
    return next(size for size in (8, 4, 2, 1) if all(place % size == 0 for place in places))


def as_words(rows: torch.Tensor, word_bytes: int | None = None) -> torch.Tensor:
    """View `(num_rows, width)` uint8 rows as wider integers: torch indexes single elements."""
    dtypes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return rows.view(dtypes[word_bytes or word_bytes_of(rows)])


def _is_over(event: _Queryable) -> bool:
    return event.query()


def _copy_runs(copy: RowCopy) -> None:
    """Queue one contiguous copy per run; rows with gaps are copied one by one."""
    starts, counts = copy.runs()
    ids = copy.source_ids[starts].tolist(), copy.destination_ids[starts].tolist()
    for source, destination, count in zip(*ids, counts.tolist(), strict=True):
        step = count if copy.is_gapless else 1
        for i in range(0, count, step):
            copy.destinations[destination + i : destination + i + step].copy_(
                copy.sources[source + i : source + i + step], non_blocking=True
            )
