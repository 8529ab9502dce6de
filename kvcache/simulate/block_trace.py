"""A whole trace as arrays of block numbers, checked: the input of all simulations.

    requests      0                1            2
    starts        0                4            6                9
    blocks        0   1   2   3    0   1'       0   1   2   4         a number fixes all before it

Made once from a file or a generator, and read many times. Contradictions are found here, with their
line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvcache.base.arrays import Int32Array, Int64Array
from kvcache.base.errors import TraceError
from kvcache.requests.hints import CacheHint
from kvcache.simulate.generators import SyntheticWorkload
from kvcache.simulate.mooncake import MooncakeLine, MooncakeTrace
from kvcache.simulate.tokens import block_token_ids
from kvcache.simulate.trace_writing import trace_lines
from kvcache.simulate.workload import Workload, WorkloadRequest

_NO_PARENT = -1
COMPACT_BLOCK_SIZE = 2
"""Tokens that represent a whole block in `CompactTrace`."""


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """`blocks[starts[i]:starts[i + 1]]` are the blocks of request `i`, numbered from 0 in order of
    appearance, including a partial last one; `lines[i]` is its line in the file. `hints[i]` are its
    hints; `hints` is empty if no request has any."""

    name: str
    block_size: int
    blocks: NDArray[np.int32]
    starts: Int64Array
    input_lengths: Int64Array
    output_lengths: Int64Array
    arrivals_ms: NDArray[np.float64]
    lines: Int64Array
    hints: tuple[tuple[CacheHint, ...], ...] = ()

    @property
    def num_requests(self) -> int:
        """At least 1."""
        return len(self.input_lengths)

    @property
    def num_references(self) -> int:
        return len(self.blocks)

    @cached_property
    def num_distinct_blocks(self) -> int:
        """Number of different blocks, including partial ones."""
        return int(self.blocks.max()) + 1

    @cached_property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.input_lengths.sum())

    @cached_property
    def longest(self) -> int:
        """Index of the first request with the most blocks."""
        return int(np.diff(self.starts).argmax())

    @cached_property
    def most_blocks(self) -> int:
        """Blocks of the longest request: a smaller cache could not serve it."""
        return self.num_blocks_of(self.longest)

    def num_blocks_of(self, request: int) -> int:
        return int(self.starts[request + 1] - self.starts[request])

    def blocks_of(self, request: int) -> NDArray[np.int32]:
        """Return the blocks of a request, in order. A view."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]

    def most_hits_of(self, request: int) -> int:
        """Return how many of its blocks can be hit at most: all before its last token."""
        return (int(self.input_lengths[request]) - 1) // self.block_size

    def to_lines(self) -> Iterator[MooncakeLine]:
        """Yield the lines of a file with this trace."""
        for i in range(self.num_requests):
            yield MooncakeLine(
                number=i + 1,
                timestamp_ms=int(self.arrivals_ms[i]),
                input_length=int(self.input_lengths[i]),
                output_length=int(self.output_lengths[i]),
                hash_ids=self.blocks_of(i).tolist(),
                block_size=self.block_size,
                hints=self.hints[i] if self.hints else (),
            )

    def place_of(self, request: int) -> str:
        """Return the name of a request in messages."""
        return f"{self.name}, line {self.lines[request]}"


def read_block_trace(
    workload: Workload, *, limit: int | None = None, block_size: int | None = None
) -> BlockTrace:
    """Read a workload, or only its first `limit` requests: a file, a generator's traffic, or any
    prompts of tokens.

    `block_size` None: the workload's; the blocks of a file are fixed. Raises TraceError if the
    workload is empty or unreadable, has timestamps out of order, or has one block after two
    different ones.
    """
    if block_size is None or isinstance(workload, MooncakeTrace):
        block_size = workload.block_size
    if isinstance(workload, MooncakeTrace):
        lines: Iterable[MooncakeLine] = workload.lines()
    elif isinstance(workload, SyntheticWorkload):
        lines = trace_lines(workload, block_size)
    else:
        lines = _token_lines(workload, block_size)
    return _Collection(workload.name, block_size).collect(islice(lines, limit))


def _token_lines(workload: Workload, block_size: int) -> Iterator[MooncakeLine]:
    """Name the blocks of prompts by their tokens and the block before."""
    names: dict[tuple[int, str | None, bytes], int] = {}
    for number, request in enumerate(workload, start=1):
        tokens = request.token_ids
        parent = _NO_PARENT
        blocks = []
        for start in range(0, len(tokens), block_size):
            content = tokens[start : start + block_size].tobytes()
            key = (parent, request.cache_salt, content)
            parent = names.setdefault(key, len(names))
            blocks.append(parent)
        yield MooncakeLine(
            number,
            request.arrival_s * 1000,
            request.num_prompt_tokens,
            request.num_output_tokens,
            tuple(blocks),
            hints=request.hints,
        )


