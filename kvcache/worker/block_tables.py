"""Block tables of the running requests, as the model runner reads them.

`begin_forward` patches them, so a forward sees the tables of its own step. A patch that does not
fit is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import types

from kvcache.base.arrays import Int32Array, Int64Array, are_below
from kvcache.base.compiled import array_type, compiled
from kvcache.base.errors import BlockError, MalformedMessageError
from kvcache.protocol.commands import BlockTablePatch


class BlockTables:
    """One int32 table per KV cache group: rows are slots, columns logical blocks, 0 unused.

    `tables[group]` is a numpy view `(max_num_seqs, num_columns[group])`, valid for the life of
    this object and changed in place; columns behind a row's last block are stale. On CPU
    `tensor(group)` is the same memory; elsewhere it is a copy, renewed when asked after a patch.
    """

    def __init__(
        self, widths: Sequence[int], num_blocks: int, max_num_seqs: int, device: torch.device
    ) -> None:
        """Make empty tables of `widths[group]` columns."""
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._widths: Int64Array = np.array(widths, dtype=np.int64)
        ends = np.cumsum(self._widths * max_num_seqs)
        self._bases: Int64Array = ends - self._widths * max_num_seqs
        self._flat: Int32Array = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
        self._tables = [
            self._flat[base:end].reshape(max_num_seqs, width)
            for base, end, width in zip(self._bases, ends, widths, strict=True)
        ]
        self._device = device
        self._on_device = torch.from_numpy(self._flat).to(device)
        self._is_device_stale = False

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, group: int) -> npt.NDArray[np.int32]:
        """Return the table of `group`: a view, shape `(max_num_seqs, columns)`."""
        return self._tables[group]

    def tensor(self, group: int) -> torch.Tensor:
        """Return the present table of `group` on the device. Valid until the next patch."""
        if self._is_device_stale:
            self._on_device.copy_(torch.from_numpy(self._flat))
            self._is_device_stale = False
        base, width = int(self._bases[group]), int(self._widths[group])
        size = width * self._max_num_seqs
        return self._on_device[base : base + size].view(self._max_num_seqs, width)

    def validate(self, patch: BlockTablePatch) -> None:
        """Raise unless `patch` fits. Changes nothing."""
        if _fits(
            self._widths,
            self._max_num_seqs,
            self._num_blocks,
            patch.slots,
            patch.groups,
            patch.first_indices,
            patch.counts,
            patch.block_ids,
        ):
            return
        count = len(patch.slots)
        sizes = len(patch.groups), len(patch.first_indices), len(patch.counts)
        if sizes != (count, count, count):
            raise MalformedMessageError(
                f"block table patch of {count} runs has {sizes} groups, first indices and counts"
            )
        if not count:
            if len(patch.block_ids):
                raise MalformedMessageError(
                    f"block table patch brings {len(patch.block_ids)} ids for no runs"
                )
            return
        counts, firsts = patch.counts, patch.first_indices
        num_ids = int(np.add.reduce(counts, dtype=np.int64))
        if np.count_nonzero(counts < 0) or num_ids != len(patch.block_ids):
            raise MalformedMessageError(
                f"block table patch announces {counts.tolist()[:8]} ids and brings "
                f"{len(patch.block_ids)}"
            )
        _require_range("group", patch.groups, len(self._tables))
        _require_range("slot", patch.slots, self._max_num_seqs)
        _require_range("block id", patch.block_ids, self._num_blocks)
        widths = self._widths.take(patch.groups)
        ends = firsts.astype(np.int64) + counts
        if np.count_nonzero(firsts < 0) or np.count_nonzero(ends > widths):
            worst = int(np.argmax(ends - widths))
            raise BlockError(
                f"block table patch writes columns {int(firsts[worst])}.."
                f"{int(ends[worst]) - 1} of slot {int(patch.slots[worst])}, group "
                f"{int(patch.groups[worst])}, which has {int(widths[worst])}"
            )

    def apply(self, patch: BlockTablePatch) -> None:
        """Write the runs of a validated patch."""
        if not len(patch.block_ids):
            return
        _write_runs(
            self._flat,
            self._bases,
            self._widths,
            patch.slots,
            patch.groups,
            patch.first_indices,
            patch.counts,
            patch.block_ids,
        )
        self._is_device_stale = self._device.type != "cpu"


def _require_range(what: str, values: Int32Array, limit: int) -> None:
    if not are_below(values, limit):
        raise BlockError(
            f"block table patch has {what} {int(values.min())}..{int(values.max())}, this rank "
            f"has 0..{limit - 1}"
        )


_READ = array_type("int32", is_read=True)
_WIDTHS = array_type("int64", is_read=True)


@compiled(types.boolean(_WIDTHS, types.intp, types.intp, _READ, _READ, _READ, _READ, _READ))
def _fits(  # noqa: PLR0917 - the tables, and the columns of a patch
    widths: Int64Array,
    num_slots: int,
    num_blocks: int,
    slots: Int32Array,
    groups: Int32Array,
    firsts: Int32Array,
    counts: Int32Array,
    block_ids: Int32Array,
) -> bool:
    """Say whether a patch may be applied. If not, `validate` says why."""
    num_runs, total = len(slots), 0
    if not (len(groups) == len(firsts) == len(counts) == num_runs):
        return False
    for i in range(num_runs):
        slot, group, first, count = slots[i], groups[i], firsts[i], counts[i]
        if not (0 <= slot < num_slots and 0 <= group < len(widths) and first >= 0 and count >= 0):
            return False
        if first + count > widths[group]:
            return False
        total += count
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            return False
    return bool(total == len(block_ids))


@compiled(types.void(array_type("int32"), _WIDTHS, _WIDTHS, _READ, _READ, _READ, _READ, _READ))
def _write_runs(  # noqa: PLR0917 - where the tables are, and the columns of a patch
    flat: Int32Array,
    bases: Int64Array,
    widths: Int64Array,
    slots: Int32Array,
    groups: Int32Array,
    firsts: Int32Array,
    counts: Int32Array,
    block_ids: Int32Array,
) -> None:
    """Write the runs of a patch into the tables, which are stored one after the other."""
    start = 0
    for i in range(len(slots)):
        group = groups[i]
        place = bases[group] + slots[i] * widths[group] + firsts[i]
        for k in range(counts[i]):
            flat[place + k] = block_ids[start + k]
        start += counts[i]
