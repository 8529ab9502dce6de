"""The core call by call: reservations, steps, commands, events, resets, rebuilds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvcache.commands import Label, Unlabel, Zero
from kvcache.core import (
    AllBlocksCleared,
    BlocksStored,
    Reservation,
    RowBatch,
)
from kvcache.core.flat_core import FlatCore
from kvcache.errors import BlockError, RequestError
from kvcache.labels import LabelSet, LabelTable
from kvcache.request import Request
from tests.core.builders import (
    NONE_HASH,
    EventLog,
    extend,
    full,
    make_flat_core,
    make_request,
    row_batch,
    run_request,
    window,
)


def rows(*columns: list[int], requests: list[Request]) -> RowBatch:
    return row_batch(requests, *columns)


def test_a_reservation_without_room_gives_nothing_to_any_group() -> None:
    core = make_flat_core(6, full(), full())
    before = core.dump_state()
    assert core.reserve(make_request("a", range(12)), Reservation(0, 12, 12)) is None
    assert core.dump_state() == before


def test_spare_blocks_are_left_free() -> None:
    core = make_flat_core(6)
    assert core.reserve(make_request("a", range(8)), Reservation(0, 8, 8, 4)) is None
    assert core.reserve(make_request("a", range(8)), Reservation(0, 8, 8, 3)) is not None


def test_hit_blocks_that_are_free_count_as_needed() -> None:
    core = make_flat_core(5)
    first = make_request("a", range(8))
    run_request(core, first)
    core.free(first)
    second = make_request("b", range(20))
    assert run_request(core, second) is None
    assert core.num_free_blocks() == 4


def test_skipped_window_blocks_are_freed_even_if_there_is_no_room() -> None:
    core = make_flat_core(6, window(5))
    request = make_request("a", range(20))
    core.reserve(request, Reservation(0, 20, 0))
    request.append_output_token_ids(list(range(40)))
    assert core.reserve(request, Reservation(20, 60, 0)) is None
    assert core.block_ids("a")[0][:4] == [0, 0, 0, 0]
    assert core.num_free_blocks() == 4


@pytest.mark.parametrize(
    ("computed", "num_null"), [(0, 0), (7, 0), (8, 1), (11, 1), (12, 2), (20, 4)]
)
def test_blocks_wholly_before_the_window_are_skipped(computed: int, num_null: int) -> None:
    core = make_flat_core(20, window(5))
    request = make_request("a", range(20))
    core.reserve(request, Reservation(0, 20, 0))
    core.reserve(request, Reservation(computed, 20, 0))
    assert core.block_ids("a")[0].count(0) == num_null
    core.check()


def test_positions_skipped_from_the_start_take_no_blocks() -> None:
    core = make_flat_core(20, full(), window(5))
    changes = core.reserve(make_request("a", range(24)), Reservation(16, 20, 0))
    assert changes is not None
    assert [list(change.block_ids).count(0) for change in changes] == [0, 3]
    core.check()


def test_caching_tokens_that_are_not_there_is_refused() -> None:
    core = make_flat_core(20)
    with pytest.raises(RequestError) as error:
        core.reserve(make_request("a", range(8)), Reservation(0, 12, 12))
    assert str(error.value) == (
        "request a has 8 tokens, blocks up to token 12 cannot be full: append its tokens first"
    )
    assert core.num_free_blocks() == 19


def test_only_a_request_without_blocks_adopts_a_hit() -> None:
    core = make_flat_core(20)
    request = make_request("a", range(9))
    run_request(core, request)
    with pytest.raises(RequestError, match="request a has blocks already"):
        core.reserve(request, Reservation(8, 9, 9), core.look_up(request))


def test_rows_are_served_in_order_and_each_wholly_or_not_at_all() -> None:
    core = make_flat_core(5)
    requests = [make_request(name, range(4)) for name in "abc"]
    for request in requests:
        core.reserve(request, Reservation(0, 4, 4))
        request.append_output_token_ids([7])
    result = core.reserve_rows(rows([5, 6, 7], [4, 4, 4], [5, 5, 4], [5, 5, 4], requests=requests))
    assert result.is_reserved.tolist() == [1, 0, 1]
    patch = result.patches
    assert (patch.slots.tolist(), patch.groups.tolist()) == ([5], [0])
    assert (patch.first_indices.tolist(), patch.counts.tolist()) == ([1], [1])
    assert patch.block_ids.tolist() == core.block_ids("a")[0][1:]
    core.check()


def test_rows_do_what_single_reservations_do() -> None:
    one, many = (make_flat_core(60, full(), window(6), has_workers=False) for _ in range(2))
    for core in (one, many):
        for name in "ab":
            run_request(core, make_request(name, [ord(name)] * 5))
    singles = [make_request(name, [ord(name)] * 5) for name in "ab"]
    batch = [make_request(name, [ord(name)] * 5) for name in "ab"]
    for end in range(6, 40):
        for request in singles:
            request.append_output_token_ids([end])
            one.reserve(request, Reservation(end - 1, end, end))
        for request in batch:
            request.append_output_token_ids([end])
        many.reserve_rows(rows([0, 1], [end - 1] * 2, [end] * 2, [end] * 2, requests=batch))
        many.check()
        assert one.dump_state() == many.dump_state()


def test_a_block_is_hittable_for_its_client_at_once_and_for_others_when_sealed() -> None:
    core = make_flat_core(20)
    core.open_step("a", 1)
    run_request(core, make_request("r", range(8)))
    assert core.look_up(make_request("s", range(9))).num_tokens == 8
    assert core.statistics().num_sealed_blocks == 0
    core.open_step("b", 1)
    assert core.look_up(make_request("s", range(9))).num_tokens == 0
    core.close_step()
    assert core.look_up(make_request("s", range(9))).num_tokens == 0
    assert core.take_commands() == []
    core.complete_steps("a", 1)
    assert core.look_up(make_request("s", range(9))).num_tokens == 8
    assert core.statistics().num_sealed_blocks == 2


def test_a_failed_step_withdraws_what_it_and_later_steps_made_hittable() -> None:
    core = make_flat_core(20)
    request = make_request("r", range(12))
    for step, end in enumerate((4, 8, 12), start=1):
        core.open_step("a", step)
        core.reserve(request, Reservation(end - 4, end, end))
    core.complete_steps("a", 1)
    core.fail_steps("a", 2)
    core.check()
    assert core.look_up(make_request("s", range(13))).num_tokens == 4
    assert core.statistics().num_cached_blocks == 1
    core.open_step("a", 4)
    core.reserve(request, Reservation(4, 12, 12))
    assert core.look_up(make_request("s", range(13))).num_tokens == 12


def test_sealing_labels_blocks_and_eviction_withdraws_the_label_first() -> None:
    core = make_flat_core(3, zero_new_blocks=True, slots={"r": 4})
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


def test_pins_survive_pressure() -> None:
    core = make_flat_core(6)
    first = make_request("a", range(9))
    run_request(core, first)
    hit = core.look_up(first)
    core.pin(hit)
    core.free(first)
    assert core.reserve(make_request("b", range(50, 66)), Reservation(0, 16, 16)) is None
    assert core.look_up(first) == hit
    assert core.statistics().num_pinned_blocks == 2
    core.unpin(hit)
    assert core.reserve(make_request("b", range(50, 66)), Reservation(0, 16, 16)) is not None
    core.check()
    with pytest.raises(BlockError):
        core.unpin(hit)


def test_reset_refuses_while_blocks_are_in_use_and_says_how_many() -> None:
    core = make_flat_core(20)
    request = make_request("a", range(9))
    run_request(core, request)
    assert core.reset() == 3
    core.stop_hits()
    assert core.look_up(make_request("b", range(9))).num_tokens == 0
    extend(core, request, 8)
    assert core.statistics().num_cached_blocks == 2
    core.free(request)
    assert core.reset() == 0
    run_request(core, request)
    assert core.look_up(make_request("b", range(9))).num_tokens == 8


def test_a_request_whose_hashes_are_forgotten_is_cached_no_further() -> None:
    core = make_flat_core(20)
    request = make_request("a", range(4))
    run_request(core, request)
    core.forget_hashes(request)
    extend(core, request, 8)
    assert core.statistics().num_cached_blocks == 1
    core.free(request)
    run_request(core, request)
    assert core.statistics().num_cached_blocks == 3


def test_common_prefix_counts_requests_only() -> None:
    core = make_flat_core(30, full(), window(5))
    for name in "ab":
        run_request(core, make_request(name, [*range(8), ord(name)]))
    core.pin(core.look_up(make_request("c", range(9))))
    assert core.common_prefix_blocks("a", 2) == [2, 0]
    assert core.common_prefix_blocks("a", 3) == [0, 0]


def labels_of(core: FlatCore, rank: int = 0) -> LabelSet:
    table = LabelTable(core.statistics().num_blocks + 1, 32, 4)
    for command in core.take_commands():
        if isinstance(command, Label):
            table.validate(command)
            table.apply(command)
        elif isinstance(command, Unlabel):
            table.withdraw(command.block_ids)
    return table.collect(rank, 1, 1, "layout")


def test_a_rebuild_keeps_what_all_ranks_agree_on_and_its_ancestors() -> None:
    core = make_flat_core(20)
    run_request(core, make_request("a", range(13), tenant="t"))
    run_request(core, make_request("b", [*range(4), *range(50, 54)], tenant="t"))
    complete = labels_of(core)
    run_request(core, make_request("c", range(90, 98)))
    everything = make_flat_core(20)
    assert everything.restore([complete, complete]) == 4
    everything.check()
    assert everything.look_up(make_request("d", range(13), tenant="t")).num_tokens == 12
    assert everything.look_up(make_request("d", range(13))).num_tokens == 0
    partial = LabelTable(20, 32, 4)
    partial.apply(complete.labels)
    partial.withdraw(np.array([2], dtype=np.int32))
    log = EventLog()
    some = make_flat_core(20, events=log)
    assert some.restore([complete, partial.collect(1, 1, 1, "layout")]) == 2
    some.check()
    assert some.look_up(make_request("d", range(13), tenant="t")).num_tokens == 4
    (unlabel,) = some.take_commands()
    assert isinstance(unlabel, Unlabel)
    assert unlabel.block_ids.tolist() == [2, 3]
    cleared, *stored = log.take()
    assert cleared == AllBlocksCleared()
    assert sum(len(e.digests) for e in stored if isinstance(e, BlocksStored)) == 2
    with pytest.raises(BlockError, match="restore an empty pool"):
        some.restore([complete])


def test_a_rebuild_tells_the_extra_keys_of_what_it_keeps() -> None:
    core = make_flat_core(20)
    images = {"mm_positions": [(2, 4)], "mm_hashes": ["picture"], "cache_salt": "s"}
    run_request(core, make_request("a", range(13), **images))
    log = EventLog()
    assert make_flat_core(20, events=log).restore([labels_of(core)]) == 3
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
    assert make_flat_core(20).restore([labels]) == 1
    assert make_flat_core(20).restore([spoilt]) == 0


def test_a_slot_that_another_request_takes_starts_anew() -> None:
    core = make_flat_core(20, has_workers=False)
    for name in "ab":
        request = make_request(name, [ord(name)] * 4)
        core.reserve(request, Reservation(0, 4, 4))
        for end in range(5, 14):
            request.append_output_token_ids([end])
            result = core.reserve_rows(rows([3], [end - 1], [end], [end], requests=[request]))
            assert result.is_reserved.tolist() == [1]
            core.check()
        assert [len(ids) for ids in core.block_ids(name)] == [4]
        assert core.look_up(make_request("c", request.all_token_ids)).num_tokens == 12
        core.free(request)
    assert core.num_free_blocks() == 19


def test_a_row_in_a_slot_below_zero_is_refused() -> None:
    core = make_flat_core(20)
    with pytest.raises(RequestError, match=r"slot -1 has no blocks.*number slots from 0"):
        core.reserve_rows(rows([-1], [0], [4], [4], requests=[make_request("a", range(4))]))


def test_what_rows_skip_is_freed_before_the_first_one_is_served() -> None:
    core = make_flat_core(5, window(3))
    requests = [make_request(name, [ord(name)] * 8) for name in "ab"]
    for request in requests:
        core.reserve(request, Reservation(0, 8, 8))
        request.append_output_token_ids([1])
    result = core.reserve_rows(rows([0, 1], [2, 8], [9, 9], [8, 8], requests=requests))
    assert result.is_reserved.tolist() == [1, 0]
    core.check()


def test_label_commands_alternate_as_a_block_is_used_again_and_again() -> None:
    core = make_flat_core(2)
    for name in "abc":
        request = make_request(name, [ord(name)] * 4)
        run_request(core, request)
        core.free(request)
    kinds = [type(command) for command in core.take_commands()]
    assert kinds == [Label, Unlabel, Label, Unlabel, Label]


def test_a_row_of_a_failed_step_is_cached_when_it_runs_again() -> None:
    core = make_flat_core(20)
    request = make_request("r", range(8))
    core.open_step("a", 1)
    core.reserve(request, Reservation(0, 8, 8))
    core.fail_steps("a", 1)
    core.open_step("a", 2)
    core.reserve_rows(rows([0], [0], [8], [8], requests=[request]))
    assert core.look_up(make_request("s", range(9))).num_tokens == 8
