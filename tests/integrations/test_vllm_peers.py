"""Replicas of one name that read each other's memory: real segments, no vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.base.arrays import int32_array
from kvcache.base.errors import NotEnoughMemoryError, NotRunningError, PlanMismatchError
from kvcache.integrations.vllm import peers as peers_module
from kvcache.integrations.vllm import rank_memory
from kvcache.integrations.vllm.block_labels import block_labels
from kvcache.integrations.vllm.peers import CHUNK_SLOTS, PeerIndex, PeerReaders, Peers
from kvcache.integrations.vllm.rank_tiers import RankTiers
from kvcache.integrations.vllm.step_messages import (
    LoadCommand,
    PeerMemory,
    RankCommands,
    StoreCommand,
)
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient, service_address
from kvcache.memory_service.service import HostMemoryService
from kvcache.offload.keys import OffloadKey
from kvcache.worker.copies.rows import RowMover
from kvcache.worker.host_memory.segment import HostSegment, SegmentShape, open_segment, shape_in
from kvcache.worker.host_memory.segment_reader import SegmentReader
from kvcache.worker.host_memory.shared_memory import make_memory
from tests.integrations.test_vllm_rank_tiers import (
    DIGESTS,
    NO_PARENTS,
    caches,
    report_of,
    seal,
    setting_of,
    store,
)
from tests.waiting import wait_until

KEYS = tuple(OffloadKey(digest + bytes(4)) for digest in DIGESTS)
DEADLINE_S = 60.0
SHAPE = SegmentShape("layout", 0, 3 * CHUNK_SLOTS, (64,), 32, 1)


def digest_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key_of(number: int) -> OffloadKey:
    return OffloadKey(digest_of(number) + bytes(4))


class Owner:
    """Segments of one peer's ranks, and an index of them."""

    def __init__(self, num_ranks: int = 1, shapes: Sequence[SegmentShape] = ()) -> None:
        shapes = shapes or [SHAPE] * num_ranks
        self.segments = [
            HostSegment(make_memory("test", shape.size_bytes), shape) for shape in shapes
        ]
        readers = [SegmentReader(segment.descriptor, SHAPE) for segment in self.segments]
        self.index = PeerIndex(PeerMemory(1, tuple(range(len(shapes)))), readers)

    def write(self, rank: int, contents: dict[int, int], *, checksum: int = 7) -> None:
        """Have slots hold blocks of these numbers, sealed."""
        slots, labels = int32_array(list(contents)), self.segments[rank].labels
        generations = labels.begin(slots)
        labels.describe(slots, block_labels(slots, [key_of(i) for i in contents.values()]))
        labels.finish(slots, generations, np.full(len(slots), checksum, np.int64))
        labels.seal(slots)

    def withdraw(self, rank: int, *slots: int) -> None:
        self.segments[rank].labels.withdraw(int32_array(slots))

    def found(self, *numbers: int) -> list[int]:
        return self.index.slots_of([key_of(number) for number in numbers])


def test_an_index_follows_what_all_ranks_have_sealed_in_the_same_slot() -> None:
    owner = Owner(num_ranks=2)
    owner.write(0, {0: 10, 1: 11, 2: 12})
    owner.index.refresh()
    assert owner.found(10, 11, 12) == [-1, -1, -1]
    owner.write(1, {0: 10, 1: 12, 2: 11, 3: 13})
    owner.index.refresh()
    assert owner.found(10, 11, 12, 13) == [0, -1, -1, -1]
    owner.write(1, {1: 11})
    owner.index.refresh()
    assert owner.found(10, 11, 12, 13) == [0, 1, -1, -1]


def test_ranks_may_have_different_numbers_of_slots() -> None:
    owner = Owner(shapes=[SHAPE, replace(SHAPE, num_slots=5)])
    owner.write(0, {4: 10, 5: 11})
    owner.write(1, {4: 10})
    owner.index.refresh()
    assert owner.found(10, 11) == [4, -1]


def test_an_index_forgets_what_was_withdrawn_or_overwritten() -> None:
    owner = Owner()
    owner.write(0, {slot: slot for slot in range(2 * CHUNK_SLOTS + 5)})
    owner.index.refresh()
    assert len(owner.index) == 2 * CHUNK_SLOTS + 5
    owner.withdraw(0, 3)
    owner.write(0, {4: 999_999, 5: 5})
    assert owner.found(3, 4, 5, 6) == [-1, -1, -1, 6]  # at once
    owner.index.refresh()
    assert owner.found(3, 4, 5, 6, 999_999) == [-1, -1, 5, 6, 4]


