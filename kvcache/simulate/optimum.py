"""The optimum, which knows all future requests (Belady's MIN): no policy can beat it.

    each request:  its hits stay ──▶ missing ones get a block ──▶ the victim is the block needed
                                                                      again last, or never

The counting rule of `counting.py`: one request after another. Each takes all its blocks, useful or
not (admission is forced), and loses none while it runs. A block is needed again by the next request
that can hit it. A parent is needed again no later than its children, and among equals the deepest
goes first, so prefixes stay whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.base.errors import OutOfBlocksError
from kvcache.simulate.block_trace import BlockTrace

_REPORT_EVERY = 256


@dataclass(frozen=True)
class OptimalCount:
    """Hits in blocks, evictions for the missing ones, and the hits up to each request."""

    num_hit_blocks: int
    num_evictions: int
    hit_totals: tuple[int, ...]


def count_optimal_hits(
    trace: BlockTrace,
    num_blocks: int | None,
    on_progress: Callable[[int], None] = lambda num_requests: None,
) -> OptimalCount:
    """Play `trace` with `num_blocks` blocks, None for as many as would ever be needed.

    `on_progress` is sometimes called with the number of played requests. O(r log r) for r
    references. Raises OutOfBlocksError if the longest request does not fit.
    """
    capacity = trace.num_references if num_blocks is None else num_blocks
    if capacity < trace.most_blocks:
        raise OutOfBlocksError(
            f"{trace.place_of(trace.longest)}: the request needs {trace.most_blocks} blocks of "
            f"{trace.block_size} tokens, the cache has {capacity}: count with more blocks"
        )
    pool = _Pool(trace, capacity)
    totals = []
    for request in range(trace.num_requests):
        pool.play(request)
        totals.append(pool.num_hits)
        if request % _REPORT_EVERY == 0:
            on_progress(request)
    on_progress(trace.num_requests)
    return OptimalCount(pool.num_hits, pool.num_evictions, tuple(totals))


def next_uses(trace: BlockTrace) -> NDArray[np.int32]:
    """Return for each reference the next request that can hit the content that it leaves.

    `num_requests` if there is none. A full block that a request computes again, because its last
    token is always computed, is useless from then on; a partial one changes nothing.
    """
    never = trace.num_requests
    uses = np.full(trace.num_references, never, np.int32)
    next_of = np.full(trace.num_distinct_blocks, never, np.int32)
    for request in range(trace.num_requests - 1, -1, -1):
        start = int(trace.starts[request])
        blocks = trace.blocks_of(request)
        uses[start : start + len(blocks)] = next_of[blocks]
        hittable = trace.most_hits_of(request)
        num_full = int(trace.input_lengths[request]) // trace.block_size
        next_of[blocks[:hittable]] = request
        next_of[blocks[hittable:num_full]] = never
    return uses


class _Pool:
    """The cached blocks, and a heap of victims: the latest next use first, then the deepest.

    Invariant: `_due[block]` is the next use of a cached block, `_IN_USE` while a request that hit
    it runs, and `_ABSENT` of others; an entry of the heap is valid if it agrees.
    """

    _ABSENT = -1
    _IN_USE = -2

    def __init__(self, trace: BlockTrace, capacity: int) -> None:
        self._trace = trace
        self._uses = next_uses(trace)
        self._due = [self._ABSENT] * trace.num_distinct_blocks
        self._heap: list[tuple[int, int, int]] = []
        self._num_free = capacity
        self.num_hits = 0
        self.num_evictions = 0

    def play(self, request: int) -> None:
        """Look up, evict for missing blocks, and leave the full blocks cached."""
        trace, due = self._trace, self._due
        start = int(trace.starts[request])
        blocks = trace.blocks_of(request).tolist()
        num_full = int(trace.input_lengths[request]) // trace.block_size
        num_hits = 0
        most = trace.most_hits_of(request)
        while num_hits < most and due[blocks[num_hits]] != self._ABSENT:
            num_hits += 1
        self.num_hits += num_hits
        for block in blocks[:num_hits]:
            due[block] = self._IN_USE
        self._make_room(len(blocks) - num_hits)
        uses = self._uses[start : start + num_full].tolist()
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=False)):
            if depth >= num_hits and due[block] != self._ABSENT:
                self._num_free += 1  # computed again: replaces the cached one
            due[block] = use
            heapq.heappush(self._heap, (-use, -depth, block))
        self._num_free += len(blocks) - num_full

    def _make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` are free, and take them."""
        heap, due = self._heap, self._due
        while self._num_free < num_blocks:
            minus_use, _, block = heapq.heappop(heap)
            if due[block] == -minus_use:
                due[block] = self._ABSENT
                self._num_free += 1
                self.num_evictions += 1
        self._num_free -= num_blocks
