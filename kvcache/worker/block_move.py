"""Which blocks move between a device and host memory; and, where the CPU reaches both, moving them.

Below copy_task.py. `HotMove` copies a piece of some blocks, over all tensors, and hashes it while
the processor's cache has it. What is found is looked at when all is copied, because a few calls for
each piece would cost as much as the hash. Refuses to know what a checksum should be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import xxhash

from kvcache.arrays import Int32Array
from kvcache.worker.checksums import BoolArray, Int64Array, PieceHasher, as_checksums
from kvcache.worker.copy_crew import Crew
from kvcache.worker.host_pool import HostPool
from kvcache.worker.row_mover import RowBuffer, RowMover, RowOrder, Rows, rows_per_piece


@dataclass(frozen=True, eq=False)
class BlockMove:
    """Which bytes: `block_ids[i]` of the device's rows and `slots[i]` of the host's tensors.

    Shapes: `(n,)`. `rows[k]` is `(num_blocks, width)` uint8, tensor `k` of `host` as wide.
    """

    rows: Sequence[torch.Tensor]
    host: HostPool
    block_ids: Int32Array
    slots: Int32Array
    to_host: bool


_Item = TypeVar("_Item")

HELPED_PIECES = 4
"""Moves of fewer pieces are copied by one thread: another would wake up when they are over."""

HELPED_ROW_BYTES = 1 << 19
HELPED_GATHER_BYTES = 1 << 16
"""Shorter rows that lie apart are copied by one thread, too: each is a call, and two threads hand
Python's lock to and fro between them. So are rows below the second length that are gathered into a
run. Two against one, on two idle processors, share of a copy: in a row .89 and .73 with 16 KiB,
1.06 and .77 with 64, 1.01 and .82 with 256, 1.17 and .85 with 2 MiB; gathered .39 and .45 with 4
KiB, .59 and .56 with 16, 1.05 and .65 with 64, .94 and .77 with 256; scattered .51 and .57 with 16,
.68 and .68 with 64, .62 and .76 with 256; apart on both sides .20 and .30 with 4 KiB, .26 and .41
with 16, .49 and .62 with 64, .75 and .73 with 256, 1.15 and .86 with 2 MiB."""


class HotMove:
    """Carries a move out, a piece of some blocks after another, and hashes what it has just
    copied: of a block of many tensors one tensor's rows at a time, so that they are as many as
    where a block is one row."""

    def __init__(self, move: BlockMove, is_hashed: BoolArray, crew: Crew) -> None:
        """Look at the ids, of which there is at least one; copy nothing yet. `is_hashed[i]` says
        it of block `i`. `crew` copies, and gives way between copies of a piece's size."""
        self._crew = crew
        self._is_hashed = is_hashed
        tensors = [
            (r.numpy(), h.numpy()) for r, h in zip(move.rows, move.host.tensors, strict=True)
        ]
        widths = [rows.shape[1] for rows, _ in tensors if rows.shape[1]]
        self._step = rows_per_piece(max(widths, default=1), move.block_ids, move.slots)
        blocks, slots = (RowOrder(ids, self._step) for ids in (move.block_ids, move.slots))
        self._movers = [
            RowMover(rows, blocks, host, slots)
            if move.to_host
            else RowMover(host, slots, rows, blocks)
            for rows, host in tensors
            if rows.shape[1]
        ]
        self._hasher = PieceHasher(widths, self._step)
        self._is_helped = blocks.num_pieces >= HELPED_PIECES and _takes_long_calls(
            max(widths, default=0), *((blocks, slots) if move.to_host else (slots, blocks))
        )

    def run(self) -> Int64Array:
        """Copy everything; return the checksums of the blocks that are hashed, in order."""
        starts = np.arange(0, len(self._is_hashed), self._step)
        counts = np.add.reduceat(self._is_hashed, starts, dtype=np.intp).tolist()
        digests: list[Sequence[int]] = [()] * len(counts)
        waiting = deque(enumerate(counts))
        take = self._one if self._step == 1 else self._several

        def copy_pieces() -> None:
            """Copy while there is something: whoever gets less of a processor copies less."""
            buffer = RowBuffer()
            try:
                for piece, num_hashed in _each_taken(waiting):
                    digests[piece] = take(piece, num_hashed, buffer)
            except Exception:
                waiting.clear()  # nobody goes on
                raise

        if self._is_helped:
            self._crew.run(copy_pieces)
        else:
            copy_pieces()
        return as_checksums(list(chain.from_iterable(digests)))

    def _several(self, piece: int, num_hashed: int, buffer: RowBuffer) -> Sequence[int]:
        """Copy a piece; return the digests of those blocks of it that are hashed."""
        is_hashed = self._is_hashed[piece * self._step : (piece + 1) * self._step]
        chosen = None if num_hashed == len(is_hashed) else is_hashed.nonzero()[0].tolist()
        parts = self._parts(piece, chosen, buffer)
        if num_hashed:
            return self._hasher.digests(parts)
        deque(parts, maxlen=0)
        return ()

    def _parts(self, piece: int, chosen: Sequence[int] | None, buffer: RowBuffer) -> Iterator[Rows]:
        """Copy a piece, tensor after tensor, and yield the rows that are hashed of each."""
        for mover in self._movers:
            self._crew.give_way()
            rows = mover.move(piece, buffer)
            yield rows if chosen is None else [rows[i] for i in chosen]

    def _one(self, piece: int, num_hashed: int, buffer: RowBuffer) -> Sequence[int]:
        """Copy the one block of a piece, part after part; return its digest if it is hashed."""
        state = xxhash.xxh3_64()
        for mover in self._movers:
            for part in mover.move_parts(piece):
                if num_hashed:
                    state.update(part.data)
                self._crew.give_way()
        return (state.intdigest(),) if num_hashed else ()


def _takes_long_calls(row_bytes: int, sources: RowOrder, destinations: RowOrder) -> bool:
    """Say whether threads that copy such rows seldom want Python's lock at once."""
    if row_bytes >= HELPED_ROW_BYTES:
        return True
    is_gathered = row_bytes >= HELPED_GATHER_BYTES
    return destinations.is_in_runs and (is_gathered or sources.is_in_runs)


def _each_taken(waiting: deque[_Item]) -> Iterator[_Item]:
    """Yield what is there, to each of the threads that ask something else."""
    while True:
        try:
            taken = waiting.popleft()
        except IndexError:
            return
        yield taken
