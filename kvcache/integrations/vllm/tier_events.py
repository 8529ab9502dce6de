"""Cache events of the tiers below the device: for vLLM's own stream, and for our publisher.

    tiers ──▶ TierEvents ──▶ take() ──▶ vLLM's event stream, with the device's events
                   └───────▶ FeedSender ══▶ publisher's process ──▶ routers, late ones too

The tiers say what changed. A block is published once all its tokens are known: at its store, or,
for a block that was adopted, when a request brings them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from kvcache.base.clock import SystemClock
from kvcache.base.curve import CurveKeys
from kvcache.config.events import EventsConfig, shifted
from kvcache.core import BlocksRemoved, BlocksStored
from kvcache.events.feed_frames import pack_state
from kvcache.events.feed_sender import FeedSender
from kvcache.events.process_link import ProcessLink
from kvcache.events.publisher import PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.translation import GroupKind
from kvcache.integrations.vllm.block_contents import BlockContents
from kvcache.integrations.vllm.block_labels import NO_PARENT
from kvcache.integrations.vllm.observer_errors import ObserverErrors
from kvcache.offload.events import OffloadingEvent, cache_events
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import OffloadKey
from kvcache.protocol.commands import Label

OPEN_S = 15.0
"""How long the publisher may take to start."""


class TierEvents:
    """Events of one engine's tiers. One user, in the scheduler's thread.

    An error is logged and ends one call: the publisher gets the whole state next.
    """

    def __init__(
        self, contents: BlockContents, *, for_engine: bool, sender: FeedSender | None = None
    ) -> None:
        """Keep events until `take` if `for_engine`, and send them with `sender` if there is one."""
        self.contents = contents
        self._for_engine = for_engine
        self._sender = sender
        self._errors = ObserverErrors()
        self._waiting: list[BlocksStored | BlocksRemoved] = []

    def follow(self, tiers: TierHierarchy) -> None:
        """Take over what has changed in the tiers since the last call."""
        try:
            self._follow(tiers)
        except Exception as error:
            self._recover(error)

    def state_again(self, tiers: TierHierarchy) -> None:
        """Give the engine the whole state next: its stream says that every medium is empty."""
        self.follow(tiers)
        if not self._for_engine:
            return
        try:
            self._waiting = self._translated(tiers.present_events())
        except Exception as error:
            self._recover(error)

    def describe(
        self,
        tiers: TierHierarchy,
        keys: Sequence[OffloadKey],
        parents: Sequence[bytes],
        places: Sequence[tuple[Any, int]],
    ) -> Label | None:
        """Return labels of blocks that are going to be stored (`BlockContents.labels`), and
        complete those that the tiers have without tokens. None after an error: such blocks are
        stored, and not published."""
        try:
            labels = self.contents.labels(keys, parents, places)
            for tier in tiers:
                tier.contents.describe(keys, labels)
            return labels
        except Exception as error:
            self._errors.note("labels of blocks for events", error)
            return None

    def take(self) -> list[BlocksStored | BlocksRemoved]:
        """Return the events for the engine's stream since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting

    @property
    def endpoints(self) -> tuple[str, str]:
        """The publisher's addresses; empty without one."""
        return ("", "") if self._sender is None else self._sender.link.endpoints

    def statistics(self) -> dict[str, Any] | None:
        """Return the publisher's last statistics, None without one. In any thread."""
        return None if self._sender is None else self._sender.statistics()

    def close(self) -> None:
        """End the publisher."""
        if self._sender is not None:
            self._sender.link.close()

    def _follow(self, tiers: TierHierarchy) -> None:
        events = self._translated(tiers.take_events())
        if self._for_engine:
            self._waiting += events
        sender = self._sender
        if sender is None:
            return
        sender.link.poll()
        if sender.needs_state:
            shape = (self.contents.block_sizes, NO_PARENT)
            sender.send_state(pack_state(tiers.present_events(), *shape))
        elif events:
            sender.send_events(events)

    def _recover(self, error: Exception) -> None:
        self._errors.note("events of the tiers", error)
        if self._sender is not None:
            self._sender.link.forget_state()

    def _translated(self, events: Sequence[OffloadingEvent]) -> list[BlocksStored | BlocksRemoved]:
        sizes = self.contents.block_sizes
        return [found for each in events for found in cache_events(each, sizes, NO_PARENT)]


def open_publisher(
    events: EventsConfig,
    topic: str,
    kinds: Sequence[GroupKind],
    replica: int,
    keys: CurveKeys | None = None,
) -> FeedSender:
    """Return the sender of a publisher that has bound its sockets.

    `topic` is used unless `events` has one. `replica`, of several engines of a name, is added to
    the ports. With `keys`, only followers that have them can connect. Raises ConfigurationError if
    the ports cannot be bound, ClusterError if the publisher does not start.
    """
    settings = replace(PublisherSettings.of(events, topic), data_parallel_rank=replica)
    sockets = SocketSettings(
        shifted(events.endpoint, replica),
        shifted(events.replay_endpoint, replica),
        curve_keys=None if keys is None else astuple(keys),
    )
    limit_bytes = events.queue_bytes
    link = ProcessLink(settings, kinds, sockets, SystemClock(), max_waiting_bytes=limit_bytes)
    link.open(OPEN_S)
    return FeedSender(link, time.time)
