"""The requests of a random engine, and how answers to steps and calls change them.

The walk chooses, the engine follows the answers and makes forwards from them. It computes the
result of a failed step by itself, from snapshots before each unfinished step, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvcache.protocol.step import NO_SLOT, NewRequest, ResumedRequest, RunningRow
from tests.agreement.content import Forward, Origin
from tests.agreement.operations import Admit, Extend, ForkCall
from tests.agreement.side import Facts

CALLER = ""


@dataclass
class Live:
    """A known request. `computed` includes drafts; `last_own` is where its last forward's own
    tokens ended; `admissions` rises when it is admitted."""

    name: str
    owner: str
    origin: Origin
    tokens: list[int]
    computed: int = 0
    drafts: tuple[int, ...] = ()
    last_own: int = 0
    slot: int | None = None
    admissions: int = 0
    encoder_key: str = ""
    skips_reading: bool = False
    # The accepted drafts of a complete forward; None while they are not known.
    num_accepted: int | None = None

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    @property
    def num_drafts(self) -> int:
        """Drafts of the last forward; some may be accepted."""
        return max(0, self.computed - len(self.tokens))

    @property
    def figures(self) -> Figures:
        return Figures(len(self.tokens), self.computed, self.drafts, self.last_own, self.admissions)

    def leave(self) -> None:
        """Preempt it: only its tokens remain."""
        self.slot, self.computed, self.drafts, self.last_own = None, 0, (), 0
        self.num_accepted = None


@dataclass(frozen=True)
class Figures:
    """A snapshot of a request."""

    num_tokens: int
    computed: int
    drafts: tuple[int, ...]
    last_own: int
    admissions: int


@dataclass
class Before:
    """A client's requests before one of its steps; which of them ran in it, and how many of their
    drafts were accepted."""

    step: int
    figures: dict[str, Figures]
    rows: dict[str, int] = field(default_factory=dict)


@dataclass
class Client:
    name: str
    last_step: int = 0
    unfinished: list[Before] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A running row of a step, by name: settle, append, then run `num_new` and the drafts."""

    name: str
    num_rejected: int
    appended: tuple[int, ...]
    num_new: int
    drafts: tuple[int, ...] = ()

    def in_slot(self, slot: int) -> RunningRow:
        """Return it as a row of a step request."""
        num_new, num_drafts = self.num_new + len(self.drafts), len(self.drafts)
        return RunningRow(slot, num_new, self.appended, num_drafts, self.num_rejected)