class _Collection:
    """Collects lines, checks their consistency, and numbers their blocks."""

    def __init__(self, name: str, block_size: int) -> None:
        self._name = name
        self._block_size = block_size
        self._numbers: dict[tuple[str | None, int], int] = {}
        self._parents: list[int] = []
        self._first_lines: list[int] = []

    def collect(self, lines: Iterable[MooncakeLine]) -> BlockTrace:
        """Return the trace. Raises TraceError."""
        blocks: list[int] = []
        starts = [0]
        kept: list[MooncakeLine] = []
        last_ms = 0.0
        for line in lines:
            if line.timestamp_ms < last_ms:
                raise self._fail(
                    line,
                    f"has timestamp {line.timestamp_ms:g}, the line before {last_ms:g}: sort the "
                    "trace by time",
                )
            last_ms = line.timestamp_ms
            blocks.extend(self._number(line))
            starts.append(len(blocks))
            kept.append(line)
        if not kept:
            raise TraceError(f"{self._name} holds no request: give a trace with at least one")
        return BlockTrace(
            name=self._name,
            block_size=self._block_size,
            blocks=np.array(blocks, np.int32),
            starts=np.array(starts, np.int64),
            input_lengths=np.array([line.input_length for line in kept], np.int64),
            output_lengths=np.array([line.output_length for line in kept], np.int64),
            arrivals_ms=np.array([line.timestamp_ms for line in kept], np.float64),
            lines=np.array([line.number for line in kept], np.int64),
            hints=tuple([line.hints for line in kept]) if any(line.hints for line in kept) else (),
        )

    def _number(self, line: MooncakeLine) -> list[int]:
        """Return the line's blocks by number; tenants share nothing."""
        numbers, parents = self._numbers, self._parents
        parent = _NO_PARENT
        found = []
        for hash_id in line.hash_ids:
            number = numbers.setdefault((line.tenant, hash_id), len(parents))
            if number == len(parents):
                parents.append(parent)
                self._first_lines.append(line.number)
            elif parents[number] != parent:
                raise self._two_parents(line, hash_id, number)
            found.append(number)
            parent = number
        return found

    def _two_parents(self, line: MooncakeLine, hash_id: int, number: int) -> TraceError:
        if line.hash_ids.count(hash_id) > 1:
            return self._fail(
                line,
                f"has block {hash_id} more than once, but an id fixes all before it: give blocks "
                "with different pasts different ids",
            )
        return self._fail(
            line,
            f"has block {hash_id} behind another block than line {self._first_lines[number]}, but "
            "an id fixes all before it: give blocks with different pasts different ids",
        )

    def _fail(self, line: MooncakeLine, what: str) -> TraceError:
        return TraceError(f"{self._name}, line {line.number}: {what}")


class _TraceWorkload(ABC):
    def __init__(self, trace: BlockTrace, hints: Sequence[tuple[CacheHint, ...]] = ()) -> None:
        self.trace = trace
        self._hints = hints

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def num_requests(self) -> int:
        return self.trace.num_requests

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests, named as in a trace file."""
        trace = self.trace
        for i in range(trace.num_requests):
            yield WorkloadRequest(
                request_id=f"line-{trace.lines[i]}",
                num_prompt_tokens=self._num_tokens(i),
                num_output_tokens=int(trace.output_lengths[i]),
                make_token_ids=partial(self._token_ids, i),
                arrival_s=float(trace.arrivals_ms[i]) / 1000,
                hints=self._hints[i] if self._hints else (),
            )

    @abstractmethod
    def _num_tokens(self, request: int) -> int:
        """Return how many tokens the prompt of a request has."""

    @abstractmethod
    def _token_ids(self, request: int) -> Int32Array:
        """Return the prompt of a request."""


class CompactTrace(_TraceWorkload):
    """A trace as a workload with two tokens for each block: enough for hits and evictions.

    A partial last block has one token. Hits, evictions and their consequences are those of the
    trace itself, whatever its block size; lengths in tokens are not.
    """

    @property
    def total_input_tokens(self) -> int | None:
        """Not used: these tokens have no meaning."""
        return None

    @property
    def block_size(self) -> int:
        """Tokens that represent one block."""
        return COMPACT_BLOCK_SIZE

    def _num_tokens(self, request: int) -> int:
        is_partial = self.trace.input_lengths[request] % self.trace.block_size != 0
        return self.trace.num_blocks_of(request) * COMPACT_BLOCK_SIZE - bool(is_partial)

    def _token_ids(self, request: int) -> Int32Array:
        tokens = self.trace.blocks_of(request).repeat(COMPACT_BLOCK_SIZE)
        return tokens[: self._num_tokens(request)]


class TraceTokens(_TraceWorkload):
    """A trace as a workload with all its tokens, made from the numbers of its blocks."""

    @property
    def total_input_tokens(self) -> int:
        return self.trace.num_input_tokens

    @property
    def block_size(self) -> int:
        return self.trace.block_size

    def _num_tokens(self, request: int) -> int:
        return int(self.trace.input_lengths[request])

    def _token_ids(self, request: int) -> Int32Array:
        blocks = self.trace.blocks_of(request).astype(np.int64)
        tokens = block_token_ids(blocks, self.trace.block_size)
        return tokens[: self._num_tokens(request)]
