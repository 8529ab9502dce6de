"""Block tables of one KV cache group, by request: how they grow, lose blocks and are shared.

Under the managers of all kinds, which add what is cached, and under every core whose tables are
short. Works on any pool that counts references. Refuses to decide across groups: whoever allocates
has counted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcache.arguments import are_ints, as_int, as_integers, as_text, check_kind
from kvcache.arrays import Ids, IndexArray, index_array
from kvcache.core import ForkOrigin, Reservation
from kvcache.errors import BlockError, RequestError
from kvcache.ids import NULL_BLOCK_ID as NULL_ID
from kvcache.specs import KVCacheSpec, ceil_div

NEVER = 1 << 62

UNBOUNDED_TOKENS = 1 << 40
"""Tokens per column where a table does not grow with them; sums and products stay in 64 bits."""


def check_request_id(request_id: str) -> None:
    """Raise RequestError unless `request_id` is a text."""
    if type(request_id) is not str or not request_id.isascii():
        as_text("request id", request_id, RequestError, may_be_empty=True)


def check_reservation(reservation: Reservation) -> None:
    """Raise RequestError unless that is a `Reservation` of integers of at least 0."""
    if type(reservation) is not Reservation:
        check_kind("reservation", reservation, Reservation, RequestError)
    computed, slots, cached, spare, own, _, encoder = reservation
    numbers = (computed, slots, cached, spare, slots if own is None else own, encoder)
    if are_ints(numbers) and min(numbers) >= 0:
        return
    for name, value in reservation._asdict().items():
        if name != "newest_state" and not (name == "num_own_tokens" and value is None):
            as_int(name, value, error=RequestError)


class RowLimits(NamedTuple):
    """How far a request can go on before anything must be done for it, in tokens.

    Its tables do for slots that end at or before `capacity_tokens`; nothing becomes hittable before
    `full_tokens` are to be, and nothing is skipped before `skip_tokens` are computed.
    """

    capacity_tokens: int
    full_tokens: int
    skip_tokens: int


class TablePool(Protocol):
    """What tables need of a pool."""

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks, each with one reference; raises OutOfBlocksError, unchanged."""

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one reference more of each block."""

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Give one reference of each block back; the first is evicted first."""

    def num_unheld(self, block_ids: Ids) -> int:
        """Return how many of these distinct blocks nobody holds, null blocks left out."""

    def num_references(self, block_id: int) -> int:
        """Return a block's references."""

    def can_be_cached(self, block_id: int) -> bool:
        """Say whether a held block has no content and may get one."""


@dataclass(frozen=True, slots=True)
class SharedColumn:
    """A column that parent and child of a fork share, and that both may write."""

    of_parent: int
    of_child: int


