"""The connector's block store against ranks that are plain dictionaries: no vLLM, no bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.integrations.vllm.step_messages import Inventory, RankReports, StepCommands

TOKENS = 4
NUM_SLOTS = 8


def setting_of(num_ranks: int = 2, **offload: Any) -> EngineSetting:
    options = ConnectorOptions.parse({"offload": offload})
    return EngineSetting(options, "model", TOKENS, num_blocks=99, num_ranks=num_ranks)


def request_of(name: str, num_tokens: int, content: str = "a") -> Any:
    """A request as the store sees it; equal contents have equal hashes."""
    hashes = [sha256(f"{content}{i}".encode()).digest() for i in range(num_tokens // TOKENS)]
    return SimpleNamespace(
        request_id=name, num_tokens=num_tokens, num_computed_tokens=0, block_hashes=hashes
    )


@dataclass
class FakeRank:
    """Slots with the digest they hold; `wrong` are slots whose bytes have changed."""

    slots: dict[int, bytes] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)

    def obey(self, commands: StepCommands) -> RankReports:
        if commands.forgets_all:
            self.slots.clear()
            self.sealed.clear()
        for slot in commands.forgotten:
            self.slots.pop(slot, None)
            self.sealed.discard(slot)
        self.sealed |= {slot for slot in commands.sealed if slot in self.slots}
        lost = {
            digest
            for slot, digest in zip(commands.load_slots, commands.load_digests, strict=True)
            if self.slots.get(slot) != digest or slot in self.wrong
        }
        loaded = {commands.step: 1} if commands.load_slots else {}
        reports = RankReports(loaded=loaded, lost=frozenset(lost))
        if not commands.store_slots:
            return reports
        if lost:
            return reports.aggregate(RankReports(not_stored=frozenset((commands.step,))))
        for slot, digest in zip(commands.store_slots, commands.store_digests, strict=True):
            self.slots[slot] = digest
            self.sealed.discard(slot)
            self.wrong.discard(slot)
        return reports.aggregate(RankReports(stored={commands.step: 1}))

    def inventory(self) -> Inventory:
        return Inventory(NUM_SLOTS, {slot: self.slots[slot] for slot in self.sealed})


class Cluster:
    """The store under test, its ranks, and a clock."""

    def __init__(self, **options: Any) -> None:
        self.time_s = 0.0
        self.ranks = [FakeRank(), FakeRank()]
        self.store = BlockStore(setting_of(**options), lambda: self.time_s)
        self.store.adopt({i: rank.inventory() for i, rank in enumerate(self.ranks)})

    def begin(self, request: Any) -> int:
        """Match a request and allocate its blocks, numbered from 10 on."""
        found = self.store.num_matched(request, 0)
        request.num_computed_tokens = found
        self.store.allocated(request, list(range(10, 30)), found)
        return found

    def commands(self, *requests: Any) -> StepCommands:
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        return self.store.commands(scheduled, lambda _: [list(range(10, 30))])

    def report(self, commands: StepCommands) -> None:
        first, second = [rank.obey(commands) for rank in self.ranks]
        self.store.reported(first.aggregate(second))

    def step(self, *requests: Any) -> StepCommands:
        commands = self.commands(*requests)
        self.report(commands)
        return commands

    def run(self, request: Any) -> int:
        found = self.begin(request)
        self.step(request)
        self.store.finished(request.request_id)
        return found


def test_a_block_is_a_hit_once_all_ranks_have_stored_it() -> None:
    cluster = Cluster()
    request = request_of("r", 13)
    assert cluster.begin(request) == 0
    commands = cluster.commands(request)
    assert len(commands.store_slots) == 3
    first, second = [rank.obey(commands) for rank in cluster.ranks]
    cluster.store.reported(first)
    assert cluster.store.num_matched(request_of("s", 13), 0) == 0
    cluster.store.reported(second)
    assert cluster.store.num_matched(request_of("s", 13), 0) == 12
    assert cluster.store.num_matched(request_of("s", 12), 0) == 8  # one token is computed
    assert cluster.step().sealed == commands.store_slots


def test_a_token_that_is_no_hashed_block_is_not_stored() -> None:
    cluster = Cluster()
    request = request_of("r", 9)
    cluster.begin(request)
    commands = cluster.store.commands({"r": 16}, lambda _: [list(range(10, 30))])  # with drafts
    assert commands.store_digests == tuple(request.block_hashes)
    cluster.report(commands)
    request.num_computed_tokens, request.num_tokens = 9, 17  # drafts were accepted
    request.block_hashes = request_of("r", 17).block_hashes
    commands = cluster.store.commands({"r": 8}, lambda _: [list(range(10, 30))])
    assert commands.store_digests == tuple(request.block_hashes[2:])
    assert commands.store_blocks == (12, 13)


def test_of_a_step_with_a_failed_load_nothing_is_kept() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 9))
    cluster.step()
    cluster.ranks[1].wrong = {0}
    longer = request_of("s", 25)
    assert cluster.begin(longer) == 8
    bad = cluster.commands(longer)
    longer.num_computed_tokens += 17
    longer.num_tokens += 4
    longer.block_hashes.append(sha256(b"more").digest())
    ahead = cluster.commands(longer)  # scheduled before the failure is known
    assert bad.store_slots and ahead.store_slots
    cluster.report(bad)
    cluster.report(ahead)
    assert cluster.store.num_matched(request_of("t", 25), 0) == 0
    assert cluster.store.num_ready == 1  # the second block of the first request
    cluster.step()
    assert {digest for rank in cluster.ranks for digest in rank.inventory().digests.values()} == {
        longer.block_hashes[1]
    }


def test_what_ranks_disagree_about_is_forgotten_on_all() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 17))
    cluster.step()
    cluster.ranks[0].slots[2] = bytes(32)
    after = BlockStore(setting_of(), lambda: 0.0)
    assert after.adopt({i: rank.inventory() for i, rank in enumerate(cluster.ranks)}) == 3
    assert after.num_matched(request_of("s", 17), 0) == 8
    assert after.commands({}, lambda _: None).forgotten == (2,)


def test_a_rank_that_is_missing_ends_the_start() -> None:
    store = BlockStore(setting_of(), lambda: 0.0)
    with pytest.raises(ConfigurationError, match="1 of 2 ranks have told of host memory"):
        store.adopt({0: Inventory(NUM_SLOTS, {})})
    with pytest.raises(ConfigurationError, match=r"of \[7, 8\] slots: give every rank the same"):
        store.adopt({0: Inventory(8, {}), 1: Inventory(7, {})})


def test_a_store_that_is_not_answered_in_time_is_given_up() -> None:
    cluster = Cluster(job_s=5.0)
    request = request_of("r", 13)
    cluster.begin(request)
    late = cluster.commands(request)
    assert cluster.store.has_unsent_commands
    cluster.time_s = 6.0
    cluster.step()
    assert not cluster.store.has_unsent_commands
    cluster.report(late)
    assert cluster.store.num_ready == 0


def test_a_reset_forgets_everything_on_all_ranks() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))
    waiting = request_of("s", 21, "b")
    cluster.begin(waiting)
    pending = cluster.commands(waiting)
    cluster.store.reset()
    assert cluster.store.has_unsent_commands
    cluster.report(pending)
    cluster.step()
    assert cluster.store.num_ready == 0
    assert [rank.slots for rank in cluster.ranks] == [{}, {}]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_hit_is_on_every_rank(seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster()
    for number in range(200):
        request = request_of(f"r{number}", draw.randrange(1, 30), draw.choice("abc"))
        cluster.begin(request)
        commands = cluster.commands(request)
        held = [rank.slots.get(slot) for rank in cluster.ranks for slot in commands.load_slots]
        assert held == list(commands.load_digests) * len(cluster.ranks)
        if draw.random() < 0.2:
            draw.choice(cluster.ranks).wrong.add(draw.randrange(NUM_SLOTS))
        cluster.report(commands)
        cluster.store.finished(request.request_id)
        if draw.random() < 0.05:
            cluster.store.reset()
            cluster.step()
        if draw.random() < 0.1:
            for rank in cluster.ranks:
                rank.slots = {slot: rank.slots[slot] for slot in rank.sealed}
            cluster.store = BlockStore(setting_of(), lambda: 0.0)
            cluster.store.adopt({i: rank.inventory() for i, rank in enumerate(cluster.ranks)})
            cluster.step()
