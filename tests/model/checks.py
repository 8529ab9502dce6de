"""Invariants of a state, and whether it is at rest.

Checks a state by itself; a wrong byte that an accepted step has read is recorded where it happens.
"""

from __future__ import annotations

from tests.model.network import num_unacknowledged
from tests.model.sizes import Model
from tests.model.state import (
    FETCH,
    FILLING,
    HITTABLE,
    LOAD,
    OWNED,
    QUARANTINED,
    RULING,
    RUNNING,
    RUNNING_WRONG,
    SEALED,
    STORE,
    WEIGHTS,
    WRITE,
    Client,
    Coordinator,
    Rank,
    State,
    present_coordinator,
)


def violation(model: Model, state: State) -> str:
    """Return the violation in `state`; empty if there is none."""
    if state.broken:
        return state.broken
    for rank in state.ranks:
        text = _two_writers(state, rank)
        if text:
            return text
    for c in state.coordinators:
        if c.phase == RULING:
            text = _wrong_table(model, state, c)
            if text:
                return text
    for client in state.clients:
        ruler = present_coordinator(state, client)
        if ruler is not None and client.asked is None:
            text = _lost_request(ruler, client)
            if text:
                return text
    return ""


def _two_writers(state: State, rank: Rank) -> str:
    if not rank.jobs and not rank.forwards:
        return ""
    blocks = [job.block for job in rank.jobs if job.kind == LOAD]
    for step, forward in zip(state.steps, rank.forwards, strict=True):
        if forward in (RUNNING, RUNNING_WRONG):
            blocks += [op.block for op in step.ops if op.kind == WRITE]
    if len(set(blocks)) < len(blocks):
        return f"two writers on one of blocks {blocks}"
    slots = [job.slot for job in rank.jobs if job.kind in (STORE, FETCH)]
    if len(set(slots)) < len(slots):
        return f"two writers on one of host slots {slots}"
    return ""


def _wrong_table(model: Model, state: State, c: Coordinator) -> str:
    """Compare the coordinator's cached blocks with the bytes of every rank that obeys it."""
    if num_unacknowledged(model, state, c) > model.sizes.window + model.sizes.slots:
        return "the window of messages overflows"
    for b, block in enumerate(c.blocks):
        if block.kind != SEALED:
            continue
        for rank in state.ranks:
            if (rank.nonce, rank.epoch) != (c.nonce, c.epoch):
                continue
            if not _is_content(rank.data[b], block.key):
                return f"block {b} is offered as {block.key}, a rank has {rank.data[b]} there"
        if not _has_parent(model, c, block.key):
            return f"block {b} is offered as {block.key}, which continues nothing that is cached"
    for h, slot in enumerate(c.slots):
        for rank in state.ranks:
            is_offered = slot.kind == SEALED and (rank.nonce, rank.epoch) == (c.nonce, c.epoch)
            if is_offered and not _is_content(rank.host[h], slot.key):
                return f"host slot {h} is offered as {slot.key}, a rank has {rank.host[h]}"
    return ""


def _is_content(found: int, key: int) -> bool:
    """The weights of a content are checked where it is read."""
    return found > 0 and found % WEIGHTS == key % WEIGHTS


def _has_parent(model: Model, c: Coordinator, key: int) -> bool:
    path = model.paths[key % WEIGHTS]
    if len(path) == 1:
        return True
    parent = path[-2] + key - key % WEIGHTS
    return any(b.key == parent and b.kind in (SEALED, HITTABLE) for b in c.blocks)


def _lost_request(c: Coordinator, client: Client) -> str:
    ledger = next((x for x in c.ledgers if x.client == client.name), None)
    if ledger is None or ledger.is_leaving:
        return ""
    known = tuple([r for r in c.requests if r.client == client.name])
    if known != client.requests:
        return f"client {client.name} runs {client.requests}, the table has {known}"
    return ""


def is_quiet(model: Model, state: State) -> bool:
    """Return whether nothing is in progress and nothing is leaked."""
    if len(state.coordinators) != 1 or state.steps:
        return False
    c = state.coordinators[0]
    if c.phase != RULING or c.jobs or c.scheduled:
        return False
    if any(b.kind in (FILLING, QUARANTINED, HITTABLE) for b in (*c.blocks, *c.slots)):
        return False
    held = {b for request in c.requests for b in request.table}
    if any(b.kind == OWNED and i not in held for i, b in enumerate(c.blocks)):
        return False
    for rank in state.ranks:
        if (rank.nonce, rank.epoch) != (c.nonce, c.epoch) or rank.pending_epoch:
            return False
        if rank.jobs or rank.reports:
            return False
    names = {client.name for client in state.clients}
    if any(ledger.client not in names or ledger.is_leaving for ledger in c.ledgers):
        return False
    for client in state.clients:
        if (client.nonce, client.epoch) != (c.nonce, c.epoch) or client.asked is not None:
            return False
        if all(ledger.client != client.name for ledger in c.ledgers):
            return False
        if client.failed or client.completed:
            return False
    return num_unacknowledged(model, state, c) == 0
