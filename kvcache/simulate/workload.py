"""The interface of workloads: requests in order of arrival, each made when its turn comes.

Implemented by files and generators, used by players (the replay engine, the counting rule). A
workload can be iterated several times and yields the same requests each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import TraceError
from kvcache.requests.hints import CacheHint


@dataclass(frozen=True, eq=False)
class WorkloadRequest:
    """One request of a workload.

    `make_token_ids` returns the prompt, `num_prompt_tokens` ids, at each call: a trace may have far
    more tokens than fit into memory. `num_output_tokens` are sampled, 0 for requests that only
    read. `arrival_s` counts from the start of the workload. The request can be sent only after
    request `after` has been answered, because its prompt quotes that answer. `hints` are what an
    engine knows when the request ends.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    make_token_ids: Callable[[], Int32Array] = field(repr=False)
    arrival_s: float = 0.0
    after: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    hints: tuple[CacheHint, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Its final number of tokens, prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def token_ids(self) -> Int32Array:
        """The prompt, made now. Shape `(num_prompt_tokens,)`."""
        return self.make_token_ids()


class Workload(Protocol):
    """Requests in order of arrival. Iterating yields the same requests every time."""

    @property
    def name(self) -> str:
        """A name for titles and reports."""

    @property
    def num_requests(self) -> int | None:
        """Number of requests, None if only reading the whole workload would tell."""

    @property
    def total_input_tokens(self) -> int | None:
        """Prompt tokens of all requests, None if only reading the whole workload would tell."""

    @property
    def block_size(self) -> int:
        """Tokens per block by default."""

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests, in order. Raises TraceError if a file cannot be read."""


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
        """Name of the whole workload, and the limit."""
        return f"{self._workload.name}, first {self._limit:,} requests"

    @property
    def num_requests(self) -> int | None:
        """The limit, or fewer if the workload is known to be shorter."""
        whole = self._workload.num_requests
        return None if whole is None else min(whole, self._limit)

    @property
    def total_input_tokens(self) -> int | None:
        """Known only if the limit cuts nothing."""
        whole = self._workload.num_requests
        cuts = whole is None or whole > self._limit
        return None if cuts else self._workload.total_input_tokens

    @property
    def block_size(self) -> int:
        return self._workload.block_size

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return islice(iter(self._workload), self._limit)
