"""Content checking: every byte of every block is what its tokens demand, or somebody hears of it.

Stands in the place of a model's forward: writes what the tokens demand into the real tensors, by
the real block tables, and compares what is found there on every hit and when a request goes. Knows
rows, slots and tables; which bytes belong to a token is content_codec.py's matter. Never samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt
import torch

from kvcache.arrays import Int32Array, int32_array
from kvcache.commands import WriteExpected
from kvcache.errors import BlockError, MalformedMessageError, RequestError, WrongBytesError
from kvcache.ids import NULL_BLOCK_ID
from kvcache.specs import KVCacheGroupSpec, SlidingWindowSpec
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.content_codec import LayerBundle, WrongToken, bundle_layers
from kvcache.worker.history import BlockHistory
from kvcache.worker.prefix_sums import PrefixSums
from kvcache.worker.tensors import KVCachePool

Int64Array = npt.NDArray[np.int64]

CHUNK_BYTES = 1 << 20
"""Bytes of expected content made at once: bounds memory, and stays in the processor's cache."""


@dataclass(frozen=True)
class _GroupContent:
    group: int
    block_size: int
    window_tokens: int | None
    bundles: tuple[LayerBundle, ...]

    def first_live_column(self, lengths: Int64Array) -> Int64Array:
        """Return the first column that a request of `lengths` computed tokens still has.

        A window drops the blocks wholly before `computed - window + 1`.
        """
        if self.window_tokens is None:
            return np.zeros_like(lengths)
        return np.maximum(lengths - self.window_tokens + 1, 0) // self.block_size


@dataclass(frozen=True, eq=False)
class _LiveBlocks:
    """Blocks to compare, flat over all rows: the first `ends[i]` tokens of each are compared."""

    slots: Int64Array
    columns: Int64Array
    ends: Int64Array
    block_ids: Int32Array


