"""A subscriber's sockets belong to one thread at a time, also at its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcache.events.codec import EventCodec
from kvcache.events.publisher import SEQUENCE
from kvcache.events.subscriber import AsyncKVEventSubscriber, KVEventSubscriber
from kvcache.events.subscription import Subscription, Update
from kvcache.events.wire_events import ClearedEvent

NOWHERE = "tcp://127.0.0.1:1"


def test_who_is_cancelled_closes_nothing_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    seen: list[str] = []

    def poll(_subscriber: KVEventSubscriber, _timeout_s: float) -> list[Update]:
        has_begun.set()
        may_end.wait(20.0)
        seen.append("polled")
        return []

    monkeypatch.setattr(KVEventSubscriber, "poll", poll)

    async def play() -> None:
        subscriber = AsyncKVEventSubscriber(NOWHERE, NOWHERE)
        waiting = asyncio.ensure_future(anext(subscriber))
        await asyncio.to_thread(has_begun.wait, 20.0)
        waiting.cancel()
        closing = asyncio.ensure_future(subscriber.close())
        done, _ = await asyncio.wait([closing], timeout=0.5)
        seen.append("closed" if done else "still open")
        may_end.set()
        await closing

    asyncio.run(play())
    assert seen == ["still open", "polled"]


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_number_that_no_publisher_gives_is_malformed(number: int) -> None:
    codec = EventCodec((), encoding="map")
    everything = codec.encode_wire(0.0, [ClearedEvent()])
    subscription = Subscription()
    frames = [b"topic", SEQUENCE.pack(number), everything]
    assert subscription.on_live(frames, 0.0) == []
    assert subscription.on_reply([b"", *frames], 0.0) == []
    assert subscription.request(100.0) is not None
    told = subscription.statistics()
    assert told.num_malformed == (1 if number == 2**64 - 1 else 2)  # that one is an end mark, too
    assert subscription.on_live([b"topic", SEQUENCE.pack(7), everything], 0.0)
    assert subscription.is_exact
