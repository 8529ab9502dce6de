"""A worker: grants, commands in order, forwards, and copies that end later.

Every function takes the state of one rank and returns the next one. `actions` decides when messages
arrive; a refusal here is final.
"""

from __future__ import annotations

from tests.model.disk import end_fetch, end_save, start_save
from tests.model.sizes import Model
from tests.model.state import (
    COPY_BLOCK,
    DEAD,
    ENDED,
    FAILED,
    FENCE,
    FETCH,
    HOST_LABEL,
    HOST_UNLABEL,
    JOB,
    LABEL,
    LOAD,
    RESET,
    RUNNING,
    RUNNING_WRONG,
    SAVE,
    STORE,
    TORN,
    UNLABEL,
    WAITING,
    WRITE,
    WRONG,
    Command,
    Job,
    Message,
    Rank,
    Report,
    Step,
    put,
)


def is_running(rank: Rank) -> bool:
    """Return whether a forward is open."""
    return RUNNING in rank.forwards or RUNNING_WRONG in rank.forwards


def is_busy(model: Model, rank: Rank) -> bool:
    """Return whether anything runs for which a grant waits."""
    has_copies = model.rules.wait_copies and bool(rank.jobs)
    return has_copies or (model.rules.wait_forwards and is_running(rank))


def highest_epoch(rank: Rank) -> int:
    """Return the highest epoch granted or deferred."""
    return max(rank.epoch, rank.pending_epoch)


def would_take(model: Model, rank: Rank, nonce: int, epoch: int) -> bool:
    """Return whether the rank would take a grant of a coordinator's epoch, now or when idle."""
    if (nonce, epoch) in ((rank.nonce, rank.epoch), (rank.pending_nonce, rank.pending_epoch)):
        return False
    return epoch > highest_epoch(rank) or not model.rules.grant_above


def take_grant(model: Model, rank: Rank, nonce: int, epoch: int) -> Rank:
    """Obey another epoch, or defer the grant while a forward of the old one runs."""
    if is_busy(model, rank):
        return rank._replace(pending_nonce=nonce, pending_epoch=epoch)
    return rank._replace(
        nonce=nonce,
        epoch=epoch,
        pending_nonce=0,
        pending_epoch=0,
        applied=0,
        reports=rank.reports if not model.rules.report_epoch else (),
        deferred=(),
        fenced=(),
        reported=(),
    )


def die(model: Model, rank: Rank, *, loses_host: bool = False) -> Rank:
    """Replace the process by a fresh one; files survive, and host memory if its node does."""
    num_slots = len(rank.host)
    return Rank(
        nonce=0,
        epoch=0,
        pending_nonce=0,
        pending_epoch=0,
        applied=0,
        data=(DEAD,) * len(rank.data),
        labels=(0,) * len(rank.labels),
        host=(DEAD,) * num_slots if loses_host else rank.host,
        host_labels=(0,) * num_slots if loses_host else rank.host_labels,
        files=rank.files,
        forwards=tuple([f if f in (ENDED, FAILED, WRONG) else FAILED for f in rank.forwards]),
        grants=() if model.rules.grant_first else rank.grants,
    )


# --- commands


def must_wait(model: Model, rank: Rank, steps: tuple[Step, ...], message: Message) -> bool:
    """Return whether `message` fences a client whose forward runs."""
    if not model.rules.fence_waits:
        return False
    fenced = [command.target for command in message if command.kind == FENCE]
    return any(
        step.client in fenced and forward in (RUNNING, RUNNING_WRONG)
        for step, forward in zip(steps, rank.forwards, strict=True)
    )


def apply(model: Model, rank: Rank, message: Message, seq: int) -> Rank:
    """Apply one message; `seq` is its number."""
    for command in message:
        rank = _apply(model, rank, command, seq)
    return rank


def _apply(model: Model, rank: Rank, command: Command, seq: int) -> Rank:
    kind, target, value, job = command
    if kind == LABEL:
        return rank._replace(labels=put(rank.labels, target, value))
    if kind == UNLABEL:
        return rank._replace(labels=put(rank.labels, target, 0))
    if kind == HOST_LABEL:
        return rank._replace(host_labels=put(rank.host_labels, target, value))
    if kind == HOST_UNLABEL:
        return rank._replace(host_labels=put(rank.host_labels, target, 0))
    if kind == RESET:
        labels, host_labels = (0,) * len(rank.labels), (0,) * len(rank.host_labels)
        return rank._replace(labels=labels, host_labels=host_labels)
    if kind == FENCE:
        return rank._replace(fenced=tuple(sorted((*rank.fenced, (target, seq)))))
    if kind == COPY_BLOCK:
        if not model.rules.copy_in_forward:
            return rank._replace(data=put(rank.data, target, rank.data[value]))
        return rank._replace(deferred=(*rank.deferred, (seq, value, target)))
    if kind == JOB and job is not None:
        return start_job(model, rank, job)
    raise AssertionError(f"unknown command {command}")


