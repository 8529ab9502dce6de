"""Prefixes that must not be evicted for a while: who holds what, until when.

The manager looks a prefix up and pins its blocks in the core; the table here remembers the pins,
counts the blocks they hold, and says which have run out. Refuses pins beyond the configured share
of the pool. Time is handed in.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from kvcache.core import CacheHit
from kvcache.errors import InvariantError, PinLimitError
from kvcache.ids import NULL_BLOCK_ID

_SPARE_EXPIRIES = 64


@dataclass(frozen=True)
class Pin:
    """A pinned prefix: `num_tokens` tokens in `num_blocks` blocks, until `expires_at_s`.

    The time is that of the manager's clock. What of the prefix was not cached is not pinned.
    """

    pin_id: int
    num_tokens: int
    num_blocks: int
    expires_at_s: float


class PinTable:
    """The pins of one manager.

    Invariant: `_holders[b]` is the number of live pins that hold block `b`, and at most
    `_max_blocks` blocks have any.
    """

    def __init__(self, max_blocks: int) -> None:
        """Let pins hold at most `max_blocks` different blocks together."""
        self._max_blocks = max_blocks
        self._hits: dict[int, tuple[Pin, CacheHit]] = {}
        self._holders: Counter[int] = Counter()
        self._expiries: list[tuple[float, int]] = []
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._hits)

    @property
    def num_blocks(self) -> int:
        """Different blocks held by pins."""
        return len(self._holders)

    def require_room(self, hit: CacheHit) -> None:
        """Raise `PinLimitError` if pinning `hit` would exceed the limit. Changes nothing."""
        new = len(held_blocks(hit) - self._holders.keys())
        if len(self._holders) + new > self._max_blocks:
            raise PinLimitError(
                f"pinning {hit.num_tokens} tokens needs {new} more blocks, {len(self._holders)} of "
                f"at most {self._max_blocks} are pinned: unpin a prefix, wait until one runs out, "
                "or raise max_pin_share"
            )

    def add(self, hit: CacheHit, expires_at_s: float) -> Pin:
        """Remember a pin that the core holds already."""
        held = held_blocks(hit)
        pin = Pin(self._next_id, hit.num_tokens, len(held), expires_at_s)
        self._next_id += 1
        self._hits[pin.pin_id] = (pin, hit)
        self._holders.update(held)
        heapq.heappush(self._expiries, (expires_at_s, pin.pin_id))
        return pin

    def remove(self, pin_id: int) -> CacheHit | None:
        """Forget a pin and return what the core must unpin; None if there is no such pin."""
        if pin_id not in self._hits:
            return None
        _, hit = self._hits.pop(pin_id)
        self._holders.subtract(held_blocks(hit))
        self._holders += Counter()
        if len(self._expiries) > 2 * len(self._hits) + _SPARE_EXPIRIES:
            self._expiries = [entry for entry in self._expiries if entry[1] in self._hits]
            heapq.heapify(self._expiries)
        return hit

    def take_expired(self, now_s: float) -> list[CacheHit]:
        """Forget the pins whose time is over and return what the core must unpin."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now_s:
            hit = self.remove(heapq.heappop(self._expiries)[1])
            if hit is not None:
                expired.append(hit)
        return expired

    def take_all(self) -> list[CacheHit]:
        """Forget every pin and return what the core must unpin."""
        hits = [hit for _, hit in self._hits.values()]
        self._hits.clear()
        self._holders.clear()
        self._expiries.clear()
        return hits

    def check(self) -> None:
        """Raise `InvariantError` if the counted holders are not those of the pins."""
        counted = Counter(block for _, hit in self._hits.values() for block in held_blocks(hit))
        if counted != self._holders:
            raise InvariantError(
                f"pins hold {sum(counted.values())} times {len(counted)} blocks, counted are "
                f"{sum(self._holders.values())} times {len(self._holders)}"
            )

    def dump_state(self) -> list[dict[str, object]]:
        """Return the pins as plain values, in order of id."""
        return [
            {
                "pin_id": pin.pin_id,
                "num_tokens": pin.num_tokens,
                "expires_at_s": pin.expires_at_s,
                "block_ids": [list(ids) for ids in hit.block_ids],
            }
            for _, (pin, hit) in sorted(self._hits.items())
        ]


def held_blocks(hit: CacheHit) -> set[int]:
    """The blocks of a hit that can be held: all but the null block."""
    return {block for ids in hit.block_ids for block in ids if block != NULL_BLOCK_ID}
