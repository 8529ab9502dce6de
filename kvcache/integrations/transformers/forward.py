"""One forward of a batch: which places of the tensors its tokens go to, and where all others are.

Made when a forward begins, once for every KV cache group, and read by each of the group's layers.
Pads have no place: they are read from the null block, whose bytes are zero; the model masks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcache.integrations.transformers.paged_memory import PagedMemory
from kvcache.integrations.transformers.row import Row
from kvcache.specs import KVCacheGroupSpec


@dataclass(frozen=True)
class GroupPlaces:
    """Places of one group: block id and offset in the block, each an int64 tensor.

    `read_*` are `(rows of the batch, columns)` for columns `[first_column, length + new)`; the
    `written_*` are flat, with the batch row and the new column that each is written from.
    """

    read_blocks: torch.Tensor
    read_offsets: torch.Tensor
    written_blocks: torch.Tensor
    written_offsets: torch.Tensor
    written_rows: torch.Tensor
    written_columns: torch.Tensor


@dataclass(frozen=True)
class Forward:
    """A forward of `num_new` columns behind `length`, by `batch_size` rows.

    Row i of the batch stands for row `i // repeats` of the cache: `generate` repeats every prompt
    for each beam or sequence, and its keys and values are kept once. `groups` are by layer name.
    """

    length: int
    num_new: int
    batch_size: int
    repeats: int
    groups: Mapping[str, GroupPlaces]


def first_column(window: int | None, length: int) -> int:
    """First column that tokens behind `length` see: a token sees `window`, itself included."""
    return 0 if window is None else max(0, length - window + 1)


def plan_forward(
    memory: PagedMemory, rows: Sequence[Row], length: int, num_new: int, repeats: int
) -> Forward:
    """Return where everything is, as the worker's block tables are now."""
    slots = [memory.slot_of(row.request) for row in rows]
    groups = {}
    for index, group in enumerate(memory.config.kv_cache_groups):
        table = memory.block_table(index, slots)
        places = _group_places(group, table, rows, range(length, length + num_new), repeats)
        groups.update(dict.fromkeys(group.layer_names, places))
    return Forward(length, num_new, len(rows) * repeats, repeats, groups)


def _group_places(
    group: KVCacheGroupSpec,
    table: torch.Tensor,
    rows: Sequence[Row],
    new_columns: range,
    repeats: int,
) -> GroupPlaces:
    length = new_columns.start
    spec = group.kv_cache_spec
    device, block_size = table.device, spec.block_size
    start = first_column(getattr(spec, "sliding_window", None), length)
    pads = torch.tensor([row.pad for row in rows], device=device)[:, None]
    tokens = torch.arange(start, new_columns.stop, device=device)[None] - pads
    places = tokens.clamp(min=0)
    blocks = table.gather(1, places // block_size) * (tokens >= 0)
    offsets = places % block_size
    # What a row holds already is not written: others may read it.
    held = torch.tensor([row.num_held for row in rows], device=device)[:, None]
    new = tokens[:, length - start :]
    lead_rows, columns = torch.nonzero((new >= 0) & (new >= held), as_tuple=True)
    return GroupPlaces(
        blocks.repeat_interleave(repeats, 0),
        offsets.repeat_interleave(repeats, 0),
        blocks[:, length - start :][lead_rows, columns],
        offsets[:, length - start :][lead_rows, columns],
        lead_rows * repeats,
        columns,
    )
