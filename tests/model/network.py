"""The streams of commands, numbered by position, kept until every rank has applied them.

Ranks take messages in the order of their numbers, so a message is lost, late or reordered only by
the time at which a rank takes it. Numbers count from the first kept message, so that states with
the same future are equal; if old messages can do harm, none is dropped.
"""

from __future__ import annotations

from tests.model.sizes import Model
from tests.model.state import Command, Coordinator, Rank, State, Stream


def stream_of(state: State, nonce: int, epoch: int) -> Stream | None:
    """Return the stream of an epoch, None once it is forgotten."""
    for stream in state.streams:
        if stream[0] == nonce and stream[1] == epoch:
            return stream
    return None


def open_stream(state: State, nonce: int, epoch: int) -> State:
    """Return the state with an empty stream for a new epoch."""
    return state._replace(streams=tuple(sorted((*state.streams, Stream(nonce, epoch, ())))))


def send(state: State, coordinator: Coordinator, *commands: Command) -> tuple[State, int]:
    """Append a message of the coordinator's epoch; return its number too."""
    number, streams = 0, []
    for stream in state.streams:
        if stream[0] == coordinator.nonce and stream[1] == coordinator.epoch:
            number = len(stream.messages) + 1
            streams.append(stream._replace(messages=(*stream.messages, commands)))
        else:
            streams.append(stream)
    return state._replace(streams=tuple(streams)), number


def num_unacknowledged(model: Model, state: State, coordinator: Coordinator) -> int:
    """Return how many messages of the coordinator's epoch some rank has not applied."""
    stream = stream_of(state, coordinator.nonce, coordinator.epoch)
    if stream is None:
        return 0
    return len(stream.messages) - applied_by_all(state, coordinator)


def applied_by_all(state: State, coordinator: Coordinator) -> int:
    """Return the number that every rank has applied; ranks that left have applied nothing."""
    nonce, epoch = coordinator.nonce, coordinator.epoch
    ranks = state.ranks
    return min([r.applied if r.nonce == nonce and r.epoch == epoch else 0 for r in ranks])


def is_full(model: Model, state: State, coordinator: Coordinator) -> bool:
    """Return whether the window has no room for a message."""
    if not model.rules.window:
        return False
    return num_unacknowledged(model, state, coordinator) >= model.sizes.window


def forget(model: Model, state: State) -> State:
    """Return the state without messages that every rank has applied or will always refuse."""
    if model.keeps_history:
        return state
    for stream in state.streams:
        state = _forget_in(model, state, stream)
    return state


def _forget_in(model: Model, state: State, stream: Stream) -> State:
    nonce, epoch, messages = stream
    ranks, coordinators = state.ranks, state.coordinators
    applied_by = [r.applied for r in ranks if r.nonce == nonce and r.epoch == epoch]
    is_ours = any(c.nonce == nonce and c.epoch == epoch for c in coordinators)
    if not is_ours and not applied_by:
        return state._replace(streams=tuple([s for s in state.streams if s is not stream]))
    if is_ours and len(applied_by) < len(ranks):
        return state
    applied = min(applied_by) if model.rules.applied_all else max(applied_by)
    if applied <= 0:
        return state
    past = _past(state, stream, applied)
    steps = [
        s._replace(seq=past.get(s.seq, s.seq - applied))
        if s.nonce == nonce and s.epoch == epoch
        else s
        for s in state.steps
    ]
    shorter = stream._replace(messages=messages[applied:])
    return state._replace(
        streams=tuple([shorter if s is stream else s for s in state.streams]),
        ranks=tuple([_shift_rank(r, stream, past, applied) for r in ranks]),
        steps=tuple(steps),
        coordinators=tuple(
            [
                _shift_tables(c, past, applied) if c.nonce == nonce and c.epoch == epoch else c
                for c in coordinators
            ]
        ),
    )


def _past(state: State, stream: Stream, by: int) -> dict[int, int]:
    """Return new numbers, in the same order, for steps whose messages were dropped."""
    nonce, epoch, _ = stream
    ranks = [r for r in state.ranks if r.nonce == nonce and r.epoch == epoch]
    numbers = {s.seq for s in state.steps if s.nonce == nonce and s.epoch == epoch and s.seq <= by}
    numbers |= {seq for rank in ranks for seq, _, _ in rank.deferred if seq <= by}
    for c in state.coordinators:
        if c.nonce == nonce and c.epoch == epoch:
            numbers |= {x.answer.seq for x in c.ledgers if x.answer and x.answer.seq <= by}
    return {number: -i for i, number in enumerate(sorted(numbers, reverse=True))}


def _shift_rank(rank: Rank, stream: Stream, past: dict[int, int], by: int) -> Rank:
    if rank.nonce != stream.nonce or rank.epoch != stream.epoch:
        return rank
    return rank._replace(
        applied=rank.applied - by,
        deferred=tuple([(past.get(seq, seq - by), a, b) for seq, a, b in rank.deferred]),
        fenced=tuple([(client, max(0, seq - by)) for client, seq in rank.fenced]),
    )


def _shift_tables(coordinator: Coordinator, past: dict[int, int], by: int) -> Coordinator:
    ledgers = []
    for ledger in coordinator.ledgers:
        answer, fence_seq = ledger.answer, ledger.fence_seq
        if answer is not None:
            answer = answer._replace(seq=past.get(answer.seq, answer.seq - by))
        if fence_seq > 0:
            # -1: every rank has applied it.
            fence_seq = fence_seq - by if fence_seq > by else -1
        ledgers.append(ledger._replace(answer=answer, fence_seq=fence_seq))
    return coordinator._replace(ledgers=tuple(ledgers))
