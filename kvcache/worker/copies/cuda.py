"""The copy engine for CUDA: transfers on a stream of their own, ordered by events.

Compute-stream work runs on the stream that is current on the device when the worker calls, so it is
ordered with the model's kernels. Host tensors must be pinned: otherwise a "non-blocking" copy
blocks.

A transfer goes one of three ways. *Batches* (`CudaRuntime`): one call for all pieces that
`describe_copy` finds, carried out by the device's copy units; everything to the host goes this way.
The *kernel* (triton_kernel.py): many small pages from the host, or within the device. If the
runtime has no batches, torch copies each run.

`CudaRuntime` calls the library that torch has loaded, so device, context and streams are torch's
own. Every error becomes a RuntimeError with CUDA's own words. `cudaMemcpyBatchAsync` came with CUDA
12.8 and lost an argument, the index of the piece that failed, with 13.0; the attributes are laid
out alike in both.
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

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import ConfigurationError
from kvcache.worker.copies.engine import DoneCopy, PendingCopy

UInt64Array = npt.NDArray[np.uint64]

MIN_RECTANGLE_ROWS = 4
"""Shorter runs of rows with gaps are pieces of the batch: a rectangle costs a call of its own."""

MAX_PITCH_BYTES = 2**31 - 1
"""More between two rows is no rectangle for CUDA."""


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
    """One transfer: pieces that go as a batch, and rectangles that go one by one."""

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
        """Whether there is nothing between one row and the next, on both sides."""
        return all(
            rows.shape[0] <= 1 or rows.stride(0) == rows.shape[1]
            for rows in (self.sources, self.destinations)
        )

    @property
    def mean_piece_bytes(self) -> float:
        """How long a piece is on average: what decides which way of copying is fastest."""
        num_rows = len(self.source_ids)
        num_pieces = len(self.runs()[0]) if self.is_gapless else num_rows
        return num_rows * self.sources.shape[1] / max(1, num_pieces)

    def runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where each run begins in which both ids rise by 1, and how long it is."""
        is_first = np.ones(len(self.source_ids), np.bool_)
        is_first[1:] = (np.diff(self.source_ids) != 1) | (np.diff(self.destination_ids) != 1)
        starts = np.flatnonzero(is_first)
        return starts, np.diff(np.append(starts, len(self.source_ids)))

    def pieces(self, chosen: npt.NDArray[np.integer | np.bool_], sizes: npt.ArrayLike) -> Pieces:
        """Return pieces of these sizes that begin with the chosen rows."""
        source_ids, destination_ids = self.source_ids[chosen], self.destination_ids[chosen]
        return Pieces(
            _addresses(self.sources, source_ids),
            _addresses(self.destinations, destination_ids),
            np.ascontiguousarray(np.broadcast_to(sizes, len(source_ids)), dtype=np.uint64),
        )


def describe_copy(copy: RowCopy) -> CopyDescriptors:
    """Return addresses and sizes of a copy between two memories; valid as long as both tensors
    live. A run of rows without gaps is one piece, a long one with gaps one rectangle."""
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
    """Return the bytes from one row to the next; the stride of a single row means nothing."""
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

    `ANY`: also before the work that is queued ahead of the copy has run. Only for host memory that
    was finished before the copy was asked for, and is not written until it is over.
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
        """Use `library`; raises RuntimeError when it does not answer."""
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
        """Whether runtime and driver copy in batches; both must be of CUDA 12.8 or later."""
        return self._has_batch_call and self.driver_version >= FIRST_VERSION_WITH_BATCHES

    def copy_pieces(self, pieces: Pieces, order: SourceOrder, stream: int) -> None:
        """Queue all pieces on `stream` with one call. Needs `has_batches`.

        The arrays of `pieces`, and the memory they speak of, stay until the stream has got there.
        Raises RuntimeError; some pieces may be queued all the same.
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
        """Return where kernels see registered host memory, None when they do not see it."""
        found = ctypes.c_void_p()
        error = self._library.cudaHostGetDevicePointer(ctypes.byref(found), host_address, 0)
        if error:
            self._library.cudaGetLastError()  # or torch would find it, and raise it elsewhere
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
        """Raise RuntimeError for `error`, and take it back from CUDA: it would be found later, and
        raised where it has nothing to do."""
        name, text = (
            (call(error) or b"?").decode(errors="replace")
            for call in (self._library.cudaGetErrorName, self._library.cudaGetErrorString)
        )
        self._library.cudaGetLastError()
        raise RuntimeError(f"{what} failed: {name} ({error}): {text}")


def loaded_cuda_runtime() -> CudaRuntime | None:
    """Return the runtime that torch has loaded, None when it has none that can be called.

    A build of torch may have it inside; then copies go through torch, one call for each run.
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
"""Where nothing was measured: up to this size of a piece the kernel was faster than copy units on
the machines for which measurements are published."""

MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""Between two questions whether a copy is over."""


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
    """What the kernel is used for: copies whose pieces are shorter than this on average, in bytes.

    `from_host_below_bytes` from host memory to the device, `on_device_below_bytes` within it.
    """

    from_host_below_bytes: int = KERNEL_BELOW_BYTES
    on_device_below_bytes: int = KERNEL_BELOW_BYTES


class _Queryable(Protocol):
    """A typed view of `torch.cuda.Event`, whose own method has no types."""

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

    Host memory must be finished before the call, and must not be written until the copy is over: it
    may be read ahead of the transfer stream's other work. Sealed host slots are finished; the
    caller keeps a load's slots from being written.
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
        copy = RowCopy(sources, source_ids, destinations, destination_ids)
        if copy.is_empty:
            return DoneCopy()
        with torch.cuda.device(self._device):
            marks = list(self._marks.values())
            for mark in marks:
                self._stream.wait_event(mark)
            if not marks:  # the pool's first zeroes may be on their way
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
        """Ask the last event of every stream."""
        return all(_is_over(mark) for mark in list(self._marks.values()))

    def close(self) -> None:
        """Wait for the transfers and for the compute stream."""
        self._stream.synchronize()
        for mark in list(self._marks.values()):
            mark.synchronize()

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

    def _start(self, copy: RowCopy) -> object:
        """Queue the copy; return what it uses until it is over."""
        if copy.sources.device == copy.destinations.device:
            return self._copy_on_device(copy)
        is_from_host = copy.sources.device.type == "cpu"
        below_bytes = self._choice.from_host_below_bytes if is_from_host else 0
        is_small = copy.mean_piece_bytes < below_bytes
        if is_small and self._kernel is not None and self._is_seen_by_kernels(copy.sources):
            return self._run_kernel(self._kernel, copy)
        if self._runtime is None or not self._has_batches:
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
        """Copy rows of the device: at once where no source is written, else through a copy of all
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
    """Return 8, 4, 2 or 1: the widest words that make up every row."""
    places = (rows.data_ptr(), rows.storage_offset(), rows.stride(0), rows.shape[1])
    return next(size for size in (8, 4, 2, 1) if all(place % size == 0 for place in places))


def as_words(rows: torch.Tensor, word_bytes: int | None = None) -> torch.Tensor:
    """See `(num_rows, width)` uint8 rows as wider integers: torch indexes one element at a time."""
    dtypes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return rows.view(dtypes[word_bytes or word_bytes_of(rows)])


def _is_over(event: _Queryable) -> bool:
    return event.query()


def _copy_runs(copy: RowCopy) -> None:
    """Queue one contiguous copy per run; rows that are not side by side go one by one."""
    starts, counts = copy.runs()
    ids = copy.source_ids[starts].tolist(), copy.destination_ids[starts].tolist()
    for source, destination, count in zip(*ids, counts.tolist(), strict=True):
        step = count if copy.is_gapless else 1
        for i in range(0, count, step):
            copy.destinations[destination + i : destination + i + step].copy_(
                copy.sources[source + i : source + i + step], non_blocking=True
            )
