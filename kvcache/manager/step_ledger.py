"""Undo records of each client's unfinished steps, for rolling back a failed step.

A step writes one record, which is dropped when the step completes and used for a rollback when it
fails. The number of unfinished steps per client is limited. Records have no blocks: the core itself
invalidates the blocks that a failed step made hittable.

    step n admitted or ran a row ──▶ record ──completed_step >= n──▶ dropped
                                        └─────failed_step <= n──────▶ Rollback
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.core.running import (
    BEFORE_COMPUTED,
    BEFORE_TOKENS,
    CONFIRMED,
    CONFIRMED_END,
    NO_ROWS,
    RunningRows,
    note_confirmed,
)
from kvcache.manager.request_table import CALLER, KnownRequest, RequestTable


class SlotAssignment(NamedTuple):
    """A request, the occupancy of a slot that a step began or ended, and its tokens then."""

    known: KnownRequest
    generation: int
    num_tokens: int


@dataclass(eq=False, slots=True)
class StepRecord:
    """The state that one step changed, as it was before."""

    step: int
    rows: RunningRows = NO_ROWS
    preempted: list[SlotAssignment] = field(default_factory=list)
    resumed: list[SlotAssignment] = field(default_factory=list)
    new: list[SlotAssignment] = field(default_factory=list)


@dataclass(frozen=True)
class RowBefore:
    """The state that a row is rolled back to."""

    known: KnownRequest
    slot: int
    num_computed: int
    num_tokens: int


@dataclass(frozen=True)
class Rollback:
    """The changes that undo a client's steps from `from_step` on. Nothing is changed yet.

    Requests in `forgotten` were new in those steps, those in `preempted_again` were resumed in
    them. Those in `preempted` lost their slots in them, and keep only earlier tokens. `rows` ran
    before those steps and in them; so did `overwritten`, but their states were overwritten, so they
    are preempted.
    """

    from_step: int
    forgotten: tuple[KnownRequest, ...]
    preempted_again: tuple[RowBefore, ...]
    rows: tuple[RowBefore, ...]
    preempted: tuple[RowBefore, ...]
    overwritten: tuple[RowBefore, ...]

    @property
    def without_slot(self) -> tuple[RowBefore, ...]:
        """Requests that stay known but have no slot afterwards."""
        return (*self.preempted_again, *self.preempted, *self.overwritten)


class ClientSteps:
    """The steps of one client: the last, the completed and the void ones.

    Invariants: records are in order of step, all above `completed_step`; `void` holds disjoint
    ranges of steps, in order, all reaching above `completed_step`.
    """

    def __init__(self, client_id: str, index: int) -> None:
        """Begin without steps. `index` is the client's in the request table."""
        self.client_id = client_id
        self.index = index
        self.last_step = 0
        self.completed_step = 0
        self.records: deque[StepRecord] = deque()
        self.void: list[tuple[int, int]] = []

    def is_under_way(self, step: int) -> bool:
        """Return whether a rank may still run this executed step, or one before it."""
        if step <= self.completed_step:
            return False
        void = self.void_range(step)
        return void is None or self.completed_step < void[0] - 1

    def void_range(self, step: int) -> tuple[int, int] | None:
        """Return the first and last step of the failed range that contains `step`, or None."""
        return next((r for r in self.void if r[0] <= step <= r[1]), None)

    def complete(self, step: int) -> None:
        """Drop the records of steps up to `step`."""
        self.completed_step = step
        while self.records and self.records[0].step <= step:
            self.records.popleft()
        if self.void:
            self.void = [r for r in self.void if r[1] > step]

    def fail(self, step: int, preempted: Sequence[SlotAssignment] = ()) -> None:
        """Drop the records of steps from `step` on, which are now void.

        `preempted` are requests that could not be rolled back and lost their slots.
        """
        left = list(preempted)
        while self.records and self.records[-1].step >= step:
            left += self.records.pop().preempted
        if self.records:
            # They stay preempted; the rollback of an earlier step may need their requests.
            self.records[-1].preempted += left
        kept = [r for r in self.void if r[0] < step]
        # Ranges that touch become one: steps that fail again and again leave one range.
        first = kept.pop()[0] if kept and kept[-1][1] + 1 == step else step
        self.void = [*kept, (first, self.last_step)]

    def confirmed_tokens(self, rows: RunningRows, table: RequestTable) -> Int32Array:
        """Return how many tokens of each row no failing step can take back.

        Only blocks behind confirmed tokens may be freed. If this step fails, accepted drafts are
        drafts again. The step that admitted a row limits nothing: if it fails, the row is removed.
        """
        settled: Int32Array = rows.positions[CONFIRMED_END]
        if not self.records:
            return settled
        table.rows[rows.slots, CONFIRMED] = settled
        for record in reversed(self.records):
            before = record.rows
            note_confirmed(
                table.rows, table.generation, before.slots, before.generations, before.positions
            )
        confirmed: Int32Array = np.minimum(table.rows[rows.slots, CONFIRMED], settled)
        return confirmed

    def num_confirmed(self, generation: int, num_computed: int, num_tokens: int) -> int:
        """Return how many tokens of one row are complete on every rank.

        With unfinished steps, it has `num_computed` computed positions and `num_tokens` tokens. 0
        if the step that admitted it is unfinished.
        """
        num_confirmed = min(num_computed, num_tokens)
        for record in self.records:
            if any(s.generation == generation for s in (*record.new, *record.resumed)):
                return 0
            places = np.flatnonzero(record.rows.generations == generation)
            if len(places):
                positions = record.rows.positions[:, int(places[0])].tolist()
                num_before: int = min(positions[BEFORE_COMPUTED], positions[BEFORE_TOKENS])
                return min(num_confirmed, num_before)
        return num_confirmed

    def plan_rollback(
        self, from_step: int, table: RequestTable, *, keeps_states: bool = False
    ) -> Rollback:
        """Return the rollback of the steps from `from_step` on. Changes nothing.

        Where requests keep states, rows that ran in those steps cannot be rolled back.
        """
        records = [record for record in self.records if record.step >= from_step]
        by_generation = {known.generation: known for known in table.of_client(self.index)}
        for record in records:
            by_generation.update({s.generation: s.known for s in record.preempted})
        new = {id(s.known) for record in records for s in record.new}
        begun = {s.generation for record in records for s in record.resumed}
        before: dict[int, RowBefore] = {}
        for record in records:
            for row in _rows_before(record, by_generation):
                before.setdefault(id(row.known), row)

        here = [row for row in before.values() if _is_still_known(row.known, table)]
        old = [row for row in here if id(row.known) not in new]
        resumed = [row for row in old if row.known.is_running and row.known.generation in begun]
        rows = [row for row in old if row.known.is_running and row.known.generation not in begun]
        forgotten = {id(s.known): s.known for record in records for s in record.new}
        return Rollback(
            from_step,
            tuple(known for known in forgotten.values() if _is_still_known(known, table)),
            tuple(resumed),
            () if keeps_states else tuple(rows),
            tuple(row for row in old if not row.known.is_running),
            tuple(rows) if keeps_states else (),
        )


