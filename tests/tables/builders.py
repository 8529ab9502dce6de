"""Coordinators in use: their calls in the order of an engine."""

from __future__ import annotations

from typing import Any

from kvcache import CacheHit, OutOfBlocksError, Request
from kvcache.core import Reservation
from kvcache.core.block_pool import BlockPool
from kvcache.specs import KVCacheSpec
from kvcache.tables.coordinators import get_kv_cache_coordinator
from tests.core.builders import plan


class Tables:
    """Does with a coordinator what a core does by itself."""

    def __init__(self, num_blocks: int, *specs: KVCacheSpec, **options: Any) -> None:
        ordered = [g for g, spec in enumerate(specs) if spec.reads_whole_prefix]
        self.pool = BlockPool(num_blocks, ordered_groups=ordered)
        self.coordinator = get_kv_cache_coordinator(plan(num_blocks, *specs), self.pool, **options)

    def look_up(self, request: Request) -> CacheHit:
        return self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1, request.namespace
        )

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> bool:
        name, coordinator = request.request_id, self.coordinator
        coordinator.remove_skipped_blocks(name, reservation.num_computed_tokens)
        needed = coordinator.get_num_blocks_to_allocate(name, reservation, hit)
        if needed > self.pool.get_num_free_blocks():
            return False
        if hit is not None:
            coordinator.save_new_computed_blocks(name, hit, reservation.num_computed_tokens)
        before = self.pool.get_num_free_blocks()
        try:
            coordinator.allocate_new_blocks(name, reservation)
        except OutOfBlocksError as error:
            raise AssertionError(f"{needed} blocks were counted, {before} are free") from error
        coordinator.cache_blocks(request, reservation.num_cached_tokens)
        return True

    def run(self, request: Request) -> bool:
        """Look all tokens of a request up, reserve for them and cache them."""
        hit, end = self.look_up(request), request.num_tokens
        return self.reserve(request, Reservation(hit.num_tokens, end, end), hit)

    def shape(self, name: str, group: int = 0) -> list[int]:
        """Return 1 for blocks of a table and 0 for null ones."""
        return [int(b > 0) for b in self.coordinator.get_blocks(name)[group]]
