"""Another process's host segment, read while its owner works.

A reader takes no lock and writes nothing, so the owner never waits. It may evict a slot and fill it
with another block at any moment, also while a reader copies it. So a reader proceeds like this:

    rows = reader.rows_at(slots)          labels, copied
    reader.are_whole(rows)                sealed, with the checksum of a row
    ... copy the bytes, compare them with rows["checksum"] ...
    reader.are_unchanged(slots, rows)     nothing has withdrawn the labels meanwhile

No check is sufficient alone. The labels say which block the bytes are, and what they should
be, before there is anything to compare. The checksum finds bytes of two blocks that were mixed, and
memory that has changed. The second look finds a slot that was used again during the copy, without
trust in the order in which another processor's writes arrive; it compares whole rows with their
generation, because state, digest and checksum are the same again if the owner evicts a block and
stores the same block once more.
"""

from __future__ import annotations

import mmap
import os
import warnings
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from kvcache.base.arrays import BoolArray, Int32Array, are_below, int32_array
from kvcache.base.errors import PlanMismatchError
from kvcache.worker.host_memory.labels import NO_CELL, Rows, SlotState, row_checksum, row_type
from kvcache.worker.host_memory.segment import HEAD_BYTES, SegmentShape, shape_in


class SegmentReader:
    """A segment of another process, mapped read-only. `rows` are the labels, live.

    The mapping keeps the memory, even if the owner and the memory service are gone.
    """

    def __init__(self, descriptor: int, expected: SegmentShape) -> None:
        """Map `descriptor`, which the caller closes.

        Never pass a segment of this process: its lock would go with the descriptor.

        Raises PlanMismatchError unless its shape is `expected` but for the number of slots.
        """
        head = os.pread(descriptor, HEAD_BYTES, 0)
        if len(head) < HEAD_BYTES:
            raise PlanMismatchError(f"a host segment has a head of {len(head)} bytes")
        self.shape = shape = shape_in(head)
        num_bytes = os.fstat(descriptor).st_size
        same = replace(expected, num_slots=shape.num_slots)
        if shape != same or num_bytes != shape.size_bytes:
            raise PlanMismatchError(
                f"the segment holds {num_bytes} bytes of layout {shape.layout_fingerprint}, rank "
                f"{shape.rank}, this engine reads layout {same.layout_fingerprint}, rank "
                f"{same.rank}"
            )
        self._memory = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        rows = np.frombuffer(self._memory, np.uint8, shape.rows_bytes, shape.offsets[0])
        self.rows: Rows = rows.view(row_type(shape.digest_bytes, shape.max_block_tokens))

    def rows_at(self, slots: Int32Array) -> Rows:
        """Return the labels of slots as they are now, a copy; raises IndexError."""
        if not are_below(slots, len(self.rows)):
            raise IndexError(f"host slots {slots.tolist()[:8]} of {len(self.rows)}")
        rows: Rows = self.rows[slots]
        return rows

    @staticmethod
    def are_whole(rows: Rows) -> BoolArray:
        """Say of each label whether it is sealed, was not torn while it was copied, and has the
        checksum of its bytes. Labels that need cells are not read here."""
        size, data = rows.itemsize, rows.tobytes()
        found: BoolArray = (rows["state"] == SlotState.SEALED) & (rows["checksum"] >= 0)
        found &= (rows["group"] >= 0) & (rows["first_cell"] == NO_CELL)
        for place in np.flatnonzero(found).tolist():
            row = data[place * size : (place + 1) * size]
            found[place] = row_checksum(row, b"") == rows["row_crc"][place]
        return found

    def are_unchanged(self, slots: Int32Array, rows: Rows) -> BoolArray:
        """Say of each slot whether its label is still the one in `rows`, withdrawn never since."""
        size, (now, before) = rows.itemsize, (self.rows[slots].tobytes(), rows.tobytes())
        same = np.frombuffer(now, np.uint8) == np.frombuffer(before, np.uint8)
        unchanged: BoolArray = same.reshape(len(slots), size).all(axis=1)
        return unchanged

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all tensors."""
        return self.shape.slot_bytes

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The slots of each tensor, `(num_slots, width)` uint8. A write ends the process."""
        shape, found = self.shape, []
        for offset, width in zip(shape.offsets[2:], shape.widths, strict=False):
            part = np.frombuffer(self._memory, np.uint8, shape.num_slots * width, offset)
            with warnings.catch_warnings():  # torch has no read-only tensors, and says so
                warnings.simplefilter("ignore", UserWarning)
                found.append(torch.from_numpy(part.reshape(shape.num_slots, width)))
        return tuple(found)

    def pieces(self, tensor_index: int, slots: Int32Array) -> list[Int32Array]:
        """Return all places in `slots` as one piece: nothing is registered with a driver."""
        return [int32_array(range(len(slots)))]
