"""An upper bound for hybrids: no policy, and no choice of victims in any group, has more hits.

Which window blocks to keep along with those of full attention, so that hits are longest over time,
is a knapsack problem over all future requests: the optimum of a real trace is not known. This is
the optimum of an easier problem, which is at least as good:

- A hit needs the blocks of the groups that read the whole prefix. Blocks of windows, chunks and
  states count as always there when needed.
- But a running request holds the blocks of windows and chunks that even its longest possible hit
  must compute or read, so the room for prefixes shrinks meanwhile.

A *column* is the blocks that the groups with whole prefixes keep for a common multiple of all block
sizes: hits have whole columns, and a column is kept or evicted as a whole. Belady's rule chooses
the victims, as in `optimum.py`, with room that changes from request to request. A column that is
computed again replaces the cached one.

    blocks of the trace   |      0      |      1      |   2   |      a prompt of 2.6 blocks
    columns               | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |          of whichever size
    pieces                |      0      |      1      |  2  | 3 |    cut where some prompt ends

Columns in one block of the trace, and between the same ends of prompts, are always requested
together: such a piece is one entry, whose last columns are evicted first.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.base.errors import OutOfBlocksError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.specs import KVCacheGroupSpec, KVCacheSpec, ceil_div

_REPORT_EVERY = 256


@dataclass(frozen=True)
class HybridBound:
    """At least as many hit tokens as any use of the blocks could have, and how many of them up to
    each request."""

    num_hit_tokens: int
    num_evictions: int
    hit_totals: tuple[int, ...]


def bound_hybrid_hits(
    trace: BlockTrace,
    groups: Sequence[KVCacheGroupSpec],
    num_blocks: int | None,
    on_progress: Callable[[int], None] = lambda num_requests: None,
) -> HybridBound:
    """Return the bound with `num_blocks` blocks of any group, None for as many as ever needed.

    If no group reads the whole prefix, the number of blocks does not matter: all earlier content is
    hit. If a group cannot cache at all, nothing is. `on_progress` is sometimes called with the
    number of played requests. O(r log r) for r references. Raises OutOfBlocksError if a request
    cannot fit, whatever it hits.
    """
    specs = [group.kv_cache_spec for group in groups]
    if not all(spec.can_prefix_cache for spec in specs):
        on_progress(trace.num_requests)
        return HybridBound(0, 0, (0,) * trace.num_requests)
    pieces = _Pieces(trace, math.lcm(*(spec.block_size for spec in specs)))
    room = _Room(trace, specs, pieces.column_tokens, num_blocks)
    pool = _Pool(pieces, room)
    totals = []
    for request in range(trace.num_requests):
        pool.play(request)
        totals.append(pool.num_hits * pieces.column_tokens)
        if request % _REPORT_EVERY == 0:
            on_progress(request)
    on_progress(trace.num_requests)
    return HybridBound(
        pool.num_hits * pieces.column_tokens,
        pool.num_evicted * room.blocks_per_column,
        tuple(totals),
    )


class _Pieces:
    """Every request as a list of pieces, each with a number of columns.

    `of[i]` are the pieces of request `i`; the first `num_hittable[i]` of them end before its last
    token. `next_uses[i]` has the next request that can hit each piece, `num_requests` for none.
    """

    def __init__(self, trace: BlockTrace, column_tokens: int) -> None:
        self.column_tokens = column_tokens
        self._size = trace.block_size
        self.trace = trace
        ends = self._ends()
        self.weights: list[int] = []
        self.of: list[list[int]] = []
        self.num_hittable: list[int] = []
        numbers: dict[tuple[int, int], int] = {}
        for request in range(trace.num_requests):
            num_tokens = int(trace.input_lengths[request])
            num_full = num_tokens // column_tokens
            num_hittable = (num_tokens - 1) // column_tokens
            found, hittable = [], 0
            for depth, block in enumerate(trace.blocks_of(request).tolist()):
                start = self._first_column(depth)
                for end in ends[block]:
                    if end > num_full:
                        break
                    number = numbers.setdefault((block, end), len(self.weights))
                    if number == len(self.weights):
                        self.weights.append(end - start)
                    start = end
                    found.append(number)
                    hittable += end <= num_hittable
            self.of.append(found)
            self.num_hittable.append(hittable)
        self.next_uses = self._next_uses()

    def _first_column(self, depth: int) -> int:
        """Return the first column that ends after the start of the trace's block at `depth`."""
        return depth * self._size // self.column_tokens

    def _ends(self) -> dict[int, list[int]]:
        """Return, for each block, the columns at which its pieces end, ascending."""
        trace, ends = self.trace, defaultdict[int, set[int]](set)
        for request in range(trace.num_requests):
            blocks = trace.blocks_of(request).tolist()
            num_tokens = int(trace.input_lengths[request])
            for depth, block in enumerate(blocks):
                first, end = self._first_column(depth), self._first_column(depth + 1)
                whole = [num_tokens // self.column_tokens, (num_tokens - 1) // self.column_tokens]
                ends[block].update(each for each in (*whole, end) if first < each <= end)
        return {block: sorted(found) for block, found in ends.items()}

    def _next_uses(self) -> list[list[int]]:
        """Mark pieces that are computed again: no later request uses the earlier ones."""
        never = self.trace.num_requests
        next_of = [never] * len(self.weights)
        uses: list[list[int]] = [[]] * never
        for request in range(never - 1, -1, -1):
            pieces, num_hittable = self.of[request], self.num_hittable[request]
            uses[request] = [next_of[piece] for piece in pieces]
            for i, piece in enumerate(pieces):
                next_of[piece] = request if i < num_hittable else never
        return uses


class _Room:
    """The number of columns that fit while a request runs."""

    def __init__(
        self,
        trace: BlockTrace,
        specs: Sequence[KVCacheSpec],
        column_tokens: int,
        num_blocks: int | None,
    ) -> None:
        self._trace = trace
        self._column_tokens = column_tokens
        self._num_blocks = num_blocks
        self._ordered = [spec for spec in specs if spec.reads_whole_prefix]
        self._others = [
            spec for spec in specs if not spec.reads_whole_prefix and spec.num_state_blocks is None
        ]
        self.blocks_per_column = sum(column_tokens // spec.block_size for spec in self._ordered)

    def columns(self, request: int, num_seen: int) -> int | None:
        """Return it; None if unlimited. `num_seen` columns of the request came before.

        Raises OutOfBlocksError if not even the request itself fits.
        """
        if self._num_blocks is None:
            return None
        num_tokens = int(self._trace.input_lengths[request])
        num_whole = num_tokens // self._column_tokens
        most_hit_tokens = num_seen * self._column_tokens
        extra = sum(
            ceil_div(num_tokens, spec.block_size)
            - spec.num_skipped_tokens(most_hit_tokens) // spec.block_size
            for spec in self._others
        )
        extra += sum(ceil_div(num_tokens, spec.block_size) for spec in self._ordered)
        needed = extra
        extra -= num_whole * self.blocks_per_column
        if needed > self._num_blocks:
            raise OutOfBlocksError(
                f"{self._trace.place_of(request)}: the request of {num_tokens} tokens needs at "
                f"least {needed} blocks of all groups, more than {self._num_blocks}: simulate more"
            )
        if not self.blocks_per_column:
            return None
        return (self._num_blocks - extra) // self.blocks_per_column


class _Pool:
    """The number of cached leading columns of each piece, and a heap of victims.

    Invariant: `_due[piece]` is the next use of a piece that is cached in part or whole, `_IN_USE`
    while its request runs, `_ABSENT` of others; an entry of the heap is valid if it agrees.
    """

    _ABSENT = -1
    _IN_USE = -2

    def __init__(self, pieces: _Pieces, room: _Room) -> None:
        self._pieces = pieces
        self._room = room
        self._there = [0] * len(pieces.weights)
        self._due = [self._ABSENT] * len(pieces.weights)
        self._was_seen = [False] * len(pieces.weights)
        self._heap: list[tuple[int, int, int]] = []
        self._num_there = 0
        self.num_hits = 0
        self.num_evicted = 0

    def play(self, request: int) -> None:
        """Count the leading columns that are hit, add the others, and leave all cached."""
        pieces, weights, there, due = (
            self._pieces.of[request],
            self._pieces.weights,
            self._there,
            self._due,
        )
        num_seen, is_hit = 0, True
        for piece in pieces[: self._pieces.num_hittable[request]]:
            if not self._was_seen[piece]:
                break
            num_seen += weights[piece]
            if is_hit:
                self.num_hits += there[piece]
                is_hit = there[piece] == weights[piece]
        num_missing = 0
        for piece in pieces:
            num_missing += weights[piece] - there[piece]
            due[piece] = self._IN_USE
            self._was_seen[piece] = True
        columns = self._room.columns(request, num_seen)
        if columns is not None:
            self._make_room(columns - num_missing)
        self._num_there += num_missing
        for depth, (piece, use) in enumerate(
            zip(pieces, self._pieces.next_uses[request], strict=True)
        ):
            there[piece] = weights[piece]
            due[piece] = use
            heapq.heappush(self._heap, (-use, -depth, piece))

    def _make_room(self, num_columns: int) -> None:
        """Evict until at most `num_columns` are cached."""
        heap, due, there = self._heap, self._due, self._there
        while self._num_there > num_columns:
            minus_use, minus_depth, piece = heapq.heappop(heap)
            if due[piece] != -minus_use:
                continue
            num_evicted = min(there[piece], self._num_there - num_columns)
            there[piece] -= num_evicted
            self._num_there -= num_evicted
            self.num_evicted += num_evicted
            if there[piece]:
                heapq.heappush(heap, (minus_use, minus_depth, piece))
            else:
                due[piece] = self._ABSENT
