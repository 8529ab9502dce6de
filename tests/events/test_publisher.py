"""A publisher: numbers, batches that can be requested again, and snapshots of the state."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.base.errors import ConfigurationError, InvalidInputError
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.events.decoding import decode_batch
from kvcache.events.mirror import CacheMirror
from kvcache.events.publisher import END_MARK, SEQUENCE, EventPublisher, Frames, PublisherSettings
from kvcache.events.translation import GroupKind
from kvcache.events.wire_events import ClearedEvent, StoredEvent
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request_content import Namespace

PLAIN = Namespace(0, None, None, None)


def digest(low: int) -> BlockHash:
    return BlockHash(low.to_bytes(32, "big"))


def stored(*lows: int, parent: int | None = None, group: int = 0) -> BlocksStored:
    return BlocksStored(
        group,
        "device",
        tuple(map(digest, lows)),
        None if parent is None else digest(parent),
        np.arange(4 * len(lows), dtype=np.int32),
        4,
        PLAIN,
    )


def publisher(**changes: object) -> EventPublisher:
    kinds = [GroupKind("sliding_window", 8), GroupKind("full"), GroupKind("full")]
    made = EventPublisher(PublisherSettings("kv@a@b", **changes), kinds)  # type: ignore[arg-type]
    made.begin(100, 1.0, ())
    return made


def number_of(frames: Frames) -> int:
    (value,) = SEQUENCE.unpack(frames[-2])
    return int(value)


def ask(made: EventPublisher, seq: int) -> list[int]:
    """The numbers of an answer, without its end mark."""
    answer = made.answer([b"me", b"", SEQUENCE.pack(seq)], 2.0)
    assert answer[-1] == [b"me", b"", b"", END_MARK, b""]
    assert all(frames[:3] == [b"me", b"", b"kv@a@b"] for frames in answer[:-1])
    return [number_of(frames) for frames in answer[:-1]]


def test_messages_are_topic_number_and_payload() -> None:
    made = publisher(publish_groups="all")
    frames = made.publish(7.0, [stored(1, 2, group=1)])
    assert frames[:2] == [b"kv@a@b", SEQUENCE.pack(101)]
    batch = decode_batch(frames[2])
    assert (batch.time_s, len(batch.events)) == (7.0, 1)
    assert number_of(made.heartbeat(8.0)) == 102


def test_only_the_first_full_group_is_told_and_is_group_0() -> None:
    made = publisher()
    assert made.publish(7.0, [stored(1, group=0), stored(2, group=2)]) == []
    (event,) = decode_batch(made.publish(7.0, [stored(1, group=0), stored(3, group=1)])[2]).events
    assert isinstance(event, StoredEvent)
    assert (event.group_idx, event.spec_kind, event.block_hashes.tolist()) == (
        0,
        "full_attention",
        [3],
    )
    assert made.last_seq == 101


def test_kept_batches_are_answered_one_by_one() -> None:
    made = publisher(history_batches=3)
    for low in range(1, 6):
        made.publish(1.0, [stored(low, group=1)])
    assert ask(made, 103) == [103, 104, 105]
    assert ask(made, 106) == []
    assert made.statistics().num_replays == 2


@pytest.mark.parametrize("seq", [0, 102, 108, 2**63])
def test_requests_for_dropped_batches_are_answered_with_the_whole_state(seq: int) -> None:
    made = publisher(history_batches=3)
    for low in range(1, 6):
        made.publish(1.0, [stored(low, group=1)])
    made.publish(1.0, [removed_in_group_1(3)])
    answer = made.answer([b"me", b"", SEQUENCE.pack(seq)], 2.0)
    assert [number_of(frames) for frames in answer[:-1]] == [106]
    batch = decode_batch(answer[0][-1])
    assert batch.is_restatement
    stored_events = [event for event in batch.events if isinstance(event, StoredEvent)]
    hashes = [value for event in stored_events for value in event.block_hashes.tolist()]
    assert sorted(hashes) == [1, 2, 4, 5]
    mirror = CacheMirror()
    mirror.apply(batch.events)
    assert mirror.checksum == made.statistics().checksum


def removed_in_group_1(low: int) -> BlocksRemoved:
    return BlocksRemoved(1, "device", (digest(low),))


def test_history_is_bounded_in_bytes_and_keeps_the_newest() -> None:
    made = publisher(history_bytes=1)
    made.publish(1.0, [stored(1, group=1)])
    assert ask(made, 101) == [101]
    statistics = made.statistics()
    assert (statistics.history_batches, statistics.num_blocks) == (1, {"GPU": 1})


def test_a_request_without_delimiter_is_served_too() -> None:
    made = publisher()
    made.publish(1.0, [stored(1, group=1)])
    answer = made.answer([b"me", SEQUENCE.pack(101)], 2.0)
    assert [number_of(frames) for frames in answer[:-1]] == [101]


@pytest.mark.parametrize(
    "request_frames",
    [
        [],
        [b"me"],
        [b"me", b"short"],
        [b"me", b"", b"123456789"],
        [b"me", b"x", SEQUENCE.pack(1)],
        [b"me", b"", SEQUENCE.pack(1), b""],
    ],
)
def test_invalid_requests_are_counted(request_frames: list[bytes]) -> None:
    made = publisher()
    before = made.statistics()
    assert made.answer(request_frames, 2.0) == []
    assert made.statistics().num_malformed_requests == 1
    assert made.statistics().last_seq == before.last_seq


def test_before_anything_is_published_an_answer_is_its_end() -> None:
    made = EventPublisher(PublisherSettings("kv@a@b"), [GroupKind("full")])
    assert made.answer([b"me", b"", SEQUENCE.pack(0)], 2.0) == [[b"me", b"", b"", END_MARK, b""]]
    assert made.statistics().last_seq == -1


def test_an_epoch_begins_with_everything_under_a_higher_number() -> None:
    made = publisher()
    made.publish(1.0, [stored(1, 2, group=1)])
    frames = made.begin(5000, 2.0, [AllBlocksCleared(), stored(9, parent=8, group=1)])
    assert number_of(frames) == 5000
    events = decode_batch(frames[2]).events
    assert isinstance(events[0], ClearedEvent)
    assert [e.block_hashes.tolist() for e in events[1:]] == [[9]]  # type: ignore[union-attr]
    assert number_of(made.begin(200, 3.0, ())) == 5001
    assert ask(made, 5001) == [5001]


def test_a_snapshot_states_parents_first_in_long_chains() -> None:
    made = publisher()
    events: list[CacheEvent] = [stored(4, parent=3, group=1), stored(2, 3, parent=1, group=1)]
    made.publish(1.0, [*events, stored(1, group=1), stored(7, parent=2, group=1)])
    answer = made.answer([b"me", b"", SEQUENCE.pack(0)], 2.0)
    _, *chains = decode_batch(answer[0][-1]).events
    found = [(e.parent_block_hash, e.block_hashes.tolist()) for e in chains]  # type: ignore[union-attr]
    assert found in ([(None, [1, 2, 3, 4]), (2, [7])], [(None, [1, 2, 7]), (2, [3, 4])])


def test_one_block_per_event_names_each_parent() -> None:
    made = publisher(one_block_per_event=True)
    batch = decode_batch(made.publish(1.0, [stored(1, 2, 3, parent=9, group=1)])[2])
    found = [(e.parent_block_hash, e.block_hashes.tolist()) for e in batch.events]  # type: ignore[union-attr]
    assert found == [(9, [1]), (1, [2]), (2, [3])]


def test_an_event_that_is_none_publishes_nothing() -> None:
    made = publisher()
    before = made.statistics()
    with pytest.raises(InvalidInputError):
        made.publish(1.0, [stored(1, group=1), stored(2, group=7)])
    assert made.statistics() == before


def test_removals_of_unknown_blocks_are_counted() -> None:
    made = publisher()
    made.publish(1.0, [removed_in_group_1(4)])
    assert made.statistics().num_unknown_removals == 1


@pytest.mark.parametrize("changes", [{"heartbeat_s": 0}, {"history_batches": 0}])
def test_limits_that_are_none_are_errors(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        PublisherSettings("kv@a@b", **changes)  # type: ignore[arg-type]


def test_numbers_that_routers_cannot_read_are_an_error() -> None:
    made = publisher()
    before = made.statistics()
    with pytest.raises(ConfigurationError, match="beyond"):
        made.begin(2**63, 1.0, ())
    assert made.statistics() == before
