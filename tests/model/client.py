"""An engine: it schedules steps, notices how they end, and attaches again when it must.

Reports a step complete when every rank has ended it, and failed when none can run it any more; a
failed step fails all later ones. Its name is never used again after it was given up.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.coordinator import attach as attach_to
from tests.model.coordinator import ledger_of, with_ledger
from tests.model.sizes import Model
from tests.model.state import (
    ENDED,
    FAILED,
    WAITING,
    WRONG,
    Answer,
    Client,
    Coordinator,
    Request,
    State,
    Step,
    StepRequest,
    put,
    with_client,
    with_coordinator,
    without,
)

OVER = (ENDED, FAILED, WRONG)


def own_steps(state: State, client: Client) -> list[Step]:
    """Return the client's steps whose forward has not ended."""
    return [step for step in state.steps if step.client == client.name]


def is_ready(model: Model, state: State, client: Client) -> bool:
    """Return whether the client may schedule a step now."""
    if client.asked is not None:
        return False
    own = own_steps(state, client)
    if client.failed and own and model.rules.fail_late and model.rules.cascade:
        return False
    return len(own) < model.sizes.pipeline


def requests_to_send(model: Model, state: State, client: Client) -> Iterator[StepRequest]:
    """Yield every step that the client may schedule, without empty ones."""
    base = StepRequest(client.name, client.next_number, client.completed, client.failed)
    if (
        (client.completed or client.failed)
        and model.rules.empty_step
        and not own_steps(state, client)
    ):
        yield base._replace(is_empty=True)
    if not model.has(state, "step"):
        return
    finished: list[Request | None] = [None]
    if model.has(state, "finish"):
        finished += sorted(set(client.requests))
    for done in finished:
        left = list(client.requests)
        if done is not None:
            left.remove(done)
        if left:
            yield base._replace(finished=done)
        for content in model.paths:
            if all(request.content != content for request in left):
                yield base._replace(finished=done, content=content)
        if done is not None and not left:
            yield base._replace(finished=done)
    if model.has(state, "fork"):
        for request in client.requests:
            yield base._replace(forked=request)


def spend(model: Model, state: State, request: StepRequest) -> State:
    """Return the state after the budget of the actions in `request` was used."""
    if request.is_empty:
        return state
    state = model.spend(state, "step")
    if request.finished is not None:
        state = model.spend(state, "finish")
    return model.spend(state, "fork") if request.forked is not None else state


def ask(state: State, index: int, request: StepRequest) -> State:
    """Send a step; it is repeated until there is an answer."""
    client = state.clients[index]
    asking = client._replace(asked=request, next_number=request.number + 1, completed=0, failed=0)
    return with_client(state, index, asking)


def take_answer(model: Model, state: State, index: int, c: Coordinator, answer: Answer) -> State:
    """Take the answer; the step's forward may begin on the ranks."""
    client = state.clients[index]
    if answer.ops:
        step = Step(client.name, c.nonce, c.epoch, answer.number, answer.seq, answer.ops, False)
        ranks = [r._replace(forwards=(*r.forwards, WAITING)) for r in state.ranks]
        state = state._replace(steps=(*state.steps, step), ranks=tuple(ranks))
    repeated = None if model.rules.stored_answer else client.asked
    answered = client._replace(asked=None, requests=answer.requests, repeated=repeated)
    state = with_client(state, index, answered)
    ledger = ledger_of(c, client.name)
    if ledger is not None and ledger.answer is not None:
        state = with_coordinator(state, with_ledger(c, ledger._replace(answer=None)))
    return state


def attach(model: Model, state: State, index: int, c: Coordinator) -> State:
    """Attach to a coordinator's epoch. Earlier steps are void."""
    client = state.clients[index]
    if not model.rules.steps_go_on:
        client = client._replace(next_number=1)
    state, kept = attach_to(model, state, c, client)
    if kept is None:
        return state
    return with_client(
        state,
        index,
        client._replace(
            nonce=c.nonce,
            epoch=c.epoch,
            model_epoch=c.model_epoch,
            requests=kept,
            completed=0,
            failed=0,
            unseen=0 if model.rules.steps_go_on else client.completed,
            asked=None,
            repeated=None,
        ),
    )


def start_over(model: Model, state: State, index: int, *, forgets: bool) -> State:
    """Take another name, without steps; a client that died has forgotten all."""
    client = state.clients[index]
    model_epoch = -1 if forgets else client.model_epoch
    name = client.name + 1 if model.rules.leaving or forgets else client.name
    return with_client(state, index, Client(name, 0, 0, 1, model_epoch, repeated=client.repeated))


