"""All KV cache groups of a model together: one hit, one count, one allocation.

For engines that keep block tables themselves; a coordinator works on the managers of the groups. A
hit must be valid in every group, so the kinds shorten it until all agree. Allocation has no
rollback: callers first count with `get_num_blocks_to_allocate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import cycle
from math import gcd, lcm

from kvcache.base.arguments import as_bool, as_byte_strings, as_int, check_kind
from kvcache.base.arrays import EMPTY_INT32, int32_array
from kvcache.base.errors import ConfigurationError, RequestError
from kvcache.core import CacheHit, Reservation, release_order
from kvcache.core.block_pool import BlockPool
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request import Request
from kvcache.requests.request_content import Namespace
from kvcache.specs import KVCacheConfig, KVCacheSpec, can_cache_prefixes, require_eagle_support
from kvcache.tables.single_type_managers import (
    MANAGERS,
    SingleTypeKVCacheManager,
    get_manager_for_kv_cache_spec,
)


class KVCacheCoordinator(ABC):
    """The managers of all groups, called in order of group."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pool: BlockPool,
        *,
        use_eagle: bool = False,
        managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS,
    ) -> None:
        """Make one manager per group.

        Raises:
            ConfigurationError: a kind has no manager, or cannot be used with EAGLE.
        """
        check_kind("kv_cache_config", kv_cache_config, KVCacheConfig, ConfigurationError)
        check_kind("pool", pool, BlockPool, ConfigurationError)
        self.use_eagle = as_bool("use_eagle", use_eagle, ConfigurationError)
        self.specs = tuple(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        self.pool = pool
        self.hash_block_size = gcd(*(spec.block_size for spec in self.specs)) or 1
        self.managers = tuple(
            get_manager_for_kv_cache_spec(spec, managers)(spec, pool, group)
            for group, spec in enumerate(self.specs)
        )
        if self.use_eagle:
            require_eagle_support(self.specs)
        if isinstance(self, UnitaryKVCacheCoordinator) and len(self.specs) != 1:
            raise ConfigurationError(
                f"a plan of {len(self.specs)} KV cache groups: use HybridKVCacheCoordinator"
            )

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Return the longest prefix of at most `max_length` tokens that hits in every group.

        `block_hashes` has one digest per `hash_block_size` tokens. Changes nothing.

        Raises:
            RequestError: an argument has a wrong type.
        """

    def get_num_blocks_to_allocate(
        self, request_id: str, reservation: Reservation, hit: CacheHit | None = None
    ) -> int:
        """Return how many free blocks the request takes in all groups. Changes nothing."""
        check_kind("hit", hit, (CacheHit, type(None)), RequestError)
        found = hit.block_ids if hit else (EMPTY_INT32,) * len(self.managers)
        counts = [
            manager.get_num_blocks_to_allocate(request_id, reservation, block_ids)
            for manager, block_ids in zip(self.managers, found, strict=True)
        ]
        return sum(counts)

    def save_new_computed_blocks(
        self, request_id: str, hit: CacheHit, num_computed_tokens: int = 0
    ) -> None:
        """Adopt a hit in every group; raises RequestError if the request has blocks."""
        check_kind("hit", hit, CacheHit, RequestError)
        for manager, block_ids in zip(self.managers, hit.block_ids, strict=True):
            manager.save_new_computed_blocks(request_id, block_ids, num_computed_tokens)

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[list[int]]:
        """Extend all tables as reserved; return what entered each. Enough blocks are free."""
        return [manager.allocate_new_blocks(request_id, reservation) for manager in self.managers]

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make full blocks up to `num_tokens` hittable in every group.

        Raises:
            RequestError: the request has fewer tokens or blocks; nothing was changed.
        """
        for manager in self.managers:
            manager.require_cacheable(request, num_tokens)
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that no later token reads, in every group."""
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Free all of a request's blocks, last tokens first; see `release_order`."""
        sizes = [spec.block_size for spec in self.specs]
        prefix_groups = [g for g, spec in enumerate(self.specs) if spec.reads_whole_prefix]
        order = release_order(self.get_blocks(request_id), sizes, prefix_groups)
        self.pool.free_blocks(order)
        for manager in self.managers:
            manager.forget_request(request_id)

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> list[int]:
        """Return, per group, how many leading blocks every running request shares."""
        return [
            manager.get_num_common_prefix_blocks(request_id, num_running_requests)
            for manager in self.managers
        ]

    def get_blocks(self, request_id: str) -> tuple[list[int], ...]:
        """Return copies of a request's tables; empty lists if the request is unknown."""
        return tuple(list(manager.table(request_id)) for manager in self.managers)


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Tables without caching: every look-up misses, and nothing becomes hittable."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        check_look_up(block_hashes, max_length, namespace)
        return CacheHit((EMPTY_INT32,) * len(self.managers), 0)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Check the arguments and cache nothing."""
        check_kind("request", request, Request, RequestError)
        as_int("num_tokens", num_tokens, error=RequestError)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest prefix on which all of them agree.

    Groups with equal specs are looked up together. Each kind shortens the hit to its own longest
    one, until no kind does. This finds the longest common hit, because each kind would stop at it.
    Every kind's last answer is for the final length, so its null blocks are those that this length
    does not read. The length is a multiple of all block sizes. With EAGLE, their least common
    multiple is dropped once, after all kinds agree.
    """

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Return the longest hit that is valid in every group."""
        max_length = check_look_up(block_hashes, max_length, namespace)
        kinds: dict[KVCacheSpec, list[int]] = {}
        for group, spec in enumerate(self.specs):
            kinds.setdefault(spec, []).append(group)
        step = lcm(*(spec.block_size for spec in self.specs))
        extra = step if self.use_eagle else 0
        length = min(max_length, len(block_hashes) * self.hash_block_size) // step * step
        matches: list[list[int]] = [[] for _ in self.specs]
        num_agreed = 0
        for spec, groups in cycle(kinds.items()):
            if not length or num_agreed == len(kinds):
                break
            size = spec.block_size
            every = size // self.hash_block_size
            hashes = block_hashes[every - 1 : length // self.hash_block_size : every]
            found = self.managers[groups[0]].match(
                hashes, groups, self.pool, spec, namespace, extra // size
            )
            for group, match in zip(groups, found, strict=True):
                matches[group] = match
            num_agreed = num_agreed + 1 if len(found[0]) * size == length else 1
            length = len(found[0]) * size
        length = max(0, length - extra)
        tables = zip(matches, self.specs, strict=True)
        ids = tuple(int32_array(match[: length // spec.block_size]) for match, spec in tables)
        return CacheHit(ids, length)


class UnitaryKVCacheCoordinator(HybridKVCacheCoordinator):
    """One group: its longest hit is the hit."""


def check_look_up(block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace) -> int:
    """Return `max_length`; raises RequestError if an argument of a look-up has a wrong type."""
    as_byte_strings("block_hashes", block_hashes, RequestError)
    check_kind("namespace", namespace, Namespace, RequestError)
    return as_int("max_length", max_length, error=RequestError)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    pool: BlockPool,
    *,
    enable_caching: bool = True,
    use_eagle: bool = False,
    managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS,
) -> KVCacheCoordinator:
    """Return the coordinator for a plan. A group that cannot hit disables caching, with a warning.

    Raises:
        ConfigurationError: a kind has no manager, or cannot be used with EAGLE.
    """
    check_kind("kv_cache_config", kv_cache_config, KVCacheConfig, ConfigurationError)
    enable_caching = as_bool("enable_caching", enable_caching, ConfigurationError)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kind: type[KVCacheCoordinator]
    if not (enable_caching and can_cache_prefixes(specs)):
        kind = KVCacheCoordinatorNoPrefixCache
    else:
        kind = UnitaryKVCacheCoordinator if len(specs) == 1 else HybridKVCacheCoordinator
    return kind(kv_cache_config, pool, use_eagle=use_eagle, managers=managers)
