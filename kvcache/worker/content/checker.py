"""Content checking: compares every byte of every block with what its tokens require.

`ContentChecker` replaces a model's forward. It writes what the tokens require into the real
tensors, by the real block tables. It compares blocks on every hit, when they are read for the last
time, and when their request ends:

    verify states that are overwritten ──▶ write all rows ──▶ verify hits, and blocks left behind

The `GroupContent` of a group finds its cells by the block tables: `TokenContent` has one per token,
`StateContent` one per state, `EncoderContent` one per encoder token. A needed block that is null is
an error. Nothing is sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, Int64Array, UInt64Array, int32_array
from kvcache.base.errors import RequestError, WrongBytesError
from kvcache.protocol.commands import WriteExpected
from kvcache.specs import NULL_BLOCK_ID, KVCacheSpec
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.content.cells import LayerBundle, WrongCell, bundle_layers
from kvcache.worker.content.rows import ForwardRows, PrefixSums, RowLimits, encoder_sums
from kvcache.worker.history import BlockHistory
from kvcache.worker.kv_cache_pool import KVCachePool
from kvcache.worker.settings import WorkerSettings

CHUNK_BYTES = 1 << 20
"""Bytes of expected content made at once: limits memory, and fits the processor's cache."""

MAX_SHOWN_BYTES = 64
NO_STATE = -1

SumsOfPart: TypeAlias = Callable[[slice], UInt64Array]


class ContentChecker:
    """Writes and compares the content of one rank's blocks. `limits` validates commands."""

    def __init__(
        self,
        settings: WorkerSettings,
        pool: KVCachePool,
        tables: BlockTables,
        history: BlockHistory,
    ) -> None:
        """Check the blocks of `pool` by `tables`. Keeps 8 bytes per slot and position."""
        self._rank = rank = settings.rank
        self.limits = RowLimits.of(settings)
        multiple = lcm(*(spec.block_size for spec in settings.specs if _keeps_tokens(spec)))
        self._sums = PrefixSums(settings.max_num_seqs, settings.max_model_len, multiple)
        self._groups = tuple(
            _content_of(
                GroupPlace(
                    rank=rank,
                    group=index,
                    spec=spec,
                    bundles=tuple(bundle_layers(pool, index, rank)),
                    tables=tables,
                    history=history,
                    sums=self._sums,
                    max_num_seqs=settings.max_num_seqs,
                )
            )
            for index, spec in enumerate(settings.specs)
        )

    def forget(self) -> None:
        """Forget the content of every slot: a new epoch assigns all slots again."""
        self._sums.forget()
        for group in self._groups:
            group.forget()

    def verify(self, slots: Int32Array, lengths: Int32Array) -> int:
        """Compare all live blocks of requests of `lengths` tokens by the present tables.

        Returns the number of bytes compared; raises WrongBytesError at the first wrong one, with
        the block's history.
        """
        wide_slots, wide_lengths = slots.astype(np.int64), lengths.astype(np.int64)
        known = self._sums.num_known(slots)
        unknown = np.flatnonzero(wide_lengths > known)
        if len(unknown):
            row = int(unknown[0])
            raise RequestError(
                f"rank {self._rank} is to verify {int(lengths[row])} tokens of slot "
                f"{int(slots[row])}, but knows {int(known[row])}"
            )
        return sum(group.verify(wide_slots, wide_lengths) for group in self._groups)

    def run(self, command: WriteExpected, seq: int) -> int:
        """Write the rows of a validated command, and compare the blocks that they read.

        States are compared before anything is written, hits of new rows after everything is
        written: a row may hit blocks that another row of the same step writes, as in a model's
        layers. Returns the number of bytes compared. Raises WrongBytesError, or RequestError if a
        row continues from unknown content.
        """
        self._sums.extend(command)
        rows = ForwardRows.of(command)
        num_bytes = sum(group.verify_before(rows) for group in self._groups)
        for group in self._groups:
            group.write(rows, seq)
        return num_bytes + sum(group.verify_after(rows) for group in self._groups)


def _keeps_tokens(spec: KVCacheSpec) -> bool:
    return spec.num_state_blocks is None and not spec.keeps_encoder_tokens


