"""A subscriber's sockets belong to one thread at a time, also at its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcache.events.subscriber import AsyncKVEventSubscriber, KVEventSubscriber
from kvcache.events.subscription import Update

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
