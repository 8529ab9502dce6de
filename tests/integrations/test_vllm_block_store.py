"""The connector's block store against ranks that are plain dictionaries: no vLLM, no bytes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.kv_groups import KVGroups, NewTable
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.integrations.vllm.peers import PeerBlock
from kvcache.integrations.vllm.step_messages import (
    FileCommand,
    Inventory,
    LoadCommand,
    PeerMemory,
    RankCommands,
    RankReports,
    StoreCommand,
)
from kvcache.offload.keys import make_offload_key
from kvcache.protocol.messages import JobReport
from kvcache.specs import FullAttentionSpec

TOKENS = 4
NUM_SLOTS = 8
NUM_FILES = 24
KEY_BYTES = 36
TABLES = [list(range(10, 40))]
ONE_GROUP = KVGroups((FullAttentionSpec(TOKENS, 1, 1),), TOKENS)
DISK = {"directory": "/files", "capacity_per_rank": "1MiB"}

SOME_HINTS: list[Any] = [
    [{"is_over": True}],
    [{"returns_in_s": 3}],
    [{"priority": 90, "end": 8}, {"priority": 10, "start": 8, "duration_s": 4}],
    [{"priority": 999}],
    None,
]
Job = StoreCommand | LoadCommand | FileCommand


def setting_of(num_ranks: int = 2, **offload: Any) -> EngineSetting:
    groups = offload.pop("groups", ONE_GROUP)
    plain = ("adopt_after_reset",)
    extra = {key: offload.pop(key) for key in plain if key in offload}
    options = ConnectorOptions.parse({"offload": offload, **extra})
    return EngineSetting(options, "model", groups, num_blocks=99, num_ranks=num_ranks)


def request_of(name: str, num_tokens: int, content: str = "a", adapter: Any = None) -> Any:
    """A request as the store sees it; equal contents have equal hashes."""
    hashes = [sha256(f"{content}{i}".encode()).digest() for i in range(num_tokens // TOKENS)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=num_tokens,
        num_computed_tokens=0,
        block_hashes=hashes,
        lora_request=adapter,
        skip_reading_prefix_cache=False,
    )


@dataclass
class FakeRank:
    """Slots with the key they hold, files by key. `wrong` slots and files have changed. Jobs
    begin in the step that brings them, and end when `work` is called."""

    rank: int
    slots: dict[int, bytes] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    files: dict[bytes, bytes] = field(default_factory=dict)
    wrong: set[int | bytes] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    running: deque[tuple[str, Job]] = field(default_factory=deque)

    def obey(self, commands: RankCommands) -> None:
        for slot in commands.forgotten_slots:
            self.slots.pop(slot, None)
            self.sealed.discard(slot)
        for key in keys_of(commands.forgotten_keys):
            self.files.pop(key, None)
        self.sealed |= {slot for slot in commands.sealed if slot in self.slots}
        self.invalid |= set(commands.invalid_blocks)
        self.released += commands.released
        jobs: list[tuple[str, Job]] = [("spill", job) for job in commands.spills]
        jobs += [("fetch", job) for job in commands.fetches]
        jobs += [("load", job) for job in commands.loads]
        if commands.store is not None:
            jobs.append(("store", commands.store))
        for kind, job in jobs:
            if kind in ("store", "fetch"):
                for slot in job.slots:
                    self.slots.pop(slot, None)
                    self.sealed.discard(slot)
        self.running += jobs

    def work(self) -> RankReports:
        """End the oldest job, if there is one."""
        if not self.running:
            return RankReports()
        kind, job = self.running.popleft()
        failed: set[int] = set()
        if isinstance(job, StoreCommand):
            self._write(dict(zip(job.slots, job.keys, strict=True)))
        elif isinstance(job, LoadCommand):
            for slot, key, block in zip(job.slots, job.keys, job.blocks, strict=True):
                assert self.slots[slot] == key
                if slot in self.wrong:
                    failed.add(slot)
                    self.invalid.add(block)
        else:
            failed = self._move_files(kind, dict(zip(job.slots, keys_of(job.keys), strict=True)))
        lost = tuple(failed) if kind == "fetch" else ()
        report = JobReport(job.job_id, not failed, block_ids=tuple(failed), lost_ids=lost)
        return RankReports(((self.rank, report),))

    def inventory(self, num_files: int = 0) -> Inventory:
        keys = {slot: self.slots[slot] for slot in self.sealed}
        return Inventory(NUM_SLOTS, keys, num_files, tuple(self.files))

    def _write(self, keys: dict[int, bytes]) -> None:
        for slot, key in keys.items():
            self.slots[slot] = key
            self.wrong.discard(slot)

    def _move_files(self, kind: str, keys: dict[int, bytes]) -> set[int]:
        """Return the slots whose file could not be read."""
        failed = set()
        for slot, key in keys.items():
            if kind == "spill":
                assert self.slots[slot] == key
                self.files[key] = key
                self.wrong.discard(key)
            elif key in self.wrong or key not in self.files:
                self.files.pop(key, None)
                failed.add(slot)
            else:
                self._write({slot: key})
        return failed


class FakePool:
    """vLLM's pool, as far as blocks are held."""

    def __init__(self) -> None:
        self.blocks = list(range(50))
        self.held: list[int] = []

    def touch(self, blocks: list[int]) -> None:
        self.held += blocks

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held.remove(block)


