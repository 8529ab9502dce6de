"""The messages between nodes, engines and the index, and between two nodes.

Each is a msgpack list: version, verb, fields. Every field is checked when a message is read, so a
message that exists is well-formed. Bounded: at most `MAX_KEYS` keys, `MAX_MESSAGE_BYTES` in all.

| from | to | verb | |
|---|---|---|---|
| node | index | hold | blocks that a source has got and lost |
| index | node | taken | all up to a number, and which blocks are copies; or: state all again |
| engine | index | ask | who holds these blocks |
| index | engine | answer | a place for each block |
| anyone | index | status | |
| index | anyone | report | |
| rank | node | want | the bytes of a block |
| node | rank | give | whether the frames that follow are the block |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import msgpack
import numpy as np

from kvcache.base.errors import MalformedMessageError, VersionMismatchError, shown

SHARING_VERSION = 3
KEY_BYTES = 36
"""A digest of 32 bytes and a group of 4, as in `kvcache.offload.keys`."""

MAX_KEYS = 8192
MAX_ORIGINALS = 2048
"""Blocks in one answer to a source that have become originals; the rest comes with the next."""

MAX_MESSAGE_BYTES = 1 << 20
MAX_ANSWER_NODES = 32
"""Nodes in one answer."""

NO_NODE = 255
"""In the places of an answer: no node holds the block."""

SOURCE_BYTES = 16
MEMORY_BYTES = 32
MAX_ENDPOINT_LENGTH = 200
MAX_TOPIC_LENGTH = 400
MAX_NUMBER = 2**63 - 1


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise MalformedMessageError(f"a message about shared blocks: {what}")


def _require_keys(keys: bytes) -> None:
    _require(len(keys) % KEY_BYTES == 0, f"{len(keys)} bytes of keys of {KEY_BYTES} bytes each")
    _require(len(keys) <= MAX_KEYS * KEY_BYTES, f"more than {MAX_KEYS} keys")


_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Za-z:.%_-]+\]|[0-9A-Za-z_.-]+):[0-9]{1,5}")


def _require_endpoint(endpoint: str) -> None:
    is_right = len(endpoint) <= MAX_ENDPOINT_LENGTH and _ENDPOINT.fullmatch(endpoint) is not None
    _require(is_right, f"{shown(endpoint)} is no endpoint")


@dataclass(frozen=True)
class Holding:
    """A source, at `endpoint`, has got the keys `added` and lost the keys `removed` since its
    message `seq - 1`. `is_first`: it had none before. Only engines whose memory has the same
    description `memory` can use its blocks. Without keys, it says that the source lives. If `topic`
    is not empty, the source publishes events under it at the endpoints `live` and `replay`."""

    source: bytes
    memory: bytes
    endpoint: str
    seq: int
    is_first: bool
    added: bytes = b""
    removed: bytes = b""
    topic: str = ""
    live: str = ""
    replay: str = ""

    def __post_init__(self) -> None:
        _require(len(self.source) == SOURCE_BYTES, f"a source of {len(self.source)} bytes")
        _require(len(self.memory) == MEMORY_BYTES, f"a memory of {len(self.memory)} bytes")
        _require(0 <= self.seq <= MAX_NUMBER, f"number {self.seq}")
        _require_endpoint(self.endpoint)
        _require_keys(self.added)
        _require_keys(self.removed)
        _require(len(self.topic) <= MAX_TOPIC_LENGTH, f"a topic of {len(self.topic)} characters")
        if self.topic:
            _require_endpoint(self.live)
            _require_endpoint(self.replay)


@dataclass(frozen=True)
class Taken:
    """The index has a source's messages up to `seq`; or, not `is_known`, it needs the first one.

    Of the sources that hold a key, the first one has the *original*, and the others have *copies*.
    `copies` says which of the keys `added` by message `seq` are copies, as bits (`pack_bits`); the
    keys `originals` have become originals since the answer before, because sources ahead of this
    one lost them. An answer to a message that is repeated says the same again.
    """

    source: bytes
    seq: int
    is_known: bool
    copies: bytes = b""
    originals: bytes = b""

    def __post_init__(self) -> None:
        _require(len(self.copies) <= MAX_KEYS // 8, f"{len(self.copies)} bytes of bits")
        _require_keys(self.originals)


@dataclass(frozen=True)
class Question:
    """Who but `source` holds these keys in memory of this description?"""

    number: int
    memory: bytes
    source: bytes
    keys: bytes

    def __post_init__(self) -> None:
        _require_keys(self.keys)


@dataclass(frozen=True)
class Answer:
    """`endpoints[places[i]]` holds key `i` of a question, unless the place is `NO_NODE`."""

    number: int
    endpoints: tuple[str, ...]
    places: bytes

    def __post_init__(self) -> None:
        _require(len(self.endpoints) <= MAX_ANSWER_NODES, f"{len(self.endpoints)} nodes")
        _require(len(self.places) <= MAX_KEYS, f"{len(self.places)} places")
        for endpoint in self.endpoints:
            _require(isinstance(endpoint, str), "an endpoint that is no text")
            _require_endpoint(endpoint)
        known = {NO_NODE, *range(len(self.endpoints))}
        _require(set(self.places) <= known, "a place that is no node's")


@dataclass(frozen=True)
class StatusQuestion:
    """What does the index hold?"""


@dataclass(frozen=True)
class StatusReport:
    """What the index holds, as values for JSON."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Give me a rank's part of the block `key`."""

    number: int
    rank: int
    key: bytes

    def __post_init__(self) -> None:
        _require(len(self.key) == KEY_BYTES, f"a key of {len(self.key)} bytes")


