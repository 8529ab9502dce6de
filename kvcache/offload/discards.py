"""What workers shall forget: content that the books have given up while labels or files are left.

From the hierarchy to workers, by way of its owner. What a new job writes needs no discard any more:
so the order of commands that were planned together does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.offload.keys import OffloadKey


@dataclass(frozen=True, eq=False)
class Discards:
    """Host addresses whose labels, and keys whose files shall be forgotten. Falsy if empty."""

    addresses: Int32Array
    keys: tuple[OffloadKey, ...]

    def __bool__(self) -> bool:
        return bool(len(self.addresses) or self.keys)


class DiscardList:
    """Discards that were not taken yet. Bounded by what the tiers can hold."""

    def __init__(self) -> None:
        """Begin empty."""
        self._addresses: dict[int, None] = {}
        self._keys: dict[OffloadKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._addresses or self._keys)

    def add_addresses(self, addresses: Int32Array) -> None:
        """Let host addresses be forgotten."""
        self._addresses.update(dict.fromkeys(addresses.tolist()))

    def add_keys(self, keys: Iterable[OffloadKey]) -> None:
        """Let the files of keys be forgotten."""
        self._keys.update(dict.fromkeys(keys))

    def drop_addresses(self, addresses: Int32Array) -> None:
        """Something else is written to these addresses."""
        for address in addresses.tolist() if self._addresses else ():
            self._addresses.pop(address, None)

    def drop_keys(self, keys: Iterable[OffloadKey]) -> None:
        """The files of these keys are written again."""
        for key in keys if self._keys else ():
            self._keys.pop(key, None)

    def take(self) -> Discards:
        """Return all of it, and forget it."""
        discards = Discards(int32_array(list(self._addresses)), tuple(self._keys))
        self._addresses.clear()
        self._keys.clear()
        return discards
