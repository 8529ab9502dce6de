"""Forks of requests on a manager: sharing, copies, and refusals."""

from __future__ import annotations

import pytest

from kvcache import Fork, KVCacheManager, LoRARequest, Request, RequestError
from kvcache.protocol.commands import BlockTablePatch, Copy, Zero
from kvcache.protocol.step import NO_SLOT, ResumedRequest
from tests.manager.managers_under_test import FULL, HYBRID, ONE_STATE, make_manager
from tests.manager.steps import Engine, new, row


def computed_request(
    manager: KVCacheManager, request_id: str, tokens: list[int], num_computed: int | None = None
) -> Request:
    request = Request(request_id, tokens)
    assert manager.allocate_slots(request, len(tokens) if num_computed is None else num_computed)
    request.num_computed_tokens = len(tokens) if num_computed is None else num_computed
    manager.take_commands()
    return request


def copies(manager: KVCacheManager) -> list[tuple[int, int]]:
    commands = [c for c in manager.take_commands() if isinstance(c, Copy)]
    return [
        pair
        for c in commands
        for pair in zip(c.sources.tolist(), c.destinations.tolist(), strict=True)
    ]


# --- call by call ----------------------------------------------------------------------------


def test_a_child_shares_every_block_and_the_first_writer_gets_one_of_its_own() -> None:
    manager = make_manager(HYBRID)
    parent = computed_request(manager, "parent", list(range(10)))
    child = Request("child", [*range(10), 99])
    free = manager.statistics().core.num_free_blocks
    shared = manager.fork(parent, child)
    assert shared.get_block_ids() == manager.get_block_ids("parent") == ([1, 2, 3], [4, 5, 6])
    assert (child.num_computed_tokens, manager.slot_of("child")) == (10, 1)
    assert manager.statistics().core.num_free_blocks == free
    assert manager.get_num_common_prefix_blocks(parent, 2) == [3, 0]

    added = manager.allocate_slots(child, 1)
    assert added.get_block_ids() == ([7], [8])
    assert manager.get_block_ids("child") == ([1, 2, 7], [4, 5, 8])
    commands = manager.take_commands()
    assert [type(command) for command in commands] == [Copy, BlockTablePatch]
    copy, patch = commands
    assert isinstance(copy, Copy)
    assert isinstance(patch, BlockTablePatch)
    assert (copy.sources.tolist(), copy.destinations.tolist()) == ([3, 6], [7, 8])
    assert patch.slots.tolist() == [1, 1]
    assert patch.block_ids.tolist() == [1, 2, 7, 4, 5, 8]

    parent.append_output_token_ids([5])
    assert manager.allocate_slots(parent, 1) is not None
    assert manager.get_block_ids("parent") == ([1, 2, 3], [4, 5, 6])
    assert copies(manager) == []
    manager.check()


def test_a_fork_at_a_block_boundary_never_copies() -> None:
    manager = make_manager()
    parent = computed_request(manager, "parent", list(range(8)))
    child = Request("child", [*range(8), 1])
    manager.fork(parent, child)
    parent.append_output_token_ids([2])
    for request in (parent, child):
        assert manager.allocate_slots(request, 1) is not None
    assert manager.get_block_ids("parent") == ([1, 2, 3],)
    assert manager.get_block_ids("child") == ([1, 2, 4],)
    assert copies(manager) == []


def test_without_room_for_the_copy_nothing_is_changed() -> None:
    manager = make_manager(num_blocks=4)
    parent = computed_request(manager, "parent", list(range(10)))
    child = Request("child", [*range(10), 1])
    manager.fork(parent, child)
    before = manager.dump_state()["core"]
    assert manager.allocate_slots(child, 1) is None
    assert manager.dump_state()["core"] == before
    assert copies(manager) == []
    manager.free(parent)
    assert manager.allocate_slots(child, 1) is not None
    assert manager.get_block_ids("child") == ([1, 2, 3],)
    manager.check()


