"""The coordinator's table of blocks, requests and steps, and the execution of a step.

`coordinator` decides when, the ranks get the commands. A choice that the real manager makes by its
policy is made here in every possible way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.sizes import Model
from tests.model.state import (
    COPY,
    COPY_BLOCK,
    FILLING,
    FREE_BLOCK,
    HITTABLE,
    LABEL,
    OWNED,
    QUARANTINED,
    READ,
    SEALED,
    STORE,
    UNLABEL,
    WEIGHTS,
    WRITE,
    Block,
    Command,
    Coordinator,
    Op,
    Request,
    Scheduled,
    State,
    StepRequest,
    put,
)


class Executed(NamedTuple):
    """An executed step: the new table, the commands, and its forward."""

    coordinator: Coordinator
    commands: tuple[Command, ...]
    ops: tuple[Op, ...]


def find(model: Model, c: Coordinator, key: int, client: int) -> int | None:
    """Return the block in which `client` hits `key`, None for a miss."""
    for b, block in enumerate(c.blocks):
        if block.key != key:
            continue
        is_own = block.client == client or not model.rules.own_unsealed
        if block.kind == SEALED or (block.kind == HITTABLE and is_own):
            return b
    return None


def is_coming(c: Coordinator, key: int) -> bool:
    """Return whether a copy of `key` to a block is in progress: requests for it wait."""
    return any(block.kind == FILLING and block.key == key for block in c.blocks)


def has_child(model: Model, c: Coordinator, key: int, without_block: int) -> bool:
    """Return whether a cached block continues `key`, and only this block holds `key`."""
    content, epoch = key % WEIGHTS, key - key % WEIGHTS
    children = [child + epoch for child in model.children.get(content, ())]
    if not any(b.key in children and b.kind in (HITTABLE, SEALED, FILLING) for b in c.blocks):
        return False
    return not any(
        b.kind == SEALED and b.key == key for i, b in enumerate(c.blocks) if i != without_block
    )


def is_read_by_job(model: Model, c: Coordinator, block: int) -> bool:
    """Return whether a copy may still read `block`, as far as the table knows."""
    return any(
        job.kind == STORE and job.block == block and (not job.is_late or model.rules.source_hold)
        for job in c.jobs
    )


def is_reusable(model: Model, c: Coordinator, b: int, *, for_copy: bool) -> bool:
    """Return whether block `b` may get another content: by a forward, or by a copy."""
    block = c.blocks[b]
    if block.kind in (FILLING, QUARANTINED):
        return False
    if any(b in request.table for request in c.requests):
        return False
    if model.rules.transfer_reference and is_read_by_job(model, c, b):
        return False
    if for_copy and model.rules.step_reference and any(b in s.blocks for s in c.scheduled):
        return False
    is_cached = block.kind in (SEALED, HITTABLE)
    return not (is_cached and model.rules.tail_first and has_child(model, c, block.key, b))


def victims(model: Model, state: State, c: Coordinator, *, for_copy: bool) -> list[int]:
    """Return the blocks that may be taken; only one of several indistinguishable ones."""
    mentioned = {op.block for step in state.steps for op in step.ops}
    mentioned |= {job.block for rank in state.ranks for job in rank.jobs}
    mentioned |= {b for entry in c.scheduled for b in entry.blocks}
    mentioned |= {x for rank in state.ranks for _, a, b in rank.deferred for x in (a, b)}
    found: list[int] = []
    seen: set[tuple[object, ...]] = set()
    for b, block in enumerate(c.blocks):
        if not is_reusable(model, c, b, for_copy=for_copy):
            continue
        looks = (block, *[(rank.data[b], rank.labels[b]) for rank in state.ranks])
        if b not in mentioned:
            if looks in seen:
                continue
            seen.add(looks)
        found.append(b)
    return found


def take(model: Model, c: Coordinator, b: int, block: Block) -> tuple[Coordinator, list[Command]]:
    """Give block `b` another content; return the command that drops its label, if it has one."""
    commands: list[Command] = []
    if c.blocks[b].kind == SEALED and model.rules.unlabel_first:
        commands.append(Command(UNLABEL, b))
    return c._replace(blocks=put(c.blocks, b, block)), commands


# --- steps


def settle_steps(
    model: Model, c: Coordinator, client: int, completed: int, failed: int
) -> tuple[Coordinator, list[Command]]:
    """Seal the blocks of completed steps; withdraw those of failed ones."""
    blocks, commands = list(c.blocks), []
    for b, block in enumerate(c.blocks):
        if block.kind not in (HITTABLE, OWNED) or block.client != client:
            continue
        if failed and (block.step == failed or (block.step > failed and model.rules.cascade)):
            blocks[b] = FREE_BLOCK
        elif block.kind == HITTABLE and block.step <= completed:
            blocks[b] = Block(SEALED, block.key)
            commands.append(Command(LABEL, b, block.key))
    lost = {b for b, block in enumerate(blocks) if block == FREE_BLOCK != c.blocks[b]}
    requests = [r for r in c.requests if r.client != client or not lost & set(r.table)]
    scheduled = [
        s
        for s in c.scheduled
        if s.client != client
        or not (s.number <= completed or s.number == failed or (failed and model.rules.cascade))
    ]
    c = c._replace(blocks=tuple(blocks), requests=tuple(requests), scheduled=tuple(scheduled))
    return free_private(c), commands


def free_private(c: Coordinator) -> Coordinator:
    """Free private copies without requests."""
    held = {b for request in c.requests for b in request.table}
    blocks = [
        FREE_BLOCK if block.kind == OWNED and b not in held else block
        for b, block in enumerate(c.blocks)
    ]
    return c._replace(blocks=tuple(blocks))


def execute(model: Model, state: State, c: Coordinator, request: StepRequest) -> Iterator[Executed]:
    """Execute a step in every possible way; none if there is no room."""
    client = request.client
    c, commands = settle_steps(model, c, client, request.completed, request.failed)
    if request.finished is not None:
        left = list(c.requests)
        if request.finished in left:
            left.remove(request.finished)
        c = free_private(c._replace(requests=tuple(left)))
    if request.is_empty:
        yield Executed(c, tuple(commands), ())
        return
    running = [r for r in c.requests if r.client == client]
    if request.forked is not None:
        if request.forked in running:
            yield from _fork(model, state, c, request, commands)
        return
    ops = [op for r in running for op in _reads(model, state, r)]
    if not request.content:
        yield _schedule(c, request, tuple(commands), tuple(ops))
        return
    path = model.paths[request.content]
    for placed in _place(model, state, c, request):
        new = Request(client, request.content, placed.table)
        writes = placed.table[placed.num_hits :]
        reads = [op for op in _reads(model, state, new) if op.block not in writes]
        written = [
            Op(WRITE, content + WEIGHTS * state.weights, b)
            for content, b in zip(path[placed.num_hits :], writes, strict=True)
        ]
        changed = placed.coordinator
        changed = changed._replace(requests=tuple(sorted((*c.requests, new))))
        yield _schedule(changed, request, (*commands, *placed.commands), (*ops, *reads, *written))


class _Placed(NamedTuple):
    """The contents of a request: hits first, then blocks to write."""

    coordinator: Coordinator
    table: tuple[int, ...]
    num_hits: int
    commands: tuple[Command, ...] = ()


def _place(model: Model, state: State, c: Coordinator, request: StepRequest) -> Iterator[_Placed]:
    """Yield every way to place the request's contents."""
    path, table = model.paths[request.content], []
    for content in path:
        hit = find(model, c, content + WEIGHTS * c.model_epoch, request.client)
        if hit is None:
            break
        table.append(hit)
    missing = path[len(table) :]
    if missing and is_coming(c, missing[0] + WEIGHTS * c.model_epoch):
        return
    # Hits are referenced while the rest is placed.
    held = c._replace(requests=(*c.requests, Request(request.client, 0, tuple(table))))
    pending = [_Placed(held, tuple(table), len(table))]
    for content in missing:
        key = content + WEIGHTS * c.model_epoch
        pending = [
            further
            for placed in pending
            for further in _take_any(model, state, placed, request, key)
        ]
    yield from pending