@dataclass(frozen=True)
class Given:
    """If `is_there`, the next frames are the head of a block's file, and its tensors."""

    number: int
    is_there: bool


Message: TypeAlias = (
    Holding | Taken | Question | Answer | StatusQuestion | StatusReport | Wanted | Given
)

_VERBS: dict[str, type[Message]] = {
    "hold": Holding,
    "taken": Taken,
    "ask": Question,
    "answer": Answer,
    "status": StatusQuestion,
    "report": StatusReport,
    "want": Wanted,
    "give": Given,
}
_NAMES = {kind: verb for verb, kind in _VERBS.items()}
_TYPES = {
    "bytes": bytes,
    "str": str,
    "int": int,
    "bool": bool,
    "dict[str, Any]": dict,
    "tuple[str, ...]": tuple,
}
_FIELDS = {kind: tuple(_TYPES[str(each.type)] for each in fields(kind)) for kind in _VERBS.values()}


def pack(message: Message) -> bytes:
    kind = type(message)
    values = [getattr(message, each.name) for each in fields(kind)]
    packed: bytes = msgpack.packb([SHARING_VERSION, _NAMES[kind], *values])
    return packed


def unpack(data: bytes) -> Message:
    """Return the message; raises MalformedMessageError, VersionMismatchError."""
    _require(len(data) <= MAX_MESSAGE_BYTES, f"{len(data)} bytes")
    try:
        values = msgpack.unpackb(data, use_list=False)
    except Exception as error:
        raise MalformedMessageError("a message about shared blocks cannot be read") from error
    _require(type(values) is tuple and len(values) >= 2, "no version, or no verb")
    if values[0] != SHARING_VERSION:
        raise VersionMismatchError(
            f"the other end shares blocks in version {shown(values[0])}, this package in "
            f"{SHARING_VERSION}: run the same release everywhere"
        )
    kind = _VERBS.get(values[1]) if type(values[1]) is str else None
    _require(kind is not None, f"verb {shown(values[1])}")
    assert kind is not None
    found = tuple(type(value) for value in values[2:])
    _require(found == _FIELDS[kind], f"fields of {values[1]}: {len(found)} of other types")
    return kind(*values[2:])


def pack_bits(values: Sequence[bool]) -> bytes:
    """Return eight values to a byte, the first in its highest bit; none if all are false."""
    return np.packbits(np.array(values, np.bool_)).tobytes() if any(values) else b""


def unpack_bits(packed: bytes, count: int) -> list[bool]:
    """Return `count` packed values; those beyond the end are false."""
    found = np.unpackbits(np.frombuffer(packed, np.uint8), count=min(count, 8 * len(packed)))
    return [bool(bit) for bit in found] + [False] * (count - len(found))


def split(keys: bytes) -> list[bytes]:
    """Return the single keys of a message."""
    return [keys[place : place + KEY_BYTES] for place in range(0, len(keys), KEY_BYTES)]
