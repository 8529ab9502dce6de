"""Host slots as tensors, for copies to and from the device; and the slots in use by jobs.

The slots are in a segment, which outlives the process. On CUDA the memory is registered with the
driver, so that copies run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import InvariantError, NotEnoughMemoryError
from kvcache.worker.host_memory.labels import HostLabels
from kvcache.worker.host_memory.segment import PAGE_BYTES, HostSegment

MAX_REGISTERED_BYTES = 64 * 2**30
"""Bytes registered at once: with much more, drivers fail or stall the machine."""

# A typed name for a function without types.
_cuda_runtime: Callable[[], Any] = torch.cuda.cudart


class SlotUses:
    """The host slots that running jobs of both tiers read or write. Not thread-safe.

    Any number of jobs may read a slot that no job writes. `problem` names slots in use.
    """

    def __init__(self, num_slots: int) -> None:
        self._readers = np.zeros(num_slots, dtype=np.int32)
        self._is_written = np.zeros(num_slots, dtype=np.bool_)

    def problem(self, slots: Int32Array, *, to_write: bool) -> str:
        """Return why slots cannot be read (or written) now, empty if they can."""
        if not len(slots):
            return ""
        first, last, end = int(slots.min()), int(slots.max()), len(self._readers)
        if not 0 <= first <= last < end:
            return f"host slots {first}..{last} are asked for, this rank has 0..{end - 1}"
        is_busy = self._is_written[slots]
        if to_write:
            is_busy = is_busy | (self._readers[slots] > 0)
        busy = np.unique(slots[is_busy]).tolist()
        if busy:
            return f"host slots {busy[:8]} are in use by a running job: wait for its report"
        return ""

    def acquire(self, slots: Int32Array, *, to_write: bool) -> None:
        """Add a job whose slots have no `problem`."""
        if to_write:
            self._is_written[slots] = True
        else:
            np.add.at(self._readers, slots, 1)

    def release(self, slots: Int32Array, *, to_write: bool) -> None:
        """Remove a job."""
        if to_write:
            self._is_written[slots] = False
        else:
            np.subtract.at(self._readers, slots, 1)

    def check(self) -> None:
        """Raise InvariantError if a slot is both read and written, or has a negative count."""
        wrong = np.flatnonzero((self._readers < 0) | (self._is_written & (self._readers > 0)))
        if len(wrong):
            raise InvariantError(
                f"host slots {wrong[:5].tolist()} are used by jobs that exclude each other"
            )


class HostPool:
    """Host memory for copies of blocks: `tensors[i]` is `(num_slots, width)` uint8, like the
    device's canonical tensor `i`. Views of the segment: they keep its memory alive.
    """

    def __init__(self, segment: HostSegment, *, is_pinned: bool) -> None:
        """View `segment` as tensors; register them with CUDA if `is_pinned`.

        Raises NotEnoughMemoryError if the driver does not register so much.
        """
        self.segment = segment
        self.num_slots = segment.shape.num_slots
        self.slot_bytes = segment.shape.slot_bytes
        self.tensors = tuple(torch.from_numpy(tensor) for tensor in segment.tensors)
        self.uses = SlotUses(self.num_slots)
        self._registered: list[int] = []
        self._piece_bytes = [_piece_bytes(tensor.shape[1]) for tensor in self.tensors]
        if is_pinned:
            self._register()

    @property
    def labels(self) -> HostLabels:
        return self.segment.labels

    def pieces(self, tensor_index: int, slots: Int32Array) -> list[Int32Array]:
        """Return the places in `slots`, divided so that no copy crosses from one registered piece
        of a tensor into the next, which drivers refuse."""
        width = self.tensors[tensor_index].shape[1]
        num_slots = self._piece_bytes[tensor_index] // max(1, width)
        if self.num_slots <= num_slots or not len(slots):
            return [int32_array(range(len(slots)))]
        piece_of = slots // num_slots
        return [int32_array(np.flatnonzero(piece_of == p)) for p in np.unique(piece_of).tolist()]

    def close(self) -> None:
        """Release descriptor and registrations. No copy may run any more."""
        for address in self._registered:
            _cuda_runtime().cudaHostUnregister(address)
        self._registered.clear()
        self.segment.close()

    def _register(self) -> None:
        """Register every tensor, in pieces of whole slots and pages."""
        runtime = _cuda_runtime()
        for tensor, piece in zip(self.tensors, self._piece_bytes, strict=True):
            size, start = tensor.numel(), 0
            while start < size:
                address = tensor.data_ptr() + start
                error = runtime.cudaHostRegister(address, min(piece, size - start), 0)
                if int(error) != 0:
                    self.close()
                    raise NotEnoughMemoryError(
                        f"CUDA does not register {size} bytes of host memory (error {int(error)}): "
                        "lower offload.host_memory_per_rank, or raise the limit of locked memory"
                    )
                self._registered.append(address)
                start += piece


def _piece_bytes(width: int) -> int:
    """Return the bytes of a tensor to register at once: whole slots, and whole pages."""
    unit = lcm(max(1, width), PAGE_BYTES)
    return max(unit, MAX_REGISTERED_BYTES // unit * unit)
