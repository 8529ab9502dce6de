"""The tenant of each block of one tier, and the room that each tenant has left.

A pool or tier reports blocks that are taken, freed and cached; the tenants' policy asks the ledger
which tenant loses blocks. Without tenants in the configuration there is no ledger.

    room of a tenant = free blocks, minus the unused guarantees of others,
                       and never beyond its limit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvcache.base.arrays import IndexArray, Int32Array, index_array
from kvcache.base.errors import InvariantError
from kvcache.policies import EvictionPolicy
from kvcache.requests.request_content import Namespace
from kvcache.tenants.shares import UNNAMED_TENANT, TenantShare, TierShares


@dataclass(frozen=True)
class TenantStatistics:
    """Statistics of one tenant in one tier. Counters since the tenant was last added.

    Of its `num_held_blocks`, `num_cached_blocks` are not in use and can be evicted. Its requests
    queried `num_asked_tokens` tokens and hit `num_hit_tokens`. On the device these are all tokens
    of its look-ups, and loaded blocks are hit there (with `log_stats`); in a tier below, the tokens
    of admitted requests that no tier above had, and those loaded from this tier. It lost
    `num_evicted_blocks`; `num_evicted_for_blocks` were evicted for its requests. It was refused
    room `num_refusals` times; `last_refusal` has the numbers and the remedy of the last one.
    """

    name: str
    tier: str
    guaranteed_blocks: int
    limit_blocks: int
    weight: float
    num_held_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_evicted_blocks: int
    num_evicted_for_blocks: int
    num_refusals: int
    last_refusal: str


class TenantAccount:
    """Counts of one tenant.

    Invariants: `num_blocks` are all blocks that it has; `num_unheld` of them are in its eviction
    policy, `policy`. `num_ties` counts references to the account, which is remembered until it has
    none. `hopeless_blocks` is its last refused amount if that can never fit, otherwise 0.
    """

    __slots__ = (
        "hopeless_blocks",
        "last_refusal",
        "name",
        "num_asked_tokens",
        "num_blocks",
        "num_evicted",
        "num_evicted_for",
        "num_hit_tokens",
        "num_pinned",
        "num_refusals",
        "num_ties",
        "num_unheld",
        "number",
        "policy",
        "share",
    )

    def __init__(self, name: str, number: int, share: TenantShare) -> None:
        self.name = name
        self.number = number
        self.share = share
        self.policy: EvictionPolicy | None = None
        self.num_blocks = 0
        self.num_unheld = 0
        self.num_pinned = 0
        self.num_ties = 0
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted = 0
        self.num_evicted_for = 0
        self.num_refusals = 0
        self.last_refusal = ""
        self.hopeless_blocks = 0

    @property
    def num_in_use(self) -> int:
        """Blocks that requests, pins or copies of the tenant hold."""
        return self.num_blocks - self.num_unheld

    @property
    def num_reserved(self) -> int:
        """Blocks that others must leave to it: the unused part of its guarantee."""
        return max(0, self.share.guaranteed_blocks - self.num_blocks + self.num_unheld)

    @property
    def level(self) -> float:
        """How far the tenant is above its guarantee, by its weight."""
        return (self.num_blocks - self.share.guaranteed_blocks) / self.share.weight

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of the tenant but its counters."""
        return not (self.num_blocks or self.num_ties or self.num_pinned)

    @property
    def has_statistics(self) -> bool:
        """Whether any counter of the tenant is above 0."""
        return bool(self.num_asked_tokens or self.num_evicted_for or self.num_refusals)

    def refuse(self, reason: str) -> None:
        """Record that a request found no room, and why."""
        self.num_refusals += 1
        self.last_refusal = reason

    def statistics(self, tier: str, shown_name: str) -> TenantStatistics:
        return TenantStatistics(
            shown_name,
            tier,
            self.share.guaranteed_blocks,
            self.share.limit_blocks,
            self.share.weight,
            self.num_blocks,
            self.num_unheld,
            self.num_pinned,
            self.num_asked_tokens,
            self.num_hit_tokens,
            self.num_evicted,
            self.num_evicted_for,
            self.num_refusals,
            self.last_refusal,
        )


UNOWNED = 0
"""Owner of blocks without content and references."""

_SPARE_ACCOUNTS = 256

_Part = TypeVar("_Part")