def _content_of(place: GroupPlace) -> GroupContent:
    if place.spec.num_state_blocks is not None:
        return StateContent(place)
    return EncoderContent(place) if place.spec.keeps_encoder_tokens else TokenContent(place)


@dataclass(frozen=True, eq=False)
class LiveBlocks:
    """Blocks to compare, flat over all rows: the first `ends[i]` cells of each are compared.

    `numbers[i]` is the number of the first cell in messages.
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
    """Where a group's content is, and what its checks need."""

    rank: int
    group: int
    spec: KVCacheSpec
    bundles: tuple[LayerBundle, ...]
    tables: BlockTables
    history: BlockHistory
    sums: PrefixSums
    max_num_seqs: int


class GroupContent(ABC):
    """The content of one group on one rank. A group without layers on it has no bytes to check."""

    cell_name: ClassVar[str]
    """The meaning of a cell's number, for messages."""

    def __init__(self, place: GroupPlace) -> None:
        self.place = place
        self.block_size = place.spec.block_size

    def verify_before(self, rows: ForwardRows) -> int:
        """Compare the bytes that rows overwrite, before any write; return bytes compared."""
        return 0

    @abstractmethod
    def write(self, rows: ForwardRows, seq: int) -> None:
        """Write the content of the rows of message `seq`."""

    def verify_after(self, rows: ForwardRows) -> int:
        """After all writes, compare the blocks that rows have hit or read for the last time;
        return bytes compared."""
        return 0

    @abstractmethod
    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        """Compare all blocks of requests of `lengths` computed tokens; return bytes compared."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the content of every slot."""

    def _skipped_columns(self, lengths: Int64Array) -> Int64Array:
        """Return the first column that requests of `lengths` computed tokens still read."""
        spec = self.place.spec
        skipped = [spec.num_skipped_tokens(length) for length in lengths.tolist()]
        return np.array(skipped, dtype=np.int64) // self.block_size

    def _write_cells(self, cells: Cells, sums: UInt64Array, seq: int) -> None:
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
        """Return the blocks in the tables; raises WrongBytesError for a null block."""
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
    """A cell per token of the request, as long as a later token may read it."""

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
        """Compare the hits of new rows, and the blocks that these rows have passed."""
        new = rows.is_new
        num_bytes = self._verify(rows.slots[new], rows.starts[new], rows.firsts[new])
        if self.place.spec.reads_whole_prefix:
            return num_bytes
        ends = self._skipped_columns(rows.ends) * self.block_size
        return num_bytes + self._verify(rows.slots, ends, rows.firsts)

    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        return self._verify(slots, lengths, lengths)

    def forget(self) -> None:
        """Do nothing: only the sums depend on slots."""

    def _verify(self, slots: Int64Array, lengths: Int64Array, readers: Int64Array) -> int:
        """Compare what the tokens from `readers` on still read of `lengths` tokens."""
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
    """Return slot and number of every item of `[starts[i], ends[i])` of `slots[i]`, flat."""
    counts = np.maximum(ends - starts, 0)
    befores = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum())) + np.repeat(starts - befores, counts)
    return np.repeat(slots, counts), numbers


def _shown(expected: bytes, found: bytes) -> str:
    """Return both as hex; of long ones only the part where they begin to differ."""
    if len(expected) <= MAX_SHOWN_BYTES:
        return f"{expected.hex()}, found {found.hex()}"
    first = next(
        i for i, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) > 1
    )
    part = slice(first, first + MAX_SHOWN_BYTES)
    return f"{expected[part].hex()}, found {found[part].hex()} from byte {first} on"