StepsUnderWay: TypeAlias = Sequence[tuple[ClientSteps, int]]
"""Clients, each with its last step to wait for."""


def _rows_before(record: StepRecord, by_generation: dict[int, KnownRequest]) -> list[RowBefore]:
    """Return the state, before a step, of the still known rows that it ran or resumed."""
    rows = zip(
        record.rows.generations.tolist(),
        record.rows.positions[BEFORE_COMPUTED].tolist(),
        record.rows.positions[BEFORE_TOKENS].tolist(),
        strict=True,
    )
    before = [
        RowBefore(known, known.slot, num_computed, num_tokens)
        for generation, num_computed, num_tokens in rows
        if (known := by_generation.get(generation)) is not None
    ]
    return before + [RowBefore(s.known, s.known.slot, 0, s.num_tokens) for s in record.resumed]


def _is_still_known(known: KnownRequest, table: RequestTable) -> bool:
    return table.known.get(known.request.request_id) is known


class StepLedger:
    """The clients of one manager, by id, each with its steps."""

    def __init__(self) -> None:
        """Begin without clients."""
        self.num_steps = 0
        self.num_failures = 0
        self._clients: dict[str, ClientSteps] = {}
        self._next_index = CALLER + 1

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def num_unfinished_steps(self) -> int:
        """Steps of all clients that can still be rolled back."""
        return sum(len(client.records) for client in self._clients.values())

    def look_up(self, client_id: str) -> ClientSteps:
        """Return the client's steps; for a new client, an entry that `keep` adds."""
        return self._clients.get(client_id) or ClientSteps(client_id, self._next_index)

    def keep(self, client: ClientSteps, *, has_failed: bool) -> None:
        """Count one more step of the client, and add the client if it is new."""
        self.num_steps += 1
        self.num_failures += has_failed
        if client.client_id not in self._clients:
            self._clients[client.client_id] = client
            self._next_index += 1

    def forget(self, client_id: str) -> ClientSteps | None:
        """Remove the client; return its steps."""
        return self._clients.pop(client_id, None)

    def under_way(self) -> StepsUnderWay:
        """Return the steps of all clients that are neither complete nor void."""
        return [
            (client, client.last_step)
            for client in self._clients.values()
            if client.is_under_way(client.last_step)
        ]

    def are_over(self, steps: StepsUnderWay) -> bool:
        """Return whether no rank can still run any of these steps."""
        return not any(
            self._clients.get(client.client_id) is client and client.is_under_way(step)
            for client, step in steps
        )

    def dump_state(self) -> dict[str, object]:
        """Return all clients as plain values, in order of id."""
        return {
            client_id: {
                "last_step": client.last_step,
                "completed_step": client.completed_step,
                "void": list(client.void),
                "unfinished": [record.step for record in client.records],
            }
            for client_id, client in sorted(self._clients.items())
        }
