"""The content of a forward: told once, rolled back, and different where contents differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.arrays import int32_array
from kvcache.coordinator.forward_plan import ForwardPlanner, content_key, content_tokens
from kvcache.request import LoRARequest, Request
from kvcache.step import NewRequest, RunningRequests, StepRequest, StepResult


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


def test_external_tokens_are_written_because_nobody_else_does() -> None:
    request = make_request()
    planner = ForwardPlanner(lambda request_id: request)
    new = NewRequest("r", request.all_token_ids, 8, num_external_computed_tokens=4)
    forward = planner.plan(
        StepRequest("c", 1, 1, new=(new,)),
        StepResult("c", 1, 1, 1, int32_array([0]), int32_array([4]), int32_array([4])),
        job_id=1,
    )
    assert (forward.starts.tolist(), forward.counts.tolist()) == ([4], [8])
