"""Per-request calls: the rules one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache.base.errors import ConfigurationError, RequestError
from kvcache.manager import KVCacheManager
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.statistics import PrefixCacheStats
from kvcache.protocol.commands import BlockTablePatch
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager
from tests.manager.steps import Engine, new


def run(manager: KVCacheManager, request: Request, num_new: int | None = None) -> KVCacheBlocks:
    """Look up, allocate and compute; there is room."""
    found, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit if num_new is None else num_new
    blocks = manager.allocate_slots(request, num_new, num_hit, found)
    assert blocks is not None
    request.num_computed_tokens = num_hit + num_new
    return blocks


def test_a_second_request_shares_the_full_blocks_of_the_first() -> None:
    manager = make_manager(log_stats=True)
    first, second = Request("a", list(range(13))), Request("b", [*range(8), 99, 98])
    run(manager, first)
    found, num_hit = manager.get_computed_blocks(second)
    assert num_hit == 8
    assert found.get_block_ids() == ([*manager.get_block_ids("a")[0][:2]],)
    new_blocks = manager.allocate_slots(second, 2, num_hit, found)
    assert len(new_blocks.get_block_ids()[0]) == 1
    assert new_blocks.get_unhashed_block_ids() == new_blocks.get_block_ids()
    assert manager.get_num_common_prefix_blocks(second, 2) == [2]
    assert manager.get_blocks("b") == found + new_blocks
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=2, queries=23, hits=8)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()
    manager.check()


def test_the_last_token_is_always_computed() -> None:
    manager = make_manager()
    run(manager, Request("a", list(range(8))))
    _, num_hit = manager.get_computed_blocks(Request("b", list(range(8))))
    assert num_hit == 4


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_a_look_up_that_finds_too_little_leaves_an_earlier_hit_valid(shape: Shape) -> None:
    """With EAGLE, one cached block is no hit, but the look-up walks over it."""
    manager = make_manager(shape, use_eagle=True)
    for name, first in (("x", 100), ("y", 200)):
        request = Request(name, list(range(first, first + 25)))
        run(manager, request)
        manager.free(request)
    hit = Request("a", [*range(100, 108), *[7] * 17])
    found, num_hit = manager.get_computed_blocks(hit)
    assert num_hit == 4
    other = Request("b", [*range(200, 204), *[9] * 21])
    assert manager.get_computed_blocks(other)[1] == 0
    assert manager.allocate_slots(hit, 25 - num_hit, num_hit, found) is not None
    stranger = Request("c", [*range(200, 204), *range(104, 108), *[7] * 17])
    assert manager.get_computed_blocks(stranger)[1] == 0
    manager.check()


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_hints_of_a_preempted_request_that_ends_leave_an_earlier_hit_valid(shape: Shape) -> None:
    """To follow its hints, the manager walks over the cached blocks of the request."""
    manager = make_manager(shape)
    engine = Engine(manager)
    tokens = list(range(200, 225))
    engine.step(new=(new("b", tokens, hints=(CacheHint(priority=0),)),))
    engine.step(preempted_recompute=("b",), completed_step=1)
    first = Request("x", list(range(100, 125)))
    run(manager, first)
    manager.free(first)
    hit = Request("a", [*range(100, 108), *[7] * 17])
    found, num_hit = manager.get_computed_blocks(hit)
    assert num_hit == 8
    manager.release_client(engine.client_id)
    assert manager.allocate_slots(hit, 25 - num_hit, num_hit, found) is not None
    stranger = Request("c", [*range(200, 208), *[7] * 17])
    assert manager.get_computed_blocks(stranger)[1] == 8
    manager.check()


def test_a_request_is_cached_on_behind_a_block_that_it_computed_again_also_after_hints() -> None:
    """The last token is always computed, so a repeated prompt computes its last block again."""
    manager = make_manager()
    first, again = Request("a", list(range(8))), Request("b", list(range(8)))
    first.hints = [CacheHint(priority=90)]
    run(manager, first)
    manager.free(first)
    run(manager, again)
    again.append_output_token_ids([8, 9, 10, 11])
    assert manager.allocate_slots(again, 4) is not None
    manager.free(again)
    assert manager.get_computed_blocks(Request("c", list(range(13))))[1] == 12
    manager.check()


def test_a_request_that_skips_reading_still_writes() -> None:
    manager = make_manager(log_stats=True)
    run(manager, Request("a", list(range(9))))
    _, num_hit = manager.get_computed_blocks(
        Request("b", list(range(9)), skip_reading_prefix_cache=True)
    )
    assert num_hit == 0
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and stats.requests == 1


def test_delayed_blocks_are_hittable_once_they_are_cached() -> None:
    manager = make_manager()
    first, second = Request("a", list(range(9))), Request("b", list(range(9)))
    assert manager.allocate_slots(first, 9, delay_cache_blocks=True) is not None
    assert manager.get_computed_blocks(second)[1] == 0
    manager.cache_blocks(first, 5)
    assert manager.get_computed_blocks(second)[1] == 4


def test_drafts_and_lookahead_get_slots_but_are_never_hittable() -> None:
    manager = make_manager()
    request = Request("a", list(range(7)))
    blocks = manager.allocate_slots(request, 10, num_draft_tokens=3, num_lookahead_tokens=4)
    assert len(blocks.get_block_ids()[0]) == 4
    assert blocks.get_unhashed_block_ids() == (blocks.get_block_ids()[0][1:],)
    assert manager.get_computed_blocks(Request("b", list(range(9))))[1] == 4


def test_slots_end_with_the_length_of_the_model() -> None:
    manager = make_manager()
    request = Request("a", [1] * FULL.max_model_len)
    blocks = manager.allocate_slots(request, FULL.max_model_len, num_lookahead_tokens=50)
    assert len(blocks.get_block_ids()[0]) == FULL.max_model_len // 4


def test_external_tokens_get_blocks_and_are_cached() -> None:
    manager = make_manager()
    request = Request("a", list(range(10)))
    assert manager.allocate_slots(request, 2, num_external_computed_tokens=8) is not None
    assert manager.get_computed_blocks(Request("b", list(range(10))))[1] == 8


def test_all_or_nothing_without_room() -> None:
    manager = make_manager(HYBRID, num_blocks=8)
    run(manager, Request("a", list(range(12))))
    before = manager.dump_state()
    assert manager.allocate_slots(Request("b", [9] * 5), 5) is None
    assert manager.dump_state() == before
    assert manager.slot_of("b") is None


def test_without_a_free_slot_there_is_no_room() -> None:
    manager = make_manager(max_num_seqs=1)
    run(manager, Request("a", [1, 2]))
    assert manager.allocate_slots(Request("b", [1, 2]), 2) is None


def test_the_watermark_keeps_blocks_for_running_requests() -> None:
    manager = make_manager(num_blocks=11, watermark=0.3)
    first, second = Request("a", [1] * 28), Request("b", [2])
    assert manager.allocate_slots(first, 28) is not None
    assert manager.allocate_slots(second, 1) is None
    first.num_computed_tokens = 28
    first.append_output_token_ids([1] * 12)
    assert manager.allocate_slots(first, 12) is not None
    manager.free(first)
    assert manager.allocate_slots(Request("c", [1] * 40), 40) is not None


def test_freeing_forgets_and_an_unknown_request_is_nothing() -> None:
    manager = make_manager()
    request = Request("a", list(range(9)))
    manager.free(request)
    run(manager, request)
    assert manager.usage == pytest.approx(3 / 63)
    manager.free(request)
    assert manager.usage == 0.0
    assert manager.get_block_ids("a") == ([],)
    assert manager.get_request("a") is None
    assert manager.create_empty_block_list() == manager.get_blocks("a")


def test_a_request_without_hashes_caches_nothing_more() -> None:
    manager = make_manager()
    request = Request("a", list(range(8)))
    run(manager, request, 4)
    manager.free_block_hashes(request)
    assert manager.allocate_slots(request, 4) is not None
    assert manager.get_computed_blocks(Request("b", list(range(9))))[1] == 4


def test_a_hit_that_is_no_longer_true_is_not_adopted() -> None:
    manager = make_manager(num_blocks=5)
    first, second, third = (Request(name, [1] * 9) for name in "abc")
    run(manager, first)
    manager.free(first)
    found, num_hit = manager.get_computed_blocks(second)
    assert num_hit == 8
    run(manager, Request("d", [7] * 16))
    with pytest.raises(RequestError) as raised:
        manager.allocate_slots(second, 1, num_hit, found)
    assert str(raised.value) == (
        "request b: the cache has changed since its 8 computed tokens were found: call "
        "get_computed_blocks again"
    )
    assert manager.allocate_slots(third, 9) is None


def test_a_hit_of_tokens_that_were_taken_back_is_not_adopted() -> None:
    manager = make_manager()
    run(manager, Request("a", list(range(20))))
    request = Request("b", [0, 1, 2, 3])
    request.append_output_token_ids(list(range(4, 20)))
    found, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 16
    request.truncate_tokens(4)
    request.append_output_token_ids([90] * 16)
    before = manager.dump_state()
    with pytest.raises(RequestError, match="b"):
        manager.allocate_slots(request, 4, num_hit, found)
    assert manager.dump_state() == before


def test_table_changes_of_calls_come_as_one_patch() -> None:
    manager = make_manager()
    request = Request("a", list(range(6)))
    run(manager, request)
    request.append_output_token_ids([1, 2, 3])
    manager.allocate_slots(request, 3)
    run(manager, gone := Request("b", [5, 6]))
    manager.free(gone)
    patches = [c for c in manager.take_commands() if isinstance(c, BlockTablePatch)]
    assert [(p.slots.tolist(), p.first_indices.tolist()) for p in patches] == [([0], [0])]
    assert patches[0].block_ids.tolist() == manager.get_block_ids("a")[0]
    assert not [c for c in manager.take_commands() if isinstance(c, BlockTablePatch)]


Call = Callable[[KVCacheManager, Request], object]

MISTAKES: dict[str, tuple[Call, str]] = {
    "no tokens": (
        lambda m, r: m.allocate_slots(r, 0),
        "request a: no new tokens and none to adopt: pass num_new_tokens of at least 1",
    ),
    "negative tokens": (
        lambda m, r: m.allocate_slots(r, -1),
        "request a: num_new_tokens is -1: pass an integer of at least 0",
    ),
    "more tokens than there are": (
        lambda m, r: m.allocate_slots(r, 4),
        "request a: 6 computed, 0 adopted and 4 new tokens make 10, but it has 9 tokens: append "
        "the tokens first, or pass fewer",
    ),
    "more drafts than new tokens": (
        lambda m, r: m.allocate_slots(r, 1, num_draft_tokens=2),
        "request a: 2 draft tokens of 1 new ones: drafts are part of num_new_tokens",
    ),
    "encoder tokens": (
        lambda m, r: m.allocate_slots(r, 1, num_encoder_tokens=5),
        "request a: 5 encoder tokens, but no KV cache group keeps encoder tokens: pass 0",
    ),
    "adopting twice": (
        lambda m, r: m.allocate_slots(r, 1, 2, KVCacheBlocks([[1]])),
        "request a has blocks already and cannot adopt 2 computed tokens: pass "
        "new_computed_blocks on the first call only",
    ),
    "computed tokens without blocks": (
        lambda m, r: m.allocate_slots(Request("b", [1] * 9), 1, 4),
        "request b: new_computed_blocks cover [] tokens of the groups, num_new_computed_tokens is "
        "4: pass both as get_computed_blocks returned them",
    ),
    "another object of the same id": (
        lambda m, r: m.allocate_slots(Request("a", [1] * 9), 1),
        "request a is known as another object (Request('a', 9 tokens, 9 of them prompt, 6 "
        "computed)): pass that one, or free it first",
    ),
    "a request of a step": (
        lambda m, r: m.free(m.get_request("s") or r),
        "request s was admitted by a step: change it by steps, or use another request id",
    ),
    "caching what has no blocks": (
        lambda m, r: m.cache_blocks(Request("b", [1]), 1),
        "request b has no blocks to cache: allocate slots for it first",
    ),
    "caching more than there is": (
        lambda m, r: m.cache_blocks(r, 10),
        "request a: cannot cache 10 tokens, it has 9: pass 0 to that number",
    ),
    "another model epoch": (
        lambda m, r: m.get_computed_blocks(Request("b", [1], model_epoch=1)),
        "request b is of model epoch 1, the weights are of epoch 0: create it with "
        "model_epoch=manager.model_epoch",
    ),
    "a slot that does not exist": (
        lambda m, r: m.request_in_slot(8),
        "slot is 8: pass an integer from 0 to 7",
    ),
    "restoring into use": (
        lambda m, r: m.restore([]),
        "cannot restore: 2 requests run and 0 are preempted: restore a new manager",
    ),
    "pinning for no time": (
        lambda m, r: m.pin_prefix([1, 2], 0.0),
        "ttl_s is 0.0: pass a number above 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistaken_call_is_refused_and_changes_nothing(name: str) -> None:
    manager = make_manager(log_stats=True)
    run(manager, request := Request("a", list(range(9))), 6)
    Engine(manager).step(new=(new("s", [1, 2, 3]),))
    make, message = MISTAKES[name]
    before = manager.dump_state()
    with pytest.raises(RequestError) as raised:
        make(manager, request)
    assert str(raised.value) == message
    assert manager.dump_state() == before


def test_a_request_with_another_hasher_is_refused() -> None:
    hasher = get_request_block_hasher(4, get_hash_fn("xxh3_128"))
    with pytest.raises(RequestError, match="use one algorithm, seed and block size for a request"):
        make_manager().get_computed_blocks(Request("a", [1], block_hasher=hasher))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"core_factory": 5}, "core_factory has to be a function that makes a core, not 5"),
        ({"watermark": 1.0}, "watermark is 1.0: pass a share from 0.0 to below 1.0"),
        ({"max_pin_share": 1.5}, "max_pin_share is 1.5: pass a number of at least 0 and at most 1"),
        (
            {"max_num_seqs": 0},
            "max_num_seqs is 0: pass an integer from 1 to 2147483647",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make_manager(**settings)
    assert str(raised.value) == message
