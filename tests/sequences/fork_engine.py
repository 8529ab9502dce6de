"""An engine that forks, for walks through a content-checked cluster in one thread.

Keeps every sequence's tokens, computed length and outstanding drafts, and makes random steps.
Errors that the workers find are reported as failures of forwards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from actors import LocalCluster
from actors.client import KVCacheClient
from kvcache.protocol.step import (
    NO_SLOT,
    NO_STEP,
    Fork,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)
from tests.audits import Audits


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Sequence:
    name: str
    tokens: list[int]
    slot: int = NO_SLOT
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    born: int = 0

    @property
    def is_running(self) -> bool:
        return self.slot != NO_SLOT


@dataclass
class PlannedRow:
    sequence: Sequence
    rejected: int
    appended: list[int]
    num_new: int
    drafts: list[int]


class ForkEngine:
    """Random steps on one client; prompts of up to `longest` tokens, up to `max_drafts` drafts."""

    def __init__(
        self,
        cluster: LocalCluster,
        client: KVCacheClient,
        seed: int,
        *,
        longest: int,
        max_drafts: int = 0,
        num_encoder_tokens: int = 0,
    ) -> None:
        self.cluster = cluster
        self.client = client
        self.random = random.Random(seed)
        self.audits = Audits(seed, self._audit)
        self.longest, self.longest_kept = longest, 2 * longest
        self.max_drafts = max_drafts
        self.num_encoder_tokens = num_encoder_tokens
        self.known: dict[str, Sequence] = {}
        self.count = 0
        self.last_step = 0
        self.completed = 0
        self.lengths: dict[int, dict[str, int]] = {}  # of all tokens before each step
        self.first_valid = 0
        self.num_forks = self.num_withdrawn = 0
        self.hungry = False

    def walk(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.random.random() < 0.08 and self.last_step > self.completed:
                self.fail()
            else:
                self.go()
        self.finish_all()
        self.audits.make()

    # --- steps ---------------------------------------------------------------------------------

    def go(self) -> None:
        rng = self.random
        running = [s for s in self.known.values() if s.is_running]
        rng.shuffle(running)
        num_gone = rng.choice([0, 0, 0, 1]) if len(running) < 6 else 2
        running.sort(key=lambda s: len(s.tokens) < self.longest_kept)
        num_gone = max(num_gone, sum(len(s.tokens) >= self.longest_kept for s in running))
        finished, running = running[:num_gone], running[num_gone:]
        preempted: list[Sequence] = []
        if running and (self.hungry or rng.random() < 0.08):
            preempted, running = running[:1], running[1:]
        forks = [(s, self.new_name()) for s in running if rng.random() < 0.25]
        children = [
            Sequence(name, list(s.tokens), NO_SLOT, min(s.computed, len(s.tokens)))
            for s, name in forks
        ]
        rows = [self.plan_row(s) for s in running if rng.random() < 0.8]
        resumed = [
            s
            for s in self.known.values()
            if not s.is_running and s not in preempted and rng.random() < 0.5
        ]
        new = [self.new_sequence() for _ in range(rng.choice([0, 0, 1]))]
        chunks = [rng.choice([3, 7, self.longest]) for _ in (*resumed, *new)]
        request = StepRequest(
            completed_step=self.finished_step(),
            finished=tuple(s.name for s in finished),
            preempted_recompute=tuple(s.name for s in preempted if len(s.name) % 2),
            preempted_swap=tuple(s.name for s in preempted if not len(s.name) % 2),
            forks=tuple(Fork(s.name, name) for s, name in forks),
            running=self.arrays(rows),
            resumed=tuple(ResumedRequest(s.name, n) for s, n in zip(resumed, chunks, strict=False)),
            new=tuple(
                NewRequest(s.name, ints(s.tokens), n, num_encoder_tokens=self.num_encoder_tokens)
                for s, n in zip(new, chunks[len(resumed) :], strict=True)
            ),
        )
        self.lengths[self.last_step + 1] = {s.name: len(s.tokens) for s in self.known.values()}
        result = self.send(request)
        for sequence in finished:
            del self.known[sequence.name]
        for sequence in preempted:
            sequence.slot, sequence.computed, sequence.drafts = NO_SLOT, 0, []
        self.seat_children(children, result)
        for row, is_scheduled in zip(rows, result.running_scheduled.tolist(), strict=True):
            self.take_row(row, bool(is_scheduled))
        self.hungry = bool(result.no_room) or not result.running_scheduled.all()
        self.seat(resumed, new, result)

    def plan_row(self, s: Sequence) -> PlannedRow:
        rng = self.random
        outstanding = max(0, s.computed - len(s.tokens))
        accepted = rng.randint(0, outstanding)
        appended = s.drafts[:accepted]
        computed = s.computed - (outstanding - accepted)
        if computed == len(s.tokens) + accepted:
            appended = [*appended, rng.randint(0, 1)]
        left = len(s.tokens) + len(appended) - computed
        num_own = left if rng.random() < 0.7 else rng.randint(1, left)
        if rng.random() < 0.1:
            return PlannedRow(s, outstanding - accepted, appended, 0, [])  # settles only
        num_drafts = rng.randint(0, self.max_drafts) if num_own == left else 0
        drafts = [rng.randint(0, 1) for _ in range(num_drafts)]
        return PlannedRow(s, outstanding - accepted, appended, num_own + num_drafts, drafts)

    def take_row(self, row: PlannedRow, is_scheduled: bool) -> None:
        sequence = row.sequence
        sequence.tokens += row.appended
        sequence.computed -= row.rejected
        sequence.drafts = []
        if is_scheduled:
            sequence.computed += row.num_new
            sequence.drafts = row.drafts

    def seat_children(self, children: list[Sequence], result: StepResult) -> None:
        for child, slot in zip(children, result.forked_slots.tolist(), strict=True):
            if slot == NO_SLOT:
                assert child.name in result.no_room
                continue
            child.slot, child.born = slot, self.last_step
            self.known[child.name] = child
            self.num_forks += 1

    def seat(self, resumed: list[Sequence], new: list[Sequence], result: StepResult) -> None:
        statistics = zip(
            [*resumed, *new],
            result.admitted_slots.tolist(),
            result.num_hit_tokens.tolist(),
            result.num_scheduled_tokens.tolist(),
            strict=True,
        )
        for sequence, slot, num_hit, num_scheduled in statistics:
            if slot != NO_SLOT:
                sequence.slot, sequence.computed = slot, num_hit + num_scheduled
                if sequence in new:
                    sequence.born = self.last_step
                    self.known[sequence.name] = sequence

    def fail(self) -> None:
        """Report that a recent step failed, when no rank runs it; roll rows back."""
        self.client.wait_finished(self.last_step)
        first = self.random.randint(max(self.completed + 1, self.first_valid), self.last_step)
        before = self.lengths[first]
        result = self.send(
            StepRequest(
                completed_step=self.completed if self.completed else NO_STEP, failed_step=first
            )
        )
        self.first_valid = self.last_step
        self.num_withdrawn += len(result.withdrawn)
        for name in result.withdrawn:
            sequence = self.known.get(name)
            if sequence is not None and sequence.born >= first:
                del self.known[name]
            elif sequence is not None:
                sequence.slot, sequence.computed, sequence.drafts = NO_SLOT, 0, []
        computed = dict(
            zip(
                result.rolled_back_slots.tolist(), result.rolled_back_computed.tolist(), strict=True
            )
        )
        for sequence in self.known.values():
            del sequence.tokens[before[sequence.name] :]
            if sequence.slot in computed:
                sequence.computed = computed[sequence.slot]
                # The drafts' ids are not kept here: none of them is accepted.
                sequence.drafts = []
        self.lengths[self.last_step] = {s.name: len(s.tokens) for s in self.known.values()}
        for sequence in self.known.values():
            if sequence.is_running and sequence.computed > len(sequence.tokens):
                self.reject_drafts(sequence)

    def reject_drafts(self, sequence: Sequence) -> None:
        rejected = sequence.computed - len(sequence.tokens)
        appended = [self.random.randint(0, 1)]
        row = PlannedRow(sequence, rejected, appended, 1, [])
        self.lengths[self.last_step + 1] = {s.name: len(s.tokens) for s in self.known.values()}
        result = self.send(
            StepRequest(completed_step=self.finished_step(), running=self.arrays([row]))
        )
        self.take_row(row, bool(result.running_scheduled[0]))

    def finish_all(self) -> None:
        self.client.wait_finished(self.last_step)
        self.send(StepRequest(completed_step=self.finished_step(), finished=tuple(self.known)))
        self.client.wait_finished(self.last_step)

    # --- sending -------------------------------------------------------------------------------

    def send(self, request: StepRequest) -> StepResult:
        result = self.client.step(request)
        self.last_step = result.step
        if self.random.random() < 0.7:
            self.client.wait_finished(result.step)
        self.audits.perhaps()
        return result

    def _audit(self) -> None:
        manager = self.cluster.coordinator.manager
        manager.check()

    def finished_step(self) -> int:
        """Report finished steps, sometimes fewer; never a failed one."""
        if self.random.random() < 0.6 and self.client.finished_step >= self.first_valid:
            self.completed = max(self.completed, self.client.finished_step)
        return self.completed if self.completed else NO_STEP

    def arrays(self, rows: list[PlannedRow]) -> RunningRequests:
        return RunningRequests(
            slots=ints([row.sequence.slot for row in rows]),
            num_new_tokens=ints([row.num_new for row in rows]),
            num_draft_tokens=ints([len(row.drafts) for row in rows]),
            num_rejected_tokens=ints([row.rejected for row in rows]),
            token_offsets=ints(np.cumsum([0, *(len(row.appended) for row in rows)]).tolist()),
            token_ids=ints([token for row in rows for token in row.appended]),
            draft_token_ids=ints([token for row in rows for token in row.drafts]),
        )

    def new_name(self) -> str:
        self.count += 1
        return f"s{self.count}"

    def new_sequence(self) -> Sequence:
        length = self.random.randint(1, self.longest)
        return Sequence(self.new_name(), [self.random.randint(0, 1) for _ in range(length)])
