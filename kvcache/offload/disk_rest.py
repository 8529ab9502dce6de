"""A disk that does not serve is left alone for a while, ever longer as long as it does not.

The tiers ask whether it rests. For what is wrong with a single file, that file is
forgotten; this is for a disk whose state is unknown: it may come back with all it had.
Refuses to read a clock.
"""

from __future__ import annotations

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

FIRST_REST_S = 0.25
LONGEST_REST_S = 30.0


class DiskRest:
    """Whether the disk rests now. `num_rests` so far; `reason` of the last one."""

    def __init__(self) -> None:
        """Begin awake."""
        self.num_rests = 0
        self.reason = ""
        self._next_s = FIRST_REST_S
        self._until_s: float | None = None
        self._is_doubted = False

    @property
    def is_on(self) -> bool:
        """Whether the disk is left alone."""
        return self._until_s is not None

    def begin(self, reason: str, now_s: float) -> None:
        """The disk did not serve: leave it alone. What was under way then tells nothing new."""
        if self.is_on:
            return
        self.num_rests += 1
        self.reason = reason
        self._is_doubted = True
        logger.warning("files are left alone for %g s: %s", self._next_s, reason)
        self._until_s = now_s + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_REST_S)

    def look(self, now_s: float) -> None:
        """End the rest when it is time."""
        if self._until_s is not None and now_s >= self._until_s:
            self._until_s = None
            logger.info("files are asked again after rest %d", self.num_rests)

    def served(self) -> None:
        """The disk has served: its next rest is a short one."""
        if self._is_doubted:
            self._is_doubted = False
            logger.info("files serve again after rest %d", self.num_rests)
        self._next_s = FIRST_REST_S
