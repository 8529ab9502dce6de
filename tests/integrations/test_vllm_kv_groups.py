"""The block store with several KV cache groups, under a model of vLLM's block pool.

The model keeps each group's table as vLLM does: a window's blocks are freed when it has passed
them, and are written by others at once. Ranks copy late. Each forward checks what it reads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest

from kvcache.core import BlocksStored
from kvcache.integrations.vllm.block_contents import BlockContents
from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.kv_groups import NULL_BLOCK, KVGroups, NewTable
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.integrations.vllm.step_messages import (
    FileCommand,
    ImportCommand,
    Inventory,
    LoadCommand,
    RankCommands,
    RankReports,
    StoreCommand,
)
from kvcache.integrations.vllm.tier_events import TierEvents
from kvcache.protocol.messages import JobReport
from kvcache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

HASH = 4
NUM_BLOCKS = 40
NUM_SLOTS = 40
CHUNK = 12
KEY_BYTES = 36

Job = StoreCommand | LoadCommand | FileCommand | ImportCommand


def full(block_tokens: int = HASH) -> KVCacheSpec:
    return FullAttentionSpec(block_tokens, 1, 1)


def window(num_tokens: int, block_tokens: int = HASH) -> KVCacheSpec:
    return SlidingWindowSpec(block_tokens, 1, 1, sliding_window=num_tokens)


SHAPES = {
    "hybrid": (full(), window(7)),
    "three windows": (window(1), full(), window(9), window(4)),
    "windows only": (window(6),),
    "unequal blocks": (full(8), window(10), window(12, 8)),
}


@dataclass
class Request:
    """A request, its tables by group, and how much of it is computed or loaded."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    num_local: int = 0
    is_loading: bool = False
    is_new: bool = True
    lora_request: None = None
    skip_reading_prefix_cache: bool = False
    cache_salt: None = None

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_tokens))


def request_of(name: str, num_tokens: int, content: str) -> Request:
    """Equal contents have equal hashes."""
    hashes = [sha256(f"{content}{i}".encode()).digest() for i in range(num_tokens // HASH)]
    return Request(name, hashes, num_tokens)


@dataclass
class Rank:
    """Blocks and slots with the key of what they hold. A job copies when `work` is called."""

    rank: int
    blocks: dict[int, bytes] = field(default_factory=dict)
    slots: dict[int, bytes] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    files: dict[bytes, bytes] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)  # what other nodes do not give
    running: deque[tuple[str, Job]] = field(default_factory=deque)
    reports: list[JobReport] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)

    def begin(self, commands: RankCommands) -> None:
        """What comes before the forward."""
        reused = set(commands.reused_blocks)
        while any(kind == "store" and reused & set(job.blocks) for kind, job in self.running):
            self.work()

    def obey(self, commands: RankCommands) -> None:
        """What comes behind the forward."""
        for slot in commands.forgotten_slots:
            self.slots.pop(slot, None)
            self.sealed.discard(slot)
        for key in split(commands.forgotten_keys):
            self.files.pop(key, None)
        self.sealed |= {slot for slot in commands.sealed if slot in self.slots}
        assert not commands.invalid_blocks
        self.failed |= set(commands.failed)
        self.received |= set(commands.received)
        self.released |= set(commands.released)
        jobs: list[tuple[str, Job]] = [("spill", job) for job in commands.spills]
        jobs += [("fetch", job) for job in commands.fetches]
        jobs += [("import", job) for job in commands.imports]
        jobs += [("load", job) for job in commands.loads]
        if commands.store is not None:
            jobs.append(("store", commands.store))
        for kind, job in jobs:
            for slot in job.slots if kind in ("store", "fetch", "import") else ():
                self.slots.pop(slot, None)
                self.sealed.discard(slot)
        self.running += jobs

    def work(self) -> None:
        """End the oldest job."""
        if not self.running:
            return
        kind, job = self.running.popleft()
        failed: set[int] = set()
        if isinstance(job, StoreCommand):
            self._write({s: self.blocks[b] for s, b in zip(job.slots, job.blocks, strict=True)})
        elif isinstance(job, LoadCommand):
            for slot, block, key in zip(job.slots, job.blocks, job.keys, strict=True):
                assert self.slots[slot] == key, "a slot holds another block than is said"
                if slot in self.wrong:
                    failed.add(slot)
                else:
                    self.blocks[block] = key
            self.received.add(job.request_id)
            if failed:
                self.failed.add(job.request_id)
        else:
            keys = dict(zip(job.slots, split(job.keys), strict=True))
            if isinstance(job, ImportCommand):
                failed = {slot for slot, key in keys.items() if key in self.refused}
                self._write({slot: keys[slot] for slot in keys.keys() - failed})
            elif kind == "spill":
                assert all(self.slots[slot] == key for slot, key in keys.items())
                self.files.update({key: key for key in keys.values()})
            else:
                self._write({slot: self.files[key] for slot, key in keys.items()})
        self.reports.append(JobReport(job.job_id, not failed, block_ids=tuple(failed)))

    def work_all(self) -> None:
        while self.running:
            self.work()

    def _write(self, keys: dict[int, bytes]) -> None:
        self.slots.update(keys)
        self.wrong -= keys.keys()