def test_both_ends_of_a_copy_are_held_until_its_command_is_taken() -> None:
    manager = make_manager(num_blocks=6, zero_new_blocks=True)
    parent = computed_request(manager, "parent", list(range(6)))
    child = Request("child", [*range(6), 1])
    manager.fork(parent, child)
    manager.allocate_slots(child, 1)
    manager.free(parent)
    manager.free(child)
    assert manager.statistics().core.references["fork"] == 2
    # Neither end may be cleared or copied into before the copy has run.
    other = Request("other", list(range(50, 60)))
    assert manager.allocate_slots(other, 10) is not None
    assert set(manager.get_block_ids("other")[0]).isdisjoint({2, 3})
    commands = [c for c in manager.take_commands() if isinstance(c, (Zero, Copy))]
    assert [type(c) for c in commands] == [Zero, Copy]
    assert manager.statistics().core.references["fork"] == 0
    manager.free(other)
    assert manager.statistics().core.num_free_blocks == 5
    manager.check()


def test_drafts_of_the_parent_are_not_shared() -> None:
    manager = make_manager()
    parent = Request("parent", list(range(7)))
    assert manager.allocate_slots(parent, 7 + 3, num_draft_tokens=3, num_lookahead_tokens=4)
    parent.num_computed_tokens = 7
    child = Request("child", list(range(7)))
    shared = manager.fork(parent, child)
    assert shared is not None
    assert [len(table) for table in shared.get_block_ids()] == [2]


def test_a_block_that_can_be_found_by_its_content_is_not_written_by_the_last_holder() -> None:
    # The fast core never lets a content be hit in a block that two requests may still write.
    manager = make_manager()
    parent = Request("parent", list(range(6)))
    assert manager.allocate_slots(parent, 8, num_draft_tokens=2)
    parent.num_computed_tokens = 6
    child = Request("child", [0, 1, 2, 3, 4, 5, 70, 71, 72])
    assert manager.fork(parent, child) is not None
    # The drafts are accepted: the tokens that the parent wrote after the child's count.
    parent.append_output_token_ids([6, 7])
    parent.num_computed_tokens = 8
    manager.cache_blocks(parent, 8)
    manager.free(parent)
    assert manager.allocate_slots(child, 3) is not None
    assert manager.get_block_ids("child") == ([1, 3, 4],)
    assert copies(manager) == [(2, 3)]
    assert manager.get_computed_blocks(Request("other", list(range(9))))[1] == 8
    manager.check()


def test_a_parent_that_was_forked_at_two_states_writes_over_neither() -> None:
    manager = make_manager(ONE_STATE)
    parent = computed_request(manager, "parent", list(range(6)))
    parent.append_output_token_ids([6])
    assert manager.allocate_slots(parent, 3, num_draft_tokens=2) is not None
    parent.num_computed_tokens = 7
    manager.fork(parent, Request("before the drafts", list(range(7))))
    parent.append_output_token_ids([7, 8])
    parent.num_computed_tokens = 9
    manager.fork(parent, Request("behind them", list(range(9))))
    assert manager.get_block_ids("before the drafts") == ([1],)
    assert manager.get_block_ids("behind them") == ([3],)
    parent.append_output_token_ids([9])
    assert manager.allocate_slots(parent, 3, num_draft_tokens=2) is not None
    assert manager.get_block_ids("parent") == ([4, 2, 5],)
    assert copies(manager) == [(1, 4), (3, 5)]
    manager.check()


def test_a_refused_reservation_leaves_what_was_shared_with_a_request_that_has_gone() -> None:
    manager = make_manager(num_blocks=4)
    parent = computed_request(manager, "parent", list(range(10)))
    child = Request("child", list(range(20)))
    assert manager.fork(parent, child) is not None
    manager.free(parent)
    before = manager.dump_state()["core"]
    assert manager.allocate_slots(child, 10) is None
    assert manager.dump_state()["core"] == before
    assert manager.allocate_slots(child, 2) is not None
    assert manager.get_block_ids("child") == ([1, 2, 3],)
    assert copies(manager) == []
    manager.check()


