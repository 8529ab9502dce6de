"""One store or load: copies bytes in pieces, and computes or compares their checksums.

transfers.py makes a task and reads its result in the worker's thread; everything else happens in
the thread of runner.py. A task knows only memory and ids. If the CPU reaches both sides,
`CpuBlockMove` copies and hashes in one pass. A task never raises: its result has the error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvcache.base.arrays import EMPTY_INT32, BoolArray, Int32Array, Int64Array, int32_array
from kvcache.worker.copies.checksums import as_checksums, checksums_of_rows
from kvcache.worker.copies.copy_pool import INLINE, CopyPool
from kvcache.worker.copies.engine import CopyEngine, PendingCopy
from kvcache.worker.copies.rows import PieceHashes, RowMover, Side, can_hash
from kvcache.worker.host_memory.labels import NO_CHECKSUM

_Item = TypeVar("_Item")

PIECE_BYTES = 1 << 26
"""Blocks per call of an engine: enough for one call to describe many copies."""

HELPED_PIECES = 4
"""One thread copies moves of fewer pieces: another would wake up too late."""

CPU_PIECE_BYTES = 1 << 19
"""Bytes copied at once; copies give way between pieces. A tenth of a millisecond or less."""


class HostRows(Protocol):
    """Host memory of blocks: a `HostPool`, or another process's that is only read."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The slots of each tensor: `(num_slots, width)` uint8."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all tensors."""

    def pieces(self, tensor_index: int, slots: Int32Array) -> list[Int32Array]:
        """Return the places in `slots`, divided so that no copy crosses a registered piece."""


@dataclass(frozen=True, eq=False)
class BlockMove:
    """The bytes to move: `block_ids[i]` of the device's rows and `slots[i]` of the host's tensors.

    Shapes: `(n,)`. `rows[k]` is `(num_blocks, width)` uint8; tensor `k` of `host` has that width.
    """

    rows: Sequence[torch.Tensor]
    host: HostRows
    block_ids: Int32Array
    slots: Int32Array
    to_host: bool


