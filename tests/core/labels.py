"""A worker's labels after a core's commands."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.base.arrays import int32_array
from kvcache.core.flat_core import FlatCore
from kvcache.protocol.commands import Command, Label, Unlabel
from kvcache.protocol.labels import LabelSet, LabelTable

DIGEST_BYTES = 32


def apply_commands(table: LabelTable, commands: Sequence[Command]) -> None:
    for command in commands:
        if isinstance(command, Label):
            table.validate(command)
            table.apply(command)
        elif isinstance(command, Unlabel):
            table.withdraw(command.block_ids)


def label_table(core: FlatCore, num_blocks: int, longest_block: int = 4) -> LabelTable:
    """Return the labels of all pending commands of `core`."""
    table = LabelTable(num_blocks, DIGEST_BYTES, longest_block)
    apply_commands(table, core.take_commands())
    return table


def without(table: LabelTable, num_blocks: int, block_ids: Sequence[int]) -> LabelSet:
    """Return a rank's labels without those of some blocks. The table itself keeps them."""
    whole = table.collect(0, 1, 1, "layout")
    partial = LabelTable(num_blocks, whole.digest_bytes, max(whole.labels.token_counts, default=1))
    partial.apply(whole.labels)
    partial.withdraw(int32_array(block_ids))
    return partial.collect(1, 1, 1, "layout")
