"""Which block holds which positions of each running request, as the model runner reads it.

Patched inside `begin_forward`, never before: a forward sees the tables of its own step. Knows
nothing of what blocks hold. Refuses patches that do not fit, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvcache.arrays import Int32Array, are_below
from kvcache.commands import BlockTablePatch
from kvcache.errors import BlockError, MalformedMessageError

Int64Array = npt.NDArray[np.int64]


class BlockTables:
    """One int32 table per KV cache group: rows are slots, columns logical blocks, 0 unused.

    `tables[group]` is a numpy view `(max_num_seqs, num_columns[group])`, valid for the life of
    this object and changed in place; columns behind a row's last block are stale. On CPU
    `tensor(group)` is the same memory; elsewhere it is a copy, renewed when asked after a patch.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_blocks: int,
        max_num_seqs: int,
        device: torch.device,
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
        """Return the table of `group` on the device, as it is now. Valid until the next patch."""
        if self._is_device_stale:
            self._on_device.copy_(torch.from_numpy(self._flat))
            self._is_device_stale = False
        base, width = int(self._bases[group]), int(self._widths[group])
        size = width * self._max_num_seqs
        return self._on_device[base : base + size].view(self._max_num_seqs, width)

    def validate(self, patch: BlockTablePatch) -> None:
        """Raise unless `patch` fits. Changes nothing."""
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
        groups = patch.groups
        firsts = self._bases[groups] + patch.slots * self._widths[groups] + patch.first_indices
        if len(patch.block_ids) == len(firsts) and bool((patch.counts == 1).all()):
            self._flat[firsts] = patch.block_ids
        else:
            counts = patch.counts.astype(np.int64)
            starts = np.cumsum(counts) - counts
            indices = np.arange(len(patch.block_ids)) + np.repeat(firsts - starts, counts)
            self._flat[indices] = patch.block_ids
        self._is_device_stale = self._device.type != "cpu"


def _require_range(what: str, values: Int32Array, limit: int) -> None:
    if not are_below(values, limit):
        raise BlockError(
            f"block table patch has {what} {int(values.min())}..{int(values.max())}, this rank "
            f"has 0..{limit - 1}"
        )