# --- how steps end


def notice(model: Model, state: State) -> State:
    """Let clients notice, in order, which of their steps have ended on every rank."""
    if not state.steps:
        return state
    state = _refuse_forever(model, state)
    changed = True
    while changed:
        changed = False
        first: set[int] = set()
        for i, step in enumerate(state.steps):
            if step.client in first:
                continue
            first.add(step.client)
            statuses = [rank.forwards[i] for rank in state.ranks]
            is_over = all(status in OVER for status in statuses)
            if not model.rules.fail_late and FAILED in statuses and not step.is_doomed:
                state = _fail_at_once(model, state, i)
                changed = True
                break
            if is_over:
                state = _retire(model, state, i, statuses)
                changed = True
                break
    return state


def _refuse_forever(model: Model, state: State) -> State:
    """A forward that a rank will never begin counts as failed there."""
    ranks = []
    for rank in state.ranks:
        forwards = rank.forwards
        if WAITING not in forwards:
            ranks.append(rank)
            continue
        for i, step in enumerate(state.steps):
            if forwards[i] != WAITING:
                continue
            is_past = (rank.nonce, rank.epoch) != (step.nonce, step.epoch)
            is_fenced = any(a == step.client and step.seq <= b for a, b in rank.fenced)
            if (is_past and model.rules.forward_epoch) or is_fenced:
                forwards = put(forwards, i, FAILED)
        ranks.append(rank if forwards is rank.forwards else rank._replace(forwards=forwards))
    if all(new is old for new, old in zip(ranks, state.ranks, strict=True)):
        return state
    return state._replace(ranks=tuple(ranks))


def _retire(model: Model, state: State, i: int, statuses: list[int]) -> State:
    step = state.steps[i]
    k = _owner(model, state, step)
    state = _drop(state, i)
    if k is None:
        return state
    client = state.clients[k]
    if step.is_doomed or FAILED in statuses:
        if not model.rules.fail_late:
            return state
        state = with_client(state, k, client._replace(failed=client.failed or step.number))
        return _doom_later(model, state, step)
    if WRONG in statuses:
        text = f"step {step.number} of client {step.client} was accepted, but a rank read wrong"
        return state._replace(broken=f"{text} bytes: {step.ops}")
    return with_client(state, k, client._replace(completed=step.number))


def _fail_at_once(model: Model, state: State, i: int) -> State:
    step = state.steps[i]
    state = state._replace(steps=put(state.steps, i, step._replace(is_doomed=True)))
    k = _owner(model, state, step)
    if k is None:
        return state
    client = state.clients[k]
    state = with_client(state, k, client._replace(failed=client.failed or step.number))
    return _doom_later(model, state, step)


def _doom_later(model: Model, state: State, failed: Step) -> State:
    """A failed step fails every later one of its client; those not begun never begin."""
    if not model.rules.cascade:
        return state
    doomed = [i for i, s in enumerate(state.steps) if s.client == failed.client and s != failed]
    steps = [s._replace(is_doomed=True) if i in doomed else s for i, s in enumerate(state.steps)]
    ranks = [
        rank._replace(
            forwards=tuple(
                [FAILED if i in doomed and f == WAITING else f for i, f in enumerate(rank.forwards)]
            )
        )
        for rank in state.ranks
    ]
    return state._replace(steps=tuple(steps), ranks=tuple(ranks))


def can_abandon(model: Model, state: State, i: int) -> bool:
    """Return whether the engine will never begin `steps[i]` where it has not: the step failed
    elsewhere, or the engine is gone."""
    step = state.steps[i]
    if FAILED in [rank.forwards[i] for rank in state.ranks]:
        return True
    return _owner(model, state, step) is None


def _owner(model: Model, state: State, step: Step) -> int | None:
    """Return the client that waits for `step`, None if it is void."""
    for k, client in enumerate(state.clients):
        if client.name != step.client:
            continue
        is_present = (client.nonce, client.epoch) == (step.nonce, step.epoch)
        return k if is_present or not model.rules.steps_go_on else None
    return None


def _drop(state: State, i: int) -> State:
    ranks = [rank._replace(forwards=without(rank.forwards, i)) for rank in state.ranks]
    return state._replace(steps=without(state.steps, i), ranks=tuple(ranks))
