"""The counting rule, against a slow model and on the real trace."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import pytest

from kvcache.base.clock import SystemClock, VirtualClock
from kvcache.base.errors import OutOfBlocksError
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.mooncake import MooncakeTrace
from tests.simulate.traces import CONVERSATION, SIZE, random_requests, trace_line, write_lines


def write_trace(path: Path, requests: list[tuple[int, list[int]]]) -> MooncakeTrace:
    lines = [trace_line(length, ids) for length, ids in requests]
    return MooncakeTrace(write_lines(path, *lines), block_size=SIZE)


def slow_hits(requests: list[tuple[int, list[int]]], num_blocks: int) -> int:
    """Count hits with a plain LRU list of block ids: the least recently released goes first."""
    cached: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for length, ids in requests:
        hits = 0
        while hits < (length - 1) // SIZE and ids[hits] in cached:
            hits += 1
        num_hits += hits
        for block in ids[:hits]:
            del cached[block]
        while len(cached) + len(ids) > num_blocks:
            cached.popitem(last=False)
        full = ids[: length // SIZE]
        for block in reversed(full):
            cached.pop(block, None)
            cached[block] = None
    return num_hits


@pytest.mark.seeds(8)
@pytest.mark.parametrize("num_blocks", [40, 80, None])
def test_counts_agree_with_a_slow_model(tmp_path: Path, seed: int, num_blocks: int | None) -> None:
    requests = random_requests(random.Random(seed), 150, least_new=1)
    trace = write_trace(tmp_path / "trace.jsonl", requests)
    count = count_prefill_hits(
        trace,
        CountingOptions(num_blocks),
        VirtualClock(),
    )
    assert count.num_block_references == sum(len(ids) for _, ids in requests)
    assert count.num_requests == 150
    assert count.num_hit_blocks == slow_hits(requests, num_blocks or 10**9)
    assert count.num_hit_blocks > 0
    assert (count.num_evictions > 0) == (num_blocks is not None)


def test_a_hit_ends_before_the_last_token(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [(8, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])])
    count = count_prefill_hits(trace, CountingOptions(), VirtualClock())
    assert count.num_hit_blocks == 0 + 1 + 2
    assert count.hit_rate == 3 / 7


def test_a_request_larger_than_the_cache_is_named(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [(4, [0]), (11, [0, 1, 2])])
    with pytest.raises(OutOfBlocksError) as caught:
        count_prefill_hits(trace, CountingOptions(2), VirtualClock())
    assert str(caught.value) == (
        "request line-2 of trace.jsonl needs 3 blocks of 4 tokens, the device has 2: count with "
        "more blocks"
    )


@pytest.mark.skipif(not CONVERSATION.exists(), reason=f"no conversation trace at {CONVERSATION}")
@pytest.mark.long
def test_lru_has_the_published_hit_rate_on_the_conversation_trace() -> None:
    count = count_prefill_hits(MooncakeTrace(CONVERSATION), CountingOptions(10_000), SystemClock())
    assert count.num_block_references == 288_500
    assert count.num_requests == 12_031
    assert count.hit_rate == pytest.approx(0.2149, abs=0.003)
