"""Every error this package raises on purpose.

Every module may raise these. A message says what happened, with the values, and the remedy.

    KVCacheError
    ├── InvalidInputError (ValueError)      the caller's mistake; nothing was changed
    │   ├── ConfigurationError              an invalid configuration
    │   ├── RequestError                    a request or step that contradicts the state
    │   ├── BlockError                      an invalid block id, or an invalid operation on it
    │   ├── PlanMismatchError               ranks that disagree (rank, layer or group, field)
    │   ├── TraceError                      a workload that cannot be read (file, line)
    │   └── RecordingError                  a recording that cannot be read (file, byte)
    ├── ExhaustedError                      a resource is used up; nothing was changed
    │   ├── NotEnoughMemoryError            the model does not fit (needed, available, remedy)
    │   ├── OutOfBlocksError                too few free blocks
    │   ├── PinLimitError                   pins would exceed their configured share
    │   └── BacklogFullError                a bounded queue or window is full
    ├── ProtocolError                       a message that must not be obeyed
    │   ├── MalformedMessageError           not decodable, wrong shape, too large
    │   ├── VersionMismatchError            another version of the format
    │   └── StaleEpochError                 an epoch that is not the present one
    ├── ClusterError                        a process of the running cluster
    │   ├── StartupError                    start-up failed (rank, cause); nothing is left running
    │   ├── AlreadyRunningError             a cluster of that name exists
    │   ├── NotRunningError                 no cluster of that name exists
    │   ├── SupersededError                 another process has taken the cluster over
    │   ├── WorkerLostError                 a worker died or hangs
    │   └── DeadlineError                   a wait ended without an answer; the outcome is unknown
    ├── WrongBytesError                     a block's bytes are not what its tokens demand
    └── InvariantError                      inconsistent state: a bug of this package
"""

from __future__ import annotations

import re
import reprlib


class KVCacheError(Exception):
    """Base of every error this package raises on purpose. Its message is `legible`."""

    def __init__(self, message: str = "") -> None:
        """Say what happened, with the values, and the remedy."""
        super().__init__(legible(message))


class InvalidInputError(KVCacheError, ValueError):
    """The caller's mistake. Nothing was changed."""


class ConfigurationError(InvalidInputError):
    """An invalid configuration, or an invalid combination of settings."""


class RequestError(InvalidInputError):
    """A request or step that contradicts the state: unknown or duplicate id, wrong counts."""


class BlockError(InvalidInputError):
    """A block id that does not exist, or an operation that the block's state forbids."""


class PlanMismatchError(InvalidInputError):
    """Ranks whose plans or specs differ. The message names rank, layer or group, and field."""


class TraceError(InvalidInputError):
    """A workload file that cannot be read. The message names the file and the line."""


class RecordingError(InvalidInputError):
    """A recording that cannot be read. The message names the file and the byte."""


class ExhaustedError(KVCacheError):
    """A resource is used up. Nothing was changed."""


class NotEnoughMemoryError(ExhaustedError):
    """The model does not fit. The message says what it needs, what there is, what would fit."""


class OutOfBlocksError(ExhaustedError):
    """There are fewer free blocks than requested."""


class PinLimitError(ExhaustedError):
    """Pinning would exceed the configured share of the pool."""


class BacklogFullError(ExhaustedError):
    """A bounded queue or window is full: the other side is too slow or gone."""


class ProtocolError(KVCacheError):
    """A message that must not be obeyed. It is counted and refused, and nothing else happens."""


class MalformedMessageError(ProtocolError):
    """Bytes that are not a message of this package: truncated, oversized, foreign, wrong types."""


class VersionMismatchError(ProtocolError):
    """A message or label set of another format version. The message names both."""


class StaleEpochError(ProtocolError):
    """A message or a wait of an epoch other than the present one."""


class ClusterError(KVCacheError):
    """An error of the processes of a running cluster."""


class StartupError(ClusterError):
    """Start-up failed. The message names the rank and the cause; nothing is left running."""


class AlreadyRunningError(ClusterError):
    """A cluster of that name exists already."""


class NotRunningError(ClusterError):
    """No cluster of that name exists."""


class SupersededError(ClusterError):
    """Another process has taken the cluster over or ended it: this one no longer serves it."""


class WorkerLostError(ClusterError):
    """A worker process died, or has been silent for longer than configured."""


class DeadlineError(ClusterError):
    """A wait ended without an answer. The call may or may not have taken effect."""


class WrongBytesError(KVCacheError):
    """A block's bytes are not what its tokens demand. The message carries the block's history."""


class InvariantError(KVCacheError):
    """Inconsistent state: a bug of this package, found by `check()`."""


_LONGEST_WORD = 400
"""Longest word of a message that is not shortened: few paths are longer."""

_LONGEST_MESSAGE = 10_000
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def legible(message: str) -> str:
    """Return a message that is safe to print, whatever ids and names from outside it contains.

    Unprintable characters are escaped, so that they can neither control a terminal nor look like
    another line: a line break stays only if the next line is indented by two spaces. Words of more
    than 400 characters, and messages of more than 10,000, are shortened to both ends.
    """
    if len(message) <= _LONGEST_WORD and message.isprintable():
        return message
    text = _cut(_with_words_cut(message), _LONGEST_MESSAGE)
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() or (c == "\n" and text.startswith("  ", i + 1)) else _escaped(c)
            for i, c in enumerate(text)
        )
    return _with_words_cut(text)


def shown(value: object) -> str:
    """Return the `repr` of any `value`, shortened, for a message."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return f"an {type(value).__name__} too long to show"


def _cut(text: str, longest: int) -> str:
    """Return both ends of a text that is too long."""
    if len(text) <= longest:
        return text
    end = longest // 4  # so that the result is not cut again
    return f"{text[:end]} [{len(text) - 2 * end:,} characters] {text[-end:]}"


def _with_words_cut(text: str) -> str:
    return _LONG_WORD.sub(lambda word: _cut(word[0], _LONGEST_WORD), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _short_repr() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel = 2
    short.maxstring = short.maxother = short.maxlong = 60
    return short


_SHORT = _short_repr()