def _take_any(
    model: Model, state: State, placed: _Placed, request: StepRequest, key: int
) -> Iterator[_Placed]:
    """Yield every way to give `key` a block."""
    for b in victims(model, state, placed.coordinator, for_copy=False):
        if b in placed.table:
            continue
        block = Block(HITTABLE, key, request.client, request.number)
        taken, commands = take(model, placed.coordinator, b, block)
        if not model.rules.seal_late:
            taken = taken._replace(blocks=put(taken.blocks, b, Block(SEALED, key)))
            commands.append(Command(LABEL, b, key))
        table = (*placed.table, b)
        yield _Placed(taken, table, placed.num_hits, (*placed.commands, *commands))


def _fork(
    model: Model, state: State, c: Coordinator, request: StepRequest, commands: list[Command]
) -> Iterator[Executed]:
    """Let a request replace its last block, which others share, by a copy."""
    forked = request.forked
    if forked is None:
        return
    source, value = forked.table[-1], forked.content + WEIGHTS * state.weights
    others = list(c.requests)
    others.remove(forked)
    for b in victims(model, state, c, for_copy=False):
        taken, more = take(model, c, b, Block(OWNED, 0, request.client, request.number))
        copied = Request(forked.client, forked.content, (*forked.table[:-1], b))
        taken = taken._replace(requests=tuple(sorted((*others, copied))))
        ops = [op for r in others if r.client == request.client for op in _reads(model, state, r)]
        ops += [op for op in _reads(model, state, copied) if op.block != b]
        copy = Op(COPY, value, b, source)
        copying = (*commands, *more, Command(COPY_BLOCK, b, source))
        yield _schedule(taken, request, copying, (*ops, copy))


def _reads(model: Model, state: State, request: Request) -> list[Op]:
    path = model.paths[request.content]
    return [
        Op(READ, content + WEIGHTS * state.weights, b)
        for content, b in zip(path, request.table, strict=True)
    ]


def _schedule(
    c: Coordinator, request: StepRequest, commands: tuple[Command, ...], ops: tuple[Op, ...]
) -> Executed:
    if ops:
        blocks = {op.block for op in ops} | {op.source for op in ops if op.source >= 0}
        entry = Scheduled(request.client, request.number, tuple(sorted(blocks)))
        c = c._replace(scheduled=tuple(sorted((*c.scheduled, entry))))
    return Executed(c, commands, tuple(sorted(set(ops))))


def is_room_for_load(model: Model, c: Coordinator, key: int) -> bool:
    """Return whether `key` is needed on the device: missing, while its parent is there."""
    content, epoch = key % WEIGHTS, key - key % WEIGHTS
    if epoch != WEIGHTS * c.model_epoch:
        return False
    if any(b.key == key and b.kind in (HITTABLE, SEALED, FILLING) for b in c.blocks):
        return False
    path = model.paths[content]
    return len(path) == 1 or any(b.kind == SEALED and b.key == path[-2] + epoch for b in c.blocks)
