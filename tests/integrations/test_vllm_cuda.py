"""A rank of the vLLM connector with tensors on a GPU, in vLLM's layouts. Without one, all of it is
skipped; test_vllm_rank_tiers.py has what needs none: the order of a rank's calls of its engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.integrations.vllm.rank_tiers import RankTiers
from kvcache.integrations.vllm.step_messages import LoadCommand, RankCommands, StoreCommand
from tests.integrations.test_vllm_layer_rows import LAYOUTS, B, views
from tests.integrations.test_vllm_rank_tiers import KEYS, NO_PARENTS, report_of, setting_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: NOT TESTED"),
    # Triton's deprecation warnings are not errors of ours.
    pytest.mark.filterwarnings("default::UserWarning", "default::DeprecationWarning"),
]

DEVICE = "cuda:0"
LONG_CYCLES = 2_000_000_000
"""About a second."""


def forward_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(DEVICE)


@pytest.mark.parametrize("is_asynchronous", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_jobs_wait_for_the_forwards_before_them(layout: str, is_asynchronous: bool) -> None:
    tensors = views(layout, device=DEVICE)
    setting = setting_of("cuda", keeps_memory=False, is_asynchronous=is_asynchronous)
    memory = RankTiers(replace(setting, num_blocks=B), 0, tensors)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward_stream()):
        torch.cuda._sleep(LONG_CYCLES)  # a forward that writes block 1
        for tensor in tensors.values():
            tensor[1] += 1
        command = StoreCommand(1, (0, 1), (1, 2), KEYS[:2], NO_PARENTS[:2])
        memory.store(RankCommands(store=command))
        assert memory.take_reports() is None
        assert report_of(memory).ok
        torch.cuda._sleep(LONG_CYCLES)  # another one that used block 3
        for tensor in tensors.values():
            tensor[3] = 7
        memory.obey(RankCommands(loads=(LoadCommand(2, "r", (0, 1), (3, 4), KEYS[:2]),)))
        assert memory.take_finished() == (set(), set())
        assert report_of(memory).ok
        assert memory.take_finished() == (set(), {"r"})
        for layer, before in views(layout).items():
            expected = before.clone()
            expected[1] += 1
            expected[[3, 4]] = expected[[1, 2]]
            assert torch.equal(tensors[layer].cpu(), expected)
    memory.close()


def test_a_damaged_slot_is_not_loaded_and_the_others_are() -> None:
    tensors = views("LBNHC", device=DEVICE)
    memory = RankTiers(replace(setting_of("cuda", keeps_memory=False), num_blocks=B), 0, tensors)
    command = StoreCommand(1, (0, 1), (1, 2), KEYS[:2], NO_PARENTS[:2])
    memory.store(RankCommands(store=command))
    assert report_of(memory).ok
    memory._host.segment.tensors[1][1, 17] ^= 1
    memory.obey(RankCommands(loads=(LoadCommand(2, "r", (0, 1), (3, 4), KEYS[:2]),)))
    assert report_of(memory).block_ids == (1,)
    assert memory.take_invalid_blocks() == {4}
    for layer, before in views("LBNHC").items():
        assert torch.equal(tensors[layer].cpu()[3], before[1])
    memory.close()
