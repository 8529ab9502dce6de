"""Copies that must run before the next forward writes: which block's bytes go where.

Beside a pool, for whoever shares partly filled blocks: a copy is noted when a sequence leaves one.
All of them run at once, as if every source were read before any destination is written (`Copy` in
commands.py). Refuses nothing: what it is told is consistent.
"""

from __future__ import annotations


class PendingCopies:
    """Sources by destination, in order of noting. No source is a destination that was noted before
    it: its bytes are not there yet, so its own source stands in."""

    def __init__(self) -> None:
        """Wait for nothing."""
        self._sources: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: int, destination: int) -> None:
        """Note that `destination` gets the bytes of `source`, unless it gets others already."""
        origin = self._sources.get(source, source)
        if origin != destination:
            self._sources.setdefault(destination, origin)

    def is_waiting(self, block_id: int) -> bool:
        """Say whether the bytes of a block are still to come by a copy."""
        return block_id in self._sources

    def drop(self, block_id: int) -> None:
        """Nobody wants the bytes of `block_id` any more: what would have filled it is void."""
        self._sources.pop(block_id, None)

    def take(self) -> list[tuple[int, int]]:
        """Return all (source, destination) and wait for nothing."""
        copies = [(source, destination) for destination, source in self._sources.items()]
        self._sources.clear()
        return copies
