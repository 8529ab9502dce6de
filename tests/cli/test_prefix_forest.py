"""Prominent prefixes, against a count block by block; rates and checksums of a watch."""

from __future__ import annotations

import random

import pytest

from actors.cli.events import EventTally, PrefixForest, PrefixRow
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.events.publisher import EventPublisher, PublisherSettings
from kvcache.events.subscription import Subscription, Update
from kvcache.events.translation import GroupKind, short_hash
from tests.events.event_world import BLOCK, WIRE_MEDIA, Cache

SETTINGS = PublisherSettings(topic="kv@test@model")


class Followed:
    """A cache, its publisher, and a subscription that misses nothing."""

    def __init__(self, seed: int) -> None:
        self.cache = Cache(random.Random(seed))
        self.publisher = EventPublisher(SETTINGS, [GroupKind("full")])
        self.subscription = Subscription()
        self.updates: list[Update] = []
        self.take(self.publisher.begin(0, 0.0, self.cache.state()))

    def act(self) -> None:
        self.take(self.publisher.publish(0.0, self.cache.act()))

    def restate(self) -> None:
        self.take(self.publisher.begin(1 << 40, 0.0, self.cache.state()))

    def take(self, frames: list[bytes]) -> None:
        if frames:
            self.updates += self.subscription.on_live(frames, 0.0)

    def present(self) -> set[bytes]:
        return {digest for medium in self.cache.media.values() for digest in medium}

    def rows(self) -> dict[int, PrefixRow]:
        """Return a row of every block, counted one by one."""
        there, known = self.present(), self.cache.known
        found = {}
        for digest in there:
            length, above = 1, known[digest].parent
            while above is not None and above in there:
                length, above = length + 1, known[above].parent
            media = [WIRE_MEDIA[m] for m, blocks in self.cache.media.items() if digest in blocks]
            found[short_hash(digest)] = PrefixRow(
                short_hash(digest),
                length,
                BLOCK * length,
                sum(known[other].parent == digest for other in there),
                "adapter" if known[digest].namespace.lora else None,
                tuple(sorted(media)),
            )
        return found


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_counting_block_by_block_finds(seed: int) -> None:
    followed, forest = Followed(seed), PrefixForest()
    for step in range(150):
        followed.act()
        if step == 100:
            followed.restate()
        for update in followed.updates:
            forest.follow(update.batch.events)
        followed.updates.clear()
        rows = followed.rows()
        top = forest.top(4)
        assert len(forest) == len(rows)
        for row in (*top.most_children, *top.longest, *top.newest):
            counted = rows[row.block_hash]
            assert (row.num_children, row.media, row.lora_name) == (
                counted.num_children,
                counted.media,
                counted.lora_name,
            )
        branching = sorted((row.num_children for row in rows.values()), reverse=True)
        assert [row.num_children for row in top.most_children] == [
            count for count in branching if count > 1
        ][:4]
        if step >= 100:
            continue  # the longest prefix after removed parents depends on the order of events
        ends = sorted(row.num_blocks for row in rows.values() if not row.num_children)
        assert len(top.longest) == min(4, len(ends))


def test_lengths_and_newest_are_those_of_the_chains() -> None:
    followed, forest = Followed(0), PrefixForest()
    cache = followed.cache
    cache.choice.seed(3)
    while len(cache.media["device"]) < 12:
        followed.take(followed.publisher.publish(0.0, cache.store()))
    for update in followed.updates:
        forest.follow(update.batch.events)
    rows = followed.rows()
    lengths = sorted(
        (row.num_blocks for row in rows.values() if not row.num_children), reverse=True
    )
    top = forest.top(100)
    assert [row.num_blocks for row in top.longest] == lengths
    assert set(top.longest) == set(top.newest)
    assert all(rows[row.block_hash] == row for row in top.longest)
    last_stored = list(cache.media["device"])[-1]
    assert top.newest[0].block_hash == short_hash(last_stored)


def test_rates_count_new_events_and_not_snapshots() -> None:
    followed, tally = Followed(1), EventTally(10.0)
    stored = removed = events = 0
    for _ in range(40):
        before = {m: set(blocks) for m, blocks in followed.cache.media.items()}
        made = followed.cache.act()
        stored += sum(len(set(b) - before[m]) for m, b in followed.cache.media.items())
        removed += sum(len(before[m] - set(b)) for m, b in followed.cache.media.items())
        events += len(made)
        followed.take(followed.publisher.publish(0.0, made))
    followed.restate()
    for update in followed.updates:
        tally.take(update)
    look = tally.look(14.0, followed.subscription.statistics(), None)
    assert look.traffic.events == events / 4
    # A block that one step stores and removes again gives both events.
    assert look.traffic.stored_blocks >= stored / 4 > 0
    assert look.traffic.removed_blocks >= removed / 4 > 0
    assert look.traffic.stored_blocks - look.traffic.removed_blocks == (stored - removed) / 4
    assert look.traffic.batches == len(followed.updates) / 4
    assert look.num_blocks == len(followed.present())
    again = tally.look(15.0, followed.subscription.statistics(), None)
    assert (again.traffic.events, again.traffic.batches) == (0.0, 0.0)


def test_states_are_compared_at_equal_numbers_only() -> None:
    followed, tally = Followed(2), EventTally(0.0)
    for _ in range(10):
        followed.act()
        tally.note(followed.subscription.last_seq, followed.subscription.mirror.checksum)
    there = followed.publisher.statistics()

    def is_same(seq: int, checksum: int) -> bool | None:
        statistics = CoordinatorStatistics(events={"last_seq": seq, "checksum": checksum})
        return tally.look(1.0, followed.subscription.statistics(), statistics).is_same_state

    assert is_same(there.last_seq, there.checksum) is True
    assert is_same(there.last_seq, there.checksum ^ 1) is False
    assert is_same(there.last_seq + 1, there.checksum) is None
    assert tally.look(1.0, followed.subscription.statistics(), None).is_same_state is None
