"""The true content of every block of one manager's workers, with labels and tables.

One per core. Applies commands as a worker does, writes the results of forwards into blocks, and
checks before every forward that all its inputs are there. Knows nothing of cores; raises
AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.protocol.commands import BlockTablePatch, Command, Copy, Label, Reset, Unlabel, Zero
from kvcache.specs import KVCacheSpec
from tests.agreement.content import Chains, Forward, Numbers
from tests.agreement.labels import Labels

UNKNOWN = -1
"""Bytes of a failed forward: no forward may read them."""

Tables = tuple[list[int], ...]


@dataclass
class Obeyed:
    """The effects of one operation's commands.

    Calls seal blocks that they make hittable before their forward has run: the blocks that such an
    operation labelled are still written. Steps write no labelled block.
    """

    is_step: bool = False
    labelled: set[int] = field(default_factory=set)
    num_zeroed: int = 0
    num_copied: int = 0

    @property
    def writable(self) -> set[int]:
        return set() if self.is_step else self.labelled


class Truth:
    """Bytes, labels and block tables of the workers below one manager."""

    def __init__(self, specs: Sequence[KVCacheSpec], num_blocks: int) -> None:
        width = max(spec.block_size for spec in specs)
        self.specs = tuple(specs)
        self.chains = Chains()
        self.cells: Numbers = np.zeros((num_blocks, width), dtype=np.int64)
        self.labels = Labels(specs, num_blocks, self.chains)
        self._steps: Numbers = np.zeros((num_blocks, width), dtype=np.int64)
        self._step_numbers: dict[tuple[str, int], int] = {}
        self._tables: dict[tuple[int, int, int], int] = {}
        self._written: set[int] = set()

    # --- commands ---

    def obey(self, commands: Sequence[Command], patches: BlockTablePatch | None) -> Obeyed:
        """Apply commands in order; those inside a forward come after those at apply time."""
        obeyed = Obeyed(is_step=patches is not None)
        inside: list[Command] = [] if patches is None else [patches]
        for command in commands:
            if isinstance(command, Label):
                self.labels.apply(command)
                obeyed.labelled.update(command.block_ids.tolist())
            elif isinstance(command, Unlabel):
                self.labels.withdraw(command.block_ids.tolist())
                obeyed.labelled.difference_update(command.block_ids.tolist())
            elif isinstance(command, Reset):
                self.labels.reset()
                obeyed.labelled.clear()
            else:
                inside.append(command)
        for command in inside:
            self._obey_inside(command, obeyed)
        return obeyed

    def _obey_inside(self, command: Command, obeyed: Obeyed) -> None:
        if isinstance(command, BlockTablePatch):
            self._patch(command)
        elif isinstance(command, Zero):
            ids = command.block_ids
            assert len(set(ids.tolist())) == len(ids), f"blocks are zeroed twice: {ids.tolist()}"
            self._require_unlabelled(set(ids.tolist()) - obeyed.writable, "zeroed")
            self.cells[ids] = 0
            obeyed.num_zeroed += len(ids)
        elif isinstance(command, Copy):
            destinations = set(command.destinations.tolist())
            self._require_unlabelled(destinations - obeyed.writable, "copied to")
            self.cells[command.destinations] = self.cells[command.sources]
            self._steps[command.destinations] = self._steps[command.sources]
            obeyed.num_copied += len(command.sources)
        else:
            raise AssertionError(f"a core sends {command}")

    def _patch(self, patch: BlockTablePatch) -> None:
        ids = iter(patch.block_ids.tolist())
        columns = (patch.slots, patch.groups, patch.first_indices, patch.counts)
        for slot, group, first, count in zip(*(c.tolist() for c in columns), strict=True):
            for column in range(first, first + count):
                self._tables[slot, group, column] = next(ids)
        assert next(ids, None) is None, "a patch brings more ids than it places"

    def compare_tables(self, slot: int, tables: Tables) -> None:
        """Check the worker's table of a slot against the manager's, except for dropped columns."""
        for group, table in enumerate(tables):
            told = [self._tables.get((slot, group, i)) for i in range(len(table))]
            for block, seen in zip(table, told, strict=True):
                assert not block or block == seen, f"slot {slot} group {group}: {table}, not {told}"

    # --- forwards ---

    def run(
        self,
        forwards: Sequence[Forward],
        tables_of: Callable[[str], Tables],
        epoch_of: Callable[[str], int],
        obeyed: Obeyed,
    ) -> None:
        """Compute forwards together: read states, write everything, then read tokens."""
        self._written.clear()
        parts = [
            (f, self.chains.of(f.origin, epoch_of(f.name), f.tokens), tables_of(f.name))
            for f in forwards
        ]
        for forward, numbers, tables in parts:
            self._bring_external(forward, numbers, tables)
        for forward, numbers, tables in parts:
            for group, spec in enumerate(self.specs):
                if spec.num_state_blocks is not None and forward.start:
                    self._read_state(forward, numbers, group, tables[group])
        for forward, numbers, tables in parts:
            self._write(forward, numbers, tables)
        for forward, numbers, tables in parts:
            self._read_tokens(forward, numbers, tables)
        self._require_unlabelled(self._written - obeyed.writable, "written")
        self.labels.check(obeyed.labelled, self.cells)

    def look_at(self, forward: Forward, tables: Tables, epoch: int) -> None:
        """Check that the blocks have all that a forward from `start` on would read."""
        numbers = self.chains.of(forward.origin, epoch, forward.tokens)
        for group, spec in enumerate(self.specs):
            if spec.num_state_blocks is not None and forward.start:
                self._read_state(forward, numbers, group, tables[group])
        self._read_tokens(forward, numbers, tables)

    def fail(self, client: str, step: int) -> None:
        """Make the bytes of the client's steps from `step` on unknown."""
        void = [n for (c, s), n in self._step_numbers.items() if c == client and s >= step]
        if void:
            self.cells[np.isin(self._steps, void)] = UNKNOWN

    def _column(self, spec: KVCacheSpec, num_tokens: int) -> int:
        return (num_tokens - 1) // spec.block_size if spec.can_prefix_cache else 0

    def _key(self, group: int, number: int) -> int:
        return number * len(self.specs) + group

    def _keys(self, group: int, numbers: Numbers) -> Numbers:
        return numbers * len(self.specs) + group

    def _read_state(
        self, forward: Forward, numbers: Numbers, group: int, table: Sequence[int]
    ) -> None:
        column = self._column(self.specs[group], forward.last_own) + forward.num_accepted
        block, wanted = table[column], self._key(group, int(numbers[forward.start - 1]))
        assert block, f"{forward.name}: the state in column {column} of {table} is null"
        assert self.cells[block, 0] == wanted, (
            f"{forward.name}: column {column} of group {group} has not the state after "
            f"{forward.start} tokens"
        )

    def _read_tokens(self, forward: Forward, numbers: Numbers, tables: Tables) -> None:
        start = forward.start
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if spec.keeps_encoder_tokens:
                wanted = self._key(group, self.chains.number("encoder", forward.encoder_key))
                assert (self.cells[table, 0] == wanted).all(), f"{forward.name}: encoder tokens"
            elif spec.num_state_blocks is None:
                positions = np.arange(start)
                blocks = np.array(table, dtype=np.intp)[positions // spec.block_size]
                first = spec.num_skipped_tokens(start)
                assert blocks[first:].all(), (
                    f"{forward.name}: {table} of group {group} lacks tokens from {first} on"
                )
                found = self.cells[blocks, positions % spec.block_size]
                wrong = (blocks > 0) & (found != self._keys(group, numbers[:start]))
                assert not wrong.any(), (
                    f"{forward.name}: position {int(wrong.argmax())} of group {group} is not what "
                    f"its tokens demand, in {table}"
                )

    def _bring_external(self, forward: Forward, numbers: Numbers, tables: Tables) -> None:
        if not forward.num_external:
            return
        first = forward.start - forward.num_external
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if spec.num_state_blocks is not None:
                block = table[self._column(spec, forward.start)]
                self._put(forward, group, [block], [0], numbers[forward.start - 1 : forward.start])
            elif not spec.keeps_encoder_tokens:
                positions = np.arange(first, forward.start)
                blocks = np.array(table, dtype=np.intp)[positions // spec.block_size]
                kept = blocks > 0
                at = positions[kept]
                self._put(forward, group, blocks[kept], at % spec.block_size, numbers[at])

    def _write(self, forward: Forward, numbers: Numbers, tables: Tables) -> None:
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if spec.keeps_encoder_tokens:
                if forward.is_new:
                    key = self.chains.number("encoder", forward.encoder_key)
                    self._put(forward, group, table, [0] * len(table), np.full(len(table), key))
                continue
            if spec.num_state_blocks is not None:
                own = forward.own_end
                first = self._column(spec, own)
                count = len(forward.tokens) - own + 1
                assert first + count <= len(table), f"{forward.name}: no column for {count} states"
                self._put(
                    forward, group, table[first : first + count], [0] * count, numbers[own - 1 :]
                )
                continue
            positions = np.arange(forward.start, len(forward.tokens))
            assert len(forward.tokens) <= len(table) * spec.block_size, f"{forward.name}: {table}"
            blocks = np.array(table, dtype=np.intp)[positions // spec.block_size]
            self._put(forward, group, blocks, positions % spec.block_size, numbers[forward.start :])

    def _put(
        self,
        forward: Forward,
        group: int,
        blocks: Sequence[int] | Numbers,
        places: Sequence[int] | Numbers,
        numbers: Numbers,
    ) -> None:
        ids, at = np.array(blocks, dtype=np.intp), np.array(places, dtype=np.intp)
        assert ids.all(), f"{forward.name}: writes into the null block in group {group}"
        step = self._step_numbers.setdefault(forward.step, len(self._step_numbers) + 1)
        self.cells[ids[at == 0]] = 0  # bytes of an earlier request
        self.cells[ids, at] = self._keys(group, numbers)
        self._steps[ids, at] = step
        self._written.update(ids.tolist())

    # --- labels ---

    def _require_unlabelled(self, block_ids: set[int], what: str) -> None:
        labelled = [b for b in sorted(block_ids) if b in self.labels]
        assert not labelled, f"blocks {labelled} are {what} but still labelled"
