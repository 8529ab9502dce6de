"""The default workload."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.base.errors import TraceError
from kvcache.simulate.conversations import Conversations, ConversationShape
from kvcache.simulate.tokens import answer_token_ids
from kvcache.simulate.workload import LimitedWorkload

SHAPE = ConversationShape(num_conversations=6, num_turns=3, num_system_prompts=2)


def prompts(workload: Conversations) -> dict[str, list[int]]:
    return {request.request_id: request.token_ids.tolist() for request in workload}


def test_the_same_seed_gives_the_same_requests() -> None:
    assert prompts(Conversations(SHAPE, seed=5)) == prompts(Conversations(SHAPE, seed=5))


def test_another_seed_gives_other_requests() -> None:
    first = prompts(Conversations(SHAPE, seed=5)).values()
    second = prompts(Conversations(SHAPE, seed=6)).values()
    assert not {tuple(prompt[:16]) for prompt in first} & {tuple(prompt[:16]) for prompt in second}


def test_it_can_be_iterated_again() -> None:
    workload = Conversations(SHAPE)
    assert prompts(workload) == prompts(workload)


def test_a_turn_extends_the_previous_prompt_by_its_answer_and_a_question() -> None:
    by_id = {request.request_id: request for request in Conversations(SHAPE, seed=1)}
    num_later_turns = 0
    for request in by_id.values():
        if request.after is None:
            continue
        num_later_turns += 1
        previous = by_id[request.after]
        answer = answer_token_ids(previous.request_id, previous.num_output_tokens)
        quoted = np.concatenate((previous.token_ids, answer))
        assert request.num_prompt_tokens > len(quoted)
        assert request.token_ids[: len(quoted)].tolist() == quoted.tolist()
    assert num_later_turns == 12


def test_a_turn_comes_after_the_one_it_quotes() -> None:
    seen: set[str] = set()
    for request in Conversations(SHAPE, seed=2):
        assert request.after is None or request.after in seen
        seen.add(request.request_id)


def test_conversations_share_their_system_prompts_and_nothing_else() -> None:
    length = SHAPE.system_prompt_tokens
    first_turns = [r.token_ids for r in Conversations(SHAPE) if r.after is None]
    assert len({prompt[:length].tobytes() for prompt in first_turns}) == 2
    assert len({prompt[length : length + 16].tobytes() for prompt in first_turns}) == 6


def test_what_it_says_of_itself_is_what_it_yields() -> None:
    workload = Conversations(SHAPE)
    requests = list(workload)
    assert len(requests) == workload.num_requests == 18
    assert [len(r.token_ids) for r in requests] == [r.num_prompt_tokens for r in requests]
    assert sum(r.num_prompt_tokens for r in requests) == workload.total_input_tokens
    assert workload.name == "6 conversations of 3 turns (seed 0)"


def test_a_limit_keeps_the_first_requests() -> None:
    workload = LimitedWorkload(Conversations(SHAPE), 4)
    whole = [request.request_id for request in Conversations(SHAPE)]
    assert [request.request_id for request in workload] == whole[:4]
    assert (workload.num_requests, workload.total_input_tokens) == (4, None)
    assert LimitedWorkload(Conversations(SHAPE), 99).total_input_tokens is not None


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(TraceError) as caught:
        LimitedWorkload(Conversations(SHAPE), 0)
    assert str(caught.value) == (
        "6 conversations of 3 turns (seed 0): a limit of 0 requests leaves nothing to play: "
        "give at least 1"
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_turns": 0}, "conversations: num_turns is 0: give at least 1"),
        (
            {"answer_tokens": (9, 3)},
            "conversations: answer_tokens is 9 to 3: give a range of positive lengths, the "
            "smaller first",
        ),
        ({"document_share": 1.5}, "conversations: document_share is 1.5: give 0.0 to 1.0"),
    ],
)
def test_a_shape_that_cannot_be_meant_is_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        ConversationShape(**shape)
    assert str(caught.value) == message
