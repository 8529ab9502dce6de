"""The next victims, known without choosing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache.policies import EntryInfo, EvictionPolicy, LooksAhead
from tests.policies.tables import WrittenTable, evict, make_policy, use
from tests.policies.test_protocol import READING

RANKED = READING
"""Policies that know the next victims without choosing."""

QUEUES = sorted({*RANKED} - {"s3fifo"})
"""Of these, policies that evict the first of a line. `s3fifo` lets some of them stay."""

NUM_ENTRIES = 60


def looking_ahead(policy: EvictionPolicy) -> Callable[[int], list[int]]:
    assert isinstance(policy, LooksAhead)
    return policy.look_ahead


def walk(policy: EvictionPolicy, table: WrittenTable, rng: random.Random) -> None:
    """Apply an operation: insert, use, evict, evict and put back, or drop entries."""
    inside = policy.order()
    match rng.randrange(5):
        case 0:
            entries = [e for e in range(NUM_ENTRIES) if e not in policy]
            for entry in rng.sample(entries, min(len(entries), 5)):
                table.hold(entry, rng.randrange(200))
                policy.insert([entry])
        case 1:
            use(policy, *rng.sample(inside, min(len(inside), 4)))
        case 2:
            evict(policy, rng.randrange(4))
        case 3:
            chosen = evict(policy, 4)
            policy.put_back(chosen[rng.randrange(2) :])
        case _:
            policy.discard(rng.sample(inside, min(len(inside), 1)))


@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.seeds(4)
def test_the_next_victims_are_among_those_ahead(name: str, seed: int) -> None:
    policy, table = make_policy(name, NUM_ENTRIES)
    look_ahead, rng = looking_ahead(policy), random.Random(seed)
    num_lines = 2 if name == "arc" else 1
    for _ in range(300):
        walk(policy, table, rng)
        count = rng.choice([1, 3, 3, 3, 10])
        ahead = look_ahead(count)
        assert set(policy.order()[:count]) <= set(ahead)
        assert len(set(ahead)) == len(ahead) <= num_lines * count


@pytest.mark.parametrize("name", RANKED)
def test_to_look_ahead_changes_no_order(name: str) -> None:
    policies = [make_policy(name, NUM_ENTRIES) for _ in range(2)]
    looked_at = looking_ahead(policies[0][0])
    chances = [random.Random(7), random.Random(7)]
    for _ in range(300):
        for (policy, table), rng in zip(policies, chances, strict=True):
            walk(policy, table, rng)
        assert set(looked_at(5)) <= set(policies[0][0].order())
        assert policies[0][0].order() == policies[1][0].order()


@pytest.mark.parametrize("name", RANKED)
def test_to_look_ahead_again_reads_no_entry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = make_policy(name, NUM_ENTRIES)
    policy.insert(range(NUM_ENTRIES))
    look_ahead = looking_ahead(policy)
    before = look_ahead(20)

    def refuse(table: WrittenTable, entry: int) -> EntryInfo:
        raise AssertionError(f"entry {entry} is read")

    monkeypatch.setattr(WrittenTable, "describe", refuse)
    assert look_ahead(20) == before
