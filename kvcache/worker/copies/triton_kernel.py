"""A kernel that copies rows: many small pages with one launch.

`cuda.py` uses it for pages below a measured size, from pinned host memory (through its device
address) and within a device. It is imported only if triton exists. It never writes host memory:
posted writes over the bus are slow, and their failures cannot be attributed. Callers validate ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_ELEMENTS = 1024
"""What one program moves at once, in wide words of 8 bytes: 128 threads with 4 requests of 16 bytes
in flight each."""

WORD_BYTES = 16
"""Aligned rows of a multiple of this length move as wide words, others byte by byte."""

LINK_BYTES = 256 * 1024
"""Requests in flight over the bus: enough to fill it (bandwidth times a few microseconds), in as
few programs as possible, so that most of the device is left to the model."""

MAX_PROGRAMS = 512
"""Programs of a copy within the device, and the most over the bus."""


def _copy_rows(  # noqa: PLR0917 (a kernel has no keywords of its own)
    sources: tl.tensor,
    destinations: tl.tensor,
    source_ids: tl.tensor,
    destination_ids: tl.tensor,
    num_items: tl.tensor,
    num_parts: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    destination_stride: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy parts of rows: item `i` is part `i % num_parts` of row `i // num_parts`.

    Width and strides count units of `UNIT` elements, which shows the compiler their alignment.
    """
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, num_items, tl.num_programs(0)):
        row = item // num_parts
        columns = (item % num_parts) * BLOCK + tl.arange(0, BLOCK)
        is_inside = columns < width * UNIT
        source = tl.load(source_ids + row).to(tl.int64) * source_stride * UNIT
        destination = tl.load(destination_ids + row).to(tl.int64) * destination_stride * UNIT
        words = tl.load(sources + source + columns, mask=is_inside)
        tl.store(destinations + destination + columns, words, mask=is_inside)


_NUMBERS = ("num_items", "num_parts", "width", "source_stride", "destination_stride")
_IDS = ("source_ids", "destination_ids")
"""Compiled once: a variant per kind of number would be compiled while steps wait."""


class RowKernel:
    """The compiled kernel. If `TRITON_INTERPRET=1` at construction, it runs on CPU tensors."""

    def __init__(self) -> None:
        """Make the kernel; it is compiled when it first runs."""
        make = _jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_IDS)
        self._kernel: Any = make(_copy_rows)

    def copy(
        self,
        sources: torch.Tensor,
        source_ids: torch.Tensor,
        destinations: torch.Tensor,
        destination_ids: torch.Tensor,
    ) -> None:
        """Queue copies of rows of `(num_rows, width)` uint8 tensors on the current stream.

        Ids are int32 tensors on the device of `destinations`. No row is both read and written, and
        none is written twice. Sources on the host are pinned. Raises triton's errors if it cannot
        compile or launch.
        """
        num_rows, width = len(source_ids), sources.shape[1]
        if not num_rows or not width:
            return
        is_wide = all(_is_wide(rows) for rows in (sources, destinations))
        unit_bytes, dtype = (WORD_BYTES, torch.int64) if is_wide else (1, torch.uint8)
        block_bytes = BLOCK_ELEMENTS * dtype.itemsize
        num_parts = -(-width // block_bytes)
        num_items = num_rows * num_parts
        is_over_link = sources.device != destinations.device
        enough = -(-LINK_BYTES // min(width, block_bytes)) if is_over_link else MAX_PROGRAMS
        programs = min(num_items, enough, MAX_PROGRAMS)
        self._kernel[(programs,)](
            sources.view(dtype),
            destinations.view(dtype),
            source_ids,
            destination_ids,
            num_items,
            num_parts,
            width // unit_bytes,
            sources.stride(0) // unit_bytes,
            destinations.stride(0) // unit_bytes,
            UNIT=unit_bytes // dtype.itemsize,
            BLOCK=BLOCK_ELEMENTS,
        )


def _is_wide(rows: torch.Tensor) -> bool:
    """Say whether every row starts at a multiple of a word and consists of whole words."""
    places = (rows.data_ptr(), rows.storage_offset(), rows.stride(0), rows.shape[1])
    return all(place % WORD_BYTES == 0 for place in places)


# A typed name for a decorator without types.
_jit: Callable[..., Callable[[Callable[..., None]], Any]] = triton.jit
