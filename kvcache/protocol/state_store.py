"""The small state that outlives a coordinator, and its store.

It is written before it is used: an epoch, a model epoch or a range of event numbers counts only
once it is saved, so that a restarted coordinator never uses it again. A superseded coordinator
saves nothing: it would overwrite its successor's state. All larger state is in the workers' labels,
next to the bytes. A state that cannot be read is an error.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Protocol

import msgpack

from kvcache.base.errors import (
    ClusterError,
    MalformedMessageError,
    SupersededError,
    VersionMismatchError,
)

STATE_VERSION = 2
MAX_STATE_BYTES = 4096
"""Longest state that is read or written."""


@dataclass(frozen=True)
class SmallState:
    """`epoch` is the last one taken, `next_event_chunk` the first event number not reserved,
    `owner` the nonce of the coordinator that saved it.

    Without `knows_model_epoch`, nothing had been saved when the first epoch was taken: the ranks'
    model epoch may be outdated.
    """

    epoch: int = 0
    model_epoch: int = 0
    next_event_chunk: int = 0
    hash_seed: str = ""
    knows_model_epoch: bool = True
    owner: str = ""

    def to_bytes(self) -> bytes:
        """Return the state as versioned msgpack; raises ClusterError if it is too long to be read
        again."""
        packed: bytes = msgpack.packb([STATE_VERSION, *astuple(self)])
        if len(packed) > MAX_STATE_BYTES:
            raise ClusterError(
                f"a state of {len(packed)} bytes, {MAX_STATE_BYTES} are read: shorten the hash seed"
            )
        return packed

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SmallState:
        """Return the state from `to_bytes`; `where` names the place in messages.

        Raises:
            MalformedMessageError: not a state.
            VersionMismatchError: another version.
        """
        remedy = "remove it to start cold"
        try:
            values = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise MalformedMessageError(
                f"{where} holds no state ({len(data)} bytes, {error}): {remedy}"
            ) from error
        if type(values) is not list or not values or type(values[0]) is not int:
            raise MalformedMessageError(f"{where} holds no state ({len(data)} bytes): {remedy}")
        if values[0] != STATE_VERSION:
            raise VersionMismatchError(
                f"{where} has version {values[0]}, this package reads version {STATE_VERSION}: "
                "run the same release, or remove it to start cold"
            )
        types = [type(getattr(cls(), f.name)) for f in fields(cls)]
        numbers = [value for value in values[1:] if type(value) is int]
        if [type(value) for value in values[1:]] != types or min(numbers) < 0:
            raise MalformedMessageError(f"{where} holds fields {values[1:]!r}: {remedy}")
        return cls(*values[1:])


def require_saved(saved: SmallState | None, expected: SmallState | None, where: str) -> None:
    """Raise `SupersededError` unless the saved state is the expected one."""
    if saved != expected:
        raise SupersededError(
            f"{where} is {saved}, and not {expected}: another coordinator has begun, this one "
            "no longer saves anything"
        )


class StateStore(Protocol):
    """A place for one `SmallState` that survives the coordinator's process."""

    def load(self) -> SmallState | None:
        """Return the saved state, None if there never was one. Changes nothing."""

    def save(self, state: SmallState, replaces: SmallState | None) -> None:
        """Replace the saved state; after this returns, `load` finds it even after a crash.

        Raises SupersededError, and saves nothing, if the saved state is not `replaces`;
        ClusterError if it cannot be written: the old state is kept then.
        """


class MemoryStateStore:
    """A state that outlives a coordinator object, but not the process. For tests and embedding."""

    def __init__(self, state: SmallState | None = None) -> None:
        self._state = state

    def load(self) -> SmallState | None:
        return self._state

    def save(self, state: SmallState, replaces: SmallState | None) -> None:
        """Save `state`; raises SupersededError."""
        require_saved(self._state, replaces, "the state in memory")
        self._state = state
