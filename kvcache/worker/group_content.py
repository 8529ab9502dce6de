"""What one KV cache group must hold: which cells of which blocks, by the tables as they are.

Below content.py, which says when; above content_codec.py, which knows the bytes. Here is what all
kinds have in common, and the content of kinds that keep tokens: a cell per position, of which those
behind `spec.num_skipped_tokens` are alive. Refuses to guess: a block that is needed and null is an
error, never skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import WrongBytesError
from kvcache.base.ids import NULL_BLOCK_ID
from kvcache.specs import KVCacheSpec
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.content_codec import LayerBundle, WrongCell
from kvcache.worker.forward_rows import ForwardRows, Int64Array
from kvcache.worker.history import BlockHistory
from kvcache.worker.prefix_sums import PrefixSums, Uint64Array

CHUNK_BYTES = 1 << 20
"""Bytes of expected content made at once: bounds memory, and stays in the processor's cache."""

SumsOfPart: TypeAlias = Callable[[slice], Uint64Array]


@dataclass(frozen=True, eq=False)
class LiveBlocks:
    """Blocks to compare, flat over all rows: the first `ends[i]` cells of each are compared.

    `numbers[i]` is what the first cell is called in a message.
    """

    slots: Int64Array
    columns: Int64Array
    ends: Int64Array
    numbers: Int64Array


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells to write, flat over all rows: cell `offsets[i]` of the block in `columns[i]`."""

    slots: Int64Array
    columns: Int64Array
    offsets: Int64Array


@dataclass(frozen=True, eq=False)
class GroupPlace:
    """Where a group's content is, and what its checks look at."""

    rank: int
    group: int
    spec: KVCacheSpec
    bundles: tuple[LayerBundle, ...]
    tables: BlockTables
    history: BlockHistory
    sums: PrefixSums
    max_num_seqs: int