def test_a_block_without_a_checksum_is_not_shared() -> None:
    owner = Owner()
    owner.write(0, {0: 10}, checksum=-1)
    owner.index.refresh()
    assert owner.found(10) == [-1]


def test_what_could_not_be_loaded_is_found_again_once_it_is_sealed_again() -> None:
    owner = Owner()
    owner.write(0, {0: 10, 1: 11})
    owner.index.refresh()
    owner.index.distrust([key_of(10)])
    owner.index.refresh()
    assert owner.found(10, 11) == [-1, 1]
    owner.write(0, {0: 10})
    owner.index.refresh()
    assert owner.found(10, 11) == [0, 1]


def test_a_reader_takes_another_size_and_no_other_layout() -> None:
    owner = Owner()
    descriptor = owner.segments[0].descriptor
    larger = SegmentShape("layout", 0, 99_999, (64,), 32, 1)
    assert SegmentReader(descriptor, larger).shape == SHAPE
    for other in (
        SegmentShape("another", 0, 9, (64,), 32, 1),
        SegmentShape("layout", 1, 9, (64,), 32, 1),
        SegmentShape("layout", 0, 9, (32, 32), 32, 1),
    ):
        with pytest.raises(PlanMismatchError, match="of layout layout, rank 0, this engine reads"):
            SegmentReader(descriptor, other)
    with pytest.raises(PlanMismatchError, match="holds no host segment"):
        SegmentReader(make_memory("test", 8192), SHAPE)


def test_a_head_says_its_shape_unless_it_is_damaged() -> None:
    head = SHAPE.head().ljust(4096, b"\0")
    assert shape_in(head) == SHAPE
    for place in range(len(SHAPE.head())):
        damaged = bytearray(head)
        damaged[place] ^= 1
        with pytest.raises(PlanMismatchError):
            shape_in(bytes(damaged))


# --- ranks

Started = Callable[..., RankTiers]


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def service(name: str) -> Iterator[HostMemoryService]:
    """The memory service of these replicas, in this process."""
    made = HostMemoryService(service_address(name).address, max_segments=9, max_bytes=2**30)
    made.serve()
    yield made
    made.close()


@pytest.fixture
def started(name: str, service: HostMemoryService) -> Iterator[Started]:
    """Starts replicas of one name, each with memory of its own, and ends them."""
    memories: list[RankTiers] = []

    def start(replica: int, fill: float = 0.0, revision: str = "", **offload: Any) -> RankTiers:
        setting = setting_of(name, revision, replica=replica, **offload)
        memories.append(RankTiers(setting, 0, caches(fill)))
        return memories[-1]

    yield start
    for memory in memories:
        memory.close()


@pytest.fixture
def owner(started: Started) -> RankTiers:
    """Replica 0, which holds three blocks."""
    memory = started(0, 1.0)
    assert store(memory, (0, 1, 2), (5, 6, 7)).ok
    seal(memory, 0, 1, 2)
    return memory


@pytest.fixture
def peers(name: str, owner: RankTiers) -> Peers:
    """What replica 1 knows of the others."""
    found = Peers(partial(service_address, name), 1, is_threaded=False)
    shape = owner.inventory().shape
    assert shape is not None
    found.begin([shape])
    found.refresh()
    return found


def load_from(memory: RankTiers, peer: PeerMemory, *slots: int) -> Any:
    """Load slots of a peer into the blocks from 8 on; return the report."""
    blocks, keys = tuple(range(8, 8 + len(slots))), tuple(KEYS[slot] for slot in slots)
    command = LoadCommand(2, "r", slots, blocks, keys, peer)
    memory.obey(RankCommands(loads=(command,)))
    return report_of(memory)


