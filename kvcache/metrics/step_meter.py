"""The latency of steps: in the queue, in the decision, and until every rank has applied them.

    arrived ──queue──▶ decided ──(answer, commands leave)──▶ applied by every rank
       └───────────────────── applied_seconds ─────────────────┘

Watches the messages that enter and leave a coordinator, so that the coordinator itself knows
nothing of it. Follows a bounded number of steps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.metrics.metric import Histogram
from kvcache.protocol.messages import CallResult, Outgoing, Progress, Unattached
from kvcache.protocol.step import StepResult

STRIDE = 31
"""One step in this many is followed, unless all are requested: an empty step takes a coordinator
some 30 us, and following it 5 to 10. A prime, so that periodic behaviour of engines (every fourth
or eighth step) is sampled evenly."""

LONGEST_S = 120.0
"""A client is forgotten when its steps have been in flight for longer."""

MAX_CLIENTS = 256
MAX_STEPS = 1024
"""Most steps per client: arrived and not decided, or decided and not applied."""


@dataclass(frozen=True)
class StepTimes:
    """One step that every rank has applied. Seconds by the meter's clock."""

    client_id: str
    step: int
    epoch: int
    seq: int
    arrived_s: float
    begun_s: float
    decided_s: float
    applied_s: float


@dataclass(slots=True)
class _Decided:
    step: int
    epoch: int
    seq: int
    arrived_s: float
    begun_s: float
    decided_s: float


@dataclass(slots=True)
class _Steps:
    """Steps of one client: arrival times of those that wait, and those that ranks have not applied.
    Every step up to `newest` has been decided."""

    newest: int = 0
    arrived_s: dict[int, float] = field(default_factory=dict)
    under_way: deque[_Decided] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.arrived_s) + len(self.under_way)

    def oldest_s(self) -> float:
        """When the oldest of them arrived."""
        decided = (step.arrived_s for step in self.under_way)
        return min(*self.arrived_s.values(), *decided, float("inf"), float("inf"))


OnApplied = Callable[[StepTimes], None]


class StepMeter:
    """Follows steps of one coordinator. One user, one thread.

    Invariant: `num_open` steps are being followed. While it is 0, outgoing messages do not matter.
    """

    def __init__(self, bounds_s: tuple[float, ...], on_applied: OnApplied | None = None) -> None:
        """Follow none yet. `on_applied` gets each finished step; with it, all steps are
        followed."""
        self.stride = STRIDE if on_applied is None else 1
        self.num_open = 0
        self.queue = Histogram(bounds_s)
        self.decision = Histogram(bounds_s)
        self.applied = Histogram(bounds_s)
        self._clients: OrderedDict[str, _Steps] = OrderedDict()
        self._on_applied = on_applied

    def arrived(self, client_id: str, step: int, now_s: float) -> None:
        """Follow a step that a client sent; a repeated one counts from its first arrival."""
        steps = self._clients.get(client_id)
        if steps is None:
            steps = self._clients[client_id] = _Steps()
            if len(self._clients) > MAX_CLIENTS:
                self.num_open -= len(self._clients.popitem(last=False)[1])
        if step > steps.newest and step not in steps.arrived_s and len(steps) < MAX_STEPS:
            steps.arrived_s[step] = now_s
            self.num_open += 1

    def left(self, outgoing: Sequence[Outgoing], begun_s: float, now_s: float) -> None:
        """Inspect a coordinator's messages after a decision from `begun_s` to `now_s`."""
        for item in outgoing:
            message = item.message
            if isinstance(message, StepResult | CallResult):
                self._on_answer(message, begun_s, now_s)
            elif isinstance(message, Progress):
                self._on_progress(message, now_s)
            elif isinstance(message, Unattached):
                self.forget(message.client_id)

    def forget(self, client_id: str) -> None:
        """Stop following a client."""
        steps = self._clients.pop(client_id, None)
        self.num_open -= 0 if steps is None else len(steps)

    def forget_silent(self, now_s: float) -> None:
        """Forget clients whose steps have been in flight for so long that they are lost."""
        old = [c for c, steps in self._clients.items() if now_s - steps.oldest_s() > LONGEST_S]
        for client_id in old:
            self.forget(client_id)

    def _on_answer(self, answer: StepResult | CallResult, begun_s: float, now_s: float) -> None:
        steps = self._clients.get(answer.client_id)
        arrived_s = None if steps is None else steps.arrived_s.pop(answer.step, None)
        if steps is None or arrived_s is None:
            return  # a repeated answer, or of a step that is not followed
        steps.newest = answer.step
        self.queue.observe(begun_s - arrived_s)
        self.decision.observe(now_s - begun_s)
        if answer.seq:
            times = (arrived_s, begun_s, now_s)
            steps.under_way.append(_Decided(answer.step, answer.epoch, answer.seq, *times))
        else:
            self.num_open -= 1

    def _on_progress(self, progress: Progress, now_s: float) -> None:
        steps = self._clients.get(progress.client_id)
        if steps is None:
            return
        under_way = steps.under_way
        while under_way and under_way[0].step <= progress.applied_step:
            done = under_way.popleft()
            self.num_open -= 1
            self.applied.observe(now_s - done.arrived_s)
            if self._on_applied is not None:
                times = (done.arrived_s, done.begun_s, done.decided_s, now_s)
                client_id = progress.client_id
                self._on_applied(StepTimes(client_id, done.step, done.epoch, done.seq, *times))
