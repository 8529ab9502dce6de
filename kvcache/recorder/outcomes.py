"""The outcome of an operation, as a digest of each part: short enough to record every time.

The recorder computes the digests, and the replay computes them again. A digest that differs names
its part: a field of the answer, or one of the commands. Values without an obvious byte form are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import xxhash

from kvcache.base.errors import InvariantError
from kvcache.manager import KVCacheManager
from kvcache.manager.loads import PrefixLoad
from kvcache.protocol.commands import Command
from kvcache.protocol.messages import CallResult
from kvcache.protocol.step import StepResult
from kvcache.protocol.step_delivery import StepAnswer

Digests = tuple[tuple[str, int], ...]
"""Digests of named parts, in order."""

_LOAD_PARTS = ("load_id", "num_device_tokens", "num_tokens", "columns", "block_ids")
_IDENTITY = ("client_id", "step", "epoch", "seq")
_ANSWER_PARTS: Mapping[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind) if field.name not in _IDENTITY)
    for kind in (StepResult, CallResult)
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one operation: digests of the answer's fields that are not empty, and of the
    commands in order; or the error."""

    answer: Digests = ()
    commands: Digests = ()
    error: str = ""

    def difference(self, other: Outcome) -> str:
        """Return how `other` differs from this one, empty if it does not."""
        if self.error != other.error:
            return f"{_ending(other.error)}, recorded: {_ending(self.error)}"
        names = self.changed_parts(other)
        if names:
            return f"the answer has another {' and another '.join(names)}"
        for index, (mine, its) in enumerate(zip(self.commands, other.commands, strict=False)):
            if mine[0] != its[0]:
                return f"command {index} is {its[0]}, recorded: {mine[0]}"
            if mine != its:
                return f"command {index}, {mine[0]}, has other contents"
        if len(self.commands) != len(other.commands):
            return f"{len(other.commands)} commands, recorded: {len(self.commands)}"
        return ""

    def changed_parts(self, other: Outcome) -> list[str]:
        """Return the names of the answer's parts that differ in `other`."""
        answer, others = dict(self.answer), dict(other.answer)
        return [name for name in answer | others if answer.get(name) != others.get(name)]


def outcome_of(answer: StepAnswer | Exception, commands: Sequence[Command]) -> Outcome:
    """Return the error, or digests of the commands and of the answer without its sender's ids."""
    if isinstance(answer, Exception):
        return Outcome(error=f"{type(answer).__name__}: {answer}")
    parts = []
    for name in _ANSWER_PARTS[type(answer)]:
        value = getattr(answer, name)
        if not _is_empty(value):
            parts.append((name, digest_of(value)))
    return Outcome(tuple(parts), digests_of_commands(commands))


def digests_of_commands(commands: Sequence[Command]) -> Digests:
    """Return the digest of each command, under the name of its kind."""
    return tuple((type(command).__name__, digest_of(command)) for command in commands)


def digests_of_load(load: PrefixLoad | None) -> Digests:
    """Return the digest of each part of a load; empty if it got no room."""
    if load is None:
        return ()
    return tuple((name, digest_of(getattr(load, name))) for name in _LOAD_PARTS)


def digest_of(value: object) -> int:
    """Return a 64-bit digest of a value: fast, but not safe against an adversary."""
    hasher = xxhash.xxh3_64()
    _fold(hasher, value)
    digest: int = hasher.intdigest()
    return digest


def digests_of_state(manager: KVCacheManager) -> dict[str, str]:
    """Return hex digests of a manager's state by part, with each part of the core separate."""
    parts: dict[str, object] = {}
    for name, value in manager.dump_state().items():
        if name == "core" and isinstance(value, dict):
            parts |= {f"core.{key}": part for key, part in value.items()}
        else:
            parts[name] = value
    return {name: _state_digest(part) for name, part in sorted(parts.items())}


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """Return one hex digest of all parts."""
    return sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _state_digest(value: object) -> str:
    hasher = sha256()
    _fold(hasher, value)
    return hasher.hexdigest()


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _fold(hasher: _Hasher, value: Any) -> None:
    """Add a value: a letter for its kind, its length if it has one, and its content."""
    kind = type(value)
    if kind is np.ndarray:
        if value.dtype.kind not in "biu":
            raise InvariantError(f"an array of {value.dtype} has no digest: make it numbers first")
        data = value.astype("<i8" if value.dtype.itemsize == 8 else "<i4", copy=False).tobytes()
        hasher.update(b"a%d:" % len(data) + data)
    elif kind is bytes:
        hasher.update(b"b%d:" % len(value) + value)
    elif kind is str:
        text = value.encode(errors="surrogatepass")
        hasher.update(b"s%d:" % len(text) + text)
    elif kind is bool or value is None:
        hasher.update(b"n%d" % (2 if value is None else value))
    elif kind is int:
        hasher.update(b"i%d;" % value)
    elif kind is float:
        hasher.update(b"f" + value.hex().encode() + b";")
    elif kind in (tuple, list):
        _fold_items(hasher, b"l", value)
    elif kind in (set, frozenset):
        _fold_items(hasher, b"t", sorted(value, key=repr))
    elif kind is dict:
        items = sorted(value.items(), key=_key)
        _fold_items(hasher, b"d", [part for item in items for part in item])
    elif isinstance(value, np.generic):
        _fold(hasher, value.item())
    elif is_dataclass(value):
        _fold_items(hasher, b"c", [getattr(value, field.name) for field in fields(value)])
    else:
        raise InvariantError(f"{kind.__name__} has no digest: make it plain values first")


def _fold_items(hasher: _Hasher, letter: bytes, values: Sequence[Any]) -> None:
    hasher.update(letter + b"%d:" % len(values))
    if values and all(type(value) is int for value in values):
        hasher.update(",".join(map(str, values)).encode() + b";")
        return
    for value in values:
        _fold(hasher, value)


def _key(item: tuple[Any, Any]) -> tuple[str, Any]:
    return type(item[0]).__name__, item[0] if isinstance(item[0], int | str | bytes) else repr(item)


def _is_empty(value: Any) -> bool:
    size = getattr(value, "slots", value)
    return isinstance(size, np.ndarray | tuple | str | bytes) and len(size) == 0


def _ending(error: str) -> str:
    return error or "no error"
