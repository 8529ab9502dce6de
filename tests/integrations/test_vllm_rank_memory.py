"""A rank of the vLLM connector on real memory, with tensors like vLLM's and without vLLM."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.base.errors import (
    AlreadyRunningError,
    ClusterError,
    ConfigurationError,
    NotEnoughMemoryError,
)
from kvcache.integrations.vllm import rank_memory
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.integrations.vllm.rank_memory import RankMemory, service_address
from kvcache.integrations.vllm.step_messages import RankReports, StepCommands
from kvcache.memory_service.process import end

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 12
DIGESTS = tuple(bytes([i]) * 32 for i in range(1, 5))
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


def setting_of(name: str, revision: str = "", **offload: Any) -> EngineSetting:
    options = ConnectorOptions.parse(
        {
            "name": name,
            "weight_revision": revision,
            "offload": {"host_memory_per_rank": "1MiB", **offload},
        }
    )
    return EngineSetting(options, f"model {revision}", 4, num_blocks=NUM_BLOCKS, num_ranks=1)


def caches(fill: float = 0.0) -> dict[str, torch.Tensor]:
    """Two layers; each block has numbers of its own, all zero with `fill` 0."""
    shape = (NUM_BLOCKS, 2, 4, 16)
    numbers = torch.arange(NUM_BLOCKS * 128, dtype=torch.float32).reshape(shape) * fill
    return {"layer0": numbers, "layer1": numbers * 3}


def stored(slots: tuple[int, ...], blocks: tuple[int, ...], step: int = 1) -> StepCommands:
    count = len(slots)
    return StepCommands(
        step,
        store_slots=slots,
        store_blocks=blocks,
        store_digests=DIGESTS[:count],
        store_parents=NO_PARENTS[:count],
    )


def loaded(slots: tuple[int, ...], blocks: tuple[int, ...], step: int = 2) -> StepCommands:
    return StepCommands(
        step, load_slots=slots, load_blocks=blocks, load_digests=DIGESTS[: len(slots)]
    )


def test_what_was_sealed_is_loaded_by_the_next_process(name: str) -> None:
    first = RankMemory(setting_of(name), 0, caches(1.0))
    first.store(stored((0, 1, 2), (5, 6, 7)))
    assert first.take_reports() == RankReports(stored={1: 1})
    assert first.take_reports() is None
    first.load(StepCommands(2, sealed=(0, 1)))
    first.close()
    tensors = caches()
    second = RankMemory(setting_of(name), 0, tensors)
    assert second.origin == "attached"
    assert second.inventory().digests == {0: DIGESTS[0], 1: DIGESTS[1]}
    second.load(loaded((0, 1), (9, 3)))
    assert second.take_reports() == RankReports(loaded={2: 1})
    assert second.take_invalid_blocks() == set()
    for layer, tensor in caches(1.0).items():
        assert torch.equal(tensors[layer][[9, 3]], tensor[[5, 6]])
    second.close()


def test_a_load_that_fails_is_told_and_its_step_stores_nothing(name: str) -> None:
    tensors = caches(1.0)
    memory = RankMemory(setting_of(name), 0, tensors)
    memory.store(stored((0, 1, 2), (5, 6, 7)))
    memory.take_reports()
    memory._host.segment.tensors[1][1, 17] ^= 1
    memory.load(loaded((0, 1, 2, 3), (8, 9, 10, 11)))  # slot 3 holds nothing
    memory.store(stored((4,), (5,), step=2))
    told = RankReports(
        loaded={2: 1}, not_stored=frozenset((2,)), lost=frozenset((DIGESTS[1], DIGESTS[3]))
    )
    assert memory.take_reports() == told
    assert memory.take_invalid_blocks() == {9, 11}
    assert memory.take_invalid_blocks() == set()
    assert torch.equal(tensors["layer0"][10], tensors["layer0"][7])
    assert not tensors["layer1"][9].any()
    memory.load(StepCommands(3))
    memory.store(stored((4,), (5,), step=3))
    assert memory.take_reports() == RankReports(stored={3: 1})
    memory.close()


def test_a_slot_that_holds_another_block_is_not_loaded(name: str) -> None:
    memory = RankMemory(setting_of(name), 0, caches(1.0))
    memory.store(stored((0, 1), (5, 6)))
    memory.load(loaded((1,), (8,)))
    assert memory.take_invalid_blocks() == {8}
    memory.close()


def test_dropped_blocks_are_gone_for_the_next_process_too(name: str) -> None:
    memory = RankMemory(setting_of(name), 0, caches(1.0))
    memory.store(stored((0, 1, 2), (5, 6, 7)))
    memory.load(StepCommands(2, sealed=(0, 1, 2)))
    memory.load(StepCommands(3, forgotten=(1,)))
    assert sorted(memory.inventory().digests) == [0, 2]
    memory.load(StepCommands(4, forgets_all=True))
    memory.close()
    after = RankMemory(setting_of(name), 0, caches())
    assert (after.origin, after.inventory().digests) == ("attached", {})
    after.close()


def test_another_revision_makes_new_memory(name: str) -> None:
    memory = RankMemory(setting_of(name), 0, caches(1.0))
    memory.store(stored((0,), (5,)))
    memory.load(StepCommands(2, sealed=(0,)))
    memory.close()
    after = RankMemory(setting_of(name, "2"), 0, caches())
    assert after.origin.startswith("fresh: the host segment has layout fingerprint")
    assert after.inventory().digests == {}
    after.close()


def test_a_name_that_a_living_engine_has_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = (
        "import sys; sys.path.insert(0, '.');"
        "from tests.integrations.test_vllm_rank_memory import *;"
        "m = RankMemory(setting_of(sys.argv[1]), 0, caches()); print('held', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        monkeypatch.setattr(rank_memory, "OTHER_ENGINE_S", 0.2)
        with pytest.raises(AlreadyRunningError) as refused:
            RankMemory(setting_of(name), 0, caches())
        assert str(refused.value) == (
            f"process {other.pid} has the host memory of rank 0 of {name!r}: end that engine, or "
            "give this one another name"
        )
        other.communicate()
    RankMemory(setting_of(name), 0, caches()).close()


def test_without_a_memory_service_memory_is_private(name: str) -> None:
    memory = RankMemory(setting_of(name, keeps_memory=False), 0, caches())
    assert memory.origin == "private: no memory service is configured"
    memory.close()
    with pytest.raises(ClusterError):
        end(service_address(name).address)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, NUM_BLOCKS, 4, 16),
        torch.zeros(4, NUM_BLOCKS, 16).transpose(0, 1),
        [torch.zeros(NUM_BLOCKS, 4)],
    ],
    ids=["blocks second", "strided", "a list"],
)
def test_a_layout_that_cannot_be_moved_is_refused(name: str, tensor: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"the KV cache of layer x is .* of 12 blocks"):
        RankMemory(setting_of(name), 0, {"x": tensor})


def test_memory_that_is_too_small_or_too_large_is_refused(name: str) -> None:
    small = setting_of(name, host_memory_per_rank="1KiB")
    with pytest.raises(ConfigurationError, match="is 1000 bytes, a block of this model has 1024 "):
        RankMemory(setting_of(name, host_memory_per_rank="1000B"), 0, caches())
    with pytest.raises(NotEnoughMemoryError, match=r"lower offload\.host_memory_per_rank"):
        RankMemory(setting_of(name, host_memory_per_rank="900TiB"), 0, caches())
    RankMemory(small, 0, caches()).close()
