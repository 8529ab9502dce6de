"""Sends a cache's events to its publisher, and the whole state to a publisher without one.

Below the feeds, which know the state. Numbers the states. Never waits for the publisher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvcache.base.errors import MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.core import CacheEvent
from kvcache.events.feed_frames import pack_events, pack_frame
from kvcache.events.process_link import ProcessLink

logger = get_logger(__name__)

UNSAID_NUMBERS: Final = 1 << 20
"""More numbers than a publisher uses before it reports them."""

MILLISECOND_NUMBERS: Final = 1 << 12
"""More numbers than a publisher uses in a millisecond. Numbers begin at the present time: a new
launch does not know an earlier cluster of its name, but its followers do."""


class FeedSender:
    """The sending half of a feed. One user, one thread."""

    def __init__(self, link: ProcessLink, wall_time: Callable[[], float]) -> None:
        """Send over `link`; `wall_time` returns seconds since 1970."""
        self.link = link
        self._wall_time = wall_time
        self._first_seq = 0
        self._num_unsendable = 0
        self._is_given_up = False

    @property
    def needs_state(self) -> bool:
        """Whether the publisher must get the whole state, and can."""
        return self.link.needs_state and not self._is_given_up

    def begin(self, first_seq: int) -> None:
        """Begin an epoch, whose numbers are `first_seq` or higher. A state comes first."""
        self._first_seq = first_seq
        self._is_given_up = False
        self.link.forget_state()

    def send_state(self, state: Sequence[Any]) -> None:
        """Send a state from `pack_state`. Its number is higher than all before, also those of
        another publisher."""
        now_s = self._wall_time()
        by_time = int(1000 * now_s) * MILLISECOND_NUMBERS
        first_seq = max(self._first_seq, self.link.last_seq + UNSAID_NUMBERS, by_time)
        self._send("begin", first_seq, now_s, state)

    def send_events(self, events: Sequence[CacheEvent]) -> None:
        """Send events as one batch."""
        self._send("batch", self._wall_time(), pack_events(events))

    def statistics(self) -> dict[str, Any]:
        """Return the publisher's last statistics."""
        return {**self.link.statistics(), "num_unsendable_frames": self._num_unsendable}

    def _send(self, kind: str, *values: Any) -> None:
        """Send a frame, unless the publisher could not read it. Then send the whole state later;
        if that is the frame, send nothing until the next epoch."""
        try:
            frame = pack_frame(kind, *values)
        except MalformedMessageError as error:
            logger.error("events are not published: %s", error)
            self._num_unsendable += 1
            self._is_given_up |= kind == "begin"
            self.link.forget_state()
        else:
            self.link.send(frame, is_state=kind == "begin")