def keys_of_hashes(request: Any) -> tuple[bytes, ...]:
    return tuple(digest + bytes(4) for digest in request.block_hashes)


def keys_of(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


class Cluster:
    """The store under test, its ranks, and a clock."""

    def __init__(self, *, num_files: int = 0, **options: Any) -> None:
        self.time_s = 0.0
        if num_files:
            options |= {"host_memory_per_rank": "1MiB", "disk": DISK}
        self.num_files, self.options = num_files, options
        self.ranks = [FakeRank(0), FakeRank(1)]
        self.restart()

    def restart(self) -> tuple[int, int]:
        """Begin with the blocks that the ranks have kept."""
        for rank in self.ranks:
            rank.slots = {slot: rank.slots[slot] for slot in rank.sealed if slot in rank.slots}
            rank.running.clear()
        self.store = BlockStore(setting_of(**self.options), lambda: self.time_s)
        self.pool = FakePool()
        self.store.held_blocks.bind(self.pool)
        inventories = {rank.rank: rank.inventory(self.num_files) for rank in self.ranks}
        return self.store.adopt(inventories)

    def begin(self, request: Any) -> int | None:
        """Match a request and allocate its blocks, numbered from 10 on."""
        found = self.store.num_matched(request, 0)
        if found is not None:
            request.num_computed_tokens = found
            self.store.allocated(request, TABLES, found)
        return found

    def commands(self, *requests: Any, new: tuple[NewTable, ...] = ()) -> RankCommands:
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        return self.store.commands(scheduled, lambda _: TABLES, new)

    def obey(self, commands: RankCommands) -> None:
        for rank in self.ranks:
            rank.obey(commands)

    def work(self) -> None:
        """End all jobs."""
        while any(rank.running for rank in self.ranks):
            first, second = [rank.work() for rank in self.ranks]
            self.store.reported(first.aggregate(second))

    def step(self, *requests: Any) -> RankCommands:
        commands = self.commands(*requests)
        self.obey(commands)
        self.work()
        return commands

    def settle(self) -> None:
        """Step until nothing is left to be done."""
        for _ in range(50):
            if not self.store.has_unsent_commands:
                return
            self.step()
        raise AssertionError("there is always something left to be done")

    def wait(self, request: Any) -> int:
        """Step until a request gets blocks; return how many tokens it loads."""
        for _ in range(50):
            found = self.begin(request)
            if found is not None:
                return found
            self.step()
        raise AssertionError("the request waits on and on")

    def run(self, request: Any) -> int:
        """Step until a request is through; return how many tokens it has loaded."""
        found = self.wait(request)
        self.step(request)
        self.store.finished(request.request_id)
        return found

    def run_all(self, contents: str, num_tokens: int = 21) -> None:
        """Run one request of each content, and settle after each."""
        for content in contents:
            self.run(request_of(content, num_tokens, content))
            self.settle()

    def sealed_keys(self) -> list[set[bytes]]:
        return [set(rank.inventory().slot_keys.values()) for rank in self.ranks]


def test_a_block_is_a_hit_once_all_ranks_have_stored_it() -> None:
    cluster = Cluster()
    request = request_of("r", 13)
    assert cluster.begin(request) == 0
    commands = cluster.commands(request)
    assert commands.store is not None and len(commands.store.slots) == 3
    cluster.obey(commands)
    cluster.store.reported(cluster.ranks[0].work())
    assert cluster.store.num_matched(request_of("s", 13), 0) is None
    cluster.store.reported(cluster.ranks[1].work())
    assert cluster.store.num_matched(request_of("s", 13), 0) == 12
    assert cluster.store.num_matched(request_of("s", 12), 0) == 8  # one token is computed
    assert cluster.step().sealed == commands.store.slots


def test_a_token_that_is_no_hashed_block_is_not_stored() -> None:
    cluster = Cluster()
    request = request_of("r", 9)
    cluster.begin(request)
    commands = cluster.store.commands({"r": 16}, lambda _: TABLES)  # with drafts
    assert commands.store is not None and commands.store.keys == keys_of_hashes(request)
    cluster.obey(commands)
    cluster.work()
    request.num_computed_tokens, request.num_tokens = 9, 17  # drafts were accepted
    request.block_hashes = request_of("r", 17).block_hashes
    commands = cluster.store.commands({"r": 8}, lambda _: TABLES)
    assert commands.store.keys == keys_of_hashes(request)[2:]
    assert commands.store.parents == tuple(request.block_hashes[1:3])
    assert commands.store.blocks == (12, 13)


def test_blocks_of_a_finished_request_are_kept_until_they_are_stored() -> None:
    cluster = Cluster()
    request = request_of("r", 13)
    cluster.begin(request)
    cluster.obey(cluster.commands(request))
    assert cluster.store.finished("r")
    assert cluster.commands().released == ()
    cluster.work()
    assert cluster.commands().released == ("r",)
    assert not cluster.store.finished("r")


def test_stores_whose_blocks_others_get_are_waited_for() -> None:
    cluster = Cluster()
    request = request_of("r", 13)
    cluster.begin(request)
    cluster.obey(cluster.commands(request))

    def reused(*new: NewTable) -> set[int]:
        return set(cluster.commands(new=new).reused_blocks)

    assert reused(NewTable("s", [[9, 13, 14]], is_whole=True)) == set()
    assert reused(NewTable("s", [[9, 11]], is_whole=True)) == {11}
    assert reused(NewTable("s", [[12]], is_whole=False), NewTable("t", [[10]], False)) == {10, 12}
    cluster.store.num_matched(request_of("u", 13), 8)  # vLLM has two of its blocks
    assert reused(NewTable("u", [[10, 11, 12, 13]], is_whole=True)) == {12}
    cluster.work()
    assert reused(NewTable("s", [[10, 11, 12]], is_whole=True)) == set()


def test_a_failed_load_costs_no_store_of_requests_that_wait_for_their_own() -> None:
    cluster = Cluster()
    for content in "ab":
        cluster.run(request_of(content, 9, content))
    cluster.settle()
    cluster.ranks[0].wrong = {0, 2}
    first, second = request_of("first", 9, "a"), request_of("second", 9, "b")
    assert (cluster.begin(first), cluster.begin(second)) == (8, 8)
    cluster.obey(cluster.commands())
    for rank in cluster.ranks:  # the first load ends
        cluster.store.reported(rank.work())
    first.num_computed_tokens = 0
    again = cluster.commands(first)
    assert again.store is not None and again.store.keys == keys_of_hashes(first)[:1]
    cluster.obey(again)
    cluster.work()  # the second load fails, and the store ends
    assert cluster.store.num_matched(request_of("third", 9, "a"), 0) == 8
    second.num_computed_tokens = 0
    assert cluster.step(second).store is not None
    assert cluster.store.num_matched(request_of("fourth", 9, "b"), 0) == 8


def test_a_request_whose_load_has_failed_is_computed_even_after_a_reset() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))
    cluster.settle()
    request = request_of("s", 13)
    assert cluster.begin(request) == 12
    cluster.ranks[0].wrong = {min(cluster.ranks[0].slots)}
    cluster.step()
    cluster.store.received(["s"])
    request.num_computed_tokens = 0
    for other in ("t", "u"):
        cluster.run(request_of(other, 13))
        cluster.settle()
        assert cluster.store.num_matched(request_of("v", 13), 0) == 12
        assert cluster.store.num_matched(request, 0) == 0
        cluster.store.reset()