# --- jobs


def start_job(model: Model, rank: Rank, job: Job) -> Rank:
    """Start a copy: its destination is half-written from now on."""
    if job.kind in (STORE, LOAD) and model.rules.settle:
        rank = _settle(rank, job.block)
    if job.kind == LOAD:
        rank = rank._replace(data=put(rank.data, job.block, TORN))
    elif job.kind == SAVE:
        rank = start_save(model, rank, job)
    else:
        rank = rank._replace(host=put(rank.host, job.slot, TORN))
    return rank._replace(jobs=tuple(sorted((*rank.jobs, job))))


def end_job(model: Model, rank: Rank, job: Job) -> Rank:
    """Finish a copy: its bytes are there, and it will be reported."""
    jobs = list(rank.jobs)
    jobs.remove(job)
    rank, is_ok = rank._replace(jobs=tuple(jobs)), True
    if job.kind == LOAD:
        rank = rank._replace(data=put(rank.data, job.block, rank.host[job.slot]))
    elif job.kind == STORE:
        rank = rank._replace(host=put(rank.host, job.slot, rank.data[job.block]))
    elif job.kind == SAVE:
        rank = end_save(model, rank, job)
    else:
        rank, is_ok = end_fetch(model, rank, job)
    if job.kind in (STORE, FETCH) and not model.rules.host_seal_command:
        rank = rank._replace(host_labels=put(rank.host_labels, job.slot, job.key))
    is_present = (job.nonce, job.epoch) == (rank.nonce, rank.epoch)
    if not is_present and model.rules.report_epoch:
        return rank
    report = Report(job.nonce, job.epoch, job.number, is_ok)
    return rank._replace(reports=tuple(sorted({*rank.reports, report})))


def _settle(rank: Rank, block: int) -> Rank:
    """Execute the deferred copies that touch `block` now, in order."""
    data, rest = rank.data, []
    for entry in rank.deferred:
        _, source, target = entry
        if block in (source, target):
            data = put(data, target, data[source])
        else:
            rest.append(entry)
    return rank._replace(data=data, deferred=tuple(rest))


# --- forwards


def can_begin(model: Model, rank: Rank, steps: tuple[Step, ...], index: int) -> bool:
    """Return whether the forward of `steps[index]` may begin on the rank now."""
    step = steps[index]
    if rank.forwards[index] != WAITING or not rank.nonce:
        return False
    is_present = (rank.nonce, rank.epoch) == (step.nonce, step.epoch) and not rank.pending_epoch
    if model.rules.forward_epoch and not is_present:
        return False
    if rank.applied < step.seq:
        return False
    if any(client == step.client and step.seq <= seq for client, seq in rank.fenced):
        return False
    if model.rules.forward_order and is_running(rank):
        return False
    # The engine begins its own forwards in order.
    return not any(
        other.client == step.client and rank.forwards[i] in (WAITING, RUNNING, RUNNING_WRONG)
        for i, other in enumerate(steps[:index])
    )


def begin(model: Model, rank: Rank, steps: tuple[Step, ...], index: int) -> Rank:
    """Begin a forward: deferred copies run, and its destinations are half-written."""
    step, data, rest = steps[index], rank.data, []
    for entry in rank.deferred:
        seq, source, target = entry
        if seq <= step.seq:
            data = put(data, target, data[source])
        else:
            rest.append(entry)
    is_wrong = _reads_wrong(data, step)
    for op in step.ops:
        if op.kind == WRITE:
            data = put(data, op.block, TORN)
    forwards = list(rank.forwards)
    if model.rules.forward_order:
        # Lower numbers are refused from now on.
        for i, other in enumerate(steps):
            is_same = (other.nonce, other.epoch) == (step.nonce, step.epoch)
            if is_same and other.seq < step.seq and forwards[i] == WAITING:
                forwards[i] = FAILED
    forwards[index] = RUNNING_WRONG if is_wrong else RUNNING
    return rank._replace(data=data, deferred=tuple(rest), forwards=tuple(forwards))


def end(rank: Rank, step: Step, index: int) -> Rank:
    """End a forward: its outputs are right if all its inputs were."""
    data = rank.data
    is_wrong = rank.forwards[index] == RUNNING_WRONG or _reads_wrong(data, step)
    for op in step.ops:
        if op.kind == WRITE:
            data = put(data, op.block, TORN if is_wrong else op.value)
    status = WRONG if is_wrong else ENDED
    return rank._replace(data=data, forwards=put(rank.forwards, index, status))


def fail(rank: Rank, index: int) -> Rank:
    """Fail a forward, also one that will never begin here."""
    return rank._replace(forwards=put(rank.forwards, index, FAILED))


def _reads_wrong(data: tuple[int, ...], step: Step) -> bool:
    return any(op.kind != WRITE and data[op.block] != op.value for op in step.ops)
