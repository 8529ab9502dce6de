"""The content of a forward: sent once, rolled back, and different for different contents."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.coordinator.forward_plan import (
    ForwardPlanner,
    content_key,
    content_tokens,
    encoder_key,
)
from kvcache.protocol.commands import WriteExpected
from kvcache.protocol.step import (
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)
from kvcache.requests.request import LoRARequest, Request


def make_request(**fields: Any) -> Request:
    return Request("r", list(range(12)), **fields)


def test_an_image_changes_the_content_from_its_first_placeholder_on() -> None:
    plain = content_tokens(make_request(), 0, 12)
    one = content_tokens(make_request(mm_positions=[(4, 3)], mm_hashes=["cat"]), 0, 12)
    two = content_tokens(make_request(mm_positions=[(4, 3)], mm_hashes=["dog"]), 0, 12)
    assert plain.tolist() == list(range(12))
    for changed in (one, two):
        assert np.flatnonzero(changed != plain).tolist() == [4, 5, 6]
        assert changed.min() >= 0
    assert (one[4:7] != two[4:7]).all()


def test_a_part_of_an_image_is_the_same_however_it_is_cut() -> None:
    request = make_request(mm_positions=[(4, 3)], mm_hashes=["cat"])
    whole = content_tokens(request, 0, 12)
    parts = [content_tokens(request, start, start + 2) for start in range(0, 12, 2)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert request.all_token_ids.tolist() == list(range(12))


def test_adapter_salt_and_tenant_make_another_content() -> None:
    keys = {
        content_key(request)
        for request in (
            make_request(),
            make_request(lora=LoRARequest("a", "b")),
            make_request(cache_salt="s"),
            make_request(tenant="s"),
            make_request(model_epoch=1),
        )
    }
    assert len(keys) == 5 and all(keys)


def test_tokens_are_told_once_and_again_when_their_step_failed() -> None:
    request = make_request()
    planner = ForwardPlanner(lambda request_id: request)
    first = planner.plan(
        StepRequest("c", 1, 1, new=(NewRequest("r", request.all_token_ids, 8),)),
        StepResult("c", 1, 1, 1, int32_array([3]), int32_array([4]), int32_array([4])),
        job_id=1,
    )
    assert (first.starts.tolist(), first.counts.tolist()) == ([4], [4])
    assert first.token_ids.tolist() == list(range(8))

    def run_on(step: int, failed_step: int = -1) -> list[list[int]]:
        one, none = int32_array([1]), int32_array([0])
        running = RunningRequests(
            int32_array([3]), int32_array([2]), none, none, int32_array([0, 0]), int32_array([])
        )
        forward = planner.plan(
            StepRequest("c", step, 1, failed_step=failed_step, running=running),
            StepResult("c", step, 1, step, running_scheduled=one),
            job_id=step,
        )
        arrays = (forward.starts, forward.token_starts, forward.token_ids, forward.is_new)
        return [array.tolist() for array in arrays]

    assert run_on(2) == [[8], [8], [8, 9], [0]]
    assert run_on(3) == [[10], [10], [10, 11], [0]]
    assert run_on(4, failed_step=2) == [[8], [8], [8, 9], [0]]
    finished = planner.plan(StepRequest("c", 5, 1, finished=("r",)), StepResult("c", 5, 1, 5), 5)
    assert (finished.verify_slots.tolist(), finished.verify_lengths.tolist()) == ([3], [10])


def test_external_tokens_are_written_because_no_forward_does() -> None:
    request = make_request()
    planner = ForwardPlanner(lambda request_id: request)
    new = NewRequest("r", request.all_token_ids, 8, num_external_computed_tokens=4)
    forward = planner.plan(
        StepRequest("c", 1, 1, new=(new,)),
        StepResult("c", 1, 1, 1, int32_array([0]), int32_array([4]), int32_array([4])),
        job_id=1,
    )
    assert (forward.starts.tolist(), forward.counts.tolist()) == ([4], [8])
    assert forward.external_counts.tolist() == [4]
    assert len(forward.draft_counts) == len(forward.encoder_counts) == 0


def admitted(planner: ForwardPlanner, step: int, **fields: Any) -> WriteExpected:
    """Plan a step that admits request "r" in slot 2, with 8 tokens."""
    return planner.plan(
        StepRequest("c", step, 1, **fields),
        StepResult("c", step, 1, step, int32_array([2]), int32_array([0]), int32_array([8])),
        job_id=step,
    )


def new_request(num_encoder_tokens: int = 0) -> NewRequest:
    tokens = make_request().all_token_ids
    return NewRequest("r", tokens, 8, num_encoder_tokens=num_encoder_tokens)


def ran_on(planner: ForwardPlanner, step: int, drafts: list[int]) -> WriteExpected:
    """Plan a step in which slot 2 computes a token and `drafts`."""
    running = RunningRequests(
        int32_array([2]),
        int32_array([1 + len(drafts)]),
        int32_array([len(drafts)]),
        int32_array([0]),
        int32_array([0, 0]),
        int32_array([]),
        int32_array(drafts),
    )
    result = StepResult("c", step, 1, step, running_scheduled=int32_array([1]))
    return planner.plan(StepRequest("c", step, 1, running=running), result, job_id=step)


def test_drafts_are_told_apart_from_own_tokens() -> None:
    planner = ForwardPlanner(lambda request_id: make_request())
    assert len(admitted(planner, 1, new=(new_request(),)).draft_counts) == 0
    forward = ran_on(planner, 2, [50, 51])
    assert (forward.starts.tolist(), forward.counts.tolist()) == ([8], [3])
    assert forward.draft_counts.tolist() == [2]
    assert forward.token_ids.tolist() == [8, 50, 51]


def test_a_resumed_request_brings_its_encoder_tokens_again() -> None:
    planner = ForwardPlanner(lambda request_id: make_request())
    first = admitted(planner, 1, new=(new_request(5),))
    assert first.encoder_counts.tolist() == [5]
    assert len(ran_on(planner, 2, []).encoder_counts) == 0
    gone = StepRequest("c", 3, 1, preempted_recompute=("r",))
    planner.plan(gone, StepResult("c", 3, 1, 3), 3)
    again = admitted(planner, 4, resumed=(ResumedRequest("r", 8),))
    assert again.encoder_counts.tolist() == [5]
    assert again.encoder_keys == first.encoder_keys != (b"",)
    planner.plan(StepRequest("c", 5, 1, finished=("r",)), StepResult("c", 5, 1, 5), 5)
    assert len(admitted(planner, 6, new=(new_request(),)).encoder_counts) == 0


def test_encoder_tokens_of_two_requests_are_not_the_same() -> None:
    one, other = (Request(name, list(range(12))) for name in "rs")
    assert content_key(one) == content_key(other)
    assert encoder_key(one) != encoder_key(other)


def test_a_withdrawn_row_is_not_verified() -> None:
    planner = ForwardPlanner(lambda request_id: make_request())
    admitted(planner, 1, new=(new_request(),))
    ran_on(planner, 2, [])
    planner.plan(
        StepRequest("c", 3, 1, completed_step=1, failed_step=2),
        StepResult("c", 3, 1, 3, withdrawn=("r",)),
        job_id=3,
    )
    gone = planner.plan(StepRequest("c", 4, 1, finished=("r",)), StepResult("c", 4, 1, 4), 4)
    assert gone.verify_slots.tolist() == []
