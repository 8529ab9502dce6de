"""Names of evicted contents, with a policy's data about each.

Policies use it to recognise contents that come back. Holds names and no blocks. The policy decides
how many names to keep; the oldest go first.
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
        """Remember the content that was just evicted, if it has a name."""
        if name is not None:
            self._values[name] = value
            self._values.move_to_end(name)

    def take(self, name: bytes | None) -> int | None:
        """Forget this name; return its data, None if it is unknown."""
        return None if name is None else self._values.pop(name, None)

    def trim(self, num_names: int) -> None:
        """Forget the oldest names until at most `num_names` are left."""
        while len(self._values) > max(0, num_names):
            self._values.popitem(last=False)

    def names(self) -> list[bytes]:
        """Return all names, the oldest first. O(n); for tests."""
        return list(self._values)
