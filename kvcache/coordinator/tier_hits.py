"""How far tiers can continue a request's device hit, over all groups.

The tiers know single blocks only. A group needs the blocks that its attention reads after the
prefix's end: all of them, or those of a window or chunk. Does not load, and hashes only the blocks
that a request may need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import BoolArray, IndexArray, Int64Array
from kvcache.base.errors import ConfigurationError
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import OffloadKey, make_offload_keys
from kvcache.protocol.commands import Label
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request import Request
from kvcache.requests.request_content import Namespace, parse_namespace_name
from kvcache.specs import KVCacheConfig, KVCacheSpec, ceil_div
from kvcache.tenants import TenantLedger

Locate = Callable[[Sequence[OffloadKey]], npt.NDArray[np.uint8]]
"""Returns the place of each key; see `kvcache.offload.hierarchy.Place`."""


class HashedRequest(Protocol):
    """What a look-up asks of a request."""

    @property
    def num_tokens(self) -> int:
        """All tokens so far."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """The digests of its hashed blocks, in order."""

    @property
    def namespace(self) -> Namespace:
        """What separates its blocks from others with the same digest."""


@dataclass(frozen=True, eq=False)
class TierHit:
    """A prefix of `num_tokens` tokens that the tiers can complete.

    `keys` are those of the blocks needed beyond the device hit, group by group.
    """

    num_tokens: int
    keys: list[OffloadKey]


@dataclass(frozen=True)
class _Group:
    index: int
    spec: KVCacheSpec

    def first_needed(self, num_tokens: int, num_device_tokens: int) -> int:
        """Return the first column that is needed for a prefix and missing on the device."""
        size = self.spec.block_size
        return max(num_device_tokens, self.spec.num_skipped_tokens(num_tokens)) // size


class TierHitFinder:
    """Finds hits for one plan."""

    def __init__(
        self, config: KVCacheConfig, hash_block_size: int, *, use_eagle: bool = False
    ) -> None:
        """Find hits of whole blocks of every group; one digest has `hash_block_size` tokens.

        With `use_eagle` the end of a hit will be computed again: it gains nothing, but a window
        must exist before it, too.

        Raises:
            ConfigurationError: an attention kind whose blocks cannot be loaded by content.
        """
        self._groups = tuple(
            _Group(index, group.kv_cache_spec) for index, group in enumerate(config.kv_cache_groups)
        )
        self._hash_block_size = hash_block_size
        self.use_eagle = use_eagle
        self.alignment_tokens = math.lcm(*(group.spec.block_size for group in self._groups))
        self._num_dropped_tokens = self.alignment_tokens if use_eagle else 0
        self.has_states = any(g.spec.num_state_blocks is not None for g in self._groups)
        unserved = sorted({g.spec.kind for g in self._groups if not g.spec.can_prefix_cache})
        if unserved:
            raise ConfigurationError(
                f"tiers below the device cannot serve KV cache groups of kind {unserved}: their "
                "blocks hold more than the tokens before them say; remove the offload section"
            )

    def keys_of(
        self, request: HashedRequest, group: int, columns: Iterable[int]
    ) -> list[OffloadKey]:
        """Return the keys of these columns of the request's table in a group."""
        per_block = self._groups[group].spec.block_size // self._hash_block_size
        hashes = request.block_hashes
        digests = [hashes[(column + 1) * per_block - 1] for column in columns]
        return make_offload_keys(digests, group, request.namespace)

    def columns_between(self, num_tokens: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return (group, column) of the blocks with tokens of `[start, end)` that are needed for
        a prefix of `num_tokens` tokens, group by group."""
        return [
            (group.index, column)
            for group in self._groups
            for column in range(
                group.first_needed(num_tokens, start), ceil_div(end, group.spec.block_size)
            )
        ]

    def keys_between(
        self, request: HashedRequest, num_tokens: int, start: int, end: int
    ) -> list[OffloadKey]:
        """Return the keys of `columns_between`; `end` is a multiple of every block size."""
        found: list[OffloadKey] = []
        for group in self._groups:
            first = group.first_needed(num_tokens, start)
            columns = range(first, end // group.spec.block_size)
            found += self.keys_of(request, group.index, columns)
        return found

    def find(
        self,
        request: HashedRequest,
        num_device_tokens: int,
        locate: Locate,
        is_there: Callable[[npt.NDArray[np.uint8]], BoolArray],
    ) -> TierHit | None:
        """Return the longest hit beyond the device's, None if there is none. Changes nothing.

        `is_there` says which places count. The last token of a request is never hit.
        """
        step = self.alignment_tokens
        longest = (request.num_tokens - 1) // step * step
        start = num_device_tokens // step * step
        dropped = self._num_dropped_tokens
        least = max(start, num_device_tokens) + dropped
        if longest <= least:
            return None
        if not self._may_begin(request, start, longest, locate, is_there):
            return None
        keys: list[list[OffloadKey]] = []
        streaks: list[Int64Array] = []
        for group in self._groups:
            size = group.spec.block_size
            first = start // size
            keys.append(self.keys_of(request, group.index, range(first, longest // size)))
            present = is_there(locate(keys[-1]))
            if not group.spec.num_skipped_tokens(longest - dropped):
                # Every block is needed: none counts after the first missing one.
                num_leading = int(np.argmin(present)) if not present.all() else len(present)
                longest = min(longest, (first + num_leading) * size // step * step)
                if longest <= least:
                    return None
            streaks.append(_streaks(present))
        for num_tokens in range(longest, least, -step):
            firsts = [group.first_needed(num_tokens - dropped, start) for group in self._groups]
            ends = [num_tokens // group.spec.block_size for group in self._groups]
            if all(
                first >= end or streak[end - 1 - start // group.spec.block_size] >= end - first
                for group, streak, first, end in zip(
                    self._groups, streaks, firsts, ends, strict=True
                )
            ):
                found: list[OffloadKey] = []
                for of_group, group, first, end in zip(
                    keys, self._groups, firsts, ends, strict=True
                ):
                    offset = start // group.spec.block_size
                    found += of_group[first - offset : end - offset]
                return TierHit(num_tokens, found)
        return None

    def _may_begin(
        self,
        request: HashedRequest,
        start: int,
        longest: int,
        locate: Locate,
        is_there: Callable[[npt.NDArray[np.uint8]], BoolArray],
    ) -> bool:
        """Return whether the first block of a hit is there in every group that needs all of them.

        Every step asks about each waiting request, and mostly the tiers have nothing of it. Then
        this is the only check, however long the request is.
        """
        return all(
            bool(is_there(locate(self.keys_of(request, group.index, (first,))))[0])
            for group in self._groups
            if not group.spec.num_skipped_tokens(longest)
            and (first := start // group.spec.block_size) < longest // group.spec.block_size
        )


def _streaks(present: BoolArray) -> Int64Array:
    """Return, for each place, how many consecutive ones up to it are present."""
    indices = np.arange(1, len(present) + 1)
    last_gap = np.maximum.accumulate(np.where(present, 0, indices))
    streaks: Int64Array = indices - last_gap
    return streaks


class LoadedTokens(NamedTuple):
    """Tokens loaded for one request, and how many of them came from files."""

    num_loaded: int = 0
    num_fetched: int = 0


NOTHING_LOADED = LoadedTokens()


def count_for_tenant(
    tiers: TierHierarchy, request: Request, num_hit_tokens: int, loaded: LoadedTokens
) -> None:
    """Add an admitted request to the statistics of its tenant in each tier, if there are tenants.

    `num_hit_tokens` are its hits at admission, including `loaded` tokens.
    """
    host = tiers.host.tenants
    if host is None or request.num_preemptions or request.skip_reading_prefix_cache:
        return
    num_loaded = min(loaded.num_loaded, num_hit_tokens)
    num_fetched = min(loaded.num_fetched, num_loaded)
    num_asked = request.num_tokens - (num_hit_tokens - num_loaded)
    account = host.account(request.namespace)
    account.num_asked_tokens += num_asked
    account.num_hit_tokens += num_loaded - num_fetched
    disk = None if tiers.disk is None else tiers.disk.tenants
    if disk is not None:
        account = disk.account(request.namespace)
        account.num_asked_tokens += num_asked - (num_loaded - num_fetched)
        account.num_hit_tokens += num_fetched


def rows_by_tenant(
    labels: Label, tenants: TenantLedger | None
) -> Iterator[tuple[IndexArray, Namespace | None]]:
    """Yield, for each tenant, its rows in ascending order, and a namespace of the tenant.

    Without tenants, all rows at once.
    """
    if tenants is None:
        yield np.arange(len(labels.block_ids)), None
        return
    found = [parse_namespace_name(name) for name in labels.namespace_names]
    owners = [tenants.shares.name_in(namespace) for namespace in found]
    of_tenant = {owner: number for number, owner in reversed(list(enumerate(owners)))}
    firsts = np.array([of_tenant[owner] for owner in owners])[labels.namespaces]
    for first in np.unique(firsts).tolist():
        yield np.flatnonzero(firsts == first), found[first]
