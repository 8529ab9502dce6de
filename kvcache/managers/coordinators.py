"""All KV cache groups of a model together: one hit, one count, one allocation.

Stands between a core and the managers of the groups. A hit must hold in every group, so kinds
shorten each other's hits until all agree. Refuses to allocate by halves: the core counts with
`get_num_blocks_to_allocate` before it allocates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import cycle
from math import gcd, lcm

from kvcache.arguments import as_bool, as_byte_strings, as_int, check_kind
from kvcache.arrays import EMPTY_INT32, Ids, int32_array
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.core import CacheHit, Reservation
from kvcache.errors import ConfigurationError, RequestError
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits, SingleTypeKVCacheManager
from kvcache.managers.block_tables import NEVER, RowLimits, check_request_id, check_reservation
from kvcache.managers.registry import MANAGERS, get_manager_for_kv_cache_spec
from kvcache.request import Namespace, Request
from kvcache.specs import (
    KVCacheConfig,
    KVCacheSpec,
    can_cache_prefixes,
    require_eagle_support,
)

_NO_LIMITS = RowLimits(NEVER, NEVER, NEVER)


class KVCacheCoordinator(ABC):
    """The managers of all groups, asked in order of group."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pool: BlockPool,
        *,
        use_eagle: bool = False,
        managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS,
    ) -> None:
        """Make a manager per group. Raises ConfigurationError for a kind that nobody serves."""
        check_kind("kv_cache_config", kv_cache_config, KVCacheConfig, ConfigurationError)
        check_kind("pool", pool, BlockPool, ConfigurationError)
        use_eagle = as_bool("use_eagle", use_eagle, ConfigurationError)
        self.specs = tuple(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        self.pool = pool
        self.use_eagle = use_eagle
        self.hash_block_size = hash_block_size(kv_cache_config)
        self.managers = tuple(
            get_manager_for_kv_cache_spec(spec, managers)(spec, pool, group, self.hash_block_size)
            for group, spec in enumerate(self.specs)
        )
        self._num_ordered = sum(spec.reads_whole_prefix for spec in self.specs)
        self.state_managers = tuple(
            manager for manager in self.managers if manager.spec.num_state_blocks is not None
        )

    @property
    def can_hit(self) -> bool:
        """Whether anything is ever cached."""
        return True

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Return the longest prefix of at most `max_length` tokens that hits in every group.

        `block_hashes` come one per `hash_block_size` tokens. Changes nothing.

        Raises:
            RequestError: an argument is of another type.
        """
        as_byte_strings("block_hashes", block_hashes, RequestError)
        max_length = as_int("max_length", max_length, error=RequestError)
        check_kind("namespace", namespace, Namespace, RequestError)
        return self.longest_hit(block_hashes, max_length, namespace)

    @abstractmethod
    def longest_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Do `find_longest_cache_hit` on the caller's word that the arguments are right."""

    def get_num_blocks_to_allocate(
        self, request_id: str, reservation: Reservation, hit: CacheHit | None = None
    ) -> int:
        """Return how many free blocks the request takes in all groups. Changes nothing."""
        self._check_call(request_id, reservation, hit)
        needed = 0
        for manager in self.managers:
            found = () if hit is None else hit.block_ids[manager.group]
            needed += manager.get_num_blocks_to_allocate(request_id, reservation, found)
        return needed

    def save_new_computed_blocks(
        self, request_id: str, hit: CacheHit, num_computed_tokens: int = 0
    ) -> None:
        """Adopt a hit in every group; raises RequestError if the request has blocks."""
        check_request_id(request_id)
        check_kind("hit", hit, CacheHit, RequestError)
        as_int("num_computed_tokens", num_computed_tokens, error=RequestError)
        for manager, block_ids in zip(self.managers, hit.block_ids, strict=True):
            manager.save_new_computed_blocks(request_id, block_ids, num_computed_tokens)

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[list[int]]:
        """Extend all tables as reserved; return what entered each. There is room."""
        self._check_call(request_id, reservation)
        return [manager.allocate_new_blocks(request_id, reservation) for manager in self.managers]

    def note_own_end(self, request_id: str, num_own_tokens: int) -> None:
        """Tell the groups that keep states where a forward ends."""
        for manager in self.state_managers:
            manager.note_own_end(request_id, num_own_tokens)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make full blocks up to `num_tokens` hittable in every group."""
        check_kind("request", request, Request, RequestError)
        num_tokens = as_int("num_tokens", num_tokens, error=RequestError)
        for manager in self.managers:
            manager.require_cacheable(request, num_tokens)
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free what no group reads any more."""
        check_request_id(request_id)
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens, error=RequestError)
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def take_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> list[int]:
        """Take what no group reads any more out of the tables; whoever calls gives it back."""
        return [
            block_id
            for manager in self.managers
            for block_id in manager.take_skipped_blocks(request_id, num_computed_tokens)
        ]

    def free(self, request_id: str) -> None:
        """Give all blocks back, the last tokens' first, groups side by side."""
        check_request_id(request_id)
        if len(self.managers) == 1 and self._num_ordered:
            # One table without nulls: what `tail_first` makes of it, as an array.
            (manager,) = self.managers
            ids = manager.columns(request_id, 0, len(manager.table(request_id)))
            manager.forget_request(request_id)
            self.pool.give_back(ids[::-1].copy())
            return
        self.pool.give_back(
            self.tail_first([manager.forget_request(request_id) for manager in self.managers])
        )

    def tail_first(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """Return the blocks of one request's tables, null left out, last tokens first.

        Blocks that can go one by one come before those that are of no use without all before them:
        so none of the first outlives what a hit would need beside it.
        """
        order: list[int] = []
        in_order: list[int] = []
        ordered: list[tuple[int, int, int]] = []
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if not spec.reads_whole_prefix:
                order += reversed(table)
            elif self._num_ordered == 1:
                in_order = list(reversed(table))
            else:
                ordered += [(-(i + 1) * spec.block_size, group, b) for i, b in enumerate(table)]
        if self._num_ordered == 1:
            order += in_order
        else:
            order += [block_id for _, _, block_id in sorted(ordered)]
        return [block_id for block_id in order if block_id] if NULL_ID in order else order

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> list[int]:
        """Return, per group, how many leading blocks every running request shares."""
        return [
            manager.get_num_common_prefix_blocks(request_id, num_running_requests)
            for manager in self.managers
        ]

    def get_blocks(self, request_id: str) -> tuple[list[int], ...]:
        """Return copies of a request's tables; empty lists if it is unknown."""
        return tuple(list(manager.table(request_id)) for manager in self.managers)

    def has_blocks(self, request_id: str) -> bool:
        """Say whether the request has a table of any length in any group."""
        return any(manager.table(request_id) for manager in self.managers)

    def holders_of(self, block_ids: Sequence[int]) -> set[str]:
        """Return who has one of these blocks."""
        wanted = set(block_ids)
        return {
            request_id
            for manager in self.managers
            if wanted
            for request_id in manager.request_ids()
            if not wanted.isdisjoint(manager.table(request_id))
        }

    def _check_call(
        self, request_id: str, reservation: Reservation, hit: CacheHit | None = None
    ) -> None:
        """Raise RequestError for arguments of another type, even where there is no group."""
        check_request_id(request_id)
        check_reservation(reservation)
        if hit is not None:
            check_kind("hit", hit, CacheHit, RequestError)

    def row_limits(self, request_id: str) -> RowLimits:
        """Return how far a request can go on before anything must be done for it."""
        limits = [manager.row_limits(request_id) for manager in self.managers]
        if len(limits) == 1:
            return limits[0]
        return RowLimits(*map(min, zip(_NO_LIMITS, *limits, strict=True)))

    def next_skip_tokens(self, request_id: str) -> int:
        """Return the computed tokens from which on one more block of some group is skipped."""
        return min((m.next_skip_tokens(request_id) for m in self.managers), default=NEVER)


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Tables without any caching: every look-up misses, nothing becomes hittable."""

    @property
    def can_hit(self) -> bool:
        return False

    def longest_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Return a miss."""
        return CacheHit((EMPTY_INT32,) * len(self.managers), 0)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache nothing."""
        check_kind("request", request, Request, RequestError)
        as_int("num_tokens", num_tokens, error=RequestError)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its manager's hit is the hit."""

    def longest_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Return the group's longest hit."""
        manager = self.managers[0]
        (match,) = manager.longest_hits(
            block_hashes, max_length, [0], self.pool, manager.spec, self.use_eagle, namespace
        )
        return CacheHit((int32_array(match),), len(match) * manager.block_size)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest prefix on which all of them agree.

    Groups of equal specs are looked up together. Every kind shortens the hit to its own longest
    one within the limit, until no kind does. No length on which all agree is passed by: each kind
    would stop there. And every kind was asked at the final length last, so that what it leaves
    null is what that length leaves unread. Lengths are multiples of the least common multiple of
    the block sizes; EAGLE's last block is one such multiple, dropped once, after all agree.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pool: BlockPool,
        *,
        use_eagle: bool = False,
        managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS,
    ) -> None:
        """Make a manager per group, and put groups of equal specs together."""
        super().__init__(kv_cache_config, pool, use_eagle=use_eagle, managers=managers)
        kinds: dict[KVCacheSpec, list[int]] = {}
        for group, spec in enumerate(self.specs):
            kinds.setdefault(spec, []).append(group)
        # What reads the whole prefix is cheap to look up and cuts the work of the others.
        self._kinds = sorted(kinds.items(), key=lambda kind: not kind[0].reads_whole_prefix)
        self._step_tokens = lcm(*(spec.block_size for spec in self.specs))

    def longest_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, namespace: Namespace
    ) -> CacheHit:
        """Return the longest hit that holds in every group."""
        length = min(max_length, len(block_hashes) * self.hash_block_size)
        length -= length % self._step_tokens
        matches: dict[int, Ids] = {}
        num_agreed = 0
        kinds = cycle(self._kinds)
        while length and num_agreed < len(self._kinds):
            spec, groups = next(kinds)
            found = self._match(spec, groups, block_hashes, length, namespace)
            matches.update(zip(groups, found, strict=True))
            num_agreed = num_agreed + 1 if len(found[0]) * spec.block_size == length else 1
            length = len(found[0]) * spec.block_size
        length = max(0, length - self._step_tokens) if self.use_eagle else length
        return CacheHit(
            tuple(
                int32_array(matches.get(group, [])[: length // spec.block_size])
                for group, spec in enumerate(self.specs)
            ),
            length,
        )

    def _match(
        self,
        spec: KVCacheSpec,
        groups: Sequence[int],
        block_hashes: Sequence[BlockHash],
        length: int,
        namespace: Namespace,
    ) -> tuple[Ids, ...]:
        manager = self.managers[groups[0]]
        step_blocks = self._step_tokens // spec.block_size
        return manager.match_groups(
            self.pool,
            namespace,
            groups,
            manager.group_hashes(block_hashes),
            spec,
            MatchLimits(
                max_blocks=length // spec.block_size,
                num_extra_blocks=step_blocks if self.use_eagle else 0,
                alignment_blocks=step_blocks,
            ),
        )


def hash_block_size(kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens per digest: the greatest common divisor of the groups' block sizes.

    1 where there is no group.
    """
    return gcd(*(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups)) or 1


def ordered_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Return the groups in which a block is of no use without all blocks before it."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return frozenset(i for i, group in groups if group.kv_cache_spec.reads_whole_prefix)


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
        ConfigurationError: a kind that nobody serves, or that EAGLE cannot be used with.
    """
    check_kind("kv_cache_config", kv_cache_config, KVCacheConfig, ConfigurationError)
    enable_caching = as_bool("enable_caching", enable_caching, ConfigurationError)
    use_eagle = as_bool("use_eagle", use_eagle, ConfigurationError)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if use_eagle:
        require_eagle_support(specs)
    kind: type[KVCacheCoordinator]
    if not (enable_caching and can_cache_prefixes(specs)):
        kind = KVCacheCoordinatorNoPrefixCache
    else:
        kind = UnitaryKVCacheCoordinator if len(specs) == 1 else HybridKVCacheCoordinator
    return kind(kv_cache_config, pool, use_eagle=use_eagle, managers=managers)