def test_a_store_that_fails_on_one_rank_is_tried_again() -> None:
    cluster = Cluster()
    request = request_of("r", 14)
    cluster.begin(request)
    first = cluster.commands(request)
    job = first.store.job_id
    cluster.store.reported(RankReports(((0, JobReport(job, True)), (1, JobReport(job, False)))))
    assert cluster.store.num_matched(request_of("s", 14), 0) == 0
    request.num_computed_tokens = 13
    again = cluster.commands(request)
    assert again.store is not None and again.store.keys == first.store.keys


def test_what_ranks_disagree_about_is_forgotten_on_all() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 17))
    cluster.settle()
    cluster.ranks[0].slots[2] = bytes(32)
    assert cluster.restart() == (3, 0)
    assert cluster.store.num_matched(request_of("s", 17), 0) == 8
    assert cluster.commands().forgotten_slots == (2,)


def test_a_rank_that_is_missing_ends_the_start() -> None:
    store = BlockStore(setting_of(), lambda: 0.0)
    with pytest.raises(ConfigurationError, match="1 of 2 ranks have told of host memory"):
        store.adopt({0: Inventory(NUM_SLOTS, {})})


def test_the_rank_with_the_fewest_slots_decides_how_many_blocks_there_are() -> None:
    request = request_of("r", 29)
    keys = dict(enumerate(keys_of_hashes(request)))
    store = BlockStore(setting_of(), lambda: 0.0)
    shorter = {slot: key for slot, key in keys.items() if slot < 5}
    assert store.adopt({0: Inventory(8, keys), 1: Inventory(6, shorter)}) == (5, 0)
    statistics = store.statistics
    assert statistics is not None and statistics.host.num_slots == 6
    assert store.commands({}, lambda _: None).forgotten_slots == (5,)
    assert store.num_matched(request, 0) == 20


