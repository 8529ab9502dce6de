"""A coordinator's messages to its publisher: exact, even while commands are not sent yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import MalformedMessageError
from kvcache.coordinator.event_feed import LinkedEventFeed
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored
from kvcache.events.feed_frames import FeedReader, pack_frame, unpack_events, unpack_state
from kvcache.events.publisher import EventPublisher, PublisherSettings
from kvcache.events.translation import GroupKind
from kvcache.manager import KVCacheManager
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.protocol.commands import Command, Fence, Label, Reset, Unlabel
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request_content import Namespace, namespace_name

PLAIN = Namespace(0, None, None, None)
NONE_HASH = bytes(32)
BLOCK = 4


@dataclass
class Link:
    """A link to a publisher that needs the whole state when the test says so."""

    needs_state: bool = True
    last_seq: int = -1
    reader: FeedReader = field(default_factory=FeedReader)
    publisher: EventPublisher = field(
        default_factory=lambda: EventPublisher(PublisherSettings("kv@a@b"), [GroupKind("full")])
    )
    is_told: bool = False

    def send(self, frame: bytes, *, is_state: bool = False) -> None:
        if is_state:
            self.is_told, self.needs_state = True, False
        if not self.is_told:
            return
        for kind, *values in self.reader.feed(frame):
            if kind == "begin":
                self.publisher.begin(values[0], values[1], unpack_state(values[2]))
            else:
                self.publisher.publish(values[0], unpack_events(values[1]))

    def forget_state(self) -> None:
        self.is_told = False

    def poll(self) -> None:
        """Nothing waits."""

    def statistics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def held(self) -> dict[str, int]:
        return self.publisher.statistics().num_blocks


def digest(low: int) -> bytes:
    return low.to_bytes(32, "big")


def label(*lows: int) -> Label:
    """Blocks whose ids are their digests' numbers; none has a parent."""
    ids, nothing = int32_array(list(lows)), int32_array([0] * len(lows))
    return Label(
        ids,
        nothing,
        nothing,
        b"".join(map(digest, lows)),
        NONE_HASH * len(lows),
        int32_array([BLOCK] * len(lows)),
        int32_array([7] * (BLOCK * len(lows))),
        nothing,
        (namespace_name(PLAIN),),
    )


def stored(low: int, medium: str = "device") -> BlocksStored:
    tokens = np.full(BLOCK, 7, np.int32)
    return BlocksStored(0, medium, (BlockHash(digest(low)),), None, tokens, BLOCK, PLAIN)


def removed(low: int) -> BlocksRemoved:
    return BlocksRemoved(0, "device", (BlockHash(digest(low)),))


def manager() -> KVCacheManager:
    core = SimpleNamespace(num_blocks=20)
    made = SimpleNamespace(
        tiers=SimpleNamespace(block_sizes=(BLOCK,), none_hash=NONE_HASH),
        statistics=lambda: SimpleNamespace(core=core),
    )
    return cast(KVCacheManager, made)


def begun(link: Link, first_seq: int = 5, *, now_s: float = 0.0) -> LinkedEventFeed:
    """A feed whose epoch has begun with blocks 1 and 2 on the device, and 1 in host memory."""
    feed = LinkedEventFeed(link, lambda: now_s)
    feed.begin(
        manager(),
        first_seq,
        label(1, 2),
        lambda: [OffloadingEvent((), HOST_MEDIUM, False, label(1))],
    )
    feed.flush()
    return feed


def test_an_epoch_begins_with_labelled_blocks_and_tier_contents() -> None:
    link = Link()
    begun(link)
    assert link.held() == {"GPU": 2, "CPU": 1}


def test_what_happened_before_an_epoch_does_not_count() -> None:
    link = Link(needs_state=False)
    feed = begun(link)
    feed.emit(stored(3))
    feed.begin(manager(), 6, None, None)
    link.needs_state = True
    feed.flush()
    assert link.held() == {}


