"""Every message between coordinator, workers and clients: data only, one class each.

    coordinator ──Grant──────────▶ worker      takes over the worker for a new epoch
                ──StepCommands───▶             numbered commands; one message per worker per step
                ──FinishedAck────▶             these reports arrived, stop repeating them
                ──Ping───────────▶             no step ran for a while: say that you live
                ──CollectLabels──▶             say what your blocks hold, from this one on
                ──Unreadable─────▶             a report cannot be read: say less
    worker      ──Hello──────────▶ coordinator a process asks to be taken, or taken over
                ──Granted / Refused ▶          answer to a Grant
                ──Ack────────────▶             answer to StepCommands, stored for repeats
                ──Nack───────────▶             a gap: send again from this number on
                ──Rejected───────▶             these commands cannot be read or obeyed
                ──Finished───────▶             jobs that have ended; repeated until acknowledged
                ──Heartbeat──────▶             answer to a Ping; also sent when idle
                ──LabelReport────▶             answer to CollectLabels, as much as fits
    client      ──Attach─────────▶ coordinator answered by Attached
                ──StepRequest────▶             answered by StepResult
                ──Call───────────▶             a per-request call; answered by CallResult
                ──Acknowledge────▶             how far answers and progress have arrived
                ──Detach─────────▶             answered by Detached, and repeated until then
    coordinator ──Progress───────▶ client      how far steps are applied and finished; cumulative
                ──MissingSteps───▶             a gap in the client's numbers: send again
                ──Unattached─────▶             unknown client, or another epoch: attach again

Every message between coordinator and workers carries the coordinator's nonce and the worker's
incarnation, so that what was meant for another process or sent by another coordinator is
recognised. Encoding and limits: wire.py. Delivery rules: delivery.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvcache.protocol.commands import Command, Label
from kvcache.protocol.step import StepRequest, StepResult

WIRE_VERSION = 1

MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest message, unless the configuration sets another limit (`transport.max_message_bytes`)."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""Bounds of every integer."""

MAX_ITEMS = 65_536
"""Most items of one tuple or map. int32 arrays travel as bytes, and may be longer."""

MAX_NAME_CHARS = 4096
"""Longest text that names something: clients, requests, adapters and their paths, images, salts,
tenants. Commands repeat some of them for every block, so one of megabytes would fill a message."""

MAX_PROSE_CHARS = 16_384
"""Longest text for people to read."""

PROSE_FIELDS = frozenset({"detail", "error", "reason"})
"""The fields with such texts; all other texts are names."""


MAX_REPORTED_BLOCKS = 64
"""Blocks that one job's report names at most: one with so many may have left others out."""


@dataclass(frozen=True)
class JobReport:
    """One job of one rank that has ended.

    `ok` is False when it failed, and then `detail` says how. `checksum` is of the bytes moved, 0
    where none was taken. `num_bytes` were moved or, for a forward, compared. `block_ids` are those
    where an audit found something unexpected, and those that did not arrive;
    `lost_ids` of them never will, because their file is no good.
    """

    job_id: int
    ok: bool
    checksum: int = 0
    num_bytes: int = 0
    detail: str = ""
    block_ids: tuple[int, ...] = ()
    lost_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grant:
    """Take over worker process `incarnation` for `epoch`. Idempotent per `nonce`."""

    nonce: str
    incarnation: str
    epoch: int
    fingerprint: str


@dataclass(frozen=True)
class Granted:
    """The worker obeys `epoch` of `nonce` from now on; nothing of an older epoch runs any more."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int


@dataclass(frozen=True)
class Refused:
    """The worker does not take a grant: it has granted `highest_epoch`, or another plan."""

    nonce: str
    incarnation: str
    rank: int
    highest_epoch: int
    reason: str


@dataclass(frozen=True)
class Hello:
    """A worker process that no coordinator has taken yet, or that lost its coordinator."""

    incarnation: str
    rank: int
    highest_epoch: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class StepCommands:
    """The commands number `seq` of `epoch`. `client_id` and `client_step` say whose step it is,
    or are empty and 0."""

    nonce: str
    fingerprint: str
    epoch: int
    seq: int
    client_id: str
    client_step: int
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class FinishedAck:
    """The reports of these jobs arrived; the worker stops repeating them."""

    nonce: str
    epoch: int
    job_ids: tuple[int, ...]


@dataclass(frozen=True)
class Ping:
    """Say that you live."""

    nonce: str
    epoch: int


@dataclass(frozen=True)
class CollectLabels:
    """Say what the blocks from `first_block` on are labelled with, and whose steps were applied.

    In media other than the device, blocks are slots of host memory, or parts of all files.
    """

    nonce: str
    epoch: int
    first_block: int
    medium: str = "device"


@dataclass(frozen=True)
class Unreadable:
    """A message of kind `kind` (`Finished`, `LabelReport`) cannot be read, for `reason`: repeating
    it does not help, saying less does."""

    nonce: str
    epoch: int
    kind: str
    reason: str


@dataclass(frozen=True)
class ClientStep:
    """The last step of a client that a rank has applied, in whatever epoch."""

    client_id: str
    step: int


@dataclass(frozen=True, eq=False)
class LabelReport:
    """The labels of the blocks `first_block` to `end_block - 1` of `rank`, which has `num_blocks`.

    Asked again, it says the same: labels change by commands only. `model_epoch` is that of the last
    reset. What labels are, `version` included, is in labels.py. Files have no block ids: their
    labels are numbered in each report, and `end_block` is `first_block` while they are being read.
    """

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    first_block: int
    end_block: int
    num_blocks: int
    model_epoch: int
    version: int
    layout_fingerprint: str
    digest_bytes: int
    labels: Label
    checksums: bytes
    client_steps: tuple[ClientStep, ...]
    medium: str = "device"


@dataclass(frozen=True)
class Ack:
    """Everything up to `seq` of `epoch` is applied on `rank`. Bytes and copies are not included."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    seq: int


