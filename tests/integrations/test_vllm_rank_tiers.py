"""A rank of the vLLM connector on real memory, with tensors like vLLM's and without vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.base.errors import (
    AlreadyRunningError,
    ClusterError,
    ConfigurationError,
    NotEnoughMemoryError,
    NotRunningError,
)
from kvcache.integrations.vllm import rank_memory
from kvcache.integrations.vllm.files_owner import FilesOwner
from kvcache.integrations.vllm.kv_groups import KVGroups
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.integrations.vllm.rank_tiers import RankTiers
from kvcache.integrations.vllm.step_messages import (
    FileCommand,
    LoadCommand,
    RankCommands,
    StoreCommand,
)
from kvcache.memory_service.client import MemoryServiceClient, service_address
from kvcache.memory_service.process import end
from kvcache.memory_service.protocol import make_socket, peer_process, socket_name
from kvcache.protocol.messages import JobReport
from kvcache.specs import FullAttentionSpec, SlidingWindowSpec
from kvcache.worker.copies.runner import CopyThread
from kvcache.worker.files import shared
from kvcache.worker.host_memory import segment
from tests.waiting import wait_until
from tests.worker.delayed_engine import DelayedEngine
from tests.worker.told_engine import ToldEngine

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 12
DIGESTS = tuple(bytes([i]) * 32 for i in range(1, 5))
KEYS = tuple(digest + bytes(4) for digest in DIGESTS)
GROUP = FullAttentionSpec(4, 1, 1)
NO_PARENTS = (bytes(32),) * 4


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = f"test-{uuid.uuid4().hex[:12]}"
    yield made
    try:
        end(service_address(made).address)
    except ClusterError:
        return


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, str]:
    return {"directory": str(tmp_path), "capacity_per_rank": "16KiB"}


def setting_of(name: str, revision: str = "", *, replica: int = 0, **offload: Any) -> EngineSetting:
    is_asynchronous = offload.pop("is_asynchronous", True)
    groups = KVGroups(offload.pop("specs", (GROUP,)), 4)
    options = ConnectorOptions.parse(
        {
            "name": name,
            "weight_revision": revision,
            "is_asynchronous": is_asynchronous,
            "offload": {"host_memory_per_rank": "1MiB", **offload},
        }
    )
    return EngineSetting(
        options, f"model {revision}", groups, NUM_BLOCKS, num_ranks=1, replica=replica
    )


def caches(fill: float = 0.0) -> dict[str, torch.Tensor]:
    """Two layers; each block has numbers of its own, all zero with `fill` 0."""
    shape = (NUM_BLOCKS, 2, 4, 16)
    numbers = torch.arange(NUM_BLOCKS * 128, dtype=torch.float32).reshape(shape) * fill
    return {"layer0": numbers, "layer1": numbers * 3}


def has_block_files(directory: Path) -> bool:
    """Return whether there are files of blocks, while some may be going."""
    return any(name.endswith(".kvb") for *_, names in os.walk(directory) for name in names)


def store(memory: RankTiers, slots: tuple[int, ...], blocks: tuple[int, ...], job: int = 1) -> Any:
    """Store blocks; return the report."""
    count = len(slots)
    command = StoreCommand(job, slots, blocks, KEYS[:count], NO_PARENTS[:count])
    memory.store(RankCommands(store=command))
    return report_of(memory)


def load(memory: RankTiers, slots: tuple[int, ...], blocks: tuple[int, ...], job: int = 2) -> Any:
    """Load blocks; return the report."""
    memory.obey(RankCommands(loads=(LoadCommand(job, "r", slots, blocks, KEYS[: len(slots)]),)))
    return report_of(memory)


def move(memory: RankTiers, kind: str, slots: tuple[int, ...], job: int = 3) -> Any:
    """Write or read files; return the report."""
    command = FileCommand(job, slots, b"".join(KEYS[: len(slots)]))
    memory.obey(RankCommands(**{kind: (command,)}))
    return report_of(memory)


def seal(memory: RankTiers, *slots: int) -> None:
    memory.obey(RankCommands(sealed=slots))


def report_of(memory: RankTiers) -> JobReport:
    """Return the one report that comes next."""
    give_up_s = time.monotonic() + 20
    while (told := memory.take_reports()) is None:
        assert time.monotonic() < give_up_s, "no job ends"
        time.sleep(0.001)
    ((rank, report),) = told.jobs
    assert rank == 0
    return report


def test_what_was_sealed_is_loaded_by_the_next_process(name: str) -> None:
    first = RankTiers(setting_of(name), 0, caches(1.0))
    assert store(first, (0, 1, 2), (5, 6, 7)).ok
    assert first.take_reports() is None
    seal(first, 0, 1)
    first.close()
    tensors = caches()
    second = RankTiers(setting_of(name), 0, tensors)
    assert second.origin == "attached"
    assert second.inventory().slot_keys == {0: KEYS[0], 1: KEYS[1]}
    assert load(second, (0, 1), (9, 3)).ok
    assert second.take_finished() == (set(), {"r"})
    assert second.take_finished() == (set(), set())
    assert second.take_invalid_blocks() == set()
    for layer, tensor in caches(1.0).items():
        assert torch.equal(tensors[layer][[9, 3]], tensor[[5, 6]])
    second.close()


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_load_that_fails_is_told(name: str, is_asynchronous: bool) -> None:
    tensors = caches(1.0)
    memory = RankTiers(setting_of(name, is_asynchronous=is_asynchronous), 0, tensors)
    store(memory, (0, 1, 2), (5, 6, 7))
    memory._host.segment.tensors[1][1, 17] ^= 1
    told = load(memory, (0, 1, 2, 3), (8, 9, 10, 11))  # slot 3 holds nothing
    assert (told.ok, told.block_ids) == (False, (1, 3))
    assert "its bytes changed in host memory" in told.detail
    assert memory.take_finished()[1] == {"r"}
    assert memory.take_invalid_blocks() == {9, 11}
    assert memory.take_invalid_blocks() == set()
    assert torch.equal(tensors["layer0"][10], tensors["layer0"][7])
    assert not tensors["layer1"][9].any()
    assert store(memory, (4,), (5,), job=4).ok
    memory.close()


def test_a_slot_that_holds_another_block_is_not_loaded(name: str) -> None:
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    store(memory, (0, 1), (5, 6))
    assert not load(memory, (1,), (8,)).ok
    assert memory.take_invalid_blocks() == {8}
    memory.close()


LABEL_FIELDS = [
    "state",
    "row_crc",
    "group",
    "namespace_bytes",
    "extra_bytes",
    "first_cell",
    "digest",
    "token_count",
]


@pytest.mark.parametrize("field", LABEL_FIELDS)
def test_a_block_whose_label_has_changed_is_neither_loaded_nor_written(
    name: str, tmp_path: Path, field: str
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "1MiB"}
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    memory.inventory()
    assert store(memory, (0, 1), (5, 6)).ok
    seal(memory, 0, 1)
    row = memory._host.labels._rows[1]
    row[field] = row[field] ^ (3 if field == "state" else 0x40)
    report = load(memory, (0, 1), (9, 3))
    assert (report.ok, report.block_ids) == (False, (1,))
    assert memory.take_invalid_blocks() == {3}
    report = move(memory, "spills", (0, 1))
    assert (report.ok, report.block_ids) == (False, (1,))
    memory.close()


def test_groups_with_one_digest_are_blocks_of_their_own(name: str) -> None:
    specs = (GROUP, SlidingWindowSpec(4, 1, 1, sliding_window=8))
    keys = (DIGESTS[0] + bytes(4), DIGESTS[0] + bytes([0, 0, 0, 1]))
    memory = RankTiers(setting_of(name, specs=specs), 0, caches(1.0))
    memory.store(RankCommands(store=StoreCommand(1, (0, 1), (5, 6), keys, NO_PARENTS[:2])))
    assert report_of(memory).ok
    seal(memory, 0, 1)
    memory.close()
    tensors = caches()
    after = RankTiers(setting_of(name, specs=specs), 0, tensors)
    assert after.inventory().slot_keys == dict(enumerate(keys))
    after.obey(RankCommands(loads=(LoadCommand(2, "r", (0, 1), (8, 9), keys),)))
    assert report_of(after).ok
    assert torch.equal(tensors["layer0"][[8, 9]], caches(1.0)["layer0"][[5, 6]])
    after.obey(RankCommands(loads=(LoadCommand(3, "s", (0, 1), (8, 9), keys[::-1]),)))
    assert not report_of(after).ok
    after.take_finished()
    assert (after.take_failed_requests(), after.take_failed_requests()) == ({"s"}, set())
    assert after.take_invalid_blocks() == set()
    after.obey(RankCommands(failed=("t",), received=("t",)))
    assert (after.take_finished()[1], after.take_failed_requests()) == ({"t"}, {"t"})
    after.close()


def test_other_groups_make_new_memory(name: str) -> None:
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    store(memory, (0,), (5,))
    seal(memory, 0)
    memory.close()
    windows = (SlidingWindowSpec(4, 1, 1, sliding_window=8),)
    after = RankTiers(setting_of(name, specs=windows), 0, caches())
    assert after.origin.startswith("fresh: the host segment has layout fingerprint")
    after.close()


def test_a_tensor_that_layers_of_two_groups_share_is_moved_once(name: str) -> None:
    one = torch.zeros(NUM_BLOCKS, 4, 16)
    memory = RankTiers(setting_of(name), 0, {"full": one, "window": one.view(NUM_BLOCKS, 8, 8)})
    assert memory._host.segment.shape.widths == (256,)
    memory.close()


def test_of_many_wrong_blocks_none_is_taken_for_right(name: str) -> None:
    tensors = {"layer": torch.ones(300, 4, 16)}
    setting = replace(setting_of(name), num_blocks=300)
    memory = RankTiers(setting, 0, tensors)
    keys = tuple(i.to_bytes(32, "big") + bytes(4) for i in range(100))
    places = tuple(range(100))
    command = StoreCommand(1, places, tuple(range(1, 101)), keys, (bytes(32),) * 100)
    memory.store(RankCommands(store=command))
    assert report_of(memory).ok
    memory._host.segment.tensors[0][:90, 3] ^= 1
    blocks = tuple(range(200, 300))
    memory.obey(RankCommands(loads=(LoadCommand(2, "r", places, blocks, keys),)))
    report = report_of(memory)
    assert not report.ok
    assert memory.take_invalid_blocks() >= set(range(200, 290))
    memory.close()


def test_blocks_that_are_used_again_wait_for_their_store(name: str) -> None:
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    command = StoreCommand(1, (0, 1), (5, 6), KEYS[:2], NO_PARENTS[:2])
    memory.store(RankCommands(store=command))
    memory.await_stores(RankCommands(reused_blocks=(5,)))
    assert report_of(memory).ok
    memory.close()


def test_a_store_whose_blocks_are_used_before_it_ends_is_not_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RankTiers(setting_of(name, job_s=0.01), 0, caches(1.0))
    may_go_on = threading.Event()
    pause = CopyThread._advance
    monkeypatch.setattr(CopyThread, "_advance", lambda *args: may_go_on.is_set() and pause(*args))
    command = StoreCommand(1, (0, 1), (5, 6), KEYS[:2], NO_PARENTS[:2])
    memory.store(RankCommands(store=command))
    memory.await_stores(RankCommands(reused_blocks=(5,)))
    may_go_on.set()
    memory._jobs.go_on()
    report = report_of(memory)
    assert (report.ok, report.detail) == (False, "its blocks were used again")
    memory.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_load_whose_copy_hangs_is_given_up_once_and_reported_at_its_end(
    name: str, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    store(memory, (0, 1), (5, 6))
    if is_damaged:
        memory._host.segment.tensors[1][1, 17] ^= 1
    may_go_on = threading.Event()
    advance = CopyThread._advance
    monkeypatch.setattr(CopyThread, "_advance", lambda *args: may_go_on.is_set() and advance(*args))
    memory.obey(RankCommands(loads=(LoadCommand(2, "r", (0, 1), (8, 9), KEYS[:2]),)))
    assert memory.take_finished() == (set(), set())
    assert memory.take_reports() is None
    memory._loads[2].deadline_s = time.monotonic()
    assert memory.take_finished() == (set(), {"r"})
    assert memory.take_failed_requests() == {"r"}
    told = memory.take_reports()
    assert told is not None and (told.jobs, told.overdue_loads) == ((), (2,))
    may_go_on.set()
    memory._jobs.go_on()
    assert report_of(memory).block_ids == ((1,) if is_damaged else ())
    # The request is computed in other blocks by now, and may be over.
    assert (memory.take_finished(), memory.take_failed_requests()) == ((set(), set()), set())
    assert memory.take_invalid_blocks() == set()
    assert memory.take_reports() is None
    memory.close()


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_jobs_begin_behind_the_forward_and_end_with_their_last_byte(
    name: str, is_asynchronous: bool
) -> None:
    tensors, engine = caches(1.0), ToldEngine()
    setting = setting_of(name, is_asynchronous=is_asynchronous)
    memory = RankTiers(setting, 0, tensors, engine=engine)
    command = StoreCommand(1, (0, 1), (5, 6), KEYS[:2], NO_PARENTS[:2])
    memory.store(RankCommands(store=command))
    await_copies(memory, engine, 2)
    assert engine.log == ["forward end", "copy", "copy"]
    memory.obey(RankCommands())  # a step without loads
    assert memory.take_reports() is None
    tensors["layer1"][6] += 1  # the forward is not over: the device reads later
    engine.finish()
    assert report_of(memory).ok
    memory.obey(RankCommands(loads=(LoadCommand(2, "r", (0, 1), (8, 9), KEYS[:2]),)))
    await_copies(memory, engine, 4)
    assert engine.log[3:] == ["forward end", "copy", "copy"]
    assert memory.take_finished() == (set(), set())
    engine.finish()
    assert report_of(memory).ok
    assert memory.take_finished() == (set(), {"r"})
    for tensor in tensors.values():
        assert torch.equal(tensor[[8, 9]], tensor[[5, 6]])
    memory.close()


def await_copies(memory: RankTiers, engine: ToldEngine, count: int) -> None:
    wait_until(lambda: len(engine.copies) >= count, "no copy begins", meanwhile=memory.take_reports)


def test_a_block_is_not_used_again_while_the_device_reads_it(name: str) -> None:
    engine = ToldEngine()
    memory = RankTiers(setting_of(name, job_s=0.05), 0, caches(1.0), engine=engine)
    for job, slot in ((1, 0), (2, 1)):
        command = StoreCommand(job, (slot,), (5 + slot,), KEYS[slot : slot + 1], NO_PARENTS[:1])
        memory.store(RankCommands(store=command))
    await_copies(memory, engine, 4)
    engine.copies[2].finish()
    engine.copies[3].finish()
    assert report_of(memory).job_id == 2
    memory.await_stores(RankCommands(reused_blocks=(5, 6)))  # job_s, then
    engine.finish()
    report = report_of(memory)
    assert (report.job_id, report.detail) == (1, "its blocks were used again")
    memory.close()


def test_what_is_loaded_late_and_in_any_order_is_what_was_stored(name: str) -> None:
    for seed in range(10):
        print("seed", seed)
        engine, tensors = DelayedEngine(seed), caches(1.0)
        memory = RankTiers(setting_of(name), 0, tensors, engine=engine)
        places = tuple(engine.chance.sample(range(16), 4))
        assert store(memory, places, (1, 2, 3, 4)).ok
        assert load(memory, places, (8, 7, 6, 5)).ok
        memory._host.segment.tensors[1][places[2], 5] ^= 1
        report = load(memory, places, (9, 10, 11, 0), job=3)
        assert (report.ok, report.block_ids) == (False, (places[2],))
        for layer, before in caches(1.0).items():
            tensor = tensors[layer]
            assert torch.equal(tensor[[8, 7, 6, 5]], before[[1, 2, 3, 4]])
            assert torch.equal(tensor[[9, 10, 11, 0]], before[[1, 2, 11, 4]])
        assert memory.take_invalid_blocks() == {11}
        memory.close()


def test_dropped_blocks_are_gone_for_the_next_process_too(name: str) -> None:
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    store(memory, (0, 1, 2), (5, 6, 7))
    seal(memory, 0, 1, 2)
    memory.obey(RankCommands(forgotten_slots=(1,)))
    assert sorted(memory.inventory().slot_keys) == [0, 2]
    memory.obey(RankCommands(forgotten_slots=(0, 2)))
    memory.close()
    after = RankTiers(setting_of(name), 0, caches())
    assert (after.origin, after.inventory().slot_keys) == ("attached", {})
    after.close()


def test_files_outlive_the_memory(name: str, disk: dict[str, str], tmp_path: Path) -> None:
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    store(memory, (0, 1, 2), (5, 6, 7))
    assert move(memory, "spills", (0, 1, 2)).ok
    memory.close()
    end(service_address(name).address)
    tensors = caches()
    after = RankTiers(setting_of(name, disk=disk), 0, tensors)
    inventory = after.inventory()
    assert (inventory.slot_keys, inventory.num_files) == ({}, 16)
    assert set(inventory.file_keys) == set(KEYS[:3])
    assert move(after, "fetches", (3, 4, 5)).ok
    assert load(after, (3, 4, 5), (1, 2, 3), job=4).ok
    for layer, tensor in caches(1.0).items():
        assert torch.equal(tensors[layer][[1, 2, 3]], tensor[[5, 6, 7]])
    after.obey(RankCommands(forgotten_keys=KEYS[1]))
    after.close()
    assert len(list(tmp_path.rglob("*.kvb"))) == 2


def test_adopted_files_are_evicted_from_the_end_of_a_prompt(
    name: str, disk: dict[str, str]
) -> None:
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    slots, order = (0, 1, 2, 3), (2, 0, 3, 1)  # of the keys, whose files are read by name
    keys = tuple(KEYS[place] for place in order)
    parents = (bytes(32), *(DIGESTS[place] for place in order[:-1]))
    memory.store(RankCommands(store=StoreCommand(1, slots, (5, 6, 7, 8), keys, parents)))
    assert report_of(memory).ok
    memory.obey(RankCommands(spills=(FileCommand(2, slots, b"".join(keys)),)))
    assert report_of(memory).ok
    memory.close()
    end(service_address(name).address)
    after = RankTiers(setting_of(name, disk=disk), 0, caches())
    assert after.inventory().file_keys == keys[::-1]
    after.close()


def test_a_processor_with_other_instructions_reads_neither_memory_nor_files(
    name: str, disk: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    store(memory, (0, 1, 2), (5, 6, 7))
    seal(memory, 0, 1)
    move(memory, "spills", (0, 1))
    memory.close()
    has_amx = torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not has_amx)
    with pytest.raises(ConfigurationError, match=f"keeps files of '{name}' for model '', "):
        RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    other = RankTiers(setting_of(name), 0, caches(1.0))
    assert other.inventory().slot_keys == {}
    other.close()


def test_replicas_have_memory_of_their_own_and_one_directory(
    name: str, disk: dict[str, str], tmp_path: Path
) -> None:
    memories = [RankTiers(setting_of(name, replica=i, disk=disk), 0, caches(1.0)) for i in (0, 1)]
    for memory in memories:
        store(memory, (0, 1, 2), (5, 6, 7))
        seal(memory, 0, 1)
        move(memory, "spills", (0, 1))
    memories[1].obey(RankCommands(forgotten_slots=(0,), forgotten_keys=DIGESTS[1] + bytes(4)))
    for memory in memories:
        memory.close()
    after = [RankTiers(setting_of(name, replica=i, disk=disk), 0, caches(1.0)) for i in (0, 1)]
    found = [memory.inventory() for memory in after]
    for memory in after:
        memory.close()
    assert [set(each.slot_keys) for each in found] == [{0, 1}, {1}]
    assert [len(each.file_keys) for each in found] == [1, 1]
    assert len(list(tmp_path.rglob("*.kvb"))) == 1


def test_files_of_another_revision_end_the_start_and_memory_stays(
    name: str, disk: dict[str, str]
) -> None:
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    store(memory, (0, 1), (5, 6))
    seal(memory, 0, 1)
    move(memory, "spills", (0, 1))
    memory.close()
    with pytest.raises(ConfigurationError, match="and this engine has model '', weight_revision"):
        RankTiers(setting_of(name, "2", disk=disk), 0, caches())
    after = RankTiers(setting_of(name, disk=disk), 0, caches())
    inventory = after.inventory()
    assert (len(inventory.slot_keys), len(inventory.file_keys)) == (2, 2)
    after.close()


def test_after_a_change_of_weights_the_next_revision_starts_and_old_files_are_removed(
    name: str, disk: dict[str, str], tmp_path: Path
) -> None:
    setting = setting_of(name, disk=disk)
    memory = RankTiers(setting, 0, caches(1.0))
    store(memory, (0, 1), (5, 6))
    move(memory, "spills", (0, 1))
    assert setting.options.offload.disk is not None
    FilesOwner(setting, setting.options.offload.disk).open()
    memory.close()
    after = RankTiers(setting_of(name, "2", disk=disk), 0, caches())
    inventory = after.inventory()
    assert (inventory.slot_keys, inventory.file_keys) == ({}, ())
    wait_until(lambda: len(list(tmp_path.glob("*/*/rank0"))) == 1, "old directories stay")
    wait_until(lambda: not has_block_files(tmp_path), "old files stay")
    after.close()
    with pytest.raises(ConfigurationError, match="weight_revision '2'"):
        RankTiers(setting, 0, caches())


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_not_read(
    name: str, disk: dict[str, str], tmp_path: Path, harm: str
) -> None:
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    store(memory, (0, 1, 2), (5, 6, 7))
    move(memory, "spills", (0, 1, 2))
    (path,) = tmp_path.rglob(f"{DIGESTS[1].hex()}*.kvb")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(content[: -200 if harm == "truncate" else None])
    report = move(memory, "fetches", (3, 4, 5), job=4)
    assert (report.ok, report.block_ids, report.lost_ids) == (False, (4,), (4,))
    assert load(memory, (3, 4, 5), (1, 2, 3), job=5).block_ids == (4,)
    assert memory.take_invalid_blocks() == {2}
    memory.close()


def test_a_directory_that_cannot_be_used_ends_the_start(name: str, tmp_path: Path) -> None:
    disk = {"directory": str(tmp_path / "missing"), "capacity_per_rank": "16KiB"}
    with pytest.raises(
        ConfigurationError, match="missing is not a directory: make or mount it first"
    ):
        RankTiers(setting_of(name, disk=disk), 0, caches())
    with pytest.raises(ConfigurationError, match=r"cannot be used \(File name too long\): let the"):
        long = {**disk, "directory": str(tmp_path / ("x" * 300))}
        RankTiers(setting_of(name, disk=long), 0, caches())
    small = {"directory": str(tmp_path), "capacity_per_rank": "1000B"}
    with pytest.raises(
        ConfigurationError, match="capacity_per_rank is 1000 bytes, a block of this"
    ):
        RankTiers(setting_of(name, disk=small), 0, caches())
    RankTiers(setting_of(name), 0, caches()).close()


def test_another_revision_makes_new_memory(name: str) -> None:
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    store(memory, (0,), (5,))
    seal(memory, 0)
    memory.close()
    after = RankTiers(setting_of(name, "2"), 0, caches())
    assert after.origin.startswith("fresh: the host segment has layout fingerprint")
    assert after.inventory().slot_keys == {}
    after.close()


@contextmanager
def engine_of_another_process(name: str) -> Iterator[subprocess.Popen[bytes]]:
    holds = (
        "import sys; sys.path.insert(0, '.');"
        "from tests.integrations.test_vllm_rank_tiers import *;"
        "m = RankTiers(setting_of(sys.argv[1]), 0, caches()); print('held', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        yield other
        other.communicate()


def test_a_name_that_a_living_engine_has_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of_another_process(name) as other:
        monkeypatch.setattr(rank_memory, "OTHER_ENGINE_S", 0.2)
        with pytest.raises(AlreadyRunningError) as refused:
            RankTiers(setting_of(name), 0, caches())
        assert str(refused.value) == (
            f"process {other.pid} has the host memory of rank 0 of {name!r}, replica 0: end that "
            "engine, or give this one another replica"
        )
        RankTiers(setting_of(name, replica=1), 0, caches()).close()
    RankTiers(setting_of(name), 0, caches()).close()


def test_a_second_engine_of_one_process_is_refused(name: str) -> None:
    memory = RankTiers(setting_of(name), 0, caches())
    with pytest.raises(AlreadyRunningError, match=f"process {os.getpid()} has the host memory"):
        RankTiers(setting_of(name), 0, caches())
    asks = (
        "import sys; from kvcache.memory_service.client import kept_memory;"
        "print(*(each.process_id for each in kept_memory(sys.argv[1])))"
    )
    command = [sys.executable, "-c", asks, name]
    assert int(subprocess.run(command, check=True, capture_output=True).stdout) == os.getpid()
    memory.close()
    RankTiers(setting_of(name), 0, caches()).close()


def test_of_two_engines_that_start_at_once_one_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = segment.make_memory
    with ExitStack() as others:

        def make_late(*arguments: Any) -> int:
            monkeypatch.setattr(segment, "make_memory", make)
            others.enter_context(engine_of_another_process(name))
            return make(*arguments)

        monkeypatch.setattr(segment, "make_memory", make_late)
        with pytest.raises(AlreadyRunningError, match=r"has the host memory of rank 0 of "):
            RankTiers(setting_of(name), 0, caches())
    after = RankTiers(setting_of(name), 0, caches())
    assert after.origin == "attached"
    after.close()


def test_memory_of_ranks_that_there_are_no_more_is_freed(name: str) -> None:
    client = MemoryServiceClient(service_address(name).address)
    setting = replace(setting_of(name), num_ranks=3)
    for rank in range(3):
        RankTiers(setting, rank, caches()).close()
    RankTiers(setting_of(name, replica=1), 0, caches()).close()
    assert len(client.list(f"{name}/")) == 4
    RankTiers(setting_of(name), 0, caches()).close()
    assert set(client.list(f"{name}/")) == {f"{name}/rank0", f"{name}/replica1/rank0"}


@pytest.mark.parametrize("is_dropped", [False, True], ids=["service killed", "memory dropped"])
def test_memory_that_is_kept_no_more_is_registered_again(
    name: str, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    monkeypatch.setattr(rank_memory, "WATCH_S", 0.05)
    address = service_address(name)
    client = MemoryServiceClient(address.address)
    memory = RankTiers(setting_of(name), 0, caches(1.0))
    store(memory, (0,), (5,))
    seal(memory, 0)
    before = client.list(f"{name}/")
    if is_dropped:
        client.drop(address.name_of(0))
    else:
        with make_socket(5.0) as connected:
            connected.connect(socket_name(address.address))
            os.kill(peer_process(connected), signal.SIGKILL)
    wait_until(lambda: list_of(client, name) == before, "the memory is not kept")
    memory.close()
    after = RankTiers(setting_of(name), 0, caches())
    assert after.origin == "attached"
    assert list(after.inventory().slot_keys.values()) == [KEYS[0]]
    after.close()
    end(address.address)  # closed memory has no watch that starts another
    time.sleep(0.2)
    with pytest.raises(NotRunningError):
        client.list("")


def list_of(client: MemoryServiceClient, name: str) -> dict[str, int] | None:
    try:
        return client.list(f"{name}/")
    except ClusterError:
        return None


def test_without_a_memory_service_memory_is_private(name: str) -> None:
    memory = RankTiers(setting_of(name, keeps_memory=False), 0, caches())
    assert memory.origin == "private: no memory service is configured"
    memory.close()
    with pytest.raises(ClusterError):
        end(service_address(name).address)


def test_a_layout_that_cannot_be_moved_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"the KV cache of layer x is .* of 12 blocks"):
        RankTiers(setting_of(name), 0, {"x": torch.zeros(2, NUM_BLOCKS, 4, 16)})
    many = {f"layer{i}": torch.zeros(NUM_BLOCKS, 2, 4, 16) for i in range(225)}
    with pytest.raises(
        ConfigurationError, match=r"has 225 pieces .* at most 224: set VLLM_KV_CACHE"
    ):
        RankTiers(setting_of(name), 0, many)


def test_without_a_size_ranks_share_an_eighth_of_the_memory_that_there_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_memory, "total_memory_bytes", lambda: 16 << 20)  # of a container
    setting = setting_of(name, host_memory_per_rank=None, keeps_memory=False)
    for num_ranks in (1, 2):
        memory = RankTiers(replace(setting, num_ranks=num_ranks), 0, caches())
        assert memory.inventory().num_slots == (2 << 20) // num_ranks // (2 * 128 * 4)
        memory.close()


def test_memory_that_is_too_small_or_too_large_is_refused(name: str) -> None:
    small = setting_of(name, host_memory_per_rank="1KiB")
    with pytest.raises(
        ConfigurationError,
        match=r"^offload\.host_memory_per_rank is 1000 bytes, a block of this model has 1024 on "
        "each rank: set it to many times that$",
    ):
        RankTiers(setting_of(name, host_memory_per_rank="1000B"), 0, caches())
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"^rank 0 has no room for its host memory: .* needs \d+ bytes of memory, \d+ are "
        r"available: lower offload\.host_memory_per_rank, or raise the limit of the container$",
    ):
        RankTiers(setting_of(name, host_memory_per_rank="900TiB"), 0, caches())
    RankTiers(small, 0, caches()).close()


HOLDS_THE_LOCK = """
import fcntl, os, signal, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def stopped_with_the_lock(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was stopped while it wrote to a rank's files."""
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(directory / "changes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            yield process
        finally:
            process.kill()


def test_a_stopped_process_with_the_lock_costs_a_write_and_no_block(
    name: str, disk: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOCK_S", 0.1)
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    store(memory, (0, 1), (5, 6))
    seal(memory, 0, 1)
    directory = Path(memory.inventory().files_directory)
    with stopped_with_the_lock(directory):
        report = move(memory, "spills", (0, 1))
        assert not report.ok and "does not go on: end it" in report.detail
        assert load(memory, (0, 1), (8, 9)).ok
        files = memory._jobs.statistics().files
        assert files is not None and sum(files.problems.values()) >= 2
    assert not list(tmp_path.rglob("*.kvb"))
    assert move(memory, "spills", (0, 1), job=4).ok
    memory.close()


def test_loads_do_not_wait_for_a_write_that_waits(
    name: str, disk: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOCK_S", 60.0)
    memory = RankTiers(setting_of(name, disk=disk), 0, caches(1.0))
    store(memory, (0, 1), (5, 6))
    seal(memory, 0, 1)
    with stopped_with_the_lock(Path(memory.inventory().files_directory)) as process:
        memory.obey(RankCommands(spills=(FileCommand(3, (0, 1), b"".join(KEYS[:2])),)))
        assert load(memory, (0, 1), (8, 9)).job_id == 2
        assert memory.take_reports() is None
        process.send_signal(signal.SIGCONT)  # it goes on, and ends
        report = report_of(memory)
    assert (report.job_id, report.ok) == (3, True)
    memory.close()
