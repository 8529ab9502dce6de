"""A mirror and an index stay as small as the cache, whatever the events are."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvcache.events.mirror import CacheMirror
from kvcache.events.prefix_index import PrefixIndex
from kvcache.events.subscription import Update
from kvcache.events.wire_events import EventBatch, RemovedEvent, StoredEvent, WireEvent


def stored(low: int, token: int = 1, salt: str | None = None) -> StoredEvent:
    tokens = np.full(4, token, np.int32)
    return StoredEvent(np.array([low], np.uint64), None, tokens, 4, "GPU", cache_salt=salt)


def removed(low: int) -> RemovedEvent:
    return RemovedEvent(np.array([low], np.uint64), "GPU")


def test_salts_that_come_and_go_are_forgotten() -> None:
    mirror, other = CacheMirror(), CacheMirror()
    kept: list[WireEvent] = [stored(10**6 + i, salt=f"kept {i % 3}") for i in range(6)]
    mirror.apply(kept)
    other.apply(kept)
    tracemalloc.start()
    for i in range(1, 6_000):
        mirror.apply([stored(i, salt=f"salt {i}"), removed(i)])
    assert tracemalloc.get_traced_memory()[0] < 1 << 19
    tracemalloc.stop()
    assert mirror.checksum == other.checksum
    state = mirror.state()
    salts = {e.cache_salt: len(e.block_hashes) for e in state if isinstance(e, StoredEvent)}
    assert salts == {"kept 0": 1, "kept 1": 1, "kept 2": 1}
    assert len(state) == 7
    fresh = CacheMirror()
    fresh.apply(state)
    assert fresh.checksum == mirror.checksum


def test_a_hash_that_becomes_another_block_is_only_that_one() -> None:
    index = PrefixIndex()
    events = [stored(5, token=1), stored(5, token=9)]
    index.follow("a", Update(1, EventBatch(0.0, events), False))
    assert [m.device_blocks for m in index.match([1] * 4)] == [0]
    assert [m.device_blocks for m in index.match([9] * 4)] == [1]
    index.follow("a", Update(2, EventBatch(0.0, [removed(5)]), False))
    assert [m.device_blocks for m in index.match([1] * 4)] == [0]
    assert [m.device_blocks for m in index.match([9] * 4)] == [0]
