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

from kvcache.base.errors import KVCacheError, MalformedMessageError, VersionMismatchError
from kvcache.coordinator.tier_calls import TierCall
from kvcache.protocol.labels import LabelSet
from kvcache.recorder.label_codec import pack_label_sets, unpack_label_sets
from kvcache.recorder.manager_config import ManagerConfig
from kvcache.recorder.outcomes import Digests, Outcome
from kvcache.recorder.tier_codec import pack_calls, unpack_calls

RECORD_VERSION = 2
"""Version 1 knew no tiers: heads without `has_tiers`, operations without `calls`, no loads."""

READ_VERSIONS = (1, RECORD_VERSION)


@dataclass(frozen=True)
class SegmentHead:
    """The first record of a segment, without a number of its own.

    `first_number` is that of the next record. `epoch` was running when the segment began.
    `recording_id` tells the recordings of one directory apart, `segment_index` orders the segments.
    `configuration` is the cluster's, as JSON, for people; `fingerprint` is its plan's. `has_tiers`:
    the manager asked tiers below the device.
    """

    recording_id: str
    segment_index: int
    first_number: int
    epoch: int
    fingerprint: str
    configuration: str
    manager_config: ManagerConfig
    has_tiers: bool = False


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

    `readings_s` are the times the manager was told meanwhile, `calls` those of its tiers.
    """

    number: int
    message: bytes
    outcome: Outcome
    readings_s: tuple[float, ...] = ()
    calls: tuple[TierCall, ...] = ()


@dataclass(frozen=True)
class Released:
    """Everything a client had was freed."""

    number: int
    client_id: str
    readings_s: tuple[float, ...] = ()
    calls: tuple[TierCall, ...] = ()


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
    """Blocks were forgotten outside steps, and then `commands` taken."""

    number: int
    block_ids: tuple[int, ...]
    commands: Digests = ()


@dataclass(frozen=True)
class LoadBegun:
    """Tiers asked for blocks for the first `num_tokens` tokens of a request, outside steps.

    It stands in `message`, a step's bytes, and is of `model_epoch`; without a message it is the one
    that the manager knows under this name. `load` are digests of what was given, none if nothing.
    """

    number: int
    request_id: str
    message: bytes
    model_epoch: int
    num_tokens: int
    num_spare_blocks: int
    has_tail: bool
    load: Digests = ()


@dataclass(frozen=True)
class LoadFinished:
    """What was loaded was cached."""

    number: int
    load_id: int


@dataclass(frozen=True)
class LoadReleased:
    """The blocks of a load were released outside steps."""

    number: int
    load_id: int


@dataclass(frozen=True)
class StateReached:
    """How the manager's books stood: a digest of each part."""

    number: int
    digests: Mapping[str, str] = field(default_factory=dict)


Record: TypeAlias = (
    EpochBegun
    | Executed
    | Released
    | Held
    | LetGo
    | Withdrawn
    | LoadBegun
    | LoadFinished
    | LoadReleased
    | StateReached
)


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
            head.manager_config.to_dict(),
            head.has_tiers,
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
    if values[1] not in READ_VERSIONS:
        raise VersionMismatchError(
            f"the recording has format version {values[1]}, this package reads versions "
            f"{READ_VERSIONS[0]} to {READ_VERSIONS[-1]}: replay it with the release that recorded "
            "it"
        )
    if values[1] == 1:
        values.append(False)
    types = [type(value) for value in values[2:]]
    if types != [str, int, int, int, str, str, dict, bool]:
        raise MalformedMessageError(f"the head of a segment has fields of types {types}")
    recording_id, index, number, epoch, fingerprint, configuration, manager_config, has_tiers = (
        values[2:]
    )
    return SegmentHead(
        recording_id,
        index,
        number,
        epoch,
        fingerprint,
        configuration,
        ManagerConfig.from_dict(manager_config),
        has_tiers,
    )


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
            pack_calls(r.calls),
        ],
    ),
    Released: ("released", lambda r: [r.client_id, r.readings_s, pack_calls(r.calls)]),
    Held: ("held", lambda r: [r.message, r.num_tokens]),
    LetGo: ("let go", lambda r: [r.client_id]),
    Withdrawn: ("withdrawn", lambda r: [r.block_ids, r.commands]),
    LoadBegun: (
        "load begun",
        lambda r: [
            [r.request_id, r.message, r.model_epoch],
            [r.num_tokens, r.num_spare_blocks, r.has_tail],
            r.load,
        ],
    ),
    LoadFinished: ("load finished", lambda r: [r.load_id]),
    LoadReleased: ("load released", lambda r: [r.load_id]),
    StateReached: ("state", lambda r: [dict(r.digests)]),
}


def _epoch_begun(
    number: int, epoch: int, model_epoch: int, label_sets: Any, commands: Any
) -> EpochBegun:
    kept = unpack_label_sets(label_sets)
    return EpochBegun(number, _int(epoch), _int(model_epoch), kept, _digests(commands))


def _executed(
    number: int, message: bytes, readings_s: Any, what_came: Any, calls: Any = ()
) -> Executed:
    error, answer, commands = what_came
    outcome = Outcome(_digests(answer.items()), _digests(commands), _text(error))
    readings = _readings(readings_s)
    return Executed(number, _bytes(message), outcome, readings, unpack_calls(calls))


def _released(number: int, client_id: str, readings_s: Any, calls: Any = ()) -> Released:
    return Released(number, _text(client_id), _readings(readings_s), unpack_calls(calls))


def _held(number: int, message: bytes, num_tokens: int) -> Held:
    return Held(number, _bytes(message), _int(num_tokens))


def _let_go(number: int, client_id: str) -> LetGo:
    return LetGo(number, _text(client_id))


def _withdrawn(number: int, block_ids: Any, commands: Any) -> Withdrawn:
    return Withdrawn(number, tuple(_int(block_id) for block_id in block_ids), _digests(commands))


def _load_begun(number: int, request: Any, wanted: Any, load: Any) -> LoadBegun:
    request_id, message, model_epoch = request
    num_tokens, num_spare_blocks, has_tail = wanted
    if type(has_tail) is not bool:
        raise TypeError(f"{type(has_tail).__name__} does not say whether there is a tail")
    return LoadBegun(
        number,
        _text(request_id),
        _bytes(message),
        _int(model_epoch),
        _int(num_tokens),
        _int(num_spare_blocks),
        has_tail,
        _digests(load),
    )


def _load_finished(number: int, load_id: int) -> LoadFinished:
    return LoadFinished(number, _int(load_id))


def _load_released(number: int, load_id: int) -> LoadReleased:
    return LoadReleased(number, _int(load_id))


def _state_reached(number: int, digests: Any) -> StateReached:
    return StateReached(number, {_text(name): _text(one) for name, one in digests.items()})


_UNPACK: Mapping[str, Callable[..., Record]] = {
    "epoch": _epoch_begun,
    "executed": _executed,
    "released": _released,
    "held": _held,
    "let go": _let_go,
    "withdrawn": _withdrawn,
    "load begun": _load_begun,
    "load finished": _load_finished,
    "load released": _load_released,
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
