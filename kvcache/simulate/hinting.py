"""Hints for the requests of a trace: what an engine could have known when each of them ended.

none      nothing
session   whether the session goes on, and when, to a factor of two: what a generator knows
oracle    the same for the last full block of a request, exactly, from the trace itself
"""

from __future__ import annotations

from math import inf, isfinite
from random import Random
from typing import TypeAlias

import numpy as np

from kvcache.base.errors import ConfigurationError, shown
from kvcache.requests.hints import CacheHint
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.tokens import token_seed

Hints: TypeAlias = "list[tuple[CacheHint, ...]]"

NO_HINTS, SESSION_HINTS, ORACLE_HINTS = "none", "session", "oracle"
KINDS_OF_HINTS = (NO_HINTS, SESSION_HINTS, ORACLE_HINTS)

_SHORTEST_S = 0.001
_LARGEST_ERROR = 2.0


def require_hints(kind: str) -> str:
    """Return `kind`; raises ConfigurationError unless it is one of `KINDS_OF_HINTS`."""
    if kind not in KINDS_OF_HINTS:
        raise ConfigurationError(
            f"hints {shown(kind)} are unknown: choose one of {', '.join(KINDS_OF_HINTS)}"
        )
    return kind


def require_sessions(trace: BlockTrace, kind: str) -> None:
    """Raise ConfigurationError if hints of this kind need what the trace does not say."""
    if kind == SESSION_HINTS and not trace.sessions:
        raise ConfigurationError(
            f"{trace.name} does not say when its sessions go on: use hints of another kind, or a "
            "generated trace"
        )


def hints_of(trace: BlockTrace, kind: str, block_size: int) -> Hints:
    """Return the hints of every request, for blocks of `block_size` tokens; an empty list if there
    are none.

    Raises ConfigurationError if the trace does not say what the hints need.
    """
    require_sessions(trace, kind)
    if kind == NO_HINTS:
        return []
    if kind == ORACLE_HINTS:
        uses_ms = _next_uses_ms(trace)
        return [
            _hint(use_ms - now_ms, 0)
            for use_ms, now_ms in zip(uses_ms, trace.arrivals_ms.tolist(), strict=True)
        ]
    draws = Random(token_seed("hints", trace.name))
    return [
        _hint(
            (session.returns_ms - now_ms) * _LARGEST_ERROR ** draws.uniform(-1.0, 1.0),
            session.num_common_tokens // trace.block_size * block_size,
        )
        for session, now_ms in zip(trace.sessions, trace.arrivals_ms.tolist(), strict=True)
    ]


def _hint(wait_ms: float, own_start: int) -> tuple[CacheHint, ...]:
    """Return the hint that a session goes on in `wait_ms`, inf: never. What it shares, up to token
    `own_start`, is then as before."""
    if not isfinite(wait_ms):
        return (CacheHint(own_start, is_over=True),)
    return (CacheHint(returns_in_s=max(_SHORTEST_S, wait_ms / 1000)),)


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
