"""What a group of cross attention must hold: a cell per encoder token, from the first row on.

Written by the first forward of the request, and never again; compared when the request goes, and
when another one starts with all that it has, so that nothing is left to write.
Encoder tokens depend on the request alone, not on how far its own tokens have come. Refuses to know
where they come from.
"""

from __future__ import annotations

import numpy as np

from kvcache.worker.forward_rows import ForwardRows, Int64Array
from kvcache.worker.group_content import Cells, GroupContent, GroupPlace, LiveBlocks, spread
from kvcache.worker.prefix_sums import Uint64Array, encoder_sums


class EncoderContent(GroupContent):
    """A cell per encoder token: slot `s` has `_counts[s]` of them, made from seed `_seeds[s]`."""

    cell_name = "encoder position"

    def __init__(self, place: GroupPlace) -> None:
        super().__init__(place)
        self._counts: Int64Array = np.zeros(place.max_num_seqs, dtype=np.int64)
        self._seeds: Uint64Array = np.zeros(place.max_num_seqs, dtype=np.uint64)

    def write(self, rows: ForwardRows, seq: int) -> None:
        new = rows.is_new
        self._counts[rows.slots[new]] = rows.encoder_counts[new]
        self._seeds[rows.slots[new]] = rows.encoder_seeds[new]
        new = new & (rows.starts < rows.ends)
        slots, counts = rows.slots[new], rows.encoder_counts[new]
        flat, positions = spread(slots, np.zeros_like(counts), counts)
        cells = Cells(flat, positions // self.block_size, positions % self.block_size)
        self._write_cells(cells, encoder_sums(self._seeds[flat], positions), seq)

    def verify_after(self, rows: ForwardRows) -> int:
        shares = rows.is_new & (rows.starts == rows.ends)
        return self.verify(rows.slots[shares], rows.ends[shares])

    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        size = self.block_size
        counts = self._counts[slots]
        flat, columns = spread(np.arange(len(slots)), np.zeros_like(counts), -(-counts // size))
        seeds = self._seeds[slots[flat]]
        numbers = columns * size
        live = LiveBlocks(slots[flat], columns, np.minimum(counts[flat] - numbers, size), numbers)
        cells = np.arange(size)

        def sums_of(part: slice) -> Uint64Array:
            positions = numbers[part, None] + cells
            return encoder_sums(np.broadcast_to(seeds[part, None], positions.shape), positions)

        return self._compare(live, sums_of)

    def forget(self) -> None:
        self._counts[:] = 0
