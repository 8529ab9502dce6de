"""Hints for the requests of a trace: what an engine could have known when each of them ended.

none      nothing
session   those of the trace: in recordings, what requests said; in generated ones, whether the
          session goes on, and when, to a factor of two
oracle    the same for the last full block of a request, exactly, from the trace itself
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TypeAlias

import numpy as np

from kvcache.base.errors import ConfigurationError, shown
from kvcache.requests.hints import CacheHint
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.generators import session_hint

Hints: TypeAlias = "list[tuple[CacheHint, ...]]"

NO_HINTS, SESSION_HINTS, ORACLE_HINTS = "none", "session", "oracle"
KINDS_OF_HINTS = (NO_HINTS, SESSION_HINTS, ORACLE_HINTS)


def require_hints(kind: str) -> str:
    """Return `kind`; raises ConfigurationError unless it is one of `KINDS_OF_HINTS`."""
    if kind not in KINDS_OF_HINTS:
        raise ConfigurationError(
            f"hints {shown(kind)} are unknown: choose one of {', '.join(KINDS_OF_HINTS)}"
        )
    return kind


def require_known(trace: BlockTrace, kind: str) -> None:
    """Raise ConfigurationError if hints of this kind need what the trace does not say."""
    if kind == SESSION_HINTS and not trace.hints:
        raise ConfigurationError(
            f"{trace.name} does not say when its sessions go on: use hints of another kind, a "
            "recording of requests with hints, or a generated trace"
        )


def hints_of(trace: BlockTrace, kind: str, block_size: int) -> Hints:
    """Return the hints of every request, for blocks of `block_size` tokens; an empty list if there
    are none.

    Raises ConfigurationError if the trace does not say what the hints need.
    """
    require_known(trace, kind)
    if kind == NO_HINTS:
        return []
    if kind == SESSION_HINTS and block_size == trace.block_size:
        return list(trace.hints)
    if kind == SESSION_HINTS:
        return [_for_blocks(hints, trace.block_size, block_size) for hints in trace.hints]
    uses_ms = _next_uses_ms(trace)
    return [
        (session_hint((use_ms - now_ms) / 1000),)
        for use_ms, now_ms in zip(uses_ms, trace.arrivals_ms.tolist(), strict=True)
    ]


def _for_blocks(
    hints: tuple[CacheHint, ...], old_size: int, new_size: int
) -> tuple[CacheHint, ...]:
    """Return hints for the same blocks, with another number of tokens each."""
    found = []
    for hint in hints:
        start = hint.start // old_size
        end = None if hint.end is None else hint.end // old_size
        if end is None or start < end:
            end = None if end is None else end * new_size
            found.append(replace(hint, start=start * new_size, end=end))
    return tuple(found)


def _next_uses_ms(trace: BlockTrace) -> list[float]:
    """Return when the last full block of each request is used again; inf: never."""
    uses_ms = [inf] * trace.num_requests
    next_of = np.full(trace.num_distinct_blocks, inf)
    for request in range(trace.num_requests - 1, -1, -1):
        blocks = trace.blocks_of(request)
        num_full = int(trace.input_lengths[request]) // trace.block_size
        if num_full:
            uses_ms[request] = float(next_of[blocks[num_full - 1]])
        next_of[blocks] = trace.arrivals_ms[request]
    return uses_ms