class ContentChecker:
    """Writes and compares the content of one rank's blocks."""

    def __init__(
        self,
        pool: KVCachePool,
        groups: tuple[KVCacheGroupSpec, ...],
        tables: BlockTables,
        history: BlockHistory,
        *,
        rank: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Check the blocks of `pool` by `tables`. Keeps 8 bytes per slot and position."""
        self._tables = tables
        self._history = history
        self._rank = rank
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._groups = tuple(
            _GroupContent(
                group=index,
                block_size=group.kv_cache_spec.block_size,
                window_tokens=_window_tokens(group),
                bundles=tuple(bundle_layers(pool, index, rank)),
            )
            for index, group in enumerate(groups)
        )
        multiple = lcm(*(group.block_size for group in self._groups))
        self._sums = PrefixSums(max_num_seqs, max_model_len, multiple)

    def forget(self) -> None:
        """Forget what every slot holds: a new epoch gives slots out anew."""
        self._sums.forget()

    def validate(self, command: WriteExpected) -> None:
        """Raise unless the arrays of `command` fit together and this rank. Changes nothing."""
        rows = len(command.slots)
        numbers = (command.starts, command.counts, command.token_starts, command.token_counts)
        per_row = (command.is_new, *numbers)
        if any(len(array) != rows for array in per_row) or len(command.content_keys) not in (
            0,
            rows,
        ):
            raise MalformedMessageError(f"write_expected of {rows} rows has arrays of other sizes")
        if len(command.verify_slots) != len(command.verify_lengths):
            raise MalformedMessageError(
                f"write_expected verifies {len(command.verify_slots)} slots with "
                f"{len(command.verify_lengths)} lengths"
            )
        for slots in (command.slots, command.verify_slots):
            self._validate_slots(slots)
        self._validate_lengths(command)

    def verify(self, slots: Int32Array, lengths: Int32Array) -> int:
        """Compare all live blocks of requests of `lengths` tokens by the tables as they are.

        Returns the number of bytes compared; raises WrongBytesError at the first wrong one, with
        the history of its block.
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
        return sum(self._verify_group(group, wide_slots, wide_lengths) for group in self._groups)

    def run(self, command: WriteExpected, seq: int) -> int:
        """Write the rows of a validated command, then compare the hits of its new rows.

        A row may hit blocks that another row of the same step writes, so everything is written
        first, as a model's layers do. Returns the number of bytes compared; raises WrongBytesError,
        or RequestError when a row continues what is not known here.
        """
        self._sums.extend(command)
        slots, positions = _positions(command.slots, command.starts, command.counts)
        sums = self._sums.at(slots, positions)
        for group in self._groups:
            if not group.bundles:
                continue
            columns = positions // group.block_size
            block_ids = self._tables[group.group][slots, columns]
            self._require_blocks(group.group, slots, columns, block_ids)
            indices = torch.from_numpy(block_ids.astype(np.int64))
            offsets = torch.from_numpy(positions % group.block_size)
            for bundle in group.bundles:
                bundle.write(indices, offsets, bundle.mixed(sums))
            is_first = np.ones(len(block_ids), dtype=np.bool_)
            is_first[1:] = block_ids[1:] != block_ids[:-1]
            self._history.record(
                seq, "written by slot", block_ids[is_first], int32_array(slots[is_first])
            )
        is_new = command.is_new != 0
        return self.verify(command.slots[is_new], command.starts[is_new])

    def _verify_group(self, group: _GroupContent, slots: Int64Array, lengths: Int64Array) -> int:
        if not group.bundles or not len(slots):
            return 0
        first_columns = group.first_live_column(lengths)
        counts = -(-lengths // group.block_size) - first_columns
        rows = np.repeat(np.arange(len(slots)), counts)
        columns = np.arange(len(rows)) + np.repeat(
            first_columns - (np.cumsum(counts) - counts), counts
        )
        ends = np.minimum(lengths[rows] - columns * group.block_size, group.block_size)
        block_ids = self._tables[group.group][slots[rows], columns]
        self._require_blocks(group.group, slots[rows], columns, block_ids)
        live = _LiveBlocks(slots[rows], columns, ends, block_ids)
        for bundle in group.bundles:
            chunk = max(1, CHUNK_BYTES // (bundle.token_bytes * group.block_size))
            for start in range(0, len(rows), chunk):
                self._verify_chunk(group, bundle, live, slice(start, start + chunk))
        return int(ends.sum()) * sum(bundle.token_bytes for bundle in group.bundles)

    def _verify_chunk(
        self, group: _GroupContent, bundle: LayerBundle, live: _LiveBlocks, part: slice
    ) -> None:
        sums = self._sums.of_blocks(live.slots[part], live.columns[part], group.block_size)
        wrong = bundle.find_wrong(
            torch.from_numpy(live.block_ids[part].astype(np.int64)),
            bundle.mixed(sums),
            torch.from_numpy(live.ends[part]),
        )
        if wrong is not None:
            raise WrongBytesError(
                self._describe(group, live, part.start + wrong.block_index, wrong)
            )

    def _describe(
        self, group: _GroupContent, live: _LiveBlocks, index: int, wrong: WrongToken
    ) -> str:
        block_id = int(live.block_ids[index])
        position = int(live.columns[index]) * group.block_size + wrong.offset
        return (
            f"wrong bytes on rank {self._rank}: layer {wrong.layer}, block {block_id}, slot "
            f"{int(live.slots[index])}, position {position}: expected {wrong.expected.hex()}, "
            f"found {wrong.found.hex()}; history of block {block_id}, newest first: "
            f"{self._history.describe(block_id)}"
        )

    def _require_blocks(
        self, group: int, slots: Int64Array, columns: Int64Array, block_ids: Int32Array
    ) -> None:
        nulls = np.flatnonzero(block_ids == NULL_BLOCK_ID)
        if len(nulls):
            first = int(nulls[0])
            raise WrongBytesError(
                f"wrong block on rank {self._rank}: group {group}, slot {int(slots[first])}, "
                f"column {int(columns[first])} is the null block, but its content is needed"
            )

    def _validate_slots(self, slots: Int32Array) -> None:
        if not len(slots):
            return
        if not 0 <= int(slots.min()) <= int(slots.max()) < self._max_num_seqs:
            raise BlockError(
                f"write_expected names slots {int(slots.min())}..{int(slots.max())}, this rank has "
                f"0..{self._max_num_seqs - 1}"
            )
        if len(np.unique(slots)) != len(slots):
            raise MalformedMessageError("write_expected names a slot twice")

    def _validate_lengths(self, command: WriteExpected) -> None:
        numbers = (command.starts, command.counts, command.token_starts, command.token_counts)
        if any(len(a) and int(a.min()) < 0 for a in (*numbers, command.verify_lengths)):
            raise MalformedMessageError("write_expected has a negative position or count")
        if int(command.token_counts.sum(dtype=np.int64)) != len(command.token_ids):
            raise MalformedMessageError(
                f"write_expected announces {int(command.token_counts.sum(dtype=np.int64))} tokens "
                f"and brings {len(command.token_ids)}"
            )
        if len(command.token_ids) and int(command.token_ids.min()) < 0:
            raise MalformedMessageError("write_expected has a negative token id")
        ends = command.starts.astype(np.int64) + command.counts
        token_ends = command.token_starts.astype(np.int64) + command.token_counts
        longest = max(
            (int(a.max()) for a in (token_ends, command.verify_lengths) if len(a)), default=0
        )
        if longest > self._max_model_len:
            raise MalformedMessageError(
                f"write_expected reaches position {longest}, this rank is made for "
                f"{self._max_model_len}"
            )
        if bool((token_ends < ends).any()) or bool(
            ((command.is_new != 0) & (command.token_starts != 0)).any()
        ):
            raise MalformedMessageError(
                "write_expected does not bring the tokens of every position it writes"
            )


def _positions(
    slots: Int32Array, starts: Int32Array, counts: Int32Array
) -> tuple[Int64Array, Int64Array]:
    """Return slot and position of every token of `[starts[i], starts[i] + counts[i])`, flat."""
    wide = counts.astype(np.int64)
    befores = np.cumsum(wide) - wide
    total = int(wide.sum())
    positions = np.arange(total) + np.repeat(starts.astype(np.int64) - befores, wide)
    return np.repeat(slots.astype(np.int64), wide), positions


def _window_tokens(group: KVCacheGroupSpec) -> int | None:
    """Return the window beyond which blocks of `group` are dropped, None if all are kept."""
    spec = group.kv_cache_spec
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
