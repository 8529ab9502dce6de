"""Chunked local attention, MLA, states and encoders: what their tables and hits look like."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.core import NewestState, Reservation, RowStates
from kvcache.core.flat_core import FlatCore
from kvcache.errors import ConfigurationError, RequestError
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import (
    block_lists,
    chunked,
    cross,
    full,
    make_flat_core,
    make_request,
    mamba,
    mla,
    row_batch,
    run_request,
)
from tests.core.test_calls import labels_of


def table(core: FlatCore, name: str, group: int = 0) -> list[int]:
    """Return 1 for blocks of a table and 0 for null ones."""
    return [int(block_id > 0) for block_id in core.block_ids(name)[group]]


def forward(  # noqa: PLR0917
    core: FlatCore, request: Request, start: int, own: int, drafts: int = 0, last: int = 0
) -> bool:
    """Schedule the tokens `[start, own)` and some drafts, after a forward that ended at `last`."""
    hit = core.look_up(request) if start == 0 else None
    computed = hit.num_tokens if hit is not None else start
    newest = NewestState(last, start - last) if last else None
    wanted = Reservation(computed, own + drafts, own, 0, own, newest)
    return core.reserve(request, wanted, hit) is not None


# --- chunked local attention ---


def test_full_attention_decides_which_chunk_a_hybrid_hit_ends_in() -> None:
    core = make_flat_core(40, full(), chunked(8))
    run_request(core, make_request("a", range(14)))
    hit = core.look_up(make_request("b", range(30)))
    assert hit.num_tokens == 12
    assert [[int(b > 0) for b in ids] for ids in hit.block_ids] == [[1, 1, 1], [0, 0, 1]]


def test_a_chunk_is_freed_when_the_next_one_begins() -> None:
    core = make_flat_core(20, chunked(8))
    request = make_request("a", range(17))
    core.reserve(request, Reservation(0, 15, 0))
    core.reserve(request, Reservation(15, 16, 0))
    assert table(core, "a") == [0, 0, 1, 1]
    assert core.num_free_blocks() == 17
    core.reserve(request, Reservation(16, 17, 0))
    assert table(core, "a") == [0, 0, 0, 0, 1]
    assert core.num_free_blocks() == 18
    core.check()


@pytest.mark.parametrize("spec", [chunked(8), mamba()])
def test_eagle_is_refused_where_no_last_block_can_be_dropped(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_flat_core(20, full(), spec, use_eagle=True)
    assert str(error.value) == (
        f"EAGLE cannot be used with KV cache groups of kind {spec.kind!r}, whose hits do not hold "
        "without their last block: turn use_eagle off"
    )


# --- MLA ---


def test_latent_attention_hits_and_evicts_as_full_attention_does() -> None:
    core = make_flat_core(6, mla())
    run_request(core, make_request("a", range(16)))
    core.free(make_request("a", range(16)))
    assert core.look_up(make_request("b", range(17))).num_tokens == 16
    run_request(core, make_request("c", range(50, 58)))
    assert core.look_up(make_request("b", range(17))).num_tokens == 12
    core.check()


# --- states ---


def test_one_state_and_those_of_drafts_are_all_a_request_ever_has() -> None:
    core = make_flat_core(20, mamba("none", num_drafts=2))
    request = make_request("a", range(100))
    assert forward(core, request, 0, 30)
    assert table(core, "a") == [1, 1, 1]
    assert forward(core, request, 30, 90, drafts=2, last=30)
    assert forward(core, request, 92, 100, last=90)
    assert table(core, "a") == [1, 1, 1]
    core.check()


def test_columns_that_a_chunk_passes_stay_null() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(50))
    forward(core, request, 0, 10)
    assert table(core, "a") == [0, 0, 1]
    forward(core, request, 10, 19, last=10)
    assert table(core, "a") == [0, 0, 1, 0, 1]
    forward(core, request, 19, 20, last=19)
    assert table(core, "a") == [0, 0, 0, 0, 1]
    assert core.num_free_blocks() == 18
    core.check()


def test_nothing_leaks_of_a_table_with_nulls_in_the_middle() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(50))
    forward(core, request, 0, 10)
    forward(core, request, 10, 19, last=10)
    forward(core, request, 19, 40, last=19)
    core.free(request)
    assert core.num_free_blocks() == 19
    core.check()


def test_a_request_never_holds_more_states_than_its_spec_says() -> None:
    spec = mamba(num_drafts=2)
    core = make_flat_core(1 + 4, spec)
    assert spec.num_state_blocks == 4
    request = make_request("a", range(60))
    assert forward(core, request, 0, 10)
    assert table(core, "a") == [0, 0, 1, 1, 1]
    assert forward(core, request, 10, 31, last=10)
    assert table(core, "a") == [0, 0, 1, 0, 0, 0, 0, 1, 1, 1]
    assert core.num_free_blocks() == 0
    assert forward(core, request, 31, 32, drafts=2, last=31)
    assert forward(core, request, 33, 34, drafts=2, last=32)
    assert forward(core, request, 36, 59, last=34)
    assert core.num_free_blocks() == 0
    core.check()


def test_a_hit_is_the_last_column_whose_end_was_the_end_of_a_chunk() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(50))
    forward(core, request, 0, 8)
    forward(core, request, 8, 15, last=8)
    forward(core, request, 15, 18, last=15)
    hit = core.look_up(make_request("b", range(50)))
    assert hit.num_tokens == 8
    assert [int(b > 0) for b in hit.block_ids[0]] == [0, 1]


def test_a_column_that_was_passed_never_becomes_hittable() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(50))
    core.reserve(request, Reservation(0, 3, 0, 0, 3))
    core.reserve(request, Reservation(3, 6, 0, 0, 6, NewestState(3, 0)))
    assert table(core, "a") == [1, 1]
    core.commit(request, 4)
    core.commit(request, 6)
    assert core.look_up(make_request("b", range(50))).num_tokens == 0


def test_a_delayed_state_hits_after_its_commit() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(50))
    core.reserve(request, Reservation(0, 8, 0, 0, 8))
    assert core.look_up(make_request("b", range(50))).num_tokens == 0
    core.commit(request, 8)
    assert core.look_up(make_request("b", range(50))).num_tokens == 8


def test_an_accepted_draft_at_a_boundary_leaves_no_state_there() -> None:
    core = make_flat_core(20, mamba(num_drafts=1))
    request = make_request("a", range(50))
    forward(core, request, 0, 7, drafts=1)
    forward(core, request, 8, 9, last=7)
    assert core.look_up(make_request("b", range(50))).num_tokens == 0


def test_a_state_of_the_same_step_is_no_hit_one_of_an_earlier_step_is() -> None:
    core = make_flat_core(40, mamba())
    core.open_step("engine", 1)
    forward(core, make_request("a", range(8)), 0, 8)
    assert core.look_up(make_request("b", range(9))).num_tokens == 0
    core.open_step("engine", 2)
    assert core.look_up(make_request("b", range(9))).num_tokens == 8
    core.open_step("other", 2)
    assert core.look_up(make_request("b", range(9))).num_tokens == 0
    core.complete_steps("engine", 1)
    assert core.look_up(make_request("b", range(9))).num_tokens == 8


def test_a_sealed_copy_is_hit_although_the_open_step_writes_the_same_state() -> None:
    core = make_flat_core(40, full(), mamba())
    core.open_step("engine", 1)
    one, two = make_request("a", range(8)), make_request("b", range(8))
    forward(core, one, 0, 8)
    core.open_step("engine", 2)
    core.reserve(two, Reservation(0, 8, 8, 0, 8))
    core.complete_steps("engine", 1)
    assert core.look_up(make_request("c", range(9))).num_tokens == 8
    core.check()


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
    assert core.look_up(make_request("b", range(9))).num_tokens == 0


def test_the_state_behind_external_tokens_has_its_column() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("a", range(50))
    core.reserve(request, Reservation(9, 30, 30, 0, 30))
    assert table(core, "a") == [0, 0, 1, 0, 0, 0, 0, 1]


def test_a_hit_is_dropped_where_external_tokens_reach_further() -> None:
    core = make_flat_core(20, mamba())
    forward(core, make_request("a", range(8)), 0, 8)
    request = make_request("b", range(50))
    hit = core.look_up(request)
    assert block_lists(hit) == [[0, 1]]
    core.reserve(request, Reservation(13, 20, 20, 0, 20), hit)
    assert table(core, "b") == [0, 0, 0, 1, 1]
    core.check()


def test_rows_of_states_jump_beside_rows_that_do_not() -> None:
    core = make_flat_core(40, full(), mamba())
    requests = [make_request(name, range(i, i + 40)) for i, name in enumerate("abc")]
    for request in requests:
        forward(core, request, 0, 6)
    column = lambda *values: np.array(values, dtype=np.int32)  # noqa: E731
    own = column(9, 30, 9)
    states = RowStates(own, column(6, 6, 6), column(0, 0, 0))
    rows = row_batch(requests, [0, 1, 2], [6, 6, 6], [9, 30, 9], [9, 30, 9], states=states)
    assert core.reserve_rows(rows).is_reserved.tolist() == [1, 1, 1]
    assert [table(core, name, 1) for name in "abc"] == [
        [0, 1, 1],
        [0, 1, 0, 0, 0, 0, 0, 1],
        [0, 1, 1],
    ]
    core.check()


def test_rows_of_states_must_say_where_they_end() -> None:
    core = make_flat_core(20, mamba())
    forward(core, make_request("a", range(9)), 0, 8)
    with pytest.raises(RequestError) as error:
        core.reserve_rows(row_batch([make_request("a", range(9))], [0], [9], [9], [9]))
    assert str(error.value) == (
        "a batch of rows without states, but a KV cache group keeps states: say where each row's "
        "forwards end"
    )


def test_states_are_restored_from_labels() -> None:
    one = make_flat_core(20, full(), mamba())
    one.open_step("engine", 1)
    request = make_request("a", range(20))
    forward(one, request, 0, 8)
    one.open_step("engine", 2)
    forward(one, request, 8, 16, last=8)
    one.complete_steps("engine", 2)
    labels = labels_of(one)
    other = make_flat_core(20, full(), mamba())
    assert other.restore([labels, labels]) == 6
    hit = other.look_up(make_request("b", range(20)))
    assert hit == one.look_up(make_request("b", range(20)))
    assert hit.num_tokens == 16
    other.check()


# --- encoders ---


def test_encoder_tokens_are_allocated_once_and_do_not_grow() -> None:
    core = make_flat_core(20, full(), cross())
    request = make_request("a", range(40))
    core.reserve(request, Reservation(0, 5, 5, num_encoder_tokens=9))
    assert [len(ids) for ids in core.block_ids("a")] == [2, 3]
    core.reserve(request, Reservation(5, 40, 40))
    assert [len(ids) for ids in core.block_ids("a")] == [10, 3]
    core.free(request)
    assert core.num_free_blocks() == 19
    core.check()


def test_a_request_without_room_for_its_encoder_tokens_gets_nothing() -> None:
    core = make_flat_core(4, full(), cross())
    request = make_request("a", range(5))
    assert core.reserve(request, Reservation(0, 5, 5, num_encoder_tokens=8)) is None
    assert core.block_ids("a") == ([], [])
    assert core.reserve(request, Reservation(0, 4, 4, num_encoder_tokens=8)) is not None
    core.check()
