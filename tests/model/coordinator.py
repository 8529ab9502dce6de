"""A coordinator: its epochs, its recovery, and the clients it serves or gives up.

Takes an epoch above every known one, waits until all ranks have granted it, rebuilds its table from
their labels, and rules. Every end of the epoch leads there again. `steps` executes steps, `jobs`
copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import steps
from tests.model.disk import names_on_all, names_on_any
from tests.model.network import applied_by_all, is_full, open_stream, send
from tests.model.sizes import Model
from tests.model.state import (
    FENCE,
    FENCING,
    FREE_BLOCK,
    HITTABLE,
    HOST_UNLABEL,
    RESET,
    RULING,
    SEALED,
    UNLABEL,
    WEIGHTS,
    Answer,
    Block,
    Client,
    Command,
    Coordinator,
    Ledger,
    Request,
    State,
    StepRequest,
    put,
    with_coordinator,
)


def begin(model: Model, state: State) -> State:
    """Start a coordinator: it reads the saved state and takes an epoch."""
    nonce = state.last_nonce + 1
    is_unsure = not state.saved_epoch
    c = Coordinator(nonce, 0, FENCING, state.saved_model_epoch, is_unsure=is_unsure)
    state = state._replace(last_nonce=nonce, coordinators=(*state.coordinators, c))
    return take_epoch(model, state, c, state.saved_epoch + 1)


def take_epoch(model: Model, state: State, c: Coordinator, epoch: int) -> State:
    """Save an epoch, then ask every rank to grant it. Drops the old one's state."""
    if is_outdated(model, state, c):
        return resign(state, c)
    rank = state.ranks[0]
    state = state._replace(saved_epoch=epoch, saved_model_epoch=c.model_epoch)
    cold = Coordinator(
        c.nonce,
        epoch,
        FENCING,
        c.model_epoch,
        (FREE_BLOCK,) * len(rank.data),
        (FREE_BLOCK,) * len(rank.host),
        is_unsure=c.is_unsure,
    )
    return open_stream(with_coordinator(state, cold), c.nonce, epoch)


def is_outdated(model: Model, state: State, c: Coordinator) -> bool:
    """Return whether another coordinator has saved a higher epoch than this one ever took."""
    return model.rules.saved_forward and 0 < c.epoch < state.saved_epoch


def resign(state: State, c: Coordinator) -> State:
    """Remove a coordinator."""
    return state._replace(coordinators=tuple([x for x in state.coordinators if x != c]))


# --- recovery


def can_rebuild(state: State, c: Coordinator) -> bool:
    """Return whether every rank has granted the epoch that the coordinator is fencing."""
    return c.phase == FENCING and all(
        rank.nonce == c.nonce and rank.epoch == c.epoch for rank in state.ranks
    )


def rebuild(model: Model, state: State, c: Coordinator) -> State:
    """Keep the labels on which all ranks agree, drop the others, and rule."""
    keys = [_agreed(model, [r.labels[b] for r in state.ranks]) for b in range(len(c.blocks))]
    if model.rules.one_of_equals:
        keys = _unique(keys)
    if model.rules.no_orphans:
        keys = [key if _has_ancestors(model, keys, key) else 0 for key in keys]
    host = [_agreed(model, [r.host_labels[h] for r in state.ranks]) for h in range(len(c.slots))]
    host = _unique(host)
    files = names_on_all(state) if model.rules.all_ranks else names_on_any(state)
    commands: list[Command] = []
    if model.rules.withdraw_dropped:
        for b, key in enumerate(keys):
            if not key and any(rank.labels[b] for rank in state.ranks):
                commands.append(Command(UNLABEL, b))
        for h, key in enumerate(host):
            if not key and any(rank.host_labels[h] for rank in state.ranks):
                commands.append(Command(HOST_UNLABEL, h))
    if c.is_unsure and model.rules.model_epoch_unknown:
        c = c._replace(model_epoch=_unheard_of(state))
        state = state._replace(saved_model_epoch=c.model_epoch)
    c = c._replace(
        phase=RULING,
        is_unsure=False,
        blocks=tuple([Block(SEALED, key) if key else FREE_BLOCK for key in keys]),
        slots=tuple([Block(SEALED, key) if key else FREE_BLOCK for key in host]),
        files=files,
    )
    state = with_coordinator(state, c)
    return send(state, c, *commands)[0] if commands else state


