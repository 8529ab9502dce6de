"""Every message between coordinator, workers and clients: data only, one class each.

    coordinator ──Grant──────────▶ worker      takes over the worker for a new epoch
                ──StepCommands───▶             numbered commands; one message per worker per step
                ──FinishedAck────▶             these reports arrived, stop repeating them
                ──Ping───────────▶             no step ran for a while: send a heartbeat
                ──CollectLabels──▶             send your labels, from this block on
                ──Unreadable─────▶             a report cannot be read: send a smaller one
    worker      ──Hello──────────▶ coordinator a process introduces itself to a coordinator
                ──Granted / Refused ▶          answer to a Grant
                ──Ack────────────▶             answer to StepCommands, stored for repeats
                ──Nack───────────▶             a gap: repeat from this number on
                ──Rejected───────▶             these commands cannot be read or obeyed
                ──Finished───────▶             jobs that have ended; repeated until acknowledged
                ──Heartbeat──────▶             answer to a Ping; also sent when idle
                ──LabelReport────▶             answer to CollectLabels, as much as fits
    client      ──Attach─────────▶ coordinator answered by Attached
                ──StepRequest────▶             answered by StepResult
                ──Call───────────▶             a per-request call; answered by CallResult
                ──Acknowledge────▶             the last answers and progress that arrived
                ──Detach─────────▶             answered by Detached, and repeated until then
    coordinator ──Progress───────▶ client      the last applied and finished steps; cumulative
                ──MissingSteps───▶             a gap in the client's numbers: send again
                ──Unattached─────▶             unknown client, or another epoch: attach again

Every message between coordinator and workers carries the coordinator's nonce and the worker's
incarnation, so that a message for another process or from another coordinator is recognised.
Encoding and limits: wire.py. Delivery rules: delivery.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvcache.protocol.commands import Command, Label
from kvcache.protocol.step import StepRequest, StepResult

WIRE_VERSION = 3
"""It changes with the fields of messages. Version 1 had no hints: no `hints` in steps and their new
requests. Version 2 had no `generations` in label reports."""

READ_WIRE_VERSIONS = (1, 2, WIRE_VERSION)
"""Formats of recorded messages that can be read. Processes speak only the newest."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest message, unless the configuration sets another limit (`transport.max_message_bytes`)."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""Bounds of every integer."""

MAX_ITEMS = 65_536
"""Most items of one tuple or map. int32 arrays travel as bytes, and may be longer."""

MAX_NAME_CHARS = 4096
"""Longest name: clients, requests, adapters and their paths, images, salts, tenants. Commands
repeat some of them for every block, so a name of megabytes would fill a message."""

MAX_PROSE_CHARS = 16_384
"""Longest text for people."""

PROSE_FIELDS = frozenset({"detail", "error", "reason"})
"""The fields with texts for people; all other texts are names."""


MAX_REPORTED_BLOCKS = 64
"""Most block ids in one job's report: a full list may be incomplete."""


@dataclass(frozen=True)
class JobReport:
    """One job of one rank that has ended.

    `ok` is False if it failed, and `detail` says how. `checksum` is of the moved bytes, 0 if none
    was taken. `num_bytes` were moved or, for a forward, compared. `block_ids` are blocks in which
    an audit found a difference, or which did not arrive; `lost_ids` of them never will, because
    their file is damaged or missing.
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
    """The worker now obeys `epoch` of `nonce`; no forward of an older epoch runs any
    more."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int


@dataclass(frozen=True)
class Refused:
    """The worker refuses a grant: it has granted `highest_epoch`, or has another plan."""

    nonce: str
    incarnation: str
    rank: int
    highest_epoch: int
    reason: str


@dataclass(frozen=True)
class Hello:
    """A worker process without a coordinator, or that lost its coordinator."""

    incarnation: str
    rank: int
    highest_epoch: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class StepCommands:
    """The commands number `seq` of `epoch`. `client_id` and `client_step` name the step that they
    belong to, or are empty and 0."""

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
    """Answer with a heartbeat."""

    nonce: str
    epoch: int


@dataclass(frozen=True)
class CollectLabels:
    """Send the labels from `first_block` on, and the steps that were applied.

    In media other than the device, blocks are slots of host memory, or parts of all files.
    """

    nonce: str
    epoch: int
    first_block: int
    medium: str = "device"


@dataclass(frozen=True)
class Unreadable:
    """A message of kind `kind` (`Finished`, `LabelReport`) cannot be read, for `reason`: send a
    smaller one, because a repeat does not help."""

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

    A repeated request gets the same answer, because only commands change labels. `model_epoch` is
    that of the last reset. labels.py defines labels and `version`. Files have no block ids: their
    labels are numbered in each report, and `end_block` is `first_block` while they are being read.
    `generations` of host slots are little-endian uint32: higher the later the slot was written.
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
    generations: bytes = b""


@dataclass(frozen=True)
class Ack:
    """Everything up to `seq` of `epoch` is applied on `rank`, not including bytes and copies."""

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
    with that number."""

    nonce: str
    incarnation: str
    rank: int
    epoch: int
    seq: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """Finished jobs of `rank`."""

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
    of its next step: numbers never restart, and lower ones without an answer are void. `nonce` is
    that of the coordinator to which the client believes it is attached, empty if to none: epoch
    numbers can repeat if all state is lost, nonces never do."""

    client_id: str
    next_step: int = 1
    nonce: str = ""


@dataclass(frozen=True)
class Attached:
    """The client may send steps of `epoch` to coordinator `nonce`. `next_step` is the number
    expected next. Before the epoch began, every rank had applied the client's steps up to
    `applied_step`, 0 if none, which tells the client about a step without an answer."""

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
    """The client has the answers of all steps up to `step`: they need not be kept."""

    client_id: str
    epoch: int
    step: int


@dataclass(frozen=True)
class Detach:
    """The client ends; its running requests are freed. Valid in every epoch."""

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
    """The progress of the client's steps on every rank. Cumulative, so a lost one is harmless.

    Every step up to `applied_step` is applied, every content-checked forward up to
    `finished_step` has ended; `failures` are those that failed. `bytes_checked` is the total over
    all ranks since the client attached.
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
    """The client is not attached in the present epoch. Its earlier steps are void.

    `is_final`: it cannot attach again under this id.
    """

    client_id: str
    epoch: int
    reason: str
    is_final: bool = False


@dataclass(frozen=True)
class Detached:
    """The client is no longer served. Its requests are freed once no rank can run a step of it."""

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
    """Return the tag of a class of messages or commands on the wire."""
    return _OTHER_TAGS.get(kind, kind.__name__)


class WorkerAddress(NamedTuple):
    """The worker of a global rank, in whichever process."""

    rank: int


class ClientAddress(NamedTuple):
    """A client, by the id with which it attached."""

    client_id: str


Address: TypeAlias = WorkerAddress | ClientAddress


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message to send, and its receiver. State machines return these and send nothing."""

    to: tuple[Address, ...]
    message: Message = field(repr=False)
