"""Block tables of an encoder's tokens: allocated whole when a request is admitted.

Under the manager of cross attention, and under every core that keeps such tables by request. They
neither grow nor shrink until the request is freed.
"""

from __future__ import annotations

from kvcache.arguments import as_int
from kvcache.arrays import Ids
from kvcache.core import ForkOrigin, Reservation
from kvcache.errors import RequestError
from kvcache.managers.block_tables import (
    UNBOUNDED_TOKENS,
    BlockTables,
    SharedColumn,
    TablePool,
    check_request_id,
    check_reservation,
)
from kvcache.specs import KVCacheSpec, ceil_div


class EncoderColumns(BlockTables):
    """What tables of encoder tokens do otherwise than tables of a request's own."""

    def keep_encoder_tokens(self) -> None:
        """Set up columns that do not depend on the request's own tokens."""
        # However many tokens the request has itself, they want no column: one less than one.
        self.tokens_per_column = UNBOUNDED_TOKENS
        self.num_extra_columns = -1

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        reservation: Reservation,
        new_computed_blocks: Ids = (),
    ) -> int:
        """Return what the encoder tokens of a request take that has no table yet."""
        check_request_id(request_id)
        check_reservation(reservation)
        self._as_ids(new_computed_blocks)
        if request_id in self._tables:
            return 0
        return ceil_div(reservation.num_encoder_tokens, self.block_size)

    def save_new_computed_blocks(
        self, request_id: str, block_ids: Ids, num_computed_tokens: int = 0
    ) -> None:
        """Adopt nothing: there is no hit."""
        check_request_id(request_id)
        self._as_ids(block_ids)
        as_int("num_computed_tokens", num_computed_tokens, error=RequestError)

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Make the table of a request that has none yet; return its blocks.

        Raises:
            OutOfBlocksError: too few are free; nothing was changed.
        """
        check_request_id(request_id)
        check_reservation(reservation)
        if request_id in self._tables:
            return []
        num_blocks = ceil_div(reservation.num_encoder_tokens, self.block_size)
        table = self._blocks.get_new_blocks(num_blocks)
        self._tables[request_id] = table
        return list(table)

    def fork(self, parent_id: str, child_id: str, origin: ForkOrigin) -> SharedColumn | None:
        """Let a child share all of the encoder's tokens: nobody writes them again."""
        self._share(parent_id, child_id, list(self._tables.get(parent_id, ())))
        return None


class EncoderTables(EncoderColumns):
    """Tables of encoder tokens on any pool."""

    def __init__(self, spec: KVCacheSpec, pool: TablePool, group: int) -> None:
        """Keep the tables of a cross-attention group."""
        super().__init__(spec, pool, group)
        self.keep_encoder_tokens()