def _unheard_of(state: State) -> int:
    """Return a model epoch above those of all labels and files."""
    keys = [name for rank in state.ranks for name, _ in rank.files]
    keys += [key for rank in state.ranks for key in (*rank.labels, *rank.host_labels) if key]
    return 1 + max([key // WEIGHTS for key in keys], default=-1)


def _agreed(model: Model, labels: list[int]) -> int:
    if model.rules.all_ranks:
        return labels[0] if len(set(labels)) == 1 else 0
    return max(labels)


def _unique(keys: list[int]) -> list[int]:
    return [0 if key in keys[:i] else key for i, key in enumerate(keys)]


def _has_ancestors(model: Model, keys: list[int], key: int) -> bool:
    if not key:
        return False
    content, epoch = key % WEIGHTS, key - key % WEIGHTS
    return all(ancestor + epoch in keys for ancestor in model.paths[content])


# --- clients


def ledger_of(c: Coordinator, client: int) -> Ledger | None:
    """Return the coordinator's ledger of a client."""
    for ledger in c.ledgers:
        if ledger.client == client:
            return ledger
    return None


def with_ledger(c: Coordinator, ledger: Ledger) -> Coordinator:
    """Return the coordinator with a client's ledger replaced or added."""
    others = [x for x in c.ledgers if x.client != ledger.client]
    return c._replace(ledgers=tuple(sorted((*others, ledger), key=lambda x: x.client)))


def attach(
    model: Model, state: State, c: Coordinator, client: Client
) -> tuple[State, tuple[Request, ...] | None]:
    """Attach a client; return the cached prefixes of its running requests, None if another epoch
    had to begin first."""
    knows = client.model_epoch >= 0
    if model.rules.model_epoch_stated and knows and client.model_epoch > c.model_epoch:
        # The cache is of another model epoch. Steps of others may run: fence them all.
        c = c._replace(model_epoch=client.model_epoch)
        return take_epoch(model, with_coordinator(state, c), c, c.epoch + 1), None
    kept: list[Request] = []
    for request in client.requests:
        found = _verified(model, c, request)
        if found is not None and found not in kept:
            kept.append(found)
    others = [r for r in c.requests if r.client != client.name]
    c = c._replace(requests=tuple(sorted((*others, *kept))))
    if not model.rules.attach_verify:
        c = c._replace(blocks=_believed(model, c, kept))
    c = with_ledger(c, Ledger(client.name, client.next_number))
    return with_coordinator(state, c), tuple(sorted(kept))


def _verified(model: Model, c: Coordinator, request: Request) -> Request | None:
    """Return the request with its cached leading blocks, None if there are none."""
    if not model.rules.attach_verify:
        return request
    path, length = model.paths[request.content], 0
    for content, b in zip(path, request.table, strict=True):
        key = content + WEIGHTS * c.model_epoch
        if c.blocks[b] != Block(SEALED, key):
            break
        length += 1
    if not length:
        return None
    return Request(request.client, path[length - 1], request.table[:length])


def _believed(model: Model, c: Coordinator, kept: list[Request]) -> tuple[Block, ...]:
    blocks = c.blocks
    for request in kept:
        for content, b in zip(model.paths[request.content], request.table, strict=True):
            if blocks[b] == FREE_BLOCK:
                key = content + WEIGHTS * c.model_epoch
                blocks = put(blocks, b, Block(HITTABLE, key, request.client, 0))
    return blocks


def reset(model: Model, state: State, c: Coordinator) -> State:
    """Change the weights: cached blocks are of an older model epoch from now on."""
    if is_outdated(model, state, c):
        return resign(state, c)
    model_epoch = c.model_epoch + 1
    if model.rules.model_epoch_saved:
        state = state._replace(saved_epoch=c.epoch, saved_model_epoch=model_epoch)
    c = c._replace(
        model_epoch=model_epoch,
        blocks=(FREE_BLOCK,) * len(c.blocks),
        slots=(FREE_BLOCK,) * len(c.slots),
    )
    state = with_coordinator(state, c)._replace(weights=state.weights + 1)
    return send(state, c, Command(RESET))[0]


def serve(
    model: Model, state: State, c: Coordinator, request: StepRequest
) -> Iterator[tuple[State, Answer]]:
    """Execute a step of an attached client in every possible way; its answer is stored."""
    ledger = ledger_of(c, request.client)
    if ledger is None or (ledger.is_leaving and model.rules.leaving):
        return
    if request.number != ledger.next_number and model.rules.stored_answer:
        return
    if is_full(model, state, c):
        return
    for executed in steps.execute(model, state, c, request):
        own = [r for r in executed.coordinator.requests if r.client == request.client]
        after, seq = send(state, c, *executed.commands)
        answer = Answer(request.number, seq, executed.ops, tuple(own))
        stored = answer if model.sizes.is_asking else None
        noted = ledger._replace(next_number=request.number + 1, answer=stored)
        yield with_coordinator(after, with_ledger(executed.coordinator, noted)), answer


def let_go(model: Model, state: State, c: Coordinator, client: int) -> State:
    """Stop serving a client."""
    ledger = ledger_of(c, client)
    if ledger is None:
        return state
    c = with_ledger(c, ledger._replace(is_leaving=True, answer=None))
    state = with_coordinator(state, c)
    return state if model.rules.fence else release(model, state, c, client)


def send_fence(model: Model, state: State, c: Coordinator, client: int) -> State:
    """Tell every rank to refuse the client's forwards."""
    ledger = ledger_of(c, client)
    if ledger is None:
        return state
    state, seq = send(state, c, Command(FENCE, client))
    return with_coordinator(state, with_ledger(c, ledger._replace(fence_seq=seq)))


def is_fenced(state: State, c: Coordinator, ledger: Ledger) -> bool:
    """Return whether every rank has applied the client's fence."""
    if ledger.fence_seq < 0:
        return True
    return 0 < ledger.fence_seq <= applied_by_all(state, c)


def release(model: Model, state: State, c: Coordinator, client: int) -> State:
    """Free all blocks of the client and forget it."""
    blocks = [FREE_BLOCK if b.client == client and b.kind == HITTABLE else b for b in c.blocks]
    c = c._replace(
        blocks=tuple(blocks),
        requests=tuple([r for r in c.requests if r.client != client]),
        scheduled=tuple([s for s in c.scheduled if s.client != client]),
        ledgers=tuple([x for x in c.ledgers if x.client != client]),
    )
    return with_coordinator(state, steps.free_private(c))
