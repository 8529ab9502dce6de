"""An allocator's data about a physical block, except its references.

One per block, reused. Refuses to be enabled or disabled twice.
"""

from __future__ import annotations

from kvcache.base.errors import BlockError

NEVER_ACCESSED = -1.0
"""Access time of a block that was not accessed since it came into use."""


class BlockTracker:
    """Whether a block is in use, when it was accessed last, and whether its bytes are there.

    `last_accessed` is in the caller's unit of time; it and `computed` are meaningful only while
    `active`.
    """

    __slots__ = ("active", "computed", "last_accessed")

    def __init__(self) -> None:
        """Track a block that is not in use."""
        self.active = False
        self.last_accessed = NEVER_ACCESSED
        self.computed = False

    def reset(self) -> None:
        """Clear access and bytes; `active` stays."""
        self.last_accessed = NEVER_ACCESSED
        self.computed = False

    def enable(self) -> None:
        """Take the block into use; raises BlockError, unchanged, if it is in use."""
        if self.active:
            raise BlockError("a block that is in use is tracked already: disable it first")
        self.active = True
        self.reset()

    def disable(self) -> None:
        """Take the block out of use; raises BlockError, unchanged, if it is not in use."""
        if not self.active:
            raise BlockError("a block that is not in use is not tracked: enable it first")
        self.active = False
        self.reset()