def split(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


class OtherNodes:
    """Other nodes, and the coordinator that says, late and not always truly, what they hold."""

    is_asking = False
    peer_keys = None

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._asked: dict[str, list[bytes]] = {}
        self._known: dict[bytes, None] = {}

    def ask(self, request_id: str, keys: list[bytes]) -> None:
        assert len(set(keys)) == len(keys)
        self._asked[request_id] = keys
        self._known.update(dict.fromkeys(keys))

    def answer_of(self, request_id: str) -> dict[bytes, str] | None:
        if self._draw.random() < 0.3:
            return None
        share = self._draw.choice([0.0, 0.9, 1.0])
        keys = self._asked.pop(request_id, [])
        return {k: self._draw.choice(["one", "two"]) for k in keys if self._draw.random() < share}

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def take_given(self) -> list[bytes]:
        return []

    def take_beliefs(self) -> dict[bytes, bool]:
        share = self._draw.choice([0.0, 0.1, 1.0])
        return {k: self._draw.random() < 0.5 for k in self._known if self._draw.random() < share}


class Engine:
    """vLLM's scheduler as far as blocks go, the store under test, and two ranks."""

    def __init__(
        self,
        specs: tuple[KVCacheSpec, ...],
        *,
        num_files: int = 0,
        events: TierEvents | None = None,
        nodes: Any = None,
    ) -> None:
        offload: dict[str, Any] = {"host_memory_per_rank": "1MiB"}
        if num_files:
            offload["disk"] = {"directory": "/files", "capacity_per_rank": "1MiB"}
        self.setting = EngineSetting(
            ConnectorOptions.parse({"offload": offload}),
            "model",
            KVGroups(specs, HASH),
            num_blocks=NUM_BLOCKS,
            num_ranks=2,
        )
        self.specs, self.num_files, self.events, self.nodes = specs, num_files, events, nodes
        self.ranks = [Rank(0), Rank(1)]
        self.num_imported = 0
        self.restart()

    def restart(self) -> tuple[int, int]:
        """Begin with what the ranks have kept."""
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))
        self.waiting: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}
        self.store = BlockStore(self.setting, lambda: 0.0, self.events, nodes=self.nodes)
        for rank in self.ranks:
            kept = {slot: rank.slots[slot] for slot in rank.sealed if slot in rank.slots}
            rank.__init__(rank.rank, {}, kept, set(kept), rank.files, rank.wrong)  # type: ignore[misc]
        return self.store.adopt(
            {
                rank.rank: Inventory(NUM_SLOTS, dict(rank.slots), self.num_files, tuple(rank.files))
                for rank in self.ranks
            }
        )

    # --- requests

    def begin(self, request: Request, num_local: int = 0) -> bool:
        """Look a request up, of which vLLM has `num_local` tokens; say whether it has blocks."""
        found = self.store.num_matched(request, num_local)
        if found is None or not self._take(request, num_local + found):
            return False
        request.num_local, request.num_computed_tokens = num_local, num_local + found
        for rank in self.ranks if num_local else ():  # no store reads what vLLM has cached
            rank.work_all()
        for group, column, block in self._blocks_of(request, 0, num_local):
            self._fill(block, self.key(request, group, column))
        self.store.allocated(request, request.tables, found)
        request.is_loading, request.is_new = bool(found), True
        self.requests[request.request_id] = request
        return True

    def _take(self, request: Request, num_tokens: int) -> bool:
        """Give a request its first blocks, null blocks before each window."""
        tables: list[list[int]] = []
        for spec in self.specs:
            num_null = spec.num_skipped_tokens(num_tokens) // spec.block_size
            num_new = -(-num_tokens // spec.block_size) - num_null
            tables.append([NULL_BLOCK] * num_null + [-1] * num_new)
        if sum(table.count(-1) for table in tables) > len(self.free):
            return False
        request.tables = [[self.free.pop() if b == -1 else b for b in table] for table in tables]
        return True

    def key(self, request: Request, group: int, column: int) -> bytes:
        last = (column + 1) * self.specs[group].block_size // HASH - 1
        return request.block_hashes[last] + group.to_bytes(4, "big")

    def _blocks_of(self, request: Request, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield group, column and block of the full blocks that end in these tokens."""
        for group, spec in enumerate(self.specs):
            for column in range(start // spec.block_size, end // spec.block_size):
                if (block := request.tables[group][column]) != NULL_BLOCK:
                    yield group, column, block

    def _fill(self, block: int, key: bytes) -> None:
        for rank in self.ranks:
            rank.blocks[block] = key

    def _free(self, request: Request) -> None:
        self.free += [b for table in request.tables for b in table if b != NULL_BLOCK]
        request.tables = []

    # --- steps

    def step(self) -> RankCommands:
        """Compute a chunk of each request that does not load."""
        new: list[NewTable] = []
        scheduled: dict[str, int] = {}
        for request in list(self.requests.values()):
            if not request.is_loading and self._grow(request, new):
                left = request.num_tokens - request.num_computed_tokens
                scheduled[request.request_id] = min(CHUNK, left)
        commands = self.store.commands(scheduled, lambda r: self.requests[r].tables, new)
        self.num_imported += sum(len(job.slots) for job in commands.imports)
        for rank in self.ranks:
            rank.begin(commands)
        for name, count in scheduled.items():
            self._compute(self.requests[name], count)
        for rank in self.ranks:
            rank.obey(commands)
        return commands

    def _grow(self, request: Request, new: list[NewTable]) -> bool:
        """Free what the window has passed, and make room for the next chunk, or preempt."""
        done = request.num_computed_tokens
        for spec, table in zip(self.specs, request.tables, strict=True):
            for column in range(min(spec.num_skipped_tokens(done) // spec.block_size, len(table))):
                if table[column] != NULL_BLOCK:
                    self.free.append(table[column])
                    table[column] = NULL_BLOCK
        end = min(done + CHUNK, request.num_tokens)
        added: list[list[int]] = [[] for _ in self.specs]
        for spec, table, blocks in zip(self.specs, request.tables, added, strict=True):
            while len(table) < -(-end // spec.block_size):
                if not self.free:
                    self._return(request)
                    return False
                blocks.append(self.free.pop())
                table.append(blocks[-1])
        tables = request.tables if request.is_new else added
        new.append(NewTable(request.request_id, [list(t) for t in tables], request.is_new))
        request.is_new = False
        return True

    def _compute(self, request: Request, count: int) -> None:
        """Read what attention reads, then write the chunk."""
        done = request.num_computed_tokens
        for group, spec in enumerate(self.specs):
            first = spec.num_skipped_tokens(done) // spec.block_size
            for column in range(first, done // spec.block_size):
                block = request.tables[group][column]
                assert block != NULL_BLOCK, f"block {column} of group {group} is missing"
                for rank in self.ranks:
                    assert rank.blocks[block] == self.key(request, group, column)
            for column in range(done // spec.block_size, len(request.tables[group])):
                self._fill(request.tables[group][column], b"partly filled")
        request.num_computed_tokens = end = done + count
        for group, column, block in self._blocks_of(request, done, end):
            self._fill(block, self.key(request, group, column))

    def report(self) -> None:
        """Tell the store, and let requests go on whose loads have ended on all ranks."""
        for rank in self.ranks:
            reports, rank.reports = rank.reports, []
            self.store.reported(RankReports(tuple((rank.rank, report) for report in reports)))
        first, second = self.ranks
        for name in first.received & second.received:
            request = self.requests.get(name) or self.finished[name]
            has_failed = name in first.failed | second.failed
            for rank in self.ranks:
                rank.received.discard(name)
                rank.failed.discard(name)
            if name in self.finished:
                self._free(self.finished.pop(name))
            elif has_failed:
                self._return(request)
            else:
                request.is_loading = False
        for name in first.released & second.released:
            for rank in self.ranks:
                rank.released.discard(name)
            self._free(self.finished.pop(name))

    def _return(self, request: Request) -> None:
        """Let a request wait that has lost its blocks."""
        self._free(self.requests.pop(request.request_id))
        request.num_computed_tokens, request.is_loading = 0, False
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """Finish or abort a request."""
        is_kept = self.store.finished(request.request_id)
        if self.requests.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        if is_kept or request.is_loading:
            self.finished[request.request_id] = request
        else:
            self._free(request)

    def settle(self) -> None:
        """Step until no job is left."""
        for _ in range(200):
            self.step()
            for rank in self.ranks:
                rank.work_all()
            self.report()
            if not self.store.has_unsent_commands:
                return
        raise AssertionError("there is always something left to be done")

    def run(self, request: Request) -> int:
        """Compute a request to its end; return how many of its tokens were there."""
        assert self.begin(request)
        found = request.num_computed_tokens
        while request.num_computed_tokens < request.num_tokens or request.is_loading:
            self.settle()
        self.settle()
        self.end(request)
        self.settle()
        return found

    def longest_hit(self, request: Request, num_local: int) -> int:
        """Say by trying each length how many tokens the ranks can give."""
        first, second = (set(rank.slots.values()) | set(rank.files) for rank in self.ranks)
        held = first & second
        step = max(spec.block_size for spec in self.specs)
        for num_tokens in range((request.num_tokens - 1) // step * step, num_local, -step):
            needed = {
                self.key(request, group, column)
                for group, spec in enumerate(self.specs)
                for column in range(num_tokens // spec.block_size)
                if (column + 1) * spec.block_size > num_local
                and (column + 1) * spec.block_size > spec.num_skipped_tokens(num_tokens)
            }
            if needed <= held:
                return num_tokens - num_local
        return 0


def test_a_hit_needs_the_window_and_all_blocks_of_full_attention() -> None:
    engine = Engine(SHAPES["hybrid"])
    assert engine.run(request_of("r", 41, "a")) == 0
    request = request_of("s", 41, "a")
    assert engine.begin(request)
    assert [table.count(NULL_BLOCK) for table in request.tables] == [0, 8]
    (load,) = engine.step().loads
    assert [key[-1] for key in load.keys] == [0] * 10 + [1] * 2
    assert list(load.blocks) == request.tables[0] + request.tables[1][8:]


def test_a_load_that_fails_fails_the_whole_request() -> None:
    engine = Engine(SHAPES["hybrid"])
    engine.run(request_of("r", 41, "a"))
    lost = engine.key(request_of("", 41, "a"), 1, 8)
    rank = engine.ranks[1]
    rank.wrong = {slot for slot, key in rank.slots.items() if key == lost}
    request = request_of("s", 41, "a")
    assert engine.begin(request)
    engine.settle()
    assert (engine.waiting, request.tables, request.num_computed_tokens) == ([request], [], 0)
    assert engine.store.num_matched(request, 0) == 0  # though a shorter prefix is there
    engine.end(request)
    assert engine.store.num_matched(request_of("t", 41, "a"), 0) == 32


def test_blocks_that_a_window_has_passed_are_not_stored_later() -> None:
    engine = Engine(SHAPES["windows only"])
    request = request_of("r", 41, "a")
    engine.begin(request)
    request.tables, request.num_computed_tokens = [[NULL_BLOCK] * 7 + [5, 6, 7, 8]], 36
    store = engine.store.commands({"r": 5}, lambda _: request.tables).store
    assert store.blocks == (5, 6, 7)
    assert store.parents == tuple(request.block_hashes[6:9])


def test_a_block_that_leaves_a_window_is_written_when_its_store_has_ended() -> None:
    engine = Engine(SHAPES["windows only"])
    request = request_of("r", 41, "a")
    engine.begin(request)
    commands = engine.step()
    assert engine.step().reused_blocks == (commands.store.blocks[0],)
    assert engine.ranks[0].reports[0].ok


def test_a_block_that_is_loaded_into_is_written_when_its_store_has_ended() -> None:
    engine = Engine(SHAPES["hybrid"])
    engine.run(request_of("r", 17, "a"))
    other = request_of("s", 9, "b")
    engine.begin(other)
    stored = engine.step().store
    engine.free.append(stored.blocks[0])  # as if the request had been preempted
    request = request_of("t", 17, "a")
    assert engine.begin(request)
    assert engine.step().reused_blocks == (stored.blocks[0],)


def test_what_is_gone_before_it_is_loaded_fails_the_request() -> None:
    engine = Engine(SHAPES["hybrid"])
    engine.run(request_of("r", 17, "a"))
    request = request_of("s", 17, "a")
    assert engine.store.num_matched(request, 0) == 16
    engine.store.reset()
    engine._take(request, 16)
    engine.store.allocated(request, request.tables, 16)
    commands = engine.store.commands({}, lambda _: None)
    assert (commands.failed, commands.received, commands.loads) == (("s",), ("s",), ())
    engine.run(request_of("t", 17, "a"))
    assert engine.store.num_matched(request, 0) == 0


def test_groups_are_adopted_apart() -> None:
    engine = Engine(SHAPES["hybrid"])
    engine.run(request_of("r", 25, "a"))
    for rank in engine.ranks:  # a slot of the window is labelled with the other group
        last = max(rank.slots)
        assert rank.slots[last][-1] == 1
        rank.slots[last] = rank.slots[last][:-1] + b"\0"
    assert engine.restart() == (11, 0)
    assert engine.store.num_matched(request_of("s", 25, "a"), 0) == 20


def test_events_tell_each_block_with_its_group_and_parent() -> None:
    specs = SHAPES["unequal blocks"]
    sizes = [spec.block_size for spec in specs]
    events = TierEvents(BlockContents(sizes, lambda *_: None), for_engine=True)
    request = request_of("r", 26, "a")
    engine = Engine(specs, events=events)
    engine.run(request)
    engine.store.follow_events()
    told = {
        (event.group, digest): (event.parent_digest if i == 0 else event.digests[i - 1], tokens)
        for event in events.take()
        if isinstance(event, BlocksStored)
        for i, digest in enumerate(event.digests)
        for tokens in (event.token_ids.reshape(-1, event.block_size)[i].tolist(),)
    }
    hashes = request.block_hashes
    assert told == {
        (group, hashes[end // HASH - 1]): (
            hashes[(end - size) // HASH - 1] if end > size else None,
            list(range(end - size, end)),
        )
        for group, size in enumerate(sizes)
        for end in range(size, 26, size)
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_files", [0, 60], ids=["memory", "files"])
@pytest.mark.parametrize("has_nodes", [False, True], ids=["alone", "among nodes"])
@pytest.mark.seeds(2, long=6)
def test_whatever_happens_attention_reads_what_it_should(
    seed: int, has_nodes: bool, shape: str, num_files: int
) -> None:
    draw = random.Random(f"{seed} {shape} {num_files}")
    nodes = OtherNodes(draw) if has_nodes else None
    engine = Engine(SHAPES[shape], num_files=num_files, nodes=nodes)
    walk(engine, draw)
    assert engine.num_imported >= 10 * has_nodes


def walk(engine: Engine, draw: random.Random) -> None:
    """Requests in random order, whose jobs end late, fail, or end in a restart."""
    num_loaded = 0
    for number in range(250):
        if len(engine.requests) + len(engine.waiting) < 5:
            size, content = draw.randrange(1, 60), draw.choice("abcd")
            engine.waiting.append(request_of(f"r{number}", size, content))
        for request in [each for each in engine.waiting if draw.random() < 0.6]:
            local = 0 if draw.random() < 0.7 else draw.randrange(request.num_tokens) // 8 * 8
            if engine.begin(request, local):
                engine.waiting.remove(request)
                num_loaded += request.num_computed_tokens - local
        engine.step()
        if draw.random() < 0.1:
            draw.choice(engine.ranks).wrong.add(draw.randrange(NUM_SLOTS))
        if engine.nodes is not None and draw.random() < 0.1:
            lost = engine.key(request_of("", 60, draw.choice("abcd")), 0, draw.randrange(7))
            draw.choice(engine.ranks).refused ^= {lost}
        while draw.random() < 0.75:
            draw.choice(engine.ranks).work()
        engine.report()
        for request in [*engine.requests.values(), *engine.waiting]:
            is_computed = request.num_computed_tokens >= request.num_tokens
            if (is_computed and not request.is_loading) or draw.random() < 0.02:
                engine.end(request)
        engine.store.check()
        if engine.nodes is None and draw.random() < 0.05:
            compare_hits(engine, draw)
        if draw.random() < 0.02:
            engine.restart()
    assert num_loaded > 100


def compare_hits(engine: Engine, draw: random.Random) -> None:
    """Compare the store's hits with those found by trying; end all requests before."""
    for request in [*engine.requests.values(), *engine.waiting]:
        engine.end(request)
    engine.settle()
    assert len(engine.free) == NUM_BLOCKS - 1
    for content in "abcd":
        asked, local = request_of("asked", 57, content), draw.randrange(7) * 8
        found = engine.store.num_matched(asked, local)
        engine.store.finished("asked")
        longest = engine.longest_hit(asked, local)
        if found is not None:
            # There may be no room for files among blocks that no file has yet.
            assert found == longest or (found < longest and engine.num_files)