@pytest.mark.parametrize("num_computed", [5, 8])
def test_a_parent_without_slots_for_what_it_counts_as_computed_is_refused(
    num_computed: int,
) -> None:
    manager = make_manager()
    parent = computed_request(manager, "parent", list(range(10)), num_computed=4)
    parent.num_computed_tokens = num_computed
    before = manager.dump_state()
    message = (
        f"request parent has blocks for 4 tokens in group 0, {num_computed} computed ones cannot "
        "be shared: allocate slots before tokens are computed"
    )
    with pytest.raises(RequestError, match=message):
        manager.fork(parent, Request("child", list(range(10))))
    assert manager.dump_state() == before
    manager.check()


def test_without_a_free_slot_there_is_no_child() -> None:
    manager = make_manager(max_num_seqs=1)
    parent = computed_request(manager, "parent", list(range(6)))
    assert manager.fork(parent, Request("child", list(range(6)))) is None
    assert manager.get_block_ids("child") == ([],)
    manager.check()


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([0, 1, 2, 9, 4, 5], {}, "token 3 is 9, that of the parent 3: begin with the 6 computed"),
        ([0, 1, 2], {}, "it has 3 tokens, 6 are computed of the parent"),
        (list(range(81)), {}, "and the model takes 80: give it at least the computed ones"),
        (list(range(6)), {"cache_salt": "x"}, "its LoRA, salt, tenant, model epoch or images"),
        (list(range(6)), {"lora": LoRARequest("a", "b")}, "its LoRA, salt, tenant"),
        (list(range(6)), {"mm_positions": [(1, 2)], "mm_hashes": ["h"]}, "or images differ"),
    ],
)
def test_a_child_that_does_not_continue_its_parent_is_refused(
    tokens: list[int], options: dict[str, object], message: str
) -> None:
    manager = make_manager()
    parent = computed_request(manager, "parent", list(range(6)))
    before = manager.dump_state()
    with pytest.raises(RequestError, match=f"child cannot be forked from parent.*{message}"):
        manager.fork(parent, Request("child", tokens, **options))
    assert manager.dump_state() == before


def test_parents_without_blocks_and_children_with_them_are_refused() -> None:
    manager = make_manager()
    stranger = Request("stranger", list(range(6)))
    with pytest.raises(RequestError, match="stranger is not known and cannot be forked: allocate"):
        manager.fork(stranger, Request("child", list(range(6))))
    parent = Request("parent", list(range(6)))
    manager.allocate_slots(parent, 6)
    with pytest.raises(RequestError, match="no computed tokens: set its num_computed_tokens"):
        manager.fork(parent, Request("child", list(range(6))))
    parent.num_computed_tokens = 6
    with pytest.raises(RequestError, match="parent is to be forked from parent but known already"):
        manager.fork(parent, Request("parent", list(range(6))))
    with pytest.raises(RequestError, match="parent is known as another object"):
        manager.fork(Request("parent", list(range(6))), Request("child", list(range(6))))
    Engine(manager).step(new=(new("of a step", range(6)),))
    request = manager.get_request("of a step")
    assert request is not None
    with pytest.raises(RequestError, match="was admitted by a step: change it by steps"):
        manager.fork(request, Request("child", list(range(6))))
    manager.check()


# --- in steps --------------------------------------------------------------------------------


def test_a_step_forks_before_its_rows_run() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("parent", range(6)),))
    result = engine.step(row(0, [6]), forks=(Fork("parent", "child"),))
    assert result.forked_slots.tolist() == [1]
    child = manager.get_request("child")
    assert (child.all_token_ids.tolist(), child.num_computed_tokens) == (list(range(6)), 6)
    # The parent writes in this step and moves; the child keeps what both had.
    assert manager.get_block_ids("child") == ([1, 2],)
    assert manager.get_block_ids("parent") == ([1, 3],)
    assert copies(manager) == [(2, 3)]
    result = engine.step(row(0, [7]), row(1, [70]))
    assert result.running_scheduled.tolist() == [1, 1]
    assert copies(manager) == []
    manager.check()


def test_a_row_that_only_settles_needs_no_copy_and_the_next_one_does() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("parent", range(6)),))
    engine.step(forks=(Fork("parent", "child"),))
    engine.step(row(1, [70], num_new=0))
    assert manager.get_block_ids("child") == ([1, 2],)
    engine.step(row(1))
    assert manager.get_block_ids("child") == ([1, 3],)
    assert copies(manager) == [(2, 3)]
    manager.check()


