"""Merges sessions into one stream of requests in order of arrival.

    sessions   ──┬────────┬──────────┬───▶  begin at random, at a rate
                 │ a a  a │   a      │
                 └▶ b  b b b         │
    requests   ──a─b─a─b─b─a─b────a──…───▶  a heap holds requests that are not due yet

A session is one conversation, burst or job. Each is drawn from a source of its own, so a longer
trace begins with the same requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cached_property
from random import Random
from typing import Protocol

from kvcache.base.errors import TraceError
from kvcache.simulate.mooncake import MOONCAKE_BLOCK_SIZE
from kvcache.simulate.passages import ScriptedRequest
from kvcache.simulate.tokens import token_seed
from kvcache.simulate.workload import WorkloadRequest

OUTPUT_TOKENS_PER_S = 40.0
"""The speed of answers, from which the arrival of a session's next request follows."""


class SessionKind(Protocol):
    """Draws sessions of one kind of traffic."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def seed(self) -> int:
        """The seed of all draws."""

    @property
    def pause_s(self) -> float:
        """Mean time between the beginnings of two sessions."""

    def session(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        """Return at least one request, in order of arrival, the first at `start_s`.

        The same arguments, and the same state of `rng`, give the same requests. Ids of requests
        are unique over all sessions.
        """


class SyntheticWorkload:
    """The first `num_requests` requests of one kind of traffic.

    Raises TraceError when `num_requests` is below 1.
    """

    def __init__(self, kind: SessionKind, num_requests: int) -> None:
        if num_requests < 1:
            raise TraceError(
                f"{kind.name}: {num_requests} requests leave nothing to play: give at least 1"
            )
        self.kind = kind
        self._num_requests = num_requests

    @property
    def name(self) -> str:
        """Kind, size and seed."""
        return f"{self.kind.name}, {self._num_requests:,} requests (seed {self.kind.seed})"

    @property
    def num_requests(self) -> int:
        """The number of requests."""
        return self._num_requests

    @cached_property
    def total_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_prompt_tokens for request in self.script())

    @property
    def block_size(self) -> int:
        """Tokens per block by default: those of a trace."""
        return MOONCAKE_BLOCK_SIZE

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests for a player."""
        return (request.to_workload_request() for request in self.script())

    def script(self) -> Iterator[ScriptedRequest]:
        """Yield the requests, their prompts as passages, in order of arrival."""
        kind = self.kind
        starts = Random(token_seed("starts", kind.name, kind.seed))
        due: list[tuple[float, int, int, ScriptedRequest]] = []
        num_sessions = num_yielded = 0
        next_start_s = 0.0
        while num_yielded < self._num_requests:
            if not due or next_start_s <= due[0][0]:
                rng = Random(token_seed("session", kind.name, kind.seed, num_sessions))
                session = kind.session(num_sessions, next_start_s, rng)
                for i, request in enumerate(session):
                    heapq.heappush(due, (request.arrival_s, num_sessions, i, request))
                num_sessions += 1
                next_start_s += starts.expovariate(1 / kind.pause_s)
            else:
                yield heapq.heappop(due)[3]
                num_yielded += 1