class GroupContent(ABC):
    """The content of one group on one rank. A group without layers here has no bytes to check."""

    cell_name: ClassVar[str]
    """What the number of a cell means, in messages."""

    def __init__(self, place: GroupPlace) -> None:
        self.place = place
        self.block_size = place.spec.block_size

    def verify_before(self, rows: ForwardRows) -> int:
        """Compare what rows overwrite, before anything is written; return bytes compared."""
        return 0

    @abstractmethod
    def write(self, rows: ForwardRows, seq: int) -> None:
        """Write what the rows demand, as message `seq` says."""

    def verify_after(self, rows: ForwardRows) -> int:
        """Compare what rows have found in the cache or read for the last time, after everything is
        written; return bytes compared."""
        return 0

    @abstractmethod
    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        """Compare all that requests of `lengths` computed tokens have; return bytes compared."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what every slot holds."""

    def _skipped_columns(self, lengths: Int64Array) -> Int64Array:
        """Return the first column that requests of `lengths` computed tokens still read."""
        spec = self.place.spec
        skipped = [spec.num_skipped_tokens(length) for length in lengths.tolist()]
        return np.array(skipped, dtype=np.int64) // self.block_size

    def _write_cells(self, cells: Cells, sums: Uint64Array, seq: int) -> None:
        place = self.place
        if not place.bundles or not len(cells.slots):
            return
        block_ids = self._block_ids(cells.slots, cells.columns)
        indices = torch.from_numpy(block_ids.astype(np.int64))
        offsets = torch.from_numpy(cells.offsets)
        for bundle in place.bundles:
            chunk = max(1, CHUNK_BYTES // bundle.cell_bytes)
            for start in range(0, len(block_ids), chunk):
                part = slice(start, start + chunk)
                bundle.write(indices[part], offsets[part], bundle.mixed(sums[part]))
        is_first = np.ones(len(block_ids), dtype=np.bool_)
        is_first[1:] = block_ids[1:] != block_ids[:-1]
        place.history.record(
            seq, "written by slot", block_ids[is_first], int32_array(cells.slots[is_first])
        )

    def _compare(self, live: LiveBlocks, sums_of: SumsOfPart) -> int:
        """Compare; `sums_of` returns the sums of a part of the blocks, `(n, num_cells)`.

        Returns the number of bytes compared; raises WrongBytesError at the first wrong one.
        """
        bundles = self.place.bundles
        if not bundles or not len(live.slots):
            return 0
        block_ids = self._block_ids(live.slots, live.columns)
        for bundle in bundles:
            chunk = max(1, CHUNK_BYTES // (bundle.cell_bytes * bundle.num_cells))
            for start in range(0, len(block_ids), chunk):
                part = slice(start, start + chunk)
                wrong = bundle.find_wrong(
                    torch.from_numpy(block_ids[part].astype(np.int64)),
                    bundle.mixed(sums_of(part)),
                    torch.from_numpy(live.ends[part]),
                )
                if wrong is not None:
                    index = start + wrong.block_index
                    raise self._wrong_bytes(live, index, int(block_ids[index]), wrong)
        return int(live.ends.sum()) * sum(bundle.cell_bytes for bundle in bundles)

    def _block_ids(self, slots: Int64Array, columns: Int64Array) -> Int32Array:
        """Return the blocks in the tables; raises WrongBytesError where one is null."""
        place = self.place
        block_ids: Int32Array = place.tables[place.group][slots, columns]
        nulls = np.flatnonzero(block_ids == NULL_BLOCK_ID)
        if len(nulls):
            first = int(nulls[0])
            raise WrongBytesError(
                f"wrong block on rank {place.rank}: group {place.group}, slot "
                f"{int(slots[first])}, column {int(columns[first])} is the null block, but its "
                "content is needed"
            )
        return block_ids

    def _wrong_bytes(
        self, live: LiveBlocks, index: int, block_id: int, wrong: WrongCell
    ) -> WrongBytesError:
        return WrongBytesError(
            f"wrong bytes on rank {self.place.rank}: layer {wrong.layer}, block {block_id}, slot "
            f"{int(live.slots[index])}, {self.cell_name} "
            f"{int(live.numbers[index]) + wrong.offset}: expected "
            f"{_shown(wrong.expected, wrong.found)}; history of block {block_id}, newest first: "
            f"{self.place.history.describe(block_id)}"
        )


class TokenContent(GroupContent):
    """A cell per token of the request, for as long as a later token may read it."""

    cell_name = "position"

    def write(self, rows: ForwardRows, seq: int) -> None:
        starts = rows.starts
        is_external = rows.firsts > starts
        if is_external.any():
            live = self._skipped_columns(rows.firsts) * self.block_size
            starts = np.where(is_external, np.maximum(starts, live), starts)
        slots, positions = spread(rows.slots, starts, rows.ends)
        cells = Cells(slots, positions // self.block_size, positions % self.block_size)
        self._write_cells(cells, self.place.sums.at(slots, positions), seq)

    def verify_after(self, rows: ForwardRows) -> int:
        """Compare the hits of new rows, and the blocks behind these rows, which they do not
        read."""
        new = rows.is_new
        num_bytes = self._verify(rows.slots[new], rows.starts[new], rows.firsts[new])
        if self.place.spec.reads_whole_prefix:
            return num_bytes
        ends = self._skipped_columns(rows.ends) * self.block_size
        return num_bytes + self._verify(rows.slots, ends, rows.firsts)

    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        return self._verify(slots, lengths, lengths)

    def forget(self) -> None:
        """Nothing: what is known of a slot is in the sums."""

    def _verify(self, slots: Int64Array, lengths: Int64Array, readers: Int64Array) -> int:
        """Compare what the tokens at `readers` and behind still read of `lengths` tokens."""
        ends = -(-lengths // self.block_size)
        flat, columns = spread(np.arange(len(slots)), self._skipped_columns(readers), ends)
        wide, numbers = slots[flat], columns * self.block_size
        ends = np.minimum(lengths[flat] - numbers, self.block_size)
        live = LiveBlocks(wide, columns, ends, numbers)
        sums = self.place.sums
        return self._compare(
            live, lambda part: sums.of_blocks(wide[part], columns[part], self.block_size)
        )


def spread(
    slots: Int64Array, starts: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return slot and number of everything in `[starts[i], ends[i])` of `slots[i]`, flat."""
    counts = np.maximum(ends - starts, 0)
    befores = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum())) + np.repeat(starts - befores, counts)
    return np.repeat(slots, counts), numbers


MAX_SHOWN_BYTES = 64


def _shown(expected: bytes, found: bytes) -> str:
    """Return both as hex, of long ones only where they begin to differ."""
    if len(expected) <= MAX_SHOWN_BYTES:
        return f"{expected.hex()}, found {found.hex()}"
    first = next(
        i for i, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) > 1
    )
    part = slice(first, first + MAX_SHOWN_BYTES)
    return f"{expected[part].hex()}, found {found[part].hex()} from byte {first} on"
