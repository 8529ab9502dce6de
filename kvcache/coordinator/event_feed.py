"""The cache events of one coordinator, epoch after epoch, in batches for the publisher.

The managers send their events here; the publisher is in another process. Knows the label of every
block, because a new subscriber needs the whole state. Never waits for a publisher: a publisher that
is missing or slow gets the whole state later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.errors import MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.core import AllBlocksCleared, CacheEvent
from kvcache.events.feed_frames import pack_events, pack_frame, pack_state, unpack_state
from kvcache.events.process_link import PublisherLink
from kvcache.manager import KVCacheManager
from kvcache.offload.events import EVENT_MEDIA, OffloadingEvent
from kvcache.offload.specs import DEVICE_MEDIUM
from kvcache.protocol.commands import Command, Label, Reset, Unlabel
from kvcache.protocol.labels import LabelTable

logger = get_logger(__name__)

UNSAID_NUMBERS: Final = 1 << 20
"""More numbers than a publisher uses before it reports them."""

MILLISECOND_NUMBERS: Final = 1 << 12
"""More numbers than a publisher uses in a millisecond. Numbers begin at the present time: a new
launch does not know an earlier cluster of its name, but its followers do."""

_ON_DEVICE: Final = EVENT_MEDIA[DEVICE_MEDIUM]

TierState = Callable[[], Sequence[OffloadingEvent]]
"""Returns the contents of the tiers below the device, parents first."""


class EventFeed(Protocol):
    """The receiver of a coordinator's cache events. Called inside a step: never blocks."""

    def emit(self, event: CacheEvent) -> None:
        """Take one event."""

    def begin(
        self, manager: KVCacheManager, first_seq: int, known: Label | None, tiers: TierState | None
    ) -> None:
        """Begin an epoch with `manager`; numbers from `first_seq` on are its own. Blocks have the
        labels `known`; earlier events no longer count."""

    def follow(self, commands: Sequence[Command]) -> None:
        """Take the commands for the ranks, in order."""

    def flush(self) -> None:
        """Send the events so far as one batch."""

    def on_tick(self) -> None:
        """Send frames that wait."""

    def statistics(self) -> dict[str, Any] | None:
        """Return statistics of the publisher, None if there is none."""

    def close(self) -> None:
        """Stop publishing."""


class NullEventFeed:
    """Publish nothing."""

    def emit(self, event: CacheEvent) -> None:
        """Forget the event."""

    def begin(
        self, manager: KVCacheManager, first_seq: int, known: Label | None, tiers: TierState | None
    ) -> None:
        """Do nothing."""

    def follow(self, commands: Sequence[Command]) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def on_tick(self) -> None:
        """Do nothing."""

    def statistics(self) -> dict[str, Any] | None:
        """Return None."""
        return None

    def close(self) -> None:
        """Do nothing."""


class LinkedEventFeed:
    """Sends events to a publisher over a link. One user, one thread."""

    def __init__(
        self,
        link: PublisherLink,
        wall_time: Callable[[], float] = time.time,
        *,
        block_size: int = 0,
    ) -> None:
        """Send to the publisher at the end of `link`; `wall_time` returns seconds since 1970.
        `block_size` is that of the published group, for the statistics."""
        self._block_size = block_size
        self._link = link
        self._wall_time = wall_time
        # Invariant: `_labels`, followed by `_ahead` and `_pending[_num_followed:]`, are the cached
        # blocks of the device. Events are sent at once, labels come with the next message.
        self._pending: list[CacheEvent] = []
        self._num_followed = 0
        self._ahead: list[CacheEvent] = []
        self._labels: LabelTable | None = None
        self._tiers: TierState | None = None
        self._block_sizes: tuple[int, ...] = ()
        self._none_hash = b""
        self._first_seq = 0
        self._num_unsendable = 0
        self._is_given_up = False

    def emit(self, event: CacheEvent) -> None:
        """Take one event."""
        self._pending.append(event)

    def begin(
        self, manager: KVCacheManager, first_seq: int, known: Label | None, tiers: TierState | None
    ) -> None:
        """Send the whole state at the next flush, as the first batch of an epoch."""
        below = manager.tiers
        self._block_sizes, self._none_hash = below.block_sizes, below.none_hash
        self._labels = LabelTable(
            manager.statistics().core.num_blocks + 1, len(self._none_hash), max(self._block_sizes)
        )
        if known is not None:
            self._labels.validate(known)
            self._labels.apply(known)
        self._tiers = tiers
        self._first_seq = first_seq
        self._is_given_up = False
        self._pending.clear()
        self._are_followed()
        self._link.forget_state()

    def follow(self, commands: Sequence[Command]) -> None:
        """Follow the labels of every block."""
        labels = self._labels
        if labels is None:
            return
        for command in commands:
            match command:
                case Label():
                    labels.apply(command)
                case Unlabel():
                    labels.withdraw(command.block_ids)
                case Reset():
                    labels.reset()
                case _:
                    continue
            # Commands and events are taken together, so all labels are here.
            self._are_followed()

    def flush(self) -> None:
        """Send events, or the whole state to a publisher without one."""
        if self._labels is None:
            return
        if self._link.needs_state and not self._is_given_up:
            self._state(self._labels)
        elif self._pending:
            self._send("batch", self._wall_time(), pack_events(self._pending))
        self._ahead += filter(_is_of_device, self._pending[self._num_followed :])
        self._pending.clear()
        self._num_followed = 0

    def on_tick(self) -> None:
        """Restart the publisher if needed."""
        self._link.poll()
        self.flush()

    def statistics(self) -> dict[str, Any] | None:
        """Return the publisher's last statistics."""
        own = {"block_size": self._block_size, "num_unsendable_frames": self._num_unsendable}
        return {**self._link.statistics(), **own}

    def close(self) -> None:
        """End the publisher."""
        self._labels = None
        self._link.close()

    def _state(self, labels: LabelTable) -> None:
        """Send the whole state: labels, and events since."""
        now_s = self._wall_time()
        ids = int32_array(np.arange(labels.num_blocks))
        ids = ids[labels.are_labelled(ids)]
        on_device = OffloadingEvent((), DEVICE_MEDIUM, False, labels.labels_of(ids))
        below = () if self._tiers is None else self._tiers()
        shape = (self._block_sizes, self._none_hash)
        # Numbers only rise, also for a new publisher.
        by_time = int(1000 * now_s) * MILLISECOND_NUMBERS
        first_seq = max(self._first_seq, self._link.last_seq + UNSAID_NUMBERS, by_time)
        state = pack_state((on_device, *below), *shape)
        self._send("begin", first_seq, now_s, state)
        ahead = [*self._ahead, *filter(_is_of_device, self._pending[self._num_followed :])]
        if AllBlocksCleared() in ahead:
            ahead += unpack_state(pack_state(below, *shape))  # it clears every medium
        if ahead:
            self._send("batch", now_s, pack_events(ahead))

    def _send(self, kind: str, *values: Any) -> None:
        """Send a frame, unless the publisher could not read it. Then send the whole state later;
        if that is the frame, send nothing until the next epoch."""
        try:
            frame = pack_frame(kind, *values)
        except MalformedMessageError as error:
            logger.error("events are not published: %s", error)
            self._num_unsendable += 1
            self._is_given_up |= kind == "begin"
            self._link.forget_state()
        else:
            self._link.send(frame, is_state=kind == "begin")

    def _are_followed(self) -> None:
        self._ahead.clear()
        self._num_followed = len(self._pending)


def _is_of_device(event: CacheEvent) -> bool:
    return isinstance(event, AllBlocksCleared) or event.medium == _ON_DEVICE
