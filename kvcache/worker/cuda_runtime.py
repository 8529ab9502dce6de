"""The few calls of the CUDA runtime that torch has no name for: copies in batches and rectangles.

Between copy_descriptors.py, which says what to copy, and cuda_engine.py, which says when. The
library is the one that torch has loaded, so device, context and streams are torch's own; no other
is ever loaded. Every error becomes a RuntimeError with CUDA's own words. Refuses the legacy default
stream, as CUDA does.

`cudaMemcpyBatchAsync` came with CUDA 12.8 and lost an argument, the index of the piece that failed,
with 13.0; the attributes are laid out alike in both.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum

import numpy as np
import torch

from kvcache.worker.copy_descriptors import Pieces, Rectangle

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
