"""The counting rule over tiers, on random requests and on the real trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvcache.base.clock import SystemClock, VirtualClock
from kvcache.base.errors import OutOfBlocksError
from kvcache.offload import HierarchyOptions
from kvcache.simulate.counting import (
    CountingOptions,
    PrefillCount,
    PrefillCounter,
    count_prefill_hits,
)
from kvcache.simulate.mooncake import MooncakeTrace
from kvcache.simulate.tier_traffic import TierSizes
from tests.simulate.test_counting import write_trace
from tests.simulate.traces import CONVERSATION, random_requests

LRU_RATE_OF_30000_BLOCKS = 0.3305


def tokens_by_tier(counter: PrefillCounter, count: PrefillCount) -> tuple[int, int, int]:
    """Return the tokens hit on the device, in host memory and on disk."""
    brought = counter.brought
    own = count.num_hit_tokens - brought.num_tokens
    return own, brought.num_host_tokens, brought.num_disk_tokens


@pytest.mark.seeds(1, long=6)
def test_with_room_below_everything_ever_seen_is_a_hit(tmp_path: Path, seed: int) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl", random_requests(random.Random(seed), 150, least_new=1)
    )
    unlimited = count_prefill_hits(trace, CountingOptions(), VirtualClock())
    sizes = TierSizes(host_blocks=40, disk_blocks=2000)
    counter = PrefillCounter(trace, CountingOptions(30), VirtualClock(), sizes)
    count = counter.count()
    assert count.num_hit_blocks == unlimited.num_hit_blocks
    assert count.num_block_references == unlimited.num_block_references
    assert min(tokens_by_tier(counter, count)) > 0
    assert count.hit_rate == unlimited.hit_rate
    counter.manager.check()
    counter.traffic.check()


@pytest.mark.seeds(1, long=6)
@pytest.mark.parametrize("disk_write", ["on_evict", "on_store"])
@pytest.mark.parametrize("blocks_per_slot", [1, 4])
def test_small_tiers_hit_more_than_the_device_alone(
    tmp_path: Path, seed: int, disk_write: str, blocks_per_slot: int
) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl", random_requests(random.Random(seed), 150, least_new=1)
    )
    device = CountingOptions(30)
    movement = HierarchyOptions("on_store" if disk_write == "on_store" else "on_evict")
    sizes = TierSizes(48, 80, blocks_per_slot, movement=movement)
    counter = PrefillCounter(trace, device, VirtualClock(), sizes)
    count = counter.count()
    alone = count_prefill_hits(trace, device, VirtualClock())
    unlimited = count_prefill_hits(trace, CountingOptions(), VirtualClock())
    assert alone.num_hit_blocks < count.num_hit_blocks <= unlimited.num_hit_blocks
    assert counter.traffic.num_spilled > 0
    counter.traffic.check()


def test_tiers_that_are_not_needed_are_not_asked(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [(8, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])])
    counter = PrefillCounter(trace, CountingOptions(10), VirtualClock(), TierSizes(4))
    statistics: list[PrefillCount] = []
    count = counter.count(statistics.append)
    assert tokens_by_tier(counter, count) == (12, 0, 0)
    assert [each.num_requests for each in statistics] == [1, 2, 3]
    assert count.hit_rate == 3 / 7


def test_a_request_larger_than_the_device_is_named(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [(11, [0, 1, 2])])
    counter = PrefillCounter(trace, CountingOptions(2), VirtualClock(), TierSizes(4))
    with pytest.raises(OutOfBlocksError) as caught:
        counter.count()
    assert str(caught.value) == (
        "request line-1 of trace.jsonl needs 3 blocks of 4 tokens, the device has 2: count with "
        "more blocks"
    )


@pytest.mark.long
@pytest.mark.skipif(not CONVERSATION.exists(), reason=f"no conversation trace at {CONVERSATION}")
def test_tiers_hit_as_often_on_the_conversation_trace_as_one_pool_of_the_disks_size() -> None:
    sizes = TierSizes(host_blocks=10_000, disk_blocks=30_000)
    counter = PrefillCounter(
        MooncakeTrace(CONVERSATION), CountingOptions(2_000), SystemClock(), sizes
    )
    count = counter.count()
    assert count.num_block_references == 288_500
    assert count.hit_rate >= LRU_RATE_OF_30000_BLOCKS
    counter.manager.check()
    counter.traffic.check()
