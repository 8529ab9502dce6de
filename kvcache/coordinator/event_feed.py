"""What routers are told of a cache: the events of one coordinator, epoch after epoch, in batches.

Between the managers, whose event sink it is, and the publisher, which is in another process. Knows
what every block is labelled with, because a new subscriber has to be told everything. Refuses to
wait for a publisher: one that is not there, or too slow, is told the whole state later.
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
"""More than a publisher uses before it says so."""

MILLISECOND_NUMBERS: Final = 1 << 12
"""More than a publisher uses in a millisecond. Numbers begin at the time's own: a cluster that was
launched anew knows of no other before it, but those who followed that one do."""

_ON_DEVICE: Final = EVENT_MEDIA[DEVICE_MEDIUM]

TierState = Callable[[], Sequence[OffloadingEvent]]
"""Returns what the tiers below the device hold, parents first."""


class EventFeed(Protocol):
    """Whom a coordinator tells what is cached. Called inside a step: never blocks."""

    def emit(self, event: CacheEvent) -> None:
        """Take one event."""

    def begin(
        self, manager: KVCacheManager, first_seq: int, known: Label | None, tiers: TierState | None
    ) -> None:
        """An epoch begins with `manager`; numbers from `first_seq` on are its own. Blocks are
        labelled as `known` says; what events have said before does not count."""

    def follow(self, commands: Sequence[Command]) -> None:
        """Know what ranks are told, in order."""

    def flush(self) -> None:
        """Hand over what has happened, as one batch."""

    def on_tick(self) -> None:
        """Go on with what waits."""

    def statistics(self) -> dict[str, Any] | None:
        """Return statistics of the publisher, None where there is none."""

    def close(self) -> None:
        """Publish nothing any more."""


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
    """Tells a publisher at the other end of a link. One owner, one thread."""

    def __init__(
        self,
        link: PublisherLink,
        wall_time: Callable[[], float] = time.time,
        *,
        block_size: int = 0,
    ) -> None:
        """Tell the publisher at the end of `link`; `wall_time` returns seconds since 1970.
        `block_size` is that of the group that routers are told of, for the statistics."""
        self._block_size = block_size
        self._link = link
        self._wall_time = wall_time
        # Invariant: what `_labels` say, and then `_ahead` and `_pending[_num_followed:]`, is what
        # the device has cached. Blocks are told of at once, and labelled with the next message.
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
        """State everything at the next flush, as the first batch of an epoch."""
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
        """Know what every block is labelled with."""
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
        """Hand over what has happened, or everything to a publisher that knows nothing."""
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
        """Look after the publisher."""
        self._link.poll()
        self.flush()

    def statistics(self) -> dict[str, Any] | None:
        """Return what the publisher said last."""
        own = {"block_size": self._block_size, "num_unsendable_frames": self._num_unsendable}
        return {**self._link.statistics(), **own}

    def close(self) -> None:
        """End the publisher."""
        self._labels = None
        self._link.close()

    def _state(self, labels: LabelTable) -> None:
        """State everything: what is labelled, and what has happened to it since."""
        now_s = self._wall_time()
        ids = int32_array(np.arange(labels.num_blocks))
        ids = ids[labels.are_labelled(ids)]
        on_device = OffloadingEvent((), DEVICE_MEDIUM, False, labels.labels_of(ids))
        below = () if self._tiers is None else self._tiers()
        shape = (self._block_sizes, self._none_hash)
        # Numbers only go forward, also where the publisher is another one by now.
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
        """Hand a frame over. One that the publisher could not read is not: then it is told the
        whole state, and nothing until the next epoch where that is the frame."""
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
