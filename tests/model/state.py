"""The state of every party: immutable records, for hashing and sharing.

A content's right bytes are its number, plus ten for every change of the weights; a *key* is the
content's number plus ten for every model epoch, as the coordinator counts them. All state of a
rank, also that of other parties about it, is in `Rank`: ranks are alike, so that their order does
not matter.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

TORN = -1
"""Half-written bytes."""
DEAD = -2
"""Bytes of a process that has died."""
DAMAGED = -3
"""A file whose bytes changed on the disk."""
FOREIGN = -4
"""A file that another program wrote under our name."""

WEIGHTS = 10
"""Distance between the bytes of one content under successive weights."""

# Blocks and host slots in the coordinator's table.
FREE, HITTABLE, SEALED, FILLING, QUARANTINED, OWNED = range(6)

# Operations of a forward.
READ, WRITE, COPY = range(3)

# The progress of a forward on a rank. WRONG: it has read wrong bytes.
WAITING, RUNNING, ENDED, FAILED, RUNNING_WRONG, WRONG = range(6)

# Jobs, by source and destination.
STORE, LOAD, SAVE, FETCH = "store", "load", "save", "fetch"

# Phases of a living coordinator.
FENCING, RULING = range(2)

# Commands.
LABEL, UNLABEL, HOST_LABEL, HOST_UNLABEL, JOB, COPY_BLOCK, RESET, FENCE = (
    "label",
    "unlabel",
    "host label",
    "host unlabel",
    "job",
    "copy",
    "reset",
    "fence",
)

ItemT = TypeVar("ItemT")


class Op(NamedTuple):
    """One block of a forward: `value` must be there before (READ) or after it."""

    kind: int
    value: int
    block: int
    source: int = -1


class Step(NamedTuple):
    """A step whose forward has not ended; `Rank.forwards` has its progress on each rank."""

    client: int
    nonce: int
    epoch: int
    number: int
    seq: int
    ops: tuple[Op, ...]
    is_doomed: bool


class Job(NamedTuple):
    """A copy on every rank. `is_late`: its deadline has passed; `is_bad`: it failed on a rank."""

    nonce: int
    epoch: int
    number: int
    kind: str
    block: int
    slot: int
    key: int
    is_late: bool = False
    is_bad: bool = False
    num_reports: int = 0


class Report(NamedTuple):
    """A rank's report of a job that ended there."""

    nonce: int
    epoch: int
    number: int
    is_ok: bool


class Command(NamedTuple):
    """One command; `target` is a block, a host slot, or a client."""

    kind: str
    target: int = 0
    value: int = 0
    job: Job | None = None


Message = tuple[Command, ...]


class Rank(NamedTuple):
    """One rank: its worker process, its memory and files, and what others know of it. `grants`:
    late grants to this very process from dead coordinators."""

    nonce: int
    epoch: int
    pending_nonce: int
    pending_epoch: int
    applied: int
    data: tuple[int, ...]
    labels: tuple[int, ...]
    host: tuple[int, ...]
    host_labels: tuple[int, ...]
    files: tuple[tuple[int, int], ...] = ()
    jobs: tuple[Job, ...] = ()
    reports: tuple[Report, ...] = ()
    deferred: tuple[tuple[int, int, int], ...] = ()
    fenced: tuple[tuple[int, int], ...] = ()
    forwards: tuple[int, ...] = ()
    reported: tuple[tuple[int, int], ...] = ()
    grants: tuple[tuple[int, int], ...] = ()


class Block(NamedTuple):
    """A device block or host slot in the table: state, key, and the client and step it is of."""

    kind: int
    key: int = 0
    client: int = 0
    step: int = 0


FREE_BLOCK = Block(FREE)


class Request(NamedTuple):
    """A running request: its last content, and the blocks of it and of all it continues."""

    client: int
    content: int
    table: tuple[int, ...]


class StepRequest(NamedTuple):
    """A client's request: which steps have ended, which request ends, which content is next."""

    client: int
    number: int
    completed: int
    failed: int
    finished: Request | None = None
    content: int = 0
    forked: Request | None = None
    is_empty: bool = False