def test_a_store_that_is_not_answered_in_time_is_given_up() -> None:
    cluster = Cluster(job_s=5.0)
    request = request_of("r", 13)
    cluster.begin(request)
    cluster.obey(cluster.commands(request))
    assert cluster.store.finished("r")
    assert cluster.store.has_unsent_commands
    cluster.time_s = 6.0
    assert cluster.store.num_matched(request_of("s", 13), 0) is None
    assert cluster.commands().released == ("r",)
    assert not cluster.store.has_unsent_commands
    assert cluster.store.num_matched(request_of("t", 13), 0) == 0
    cluster.work()
    assert cluster.store.num_matched(request_of("t", 13), 0) == 0
    cluster.settle()
    assert cluster.sealed_keys() == [set(), set()]


def test_a_request_whose_load_hangs_is_computed_in_other_blocks() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))
    cluster.settle()
    request = request_of("s", 13)
    assert cluster.begin(request) == 12
    commands = cluster.commands()
    cluster.obey(commands)
    cluster.store.reported(cluster.ranks[0].work())
    overdue = RankReports(overdue_loads=(commands.loads[0].job_id,))
    for _ in range(2):  # two ranks may say so
        cluster.store.reported(overdue)
        assert cluster.pool.held == [10, 11, 12]
    cluster.store.received(["s"])
    assert cluster.store.num_matched(request, 0) == 0
    assert cluster.store.num_matched(request_of("t", 13), 0) == 0  # it would hang as well
    cluster.store.reported(cluster.ranks[1].work())
    assert cluster.pool.held == []
    assert cluster.store.num_matched(request, 0) == 0
    assert cluster.store.num_matched(request_of("t", 13), 0) == 12
    cluster.store.check()


