"""A replica for routers: a cache with arbitrary changes, behind a real publisher's sockets."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Sequence

from kvcache.core import CacheEvent
from kvcache.events.feed_frames import pack_events, pack_frame, pack_state
from kvcache.events.mirror import CacheMirror
from kvcache.events.publisher import EventPublisher, PublisherSettings
from kvcache.events.publisher_process import PublisherLoop, SocketSettings
from kvcache.events.translation import EventTranslator, GroupKind
from tests.events.event_world import BLOCK, Cache, stored

HEARTBEAT_S = 0.1
PATIENCE_S = 30.0
ANYWHERE = SocketSettings("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


class Replica:
    """A cache, and the publisher's loop in a thread instead of a process."""

    def __init__(self, seed: int, *, places: SocketSettings = ANYWHERE, epoch: int = 1) -> None:
        self.cache = Cache(random.Random(seed))
        self.publish(places, epoch)

    def publish(self, places: SocketSettings, epoch: int) -> None:
        """Start publishing the whole state, with numbers of `epoch`."""
        self.feed, theirs = socket.socketpair()
        theirs.setblocking(False)
        settings = PublisherSettings(topic="kv@test@model", heartbeat_s=HEARTBEAT_S)
        loop = PublisherLoop(theirs, EventPublisher(settings, [GroupKind("full")]), places)
        self.endpoint, self.replay_endpoint = loop.bind()
        self.thread = threading.Thread(target=self._run, args=(loop, theirs), daemon=True)
        self.thread.start()
        nothing = pack_state((), (BLOCK,), bytes(32))
        self.feed.sendall(pack_frame("begin", epoch << 40, 0.0, nothing))
        self.tell(self.state())

    @property
    def places(self) -> SocketSettings:
        return SocketSettings(self.endpoint, self.replay_endpoint)

    def state(self) -> list[CacheEvent]:
        """Return events with the whole state."""
        known, media = self.cache.known, self.cache.media
        return [stored([known[digest]], medium) for medium in media for digest in media[medium]]

    def checksum(self) -> int:
        """Return the leading blocks that are cached, whatever was published."""
        mirror = CacheMirror()
        mirror.apply(EventTranslator([GroupKind("full")]).translate(self.state()))
        return mirror.checksum

    def tell(self, events: Sequence[CacheEvent]) -> None:
        if events:
            self.feed.sendall(pack_frame("batch", 0.0, pack_events(events)))

    def close(self) -> None:
        """Stop; the addresses are free when this returns."""
        self.feed.close()
        self.thread.join()

    @staticmethod
    def _run(loop: PublisherLoop, theirs: socket.socket) -> None:
        with theirs:
            loop.run()
