"""What a record says: one class for each kind, and its bytes.

A payload is a msgpack array, `[kind, number, field, ...]`. Every segment begins with a
`SegmentHead`, which says what the manager is made from; the others say what happened to it, in
order, numbered without gaps through all segments of a recording, so that what is missing is seen.

    segment 1:  SegmentHead · EpochBegun · Executed · Executed · Released · Executed ...
    segment 2:  SegmentHead · Executed · Executed ... · StateReached

Refuses records of another version, and whatever has a right checksum and makes no sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack

from kvcache.errors import KVCacheError, MalformedMessageError, VersionMismatchError
from kvcache.labels import LabelSet
from kvcache.recorder.label_codec import pack_label_sets, unpack_label_sets
from kvcache.recorder.outcomes import Digests, Outcome
from kvcache.recorder.recipe import ManagerRecipe

RECORD_VERSION = 1


@dataclass(frozen=True)
class SegmentHead:
    """The first record of a segment, without a number of its own.

    `first_number` is that of the next record. `epoch` was running when the segment began.
    `recording_id` tells the recordings of one directory apart, `segment_index` orders the segments.
    `configuration` is the cluster's, as JSON, for people; `fingerprint` is its plan's.
    """

    recording_id: str
    segment_index: int
    first_number: int
    epoch: int
    fingerprint: str
    configuration: str
    recipe: ManagerRecipe


@dataclass(frozen=True)
class EpochBegun:
    """A new manager; restored from `label_sets` where there are any, and then `commands` taken."""

    number: int
    epoch: int
    model_epoch: int
    label_sets: tuple[LabelSet, ...] = ()
    commands: Digests = ()


@dataclass(frozen=True)
class Executed:
    """A step or call, as the bytes of its message, and what came of it.

    `readings_s` are the times the manager was told meanwhile.
    """

    number: int
    message: bytes
    outcome: Outcome
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Released:
    """Everything a client had was freed."""

    number: int
    client_id: str
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Held:
    """What is cached of requests is held for a client: they stand in `message`, a step's bytes."""

    number: int
    message: bytes
    num_tokens: int


@dataclass(frozen=True)
class LetGo:
    """Nothing is held for a client any more."""

    number: int
    client_id: str


@dataclass(frozen=True)
class Withdrawn:
    """Blocks were forgotten beside all steps, and then `commands` taken."""

    number: int
    block_ids: tuple[int, ...]
    commands: Digests = ()


@dataclass(frozen=True)
class StateReached:
    """How the manager's books stood: a digest of each part."""

    number: int
    digests: Mapping[str, str] = field(default_factory=dict)


Record: TypeAlias = EpochBegun | Executed | Released | Held | LetGo | Withdrawn | StateReached


def pack_head(head: SegmentHead) -> bytes:
    """Return the payload of a segment's first record."""
    packed: bytes = msgpack.packb(
        [
            "segment",
            RECORD_VERSION,
            head.recording_id,
            head.segment_index,
            head.first_number,
            head.epoch,
            head.fingerprint,
            head.configuration,
            head.recipe.to_dict(),
        ]
    )
    return packed


def unpack_head(payload: bytes) -> SegmentHead:
    """Return what `pack_head` made.

    Raises:
        MalformedMessageError: no first record of a segment.
        VersionMismatchError: of another version of this format.
    """
    values = _unpack(payload)
    if len(values) < 2 or values[0] != "segment" or type(values[1]) is not int:
        raise MalformedMessageError("it does not begin with the head of a segment")
    if values[1] != RECORD_VERSION:
        raise VersionMismatchError(
            f"the recording has format version {values[1]}, this package reads version "
            f"{RECORD_VERSION}: replay it with the release that recorded it"
        )
    types = [type(value) for value in values[2:]]
    if types != [str, int, int, int, str, str, dict]:
        raise MalformedMessageError(f"the head of a segment has fields of types {types}")
    recording_id, index, number, epoch, fingerprint, configuration, recipe = values[2:]
    made_from = ManagerRecipe.from_dict(recipe)
    return SegmentHead(recording_id, index, number, epoch, fingerprint, configuration, made_from)