def test_a_child_is_of_its_parents_content() -> None:
    manager = make_manager()
    engine = Engine(manager)
    parent = new("parent", range(6), lora_name="a", lora_path="p", cache_salt="s", tenant="t")
    engine.step(new=(parent,))
    engine.step(forks=(Fork("parent", "child"),))
    known, child = manager.get_request("parent"), manager.get_request("child")
    assert (child.namespace, child.lora) == (known.namespace, known.lora)


def test_forks_that_find_no_slot_are_named() -> None:
    manager = make_manager(max_num_seqs=2)
    engine = Engine(manager)
    engine.step(new=(new("parent", range(6)),))
    result = engine.step(forks=(Fork("parent", "a"), Fork("parent", "b")))
    assert result.forked_slots.tolist() == [1, NO_SLOT]
    assert result.no_room == ("b",)
    assert manager.get_request("b") is None
    manager.check()


def test_a_failed_step_takes_its_forks_back() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("parent", range(6)),))
    engine.step(row(0, [6]), forks=(Fork("parent", "child"),))
    result = engine.step(failed_step=2, completed_step=1)
    assert result.withdrawn == ("child",)
    assert manager.get_request("child") is None
    assert result.rolled_back_tokens.tolist() == [6]
    engine.step(row(0, [8]))
    assert copies(manager) == [(2, 3)]
    manager.check()
    assert manager.statistics().core.num_free_blocks == 63 - 2


def test_a_child_of_a_child_and_a_name_that_comes_free() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", range(6)),))
    engine.step(forks=(Fork("a", "b"),))
    result = engine.step(finished=("a",), forks=(Fork("b", "a"),))
    assert result.forked_slots.tolist() == [0]
    assert manager.get_block_ids("a") == manager.get_block_ids("b") == ([1, 2],)
    manager.check()


def test_a_preempted_child_comes_back_like_any_request() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("parent", range(6)),))
    engine.step(forks=(Fork("parent", "child"),))
    engine.step(row(0, [6]), preempted_swap=("child",))
    assert manager.get_block_ids("child") == ([],)
    assert copies(manager) == []
    result = engine.step(resumed=(ResumedRequest("child", 10),), completed_step=3)
    assert result.num_hit_tokens.tolist() == [4]
    manager.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forks": (Fork("nobody", "c"),)}, "request 'nobody' is to be forked but is not known"),
        ({"forks": (Fork("gone", "c"),)}, "gone is to be forked but does not run: fork running"),
        (
            {"forks": (Fork("parent", "c"),), "finished": ("parent",)},
            "parent is to be forked but does not run",
        ),
        (
            {"forks": (Fork("parent", "c"),), "preempted_swap": ("parent",)},
            "parent is to be forked but does not run",
        ),
        ({"forks": (Fork("parent", "gone"),)}, "gone is to be forked from parent but known"),
        ({"forks": (Fork("parent", "c"),) * 2}, "request c is resumed or new twice: name it once"),
        (
            {"forks": (Fork("parent", "c"),), "new": (new("c", [1]),)},
            "request c is resumed or new twice: name it once",
        ),
        ({"forks": (Fork("parent", ""),)}, "child_id of a fork is ''"),
    ],
)
def test_forks_that_cannot_be_meant_are_refused(fields: dict[str, object], message: str) -> None:
    manager = make_manager(FULL)
    engine = Engine(manager)
    engine.step(new=(new("parent", range(6)), new("gone", range(4))))
    engine.step(preempted_recompute=("gone",))
    before = manager.dump_state()
    with pytest.raises(RequestError, match=message):
        engine.step(**fields)
    assert manager.dump_state() == before


def test_requests_of_other_clients_and_callers_are_not_forked() -> None:
    manager = make_manager()
    Engine(manager, "one#1").step(new=(new("theirs", range(6)),))
    computed_request(manager, "callers", list(range(6)))
    other = Engine(manager, "two#1")
    for parent in ("theirs", "callers"):
        with pytest.raises(RequestError, match=f"{parent} is to be forked but belongs to another"):
            other.step(forks=(Fork(parent, "child"),))


# --- through a client ------------------------------------------------------------------------
