"""Checks that the arrays of one command fit together, when messages are encoded and decoded.

Only of commands that others than workers read, too: block tables in a step's answer, and labels in
a worker's report. A worker checks the commands it gets before it applies them. Contents are not
checked here: whether a block exists is decided where a command is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from kvcache.base.arrays import Int32Array
from kvcache.base.compiled import array_type, compiled
from kvcache.base.errors import MalformedMessageError
from kvcache.protocol.commands import BlockTablePatch, Label
from kvcache.protocol.labels import validate_label_command


@compiled(types.int64(array_type("int32", is_read=True)))
def _sum_of(counts: Int32Array) -> int:
    """Return the sum of counts, -1 if one of them is negative."""
    total = 0
    for count in counts:
        if count < 0:
            return -1
        total += count
    return total


def _validate_patch(patch: BlockTablePatch) -> None:
    count = len(patch.slots)
    if not (count == len(patch.groups) == len(patch.first_indices) == len(patch.counts)):
        names = ("slots", "groups", "first_indices", "counts")
        told = {name: len(getattr(patch, name)) for name in names}
        raise MalformedMessageError(f"BlockTablePatch with unequal lengths {told}")
    total = _sum_of(patch.counts)
    if total < 0:
        raise MalformedMessageError("BlockTablePatch with a negative count of block ids")
    if total != len(patch.block_ids):
        raise MalformedMessageError(
            f"BlockTablePatch announces {total} block ids and brings {len(patch.block_ids)}"
        )


def _validate_label(label: Label) -> None:
    count = len(label.block_ids)
    validate_label_command(label, max(1, len(label.digests) // count) if count else 1)


SHAPE_VALIDATORS: dict[type[Any], Callable[[Any], None]] = {
    BlockTablePatch: _validate_patch,
    Label: _validate_label,
}
"""By class of command: raises MalformedMessageError unless its arrays fit together."""
