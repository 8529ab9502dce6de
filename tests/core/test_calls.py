"""The core call by call: refusals, commands, events, rebuilds, merges.

`test_core_walk.py` compares its decisions with those of the slow core.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import BlockError, ConfigurationError, RequestError
from kvcache.core import BlocksStored, CacheHit, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.protocol.commands import Label, Unlabel, Zero
from kvcache.protocol.labels import LabelSet, LabelTable
from kvcache.requests.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import (
    NONE_HASH,
    EventLog,
    block_lists,
    chunked,
    full,
    make_flat_core,
    make_request,
    mamba,
    run_request,
    window,
)


def units(*numbers: int) -> list[int]:
    """Tokens of units of four equal ones each."""
    return [number for number in numbers for _ in range(4)]


def request(name: str, *numbers: int) -> Request:
    return make_request(name, units(*numbers))


def probe(core: FlatCore, *numbers: int) -> CacheHit:
    return core.cache.look_up(request("probe", *numbers, 99))


def fill_pool(core: FlatCore, name: str = "filler") -> int:
    """Take every free block, without contents; return the number of requests that hold them."""
    number = 0
    while core.reserve(request(f"{name} {number}", 7), Reservation(0, 4, 0)) is not None:
        number += 1
    return number


def test_sealing_labels_blocks_and_eviction_withdraws_the_label_first() -> None:
    core = make_flat_core(3, zero_new_blocks=True, slot_of=lambda name: {"r": 4}.get(name, -1))
    request = make_request("r", range(8), cache_salt="s")
    core.open_step("a", 1)
    run_request(core, request)
    (zero,) = core.take_commands()
    assert isinstance(zero, Zero)
    assert zero.block_ids.tolist() == [1, 2]
    core.complete_steps("a", 1)
    (label,) = core.take_commands()
    assert isinstance(label, Label)
    hashes = list(request.block_hashes)
    assert label.block_ids.tolist() == [1, 2]
    assert (label.slots.tolist(), label.groups.tolist()) == ([4, 4], [0, 0])
    assert label.digests == b"".join(hashes)
    assert label.parent_digests == NONE_HASH + hashes[0]
    assert label.token_ids.tolist() == list(range(8))
    assert list(label.extra_keys) == [0]
    core.free(request)
    core.open_step("a", 2)
    run_request(core, make_request("x", range(50, 58)))
    core.complete_steps("a", 2)
    unlabel, label = core.take_commands()[:2]
    assert isinstance(unlabel, Unlabel)
    assert isinstance(label, Label)
    assert unlabel.block_ids.tolist() == [2, 1]
    assert label.block_ids.tolist() == [2, 1]


def test_events_of_window_groups_are_published_on_demand() -> None:
    for everything, groups in ((False, {0}), (True, {0, 1})):
        log = EventLog()
        core = make_flat_core(20, full(), window(5), events=log, publish_all_groups=everything)
        run_request(core, make_request("a", range(8)))
        assert {e.group for e in log.take() if isinstance(e, BlocksStored)} == groups


def labels_of(core: FlatCore, rank: int = 0) -> LabelSet:
    table = LabelTable(core.statistics().num_blocks + 1, 32, 4)
    for command in core.take_commands():
        if isinstance(command, Label):
            table.validate(command)
            table.apply(command)
        elif isinstance(command, Unlabel):
            table.withdraw(command.block_ids)
    return table.collect(rank, 1, 1, "layout")


def test_a_rebuild_tells_the_extra_keys_of_what_it_keeps() -> None:
    core = make_flat_core(20)
    images = {"mm_positions": [(2, 4)], "mm_hashes": ["picture"], "cache_salt": "s"}
    run_request(core, make_request("a", range(13), **images))
    log = EventLog()
    assert make_flat_core(20, events=log).cache.restore([labels_of(core)]) == 3
    _, stored = log.take()
    assert isinstance(stored, BlocksStored)
    first, second = ("mm", "picture", 2), ("mm", "picture", -2)
    assert stored.extra_keys == ((first, ("cache_salt", "s")), (second,), None)


@pytest.mark.parametrize("keys", [b"\xff", b"\x01", b"\x80", b"\x81\x61a", b"\x81\x82\x01\x02"])
def test_a_rebuild_drops_what_has_unreadable_extra_keys(keys: bytes) -> None:
    core = make_flat_core(20)
    run_request(core, make_request("a", range(4)))
    labels = labels_of(core)
    spoilt = replace(labels, labels=replace(labels.labels, extra_keys={0: keys}))
    assert make_flat_core(20).cache.restore([labels]) == 1
    assert make_flat_core(20).cache.restore([spoilt]) == 0


@pytest.mark.parametrize("spec", [chunked(8), mamba()])
def test_eagle_is_refused_where_no_last_block_can_be_dropped(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_flat_core(20, full(), spec, use_eagle=True)
    assert str(error.value) == (
        f"EAGLE cannot be used with KV cache groups of kind {spec.kind!r}, whose hits do not hold "
        "without their last block: turn use_eagle off"
    )


def forward(  # noqa: PLR0917
    core: FlatCore, request: Request, start: int, own: int, drafts: int = 0, last: int = 0
) -> bool:
    """Schedule the tokens `[start, own)` and some drafts, after a forward that ended at `last`."""
    hit = core.cache.look_up(request) if start == 0 else None
    computed = hit.num_tokens if hit is not None else start
    newest = NewestState(last, start - last) if last else None
    wanted = Reservation(computed, own + drafts, own, 0, own, newest)
    return core.reserve(request, wanted, hit) is not None


def test_a_state_of_a_failed_step_is_not_made_hittable_again() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(9))
    core.open_step("engine", 1)
    forward(core, request, 0, 8)
    core.fail_steps("engine", 1)
    core.open_step("engine", 2)
    core.commit(request, 8)
    core.close_step()
    core.complete_steps("engine", 2)
    assert core.cache.look_up(make_request("b", range(9))).num_tokens == 0


def skipping(name: str, *numbers: int) -> Request:
    return make_request(name, units(*numbers), skip_reading_prefix_cache=True)


def in_step(core: FlatCore, step: int, *requests: Request) -> None:
    core.open_step("engine", step)
    for one in requests:
        assert core.reserve(one, Reservation(0, one.num_tokens, one.num_tokens)) is not None
    core.close_step()


def merged(core: FlatCore) -> list[tuple[str, int, int]]:
    """Take the changes of tables: row, first column, and count."""
    return [(name, c.first_index, len(c.block_ids)) for name, c in core.take_merges()]


def test_successive_columns_are_one_change() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    in_step(core, 1, skipping("a", 1, 2, 3), skipping("b", 1, 5), skipping("c", 1, 2, 3))
    core.complete_steps("engine", 1)
    assert merged(core) == [("b", 0, 1), ("c", 0, 3)]


def test_what_a_later_step_computed_is_kept_until_that_is_complete() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    two = skipping("b", 1, 2)
    in_step(core, 1, skipping("a", 1, 2, 3, 4), two)
    two.append_output_token_ids([3] * 4)
    in_step(core, 2, two)
    two.append_output_token_ids([4] * 4)
    in_step(core, 3, two)
    core.complete_steps("engine", 1)
    assert merged(core) == [("b", 0, 2)]
    core.check()
    core.fail_steps("engine", 3)
    core.complete_steps("engine", 2)
    assert merged(core) == [("b", 2, 1)]
    core.check()


def test_a_state_stays_where_its_request_looks_for_it() -> None:
    core = make_flat_core(40, full(), mamba(), merge_duplicates=True)
    in_step(core, 1, skipping("a", 1, 2), skipping("b", 1, 2))
    states = core.block_ids("b")[1]
    core.complete_steps("engine", 1)
    core.check()
    assert {change.group for _, change in core.take_merges()} == {0}
    assert core.block_ids("b")[1] == states


def forked(core: FlatCore) -> tuple[Request, Request]:
    """Return parent and child, which share a half-filled block."""
    parent, child = make_request("parent", range(6)), make_request("child", range(6))
    assert core.reserve(parent, Reservation(0, 6, 6), core.cache.look_up(parent)) is not None
    core.fork(parent, child, 6, NewestState(6, 0))
    core.take_commands()
    return parent, child


def fill(core: FlatCore, request: Request) -> None:
    """Fill the block that has been shared."""
    request.append_output_token_ids([9, 9])
    assert core.reserve(request, Reservation(6, 8, 8)) is not None


def test_what_was_found_before_the_workers_were_told_can_be_adopted_after() -> None:
    core = make_flat_core(8)
    parent, child = forked(core)
    fill(core, child)
    core.free(child)
    core.free(parent)
    reader = make_request("reader", [*range(4), 1])
    hit = core.cache.look_up(reader)
    assert hit.num_tokens == 4
    core.take_commands()
    assert core.reserve(reader, Reservation(4, 5, 5), hit) is not None
    core.check()
    core.free(reader)
    core.check()
    assert core.cache.num_free_blocks() == 7


def test_a_pin_is_given_back_once_for_each_time_it_was_made() -> None:
    core = make_flat_core(20, full(), window(9))
    run_request(core, request("a", 1, 2, 3))
    hit = probe(core, 1, 2, 3)
    core.cache.pin(hit)
    core.cache.pin(hit)
    core.free(request("a", 1))
    core.cache.unpin(hit)
    core.check()
    assert core.statistics().num_pinned_blocks == sum(
        len([b for b in ids if b]) for ids in block_lists(hit)
    )
    core.cache.unpin(hit)
    core.check()


def test_blocks_that_do_not_exist_are_not_forgotten() -> None:
    core = make_flat_core(20)
    run_request(core, request("a", 1, 2))
    before = core.dump_state()
    with pytest.raises(BlockError) as error:
        core.cache.evict([1, 20, -1])
    assert str(error.value) == "blocks [20, -1] do not exist: ids are below 20"
    assert core.dump_state() == before


@pytest.mark.parametrize("specs", [(full(),), (full(), full(8)), (full(8), window(9))])
def test_a_failed_step_cuts_off_the_end_of_unreferenced_blocks(specs: tuple[object, ...]) -> None:
    core = make_flat_core(40, *specs)
    served = request("a", 1, 2, 3)
    for step, end in ((1, 8), (2, 12)):
        core.open_step("engine", step)
        assert core.reserve(served, Reservation(end - 4, end, end)) is not None
    core.complete_steps("engine", 1)
    core.free(served)
    core.fail_steps("engine", 2)
    core.check()
    core.close_step()
    assert probe(core, 1, 2, 3).num_tokens == 8
    assert core.cache.num_free_blocks() == 39
    fill_pool(core)
    core.check()
    assert probe(core, 1, 2, 3).num_tokens == 0


def test_tokens_to_come_are_not_cached_where_no_block_ends_before_them() -> None:
    core = make_flat_core(40, full(8), full(12))
    served = make_request("a", range(3))
    assert core.reserve(served, Reservation(0, 5, 5)) is not None
    core.check()
    served.append_output_token_ids(list(range(3, 30)))
    assert core.reserve(served, Reservation(5, 30, 30)) is not None
    core.check()
    core.free(served)
    assert core.cache.look_up(make_request("b", range(30))).num_tokens == 24


@pytest.mark.parametrize(
    ("numbers", "places"),
    [
        ((1, 2, 3), None),  # of another plan
        ((1, 2, 3), (1, 0)),
        ((1, 2, 3), (0, None)),
        ((1, 2, 3), (0,)),
        ((1, 2, 3), (0, 1, 1)),
        ((1, 9, 3), (0, 1)),
        ((9, 2, 3), (0, 1)),
    ],
)
def test_a_hit_of_other_blocks_is_not_adopted(
    numbers: tuple[int, ...], places: tuple[int | None, ...] | None
) -> None:
    core = make_flat_core(40)
    run_request(core, request("a", 1, 2, 3))
    found = core.cache.look_up(request("b", 1, 2, 3))
    ids = found.block_ids[0].tolist()
    wrong = [0 if place is None else ids[place] for place in places or ()]
    hit = CacheHit(() if places is None else (int32_array(wrong),), found.num_tokens)
    before = core.dump_state()
    with pytest.raises(RequestError) as error:
        core.reserve(request("b", *numbers), Reservation(8, 9, 9), hit)
    assert str(error.value) == (
        "request b: the cache has changed since its 8 computed tokens were found: call "
        "get_computed_blocks again"
    )
    assert core.dump_state() == before


@pytest.mark.parametrize(
    "change", ["another window", "a short window", "a longer hit", "no hits", "no reads"]
)
def test_a_hit_that_a_look_up_does_not_find_now_is_not_adopted(change: str) -> None:
    core = make_flat_core(40, full(), window(8))
    run_request(core, request("a", 1, 2))
    asking = request("b", 1, 2, 3, 4)
    hit = core.cache.look_up(asking)
    assert hit.num_tokens == 8
    prefix, windowed = hit.block_ids
    if change == "another window":
        hit = CacheHit((prefix, windowed[::-1].copy()), 8)
    elif change == "a short window":
        hit = CacheHit((prefix, windowed[:1]), 8)
    elif change == "a longer hit":
        run_request(core, request("c", 1, 2, 3, 4))
    elif change == "no hits":
        core.cache.stop_hits()
    else:
        asking = skipping("b", 1, 2, 3, 4)
    before = core.dump_state()
    with pytest.raises(RequestError, match="since its 8 computed tokens were found"):
        core.reserve(asking, Reservation(8, 12, 12), hit)
    assert core.dump_state() == before
    core.check()


def test_a_hit_with_items_is_adopted_by_a_request_that_caches_nothing() -> None:
    core = make_flat_core(40)
    asking, other = [
        make_request(name, units(1, 2, 3, 4), mm_positions=[(5, 9)], mm_hashes=["image"])
        for name in "ab"
    ]
    run_request(core, other)
    hit = core.cache.look_up(asking)
    assert core.reserve(asking, Reservation(hit.num_tokens, 16, 0), hit) is not None
    assert core.block_ids("a")[0][:3] == hit.block_ids[0].tolist()
    assert hit.num_tokens == 12


@pytest.mark.parametrize("stays", [True, False])
def test_what_a_fork_cached_is_forgotten_with_unreferenced_blocks_before_it(stays: bool) -> None:
    """The fork caches after blocks of another request, which ends first."""
    core = make_flat_core(60)
    parent, child = request("parent", *range(8)), request("child", *range(8))
    assert core.reserve(parent, Reservation(0, 32, 0)) is not None
    core.fork(parent, child, 32, NewestState(32, 0))
    other = request("other", 0, 1, 2, 99)
    run_request(core, other)
    core.commit(child, 32)
    for one in [child, other] if stays else [child, other, parent]:
        core.free(one)
        core.check()
    for num_left in (2, 1, 0):
        end = 4 * (core.cache.num_free_blocks() - num_left)
        taker = make_request("taker", range(100, 100 + end))
        assert core.reserve(taker, Reservation(0, end, 0)) is not None
        core.check()
        core.free(taker)
    core.free(parent)
    core.check()
    assert core.cache.num_free_blocks() == 59


def test_a_hit_is_adopted_though_another_was_found_since() -> None:
    core = make_flat_core(40, full(4), window(5))
    for name, numbers in (("a", (1, 2, 3)), ("b", (4, 5, 6))):
        served = request(name, *numbers)
        run_request(core, served)
        core.free(served)
    adopting = request("c", 1, 2, 3)
    hit = core.cache.look_up(adopting)
    core.cache.look_up(request("d", 4, 5, 6))
    assert core.reserve(adopting, Reservation(hit.num_tokens, 9, 9), hit) is not None
    assert [ids[:2] for ids in core.block_ids("c")] == [ids.tolist() for ids in hit.block_ids]
    core.check()