@pytest.mark.parametrize("num_flushes", [0, 1, 2])
@pytest.mark.parametrize("message", [None, Fence("client")])
def test_what_ranks_are_told_later_is_stated_now(num_flushes: int, message: Command | None) -> None:
    """Events are sent at once, labels with the next message: a snapshot in between has both."""
    link = Link(needs_state=False)
    feed = begun(link)
    feed.emit(stored(3))
    feed.emit(removed(2))
    feed.emit(stored(4, "host"))
    if message is not None:
        feed.follow((message,))
    for _ in range(num_flushes):
        feed.on_tick()
    link.needs_state = True
    feed.on_tick()
    assert link.held() == {"GPU": 2, "CPU": 1}
    feed.follow((Unlabel(int32_array([2])), label(3)))
    feed.emit(removed(1))
    feed.emit(removed(3))
    feed.flush()
    assert link.held() == {"CPU": 1}
    assert link.publisher.statistics().num_unknown_removals == 0


def test_a_clear_that_ranks_have_not_been_told_leaves_tiers() -> None:
    link = Link(needs_state=False)
    feed = begun(link)
    feed.emit(AllBlocksCleared())
    feed.on_tick()
    link.needs_state = True
    feed.on_tick()
    assert link.held() == {"CPU": 1}
    feed.follow((Reset(1),))
    feed.emit(stored(5))
    feed.flush()
    assert link.held() == {"GPU": 1, "CPU": 1}


def test_what_ranks_have_been_told_is_not_said_twice() -> None:
    link = Link(needs_state=False)
    feed = begun(link)
    feed.emit(stored(3))
    feed.follow((label(3),))
    feed.emit(stored(4, "host"))
    link.needs_state = True
    feed.flush()
    assert link.publisher.statistics().num_batches == 1


def test_numbers_are_above_those_of_the_epoch_and_of_every_publisher_before() -> None:
    for link, first_seq, lowest in ((Link(), 77, 77), (Link(last_seq=10**9), 77, 10**9)):
        begun(link, first_seq)
        assert link.publisher.last_seq >= lowest


def test_a_new_launch_numbers_events_above_the_last_one() -> None:
    first, second = Link(), Link()
    feed = begun(first, 1 << 40, now_s=1_800_000_000.0)
    for _ in range(100):
        feed.emit(stored(3))
        feed.flush()
    begun(second, 1 << 40, now_s=1_800_000_000.1)
    assert first.publisher.last_seq + 100 < second.publisher.last_seq < 2**53


def test_events_that_no_publisher_could_read_cost_a_statement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link()
    feed = begun(link)
    feed.emit(stored(3))
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.events.feed_frames.MAX_FRAME_BYTES", 50)
        feed.flush()
    assert (link.is_told, link.held()) == (False, {"GPU": 2, "CPU": 1})
    link.needs_state = True
    feed.emit(stored(4))
    feed.flush()
    assert link.held() == {"GPU": 4, "CPU": 1}
    assert statistics_of(feed) == 1


def test_a_statement_that_no_publisher_could_read_is_tried_once_in_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link(needs_state=False)
    feed = begun(link)
    link.needs_state = True
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.events.feed_frames.MAX_FRAME_BYTES", 50)
        for _ in range(3):
            feed.on_tick()
        assert statistics_of(feed) == 1
    feed.on_tick()
    assert link.held() == {}
    feed.begin(manager(), 6, label(1), None)
    feed.on_tick()
    assert link.held() == {"GPU": 1}


def statistics_of(feed: LinkedEventFeed) -> int:
    """Return how many frames could not be sent."""
    told = feed.statistics()
    count: int = told["num_unsendable_frames"]
    return count


@pytest.mark.parametrize("value", [2**64, "\ud800", object()])
def test_a_frame_that_cannot_be_packed_is_an_error_of_ours(value: object) -> None:
    with pytest.raises(MalformedMessageError, match=r"^a frame of kind batch cannot be packed: "):
        pack_frame("batch", value)