class TenantLedger:
    """The accounts of all tenants in one tier. Blocks are ids below `num_ids`.

    Invariants: a block's owner is UNOWNED exactly while it is free and empty. An account's
    `num_blocks` are the blocks it owns. `num_reserved` is the sum of the accounts'
    `num_reserved`. Named tenants are always known, others while they have blocks, and some longer.
    """

    def __init__(self, shares: TierShares, num_ids: int) -> None:
        """Start with all blocks free and empty."""
        self.shares = shares
        self.owners: Int32Array = np.zeros(num_ids, dtype=np.int32)
        self.num_reserved = 0
        self.num_demands = 0
        self.is_own_only = False
        self.demand_blocks = 0
        self.changed: dict[TenantAccount, None] = {}
        self._by_name: dict[str, TenantAccount] = {}
        self._by_number: list[TenantAccount | None] = [None]
        self._free_numbers: list[int] = []
        self._sweep_at = len(shares.named) + _SPARE_ACCOUNTS
        for name in shares.named:
            self._open(name)
        self.served = self._open(UNNAMED_TENANT)

    def __len__(self) -> int:
        return len(self._by_name)

    # --- accounts ------------------------------------------------------------------------------

    def account(self, namespace: Namespace) -> TenantAccount:
        """Return the account of a namespace's tenant, a new one if there is none."""
        return self.account_named(self.shares.name_in(namespace))

    def account_named(self, name: str) -> TenantAccount:
        """Return the account of a tenant, a new one if there is none."""
        known = self._by_name.get(name)
        return self._open(name) if known is None else known

    def numbered(self, number: int) -> TenantAccount:
        """Return the account with a number that a block or entry has."""
        account = self._by_number[number]
        if account is None:
            raise InvariantError(f"tenant {number} has a block or an entry, but no account")
        return account

    def numbered_or_none(self, number: int) -> TenantAccount | None:
        """Return the account with a number, None if it was forgotten."""
        return self._by_number[number]

    def accounts(self) -> list[TenantAccount]:
        return list(self._by_name.values())

    # --- room ----------------------------------------------------------------------------------

    def serve(self, account: TenantAccount) -> None:
        """Charge blocks that are taken later to this tenant."""
        self.served = account

    def demand(self, num_blocks: int) -> int:
        """Announce that the served tenant takes blocks; return how many of its own must go."""
        self.demand_blocks = num_blocks
        self.num_demands += 1
        return min(self.num_over_limit, self.served.num_unheld)

    def room(self, account: TenantAccount, num_free: int) -> int:
        """Return how many more blocks the tenant may use, including its own cached ones.

        `num_free` are the blocks that would be available without tenants.
        """
        others = self.num_reserved - account.num_reserved
        return min(num_free - others, account.share.limit_blocks - account.num_in_use)

    def num_obtainable(self, num_free: int, num_unheld: IndexArray | None = None) -> int:
        """Return how many blocks the served tenant may take in a tier, where use is short.

        `num_free` are free; others lose what they have above their guarantees, as far as it can
        go. `num_unheld` says how much that is, by tenant number; None: all unheld blocks.
        O(tenants).
        """
        served = self.served
        count = num_free
        own = served.num_unheld if num_unheld is None else int(num_unheld[served.number])
        for account in self._by_name.values():
            if account is not served:
                can_go = account.num_unheld if num_unheld is None else num_unheld[account.number]
                excess = account.num_blocks - account.share.guaranteed_blocks
                count += max(0, min(excess, int(can_go)))
        return min(count + own, served.share.limit_blocks - served.num_blocks + own)

    @property
    def num_numbers(self) -> int:
        """Upper bound of tenant numbers."""
        return len(self._by_number)

    def has_room(self, wanted: dict[TenantAccount, int], num_free: int) -> bool:
        """Return whether tenants may use this many more blocks, all at the same time."""
        beyond = 0
        for account, count in wanted.items():
            if account.num_in_use + count > account.share.limit_blocks:
                return False
            beyond += max(0, count - account.num_reserved)
        return beyond <= num_free - self.num_reserved

    @contextmanager
    def gives_its_own(self) -> Iterator[None]:
        """During the `with` block, evict only the served tenant's own blocks."""
        self.is_own_only = True
        self.num_demands += 1
        yield
        self.is_own_only = False
        self.num_demands += 1

    @property
    def num_over_limit(self) -> int:
        """How many of its own blocks the served tenant must lose to take `wanted` ones."""
        served = self.served
        return max(0, served.num_blocks + self.demand_blocks - served.share.limit_blocks)

    def refuse(
        self, account: TenantAccount, num_blocks: int, num_free: int, num_spare: int = 0
    ) -> None:
        """Record that the tenant found no room for `num_blocks` more, and the remedy. Of `num_free`
        blocks the watermark keeps `num_spare`."""
        share, used = account.share, account.num_in_use
        account.hopeless_blocks = num_blocks if num_blocks > share.limit_blocks else 0
        if account.hopeless_blocks:
            reason = (
                f"{num_blocks} blocks are wanted by one request, which is more than all that this "
                f"tenant may have ({share.limit_blocks}): shorten it, or raise the tenant's limit"
            )
        elif used + num_blocks > share.limit_blocks:
            reason = (
                f"{num_blocks} blocks more are wanted, {used} of at most {share.limit_blocks} are "
                "in use: finish or preempt requests of this tenant, or raise its limit"
            )
        else:
            kept = self.num_reserved - account.num_reserved
            parts, remedies = [f"{num_free} are free"], ["finish or preempt requests"]
            if num_spare:
                parts.append(f"{num_spare} of them kept by the watermark")
                remedies.append("lower cache.watermark")
            if kept:
                parts.append(f"{kept} of them guaranteed to others")
                remedies.append("guarantee less")
            reason = (
                f"{num_blocks} blocks more are wanted, {', '.join(parts)}: {', or '.join(remedies)}"
            )
        account.refuse(reason)

    # --- blocks --------------------------------------------------------------------------------

    def took(self, block_ids: IndexArray | Int32Array, account: TenantAccount) -> None:
        """Assign these blocks, which had no owner, to the tenant."""
        if self._by_number[account.number] is not account:  # it was idle and was forgotten
            account = self.account_named(account.name)
        self.owners[block_ids] = account.number
        self._move(account, len(block_ids), 0)

    def freed(self, block_ids: Sequence[int] | IndexArray | Int32Array) -> None:
        """Clear the owner of these empty, free blocks."""
        for account, count in self._counts(block_ids):
            self._move(account, -count, 0)
        self.owners[index_array(block_ids)] = UNOWNED

    def evicted(self, block_ids: IndexArray) -> None:
        """Count these blocks, which are freed next, as evicted for the served tenant."""
        self.served.num_evicted_for += len(block_ids)
        for account, count in self._counts(block_ids):
            account.num_evicted += count

    def count_unheld(self, account: TenantAccount, change: int) -> None:
        """Count blocks of the tenant that came out of use, or went into use (negative)."""
        self._move(account, 0, change)

    # --- statistics -------------------------------------------------------------------------------

    def statistics(self) -> tuple[TenantStatistics, ...]:
        """Return the statistics of all known tenants, by name."""
        shares = self.shares
        return tuple(
            account.statistics(shares.tier, shares.shown_name(name))
            for name, account in sorted(self._by_name.items())
            if name in shares.named or not account.is_idle or account.has_statistics
        )

    def check(self) -> None:
        """Raise InvariantError unless the accounts match the blocks. O(blocks)."""
        counted = np.bincount(self.owners, minlength=len(self._by_number))
        for account in self._by_name.values():
            if counted[account.number] != account.num_blocks:
                raise InvariantError(
                    f"tenant {account.name!r} has {counted[account.number]} blocks of the "
                    f"{self.shares.tier} tier, {account.num_blocks} are counted"
                )
            if not 0 <= account.num_unheld <= account.num_blocks:
                raise InvariantError(
                    f"tenant {account.name!r} has {account.num_unheld} unheld blocks of "
                    f"{account.num_blocks}"
                )
        known = sum(int(counted[account.number]) for account in self._by_name.values())
        if known != np.count_nonzero(self.owners):
            raise InvariantError(f"{np.count_nonzero(self.owners) - known} blocks have no account")
        reserved = sum(account.num_reserved for account in self._by_name.values())
        if reserved != self.num_reserved:
            raise InvariantError(f"{reserved} blocks are reserved, counted {self.num_reserved}")

    # --- inside --------------------------------------------------------------------------------

    def _open(self, name: str) -> TenantAccount:
        if name in self._by_name:
            return self._by_name[name]
        if len(self._by_name) >= self._sweep_at:
            self._forget_idle()
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number = len(self._by_number)
            self._by_number.append(None)
        account = TenantAccount(name, number, self.shares.share_of(name))
        self._by_name[name] = self._by_number[number] = account
        self.num_reserved += account.num_reserved
        return account

    def _forget_idle(self) -> None:
        """Forget unnamed tenants without blocks. Amortised O(1) for each new account."""
        for name, account in list(self._by_name.items()):
            if name in self.shares.named or not name or account is self.served:
                continue
            if account.is_idle:
                del self._by_name[name]
                self._by_number[account.number] = None
                self._free_numbers.append(account.number)
                self.changed.pop(account, None)
        self._sweep_at = 2 * len(self._by_name) + _SPARE_ACCOUNTS

    def _move(self, account: TenantAccount, blocks: int, unheld: int) -> None:
        guaranteed = account.share.guaranteed_blocks
        if guaranteed:
            self.num_reserved -= account.num_reserved
        account.num_blocks += blocks
        account.num_unheld += unheld
        if guaranteed:
            self.num_reserved += account.num_reserved
        self.changed[account] = None

    def _counts(
        self, block_ids: Sequence[int] | IndexArray | Int32Array
    ) -> Iterator[tuple[TenantAccount, int]]:
        """Yield the tenants of these blocks, with their numbers; omits blocks without owner."""
        if not len(block_ids):
            return
        if len(block_ids) == 1:
            if number := int(self.owners[block_ids[0]]):
                yield self.numbered(number), 1
            return
        owners = self.owners[index_array(block_ids)]
        first = int(owners[0])
        if np.count_nonzero(owners == first) == len(owners):
            if first:
                yield self.numbered(first), len(owners)
            return
        counts = np.bincount(owners)
        for number in counts.nonzero()[0].tolist():
            if number:
                yield self.numbered(number), int(counts[number])


def required(part: _Part | None) -> _Part:
    """Return `value`, which must be a ledger or an account, not None."""
    if part is None:
        raise InvariantError("a block is to be counted for a tenant, but there are no tenants")
    return part