@dataclass(frozen=True)
class Nack:
    """`from_seq` has not arrived, though later numbers have."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    from_seq: int


@dataclass(frozen=True)
class Rejected:
    """`rank` cannot read or obey the commands of number `seq`, for `reason`; it waits for others
    under that number."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    seq: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """Jobs that have ended on `rank`."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    jobs: tuple[JobReport, ...]


@dataclass(frozen=True)
class Heartbeat:
    """`rank` lives and has applied everything up to `seq`."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    seq: int


@dataclass(frozen=True)
class Attach:
    """A client introduces itself. `client_id` contains its incarnation. `next_step` is the number
    its next step will have: numbers never restart, and lower ones that got no answer are void.
    `nonce` is the coordinator's that it holds itself to be attached to, empty if to none: epochs
    come again when every state is lost, nonces never do."""

    client_id: str
    next_step: int = 1
    nonce: str = ""


@dataclass(frozen=True)
class Attached:
    """The client may send steps of `epoch` to coordinator `nonce`. `next_step` is the number
    expected next. Every rank had applied the client's steps up to `applied_step`, 0 if none, before
    the epoch began: what came of a step that got no answer can be told by it."""

    client_id: str
    epoch: int
    model_epoch: int
    fingerprint: str
    next_step: int
    is_content_checking: bool
    nonce: str
    applied_step: int = 0


@dataclass(frozen=True)
class Call:
    """A per-request call, in the same numbering as steps: method name and msgpack arguments."""

    client_id: str
    step: int
    epoch: int
    completed_step: int
    method: str
    arguments: bytes


@dataclass(frozen=True)
class CallResult:
    """The answer to a `Call`: msgpack `result`, or the class and text of the error it raised."""

    client_id: str
    step: int
    epoch: int
    seq: int
    result: bytes
    error_type: str = ""
    error: str = ""


@dataclass(frozen=True)
class Acknowledge:
    """The client has the answers of every step up to `step`: they need not be stored any more."""

    client_id: str
    epoch: int
    step: int


@dataclass(frozen=True)
class Detach:
    """The client goes for good; whatever it still runs is freed. It counts in every epoch."""

    client_id: str
    epoch: int


@dataclass(frozen=True)
class FailedForward:
    """A content-checked forward that failed on `rank`, with the history of the block at fault."""

    step: int
    rank: int
    detail: str


@dataclass(frozen=True)
class Progress:
    """How far the client's steps have got on every rank. Cumulative: losing one is harmless.

    Every step up to `applied_step` is applied, every content-checked forward up to
    `finished_step` has ended; `failures` are those that ended badly. `bytes_checked` is the total
    over all ranks since the client attached.
    """

    client_id: str
    epoch: int
    applied_step: int
    finished_step: int
    bytes_checked: int = 0
    failures: tuple[FailedForward, ...] = ()


@dataclass(frozen=True)
class MissingSteps:
    """The client's number `from_step` has not arrived, though later ones have."""

    client_id: str
    epoch: int
    from_step: int


@dataclass(frozen=True)
class Unattached:
    """The client is not attached in the present epoch. What it scheduled before is void.

    `is_final`: nor will it be under this id, which has gone.
    """

    client_id: str
    epoch: int
    reason: str
    is_final: bool = False


@dataclass(frozen=True)
class Detached:
    """The client is served no more. What it had is freed once no rank can run a step of it."""

    client_id: str
    epoch: int


ToWorker: TypeAlias = Grant | StepCommands | FinishedAck | Ping | CollectLabels | Unreadable
FromWorker: TypeAlias = (
    Hello | Granted | Refused | Ack | Nack | Rejected | Finished | Heartbeat | LabelReport
)
FromClient: TypeAlias = Attach | StepRequest | Call | Acknowledge | Detach
ToClient: TypeAlias = (
    Attached | StepResult | CallResult | Progress | MissingSteps | Unattached | Detached
)
Message: TypeAlias = ToWorker | FromWorker | FromClient | ToClient

_OTHER_TAGS: dict[type[Any], str] = {Ack: "Applied", Nack: "Missing"}
"""Messages whose tag on the wire is not the name of their class."""


def wire_tag(kind: type[Any]) -> str:
    """Return the tag that messages or commands of a class carry on the wire."""
    return _OTHER_TAGS.get(kind, kind.__name__)


class WorkerAddress(NamedTuple):
    """The worker of a global rank, whichever process that is."""

    rank: int


class ClientAddress(NamedTuple):
    """A client, by the id it attached with."""

    client_id: str


Address: TypeAlias = WorkerAddress | ClientAddress


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message to send, and to whom. State machines return these and send nothing themselves."""

    to: tuple[Address, ...]
    message: Message = field(repr=False)