class CpuBlockMove:
    """Copies a move in pieces of some blocks, and hashes the bytes."""

    def __init__(self, move: BlockMove, is_hashed: BoolArray, pool: CopyPool) -> None:
        """Check the ids, at least one, without copying. `is_hashed[i]` says whether block `i` is
        hashed. `pool` copies, and gives way between pieces.

        Raises ValueError if the arrays differ in length."""
        if not len(move.block_ids) == len(move.slots) == len(is_hashed):
            counts = len(move.block_ids), len(move.slots), len(is_hashed)
            raise ValueError("{} blocks, {} slots, {} marks: one for each".format(*counts))
        self._pool = pool
        self._is_hashed = np.ascontiguousarray(is_hashed)
        self._digests = np.zeros(len(is_hashed), np.uint64)
        sides = [
            (Side(rows.numpy(), move.block_ids), Side(host.numpy(), move.slots))
            for rows, host in zip(move.rows, move.host.tensors, strict=True)
            if rows.shape[1]
        ]
        self._widths = [on_device.width for on_device, _ in sides]
        self._does_hash = bool(is_hashed.any())
        self._can_hash = can_hash(self._widths)
        starts = (0, *accumulate(self._widths))
        self._movers = [
            RowMover(*(pair if move.to_host else pair[::-1]), start, starts[-1])
            for pair, start in zip(sides, starts, strict=False)
        ]
        self._written = [pair[1] if move.to_host else pair[0] for pair in sides]
        self._step = min(len(is_hashed), max(1, CPU_PIECE_BYTES // max(self._widths, default=1)))

    def run(self) -> Int64Array:
        """Copy everything; return the checksums of the hashed blocks, in order."""
        starts = range(0, len(self._is_hashed), self._step)
        waiting = deque(starts)

        def copy_pieces() -> None:
            """Copy while pieces are left: a thread with less processor time copies less."""
            try:
                for start in _take_each(waiting):
                    self.copy_piece(start)
            except Exception:
                waiting.clear()  # stop the other threads
                raise

        if len(starts) >= HELPED_PIECES:
            self._pool.run(copy_pieces)
        else:
            copy_pieces()
        return as_checksums(self._digests[self._is_hashed])

    def copy_piece(self, first: int) -> None:
        """Copy the piece that begins with this block, one tensor after the other."""
        end = min(first + self._step, len(self._is_hashed))
        piece = PieceHashes(self._is_hashed, self._digests, first, end)
        for mover, width in zip(self._movers, self._widths, strict=True):
            for low in range(0, width, CPU_PIECE_BYTES):
                self._pool.give_way()
                high = min(width, low + CPU_PIECE_BYTES)
                if self._does_hash and self._can_hash:
                    mover.copy_hashed(piece, low, high)
                else:
                    mover.copy(first, end, low, high)
        if self._does_hash and not self._can_hash:
            self._hash(range(first, end))

    def _hash(self, places: Sequence[int]) -> None:
        """Hash odd or short blocks, which the kernel cannot."""
        for place in places:
            if self._is_hashed[place]:
                state = xxhash.xxh3_64()
                for side in self._written:
                    state.update(side.rows[side.ids[place]].data)
                self._digests[place] = state.intdigest()


def _take_each(waiting: deque[_Item]) -> Iterator[_Item]:
    """Yield items until none is left; each goes to one of the calling threads."""
    while True:
        try:
            taken = waiting.popleft()
        except IndexError:
            return
        yield taken


@dataclass(frozen=True, eq=False)
class Comparison:
    """For a load: `expected[i]` is the checksum of slot `i`, compared where `is_chosen[i]`."""

    expected: Int64Array
    is_chosen: BoolArray


@dataclass(frozen=True, eq=False)
class CopyResult:
    """How a task ended. `problem` is empty if all bytes have arrived.

    `wrong`: places whose bytes differ from the stored ones, `found`: their checksums.
    `checksums` of a store are those of its slots, `NO_CHECKSUM` if none was computed.
    """

    problem: str = ""
    wrong: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    found: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    checksums: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class _Piece:
    places: slice
    copies: list[PendingCopy] = field(default_factory=list)

    def is_done(self) -> bool:
        return all(copy.is_done() for copy in self.copies)


class CopyTask:
    """One store or load. Used by one thread at a time, in this order:

    can_begin ──▶ begin ──▶ is_copied, until true ──▶ finish

    With `takes_checksums`, a store returns the checksums of the bytes it wrote. A load with a
    `comparison` leaves no byte of a wrong slot in a block, and loads the others. If an engine
    copies, the task compares slots first. If the CPU copies, it hashes the bytes in the same pass,
    and zeroes wrong blocks: no forward reads a load's blocks before its end.
    """

    def __init__(
        self,
        move: BlockMove,
        engine: CopyEngine,
        *,
        takes_checksums: bool = False,
        comparison: Comparison | None = None,
        after: Sequence[PendingCopy] = (),
    ) -> None:
        """Set up the task; it may begin when `after` are done."""
        self._move = move
        self._engine = engine
        self._takes_checksums = takes_checksums
        self._comparison = comparison
        self._after = tuple(after)
        self._host_rows = [tensor.numpy() for tensor in move.host.tensors]
        self._pieces: list[_Piece] = []
        self._checksums = np.full(len(move.slots), NO_CHECKSUM, dtype=np.int64)
        # A store hashes all or none, a load those to compare.
        self._is_hashed = np.full(len(move.slots), takes_checksums)
        if comparison is not None:
            self._is_hashed = comparison.is_chosen
        self._wrong: list[int] = []
        self._found: list[int] = []
        self._problem = ""

    def can_begin(self) -> bool:
        """Say whether everything that must be done before is done. Never blocks."""
        return all(copy.is_done() for copy in self._after)

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until it can begin, at most `timeout_s`; return whether it can."""
        return _wait_all(self._after, timeout_s)

    def begin(self, pool: CopyPool = INLINE) -> None:
        """Compare the slots of a load, and start the copies. If the CPU copies, `pool` does it."""
        try:
            if not len(self._move.slots):
                return
            if self._engine.copies_at_once:
                self._copy_on_cpu(pool)
            else:
                self._start_all()
        except Exception as error:  # the running thread has other tasks
            self._problem = f"the copy engine failed: {error}"

    def is_copied(self) -> bool:
        """Say whether no byte is read or written any more. Never blocks."""
        return all(piece.is_done() for piece in self._pieces)

    def wait_copied(self, timeout_s: float) -> bool:
        """Block until it is copied, at most `timeout_s`; return whether it is."""
        return _wait_all([copy for piece in self._pieces for copy in piece.copies], timeout_s)

    def finish(self) -> CopyResult:
        """Compute missing checksums, and return how it ended. Everything is copied."""
        try:
            if not self._problem:
                for piece in self._pieces:
                    self._take_checksums(piece)
        except Exception as error:  # as above
            self._problem = f"checksums failed: {type(error).__name__} {error}"
        return CopyResult(
            self._problem,
            int32_array(self._wrong),
            np.array(self._found, dtype=np.int64),
            self._checksums,
        )

    # --- if the processor copies

    def _copy_on_cpu(self, pool: CopyPool) -> None:
        """Copy everything now, and hash each piece while it is in the processor's cache."""
        found = CpuBlockMove(self._move, self._is_hashed, pool).run()
        hashed = self._is_hashed.nonzero()[0]
        if self._comparison is None:
            self._checksums[hashed] = found
        else:
            self._note_wrong(hashed, found, self._comparison)
        for rows in self._move.rows if self._wrong else ():
            rows.numpy()[self._move.block_ids[self._wrong]] = 0

    # --- if an engine copies

    def _start_all(self) -> None:
        for places in self._places():
            self._compare(places)
            piece = _Piece(places)
            self._pieces.append(piece)
            for copy in self._start(places):  # one by one: the next may raise
                piece.copies.append(copy)
            if piece.is_done():
                self._take_checksums(piece)

    def _places(self) -> Iterator[slice]:
        """Yield the pieces of the job, in order."""
        move = self._move
        step = max(1, PIECE_BYTES // max(1, move.host.slot_bytes))
        for start in range(0, len(move.slots), step):
            yield slice(start, min(start + step, len(move.slots)))

    def _start(self, places: slice) -> Iterator[PendingCopy]:
        """Start the copies of a piece, without wrong slots: one for each tensor and registered part
        of host memory."""
        move = self._move
        right = np.setdiff1d(np.arange(places.start, places.stop), self._wrong)
        block_ids, slots = move.block_ids[right], move.slots[right]
        for index, (rows, host) in enumerate(zip(move.rows, move.host.tensors, strict=True)):
            for part in move.host.pieces(index, slots):
                ends = (rows, block_ids[part], host, slots[part])
                if not move.to_host:
                    ends = (*ends[2:], *ends[:2])
                yield self._engine.copy_blocks(*ends)

    def _compare(self, places: slice) -> None:
        """Note which slots of a piece are wrong."""
        if self._comparison is None:
            return
        chosen = np.flatnonzero(self._comparison.is_chosen[places]) + places.start
        if not len(chosen):
            return
        self._note_wrong(chosen, self._hash(self._move.slots[chosen]), self._comparison)

    def _note_wrong(
        self, places: npt.NDArray[np.intp], found: Int64Array, comparison: Comparison
    ) -> None:
        is_wrong = found != comparison.expected[places]
        self._wrong += places[is_wrong].tolist()
        self._found += found[is_wrong].tolist()

    def _take_checksums(self, piece: _Piece) -> None:
        """Compute the checksums of a piece that has arrived in host memory, if that is still to
        do."""
        missing = self._checksums[piece.places] == NO_CHECKSUM
        if self._takes_checksums and missing.any():
            self._checksums[piece.places] = self._hash(self._move.slots[piece.places])

    def _hash(self, slots: Int32Array) -> Int64Array:
        return checksums_of_rows(self._host_rows, slots)


def _wait_all(copies: Sequence[PendingCopy], timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    return all(copy.wait(max(0.0, end_s - time.monotonic())) for copy in copies)
