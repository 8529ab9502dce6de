"""Commands that are applied but not executed: they wait for the forward of their step.

Stands between application, which puts them here, and `begin_forward`, which executes everything up
to its number in order. Loads and stores do not wait for forwards: whatever is still waiting for a
block they touch belongs to a step that is over, and is executed first (`settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from kvcache.base.arrays import Int32Array
from kvcache.protocol.commands import BlockTablePatch, Copy, Zero
from kvcache.protocol.messages import StepCommands
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.copy_engine import CopyEngine, PendingCopy
from kvcache.worker.history import BlockHistory
from kvcache.worker.store_reads import TransferUses

DeferredCommand: TypeAlias = Zero | Copy | BlockTablePatch


class DeferredCommands:
    """A queue of numbered commands, and the ability to execute them. Numbers only rise."""

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        tables: BlockTables,
        engine: CopyEngine,
        history: BlockHistory,
        uses: TransferUses,
    ) -> None:
        """Execute on these; `uses` says what transfers still do to which blocks."""
        self._rows = rows
        self._tables = tables
        self._engine = engine
        self._history = history
        self._uses = uses
        self._waiting: deque[tuple[int, list[DeferredCommand]]] = deque()
        self.num_blocks_copied = 0
        self.num_blocks_zeroed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def highest_seq(self) -> int:
        """Number of the last waiting message, 0 when none waits."""
        return self._waiting[-1][0] if self._waiting else 0

    def add(self, message: StepCommands) -> None:
        """Keep what the forward of `message` must execute."""
        commands = [c for c in message.commands if isinstance(c, (Zero, Copy, BlockTablePatch))]
        if commands:
            self._waiting.append((message.seq, commands))

    def in_the_way(self, up_to_seq: int) -> PendingCopy | None:
        """Return a transfer that must be over before `execute(up_to_seq)`, None if none must."""
        for seq, commands in self._waiting:
            if seq > up_to_seq:
                break
            for command in commands:
                copies = self._in_the_way_of(command)
                if copies:
                    return copies[0]
        return None

    def in_the_way_of_settling(self, block_ids: Int32Array) -> PendingCopy | None:
        """Return a transfer that must be over before `settle(block_ids)`, None if none must."""
        for _, commands in self._waiting:
            for command in commands:
                now, _ = _split(command, block_ids)
                copies = [] if now is None else self._in_the_way_of(now)
                if copies:
                    return copies[0]
        return None

    def execute(self, up_to_seq: int) -> None:
        """Execute everything up to and including `up_to_seq`, in order. Nothing is in the way."""
        while self._waiting and self._waiting[0][0] <= up_to_seq:
            seq, commands = self._waiting.popleft()
            for command in commands:
                self._execute(seq, command)

    def settle(self, block_ids: Int32Array) -> bool:
        """Execute now, in order, the zeroes and copies of `block_ids`, and of these only; say
        whether there were any. Nothing is in the way.

        The coordinator starts a transfer on a block only when every step that has it in its tables
        completed or failed, so these cannot be wanted by a forward any more; executed later they
        would destroy what the transfer wrote.
        """
        has_executed = False
        for seq, commands in self._waiting:
            waiting: list[DeferredCommand] = []
            for command in commands:
                now, later = _split(command, block_ids)
                if now is not None:
                    self._execute(seq, now)
                    has_executed = True
                if later is not None:
                    waiting.append(later)
            commands[:] = waiting
        return has_executed

    def clear(self) -> None:
        """Drop everything: a new epoch makes it void."""
        self._waiting.clear()

    def _in_the_way_of(self, command: DeferredCommand) -> list[PendingCopy]:
        """Return transfers that still read what `command` writes, or write what it uses."""
        match command:
            case BlockTablePatch():
                return self._uses.before_read(command.block_ids)
            case Zero():
                return self._uses.before_write(command.block_ids)
            case Copy():
                read = self._uses.before_read(command.sources)
                return read + self._uses.before_write(command.destinations)

    def _execute(self, seq: int, command: DeferredCommand) -> None:
        match command:
            case BlockTablePatch():
                self._tables.apply(command)
                self._history.record(
                    seq,
                    "entered the table of slot",
                    command.block_ids,
                    np.repeat(command.slots, command.counts),
                )
            case Zero():
                for rows in self._rows:
                    self._engine.zero_blocks(rows, command.block_ids)
                self.num_blocks_zeroed += len(command.block_ids)
                self._history.record(seq, "zeroed", command.block_ids)
            case Copy():
                for rows in self._rows:
                    self._engine.copy_within(rows, command.sources, command.destinations)
                self.num_blocks_copied += len(command.destinations)
                self._history.record(
                    seq, "copied from block", command.destinations, command.sources
                )
                self._history.record(seq, "copied to block", command.sources, command.destinations)


def _split(
    command: DeferredCommand, block_ids: Int32Array
) -> tuple[DeferredCommand | None, DeferredCommand | None]:
    """Return the part of `command` that touches `block_ids`, and the rest; None for nothing."""
    match command:
        case Zero():
            touched = np.isin(command.block_ids, block_ids)
            now: DeferredCommand = Zero(command.block_ids[touched])
            later: DeferredCommand = Zero(command.block_ids[~touched])
        case Copy():
            touched = np.isin(command.sources, block_ids) | np.isin(command.destinations, block_ids)
            now = Copy(command.sources[touched], command.destinations[touched])
            later = Copy(command.sources[~touched], command.destinations[~touched])
        case BlockTablePatch():
            return None, command
    return (now if touched.any() else None), (None if touched.all() else later)
