"""Two replicas of one name, each with its store and ranks, on real memory and without vLLM."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.index_finder import find_index
from kvcache.integrations.vllm.kv_groups import KVGroups
from kvcache.integrations.vllm.nodes import Nodes
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.integrations.vllm.peers import Peers
from kvcache.integrations.vllm.rank_tiers import RankTiers
from kvcache.integrations.vllm.step_messages import RankCommands
from kvcache.memory_service.client import service_address
from kvcache.memory_service.service import HostMemoryService
from kvcache.specs import FullAttentionSpec
from kvcache.worker.copies.rows import RowMover
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 4
ONE_GROUP = KVGroups((FullAttentionSpec(TOKENS, 1, 1),), TOKENS)
NUM_BLOCKS = 40
NUM_RANKS = 2
WIDTH = 256
SLOT_BYTES = 2 * WIDTH
DEADLINE_S = 30.0


def request_of(number: int, num_tokens: int, content: str) -> Any:
    """A request as the store sees it; equal contents have equal hashes."""
    hashes = [sha256(f"{content}{i}".encode()).digest() for i in range(num_tokens // TOKENS)]
    return SimpleNamespace(
        request_id=f"r{number}",
        num_tokens=num_tokens,
        num_computed_tokens=0,
        block_hashes=hashes,
        lora_request=None,
        skip_reading_prefix_cache=False,
    )


@cache
def bytes_of(digest: bytes, rank: int) -> torch.Tensor:
    """The bytes of a block on a rank: `(layers, width)`."""
    draw = np.random.default_rng([rank, *digest[:8]])
    return torch.from_numpy(draw.integers(0, 256, (2, WIDTH), np.uint8))


class Replica:
    """One engine: it computes the right bytes, and says which blocks it has loaded wrong ones."""

    def __init__(self, name: str, replica: int, num_slots: int = 8, **options: Any) -> None:
        options.setdefault("is_asynchronous", False)
        memory = {"host_memory_per_rank": f"{num_slots * SLOT_BYTES}B", "copy_priority": "normal"}
        offload = {**memory, **options.pop("offload", {})}
        parsed = ConnectorOptions.parse({"name": name, "offload": offload, **options})
        setting = EngineSetting(parsed, "model", ONE_GROUP, NUM_BLOCKS, NUM_RANKS, replica)
        self.layers = [
            {f"layer{i}": torch.zeros(NUM_BLOCKS, WIDTH, dtype=torch.uint8) for i in range(2)}
            for _ in range(NUM_RANKS)
        ]
        self.memories = [RankTiers(setting, rank, self.layers[rank]) for rank in range(NUM_RANKS)]
        self.peers = Peers(partial(service_address, name), replica, is_threaded=False)
        sharing = parsed.coordinator
        self.nodes = None if sharing is None else Nodes(setting, find_index(sharing))
        self.store = BlockStore(setting, time.monotonic, peers=self.peers, nodes=self.nodes)
        self.num_adopted, _ = self.store.adopt(
            {memory.rank: memory.inventory() for memory in self.memories}
        )
        self.num_requests = 0
        self.num_failed = 0

    def run(self, content: str, num_tokens: int) -> int:
        """Run a request to its end; return how many of its tokens were loaded and right."""
        self.num_requests += 1
        request = request_of(self.num_requests, num_tokens, content)
        give_up_s = time.monotonic() + DEADLINE_S
        while (found := self.store.num_matched(request, 0)) is None:
            assert time.monotonic() < give_up_s, "the request waits on and on"
            self.step()
        blocks = list(range(1, 1 + len(request.block_hashes) + 1))
        for layers in self.layers:  # what was there is another request's
            for rows in layers.values():
                rows[blocks] = 255
        self.store.allocated(request, [blocks], found)
        request.num_computed_tokens = found
        invalid = self._load(request, blocks, give_up_s)
        num_loaded = min([found // TOKENS, *(blocks.index(block) for block in invalid)])
        self.num_failed += num_loaded * TOKENS < found
        request.num_computed_tokens = num_loaded * TOKENS
        self.compute(request, blocks)
        self.step({request.request_id: num_tokens - request.num_computed_tokens}, blocks)
        is_read = self.store.finished(request.request_id)
        reading = set(range(NUM_RANKS)) if is_read else set()
        while reading:  # its blocks are used again next
            assert time.monotonic() < give_up_s, "a store does not end"
            self.step()
            time.sleep(0)
            for memory in self.memories:
                if request.request_id in memory.take_finished()[0]:
                    reading.discard(memory.rank)
        self.step()
        self.store.check()
        return num_loaded * TOKENS

    def _load(self, request: Any, blocks: Sequence[int], give_up_s: float) -> set[int]:
        """Load what was found; check the bytes of each block, and return those that were not
        loaded."""
        found = request.num_computed_tokens // TOKENS
        waiting = set(range(NUM_RANKS)) if found else set()
        invalid: set[int] = set()
        is_begun = False
        while waiting or not is_begun:
            is_begun = True
            assert time.monotonic() < give_up_s, "a load does not end"
            self.step()
            time.sleep(0)  # lets the thread copy
            for memory in self.memories:
                if request.request_id in memory.take_finished()[1]:
                    waiting.discard(memory.rank)
                invalid |= memory.take_invalid_blocks()  # in vLLM's order
        self.store.received([request.request_id])
        for block, digest in zip(blocks[:found], request.block_hashes, strict=False):
            if block not in invalid:
                for rank in range(NUM_RANKS):
                    assert torch.equal(self.row(rank, block), bytes_of(digest, rank))
        return invalid

    def compute(self, request: Any, blocks: Sequence[int]) -> None:
        """Fill the blocks that were not loaded."""
        first = request.num_computed_tokens // TOKENS
        for block, digest in list(zip(blocks, request.block_hashes, strict=False))[first:]:
            for rank, layers in enumerate(self.layers):
                for i, rows in enumerate(layers.values()):
                    rows[block] = bytes_of(digest, rank)[i]

    def row(self, rank: int, block: int) -> torch.Tensor:
        return torch.stack([rows[block] for rows in self.layers[rank].values()])

    def step(self, scheduled: dict[str, int] | None = None, blocks: Sequence[int] = ()) -> None:
        commands = self.store.commands(scheduled or {}, lambda _: [blocks])
        for memory in self.memories:
            memory.await_stores(commands)
            memory.obey(commands)
            memory.store(commands)
        self.report()

    def report(self) -> None:
        told = [memory.take_reports() for memory in self.memories]
        for reports in told:
            if reports is not None:
                self.store.reported(reports)

    def settle(self) -> None:
        """Step until nothing is left to be done."""
        wait_until(
            lambda: not self.store.has_unsent_commands,
            "there is always something left to be done",
            meanwhile=self.step,
            pause_s=0.0,
        )
        self.peers.refresh()

    def held(self) -> set[bytes]:
        """The blocks that it holds on every rank."""
        held = [
            {key[:32] for key in memory.inventory().slot_keys.values()} for memory in self.memories
        ]
        assert held[0] == held[1]
        return held[0]

    def lose_memory(self) -> None:
        """Give the lock of the memory back, which a killed process loses, and end nothing."""
        for memory in self.memories:
            memory._host.segment.close()

    def close(self) -> None:
        if self.nodes is not None:
            self.nodes.close()
        for memory in self.memories:
            memory.close()


Start = Callable[..., Replica]


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def start(name: str) -> Iterator[Start]:
    """Starts replicas of one name."""
    service = HostMemoryService(service_address(name).address, max_segments=9, max_bytes=2**30)
    service.serve()
    started: list[Replica] = []

    def make(replica: int, **options: Any) -> Replica:
        started.append(Replica(name, replica, **options))
        return started[-1]

    yield make
    for replica in started:
        replica.close()
    service.close()


@pytest.fixture(params=[True, False], ids=["asynchronous", "synchronous"])
def pair(start: Start, request: pytest.FixtureRequest) -> tuple[Replica, Replica]:
    return start(0, is_asynchronous=request.param), start(1, is_asynchronous=request.param)


def settle(*replicas: Replica) -> None:
    for replica in replicas:
        replica.settle()
    for replica in replicas:
        replica.peers.refresh()


def test_what_one_computes_the_other_loads_and_each_block_is_stored_once(
    pair: tuple[Replica, Replica],
) -> None:
    first, second = pair
    assert first.run("a", 17) == 0
    settle(*pair)
    assert second.run("a", 25) == 16
    settle(*pair)
    digests = request_of(0, 24, "a").block_hashes
    assert (first.held(), second.held()) == (set(digests[:4]), set(digests[4:]))
    assert first.run("a", 25) == 24
    assert second.run("a", 25) == 24
    settle(*pair)
    assert (first.held(), second.held()) == (set(digests[:4]), set(digests[4:]))


def test_blocks_of_a_replica_that_is_gone_are_loaded_and_stored_no_second_time(
    start: Start,
) -> None:
    first = start(0)
    first.run("a", 17)
    first.settle()
    first.close()
    second = start(1)
    second.settle()
    assert second.run("a", 17) == 16
    second.settle()
    assert second.held() == set()
    again = start(0)
    assert again.num_adopted == 4
    again.settle()
    assert again.run("a", 17) == 16


def test_the_next_engine_evicts_what_the_one_before_used_least_lately(start: Start) -> None:
    first = start(0)
    for content, num_tokens in (("a", 13), ("b", 13), ("c", 9), ("d", 9), ("a", 13)):
        first.run(content, num_tokens)  # "d" takes the slots of a tail of "a", "a" those of "b"
    first.settle()
    first.close()
    again = start(0)
    assert again.num_adopted == 8
    again.settle()
    again.run("e", 9)
    again.settle()
    found = {content: again.run(content, num) for content, num in (("a", 13), ("d", 9), ("c", 9))}
    assert found == {"a": 12, "d": 8, "c": 4}  # the head of "b" has gone, and the tail of "c"


@pytest.mark.parametrize("weights_stay", [False, True])
def test_after_a_reset_replicas_share_only_if_weights_never_change(
    start: Start, weights_stay: bool
) -> None:
    first, second = (start(i, adopt_after_reset=weights_stay) for i in (0, 1))
    first.run("a", 17)
    settle(first, second)
    second.store.reset()
    loaded = 16 if weights_stay else 0  # the first one has old blocks
    assert second.run("a", 17) == loaded
    second.run("b", 9)
    settle(first, second)
    assert first.run("b", 9) == loaded // 2
    assert first.run("a", 17) == 16


def test_a_changed_byte_is_computed_again_and_stored_by_the_one_who_did(start: Start) -> None:
    first, second = start(0), start(1)
    first.run("a", 17)
    settle(first, second)
    first.memories[1]._host.segment.tensors[0][1, 9] ^= 1
    assert second.run("a", 17) == 4
    assert second.num_failed == 1
    settle(first, second)
    assert second.held() == {request_of(0, 17, "a").block_hashes[1]}
    assert second.run("a", 17) == 16


def test_blocks_that_a_peer_has_in_memory_are_not_read_from_own_files(
    start: Start, tmp_path: Path
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "1MiB", "write": "on_store"}
    second = start(1, offload={"disk": disk})
    second.run("a", 17)
    for content in "bcd":
        second.run(content, 33)
        second.settle()
    first = start(0)
    first.run("a", 17)
    settle(first, second)
    fetches: list[RankCommands] = []
    commands = second.store.commands

    def watched(*arguments: Any) -> RankCommands:
        made = commands(*arguments)
        fetches.extend([made] if made.fetches else [])
        return made

    second.store.commands = watched  # type: ignore[method-assign]
    assert second.run("a", 17) == 16
    assert not fetches


def files_on_disk(directory: Path) -> dict[str, set[str]]:
    """The names of files in the directory of each rank."""
    ranks = {path.name for path in directory.rglob("rank*")}
    assert ranks == {f"rank{rank}" for rank in range(NUM_RANKS)}
    return {rank: {path.name for path in directory.rglob(f"{rank}/??/*")} for rank in ranks}


def shared_disk(directory: Path, num_files: int, **more: Any) -> dict[str, Any]:
    return {
        "disk": {
            "directory": str(directory),
            "capacity_per_rank": f"{num_files * SLOT_BYTES}B",
            "write": "on_store",
            **more,
        }
    }


def test_what_one_has_written_to_files_the_other_reads_and_writes_no_second_time(
    start: Start, tmp_path: Path
) -> None:
    disk = shared_disk(tmp_path, 400)
    first, second = (start(i, offload=disk) for i in (0, 1))
    first.run("a", 17)
    for content in "bcd":  # its memory is full of others then
        first.run(content, 33)
        first.settle()
    before = files_on_disk(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.kvb")}
    assert second.run("a", 17) == 16
    second.settle()
    assert files_on_disk(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.kvb")} == times
    third = start(2, offload=disk)
    assert third.run("a", 17) == 16
    third.settle()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.kvb")} == times


@pytest.mark.parametrize("damage", ["remove", "flip", "other"])
def test_a_file_that_another_one_removes_or_damages_is_computed_again(
    start: Start, tmp_path: Path, damage: str
) -> None:
    disk = shared_disk(tmp_path, 400)
    first, second = (start(i, offload=disk) for i in (0, 1))
    first.run("a", 17)
    for content in "bcd":
        first.run(content, 33)
        first.settle()
    second.step()  # it has seen them
    name = (request_of(0, 17, "a").block_hashes[2] + bytes(4)).hex()
    (path,) = tmp_path.rglob(f"rank1/*/{name}.kvb")
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    else:
        other = next(each for each in tmp_path.rglob("rank1/*/*.kvb") if each != path)
        path.write_bytes(other.read_bytes())
    assert second.run("a", 17) == 8
    second.settle()
    assert second.run("a", 17) == 16
    assert second.num_failed == 0


def test_the_limit_of_files_holds_for_three_writers_of_which_some_are_killed_or_hang(
    start: Start, tmp_path: Path
) -> None:
    num_files = 16
    disk = shared_disk(tmp_path, num_files, write="on_evict")
    replicas = [start(i, offload=disk) for i in range(3)]
    draw = random.Random(5)
    num_loaded = 0
    for number in range(80):
        i = draw.randrange(3)
        if number > 30 and i == 2:
            continue  # it hangs
        if number in (45, 60, 75):  # it is killed: none of its ends is told
            replicas[0].lose_memory()
            replicas[0] = start(0, offload=disk)
        num_loaded += replicas[i].run(f"{draw.randrange(6)}", draw.randrange(9, 30))
        replicas[i].settle()
        if number % 3 == 0:
            replicas[i].peers.refresh()
        for names in files_on_disk(tmp_path).values():
            assert len(names) <= num_files + num_files // 8
    assert num_loaded > 20 * TOKENS
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.kvb")]
    assert len(sizes) > NUM_RANKS * num_files // 2
    assert max(sizes) <= SLOT_BYTES + 512


def run_on_and_on(name: str, replica: int, seed: int) -> None:
    """Run requests until the process is killed; say so when the first one is through."""
    engine, draw = Replica(name, replica), random.Random(seed)
    while True:
        engine.run(draw.choice("abcdefgh"), draw.randrange(5, 30))
        if engine.num_requests == 1:
            print("begun", flush=True)


@pytest.mark.seeds(1, long=4)
def test_an_owner_in_another_process_is_killed_at_any_moment(
    start: Start, name: str, seeds: range
) -> None:
    draw = random.Random(3)
    engine = start(1)
    runs = f"from {__name__} import *; run_on_and_on({name!r}, 0, int(sys.argv[1]))"
    num_loaded = num_failed = 0
    for seed in seeds:
        with subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {runs}", str(seed)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        ) as owner:
            assert owner.stdout.readline() == b"begun\n"
            end_s = time.monotonic() + 0.5 + draw.random()
            num_runs = engine.num_requests + 50
            while time.monotonic() < end_s or engine.num_requests < num_runs:
                engine.peers.refresh()
                num_loaded += engine.run(draw.choice("abcdefgh"), draw.randrange(5, 30))
            owner.kill()
        num_failed = engine.num_failed
        for content in "abcdefgh":  # the memory stays, and nothing writes to it
            engine.peers.refresh()
            num_loaded += engine.run(content, 29)
        assert engine.num_failed == num_failed
    assert num_loaded > 50 * TOKENS * len(seeds)


class Faults:
    """What happens during copies: another replica uses its slots again, or a byte changes."""

    def __init__(self, draw: random.Random, replicas: Sequence[Replica]) -> None:
        self.draw = draw
        self.replicas = replicas
        self.loader: Replica | None = None
        self.num_acts = 0
        self.problems: list[Exception] = []
        self.is_acting = False

    def before_copy(self) -> None:
        draw = self.draw
        if self.loader is None or self.is_acting or draw.random() > 0.3:
            return
        self.is_acting = True
        self.num_acts += 1
        try:
            self._act(draw)
        except Exception as error:  # the copy reports it as its own
            self.problems.append(error)
        self.is_acting = False

    def _act(self, draw: random.Random) -> None:
        owner = draw.choice([each for each in self.replicas if each is not self.loader])
        kind = draw.choice(("run", "run", "evict", "flip"))
        slot = draw.randrange(8)
        if kind == "run":
            owner.run(draw.choice("abcde"), draw.randrange(5, 30))
        elif kind == "evict":
            for memory in owner.memories:
                memory.obey(RankCommands(forgotten_slots=(slot,)))
        else:
            tensors = draw.choice(owner.memories)._host.segment.tensors
            tensors[draw.randrange(2)][slot, draw.randrange(WIDTH)] ^= 1


@pytest.mark.seeds(3, long=8)
def test_whatever_an_owner_does_during_a_load_no_byte_is_wrong(
    seed: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    options = {"is_asynchronous": bool(seed % 2)}
    replicas = [start(0, **options), start(1, num_slots=11, **options)]
    faults = Faults(draw, replicas)
    copy = RowMover.copy_hashed

    def copy_hashed(*arguments: Any) -> None:
        faults.before_copy()
        copy(*arguments)

    monkeypatch.setattr(RowMover, "copy_hashed", copy_hashed)
    num_loaded = 0
    for _ in range(80):
        replica = draw.choice(replicas)
        if draw.random() < 0.7:
            replica.peers.refresh()
        faults.loader = replica
        num_loaded += replica.run(draw.choice("abcde"), draw.randrange(5, 30))
        faults.loader = None
        if draw.random() < 0.03:
            replica.store.reset()
    for replica in replicas:
        replica.settle()
        assert not list(replica.store._peer_loads)
        statistics = replica.store.statistics
        assert statistics is not None and not any(statistics.open_jobs.values())
    assert faults.problems == []
    assert num_loaded > 0
    assert faults.num_acts > 10