def pack_record(record: Record) -> bytes:
    """Return the payload of any other record."""
    kind, values = _PACK[type(record)]
    packed: bytes = msgpack.packb([kind, record.number, *values(record)])
    return packed


def unpack_record(payload: bytes) -> Record:
    """Return what `pack_record` made; raises MalformedMessageError for anything else."""
    values = _unpack(payload)
    unpack = _UNPACK.get(values[0]) if values and type(values[0]) is str else None
    if unpack is None or len(values) < 2 or type(values[1]) is not int:
        raise MalformedMessageError(f"a record of unknown kind {str(values[:1])[:50]}")
    try:
        return unpack(*values[1:])
    except (TypeError, ValueError, AttributeError, KVCacheError) as error:
        raise MalformedMessageError(f"a record of kind {values[0]} makes no sense: {error}") from (
            error
        )


def _unpack(payload: bytes) -> list[Any]:
    try:
        values = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"a record that cannot be decoded: {error}") from error
    if type(values) is not list:
        raise MalformedMessageError(f"a record that is {type(values).__name__}, not a list")
    return values


_PACK: Mapping[type[Any], tuple[str, Callable[[Any], list[Any]]]] = {
    EpochBegun: (
        "epoch",
        lambda r: [r.epoch, r.model_epoch, pack_label_sets(r.label_sets), r.commands],
    ),
    Executed: (
        "executed",
        lambda r: [
            r.message,
            r.readings_s,
            [r.outcome.error, dict(r.outcome.answer), r.outcome.commands],
        ],
    ),
    Released: ("released", lambda r: [r.client_id, r.readings_s]),
    Held: ("held", lambda r: [r.message, r.num_tokens]),
    LetGo: ("let go", lambda r: [r.client_id]),
    Withdrawn: ("withdrawn", lambda r: [r.block_ids, r.commands]),
    StateReached: ("state", lambda r: [dict(r.digests)]),
}


def _epoch_begun(
    number: int, epoch: int, model_epoch: int, label_sets: Any, commands: Any
) -> EpochBegun:
    kept = unpack_label_sets(label_sets)
    return EpochBegun(number, _int(epoch), _int(model_epoch), kept, _digests(commands))


def _executed(number: int, message: bytes, readings_s: Any, what_came: Any) -> Executed:
    error, answer, commands = what_came
    outcome = Outcome(_digests(answer.items()), _digests(commands), _text(error))
    return Executed(number, _bytes(message), outcome, _readings(readings_s))


def _released(number: int, client_id: str, readings_s: Any) -> Released:
    return Released(number, _text(client_id), _readings(readings_s))


def _held(number: int, message: bytes, num_tokens: int) -> Held:
    return Held(number, _bytes(message), _int(num_tokens))


def _let_go(number: int, client_id: str) -> LetGo:
    return LetGo(number, _text(client_id))


def _withdrawn(number: int, block_ids: Any, commands: Any) -> Withdrawn:
    return Withdrawn(number, tuple(_int(block_id) for block_id in block_ids), _digests(commands))


def _state_reached(number: int, digests: Any) -> StateReached:
    return StateReached(number, {_text(name): _text(one) for name, one in digests.items()})


_UNPACK: Mapping[str, Callable[..., Record]] = {
    "epoch": _epoch_begun,
    "executed": _executed,
    "released": _released,
    "held": _held,
    "let go": _let_go,
    "withdrawn": _withdrawn,
    "state": _state_reached,
}


def _digests(pairs: Any) -> Digests:
    return tuple((_text(name), _int(digest)) for name, digest in pairs)


def _readings(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} is not text")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise TypeError(f"{type(value).__name__} is not bytes")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} is not a number")
    return value
