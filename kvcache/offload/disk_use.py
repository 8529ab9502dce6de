"""Whether a hierarchy uses its disk.

Its contents stay known while it is not used. Reads no clock: time is passed in.
"""

from __future__ import annotations

from kvcache.base.arguments import as_number, as_text
from kvcache.base.logs import get_logger

logger = get_logger(__name__)

FIRST_REST_S = 0.25
LONGEST_REST_S = 30.0


class DiskUse:
    """A disk is not used while it rests after a failure, while its adoption is late, and after a
    rank has lost its own.

    Each rest is twice as long as the last, up to `LONGEST_REST_S`: such a disk may return with all
    its files. A single bad file is dropped instead. `num_rests` so far.
    """

    def __init__(self) -> None:
        self.num_rests = 0
        self._lost = ""
        self._late = ""
        self._reason = ""
        self._next_s = FIRST_REST_S
        self._until_s: float | None = None
        self._is_doubted = False

    @property
    def is_off(self) -> bool:
        """Whether the disk is not used now."""
        return bool(self._lost or self._late) or self._until_s is not None

    @property
    def problem(self) -> str:
        """Why the disk is not used; empty if it is."""
        return self._lost or self._late or ("" if self._until_s is None else self._reason)

    def leave(self, problem: str) -> None:
        """Stop using the disk permanently: a rank cannot use its own."""
        self._lost = as_text("problem", problem, may_be_empty=True)

    def postpone(self, problem: str) -> None:
        """Do not use the disk until `adopted`: its contents are being read, and requests do not
        wait for that."""
        self._late = as_text("problem", problem, may_be_empty=True)

    def adopted(self) -> None:
        """Record that the disk's contents are known."""
        self._late = ""

    def rest(self, reason: str, now_s: float) -> None:
        """Let the disk rest after a failure. Jobs from before the rest count no more."""
        reason = as_text("reason", reason, may_be_empty=True)
        now_s = as_number("now_s", now_s)
        if self._until_s is not None:
            return
        self.num_rests += 1
        self._reason = reason
        self._is_doubted = True
        logger.warning("files are left alone for %g s: %s", self._next_s, reason)
        self._until_s = now_s + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_REST_S)

    def look(self, now_s: float) -> None:
        """End the rest when its time is over."""
        if self._until_s is not None and now_s >= self._until_s:
            self._until_s = None
            logger.info("files are asked again after rest %d", self.num_rests)

    def served(self) -> None:
        """Record a success: the next rest is a short one."""
        if self._is_doubted:
            self._is_doubted = False
            logger.info("files serve again after rest %d", self.num_rests)
        self._next_s = FIRST_REST_S
