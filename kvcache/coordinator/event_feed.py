"""The cache events of one coordinator, epoch after epoch, in batches for the publisher.

The managers send their events here; the publisher is in another process. Knows the label of every
block, because a new subscriber needs the whole state. Never waits for a publisher: a publisher that
is missing or slow gets the whole state later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.core import AllBlocksCleared, CacheEvent
from kvcache.events.feed_frames import pack_state, unpack_state
from kvcache.events.feed_sender import FeedSender
from kvcache.events.process_link import ProcessLink
from kvcache.manager import KVCacheManager
from kvcache.offload.events import EVENT_MEDIA, OffloadingEvent
from kvcache.offload.specs import DEVICE_MEDIUM
from kvcache.protocol.commands import Command, Label, Reset, Unlabel
from kvcache.protocol.labels import LabelTable

_ON_DEVICE: Final = EVENT_MEDIA[DEVICE_MEDIUM]

TierState = Callable[[], Sequence[OffloadingEvent]]
"""Returns the contents of the tiers below the device, parents first."""


class EventFeed:
    """The receiver of a coordinator's cache events, called inside a step: never blocks.

    This one publishes nothing.
    """

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
        return None

    def close(self) -> None:
        """Stop publishing."""


class LinkedEventFeed(EventFeed):
    """Sends events to a publisher over a link. One user, one thread."""

    def __init__(
        self, link: ProcessLink, wall_time: Callable[[], float] = time.time, *, block_size: int = 0
    ) -> None:
        """Send to the publisher at the end of `link`; `wall_time` returns seconds since 1970.
        `block_size` is that of the published group, for the statistics."""
        self._block_size = block_size
        self._sender = FeedSender(link, wall_time)
        # Invariant: `_labels`, followed by `_ahead` and `_pending[_num_followed:]`, are the cached
        # blocks of the device. Events are sent at once, labels come with the next message.
        self._pending: list[CacheEvent] = []
        self._num_followed = 0
        self._ahead: list[CacheEvent] = []
        self._labels: LabelTable | None = None
        self._tiers: TierState | None = None
        self._block_sizes: tuple[int, ...] = ()
        self._none_hash = b""

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
        self._pending.clear()
        self._are_followed()
        self._sender.begin(first_seq)

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
        if self._sender.needs_state:
            self._state(self._labels)
        elif self._pending:
            self._sender.send_events(self._pending)
        self._ahead += filter(_is_of_device, self._pending[self._num_followed :])
        self._pending.clear()
        self._num_followed = 0

    def on_tick(self) -> None:
        """Restart the publisher if needed."""
        self._sender.link.poll()
        self.flush()

    def statistics(self) -> dict[str, Any] | None:
        """Return the publisher's last statistics."""
        return {**self._sender.statistics(), "block_size": self._block_size}

    def close(self) -> None:
        """End the publisher."""
        self._labels = None
        self._sender.link.close()

    def _state(self, labels: LabelTable) -> None:
        """Send the whole state: labels, and events since."""
        ids = int32_array(np.arange(labels.num_blocks))
        ids = ids[labels.are_labelled(ids)]
        on_device = OffloadingEvent((), DEVICE_MEDIUM, False, labels.labels_of(ids))
        below = () if self._tiers is None else self._tiers()
        shape = (self._block_sizes, self._none_hash)
        self._sender.send_state(pack_state((on_device, *below), *shape))
        ahead = [*self._ahead, *filter(_is_of_device, self._pending[self._num_followed :])]
        if AllBlocksCleared() in ahead:
            ahead += unpack_state(pack_state(below, *shape))  # it clears every medium
        if ahead:
            self._sender.send_events(ahead)

    def _are_followed(self) -> None:
        self._ahead.clear()
        self._num_followed = len(self._pending)


def _is_of_device(event: CacheEvent) -> bool:
    return isinstance(event, AllBlocksCleared) or event.medium == _ON_DEVICE
