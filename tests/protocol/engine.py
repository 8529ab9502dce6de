"""A small engine that drives a client session: prefill in chunks, decode, drafts, preempt, fail.

Decides by its own seeded random source, never by time, and follows the answers it gets. Wherever an
answer allows it, its own state of a request is compared with the manager's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.errors import StaleEpochError
from kvcache.client.session import ClientSession, SessionState
from kvcache.coordinator.remote_calls import pack_values
from kvcache.protocol.messages import CallResult, FromClient
from kvcache.protocol.step import (
    NO_SLOT,
    NO_STEP,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)


@dataclass
class Sequence:
    """One request as the engine sees it. `computed` counts drafts that are not settled yet."""

    request_id: str
    prompt: list[int]
    target: int
    salt: str | None
    num_encoder: int = 0
    num_external: int = 0
    state: str = "waiting"
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    must_reject: bool = False
    before: list[tuple[int, str, int, int, list[int]]] = field(default_factory=list)

    def remember(self, step: int) -> None:
        self.before.append((step, self.state, len(self.tokens), self.computed, list(self.drafts)))


@dataclass
class Planned:
    """A step that was sent, and the intended effects of its rows."""

    step: int
    request: StepRequest
    rows: list[tuple[Sequence, int, list[int]]]
    applicants: list[Sequence]


class Engine:
    """One client of the simulated cluster."""

    def __init__(
        self,
        session: ClientSession,
        random_source: random.Random,
        sequences: list[Sequence],
        *,
        fail_share: float = 0.0,
        draft_share: float = 0.2,
        depth: int = 2,
        num_lookahead: int = 0,
        keeps_states: bool = False,
        swap_share: float = 0.0,
    ) -> None:
        self.session = session
        self.sequences = sequences
        self.num_voided = self.num_failed_steps = self.num_preempted = self.num_hit_tokens = 0
        self.num_drafts = 0
        self._random = random_source
        self._fail_share = fail_share
        self._draft_share = draft_share
        self._depth = depth
        self._keeps_states = keeps_states
        self._swap_share = swap_share
        self._swapping = random.Random(sum(len(one.prompt) for one in sequences))
        self._delaying = random.Random(sum(sum(one.prompt) for one in sequences))
        self._num_lookahead = num_lookahead
        self._withdrawn: set[str] = set()
        self._sent: Planned | None = None
        self._completed = NO_STEP
        self._last = self._last_real = self._void = 0
        self._to_preempt: Sequence | None = None
        self._is_draining_for_failure = False
        self.is_done = False

    def turn(self) -> list[FromClient]:
        """Read answers, and send the next step when it is time."""
        if self.is_done:
            return []
        if self.session.state is SessionState.VOID:
            self._start_over()
            return self.session.attach()
        if self.session.state is not SessionState.ATTACHED:
            if self.session.stalled_s > self.session.settings.step_s:
                raise self.session.not_attached(self.session.stalled_s)
            return []
        try:
            return self._turn()
        except StaleEpochError:
            return []

    def _turn(self) -> list[FromClient]:
        if self._sent is not None:
            result = self.session.result(self._sent.step)
            if result is None:
                return []
            assert isinstance(result, StepResult)
            assert not result.error, result.error
            self._follow(self._sent, result)
            self._sent = None
        finished = self.session.finished_step
        if self._last > self._void:
            self.session.is_finished(self._last)
        num_under_way = self._last - finished
        if self._is_draining_for_failure and num_under_way:
            return []
        if num_under_way >= self._depth:
            return []
        if all(s.state == "done" for s in self.sequences):
            # Empty steps seal the blocks of the last real one.
            if num_under_way:
                return []
            if self._completed >= self._last_real:
                self.is_done = True
                return []
        return self._send_step(finished)

    def _send_step(self, finished: int) -> list[FromClient]:
        failed = NO_STEP
        completed = finished if finished > self._void else NO_STEP
        uncompleted = range(max(self._completed, self._void) + 1, self._last + 1)
        if self._is_draining_for_failure and uncompleted:
            failed = self._random.choice(uncompleted)
            completed = failed - 1 if failed - 1 > self._void else NO_STEP
            self._is_draining_for_failure = False
        elif self._random.random() < self._fail_share and uncompleted:
            self._is_draining_for_failure = True
            if finished < self._last:
                return []
            return self._send_step(finished)
        if failed != NO_STEP:
            self._take_back(failed)
            self.num_failed_steps += 1
        step = self.session.next_step
        planned = self._plan(step, completed, failed)
        submitted = self.session.submit(planned.request)
        assert submitted.step == step
        self._sent, self._last = planned, step
        if completed != NO_STEP:
            self._completed = max(self._completed, completed)
        if failed != NO_STEP:
            self._void = step - 1
        if planned.request.finished or planned.rows or planned.applicants:
            self._last_real = step
        return list(submitted.messages)

    def _plan(self, step: int, completed: int, failed: int) -> Planned:
        rng = self._random
        finished, preempted = [], []
        for s in self.sequences:
            if s.state == "running" and len(s.tokens) >= s.target:
                s.remember(step)
                s.state = "done"
                finished.append(s.request_id)
        victim = self._to_preempt
        self._to_preempt = None
        if victim is None and rng.random() < 0.05:
            running = [s for s in self.sequences if s.state == "running"]
            victim = rng.choice(running) if running else None
        if victim is not None and victim.state == "running":
            victim.remember(step)
            victim.state, victim.drafts, victim.computed = "preempted", [], 0
            victim.must_reject = False
            preempted.append(victim.request_id)
            self.num_preempted += 1
        rows = [
            self._plan_row(step, s)
            for s in self.sequences
            if s.state == "running" and rng.random() < 0.95
        ]
        resumed = [
            s
            for s in self.sequences
            if s.state == "preempted" and s is not victim and rng.random() < 0.6
        ]
        new = [s for s in self.sequences if s.state == "waiting" and rng.random() < 0.5][:3]
        swapped = [r for r in preempted if self._swapping.random() < self._swap_share]
        request = StepRequest(
            client_id="",
            step=0,
            epoch=0,
            completed_step=completed,
            failed_step=failed,
            finished=tuple(finished),
            preempted_recompute=tuple(r for r in preempted if r not in swapped),
            preempted_swap=tuple(swapped),
            running=_running(rows),
            num_lookahead_tokens=self._num_lookahead,
            resumed=tuple(ResumedRequest(s.request_id, rng.randint(1, 12)) for s in resumed),
            new=tuple(
                NewRequest(
                    s.request_id,
                    int32_array(s.prompt),
                    rng.randint(1, 12),
                    cache_salt=s.salt,
                    num_encoder_tokens=s.num_encoder,
                    num_external_computed_tokens=s.num_external,
                    num_lookahead_tokens=self._num_lookahead,
                    delay_cache_blocks=self._delaying.random() < 0.2,
                )
                for s in new
            ),
        )
        planned = [(s, num_new, drafts) for s, num_new, drafts, _, _ in rows]
        return Planned(step, request, planned, [*resumed, *new])

    def _plan_row(self, step: int, s: Sequence) -> tuple[Sequence, int, list[int], int, list[int]]:
        """Settle drafts, sample for finished rows, and choose what to compute."""
        rng = self._random
        s.remember(step)
        appended: list[int] = []
        num_rejected = 0
        if s.drafts:
            num_rejected = len(s.drafts) if s.must_reject else rng.randint(0, len(s.drafts))
            appended = s.drafts[: len(s.drafts) - num_rejected]
            s.computed -= num_rejected
            s.drafts, s.must_reject = [], False
        if s.computed == len(s.tokens) + len(appended):
            appended = [*appended, rng.randint(0, 50)]
        s.tokens.extend(appended)
        remaining = len(s.tokens) - s.computed
        num_new = min(remaining, rng.randint(1, 12))
        drafts: list[int] = []
        room = s.target + 4 - len(s.tokens)
        if num_new == remaining and room > 0 and rng.random() < self._draft_share:
            drafts = [rng.randint(0, 50) for _ in range(min(room, rng.randint(1, 3)))]
            num_new += len(drafts)
        return s, num_new, drafts, num_rejected, appended

    def _follow(self, planned: Planned, result: StepResult) -> None:
        """Follow the coordinator's decisions."""
        slots = {s.slot: s for s in self.sequences if s.state == "running"}
        assert set(result.withdrawn) == self._withdrawn, (result.withdrawn, self._withdrawn)
        self._withdrawn = set()
        if planned.request.failed_step != NO_STEP:
            for slot, computed, tokens in zip(
                result.rolled_back_slots.tolist(),
                result.rolled_back_computed.tolist(),
                result.rolled_back_tokens.tolist(),
                strict=True,
            ):
                s = slots.get(slot)
                if s is None:
                    continue
                was = next((b for b in reversed(s.before) if b[0] == planned.step), None)
                expected = (len(s.tokens), s.computed) if was is None else (was[2], was[3])
                assert (tokens, computed) == expected, (s.request_id, tokens, computed, expected)
        for (s, num_new, drafts), is_scheduled in zip(
            planned.rows, result.running_scheduled.tolist(), strict=True
        ):
            if is_scheduled:
                s.computed += num_new
                s.drafts = drafts
                self.num_drafts += len(drafts)
            else:
                others = [o for o in self.sequences if o.state == "running" and o is not s]
                self._to_preempt = others[-1] if others else None
        for i, s in enumerate(planned.applicants):
            slot = int(result.admitted_slots[i])
            if slot == NO_SLOT:
                continue
            s.remember(planned.step)
            hit, scheduled = int(result.num_hit_tokens[i]), int(result.num_scheduled_tokens[i])
            self.num_hit_tokens += hit
            start = hit
            if s.state == "waiting":
                s.tokens = list(s.prompt)
                start = min(hit + s.num_external, len(s.tokens) - 1)
            assert start + scheduled <= len(s.tokens)
            s.state, s.slot, s.computed, s.drafts = "running", slot, start + scheduled, []

    def _take_back(self, failed: int) -> None:
        """Undo the failed steps, except that finished and preempted requests stay so."""
        for s in self.sequences:
            undone = [b for b in s.before if b[0] >= failed]
            if not undone:
                continue
            s.before = [b for b in s.before if b[0] < failed]
            _, state, num_tokens, computed, drafts = undone[0]
            if s.state == "done":
                continue
            del s.tokens[num_tokens:]
            lost = s.state == "running" and (self._keeps_states or not _kept_its_slot(undone))
            if lost or state == "waiting":
                self._withdrawn.add(s.request_id)
            if state == "waiting":
                s.state, s.tokens, s.drafts, s.computed = "waiting", [], [], 0
            elif s.state == "running" and _kept_its_slot(undone) and not self._keeps_states:
                s.computed, s.drafts, s.must_reject = computed, drafts, True
            else:
                s.state, s.drafts, s.computed = "preempted", [], 0

    def _start_over(self) -> None:
        """Continue after the end of the epoch: all scheduled steps are void."""
        self.num_voided += 1
        self._sent = self._to_preempt = None
        self._withdrawn.clear()
        self._is_draining_for_failure = False
        for s in self.sequences:
            s.before.clear()
            if s.state != "done":
                # Generated tokens are known: the request comes back with all of them.
                s.prompt = s.tokens if len(s.tokens) > len(s.prompt) else s.prompt
                s.num_external = 0
                s.state, s.tokens, s.drafts, s.computed = "waiting", [], [], 0
        self._completed = self._last = self._last_real = self._void = self.session.next_step - 1


