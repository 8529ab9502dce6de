"""The kinds of records: one class for each, and its bytes.

A payload is a msgpack array, `[kind, number, field, ...]`. Every segment begins with a
`SegmentHead`, which has the manager's settings. The other records are the operations on the
manager, in order. Their numbers have no gaps across the segments of a recording, so a missing
record is noticed.

    segment 1:  SegmentHead · EpochBegun · Executed · Executed · Released · Executed ...
    segment 2:  SegmentHead · Executed · Executed ... · StateReached

Records of an unknown version, and invalid ones with a right checksum, raise errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

import msgpack
import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import KVCacheError, MalformedMessageError, VersionMismatchError
from kvcache.coordinator.step_recorder import Gone, LookedUp, SwappedOut, TierCall
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelSet
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.protocol.wire import encode
from kvcache.recorder.manager_config import ManagerConfig
from kvcache.recorder.outcomes import Digests, Outcome
from kvcache.requests.request import Request

T = TypeVar("T")

RECORD_VERSION = 3
"""Version 1 had no tiers: no `has_tiers` in heads, no `calls` in operations, no loads. Version 2
had no hints: no `readings_s` outside operations, no `hints` in messages."""

READ_VERSIONS = (1, 2, RECORD_VERSION)

_LABEL_FIELDS = tuple(field.name for field in fields(Label))
_SET_FIELDS = tuple(field.name for field in fields(LabelSet) if field.name != "labels")
_ARRAYS = frozenset({"block_ids", "groups", "slots", "token_counts", "token_ids", "namespaces"})


@dataclass(frozen=True)
class SegmentHead:
    """The first record of a segment, without a number of its own.

    `first_number` is the next record's. `epoch` was running when the segment began. `recording_id`
    tells the recordings of one directory apart, and `segment_index` orders their segments.
    `configuration` is the cluster's as JSON, for human readers; `fingerprint` is its plan's.
    `has_tiers`: the manager was connected to tiers below the device.
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
    """A new manager, restored from `label_sets` if there are any; then `commands` were taken."""

    number: int
    epoch: int
    model_epoch: int
    label_sets: tuple[LabelSet, ...] = ()
    commands: Digests = ()


@dataclass(frozen=True)
class Executed:
    """A step or call, as the bytes of its message, and its outcome.

    `readings_s` are the manager's clock readings since the last operation, `calls` its calls of
    tiers.
    """

    number: int
    message: bytes
    readings_s: tuple[float, ...]
    outcome: Outcome
    calls: tuple[TierCall, ...] = ()


@dataclass(frozen=True)
class Released:
    """All requests of a client were freed."""

    number: int
    client_id: str
    readings_s: tuple[float, ...] = ()
    calls: tuple[TierCall, ...] = ()


