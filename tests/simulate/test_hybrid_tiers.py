"""Tiers below a device whose blocks several attention kinds share."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError, OutOfBlocksError
from kvcache.manager import KVCacheManager
from kvcache.offload.keys import OffloadKey, get_offload_group_idx, label_keys, make_offload_keys
from kvcache.offload.options import HierarchyOptions
from kvcache.protocol.commands import Label
from kvcache.requests.request import Request
from kvcache.simulate.block_trace import BlockTrace, TraceTokens
from kvcache.simulate.counting import CountingOptions, PrefillCounter, counted_config
from kvcache.simulate.simulated_cache import SimulatedCache, window_groups
from kvcache.simulate.simulation import SimulationResult, simulate
from kvcache.simulate.tier_traffic import Brought, TierSizes, TierTraffic
from kvcache.specs import KVCacheGroupSpec, MambaSpec
from tests.simulate.models import MODELS
from tests.simulate.traces import SIZE, block_trace, random_requests

Groups = tuple[KVCacheGroupSpec, ...]


@pytest.fixture
def trace(tmp_path: Path) -> BlockTrace:
    return block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(11), 120))


def run(trace: BlockTrace, groups: Groups, *sizes: int | None) -> SimulationResult:
    num_blocks, *tiers = sizes
    cache = SimulatedCache("lru", num_blocks, *(n for n in tiers if n is not None), groups=groups)
    return simulate(trace, cache, VirtualClock())


@pytest.mark.parametrize("model", MODELS)
def test_with_room_below_everything_ever_seen_is_a_hit(trace: BlockTrace, model: str) -> None:
    groups = MODELS[model]
    plenty, tiers = run(trace, groups, None), run(trace, groups, 120, 150, 20_000)
    assert tiers.num_hit_tokens == plenty.num_hit_tokens > 0
    assert tiers.num_device_hit_tokens > 0
    assert tiers.num_host_hit_tokens > 0 and tiers.num_disk_hit_tokens > 0


@pytest.mark.parametrize("model", ["window", "window of other blocks", "chunks"])
def test_small_tiers_hit_more_than_the_device_alone(trace: BlockTrace, model: str) -> None:
    device = CountingOptions(120, groups=MODELS[model])
    counter = PrefillCounter(TraceTokens(trace), device, VirtualClock(), TierSizes(100, 150))
    alone, plenty = (run(trace, MODELS[model], num_blocks) for num_blocks in (120, None))
    count = counter.count()
    assert alone.num_hit_tokens < count.num_hit_tokens < plenty.num_hit_tokens
    assert count.num_input_tokens == trace.num_input_tokens
    counter.manager.check()
    counter.traffic.check()


class OneAtATime:
    """Requests played by hand, on a manager with workers' commands."""

    def __init__(self, groups: Groups, num_blocks: int, sizes: TierSizes) -> None:
        config = counted_config(CountingOptions(groups=groups), SIZE, num_blocks)
        self.manager = KVCacheManager(config, 10_000, has_workers=True)
        self.traffic = TierTraffic(self.manager, config, sizes, VirtualClock())
        self.labelled: set[OffloadKey] = set()

    def play(self, request: Request) -> Brought:
        brought = self.traffic.bring(request)
        hit, num_hit_tokens = self.manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_hit_tokens
        assert self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit)
        self.traffic.let_go()
        self.traffic.store(request)
        self.manager.free(request)
        for command in self.manager.take_commands():
            if isinstance(command, Label):
                self.labelled.update(label_keys(command))
        return brought


@pytest.mark.parametrize("model", MODELS)
def test_what_goes_down_is_what_workers_would_have_been_told_is_sealed(
    trace: BlockTrace, model: str
) -> None:
    player = OneAtATime(MODELS[model], 300, TierSizes(20_000))
    for arrived in TraceTokens(trace):
        player.play(Request(arrived.request_id, arrived.token_ids))
    stored = set(player.traffic.hierarchy.host.slots.present_keys())
    assert stored == player.labelled
    assert {get_offload_group_idx(key) for key in stored} == set(range(len(MODELS[model])))


def test_of_a_window_the_last_blocks_of_a_hit_are_enough() -> None:
    """Blocks of 4, a window of 6: two of its blocks before the end of a hit."""
    tokens = int32_array(range(33))
    player = OneAtATime(window_groups(SIZE, 6), 18, TierSizes(100))
    player.play(Request("first", tokens))
    player.play(Request("other", int32_array(range(100, 133))))  # the device is full of this one
    again = Request("again", tokens)
    player.manager.get_computed_blocks(again)
    keys = make_offload_keys(again.block_hashes, 1)
    assert len(keys) == 8
    player.traffic.hierarchy.forget(keys[:6])
    assert player.traffic.bring(again).num_tokens == 32
    player.traffic.let_go()
    player.play(Request("another", int32_array(range(200, 233))))
    player.traffic.hierarchy.forget([keys[6]])
    assert player.traffic.bring(Request("once more", tokens)).num_tokens == 0


def test_what_cannot_be_fetched_at_once_comes_in_pieces(tmp_path: Path) -> None:
    """The device has no spare block: all pieces together hold the request's needs."""
    requests = [(40, list(range(10))), (40, list(range(20, 30))), (40, list(range(10)))]
    trace = block_trace(tmp_path / "trace.jsonl", requests)
    sizes = TierSizes(12, 40, movement=HierarchyOptions(max_fetching_blocks=3))
    counter = PrefillCounter(TraceTokens(trace), CountingOptions(10), VirtualClock(), sizes)
    count = counter.count()
    assert counter.brought.num_tokens == count.num_hit_tokens == 36
    assert counter.brought.num_disk_tokens > 3 * SIZE
    counter.traffic.check()


def test_what_tiers_cannot_serve_is_refused_before_anything_is_played(trace: BlockTrace) -> None:
    state = MambaSpec(block_size=SIZE, shapes=((1,),), dtypes=("float32",))
    groups = (*window_groups(SIZE, 6), KVCacheGroupSpec(("layer.2",), state))
    with pytest.raises(ConfigurationError) as caught:
        SimulatedCache("lru", 100, 10, groups=groups)
    assert str(caught.value) == (
        "tiers cannot serve groups of kind ['mamba'], whose blocks no other request can use: "
        "simulate the device alone"
    )


def test_a_request_that_does_not_fit_with_its_groups_is_named_with_its_line(
    trace: BlockTrace,
) -> None:
    with pytest.raises(OutOfBlocksError, match=r"^trace.jsonl, line \d+: the request of .* more$"):
        run(trace, window_groups(SIZE, 6), trace.most_blocks, 50)
