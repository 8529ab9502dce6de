"""Pins: prefixes protected from eviction until a given time.

The manager looks up a prefix and pins its blocks in the core. The table here remembers the pins,
counts the blocks they hold, and finds the expired ones. It refuses pins beyond the configured share
of the pool. Callers pass the time in.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.errors import InvariantError, PinLimitError
from kvcache.core import CacheHit, count_down
from kvcache.requests.request import Namespace
from kvcache.specs import NULL_BLOCK_ID
from kvcache.tenants import TenantAccount, TenantLedger

_SPARE_EXPIRIES = 64


@dataclass(frozen=True)
class Pin:
    """A pinned prefix: `num_tokens` tokens in `num_blocks` blocks, until `expires_at_s`.

    The time is the manager's clock's. Only the cached part of the prefix is pinned.
    """

    pin_id: int
    num_tokens: int
    num_blocks: int
    expires_at_s: float


class PinTable:
    """The pins of one manager.

    Invariants: `_reference_counts[b]` is the number of live pins of block `b`. At most
    `_max_blocks` blocks have any. `hits` are the live pins by id, each with its hit. Each tenant's
    account counts the blocks that its pins hold; no two tenants pin the same block.
    """

    def __init__(self, max_blocks: int, tenants: TenantLedger | None = None) -> None:
        """Let all pins together hold at most `max_blocks` different blocks."""
        self._tenants = tenants
        self._accounts: dict[int, TenantAccount] = {}
        self._max_blocks = max_blocks
        self.hits: dict[int, tuple[Pin, CacheHit]] = {}
        self._reference_counts: Counter[int] = Counter()
        self._expiries: list[tuple[float, int]] = []
        self._next_id = 1

    def __len__(self) -> int:
        return len(self.hits)

    @property
    def num_blocks(self) -> int:
        """How many blocks pins hold."""
        return len(self._reference_counts)

    def require_room(self, hit: CacheHit) -> None:
        """Raise `PinLimitError` if pinning `hit` would exceed the limit. Changes nothing."""
        new = self._num_unheld(held_blocks(hit))
        if self.num_blocks + new > self._max_blocks:
            raise PinLimitError(
                f"pinning {hit.num_tokens} tokens needs {new} more blocks, {self.num_blocks} of "
                f"at most {self._max_blocks} are pinned: unpin a prefix, wait until one runs out, "
                "or raise max_pin_share"
            )

    def require_tenant_room(self, hit: CacheHit, namespace: Namespace, num_free: int) -> None:
        """Raise `PinLimitError` if a tenant may not pin `hit`; `num_free` blocks are free.

        Pinned blocks are in use and must not eat into the guarantees of other tenants. Blocks that
        requests already use count as if they were free. Changes nothing.
        """
        if self._tenants is None:
            return
        account = self._tenants.account(namespace)
        new, limit = self._num_unheld(held_blocks(hit)), account.share.max_pinned_blocks
        room = self._tenants.room(account, num_free)
        if new > min(limit - account.num_pinned, room):
            raise PinLimitError(
                f"pinning {hit.num_tokens} tokens needs {new} more blocks, {account.num_pinned} of "
                f"at most {limit} of this tenant are pinned, and it may use {max(0, room)} more: "
                "unpin a prefix, wait until one runs out, or raise the tenant's max_pinned or limit"
            )

    def add(self, hit: CacheHit, expires_at_s: float, namespace: Namespace | None = None) -> Pin:
        """Remember a pin that the core holds already. Its namespace names the tenant."""
        held = held_blocks(hit)
        pin = Pin(self._next_id, hit.num_tokens, len(held), expires_at_s)
        self._next_id += 1
        self.hits[pin.pin_id] = (pin, hit)
        num_new = self._num_unheld(held)
        if self._tenants is not None and namespace is not None:
            account = self._accounts[pin.pin_id] = self._tenants.account(namespace)
            account.num_pinned += num_new
            account.num_ties += 1
        self._reference_counts.update(held.tolist())
        heapq.heappush(self._expiries, (expires_at_s, pin.pin_id))
        return pin

    def remove(self, pin_id: int) -> CacheHit | None:
        """Forget a pin and return the hit that the core must unpin; None if it is not live."""
        if pin_id not in self.hits:
            return None
        _, hit = self.hits.pop(pin_id)
        held = held_blocks(hit)
        count_down(self._reference_counts, held)
        num_gone = self._num_unheld(held)
        if (account := self._accounts.pop(pin_id, None)) is not None:
            account.num_pinned -= num_gone
            account.num_ties -= 1
        if len(self._expiries) > 2 * len(self.hits) + _SPARE_EXPIRIES:
            self._expiries = [entry for entry in self._expiries if entry[1] in self.hits]
            heapq.heapify(self._expiries)
        return hit

    def take_expired(self, now_s: float) -> list[CacheHit]:
        """Forget the expired pins and return the hits that the core must unpin."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now_s:
            hit = self.remove(heapq.heappop(self._expiries)[1])
            if hit is not None:
                expired.append(hit)
        return expired

    def take_all(self) -> list[CacheHit]:
        """Forget every pin and return the hits that the core must unpin."""
        hits = [hit for _, hit in self.hits.values()]
        for account in self._accounts.values():
            account.num_pinned = 0
            account.num_ties -= 1
        self._accounts.clear()
        self.hits.clear()
        self._reference_counts.clear()
        self._expiries.clear()
        return hits

    def check(self) -> None:
        """Raise `InvariantError` if the counts do not match the pins."""
        counted: Counter[int] = Counter()
        for _, hit in self.hits.values():
            counted.update(held_blocks(hit).tolist())
        if counted != self._reference_counts:
            raise InvariantError(
                f"pins hold {counted.total()} times {len(counted)} blocks, counted are "
                f"{self._reference_counts.total()} times {self.num_blocks}"
            )
        if self._tenants is not None:
            num_of_tenants = sum(account.num_pinned for account in self._tenants.accounts())
            if num_of_tenants != self.num_blocks:
                raise InvariantError(
                    f"pins hold {self.num_blocks} blocks, those of tenants {num_of_tenants}"
                )

    def dump_state(self) -> list[dict[str, object]]:
        """Return the pins as plain values, in order of id."""
        return [
            {
                "pin_id": pin.pin_id,
                "num_tokens": pin.num_tokens,
                "expires_at_s": pin.expires_at_s,
                "block_ids": [ids.tolist() for ids in hit.block_ids],
            }
            for _, (pin, hit) in sorted(self.hits.items())
        ]

    def _num_unheld(self, block_ids: Int32Array) -> int:
        """Return how many of these blocks no pin holds."""
        return sum(block_id not in self._reference_counts for block_id in block_ids.tolist())


def held_blocks(hit: CacheHit) -> Int32Array:
    """Return the distinct blocks of a hit in rising order, without the null block."""
    if not hit.block_ids:
        return EMPTY_INT32
    block_ids = np.sort(np.concatenate(hit.block_ids))
    held: Int32Array = block_ids[np.diff(block_ids, prepend=np.int32(NULL_BLOCK_ID)) > 0]
    return held