def blocks_of(memory: RankTiers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of both layers, as bytes."""
    first, second = memory._jobs._pool.rows
    return first, second


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_rank_loads_what_a_peer_has_sealed(
    started: Started, owner: RankTiers, peers: Peers, is_asynchronous: bool
) -> None:
    (index,) = peers.indexes
    assert index.slots_of(KEYS) == [0, 1, 2, -1]
    memory = started(1, is_asynchronous=is_asynchronous)
    assert load_from(memory, index.memory, 0, 1, 2).ok
    assert memory.take_finished()[1] == {"r"}
    for loaded, right in zip(blocks_of(memory), blocks_of(owner), strict=True):
        assert torch.equal(loaded[8:11], right[5:8])
    assert memory.inventory().slot_keys == {}  # it keeps no copy


def test_a_request_has_received_its_blocks_when_its_last_load_has_ended(
    started: Started, owner: RankTiers, peers: Peers
) -> None:
    memory = started(1, 1.0)
    assert store(memory, (0,), (4,), job=1).ok
    seal(memory, 0)
    loads = (
        LoadCommand(2, "r", (0,), (8,), KEYS[:1]),
        LoadCommand(3, "r", (1,), (9,), KEYS[1:2], peers.indexes[0].memory),
    )
    memory.obey(RankCommands(loads=loads))
    told: list[int] = []
    while len(told) < 2:
        is_received = memory.take_finished()[1] == {"r"}
        reports = memory.take_reports()
        told += [] if reports is None else [report.job_id for _, report in reports.jobs]
        assert is_received <= (len(told) == 2)
    assert sorted(told) == [2, 3]


@pytest.mark.parametrize("verify", ["always", "never"])
def test_a_changed_byte_of_a_peer_is_never_loaded(
    started: Started, owner: RankTiers, peers: Peers, verify: str
) -> None:
    owner._host.segment.tensors[1][1, 17] ^= 1
    memory = started(1, verify=verify)
    report = load_from(memory, peers.indexes[0].memory, 0, 1, 2)
    assert (report.ok, report.block_ids) == (False, (1,))
    assert memory.take_invalid_blocks() == {9}
    assert not blocks_of(memory)[1][9].any()


def test_a_changed_label_of_a_peer_is_never_believed(
    started: Started, owner: RankTiers, peers: Peers
) -> None:
    rows = owner._host.labels._rows
    rows["checksum"][0] ^= 1
    rows["parent"][2, 5] ^= 1
    report = load_from(started(1), peers.indexes[0].memory, 0, 1, 2)
    assert report.block_ids == (0, 2)


@pytest.fixture
def at_copies(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens before the next copies of rows: two of them are one load, of both layers."""
    acts: list[Callable[[], None]] = []
    copy = RowMover.copy_hashed

    def copy_hashed(*arguments: Any) -> None:
        act = acts.pop(0) if acts else nothing
        waiting, acts[:] = acts[:], []  # an act may copy, too
        act()
        acts[:] = waiting
        copy(*arguments)

    monkeypatch.setattr(RowMover, "copy_hashed", copy_hashed)
    return acts


def nothing() -> None:
    """Let the copy be."""


def evict(memory: RankTiers) -> None:
    memory.obey(RankCommands(forgotten_slots=(1,)))


def refill(memory: RankTiers, key: bytes, block: int) -> None:
    """Have slot 1 hold another block, sealed."""
    evict(memory)
    command = StoreCommand(9, (1,), (block,), (key,), NO_PARENTS[:1])
    memory.store(RankCommands(store=command))
    assert report_of(memory).ok
    seal(memory, 1)


@pytest.mark.parametrize(
    "case",
    list(product(("evict", "other block", "same block", "other bytes"), (0, 1, 2))),
    ids=lambda case: f"{case[0]} {('before', 'between the layers', 'behind')[case[1]]}",
)
def test_a_slot_that_its_owner_uses_again_during_a_load_is_not_loaded(
    started: Started,
    owner: RankTiers,
    peers: Peers,
    at_copies: list[Callable[[], None]],
    case: tuple[str, int],
) -> None:
    what, moment = case
    acts = {
        "evict": lambda: evict(owner),
        "other block": lambda: refill(owner, KEYS[3], 9),
        "same block": lambda: refill(owner, KEYS[1], 6),
        "other bytes": lambda: refill(owner, KEYS[1], 9),
    }
    memory = started(1, is_asynchronous=False)
    at_copies[:] = [nothing, nothing, nothing]
    if moment < 2:
        at_copies[moment] = acts[what]
    peer = peers.indexes[0].memory
    command = LoadCommand(2, "r", (0, 1, 2), (8, 9, 10), KEYS[:3], peer)
    memory._num_loads["r"] += 1
    memory._start_peer_load(command, peer)
    at_copies.clear()
    if moment == 2:
        acts[what]()
    report = report_of(memory)
    assert (report.ok, report.block_ids) == (False, (1,))
    assert memory.take_invalid_blocks() == {9}
    peers.refresh()
    assert load_from(memory, peer, 0, 2).ok


def test_a_killed_peer_leaves_its_blocks_to_the_others(
    started: Started, owner: RankTiers, peers: Peers, service: HostMemoryService
) -> None:
    owner.close()  # its lock goes; the memory service has its memory
    peers.refresh()
    (index,) = peers.indexes
    assert load_from(started(1), index.memory, 0, 1).ok
    service.close()
    peers.refresh()
    assert peers.indexes == (index,)
    assert load_from(started(2, keeps_memory=False), index.memory, 0).detail.startswith(
        "the memory of replica 0 cannot be read: no memory service answers"
    )


def test_a_peer_of_other_weights_is_never_read(
    started: Started, owner: RankTiers, name: str
) -> None:
    memory = started(1, revision="2")
    shape = memory.inventory().shape
    assert shape is not None
    peers = Peers(partial(service_address, name), 1, is_threaded=False)
    peers.begin([shape])
    peers.refresh()
    assert peers.indexes == ()
    address = service_address(name)
    numbers = MemoryServiceClient(address.address).list(f"{name}/")
    peer = PeerMemory(0, (numbers[f"{name}/rank0"],))
    report = load_from(memory, peer, 0, 1)
    assert not report.ok
    assert "this engine reads layout" in report.detail


def test_peers_come_and_go(started: Started, name: str) -> None:
    first = started(0)
    shape = first.inventory().shape
    assert shape is not None
    peers = Peers(partial(service_address, name), 0, is_threaded=False)
    peers.begin([shape])
    peers.refresh()
    assert peers.indexes == ()
    second = started(12, 1.0, host_memory_per_rank="2MiB")
    store(second, (0, 1), (5, 6))
    seal(second, 0, 1)
    peers.refresh()
    (index,) = peers.indexes
    assert (index.memory.replica, index.slots_of(KEYS)) == (12, [0, 1, -1, -1])
    second.close()
    third = started(12, 1.0)  # of another size: the memory is new
    store(third, (5,), (7,))
    seal(third, 5)
    peers.refresh()
    (index,) = peers.indexes
    assert index.slots_of(KEYS) == [5, -1, -1, -1]
    client = MemoryServiceClient(service_address(name).address)
    client.drop(f"{name}/replica12/rank0")
    peers.refresh()
    assert peers.indexes == ()


def test_errors_that_no_one_expects_do_not_end_the_look_at_peers(
    owner: RankTiers, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for pause in ("LIST_S", "REFRESH_S"):
        monkeypatch.setattr(peers_module, pause, 0.01)
    errors = [RuntimeError("a bug")] * 3

    def address_of(replica: int) -> MemoryServiceAddress:
        if errors:
            raise errors.pop()
        return service_address(name, replica)

    shape = owner.inventory().shape
    assert shape is not None
    peers = Peers(address_of, 1)
    peers.begin([shape])
    await_peers(peers)
    errors += [RuntimeError("another bug")] * 3
    wait_until(lambda: not errors, "peers are not looked at any more")
    await_peers(peers)
    peers.close()
    assert caplog.text.count("memory failed; the engine goes on, later errors") == 1


def await_peers(peers: Peers) -> None:
    """Wait until blocks of a peer are known."""
    wait_until(lambda: any(len(index) for index in peers.indexes), "no peer is found")


def test_each_peer_that_cannot_be_read_is_asked_now_and_then() -> None:
    asked: list[int] = []

    def address_of(replica: int) -> MemoryServiceAddress:
        asked.append(replica)
        return service_address("none", replica)

    readers = PeerReaders(address_of, SHAPE)
    for replica in (1, 2, 1, 2):
        with pytest.raises(NotRunningError):
            readers.reader_of(PeerMemory(replica, (1,)))
    assert asked == [1, 2]


def test_memory_that_was_replaced_is_let_go_and_mapped_again(
    started: Started, owner: RankTiers, peers: Peers
) -> None:
    memory = started(1)
    assert load_from(memory, peers.indexes[0].memory, 0).ok
    assert not memory._peers._readers
    owner.close()
    again = started(0, 1.0, host_memory_per_rank="2MiB")
    store(again, (0, 1), (5, 6))
    seal(again, 0, 1)
    report = load_from(memory, peers.indexes[0].memory, 0)
    assert report.detail.endswith("has other memory")
    peers.refresh()
    assert load_from(memory, peers.indexes[0].memory, 0, 1).ok


def test_memory_that_peers_map_a_moment_longer_is_waited_for(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [NotEnoughMemoryError("full")] * 2

    def open_late(*arguments: Any) -> HostSegment:
        if refusals:
            raise refusals.pop()
        return open_segment(*arguments)

    monkeypatch.setattr(rank_memory, "open_segment", open_late)
    with pytest.raises(NotEnoughMemoryError, match="has no room for its host memory"):
        started(0)  # there is no peer
    assert len(refusals) == 1
    refusals.clear()
    started(0)
    refusals += [NotEnoughMemoryError("full")] * 2
    started(1)
    refusals += [NotEnoughMemoryError("full")] * 9
    monkeypatch.setattr(rank_memory, "PEERS_LET_GO_S", 0.2)
    with pytest.raises(NotEnoughMemoryError, match="has no room for its host memory"):
        started(2)