class Answer(NamedTuple):
    """The answer to step `number`: its forward, and after which command message it may begin."""

    number: int
    seq: int
    ops: tuple[Op, ...]
    requests: tuple[Request, ...]


class Ledger(NamedTuple):
    """A coordinator's state of one client. `fence_seq`: 0, or the message that fences it."""

    client: int
    next_number: int
    is_leaving: bool = False
    fence_seq: int = 0
    answer: Answer | None = None


class Scheduled(NamedTuple):
    """An unfinished step, as far as the coordinator knows, and the blocks of its tables."""

    client: int
    number: int
    blocks: tuple[int, ...]


class Coordinator(NamedTuple):
    """A living coordinator. Its tables are of the present epoch. `is_unsure`: it found no saved
    state, and has not ruled yet."""

    nonce: int
    epoch: int
    phase: int
    model_epoch: int
    blocks: tuple[Block, ...] = ()
    slots: tuple[Block, ...] = ()
    files: tuple[int, ...] = ()
    jobs: tuple[Job, ...] = ()
    requests: tuple[Request, ...] = ()
    ledgers: tuple[Ledger, ...] = ()
    scheduled: tuple[Scheduled, ...] = ()
    is_unsure: bool = False


class Client(NamedTuple):
    """An engine. `model_epoch` is -1 while it is unknown; `asked` has no answer yet. `repeated` and
    `unseen` arrive late if no rule refuses them: an earlier request, and a step of an older
    epoch."""

    name: int
    nonce: int
    epoch: int
    next_number: int
    model_epoch: int
    requests: tuple[Request, ...] = ()
    completed: int = 0
    failed: int = 0
    asked: StepRequest | None = None
    repeated: StepRequest | None = None
    unseen: int = 0


class Stream(NamedTuple):
    """The commands of one epoch that some rank may not have applied, oldest first."""

    nonce: int
    epoch: int
    messages: tuple[Message, ...]


class State(NamedTuple):
    """The whole state.

    `saved_*` outlives a coordinator, `left` is the budget of actions by kind. `broken` describes a
    violation, empty if there was none.
    """

    ranks: tuple[Rank, ...]
    coordinators: tuple[Coordinator, ...]
    clients: tuple[Client, ...]
    steps: tuple[Step, ...]
    streams: tuple[Stream, ...]
    saved_epoch: int
    saved_model_epoch: int
    weights: int
    last_nonce: int
    left: tuple[int, ...]
    broken: str = ""


def put(items: tuple[ItemT, ...], index: int, item: ItemT) -> tuple[ItemT, ...]:
    """Return `items` with another one at `index`."""
    return (*items[:index], item, *items[index + 1 :])


def without(items: tuple[ItemT, ...], index: int) -> tuple[ItemT, ...]:
    """Return `items` without the one at `index`."""
    return items[:index] + items[index + 1 :]


def with_rank(state: State, index: int, rank: Rank) -> State:
    """Return the state with one rank changed."""
    return state._replace(ranks=put(state.ranks, index, rank))


def with_coordinator(state: State, coordinator: Coordinator) -> State:
    """Return the state with the coordinator of the same nonce replaced."""
    all_of_them = state.coordinators
    return state._replace(
        coordinators=tuple([coordinator if c[0] == coordinator[0] else c for c in all_of_them])
    )


def with_client(state: State, index: int, client: Client) -> State:
    """Return the state with one client changed."""
    return state._replace(clients=put(state.clients, index, client))


def coordinator_of(state: State, nonce: int) -> Coordinator | None:
    """Return the living coordinator with this nonce."""
    for coordinator in state.coordinators:
        if coordinator.nonce == nonce:
            return coordinator
    return None


def present_coordinator(state: State, client: Client) -> Coordinator | None:
    """Return the coordinator that the client is attached to, if it still rules that epoch."""
    coordinator = coordinator_of(state, client.nonce)
    if coordinator is None or coordinator.phase != RULING or coordinator.epoch != client.epoch:
        return None
    return coordinator
