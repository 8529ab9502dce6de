"""Copies as the coordinator sees them: begun, late, reported by every rank, visible.

A job has a deadline. After it, its destination is unusable until every rank has reported that it
writes no more. Refuses reports of other epochs.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.network import send
from tests.model.sizes import Model
from tests.model.state import (
    FETCH,
    FILLING,
    FREE,
    FREE_BLOCK,
    HOST_LABEL,
    HOST_UNLABEL,
    JOB,
    LABEL,
    LOAD,
    QUARANTINED,
    SAVE,
    SEALED,
    STORE,
    Block,
    Command,
    Coordinator,
    Job,
    Report,
    State,
    put,
    with_coordinator,
    with_rank,
)
from tests.model.steps import is_room_for_load, take, victims


def next_number(model: Model, state: State, c: Coordinator) -> int:
    """Return the number of the coordinator's next job: unused in this epoch."""
    used = {job.number for job in c.jobs}
    for rank in state.ranks:
        for job in rank.jobs:
            if job.nonce == c.nonce and job.epoch == c.epoch:
                used.add(job.number)
        for report in rank.reports:
            if report.nonce == c.nonce and report.epoch == c.epoch:
                used.add(report.number)
        used |= {number for nonce, number in rank.reported if nonce == c.nonce}
    return min(set(range(1, len(used) + 2)) - used)


def begin(model: Model, state: State, c: Coordinator, job: Job, commands: list[Command]) -> State:
    """Open a job and send it to every rank; its destination in the table is changed already."""
    state = with_coordinator(state, c._replace(jobs=(*c.jobs, job)))
    return send(state, c, *commands, Command(JOB, job=job))[0]


def stores(model: Model, state: State, c: Coordinator) -> Iterator[tuple[Job, State]]:
    """Yield every possible store, and the next state."""
    for b, block in enumerate(c.blocks):
        if block.kind != SEALED or any(slot.key == block.key for slot in c.slots):
            continue
        for h in free_slots(model, state, c):
            yield _to_slot(model, state, c, Job(c.nonce, c.epoch, 0, STORE, b, h, block.key))


def fetches(model: Model, state: State, c: Coordinator) -> Iterator[tuple[Job, State]]:
    """Yield every possible fetch, and the next state."""
    for key in c.files:
        if any(slot.key == key for slot in c.slots):
            continue
        for h in free_slots(model, state, c):
            yield _to_slot(model, state, c, Job(c.nonce, c.epoch, 0, FETCH, 0, h, key))


def loads(model: Model, state: State, c: Coordinator) -> Iterator[tuple[Job, State]]:
    """Yield every possible load, and the next state."""
    for h, slot in enumerate(c.slots):
        if slot.kind != SEALED or not is_room_for_load(model, c, slot.key):
            continue
        for b in victims(model, state, c, for_copy=True):
            number = next_number(model, state, c)
            job = Job(c.nonce, c.epoch, number, LOAD, b, h, slot.key)
            taken, commands = take(model, c, b, Block(FILLING, slot.key))
            if is_room_for_load(model, taken, slot.key) or taken.blocks[b].key == slot.key:
                yield job, begin(model, state, taken, job, commands)


def saves(model: Model, state: State, c: Coordinator) -> Iterator[tuple[Job, State]]:
    """Yield every possible spill, and the next state."""
    for h, slot in enumerate(c.slots):
        is_saving = any(job.kind == SAVE and job.key == slot.key for job in c.jobs)
        if slot.kind != SEALED or slot.key in c.files or is_saving:
            continue
        number = next_number(model, state, c)
        job = Job(c.nonce, c.epoch, number, SAVE, 0, h, slot.key)
        yield job, begin(model, state, c, job, [])


def free_slots(model: Model, state: State, c: Coordinator) -> list[int]:
    """Return the host slots that may be written."""
    is_replacing = model.has(state, "replace")
    read = {job.slot for job in c.jobs if job.kind in (LOAD, SAVE)}
    return [
        h
        for h, slot in enumerate(c.slots)
        if (slot.kind == FREE or (slot.kind == SEALED and is_replacing))
        and not (h in read and model.rules.host_hold)
    ]


def miss_deadline(model: Model, state: State, c: Coordinator, job: Job) -> State:
    """Give up a job: its destination is quarantined."""
    late = job._replace(is_late=True)
    jobs = [late if j == job else j for j in c.jobs]
    left = QUARANTINED
    if not model.rules.destination_quarantine:
        left = FREE
        if job.kind not in (STORE, SAVE) or not model.rules.source_hold:
            jobs.remove(late)
    return with_coordinator(
        state, _with_destination(c, job, Block(left))._replace(jobs=tuple(jobs))
    )


def hear(model: Model, state: State, c: Coordinator, r: int, report: Report) -> State:
    """Take a report of a rank; the last one missing ends the job."""
    rank = state.ranks[r]
    job = next((j for j in c.jobs if j.number == report.number), None)
    if job is None:
        return state
    heard = job._replace(num_reports=job.num_reports + 1, is_bad=job.is_bad or not report.is_ok)
    reported = tuple(sorted({*rank.reported, (c.nonce, job.number)}))
    state = with_rank(state, r, rank._replace(reported=reported))
    if model.rules.report_ranks:
        heard = heard._replace(num_reports=0)
        is_over = all((c.nonce, job.number) in other.reported for other in state.ranks)
    else:
        is_over = heard.num_reports >= len(state.ranks)
    if not is_over and (model.rules.visible_all or job.is_late):
        jobs = [heard if j == job else j for j in c.jobs]
        return with_coordinator(state, c._replace(jobs=tuple(jobs)))
    return _finish(model, state, c, job, heard.is_bad)


def _finish(model: Model, state: State, c: Coordinator, job: Job, is_bad: bool) -> State:
    """End a job: its destination becomes visible, unless it failed or was late."""
    ranks = [
        rank._replace(reported=tuple([x for x in rank.reported if x != (c.nonce, job.number)]))
        for rank in state.ranks
    ]
    state = state._replace(ranks=tuple(ranks))
    c = c._replace(jobs=tuple([j for j in c.jobs if j != job]))
    is_good = not (is_bad or job.is_late)
    if job.kind == FETCH and is_bad:
        c = c._replace(files=tuple([key for key in c.files if key != job.key]))
    if job.kind == SAVE:
        files = tuple(sorted({*c.files, job.key})) if is_good else c.files
        return with_coordinator(state, c._replace(files=files))
    c = _with_destination(c, job, Block(SEALED, job.key) if is_good else FREE_BLOCK)
    state = with_coordinator(state, c)
    if not is_good:
        return state
    if job.kind == LOAD:
        return send(state, c, Command(LABEL, job.block, job.key))[0]
    if model.rules.host_seal_command:
        return send(state, c, Command(HOST_LABEL, job.slot, job.key))[0]
    return state


def _to_slot(model: Model, state: State, c: Coordinator, job: Job) -> tuple[Job, State]:
    job, h = job._replace(number=next_number(model, state, c)), job.slot
    if c.slots[h].kind != FREE:
        state = model.spend(state, "replace")
    commands = [Command(HOST_UNLABEL, h)] if model.rules.host_unlabel_first else []
    filling = c._replace(slots=put(c.slots, h, Block(FILLING, job.key)))
    return job, begin(model, state, filling, job, commands)


def _with_destination(c: Coordinator, job: Job, block: Block) -> Coordinator:
    if job.kind == LOAD:
        return c._replace(blocks=put(c.blocks, job.block, block))
    if job.kind == SAVE:
        return c
    return c._replace(slots=put(c.slots, job.slot, block))