@dataclass(frozen=True)
class Held:
    """Cached prefixes are held for a client. `message`: a step with their requests."""

    number: int
    message: bytes
    num_tokens: int
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LetGo:
    """The prefixes held for a client were released."""

    number: int
    client_id: str
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Withdrawn:
    """Blocks were forgotten outside steps; then `commands` were taken."""

    number: int
    block_ids: tuple[int, ...]
    commands: Digests = ()
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LoadBegun:
    """Tiers asked for blocks for the first `num_tokens` tokens of a request, outside steps.

    `message` is a step with the request, which is of `model_epoch`. Without a message, it is the
    request that the manager knows by this id. `load` has digests of the blocks, if it got any.
    """

    number: int
    request_id: str
    message: bytes
    model_epoch: int
    num_tokens: int
    num_spare_blocks: int
    has_tail: bool
    load: Digests = ()
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LoadFinished:
    """A load was finished: its blocks were cached."""

    number: int
    load_id: int
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LoadReleased:
    """The blocks of a load were released outside steps."""

    number: int
    load_id: int
    readings_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class StateReached:
    """The manager's state: a digest of each part."""

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
    values = [getattr(head, field.name) for field in fields(head)]
    packed: bytes = msgpack.packb(
        ["segment", RECORD_VERSION, *values], default=ManagerConfig.to_dict
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
    values[-2] = ManagerConfig.from_dict(values[-2])
    return SegmentHead(*values[2:])


def pack_record(record: Record) -> bytes:
    """Return the payload of any other record."""
    name, form = _FORMS[type(record)]
    packed: bytes = msgpack.packb([name, record.number, *form.pack(record)])
    return packed


def unpack_record(payload: bytes) -> Record:
    """Return what `pack_record` made; raises MalformedMessageError for anything else."""
    values = _unpack(payload)
    kind = _KINDS.get(values[0]) if values and type(values[0]) is str else None
    if kind is None or len(values) < 2 or type(values[1]) is not int:
        raise MalformedMessageError(f"a record of unknown kind {str(values[:1])[:50]}")
    try:
        number, *rest = values[1:]
        record: Record = kind(number, *_FORMS[kind][1].unpack(rest))
        return record
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


# --- fields as plain values


@dataclass(frozen=True)
class _Codec:
    """A field as a plain value, and back; `unpack` raises TypeError or ValueError."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _exactly(kind: type[T], what: str) -> Callable[[Any], T]:
    """Return a function that returns a value of `kind`, and raises TypeError for any other."""

    def check(value: Any) -> T:
        if type(value) is not kind:
            raise TypeError(f"{type(value).__name__} is not {what}")
        return value

    return check


_text, _bytes = _exactly(str, "text"), _exactly(bytes, "bytes")
_int, _bool = _exactly(int, "a number"), _exactly(bool, "true or false")


def _digests(pairs: Any) -> Digests:
    return tuple((_text(name), _int(digest)) for name, digest in pairs)


def _outcome(value: Any) -> Outcome:
    error, answer, commands = value
    return Outcome(_digests(answer.items()), _digests(commands), _text(error))


def _state_digests(value: Any) -> dict[str, str]:
    return {_text(name): _text(digest) for name, digest in value.items()}


def message_of(request: Request) -> bytes:
    """Return the bytes of a step that brings a request of this content."""
    lora = request.lora
    new = NewRequest(
        request.request_id,
        request.all_token_ids,
        request.num_tokens,
        lora_name=None if lora is None else lora.name,
        lora_path=None if lora is None else lora.path,
        mm_hashes=request.mm_hashes,
        mm_offsets=int32_array([position.offset for position in request.mm_positions]),
        mm_lengths=int32_array([position.length for position in request.mm_positions]),
        cache_salt=request.cache_salt,
        tenant=request.namespace.tenant,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        hints=request.hints,
    )
    return encode(StepRequest(new=(new,)), sys.maxsize)


def pack_label_sets(label_sets: Sequence[LabelSet]) -> list[Any]:
    """Return plain values: the different labels, then for each set its fields and which it has."""
    different: list[list[Any]] = []
    sets = []
    for label_set in label_sets:
        labels = [_plain(getattr(label_set.labels, name)) for name in _LABEL_FIELDS]
        if labels not in different:
            different.append(labels)
        own = [getattr(label_set, name) for name in _SET_FIELDS]
        sets.append([different.index(labels), *own])
    return [different, sets]


def unpack_label_sets(values: Any) -> tuple[LabelSet, ...]:
    """Return what `pack_label_sets` made; raises MalformedMessageError for anything else."""
    try:
        different, sets = values
        labels = [
            Label(**{n: _value(n, v) for n, v in zip(_LABEL_FIELDS, one, strict=True)})
            for one in different
        ]
        return tuple(
            LabelSet(labels=labels[index], **dict(zip(_SET_FIELDS, own, strict=True)))
            for index, *own in sets
        )
    except KVCacheError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedMessageError(f"no labels: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype("<i4", copy=False).tobytes()
    return list(value) if isinstance(value, tuple) else value


def _value(name: str, value: Any) -> Any:
    if name in _ARRAYS:
        return _array(value)
    return tuple(value) if isinstance(value, list) else value


def _array(value: bytes) -> Int32Array:
    return np.frombuffer(value, "<i4").astype(np.int32, copy=False)


def _pack_call(call: TierCall) -> list[Any]:
    match call:
        case LookedUp(request_id, num_device_tokens, answer):
            return ["?", request_id, num_device_tokens, answer.answer.value, answer.num_tokens]
        case SwappedOut(request_id, num_tokens, num_cached_tokens):
            return ["swap", request_id, num_tokens, num_cached_tokens]
        case Gone(request_id, released_loads):
            return ["gone", request_id, list(released_loads)]


def _unpack_call(kind: str, request_id: str, *values: Any) -> TierCall:
    if type(request_id) is not str:
        raise TypeError(f"{type(request_id).__name__} is not a request id")
    match (kind, *values):
        case ("?", int(num_device_tokens), str(answer), int(num_tokens)):
            hit = OffloadHit(OffloadAnswer(answer), num_tokens)
            return LookedUp(request_id, num_device_tokens, hit)
        case ("swap", int(num_tokens), int(num_cached_tokens)):
            return SwappedOut(request_id, num_tokens, num_cached_tokens)
        case ("gone", list(load_ids)) if all(type(one) is int for one in load_ids):
            return Gone(request_id, tuple(load_ids))
    raise ValueError(f"a call of tiers that is {kind!r} with {values!r:.100}")


_INT, _TEXT, _BYTES, _BOOL = (
    _Codec(lambda value: value, one) for one in (_int, _text, _bytes, _bool)
)
_INTS = _Codec(list, lambda values: tuple(_int(value) for value in values))
_READINGS = _Codec(list, lambda values: tuple(float(value) for value in values))
_DIGESTS = _Codec(list, _digests)
_OUTCOME = _Codec(lambda o: [o.error, dict(o.answer), o.commands], _outcome)
_LABELS = _Codec(pack_label_sets, unpack_label_sets)
_CALLS = _Codec(
    lambda calls: [_pack_call(call) for call in calls],
    lambda values: tuple(_unpack_call(*value) for value in values),
)
_STATE = _Codec(dict, _state_digests)


def _unpacked(codecs: Sequence[_Codec | tuple[_Codec, ...]], packed: Sequence[Any]) -> list[Any]:
    if len(packed) != len(codecs):
        raise ValueError(f"{len(packed)} fields instead of {len(codecs)}")
    values: list[Any] = []
    for codec, value in zip(codecs, packed, strict=True):
        values += _unpacked(codec, value) if isinstance(codec, tuple) else [codec.unpack(value)]
    return values


class _Form:
    """The fields of a record behind its number, in order; a tuple of codecs is a nested list."""

    def __init__(self, kind: type[Any], *codecs: _Codec | tuple[_Codec, ...]) -> None:
        self._names = [field.name for field in fields(kind)][1:]
        self._codecs = codecs

    def pack(self, record: Record) -> list[Any]:
        """Return plain values."""
        values = iter([getattr(record, name) for name in self._names])
        return [
            [one.pack(next(values)) for one in codec]
            if isinstance(codec, tuple)
            else codec.pack(next(values))
            for codec in self._codecs
        ]

    def unpack(self, packed: list[Any]) -> list[Any]:
        """Return the fields' values; raises ValueError or TypeError."""
        is_newer = self._codecs[-1] is _CALLS or self._codecs[-1] is _READINGS
        if is_newer and len(packed) == len(self._codecs) - 1:
            packed = [*packed, []]  # versions 1 and 2
        return _unpacked(self._codecs, packed)


_FORMS: Mapping[type[Any], tuple[str, _Form]] = {
    kind: (name, _Form(kind, *codecs))
    for name, kind, *codecs in (
        ("epoch", EpochBegun, _INT, _INT, _LABELS, _DIGESTS),
        ("executed", Executed, _BYTES, _READINGS, _OUTCOME, _CALLS),
        ("released", Released, _TEXT, _READINGS, _CALLS),
        ("held", Held, _BYTES, _INT, _READINGS),
        ("let go", LetGo, _TEXT, _READINGS),
        ("withdrawn", Withdrawn, _INTS, _DIGESTS, _READINGS),
        ("load begun", LoadBegun, (_TEXT, _BYTES, _INT), (_INT, _INT, _BOOL), _DIGESTS, _READINGS),
        ("load finished", LoadFinished, _INT, _READINGS),
        ("load released", LoadReleased, _INT, _READINGS),
        ("state", StateReached, _STATE),
    )
}
_KINDS = {name: kind for kind, (name, _) in _FORMS.items()}