class FakePeers:
    """One peer of two ranks that has what it is told."""

    def __init__(self) -> None:
        self.indexes = (object(),)
        self.slots: dict[bytes, int] = {}

    def find(self, keys: list[bytes]) -> list[PeerBlock | None]:
        memory = PeerMemory(1, (7, 8))
        return [PeerBlock(memory, self.slots[key]) if key in self.slots else None for key in keys]


@pytest.mark.parametrize("is_peers", [False, True])
def test_ranks_are_asked_each_second_whether_a_load_that_hangs_has_ended(is_peers: bool) -> None:
    cluster, request = Cluster(), request_of("r", 13)
    if is_peers:
        peers: Any = FakePeers()
        peers.slots = {key: slot for slot, key in enumerate(keys_of_hashes(request))}
        cluster.store = BlockStore(setting_of(), lambda: cluster.time_s, peers=peers)
        cluster.store.held_blocks.bind(cluster.pool)
        cluster.store.adopt({rank: Inventory(NUM_SLOTS, {}) for rank in (0, 1)})
    else:
        cluster.run(request_of("before", 13))
        cluster.settle()
    assert cluster.begin(request) == 12
    (load,) = cluster.commands().loads
    assert cluster.store.has_unsent_commands
    cluster.time_s = 31.0
    cluster.store.reported(RankReports(overdue_loads=(load.job_id,)))
    cluster.store.received(["r"])
    cluster.store.finished("r")
    for _ in range(3):
        cluster.commands()
        assert not cluster.store.has_unsent_commands
        cluster.time_s += 1.0
        assert cluster.store.has_unsent_commands
    for rank in (0, 1):
        cluster.store.reported(RankReports(((rank, JobReport(load.job_id, True)),)))
    assert cluster.pool.held == []
    assert not cluster.store.has_unsent_commands


def test_tokens_of_groups_from_two_memories_count_once() -> None:
    groups = KVGroups((FullAttentionSpec(TOKENS, 1, 1),) * 2, TOKENS)
    peers: Any = FakePeers()
    setting = setting_of(num_ranks=1, groups=groups)
    store, request = BlockStore(setting, lambda: 0.0, peers=peers), request_of("r", 13)
    own = {i: digest + bytes(4) for i, digest in enumerate(request.block_hashes)}
    store.adopt({0: Inventory(NUM_SLOTS, own)})
    for slot, digest in enumerate(request.block_hashes):
        peers.slots[make_offload_key(digest, 1)] = slot
    assert store.num_matched(request, 0) == 12
    store.allocated(request, TABLES * 2, 12)
    loads = store.commands({}, lambda _: TABLES * 2).loads
    assert len(loads) == 2
    for load in loads:
        store.reported(RankReports(((0, JobReport(load.job_id, True)),)))
    assert store.counts.statistics(0.0).num_loaded_tokens == 12


def test_a_request_that_waits_for_its_load_no_more_keeps_blocks_that_a_store_reads() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 9))
    cluster.settle()
    request = request_of("s", 13)
    assert cluster.begin(request) == 8
    load = cluster.commands()
    cluster.store.reported(RankReports(overdue_loads=(load.loads[0].job_id,)))
    assert not cluster.store.finished("s")  # vLLM keeps them by itself
    assert cluster.begin(request) == 0
    cluster.store.received(["s"])
    request.num_computed_tokens = 0
    assert cluster.commands(request).store is not None
    assert cluster.store.finished("s")


def test_a_worker_that_stood_still_reports_late_and_loses_nothing() -> None:
    cluster = Cluster(job_s=5.0)
    cluster.run(request_of("r", 13))
    cluster.settle()
    request = request_of("s", 25)
    assert cluster.begin(request) == 12
    cluster.obey(cluster.commands(request))
    cluster.time_s = 100.0
    cluster.commands()
    cluster.work()
    cluster.settle()
    assert cluster.pool.held == []
    assert cluster.store.num_matched(request_of("t", 25), 0) == 12
    cluster.store.check()


def test_a_reset_forgets_everything_on_all_ranks() -> None:
    cluster = Cluster(num_files=NUM_FILES, spare_share=0.5)
    for content in "abc":
        cluster.run(request_of(content, 13, content))
    cluster.settle()
    assert cluster.ranks[0].files
    waiting = request_of("s", 21, "d")
    cluster.begin(waiting)
    cluster.obey(cluster.commands(waiting))
    cluster.store.reset()
    assert cluster.store.has_unsent_commands
    cluster.work()
    cluster.settle()
    assert cluster.sealed_keys() == [set(), set()]
    assert [rank.files for rank in cluster.ranks] == [{}, {}]


