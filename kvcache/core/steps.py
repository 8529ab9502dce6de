"""Steps: which contents wait for a client's forwards, by the serials that nodes carry.

Each step that makes blocks hittable has a serial, and `client` says which client it belongs to.
Completing a step clears that entry, which seals everything that carries the serial at once. Serials
are given out in order, and renumbered when the ring is full. Steps that go back are refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache.base.errors import RequestError
from kvcache.core.columns import ColumnStore, columns_of
from kvcache.core.kinds.rule import FULL, KIND, LENGTH
from kvcache.core.machine import CORE, INT, NEW_INT_ROWS, kernel
from kvcache.core.names import *
from kvcache.core.prefix_tree import is_sealed
from kvcache.core.rows import rewind_row

NodeNotes = Any


@kernel(INT, CORE, NEW_INT_ROWS, INT, NEW_INT_ROWS)
def settle_notes(core: Any, notes: Any, serial: int, waiting: Any) -> int:
    """Move those notes of a step that are still true to the front, and return how many there are.

    A block that continues a block of another client's step, which is not complete, waits for that
    step, too: no listener hears of a content before its parent. Write that step's serial to
    `waiting`, 0 for all other notes.
    """
    c = columns_of(core)
    count = 0
    for i in range(len(notes)):
        n, g = np.int64(notes[i, 0]), np.int64(notes[i, 1])
        if c.node[n, BLOCK + 2 * g] == 0 or c.node[n, OWNER + 2 * g] != serial:
            continue
        for k in range(notes.shape[1]):
            notes[count, k] = notes[i, k]
        waiting[count, 0] = 0
        if c.group[g, KIND] == FULL:
            above = n
            for _ in range(c.group[g, LENGTH]):
                above = np.int64(c.node[above, PARENT])
            owner = np.int64(c.node[above, OWNER + 2 * g])
            if owner != serial and c.node[above, PARENT] and not is_sealed(core, owner):
                c.node[n, OWNER + 2 * g] = owner
                waiting[count, 0] = owner
        count += 1
    return count


@dataclass(eq=False, slots=True)
class OpenStep:
    """A step that made blocks hittable: its notes, and the units of rows that it published.

    Each array in `rows` has row, generation, first unit and end, shape `(n, 4)`. `waits`: notes of
    other steps wait for this one; the same content may then be noted more than once.
    """

    client: int
    step: int
    serial: int
    notes: list[NodeNotes] = field(default_factory=list)
    waits: bool = False
    rows: list[Any] = field(default_factory=list)

    def published_rows(self) -> list[list[int]]:
        """Return the entries of all arrays in `rows`, in order."""
        return [row for rows in self.rows for row in rows.tolist()]


class StepTable:
    """The open step of one core, and the steps that wait for completion, in order, by client."""

    def __init__(self, store: ColumnStore) -> None:
        """Start without any step."""
        self._store = store
        self.current: OpenStep | None = None
        """The open step."""
        self._client_id = ""
        self._waiting: dict[str, deque[OpenStep]] = {}
        self._numbers: dict[str, int] = {}
        self._next_serial = 1

    @property
    def has_waiting(self) -> bool:
        """Whether any step waits for completion. The open step does not count."""
        return bool(self._waiting)

    def open(self, client_id: str, step: int) -> None:
        """Open a step of a client, which has no later one."""
        if self.current is not None:
            self.close()
        number = self._numbers.get(client_id)
        if number is None:
            number = 1
            if self._numbers:
                used = set(self._numbers.values())
                number = next(i for i in range(1, len(used) + 2) if i not in used)
            self._numbers[client_id] = number
        self._client_id = client_id
        self._begin(number, step)

    def close(self) -> None:
        """End the open step, if any."""
        if self.current is None:
            return
        self._end(self.current)
        self.current = None
        self._store.cells[SERIAL] = 0
        if self._client_id not in self._waiting:
            self._numbers.pop(self._client_id, None)

    def note_rows(self, rows: Any) -> None:
        """Remember the units that rows published: row, generation, first unit, end."""
        if self.current is not None:
            self.current.rows.append(rows)

    def note_row(self, r: int, start: int, end: int) -> None:
        """Remember that a row publishes its units `[start, end)`."""
        if self.current is not None:
            generation = self._store.columns.row.item(r, GENERATION)
            self.current.rows.append(np.array([(r, generation, start, end)], np.int32))

    def note(self, notes: NodeNotes) -> None:
        """Remember what became hittable in the open step."""
        if self.current is not None:
            self.current.notes.append(notes)

    def complete(self, client_id: str, through_step: int) -> list[OpenStep]:
        """Seal the client's steps up to `through_step`. Return them, with notes only of the
        contents that are sealed now."""
        self._keep_current()
        waiting, completed = self._waiting.get(client_id), list[OpenStep]()
        if not waiting or waiting[0].step > through_step:
            return completed
        c = self._store.columns
        # Which notes are still true matters only to listeners and to steps of other clients.
        settles = self._store.cells[LOGS_GONE] or len(self._waiting) > 1
        while waiting and waiting[0].step <= through_step:
            step = waiting.popleft()
            if step.notes and settles:
                notes = step.notes[0] if len(step.notes) == 1 else np.concatenate(step.notes)
                step.notes = [
                    self.settled(_last_of_each(notes) if step.waits else notes, step.serial)
                ]
            c.client[step.serial & (NUM_STEPS - 1)] = 0
            completed.append(step)
        self._update_sealed_below(client_id)
        return completed

    def take_failed(self, client_id: str, from_step: int) -> list[OpenStep]:
        """Remove the client's steps from `from_step` on, rewind the rows that published in them,
        and return the steps, last one first. The caller drops what they made hittable, and then
        calls `end_failed`."""
        self._keep_current()
        waiting, failed = self._waiting.get(client_id), []
        row, core = self._store.columns.row, self._store.address
        while waiting and waiting[-1].step >= from_step:
            step = waiting.pop()
            failed.append(step)
            for r, generation, units, _ in reversed(step.published_rows()):
                if row.item(r, GENERATION) == generation and row.item(r, UNITS) > units:
                    rewind_row(core, r, units)
        return failed

    def end_failed(self, client_id: str, failed: list[OpenStep]) -> None:
        """Clear the serials of failed steps. All that they made hittable has been dropped."""
        for step in failed:
            self._store.columns.client[step.serial & (NUM_STEPS - 1)] = 0
        self._update_sealed_below(client_id)

    def clear(self) -> None:
        """Remove all waiting steps. No node carries a serial any more."""
        self._waiting.clear()
        self._store.columns.client[:] = 0
        current, self.current = self.current, None
        self._numbers = {} if current is None else {self._client_id: current.client}
        self._next_serial = 1
        self._store.columns.number[SEALED_BELOW] = 1
        if current is not None:
            self._begin(current.client, current.step)

    def settled(self, notes: NodeNotes, serial: int = 0) -> NodeNotes:
        """Return those notes of a step that are still true and are sealed with it. Without a
        serial, the notes are those of contents made hittable outside any step. Notes of blocks that
        continue another client's unsealed block move to that client's step."""
        waiting = np.zeros((len(notes), 1), np.int32)
        count = settle_notes(self._store.address, notes, serial, waiting)
        notes, owners = notes[:count], waiting[:count, 0]
        if np.count_nonzero(owners):
            for owner in np.unique(owners[owners != 0]).tolist():
                moved = np.ascontiguousarray(notes[owners == owner])
                step = self._step_of(owner)
                step.notes.append(moved)
                step.waits = True
            notes = np.ascontiguousarray(notes[owners == 0])
        return notes

    def waiting(self) -> list[tuple[str, OpenStep]]:
        """Return all steps that wait for completion, without the open one. For audits."""
        self._keep_current()
        return [(client, step) for client, steps in self._waiting.items() for step in steps]

    # --- inside ------------------------------------------------------------------------------

    def _begin(self, client: int, step: int) -> None:
        """Open a step with the next serial, which is reused if nothing becomes hittable."""
        cells = self._store.cells
        if self._next_serial - cells[SEALED_BELOW] >= NUM_STEPS - 1:
            self._renumber()
        serial = self._next_serial
        self.current = OpenStep(client, step, serial)
        self._store.columns.client[serial & (NUM_STEPS - 1)] = client
        cells[SERIAL] = cells[OPENED] = serial
        waiting = self._waiting.get(self._client_id)
        if waiting and waiting[-1].step == step:
            cells[OPENED] = min([part.serial for part in waiting if part.step == step])
        self._next_serial = serial + 1

    def _keep_current(self) -> None:
        """If the open step has made anything hittable, let that part wait, and continue the step
        with another serial."""
        current = self.current
        if current is not None:
            self._end(current)
            self._begin(current.client, current.step)

    def _end(self, current: OpenStep) -> None:
        if current.rows or current.notes:
            self._waiting.setdefault(self._client_id, deque()).append(current)
        else:
            self._store.columns.client[current.serial & (NUM_STEPS - 1)] = 0
            self._next_serial = current.serial

    def _step_of(self, serial: int) -> OpenStep:
        return next(s for steps in self._waiting.values() for s in steps if s.serial == serial)

    def _update_sealed_below(self, client_id: str) -> None:
        """Set the serial below which all steps are sealed, and forget the client if it is idle."""
        if not self._waiting.get(client_id):
            self._waiting.pop(client_id, None)
            if self.current is None or self._client_id != client_id:
                self._numbers.pop(client_id, None)
        oldest = self._next_serial if self.current is None else self.current.serial
        if self._waiting:
            oldest = min([steps[0].serial for steps in self._waiting.values()])
        self._store.cells[SEALED_BELOW] = oldest

    def _renumber(self) -> None:
        """Give waiting steps the lowest serials, in order. The caller opens the next step."""
        c = self._store.columns
        steps = sorted(
            (step for steps in self._waiting.values() for step in steps), key=lambda s: s.serial
        )
        if len(steps) >= NUM_STEPS - 2:
            raise RequestError(
                f"{len(steps)} steps wait to be completed: complete or fail the steps of "
                "clients that have gone"
            )
        end = int(c.number[NEXT_NODE])
        owners = c.node[:end, OWNER::2]
        numbers = np.zeros(self._next_serial, np.int32)
        for serial, step in enumerate(steps, 1):
            numbers[step.serial] = serial
        owners[:] = numbers[owners]
        c.client[:] = 0
        for serial, step in enumerate(steps, 1):
            step.serial = serial
            c.client[serial] = step.client
        c.number[SEALED_BELOW] = 1
        self._next_serial = len(steps) + 1


def _last_of_each(notes: NodeNotes) -> NodeNotes:
    """Return the last note of each node and group, in order."""
    _, places = np.unique(notes[::-1, :2], axis=0, return_index=True)
    return np.ascontiguousarray(notes[np.sort(len(notes) - 1 - places)])