class WeightChanger:
    """A client that only says, at times drawn by a seed, that the weights have changed."""

    sequences: tuple[Sequence, ...] = ()

    def __init__(
        self, session: ClientSession, random_source: random.Random, num_changes: int
    ) -> None:
        self.session = session
        self.num_changes = self.num_voided = 0
        self.num_hit_tokens = self.num_drafts = self.num_preempted = self.num_failed_steps = 0
        self.is_done = False
        self._random = random_source
        self._num_left = num_changes
        self._sent: int | None = None

    def turn(self) -> list[FromClient]:
        """Read the answer, and begin the next model epoch when it is time."""
        if self.is_done:
            return []
        if self.session.state is SessionState.VOID:
            self._sent = None
            return self.session.attach()
        if self.session.state is not SessionState.ATTACHED:
            return []
        try:
            return self._turn()
        except StaleEpochError:
            return []

    def _turn(self) -> list[FromClient]:
        if self._sent is not None:
            result = self.session.result(self._sent)
            if result is None or not self.session.is_applied(self._sent):
                return []
            assert isinstance(result, CallResult)
            self.num_changes += not result.error
            self._sent = None
        self.is_done = not self._num_left
        if self.is_done or self._random.random() > 0.1:
            return []
        self._num_left -= 1
        submitted = self.session.call("begin_model_epoch", pack_values({}))
        self._sent = submitted.step
        return list(submitted.messages)


def _kept_its_slot(undone: list[tuple[int, str, int, int, list[int]]]) -> bool:
    return all(state == "running" for _, state, _, _, _ in undone)


def _running(rows: list[tuple[Sequence, int, list[int], int, list[int]]]) -> RunningRequests:
    appended = [tokens for _, _, _, _, tokens in rows]
    return RunningRequests(
        slots=int32_array([s.slot for s, _, _, _, _ in rows]),
        num_new_tokens=int32_array([n for _, n, _, _, _ in rows]),
        num_draft_tokens=int32_array([len(d) for _, _, d, _, _ in rows]),
        num_rejected_tokens=int32_array([r for _, _, _, r, _ in rows]),
        token_offsets=int32_array(np.cumsum([0, *(len(tokens) for tokens in appended)])),
        token_ids=int32_array([token for tokens in appended for token in tokens]),
        draft_token_ids=int32_array([d for _, _, drafts, _, _ in rows for d in drafts]),
    )