@pytest.mark.parametrize("adopt_after_reset", [False, True])
def test_after_a_reset_no_other_engine_finds_what_is_stored(adopt_after_reset: bool) -> None:
    cluster = Cluster(num_files=NUM_FILES, spare_share=0.5, adopt_after_reset=adopt_after_reset)
    cluster.run(request_of("r", 13))
    cluster.store.reset()
    assert cluster.run(request_of("s", 13)) == 0
    cluster.settle()
    assert cluster.run(request_of("t", 13)) == 12
    assert cluster.restart()[0] == 3
    assert cluster.run(request_of("u", 13)) == (12 if adopt_after_reset else 0)


def test_a_request_that_has_begun_before_a_reset_is_not_kept() -> None:
    cluster = Cluster()
    begun, waits = request_of("begun", 25), request_of("waits", 13, "b")
    assert (cluster.begin(begun), cluster.begin(waits)) == (0, 0)
    begun.num_computed_tokens = 12
    cluster.store.reset()
    assert cluster.store.num_matched(begun, 12) == 0
    assert cluster.step(begun).store is None
    assert cluster.begin(waits) == 0
    assert cluster.step(waits).store is not None
    assert cluster.store.num_matched(request_of("s", 13, "b"), 0) == 12


def hits_and_misses(cluster: Cluster) -> list[tuple[int, int]]:
    """The blocks that look-ups found in host memory and in files, and those they did not."""
    statistics = cluster.store.statistics
    assert statistics is not None and statistics.disk is not None
    return [(tier.num_hits, tier.num_misses) for tier in (statistics.host, statistics.disk)]


def test_what_has_left_memory_comes_back_from_files() -> None:
    cluster = Cluster(num_files=NUM_FILES)
    for content in "abcd":
        assert cluster.run(request_of(content, 21, content)) == 0
        cluster.settle()
    assert hits_and_misses(cluster) == [(0, 20), (0, 20)]
    assert cluster.run(request_of("again", 21, "a")) == 20
    assert hits_and_misses(cluster) == [(0, 25), (5, 20)]
    assert cluster.run(request_of("at once", 21, "a")) == 20
    assert hits_and_misses(cluster) == [(5, 25), (5, 20)]
    cluster.ranks[1].wrong = {next(iter(cluster.ranks[1].files))}
    for content in "abcdabcd":
        cluster.run(request_of(f"{content}2", 21, content))
        cluster.settle()
        cluster.store.check()


def test_files_are_adopted_and_those_that_one_rank_lacks_are_removed() -> None:
    cluster = Cluster(num_files=NUM_FILES)
    cluster.run_all("abcd")
    files = dict(cluster.ranks[0].files)
    gone = next(iter(files))
    del cluster.ranks[1].files[gone]
    for rank in cluster.ranks:
        rank.sealed.clear()
    assert cluster.restart() == (0, len(files) - 1)
    cluster.settle()
    assert [set(rank.files) for rank in cluster.ranks] == [files.keys() - {gone}] * 2


def test_a_request_waits_for_files_no_longer_than_it_is_said() -> None:
    cluster = Cluster(num_files=NUM_FILES, wait_s=2.0)
    cluster.run_all("abcd")
    request = request_of("again", 21, "a")
    assert cluster.begin(request) is None
    commands = cluster.commands()
    assert commands.fetches
    cluster.time_s = 1.9
    assert cluster.begin(request) is None
    cluster.time_s = 2.0
    assert cluster.begin(request) == 0
    counted = sum(map(sum, hits_and_misses(cluster)))
    cluster.obey(commands)
    cluster.work()
    assert cluster.run(request) == 8  # it was preempted, and finds what was read since
    assert sum(map(sum, hits_and_misses(cluster))) > counted


