"""All actions that are possible in a state: of the parties, and faults.

An action is a description, whether it is a fault (which progress must not depend on), and the next
state. Messages need no actions of their own: a late message is one that the receiver has not taken
yet. Old messages are repeated only if the rule that refuses them is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.model import client as engine
from tests.model import coordinator as ruler
from tests.model import faults, jobs, worker
from tests.model.faults import Raw, Words
from tests.model.network import forget, is_full, stream_of
from tests.model.sizes import Model
from tests.model.state import (
    FENCING,
    RULING,
    RUNNING,
    RUNNING_WRONG,
    WAITING,
    Client,
    Coordinator,
    Job,
    Rank,
    State,
    StepRequest,
    coordinator_of,
    present_coordinator,
    with_client,
    with_rank,
)


class Action(NamedTuple):
    """One possible action."""

    words: Words
    is_fault: bool
    state: State


def successors(model: Model, state: State) -> Iterator[Action]:
    """Yield every possible action, and the settled state after it."""
    for words, is_fault, after in _all(model, state):
        yield Action(words, is_fault, settle(model, after))


def begun(model: Model) -> State:
    """Return the first state: one coordinator rules, every rank obeys, every client is attached.

    The way there is explored after every death, and not at the beginning, too.
    """
    state = ruler.begin(model, model.initial())
    c = state.coordinators[0]
    ranks = [worker.take_grant(model, rank, c.nonce, c.epoch) for rank in state.ranks]
    state = ruler.rebuild(model, state._replace(ranks=tuple(ranks)), c)
    for k in range(len(state.clients)):
        state = engine.attach(model, state, k, state.coordinators[0])
    return settle(model, state)


def settle(model: Model, state: State) -> State:
    """Return the state after all automatic actions, in its canonical form."""
    state = forget(model, engine.notice(model, state))
    ranks = state.ranks
    if not model.is_sorting or ranks[0] <= ranks[-1]:
        return state
    return state._replace(ranks=tuple(sorted(ranks)))


def _all(model: Model, state: State) -> Raw:
    for k, client in enumerate(state.clients):
        yield from _client_actions(model, state, k, client)
    for c in state.coordinators:
        yield from _epoch_actions(model, state, c)
        if c.phase == RULING:
            yield from _leaving_actions(model, state, c)
            yield from _job_actions(model, state, c)
    yield from faults.coordinator_faults(model, state)
    for r, rank in enumerate(state.ranks):
        yield from _command_actions(model, state, r, rank)
        yield from _forward_actions(model, state, r, rank)
        yield from faults.rank_faults(model, state, r, rank)
    yield from faults.old_messages(model, state)
    yield from faults.disk_faults(model, state)


# --- clients


def _client_actions(model: Model, state: State, k: int, client: Client) -> Raw:
    who = f"client {client.name}"
    c = present_coordinator(state, client)
    for other in state.coordinators:
        # One that finds a newer coordinator leaves the older, which may not know that it was
        # replaced.
        if other.phase == RULING and (c is None or other.epoch > c.epoch):
            where = f"coordinator {other.nonce} epoch {other.epoch}"
            yield (who, "attaches to", where), False, engine.attach(model, state, k, other)
    if c is not None:
        ledger = ruler.ledger_of(c, client.name)
        if ledger is None or (ledger.is_leaving and model.rules.leaving):
            after = engine.start_over(model, state, k, forgets=False)
            yield (who, "hears that it was given up"), False, after
        elif engine.is_ready(model, state, client):
            for request in engine.requests_to_send(model, state, client):
                yield from _steps(model, state, k, c, request)
        yield from _asked(model, state, k, c, client)
        if _can_reset(model, state, c, client):
            after = ruler.reset(model, model.spend(state, "reset"), c)
            if coordinator_of(after, c.nonce) is not None:
                model_epoch = c.model_epoch + 1
                reset = after.clients[k]._replace(model_epoch=model_epoch, completed=0, failed=0)
                after = with_client(after, k, reset)
            yield (who, "resets the cache, its weights change"), False, after
        if client.unseen:
            seen = client._replace(completed=max(client.completed, client.unseen), unseen=0)
            words = (who, "notices that step", client.unseen, "of the old epoch ended")
            yield words, False, with_client(state, k, seen)
    if model.has(state, "client") and client.epoch:
        after = engine.start_over(model, model.spend(state, "client"), k, forgets=True)
        yield (who, "dies, another begins"), True, after


def _steps(model: Model, state: State, k: int, c: Coordinator, request: StepRequest) -> Raw:
    paid = engine.ask(engine.spend(model, state, request), k, request)
    words = (f"client {request.client}", "asks for", request)
    if model.sizes.is_asking:
        yield words, False, paid
        return
    for after, answer in ruler.serve(model, paid, c, request):
        owner = coordinator_of(after, c.nonce)
        if owner is not None:
            final = engine.take_answer(model, after, k, owner, answer)
            yield (*words, "gets", answer.ops), False, final


def _asked(model: Model, state: State, k: int, c: Coordinator, client: Client) -> Raw:
    """Requests and answers in transit."""
    who = f"coordinator {c.nonce}"
    ledger = ruler.ledger_of(c, client.name)
    if ledger is None:
        return
    asked = client.asked
    if asked is not None:
        if ledger.answer is not None and ledger.answer.number == asked.number:
            after = engine.take_answer(model, state, k, c, ledger.answer)
            yield (f"client {client.name}", "takes", ledger.answer), False, after
        if ledger.next_number <= asked.number or not model.rules.stored_answer:
            is_again = ledger.next_number > asked.number
            if not is_again or model.has(state, "again"):
                spent = model.spend(state, "again") if is_again else state
                for after, answer in ruler.serve(model, spent, c, asked):
                    yield (who, "executes", asked, "answers", answer), is_again, after
    if client.repeated is not None and model.has(state, "again"):
        spent = model.spend(state, "again")
        for after, _ in ruler.serve(model, spent, c, client.repeated):
            yield (who, "executes again", client.repeated), True, after


def _can_reset(model: Model, state: State, c: Coordinator, client: Client) -> bool:
    if not model.has(state, "reset") or client.asked is not None or client.requests:
        return False
    if c.jobs or c.requests or c.scheduled or is_full(model, state, c):
        return False
    if engine.own_steps(state, client):
        return False
    ledger = ruler.ledger_of(c, client.name)
    return ledger is not None and not ledger.is_leaving


# --- coordinators


def _epoch_actions(model: Model, state: State, c: Coordinator) -> Raw:
    who = f"coordinator {c.nonce}"
    if c.phase == FENCING:
        for r, rank in enumerate(state.ranks):
            if worker.would_take(model, rank, c.nonce, c.epoch):
                taken = worker.take_grant(model, rank, c.nonce, c.epoch)
                verb = "puts off" if taken.pending_epoch else "grants"
                yield (f"rank {r}", verb, c.epoch, "to", c.nonce), False, with_rank(state, r, taken)
        if ruler.can_rebuild(state, c):
            yield (who, "rebuilds its table"), False, ruler.rebuild(model, state, c)
    elif any(not rank.nonce for rank in state.ranks):
        if model.rules.loss_is_epoch:
            after = ruler.take_epoch(model, state, c, c.epoch + 1)
            yield (who, "notices that a process is lost, takes an epoch"), False, after
        else:
            yield (who, "takes the fresh process in"), False, _take_in(model, state, c)
    yield from _refusals(model, state, c)


def _take_in(model: Model, state: State, c: Coordinator) -> State:
    stream = stream_of(state, c.nonce, c.epoch)
    applied = 0 if stream is None else len(stream.messages)
    ranks = [
        rank if rank.nonce else rank._replace(nonce=c.nonce, epoch=c.epoch, applied=applied)
        for rank in state.ranks
    ]
    return state._replace(ranks=tuple(ranks))


def _refusals(model: Model, state: State, c: Coordinator) -> Raw:
    """A rank that obeys another coordinator refuses."""
    who = f"coordinator {c.nonce}"
    for r, rank in enumerate(state.ranks):
        mine = (c.nonce, c.epoch)
        if mine in ((rank.nonce, rank.epoch), (rank.pending_nonce, rank.pending_epoch)):
            continue
        highest = worker.highest_epoch(rank)
        if highest < c.epoch or (
            c.phase == FENCING and worker.would_take(model, rank, c.nonce, c.epoch)
        ):
            continue
        if c.phase == RULING:
            if model.rules.superseded:
                yield (who, "is refused by rank", r, "and stops"), False, ruler.resign(state, c)
        elif model.rules.epoch_above:
            is_alone = len(state.coordinators) == 1
            if is_alone or model.has(state, "rivalry"):
                spent = state if is_alone else model.spend(state, "rivalry")
                after = ruler.take_epoch(model, spent, c, highest + 1)
                yield (who, "is refused by rank", r, "and takes", highest + 1), False, after
            else:
                yield (who, "is refused by rank", r, "and is ended"), False, ruler.resign(state, c)
        return


def _leaving_actions(model: Model, state: State, c: Coordinator) -> Raw:
    who, names = f"coordinator {c.nonce}", {client.name for client in state.clients}
    for ledger in c.ledgers:
        name = ledger.client
        if not ledger.is_leaving:
            if name not in names:
                after = ruler.let_go(model, state, c, name)
                yield (who, "gives up silent client", name), False, after
            elif model.has(state, "silence"):
                after = ruler.let_go(model, model.spend(state, "silence"), c, name)
                yield (who, "gives up client", name), True, after
        elif not ledger.fence_seq:
            if not is_full(model, state, c):
                after = ruler.send_fence(model, state, c, name)
                yield (who, "fences client", name), False, after
        elif ruler.is_fenced(state, c, ledger):
            yield (who, "frees client", name), False, ruler.release(model, state, c, name)


def _job_actions(model: Model, state: State, c: Coordinator) -> Raw:
    who, has_room = f"coordinator {c.nonce}", not is_full(model, state, c)
    kinds: tuple[
        tuple[str, Callable[[Model, State, Coordinator], Iterator[tuple[Job, State]]]], ...
    ]
    kinds = (
        ("store", jobs.stores),
        ("load", jobs.loads),
        ("save", jobs.saves),
        ("fetch", jobs.fetches),
    )
    for kind, offers in kinds:
        if has_room and model.has(state, kind):
            for job, after in offers(model, model.spend(state, kind), c):
                yield (who, "begins", job), False, after
    if model.has(state, "timeout"):
        for job in c.jobs:
            if not job.is_late:
                after = jobs.miss_deadline(model, model.spend(state, "timeout"), c, job)
                yield (who, "gives up", job), True, after
    for r, rank in enumerate(state.ranks):
        for report in rank.reports:
            is_ours = (report.nonce, report.epoch) == (c.nonce, c.epoch)
            if not has_room or (not is_ours and model.rules.report_epoch):
                continue
            after = jobs.hear(model, state, c, r, report)
            words = (who, "hears from rank", r, report)
            if not model.rules.report_ranks and model.has(state, "doubled"):
                yield (*words, "which comes again"), True, model.spend(after, "doubled")
            heard = after.ranks[r]
            left = tuple([x for x in heard.reports if x != report])
            yield words, False, with_rank(after, r, heard._replace(reports=left))


# --- ranks


def _command_actions(model: Model, state: State, r: int, rank: Rank) -> Raw:
    who = f"rank {r}"
    if rank.pending_epoch and not worker.is_busy(model, rank):
        nonce, epoch = rank.pending_nonce, rank.pending_epoch
        after = worker.take_grant(model, rank, nonce, epoch)
        yield (who, "grants", epoch, "to", nonce, "at last"), False, with_rank(state, r, after)
    stream = stream_of(state, rank.nonce, rank.epoch)
    if stream is not None and not rank.pending_epoch:
        applied = rank.applied
        if 0 <= applied < len(stream.messages):
            message = stream.messages[applied]
            if not worker.must_wait(model, rank, state.steps, message):
                after = worker.apply(model, rank, message, applied + 1)
                after = after._replace(applied=applied + 1)
                words = (who, "applies", message or "an empty message", f"({rank.epoch})")
                yield words, False, with_rank(state, r, after)
    for job in sorted(set(rank.jobs)):
        after = worker.end_job(model, rank, job)
        yield (who, "ends", job), False, with_rank(state, r, after)


def _forward_actions(model: Model, state: State, r: int, rank: Rank) -> Raw:
    who = f"rank {r}"
    for i, step in enumerate(state.steps):
        words = (f"step {step.number} of client {step.client}",)
        forward = rank.forwards[i]
        if forward == WAITING:
            if worker.can_begin(model, rank, state.steps, i):
                after = worker.begin(model, rank, state.steps, i)
                yield (who, "begins", *words), False, with_rank(state, r, after)
            if engine.can_abandon(model, state, i):
                after = worker.fail(rank, i)
                yield (who, "never begins", *words), False, with_rank(state, r, after)
        elif forward in (RUNNING, RUNNING_WRONG):
            after = worker.end(rank, step, i)
            yield (who, "ends", *words), False, with_rank(state, r, after)
            if model.has(state, "fail"):
                after = worker.fail(rank, i)
                spent = model.spend(state, "fail")
                yield (who, "fails in", *words), True, with_rank(spent, r, after)
