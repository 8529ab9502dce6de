"""Invalid step requests. Whole messages are compared, and nothing may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvcache.base.errors import BacklogFullError, RequestError
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import Fork, StepRequest
from tests.manager.managers_under_test import FULL, make_manager
from tests.manager.steps import Engine, ints, new, resume, row, running

MAX = FULL.max_model_len

Case = Callable[[Engine], StepRequest]

LAST = "step 7 of engine#1"

CASES: dict[str, tuple[Case, str]] = {
    "an old step number": (
        lambda e: e.request(step=5),
        "step 5 of engine#1: the last step was 6: number steps upwards from there",
    ),
    "a completed step that is to come": (
        lambda e: e.request(completed_step=7),
        f"{LAST}: completed_step 7 is not known: name a step before this one",
    ),
    "a completed step that failed": (
        lambda e: e.request(completed_step=5),
        f"{LAST}: completed_step 5 failed, with all steps from 4 to 5: name a step that was not "
        "reported as failed",
    ),
    "a failed step that is complete": (
        lambda e: e.request(failed_step=2),
        f"{LAST}: failed_step 2 cannot fail: steps up to 2 are complete and 6 is the last: name a "
        "step in between",
    ),
    "a failed step that is to come": (
        lambda e: e.request(failed_step=7),
        f"{LAST}: failed_step 7 cannot fail: steps up to 2 are complete and 6 is the last: name a "
        "step in between",
    ),
    "a failure reported twice": (
        lambda e: e.request(failed_step=4),
        f"{LAST}: failed_step 4 has failed already, with all steps from 4 to 5: report a failure "
        "once",
    ),
    "a completed step behind the failed one": (
        lambda e: e.request(completed_step=6, failed_step=6),
        f"{LAST}: completed_step 6 is not before failed_step 6: a failed step voids all later ones",
    ),
    "finishing an unknown request": (
        lambda e: e.request(finished=("ghost",)),
        f"{LAST}: request 'ghost' is to be finished but is not known: name requests that were "
        "admitted and have not finished",
    ),
    "finishing another client's request": (
        lambda e: e.request(finished=("theirs",)),
        f"{LAST}: request theirs is to be finished but belongs to another client: name requests of "
        "this client only",
    ),
    "finishing a request twice": (
        lambda e: e.request(finished=("r1", "r1")),
        f"{LAST}: request r1 is finished or preempted twice: name it once",
    ),
    "finishing and preempting a request": (
        lambda e: e.request(finished=("r1",), preempted_swap=("r1",)),
        f"{LAST}: request r1 is finished or preempted twice: name it once",
    ),
    "preempting what does not run": (
        lambda e: e.request(preempted_recompute=("waiting",)),
        f"{LAST}: request waiting is to be preempted but does not run: preempt running requests "
        "only",
    ),
    "preempting an unknown request": (
        lambda e: e.request(preempted_swap=("ghost",)),
        f"{LAST}: request 'ghost' is to be preempted but is not known: name requests that were "
        "admitted and have not finished",
    ),
    "resuming what runs": (
        lambda e: e.request(resumed=(resume("r1"),)),
        f"{LAST}: request r1 is to be resumed but is not preempted: resume preempted requests only",
    ),
    "resuming an unknown request": (
        lambda e: e.request(resumed=(resume("ghost"),)),
        f"{LAST}: request 'ghost' is to be resumed but is not known: name requests that were "
        "admitted and have not finished",
    ),
    "resuming what is preempted in the same step": (
        lambda e: e.request(preempted_recompute=("r1",), resumed=(resume("r1"),)),
        f"{LAST}: request r1 is finished, preempted or resumed twice: name it once",
    ),
    "resuming a request twice": (
        lambda e: e.request(resumed=(resume("waiting"), resume("waiting"))),
        f"{LAST}: request waiting is resumed or new twice: name it once",
    ),
    "resuming for no token": (
        lambda e: e.request(resumed=(resume("waiting", 0),)),
        f"{LAST}: request waiting: max_new_tokens is 0: pass an integer of at least 1",
    ),
    "a new request that is known": (
        lambda e: e.request(new=(new("waiting", [1]),)),
        f"{LAST}: request waiting is new but known already: use another id, or resume it if it is "
        "preempted",
    ),
    "two new requests of one id": (
        lambda e: e.request(new=(new("r9", [1]), new("r9", [2]))),
        f"{LAST}: request r9 is resumed or new twice: name it once",
    ),
    "a new request for no token": (
        lambda e: e.request(new=(new("r9", [1], 0),)),
        f"{LAST}: request r9: max_new_tokens is 0: pass an integer of at least 1",
    ),
    "a new request with an id of the manager": (
        lambda e: e.request(new=(new("\0load 1", [1]),)),
        "request id '\\x00load 1' begins with a NUL character, which marks ids of the manager: use "
        "another id",
    ),
    "a fork with an id of the manager": (
        lambda e: e.request(forks=(Fork("r1", "\0load 1"),)),
        "request id '\\x00load 1' begins with a NUL character, which marks ids of the manager: use "
        "another id",
    ),
    "a prompt beyond the model": (
        lambda e: e.request(new=(new("r9", [1] * (MAX + 1)),)),
        f"{LAST}: request r9 has a prompt of {MAX + 1} tokens, the model takes {MAX}: shorten it "
        "or raise max_model_len",
    ),
    "an empty prompt": (
        lambda e: e.request(new=(new("r9", []),)),
        "request r9: the prompt is empty: pass at least one token",
    ),
    "a negative prompt token": (
        lambda e: e.request(new=(new("r9", [1, -2]),)),
        "request r9: prompt token id at index 1 is -2: token ids are integers from 0 to 2147483647",
    ),
    "negative external tokens": (
        lambda e: e.request(new=(new("r9", [1, 2], num_external_computed_tokens=-1),)),
        f"{LAST}: request r9: num_external_computed_tokens is -1: pass an integer of at least 0",
    ),
    "external tokens that leave nothing to compute": (
        lambda e: e.request(new=(new("r9", [1, 2], num_external_computed_tokens=2),)),
        f"{LAST}: request r9 has 2 external computed tokens, but 2 tokens: the last one is always "
        "computed, pass fewer",
    ),
    "negative lookahead of a new request": (
        lambda e: e.request(new=(new("r9", [1, 2], num_lookahead_tokens=-1),)),
        f"{LAST}: request r9: num_lookahead_tokens is -1: pass an integer of at least 0",
    ),
    "negative lookahead": (
        lambda e: e.request(num_lookahead_tokens=-3),
        f"{LAST}: num_lookahead_tokens is -3: pass an integer of at least 0",
    ),
    "a LoRA path without a name": (
        lambda e: e.request(new=(new("r9", [1], lora_path="/adapter"),)),
        "request r9 has the LoRA path '/adapter' but no LoRA name: pass both or neither",
    ),
    "positions without lengths": (
        lambda e: e.request(new=(new("r9", [1], mm_offsets=ints([0])),)),
        "request r9: 1 mm_offsets and 0 mm_lengths: pass one of each per item",
    ),
    "a slot that does not exist": (
        lambda e: e.request(row(8, [1])),
        f"{LAST}: slot 8 does not exist: slots are 0 to 7",
    ),
    "a negative slot": (
        lambda e: e.request(row(-1, [1])),
        f"{LAST}: slot -1 does not exist: slots are 0 to 7",
    ),
    "a free slot": (
        lambda e: e.request(row(5, [1])),
        f"{LAST}: slot 5 does not run a request of this client: name slots of its running requests "
        "only",
    ),
    "a slot of another client": (
        lambda e: e.request(row(1, [1])),
        f"{LAST}: slot 1 does not run a request of this client: name slots of its running requests "
        "only",
    ),
    "a slot twice": (
        lambda e: e.request(row(0, [1]), row(0, [1])),
        f"{LAST}: slot 0 runs 2 times: name each slot once",
    ),
    "a row of a request that finishes": (
        lambda e: e.request(row(0, [1]), finished=("r1",)),
        f"{LAST}: request r1 is finished or preempted and also runs on in slot 0: leave its "
        "row out",
    ),
    "a row of a request that is preempted": (
        lambda e: e.request(row(0, [1]), preempted_swap=("r1",)),
        f"{LAST}: request r1 is finished or preempted and also runs on in slot 0: leave its "
        "row out",
    ),
    "negative new tokens": (
        lambda e: e.request(row(0, [1], num_new=-1)),
        f"{LAST}: slot 0 has num_new_tokens -1: pass 0 or more",
    ),
    "more drafts than the model takes, so many that sums overflow": (
        lambda e: e.request(row(0, [1], num_new=2**31 - 1, num_draft=2**31 - 2)),
        f"{LAST}: slot 0 has num_new_tokens 2147483647: the model takes {MAX} tokens, schedule "
        "fewer",
    ),
    "token offsets that fall so far that they seem to rise": (
        lambda e: StepRequest(
            client_id=e.client_id,
            step=e.next_step,
            epoch=1,
            running=replace(
                running(*(row(slot, []) for slot in (0, 1, 2))),
                token_offsets=ints([0, 2**31 - 1, -2, 5]),
                token_ids=ints(range(5)),
            ),
        ),
        f"{LAST}: running.token_offsets run from 0 to 5 for 5 token ids: pass offsets that rise "
        "from 0 to that number",
    ),
    "more drafts than new tokens": (
        lambda e: e.request(row(0, [1], num_new=1, num_draft=2)),
        f"{LAST}: slot 0 has num_draft_tokens 2: pass 0 to num_new_tokens",
    ),
    "negative drafts": (
        lambda e: e.request(row(0, [1], num_draft=-1)),
        f"{LAST}: slot 0 has num_draft_tokens -1: pass 0 to num_new_tokens",
    ),
    "rejecting drafts that were not scheduled": (
        lambda e: e.request(row(0, [1], rejected=1)),
        f"{LAST}: slot 0 has num_rejected_tokens 1: pass 0 to the number of drafts that were "
        "scheduled last",
    ),
    "computing tokens that do not exist": (
        lambda e: e.request(row(0, [1], num_new=2)),
        f"{LAST}: slot 0 would have 11 computed tokens, but has 10 tokens: append the tokens "
        "first, or schedule fewer",
    ),
    "a row beyond the model": (
        lambda e: e.request(row(0, [1] * MAX)),
        f"{LAST}: slot 0 would have {MAX + 9} tokens, the model takes {MAX}: finish the request",
    ),
    "a lookahead that no array can hold": (
        lambda e: e.request(num_lookahead_tokens=-(2**62)),
        f"{LAST}: num_lookahead_tokens is {-(2**62)}: pass an integer of at least 0",
    ),
    "a negative output token": (
        lambda e: e.request(row(0, [-7])),
        f"{LAST}: running.token_ids[0] is -7: token ids are not negative",
    ),
    "a negative draft token": (
        lambda e: e.request(
            running=replace(
                running(row(0, [1], num_new=2, num_draft=1)), draft_token_ids=ints([-7])
            )
        ),
        f"{LAST}: running.draft_token_ids[0] is -7: token ids are not negative",
    ),
    "the wrong number of draft tokens": (
        lambda e: e.request(running=replace(running(row(0, [1])), draft_token_ids=ints([1]))),
        f"{LAST}: 1 draft_token_ids for 0 drafts: pass one per draft or none",
    ),
    "too few numbers for the slots": (
        lambda e: e.request(running=replace(running(row(0, [1])), num_new_tokens=ints([]))),
        f"{LAST}: running.num_new_tokens has shape (0,) for 1 slots: pass one number per slot",
    ),
    "too few offsets": (
        lambda e: e.request(running=replace(running(row(0, [1])), token_offsets=ints([0]))),
        f"{LAST}: running.token_offsets has shape (1,) and token_ids (1,) for 1 slots: pass 2 "
        "offsets and one row of tokens",
    ),
    "offsets that miss a token": (
        lambda e: e.request(running=replace(running(row(0, [1])), token_offsets=ints([0, 0]))),
        f"{LAST}: running.token_offsets run from 0 to 0 for 1 token ids: pass offsets that rise "
        "from 0 to that number",
    ),
    "numbers that are not whole": (
        lambda e: e.request(running=replace(running(row(0, [1])), num_new_tokens=np.array([1.0]))),
        f"{LAST}: running.num_new_tokens is of float64: pass int32 arrays",
    ),
}


def prepared(manager: KVCacheManager) -> Engine:
    """Steps 1-2 complete, 3 open, 4-5 failed, 6 open; r1 runs in slot 0, 'waiting' is preempted."""
    other = Engine(manager, "other#1")
    engine = Engine(manager)
    engine.step(new=(new("r1", range(9)),))
    other.step(new=(new("theirs", range(20, 26)),))
    engine.step(new=(new("waiting", range(30, 36)),), completed_step=1)
    engine.step(preempted_recompute=("waiting",), completed_step=2)
    engine.step(row(0, [1]))
    engine.step()
    engine.step(failed_step=4)
    return engine


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_contradicts_itself_is_refused_whole(name: str) -> None:
    manager = make_manager(FULL, log_stats=True)
    engine = prepared(manager)
    make, message = CASES[name]
    request = make(engine)
    before = manager.dump_state()
    with pytest.raises(RequestError) as raised:
        manager.step(request)
    assert str(raised.value) == message
    assert manager.dump_state() == before
    manager.check()


def test_the_steps_that_are_neither_complete_nor_failed_are_bounded() -> None:
    manager = make_manager(FULL, num_blocks=400)
    engine = Engine(manager)
    engine.step(new=(new("r1", [1]),))
    for _ in range(255):
        manager.step(engine.request(row(0, [], num_new=0), step=engine.next_step))
        engine.next_step += 1
    before = manager.dump_state()
    with pytest.raises(BacklogFullError) as raised:
        manager.step(engine.request(row(0, [], num_new=0)))
    assert str(raised.value) == (
        "step 257 of engine#1: 256 earlier steps have neither completed nor failed: report "
        "completed_step before sending more"
    )
    assert manager.dump_state() == before
    engine.step(row(0, [], num_new=0), completed_step=1)