def test_preemptions_of_a_request_share_its_time_for_files() -> None:
    cluster = Cluster(num_files=NUM_FILES, wait_s=2.0)
    cluster.run_all("abcd")
    request = request_of("again", 21, "a")
    assert cluster.begin(request) is None
    cluster.time_s = 1.5
    assert cluster.wait(request) == 20
    cluster.settle()
    cluster.run_all("efgh")
    for time_s, found in ((10.0, None), (10.4, None), (10.5, 0)):  # it was preempted
        cluster.time_s = time_s
        assert cluster.begin(request) == found
    cluster.settle()
    cluster.run_all("efgh")
    assert cluster.begin(request) == 0


def test_only_waits_for_files_take_of_a_requests_time_for_them() -> None:
    cluster = Cluster(num_files=NUM_FILES, wait_s=2.0)
    cluster.run_all("abcd")
    request = request_of("again", 21, "a")
    assert cluster.begin(request) is None
    cluster.time_s = 1.5
    while cluster.store.num_matched(request, 0) is None:
        cluster.settle()
    cluster.time_s = 5.0  # vLLM has looked it up, and has no room for it
    assert cluster.store.num_matched(request, 0) == 20
    cluster.run_all("efgh")
    for time_s, found in ((10.0, None), (10.4, None), (10.5, 0)):
        cluster.time_s = time_s
        assert cluster.store.num_matched(request, 0) == found
    counted = sum(map(sum, hits_and_misses(cluster)))
    cluster.store.allocated(request, TABLES, 0)
    assert sum(map(sum, hits_and_misses(cluster))) == counted + 10, "once in each tier"


def test_for_a_request_that_reads_no_cache_nothing_is_read_or_counted() -> None:
    cluster = Cluster(num_files=24)
    cluster.run_all("abcdefgh", 13)  # the first goes to files
    counted = hits_and_misses(cluster)
    request = request_of("again", 13, "a")
    request.skip_reading_prefix_cache = True  # as for the log probabilities of its prompt
    assert cluster.begin(request) == 0
    assert not cluster.commands().fetches
    assert hits_and_misses(cluster) == counted
    assert cluster.run(request_of("plain", 13, "a")) == 12


def test_a_prompt_that_is_longer_than_host_memory_is_loaded_in_part() -> None:
    cluster = Cluster(num_files=NUM_FILES)
    request = request_of("r", 49)
    cluster.begin(request)
    for start in range(0, 48, 16):
        request.num_computed_tokens = start
        cluster.obey(cluster.store.commands({"r": 16}, lambda _: TABLES))
        cluster.work()
        cluster.settle()
    assert cluster.run(request_of("again", 49)) == NUM_SLOTS * TOKENS


def test_hints_in_kv_transfer_params_order_evictions() -> None:
    cluster = Cluster()
    kept, plain = request_of("kept", 9, "k"), request_of("plain", 9, "p")
    kept.kv_transfer_params = {"hints": [{"priority": 100, "duration_s": 60}]}
    plain.kv_transfer_params = None
    for request in (kept, plain):
        cluster.run(request)
    cluster.run(request_of("r", 21, "r"))  # one block has to go
    cluster.settle()
    assert cluster.store.num_matched(request_of("kept again", 9, "k"), 0) == 8
    assert cluster.store.num_matched(request_of("plain again", 9, "p"), 0) == 4
    cluster.store.check()


def prefetch_of(name: str, num_tokens: int, content: str = "a", **more: Any) -> Any:
    """A request that only loads, with the fields that vLLM's scheduler reads."""
    request = request_of(name, num_tokens, content, **more)
    request.prompt_token_ids = list(range(num_tokens))
    request._all_token_ids = request.prompt_token_ids.copy()
    request.num_prompt_tokens, request.max_tokens = num_tokens, 16
    request.mm_features, request.prompt_embeds = [], None
    request.kv_transfer_params = {"prefetch": True}
    return request


