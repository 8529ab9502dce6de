"""What a workload is: requests in order of arrival, each made when its turn comes.

Stands between files or generators and their players (the replay engine, the counting rule).
A workload can be iterated again and again and yields the same requests each time. Refuses to know
blocks, steps and clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import TraceError


@dataclass(frozen=True, eq=False)
class WorkloadRequest:
    """One request of a workload.

    `make_token_ids` returns the prompt, `num_prompt_tokens` ids, each time it is called: a trace
    may hold far more tokens than fit into memory. `num_output_tokens` are sampled, 0 for requests
    that are only read. `arrival_s` counts from the start of the workload. The request can only be
    asked once request `after` has been answered, because its prompt quotes that answer.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    make_token_ids: Callable[[], Int32Array] = field(repr=False)
    arrival_s: float = 0.0
    after: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens it has in the end, prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def token_ids(self) -> Int32Array:
        """The prompt, made now. Shape `(num_prompt_tokens,)`."""
        return self.make_token_ids()


class Workload(Protocol):
    """Requests in order of arrival. Iterating yields the same requests every time."""

    @property
    def name(self) -> str:
        """What it is, for titles and reports."""

    @property
    def num_requests(self) -> int | None:
        """How many requests there are, None if only reading all of it would tell."""

    @property
    def total_input_tokens(self) -> int | None:
        """Prompt tokens of all requests, None if only reading all of it would tell."""

    @property
    def block_size(self) -> int:
        """Tokens per block when nothing else decides it."""

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests, in order. Raises TraceError where a file cannot be read."""


class LimitedWorkload:
    """The first `limit` requests of another workload.

    Raises TraceError when `limit` is below 1.
    """

    def __init__(self, workload: Workload, limit: int) -> None:
        if limit < 1:
            raise TraceError(
                f"{workload.name}: a limit of {limit} requests leaves nothing to play: "
                "give at least 1"
            )
        self._workload = workload
        self._limit = limit

    @property
    def name(self) -> str:
        """Name of the whole workload, and how much of it."""
        return f"{self._workload.name}, first {self._limit:,} requests"

    @property
    def num_requests(self) -> int | None:
        """The limit, or fewer where the workload is known to be shorter."""
        whole = self._workload.num_requests
        return None if whole is None else min(whole, self._limit)

    @property
    def total_input_tokens(self) -> int | None:
        """Known only where the limit does not cut anything."""
        whole = self._workload.num_requests
        cuts = whole is None or whole > self._limit
        return None if cuts else self._workload.total_input_tokens

    @property
    def block_size(self) -> int:
        """Block size of the whole workload."""
        return self._workload.block_size

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the first `limit` requests."""
        return islice(iter(self._workload), self._limit)
