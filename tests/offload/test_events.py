"""Events of tiers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvcache.base.errors import InvalidInputError
from kvcache.core import BlocksRemoved, BlocksStored
from kvcache.offload import (
    LabelShape,
    OffloadingEvent,
    TierManager,
    TierOptions,
    cache_events,
    label_keys,
    make_offload_key,
)
from kvcache.protocol.labels import label_rows
from kvcache.requests.request import Namespace
from tests.offload.label_chains import NONE_HASH, SIZE, chain_label

SHAPE = LabelShape(32, SIZE)


def told(event: OffloadingEvent) -> list[BlocksStored | BlocksRemoved]:
    return cache_events(event, [SIZE, SIZE], NONE_HASH)


def make_tier(num_slots: int = 4) -> TierManager:
    return TierManager(TierOptions("host", num_slots, labels=SHAPE))


def test_a_stored_chain_is_one_event_with_its_tokens() -> None:
    tier, label = make_tier(), chain_label(3, salt="s", namespace=Namespace(0, None, "s", None))
    keys = label_keys(label)
    reserved = tier.reserve(keys, labels=label)
    assert reserved is not None
    assert tier.take_events() == ()
    tier.complete_store(keys)
    (event,) = tier.take_events()
    assert (event.keys, event.medium, event.removed) == (tuple(keys), "host", False)
    (stored,) = told(event)
    assert isinstance(stored, BlocksStored)
    assert (stored.medium, stored.group, stored.block_size) == ("host", 0, SIZE)
    assert b"".join(stored.digests) == label.digests
    assert stored.parent_digest is None
    assert stored.token_ids.tolist() == label.token_ids.tolist()
    assert stored.namespace == Namespace(0, None, "s", None)
    assert stored.extra_keys == ((("cache_salt", "s"),), None, None)


def test_what_goes_is_told_and_what_never_came_is_not() -> None:
    tier = make_tier(num_slots=2)
    first, second = chain_label(2), chain_label(2, first_token=100)
    keys, others = label_keys(first), label_keys(second)
    assert tier.reserve(keys, labels=first) is not None
    tier.complete_store(keys[:1])
    tier.complete_store(keys[1:], success=False)
    tier.take_events()
    assert tier.reserve(others, labels=second) is not None
    (gone,) = tier.take_events()
    assert (gone.keys, gone.removed) == ((keys[0],), True)
    (removed,) = told(gone)
    assert isinstance(removed, BlocksRemoved)
    assert list(removed.digests) == [first.digests[:32]]
    tier.complete_store(others)
    tier.take_events()
    tier.reset_cache()
    (event,) = tier.take_events()
    assert event.removed and set(event.keys) == set(others)


def test_swapped_content_without_a_label_is_not_told() -> None:
    tier = make_tier()
    key = make_offload_key(b"swapped", 0)
    assert tier.reserve([key]) is not None
    tier.complete_store([key])
    tier.forget([key])
    assert tier.take_events() == ()


def test_a_tier_can_say_all_that_it_holds_again() -> None:
    tier, label = make_tier(), chain_label(3)
    keys = label_keys(label)
    assert tier.contents.present_event() is None
    tier.reserve(keys, labels=label)
    assert tier.contents.present_event() is None
    tier.complete_store(keys)
    event = tier.contents.present_event()
    assert event is not None
    (stored,) = told(event)
    assert isinstance(stored, BlocksStored)
    assert b"".join(stored.digests) == label.digests
    found = tier.contents.labels_at(tier.slots.addresses_of(keys[1:]))
    assert found.token_ids.tolist() == label.token_ids[SIZE:].tolist()


def test_repeated_events_have_parents_first() -> None:
    tier, label = make_tier(num_slots=8), chain_label(5)
    backwards = label_rows(label, np.array([4, 2, 3, 0, 1]))
    tier.adopt(label_keys(backwards), None, backwards)
    for event in (*tier.take_events(), tier.contents.present_event()):
        assert event is not None
        (stored,) = told(event)
        assert isinstance(stored, BlocksStored)
        assert b"".join(stored.digests) == label.digests
        assert stored.token_ids.tolist() == label.token_ids.tolist()


def test_breaks_in_the_chain_are_events_of_their_own() -> None:
    label = chain_label(6)
    rows = label_rows(label, np.array([0, 1, 3, 4, 5]))
    counts = rows.token_counts.copy()
    counts[-1] = SIZE - 1
    rows = replace(rows, token_counts=counts, token_ids=rows.token_ids[:-1])
    event = OffloadingEvent(tuple(label_keys(rows)), "file", removed=False, contents=rows)
    first, second = told(event)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.medium, len(first.digests), len(second.digests)) == ("storage", 2, 2)
    assert first.parent_digest is None
    assert second.parent_digest == label.digests[2 * 32 : 3 * 32]
    assert second.token_ids.tolist() == list(range(3 * SIZE, 5 * SIZE))
    assert told(replace(event, contents=None)) == []


def test_an_event_of_an_unknown_group_is_refused() -> None:
    label = chain_label(1, group=5)
    event = OffloadingEvent(tuple(label_keys(label)), "host", removed=False, contents=label)
    with pytest.raises(InvalidInputError, match="tier event for group 5, block sizes of 2 groups"):
        told(event)


def test_labels_that_do_not_fit_are_refused_and_change_nothing() -> None:
    tier, label = make_tier(), chain_label(3)
    keys = label_keys(label)
    with pytest.raises(InvalidInputError) as caught:
        tier.reserve(keys[:2], labels=label)
    assert str(caught.value) == (
        "labels of 3 blocks for 2 keys: pass one row for each key, in order"
    )
    small = TierManager(TierOptions("host", 4, labels=LabelShape(32, SIZE - 1)))
    with pytest.raises(InvalidInputError, match="label of a block of 4 tokens, the largest"):
        small.reserve(keys, labels=label)
    assert tier.slots.present_keys() == small.slots.present_keys() == []