class BlockTables:
    """Block tables of one group, by request id.

    A table for `n` tokens has `ceil(n / tokens_per_column) + num_extra_columns` columns. These are
    a request's own tokens where states are kept, those that it has slots for everywhere else.

    Invariant: the first `_first_kept` blocks of a table are null.
    """

    def __init__(self, spec: KVCacheSpec, pool: TablePool, group: int) -> None:
        """Keep the tables of group `group`, with blocks of `pool`."""
        self.spec = spec
        self.group = group
        self.block_size = spec.block_size
        self.tokens_per_column = spec.block_size
        self.num_extra_columns = 0
        self._blocks = pool
        self._tables: dict[str, list[int]] = {}
        self._first_kept: dict[str, int] = {}

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks nobody reads any more after so many computed tokens."""
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens, error=RequestError)
        return self.spec.num_skipped_tokens(num_computed_tokens) // self.block_size

    def next_skip_tokens(self, request_id: str) -> int:
        """Return the computed tokens from which on one more block is skipped; NEVER if none."""
        return NEVER

    def table(self, request_id: str) -> Sequence[int]:
        """Return a request's table, empty if unknown. Belongs to the manager: do not change it."""
        check_request_id(request_id)
        return self._tables.get(request_id, ())

    def request_ids(self) -> Sequence[str]:
        """Return the requests that have a table."""
        return list(self._tables)

    def capacity_tokens(self, request_id: str) -> int:
        """Return for how many tokens the request's table is long enough."""
        num_columns = len(self._tables.get(request_id, ()))
        return (num_columns - self.num_extra_columns) * self.tokens_per_column

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        reservation: Reservation,
        new_computed_blocks: Ids = (),
    ) -> int:
        """Return how many free blocks a reservation takes, hits that are free included.

        Positions that nobody reads after its computed tokens need none. No mutation.
        """
        check_request_id(request_id)
        check_reservation(reservation)
        new_computed_blocks = self._as_ids(new_computed_blocks)
        total = ceil_div(reservation.num_slot_tokens, self.block_size)
        held = len(self._tables.get(request_id, ())) + len(new_computed_blocks)
        skipped = min(self.num_skipped_blocks(reservation.num_computed_tokens), total)
        needed = max(0, total - max(held, skipped))
        if len(new_computed_blocks):
            needed += self._blocks.num_unheld(new_computed_blocks[skipped:])
        return needed

    def save_new_computed_blocks(
        self, request_id: str, block_ids: Ids, num_computed_tokens: int = 0
    ) -> None:
        """Adopt a hit as the start of a request's table; raises RequestError if it has one.

        Where tokens behind the hit come from elsewhere, positions that nobody reads any more after
        `num_computed_tokens` stay null.
        """
        check_request_id(request_id)
        block_ids = self._as_ids(block_ids)
        if self._tables.get(request_id):
            raise self._has_blocks(request_id)
        skipped = min(self.num_skipped_blocks(num_computed_tokens), len(block_ids))
        table = [NULL_ID] * skipped + index_array(block_ids[skipped:]).tolist()
        first_kept = next((i for i, block_id in enumerate(table) if block_id), len(table))
        self._blocks.touch(table[first_kept:])
        self._tables[request_id] = table
        self.note_cached(request_id, len(table))
        self._first_kept[request_id] = first_kept

    def _as_ids(self, block_ids: Ids) -> IndexArray:
        """Return ids of blocks as an array; raises BlockError for what is no list of integers."""
        return index_array(as_integers("block_ids", block_ids, error=BlockError))

    def _has_blocks(self, request_id: str) -> RequestError:
        return RequestError(
            f"request {request_id} holds {len(self._tables[request_id])} blocks of group "
            f"{self.group} already: only a request without blocks adopts a hit"
        )

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Extend a request's table as reserved; return what entered it, nulls included.

        Raises:
            OutOfBlocksError: too few are free; nothing was changed.
        """
        check_request_id(request_id)
        check_reservation(reservation)
        table = self._tables.get(request_id, [])
        total = ceil_div(reservation.num_slot_tokens, self.block_size)
        missing = total - len(table)
        if missing <= 0:
            self._tables.setdefault(request_id, table)
            return []
        skipped = min(self.num_skipped_blocks(reservation.num_computed_tokens), total)
        num_null = max(0, skipped - len(table))
        new = [NULL_ID] * num_null + self._blocks.get_new_blocks(missing - num_null)
        table += new
        self._tables[request_id] = table
        return new

    def extend_table(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Append blocks that the caller took from the pool for this request."""
        self._tables.setdefault(request_id, []).extend(block_ids)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks nobody reads any more, right to left, and put nulls in their place."""
        check_request_id(request_id)
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens, error=RequestError)
        skipped = self.take_skipped_blocks(request_id, num_computed_tokens)
        if skipped:
            self._blocks.give_back(skipped)

    def take_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> list[int]:
        """Put nulls in the place of blocks nobody reads any more; return them, right to left.

        Whoever calls gives the references back.
        """
        table = self._tables.get(request_id)
        if table is None:
            return []
        end = min(self.num_skipped_blocks(num_computed_tokens), len(table))
        start = self._first_kept.get(request_id, 0)
        if end <= start:
            return []
        skipped = table[start:end][::-1]
        if NULL_ID in skipped:
            # States leave nulls between the blocks they keep, so that not the first null ends it.
            skipped = [block_id for block_id in skipped if block_id]
        table[start:end] = [NULL_ID] * (end - start)
        self._first_kept[request_id] = end
        return skipped

    def free(self, request_id: str) -> None:
        """Give all of a request's blocks back, tail first; an unknown request: no effect."""
        check_request_id(request_id)
        self._blocks.give_back([b for b in reversed(self.forget_request(request_id)) if b])

    def forget_request(self, request_id: str) -> list[int]:
        """Drop a request's table and return it. Whoever calls gives the references back."""
        self._first_kept.pop(request_id, None)
        return self._tables.pop(request_id, [])

    # --- forks ---------------------------------------------------------------------------------

    def fork(self, parent_id: str, child_id: str, origin: ForkOrigin) -> SharedColumn | None:
        """Let `child_id`, which has no table, share the parent's blocks up to the origin.

        Returns the column that both may still write, None where there is none.
        """
        end = ceil_div(origin.num_tokens, self.block_size)
        self._share(parent_id, child_id, self._tables.get(parent_id, [])[:end])
        num_full = origin.num_tokens // self.block_size
        self.note_cached(child_id, min(self.num_cached_blocks(parent_id), num_full))
        return SharedColumn(num_full, num_full) if num_full < end else None

    def writes_column(self, column: int, reservation: Reservation) -> bool:
        """Say whether a forward behind the fork's tokens writes a column that was shared there."""
        return True

    def replace_block(self, request_id: str, column: int, block_id: int) -> int:
        """Put another block into a column; return the one that was there."""
        table = self._tables[request_id]
        before, table[column] = table[column], block_id
        return before

    def _share(self, parent_id: str, child_id: str, table: list[int]) -> None:
        """Give `child_id` a table, and a reference to each block in it."""
        self._blocks.touch([block_id for block_id in table if block_id])
        self._tables[child_id] = table
        self._first_kept[child_id] = min(self._first_kept.get(parent_id, 0), len(table))

    def note_own_end(self, request_id: str, num_own_tokens: int) -> None:
        """A forward is to end with so many own tokens. Only groups that keep states are told."""

    def num_cached_blocks(self, request_id: str) -> int:
        """Return up to where the request's blocks need not be made hittable any more."""
        return 0

    def note_cached(self, request_id: str, num_blocks: int) -> None:
        """The first blocks of a new table need not be made hittable any more."""
