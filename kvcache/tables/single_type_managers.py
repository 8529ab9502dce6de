"""Managers by attention kind: the block tables of one KV cache group, and what of them is cached.

For engines that keep the tables of each group themselves, with their own `BlockPool`;
`KVCacheManager` does not use them. Hits follow the same rules as in the core (`kinds/`). A manager
does not look at other groups: callers count the free blocks before they allocate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvcache.base.arguments import (
    as_bool,
    as_byte_strings,
    as_int,
    as_integers,
    as_text,
    check_kind,
)
from kvcache.base.arrays import Ids
from kvcache.base.errors import BlockError, ConfigurationError, RequestError
from kvcache.core import ReferenceKind, Reservation
from kvcache.core.block_pool import BlockPool
from kvcache.core.kinds.registry import longest_hit
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request import Request
from kvcache.requests.request_content import DEFAULT_NAMESPACE, Namespace
from kvcache.specs import (
    NULL_BLOCK_ID,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ceil_div,
)


@dataclass(frozen=True, slots=True)
class NewColumns:
    """How a table grows: to `total` columns, with blocks in the columns `kept`, else null.

    Blocks in the columns `spare` are not needed there: they move to columns of `kept`.
    """

    total: int
    kept: Sequence[int]
    spare: Sequence[int] = ()


class SingleTypeKVCacheManager:
    """Block tables of one group, by request id.

    For a kind of your own, override `longest_hit` and, where the kind differs, `new_columns`,
    `cacheable_columns` and `get_num_common_prefix_blocks`. Its spec says which blocks are skipped.
    """

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, group: int) -> None:
        """Keep the tables of group `group`, with blocks of `pool`."""
        check_kind("spec", spec, KVCacheSpec, ConfigurationError)
        check_kind("pool", pool, BlockPool, ConfigurationError)
        self.spec = spec
        self.group = as_int("group", group, error=ConfigurationError)
        self.block_size = spec.block_size
        self._pool = pool
        self._tables: dict[str, list[int]] = {}
        self._num_cached: dict[str, int] = {}

    # --- rules of a kind -----------------------------------------------------------------------

    longest_hit = staticmethod(longest_hit)
    """Finds the longest prefix that a request can reuse, given which blocks are cached."""

    def new_columns(self, table: Sequence[int], reservation: Reservation) -> NewColumns:
        """Return how a table grows. `table` is the request's table, or the hit that it adopts."""
        total = max(len(table), ceil_div(reservation.num_slot_tokens, self.block_size))
        skipped = self.num_skipped_blocks(reservation.num_computed_tokens)
        return NewColumns(total, range(max(len(table), min(skipped, total)), total))

    def cacheable_columns(self, request_id: str, start: int, end: int) -> Sequence[int]:
        """Return the columns of `[start, end)`, all full, whose blocks can be hit once cached."""
        return range(start, end)

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> int:
        """Return how many leading blocks every running request shares.

        It is 0 for kinds that skip blocks before a window or chunk, or whose blocks belong to one
        request.
        """
        check_request_id(request_id)
        as_int("num_running_requests", num_running_requests, error=RequestError)
        return 0

    # --- look-up -------------------------------------------------------------------------------

    @classmethod
    def find_longest_cache_hit(  # noqa: PLR0917 - called as in vLLM
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        group_ids: Sequence[int],
        pool: BlockPool,
        spec: KVCacheSpec,
        use_eagle: bool = False,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> tuple[list[int], ...]:
        """Return, per group, the block ids of the longest prefix that hits in all of `group_ids`.

        `block_hashes` has one digest per block of `spec`. The prefix has at most `max_length`
        tokens; with `use_eagle`, its last block is dropped. Skipped positions have null blocks.
        Changes nothing.

        Raises:
            RequestError: an argument has a wrong type.
        """
        as_byte_strings("block_hashes", block_hashes, RequestError)
        max_length = as_int("max_length", max_length, error=RequestError)
        groups = as_integers("group_ids", group_ids, error=RequestError).tolist()
        check_kind("pool", pool, BlockPool, RequestError)
        check_kind("spec", spec, KVCacheSpec, RequestError)
        num_extra = int(as_bool("use_eagle", use_eagle, RequestError))
        check_kind("namespace", namespace, Namespace, RequestError)
        hashes = block_hashes[: max_length // spec.block_size]
        matches = cls.match(hashes, groups, pool, spec, namespace, num_extra)
        return tuple([match[: max(0, len(match) - num_extra)] for match in matches])

    @classmethod
    def match(  # noqa: PLR0917 - those of `find_longest_cache_hit`
        cls,
        block_hashes: Sequence[BlockHash],
        group_ids: Sequence[int],
        pool: BlockPool,
        spec: KVCacheSpec,
        namespace: Namespace,
        num_extra_blocks: int = 0,
    ) -> list[list[int]]:
        """Return, per group, the blocks of the longest hit, null for skipped ones; see
        `longest_hit`. A digest hits if all groups have it. Does not check arguments."""
        found = [pool.get_cached_block(digest, group_ids, namespace) for digest in block_hashes]
        is_cached = np.array([blocks is not None for blocks in found], np.bool_)
        hit = cls.longest_hit(spec, is_cached, len(found), num_extra_blocks=num_extra_blocks)
        null = [NULL_BLOCK_ID] * len(group_ids)
        columns = [null] * hit.start + [found[i] or null for i in hit]
        return [[column[place] for column in columns] for place in range(len(group_ids))]

    # --- tables --------------------------------------------------------------------------------

    def table(self, request_id: str) -> Sequence[int]:
        """Return a request's table, empty if the request is unknown. Do not change it."""
        check_request_id(request_id)
        return self._tables.get(request_id, ())

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks no token after `num_computed_tokens` reads."""
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens, error=RequestError)
        return self.spec.num_skipped_tokens(num_computed_tokens) // self.block_size

    def get_num_blocks_to_allocate(
        self, request_id: str, reservation: Reservation, new_computed_blocks: Ids = ()
    ) -> int:
        """Return how many free blocks a reservation takes, unreferenced blocks of the hit included.

        Positions that no later token reads need none. Changes nothing.
        """
        check_request_id(request_id)
        check_kind("reservation", reservation, Reservation, RequestError)
        hit = as_integers("block_ids", new_computed_blocks, error=BlockError).tolist()
        skipped = self.num_skipped_blocks(reservation.num_computed_tokens)
        columns = self.new_columns(self._tables.get(request_id, hit), reservation)
        num_new = max(0, len(columns.kept) - len(columns.spare))
        return num_new + self._pool.num_unheld(hit[skipped:])

    def save_new_computed_blocks(
        self, request_id: str, block_ids: Ids, num_computed_tokens: int = 0
    ) -> None:
        """Adopt a hit as the start of a request's table.

        If tokens after the hit come from elsewhere, positions that no token after
        `num_computed_tokens` reads stay null.

        Raises:
            RequestError: the request has blocks already; nothing was changed.
            BlockError: a block is unknown, or free and empty; nothing was changed.
        """
        check_request_id(request_id)
        table = as_integers("block_ids", block_ids, error=BlockError).tolist()
        skipped = min(self.num_skipped_blocks(num_computed_tokens), len(table))
        if held := self._tables.get(request_id):
            raise RequestError(
                f"request {request_id} holds {len(held)} blocks of group {self.group} already: "
                "only a request without blocks adopts a hit"
            )
        table[:skipped] = [NULL_BLOCK_ID] * skipped
        self._pool.touch([b for b in table if b])
        self._tables[request_id], self._num_cached[request_id] = table, len(table)

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Extend a request's table as reserved; return what entered it, null blocks included.

        Raises:
            OutOfBlocksError: too few blocks are free; nothing was changed.
        """
        check_request_id(request_id)
        check_kind("reservation", reservation, Reservation, RequestError)
        table = list(self._tables.get(request_id, ()))
        columns, num_before = self.new_columns(table, reservation), len(table)
        spare = columns.spare[: len(columns.kept)]
        new = self._pool.get_new_blocks(len(columns.kept) - len(spare))
        block_ids = [table[column] for column in spare] + new
        table += [NULL_BLOCK_ID] * (columns.total - num_before)
        for column in spare:
            table[column] = NULL_BLOCK_ID
        for column, block_id in zip(columns.kept, block_ids, strict=True):
            table[column] = block_id
        self._tables[request_id] = table
        return table[num_before:]

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that no later token reads, right to left; null blocks replace them."""
        check_request_id(request_id)
        end = self.num_skipped_blocks(num_computed_tokens)
        table = self._tables.get(request_id, [])[:end]
        self._pool.free_blocks([b for b in reversed(table) if b])
        self._tables.get(request_id, [])[:end] = [NULL_BLOCK_ID] * len(table)

    def free(self, request_id: str) -> None:
        """Free all of a request's blocks, last one first. An unknown request is ignored."""
        self._pool.free_blocks([b for b in reversed(self.table(request_id)) if b])
        self.forget_request(request_id)

    def forget_request(self, request_id: str) -> None:
        """Drop a request's table. Its blocks have been freed."""
        self._tables.pop(request_id, None)
        self._num_cached.pop(request_id, None)

    # --- caching -------------------------------------------------------------------------------

    def num_cached_blocks(self, request_id: str) -> int:
        """Return how many leading blocks `cache_blocks` need not make hittable any more."""
        check_request_id(request_id)
        return self._num_cached.get(request_id, 0)

    def require_cacheable(self, request: Request, num_tokens: int) -> int:
        """Return how many leading blocks `cache_blocks` would cover.

        Raises:
            RequestError: the request has fewer tokens or blocks.
        """
        check_kind("request", request, Request, RequestError)
        num_tokens = as_int("num_tokens", num_tokens, error=RequestError)
        end, table = num_tokens // self.block_size, self._tables.get(request.request_id, ())
        if end > len(table):
            raise RequestError(
                f"request {request.request_id} has {len(table)} blocks in group {self.group}, "
                f"{end} cannot be cached: allocate them first"
            )
        if end > request.num_tokens // self.block_size:
            raise RequestError(
                f"request {request.request_id} has {request.num_tokens} tokens, blocks up to token "
                f"{num_tokens} cannot be full: append its tokens first"
            )
        return end

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks up to `num_tokens` hittable.

        Null blocks are left out. Nothing is cached after a block that has lost its content, because
        it could not be found without its prefix.

        Raises:
            RequestError: the request has fewer tokens or blocks; nothing was changed.
        """
        end, name = self.require_cacheable(request, num_tokens), request.request_id
        start, table = self.num_cached_blocks(name), self._tables.get(name, [])
        if end > start:
            wanted = set(self.cacheable_columns(name, start, end))
            ids = [b if i in wanted else NULL_BLOCK_ID for i, b in enumerate(table[:end])]
            self._pool.cache_full_blocks(request, ids, start, end, self.block_size, self.group)
            self._num_cached[name] = end


class FullAttentionManager(SingleTypeKVCacheManager):
    """Full attention, MLA too. A hit is all blocks before the first miss."""

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> int:
        """Count leading blocks with as many request references as there are running requests."""
        what = "num_running_requests"
        num_running_requests = as_int(what, num_running_requests, error=RequestError)
        count = 0
        for block_id in self.table(request_id):
            if self._pool.num_references(block_id, ReferenceKind.REQUEST) != num_running_requests:
                break
            count += 1
        return count


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A hit is the rightmost run of blocks that covers a window; blocks before it are null."""


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """A hit is the blocks from the start of the last chunk to the first miss.

    Chunks before it count as computed whether or not they are cached.
    """


class MambaManager(SingleTypeKVCacheManager):
    """States. A hit is the rightmost column with a state at its boundary, and null before it.

    `kinds/mamba.py` draws the tables. `_boundaries` has, by request, the columns whose last token
    ended a forward: only these can be hit.
    """

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, group: int) -> None:
        """Keep the tables of a state group; raises ConfigurationError for a spec without states."""
        super().__init__(spec, pool, group)
        if not isinstance(spec, MambaSpec):
            raise ConfigurationError(
                f"a spec of kind {spec.kind!r} has no states: use it with its own manager"
            )
        self._is_aligned = spec.mamba_cache_mode == "align"
        self._num_extra = spec.num_speculative_blocks
        self._boundaries: dict[str, set[int]] = {}

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Extend a request's table as reserved; return what entered it, null blocks included.

        Blocks that a long forward passes move to the columns that it writes. So a request never has
        more states than its spec allows.
        """
        new = super().allocate_new_blocks(request_id, reservation)
        end = reservation.own_end
        if self._is_aligned and end and end % self.block_size == 0:
            self._boundaries.setdefault(request_id, set()).add(self._column(end))
        return new

    def new_columns(self, table: Sequence[int], reservation: Reservation) -> NewColumns:
        written, held = self._column(reservation.own_end), len(table)
        total = written + 1 + self._num_extra
        if total <= held:
            return NewColumns(held, ())
        kept = list(range(max(held, written), total))
        read = self._column(reservation.num_computed_tokens)
        if held <= read < written:
            kept.insert(0, read)  # its state comes with external tokens
        newest = reservation.newest_state
        last = written if newest is None else self._column(newest.num_own_tokens)
        if newest is None or written <= last + 1:
            return NewColumns(total, kept)
        read = last + newest.num_accepted_drafts
        passed = enumerate(table[:written])
        return NewColumns(total, kept, [c for c, b in passed if c != read and self._is_scratch(b)])

    def cacheable_columns(self, request_id: str, start: int, end: int) -> Sequence[int]:
        return sorted(self._boundaries.get(request_id, ()))

    def forget_request(self, request_id: str) -> None:
        super().forget_request(request_id)
        self._boundaries.pop(request_id, None)

    def _column(self, num_tokens: int) -> int:
        """Return the column of the state after `num_tokens` tokens, -1 for the initial state."""
        if not self._is_aligned:
            return 0 if num_tokens else -1
        return (num_tokens - 1) // self.block_size

    def _is_scratch(self, block_id: int) -> bool:
        """Return whether a block has exactly one reference and cannot be hit."""
        block = self._pool.block(block_id)
        return block.ref_cnt == 1 and block.block_hash is None


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Tables with the blocks of a request's encoder tokens, made on admission.

    They do not change until the request is freed. Nothing is cached.
    """

    def new_columns(self, table: Sequence[int], reservation: Reservation) -> NewColumns:
        if table:
            return NewColumns(len(table), ())
        total = ceil_div(reservation.num_encoder_tokens, self.block_size)
        return NewColumns(total, range(total))

    def save_new_computed_blocks(
        self, request_id: str, block_ids: Ids, num_computed_tokens: int = 0
    ) -> None:
        """Check the arguments and adopt nothing: there is no hit."""
        check_request_id(request_id)
        self._pool.num_unheld(block_ids)
        as_int("num_computed_tokens", num_computed_tokens, error=RequestError)

    def require_cacheable(self, request: Request, num_tokens: int) -> int:
        """Return 0: encoder results of one input cannot be used for another."""
        check_kind("request", request, Request, RequestError)
        as_int("num_tokens", num_tokens, error=RequestError)
        return 0


MANAGERS: Mapping[str, type[SingleTypeKVCacheManager]] = MappingProxyType(
    {
        FullAttentionSpec.kind: FullAttentionManager,
        MLAAttentionSpec.kind: FullAttentionManager,
        SlidingWindowSpec.kind: SlidingWindowManager,
        ChunkedLocalAttentionSpec.kind: ChunkedLocalAttentionManager,
        MambaSpec.kind: MambaManager,
        CrossAttentionSpec.kind: CrossAttentionManager,
    }
)
"""Managers by kind of spec. To use kinds of your own, pass an extended copy to managers and
coordinators. `KVCacheManager` accepts a kind of your own if its spec is a subclass of a known spec,
or if it reads the whole prefix, and refuses all others."""


def get_manager_for_kv_cache_spec(
    spec: KVCacheSpec, managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS
) -> type[SingleTypeKVCacheManager]:
    """Return the manager class for a spec; raises ConfigurationError if its kind has none."""
    check_kind("spec", spec, KVCacheSpec, ConfigurationError)
    check_kind("managers", managers, Mapping, ConfigurationError)
    manager = managers.get(spec.kind)
    if manager is None:
        raise ConfigurationError(
            f"no manager serves KV cache specs of kind {spec.kind!r}: use one of "
            f"{', '.join(sorted(managers))}, or register a manager for it"
        )
    return manager


def check_request_id(request_id: str) -> None:
    """Raise RequestError unless `request_id` is a string."""
    as_text("request id", request_id, RequestError, may_be_empty=True)
