"""Hints: what an engine knows about the future use of a request's blocks.

A hint orders evictions, and nothing else. It applies when the request's blocks come out of use.

    kind            meaning                                  ends
    is_over         these blocks will not be used again      with the next use
    returns_in_s    they will be used again in s seconds     with the next use, or soon after
    priority        100: last to go, 50: as usual, 0: first  after duration_s, or with the content
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.base.arguments import MAX_INT, as_bool, as_int, as_number, as_tuple
from kvcache.base.errors import RequestError, shown

USUAL_PRIORITY = 50
"""The priority of blocks without a hint."""

MOST_HINTS = 16
"""Hints that one request may have."""


@dataclass(frozen=True)
class CacheHint:
    """A hint for the blocks whose last token is in `[start, end)`; `end` None: to the last one.

    It has exactly one of three kinds. `is_over`: the session has ended. `returns_in_s`: the session
    will continue in about so many seconds, such as the duration of a tool call; half or twice as
    many are close enough. `priority`: 0 to 100, for `duration_s` seconds from when the blocks come
    out of use (None: as long as they are cached). A priority of 100 for some seconds is a soft time
    to live: unlike a pin, it gives way when there is no other room.

    The first two kinds and low priorities apply only to blocks that no other session shares, as far
    as that is known.

    Raises:
        RequestError: a value is invalid, or there is no kind or more than one.
    """

    start: int = 0
    end: int | None = None
    is_over: bool = False
    returns_in_s: float | None = None
    priority: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        start = as_int("start of a hint", self.start, 0, MAX_INT, RequestError)
        plain: dict[str, object] = {
            "start": start,
            "is_over": as_bool("is_over of a hint", self.is_over, RequestError),
        }
        if self.end is not None:
            plain["end"] = as_int("end of a hint", self.end, start + 1, MAX_INT, RequestError)
        kinds = (self.is_over, self.returns_in_s is not None, self.priority is not None)
        if sum(kinds) != 1:
            raise RequestError(
                f"a hint has {sum(kinds)} of is_over, returns_in_s and priority: give one of them"
            )
        if self.priority is not None:
            plain["priority"] = as_int("priority of a hint", self.priority, 0, 100, RequestError)
        elif self.duration_s is not None:
            raise RequestError(
                f"a hint has duration_s {self.duration_s} without a priority: only priorities last"
            )
        for name in ("returns_in_s", "duration_s"):
            value = getattr(self, name)
            if value is not None:
                what = f"{name} of a hint"
                plain[name] = as_number(what, value, error=RequestError, above=0.0)
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def is_for_shared(self) -> bool:
        """Whether it applies to blocks that other sessions share, too."""
        return self.priority is not None and self.priority >= USUAL_PRIORITY


def checked_hints(where: str, hints: object) -> tuple[CacheHint, ...]:
    """Return hints as a tuple. Raises RequestError for anything else, or more than 16."""
    listed = as_tuple(f"{where}: hints", hints, RequestError, CacheHint)
    if len(listed) > MOST_HINTS:
        raise RequestError(
            f"{where} has {len(listed)} hints, at most {MOST_HINTS} are allowed: join their ranges"
        )
    return listed


def hints_from_plain(where: str, hints: object) -> tuple[CacheHint, ...]:
    """Return hints from a list of maps with the fields of `CacheHint`, as JSON has them.

    Raises RequestError for anything else, or more than 16.
    """
    listed = as_tuple(f"{where}: hints", hints, RequestError)
    return checked_hints(where, [_from_plain(where, i, hint) for i, hint in enumerate(listed)])


_FIELDS = tuple(field.name for field in fields(CacheHint))


def _from_plain(where: str, place: int, hint: Any) -> CacheHint:
    what = f"{where}: hints[{place}]"
    if not isinstance(hint, Mapping):
        raise RequestError(f'{what} is {shown(hint)}: pass a map such as {{"is_over": true}}')
    unknown = [name for name in hint if name not in _FIELDS]
    if unknown:
        raise RequestError(f"{what} has {shown(unknown[0])}: it may have {', '.join(_FIELDS)}")
    try:
        return CacheHint(**hint)
    except RequestError as error:
        raise RequestError(f"{what}: {error}") from None


def blocks_in(hint: CacheHint, block_size: int, num_blocks: int) -> tuple[int, int]:
    """Return the first of a request's `num_blocks` blocks that the hint is for, and the one after
    the last."""
    last = num_blocks if hint.end is None else min(num_blocks, hint.end // block_size)
    return min(hint.start // block_size, last), last
