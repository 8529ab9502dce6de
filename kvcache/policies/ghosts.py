"""Names of contents that were evicted, and what was known of each: the memory of a policy.

Stands under the policies that tell contents which come back from new ones. Holds names and no
blocks. Refuses to grow: its policy says how many names are worth keeping, the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict


class GhostList:
    """Names in the order in which their contents were evicted. O(1) per name."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._values: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def add(self, name: bytes | None, value: int) -> None:
        """Remember a content that has just been evicted; one without a name cannot be."""
        if name is not None:
            self._values[name] = value
            self._values.move_to_end(name)

    def take(self, name: bytes | None) -> int | None:
        """Forget this name; return what was known of it, None if it is not here."""
        return None if name is None else self._values.pop(name, None)

    def trim(self, num_names: int) -> None:
        """Forget the oldest names until no more than so many are left."""
        while len(self._values) > max(0, num_names):
            self._values.popitem(last=False)

    def names(self) -> list[bytes]:
        """Return all names, the oldest first. O(n); for tests."""
        return list(self._values)