class StateContent(GroupContent):
    """A cell per state: the one after the newest token, and those after its drafts.

        own_end 9, 2 drafts, block 4        column   0    1    2    3    4
                                                    null null  s9   s10  s11
        one draft accepted: the next row starts at 10 and reads column 3, then writes from column 2

    A state depends on all tokens before it. The state after `n` own tokens is in the first column
    that a request of `n` computed tokens does not skip. After the slot's last row, there are states
    after `_own_ends[slot]` tokens and after each of `_num_drafts[slot]` drafts. A row that
    continues from a missing state raises RequestError.
    """

    cell_name = "state after token"

    def __init__(self, place: GroupPlace) -> None:
        super().__init__(place)
        self._own_ends: Int64Array = np.full(place.max_num_seqs, NO_STATE, dtype=np.int64)
        self._num_drafts: Int64Array = np.zeros(place.max_num_seqs, dtype=np.int64)

    def verify_before(self, rows: ForwardRows) -> int:
        """Compare the states that rows continue from; for a new row, the state at the end of its
        hit.

        External states are not compared: `write` writes them.
        """
        slots = rows.slots[rows.is_new]
        self._own_ends[slots], self._num_drafts[slots] = rows.firsts[rows.is_new], 0
        is_read = (rows.starts == rows.firsts) & (rows.is_new | (rows.starts < rows.ends))
        return self.verify(rows.slots[is_read], rows.starts[is_read])

    def write(self, rows: ForwardRows, seq: int) -> None:
        loaded = rows.firsts > rows.starts
        self._write_states(rows.slots[loaded], rows.firsts[loaded], rows.firsts[loaded] + 1, seq)
        runs = rows.starts < rows.ends
        slots, own_ends, ends = rows.slots[runs], rows.own_ends[runs], rows.ends[runs]
        self._write_states(slots, own_ends, ends + 1, seq)
        self._own_ends[slots], self._num_drafts[slots] = own_ends, ends - own_ends

    def verify(self, slots: Int64Array, lengths: Int64Array) -> int:
        has_state = lengths > 0
        slots, lengths = slots[has_state], lengths[has_state]
        own_ends = self._own_ends[slots]
        ahead = lengths - own_ends
        wrong = np.flatnonzero(
            (own_ends == NO_STATE) | (ahead < 0) | (ahead > self._num_drafts[slots])
        )
        if len(wrong):
            row = int(wrong[0])
            slot, place = int(slots[row]), self.place
            raise RequestError(
                f"slot {slot} of rank {place.rank} continues after {int(lengths[row])} tokens, but "
                f"group {place.group} has its states after {int(own_ends[row])} to "
                f"{int(own_ends[row] + self._num_drafts[slot])}"
            )
        columns = self._skipped_columns(own_ends) + ahead
        live = LiveBlocks(slots, columns, np.ones_like(slots), lengths)
        sums = self.place.sums
        return self._compare(live, lambda part: sums.at(slots[part], lengths[part] - 1)[:, None])

    def forget(self) -> None:
        self._own_ends[:] = NO_STATE

    def _write_states(
        self, slots: Int64Array, firsts: Int64Array, ends: Int64Array, seq: int
    ) -> None:
        """Write the states after `firsts[i]` tokens and those up to before `ends[i]`, behind it."""
        rows, lengths = spread(np.arange(len(slots)), firsts, ends)
        columns = self._skipped_columns(firsts)[rows] + lengths - firsts[rows]
        has_state = lengths > 0  # there is none before the first token
        rows, lengths, columns = rows[has_state], lengths[has_state], columns[has_state]
        cells = Cells(slots[rows], columns, np.zeros_like(columns))
        self._write_cells(cells, self.place.sums.at(slots[rows], lengths - 1), seq)


class EncoderContent(GroupContent):
    """A cell per encoder token: slot `s` has `_counts[s]` of them, made from seed `_seeds[s]`.

    The first forward of a request writes them; they are compared when the request ends, and when
    another one starts with all of its tokens computed. They depend on the request alone.
    """

    cell_name = "encoder position"

    def __init__(self, place: GroupPlace) -> None:
        super().__init__(place)
        self._counts: Int64Array = np.zeros(place.max_num_seqs, dtype=np.int64)
        self._seeds: UInt64Array = np.zeros(place.max_num_seqs, dtype=np.uint64)

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

        def sums_of(part: slice) -> UInt64Array:
            positions = numbers[part, None] + cells
            return encoder_sums(np.broadcast_to(seeds[part, None], positions.shape), positions)

        return self._compare(live, sums_of)

    def forget(self) -> None:
        self._counts[:] = 0