@pytest.mark.parametrize("num_held", [0, 8, 12])
def test_of_a_prefetch_only_the_token_behind_what_is_held_is_computed(num_held: int) -> None:
    cluster = Cluster(num_files=24)
    cluster.run(request_of("r", num_held + 1))
    cluster.settle()
    cluster.run_all("bcdefgh", 13)  # the first goes to files
    given = (request := prefetch_of("p", 20)).prompt_token_ids
    asked = 0
    while (found := cluster.store.num_matched(request, 0)) is None:
        assert request.num_prompt_tokens == 20 and asked < 50
        cluster.step()
        asked += 1
    assert found == num_held and bool(asked) == bool(num_held)
    assert len(given) == 20, "the list of its sender"
    assert request.prompt_token_ids == request._all_token_ids == given[: num_held + 1]
    assert (request.num_prompt_tokens, request.max_tokens) == (num_held + 1, 1)
    assert request.block_hashes == request_of("r", num_held).block_hashes


def test_a_prefetch_of_what_the_device_holds_or_of_images_is_not_cut_below_it() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))
    cluster.settle()
    request = prefetch_of("p", 20)
    assert cluster.store.num_matched(request, 16) == 0
    assert (request.num_prompt_tokens, request.max_tokens) == (17, 1)
    request = prefetch_of("q", 20)
    request.mm_features = ["an image"]
    assert cluster.store.num_matched(request, 0) == 12
    assert (request.num_prompt_tokens, request.max_tokens) == (20, 1)
    request = prefetch_of("s", 20)
    request.skip_reading_prefix_cache = True  # vLLM computes what is left of it
    assert cluster.store.num_matched(request, 0) == 0
    assert (request.num_prompt_tokens, request.max_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"hints": "soon"}, "request r: hints is 'soon': pass a list or tuple"),
        ({"hints": [{"priority": 101}]}, "hints[0]: priority of a hint is 101"),
        ({"hints": [{"ttl": 3}]}, "hints[0] has 'ttl': it may have start, end"),
        ({"hints": [{"is_over": True}] * 17}, "has 17 hints, at most 16"),
        ({"hints": None}, ""),
        ({"do_remote_decode": True}, ""),
        ("hints", ""),
        ({"prefetch": "yes"}, "request r: prefetch is 'yes': pass True or False"),
    ],
)
def test_a_request_with_bad_hints_is_served_and_warned_of_once(
    params: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    for name in ("r", "s"):
        request = request_of(name, 9, name)
        request.kv_transfer_params = params
        cluster.run(request)
        assert cluster.store.num_matched(request_of(f"{name} again", 9, name), 0) == 8
    warned = [r.getMessage() for r in caplog.records if "kv_transfer_params" in r.getMessage()]
    assert len(warned) == bool(message)
    assert all(message in each for each in warned)


@pytest.mark.seeds(8, long=40)
def test_whatever_happens_a_hit_is_on_every_rank(seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster(
        num_files=draw.choice((0, 4, NUM_FILES)),
        policy=draw.choice(("lru", "arc")),
    )
    for number in range(300):
        cluster.time_s += draw.random() * 3
        request = request_of(f"r{number}", draw.randrange(1, 30), draw.choice("abc"))
        if seed % 2:
            request.kv_transfer_params = {"hints": draw.choice(SOME_HINTS)}
        found = cluster.begin(request)
        cluster.obey(cluster.commands(*(() if found is None else (request,))))
        if draw.random() < 0.2:
            rank = draw.choice(cluster.ranks)
            rank.wrong.add(draw.choice([draw.randrange(NUM_SLOTS), *rank.files]))
        loads = [job for _, job in cluster.ranks[0].running if isinstance(job, LoadCommand)]
        if loads and draw.random() < 0.1:
            cluster.store.reported(RankReports(overdue_loads=(draw.choice(loads).job_id,)))
        while draw.random() < 0.7:  # each loaded slot is looked at
            cluster.store.reported(draw.choice(cluster.ranks).work())
        cluster.store.finished(request.request_id)
        cluster.store.check()
        if draw.random() < 0.05:
            cluster.store.reset()
        if draw.random() < 0.05:
            cluster.restart()
    cluster.work()
    cluster.settle()
    assert cluster.pool.held == []
    assert len({frozenset(keys) for keys in cluster.sealed_keys()}) == 1
    assert {frozenset(rank.files) for rank in cluster.ranks} == {
        frozenset(cluster.ranks[0].files) & frozenset(cluster.ranks[1].files)
    } or any(rank.wrong for rank in cluster.ranks)