class Engine:
    """All requests of all clients and of the caller of single calls."""

    def __init__(self, *, keeps_states: bool) -> None:
        self.live: dict[str, Live] = {}
        self.clients = [Client("a#1"), Client("b#1")]
        self._keeps_states = keeps_states

    def of(self, owner: str, *, running: bool) -> list[Live]:
        """Return the running or waiting requests of a client."""
        return [r for r in self.live.values() if r.owner == owner and r.is_running == running]

    # --- steps that end ---

    def complete(self, client: Client, step: int) -> None:
        client.unfinished = [b for b in client.unfinished if b.step > step]

    def fail(self, client: Client, step: int) -> Facts:
        """Roll back a client's steps; return the expected fields of the result."""
        void = [b for b in client.unfinished if b.step >= step]
        client.unfinished = [b for b in client.unfinished if b.step < step]
        first, withdrawn, rolled_back = void[0], [], []
        for name, request in list(self.live.items()):
            if request.owner != client.name:
                continue
            if name not in first.figures:
                withdrawn.append(name)
                del self.live[name]
                continue
            before = first.figures[name]
            del request.tokens[before.num_tokens :]
            if not request.is_running:
                continue
            has_run = [b.rows[name] for b in void if name in b.rows]
            if before.admissions != request.admissions or (has_run and self._keeps_states):
                withdrawn.append(name)
                request.leave()
            elif has_run:
                request.computed, request.drafts = before.computed, before.drafts
                # The failed forward may have overwritten the rejected drafts.
                request.last_own, request.num_accepted = before.last_own, has_run[0]
                rolled_back.append((request.slot, before.computed, before.num_tokens))
        return {"withdrawn": sorted(withdrawn), "rolled back": sorted(rolled_back)}

    def begin_step(self, client: Client, step: int, rows: Sequence[Row]) -> None:
        """Take a snapshot of the client's requests before a step."""
        figures = {r.name: r.figures for r in self.live.values() if r.owner == client.name}
        accepted = {row.name: self.live[row.name].num_drafts - row.num_rejected for row in rows}
        client.unfinished.append(Before(step, figures, accepted))
        client.last_step = step

    # --- what an answer means ---

    def fork(self, parent: Live, child: str, slot: int) -> None:
        """Record that a child got a slot in a step."""
        computed = min(parent.computed, len(parent.tokens))
        self.live[child] = replace(
            parent,
            name=child,
            tokens=list(parent.tokens),
            computed=computed,
            drafts=(),
            last_own=computed,
            slot=slot,
            admissions=1,
            num_accepted=None,
        )

    def run_row(self, row: Row, has_room: bool, step: tuple[str, int]) -> Forward | None:
        """Settle a row; return its forward, if it has one."""
        request = self.live[row.name]
        settled = request.computed - row.num_rejected
        request.tokens += row.appended
        request.computed = settled
        request.num_accepted = None
        if not (has_room and row.num_new):
            return None
        return self._forward(request, settled, settled + row.num_new, row.drafts, step)

    def admit(  # noqa: PLR0917
        self, request: Live, start: int, num_new: int, slot: int, hit: int, step: tuple[str, int]
    ) -> Forward:
        """Record that a request got a slot; return its first forward."""
        request.slot = slot
        request.admissions += 1
        request.last_own = start
        request.encoder_key = f"{request.name} {request.admissions}"
        self.live[request.name] = request
        forward = self._forward(request, start, start + num_new, (), step)
        return replace(forward, is_new=True, num_external=max(0, start - hit))

    def _forward(
        self,
        request: Live,
        start: int,
        own_end: int,
        drafts: tuple[int, ...],
        step: tuple[str, int],
    ) -> Forward:
        forward = Forward(
            request.name,
            request.origin,
            (*request.tokens[:own_end], *drafts),
            start,
            own_end,
            last_own=request.last_own,
            num_accepted=start - request.last_own,
            encoder_key=request.encoder_key,
            step=step,
        )
        request.computed = own_end + len(drafts)
        request.drafts = drafts
        request.last_own = own_end
        return forward

    # --- steps ---

    def follow_step(  # noqa: PLR0917
        self,
        client: Client,
        rows: Sequence[Row],
        admitted: Sequence[ResumedRequest | NewRequest],
        origins: dict[str, Origin],
        forks: Sequence[tuple[str, str]],
        facts: Facts,
    ) -> list[Forward]:
        """Follow the answer to a step; return the forwards it schedules."""
        step = client.name, client.last_step
        for (parent, child), slot in zip(forks, _ints(facts["forked slots"]), strict=True):
            if slot != NO_SLOT:
                self.fork(self.live[parent], child, slot)
        forwards = [
            self.run_row(row, bool(has_room), step)
            for row, has_room in zip(rows, _ints(facts["rows scheduled"]), strict=True)
        ]
        answers = zip(
            admitted,
            _ints(facts["admitted slots"]),
            _ints(facts["hit tokens"]),
            _ints(facts["scheduled"]),
            strict=True,
        )
        for item, slot, hit, num_new in answers:
            if slot == NO_SLOT:
                continue
            external = 0
            if isinstance(item, NewRequest):
                tokens = item.token_ids.tolist()
                request = Live(item.request_id, client.name, origins[item.request_id], tokens)
                request.skips_reading = item.skip_reading_prefix_cache
                external = item.num_external_computed_tokens
            else:
                request = self.live[item.request_id]
            start = min(hit + external, len(request.tokens) - 1)
            forwards.append(self.admit(request, start, num_new, slot, hit, step))
        return [forward for forward in forwards if forward is not None]

    # --- calls ---

    def follow_admit(self, admit: Admit, facts: Facts, slot: int) -> list[Forward]:
        """Follow a call that admits a request."""
        hit, num_new = facts["hit tokens"], facts["scheduled"]
        assert isinstance(hit, int)
        assert isinstance(num_new, int)
        start = min(hit + admit.num_external, len(admit.tokens) - 1)
        request = Live(admit.name, CALLER, admit.origin, list(admit.tokens))
        return [self.admit(request, start, num_new, slot, hit, (CALLER, 0))]

    def follow_extend(
        self, extend: Extend, drafts: tuple[int, ...], has_room: bool
    ) -> list[Forward]:
        """Follow a call that extends a request."""
        request = self.live[extend.name]
        row = Row(
            extend.name, request.computed - extend.settled, extend.appended, extend.num_new, drafts
        )
        forward = self.run_row(row, has_room, (CALLER, 0))
        return [] if forward is None else [forward]

    def follow_fork(self, call: ForkCall, slot: int) -> None:
        """Follow a call that forked a request."""
        parent = self.live[call.parent]
        self.fork(parent, call.child, slot)
        child = self.live[call.child]
        child.origin, child.tokens = call.origin, list(call.tokens)


def _ints(values: object) -> list[int]:
    assert isinstance(values, list)
    return values
