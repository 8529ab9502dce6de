"""Requests during a recording, and the data that leaves the coordinator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import AlreadyRunningError
from kvcache.coordinator.step_recorder import EpochEnded, Executed, Released, StepRecorder
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import (
    Fork,
    NewRequest,
    RequestHints,
    ResumedRequest,
    RunningRequests,
    RunningRow,
    StepRequest,
)
from kvcache.recorder import RequestTracer, TracedRecorder, TracerLimits, record_request
from kvcache.recorder.request_tracer import DIGEST_BYTES, SeenRequest, block_digests
from kvcache.requests.hints import CacheHint
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

SALT = bytes(range(32))


class Served:
    """A manager whose steps go to a traced recorder, as in a coordinator."""

    def __init__(self, num_blocks: int = 100, limits: TracerLimits | None = None) -> None:
        spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1)
        config = KVCacheConfig(num_blocks, (), (KVCacheGroupSpec(("layer.0",), spec),))
        self.manager = KVCacheManager(config, 512)
        self.clock = VirtualClock()
        self.tracer = RequestTracer(self.clock, limits)
        self.recorder = TracedRecorder(StepRecorder(), self.tracer)
        self._step = 0

    def step(self, **parts: object) -> list[int]:
        """Execute a step a second later; return the slots of admitted requests."""
        self.clock.advance(1.0)
        self._step += 1
        rows = parts.pop("rows", ())
        request = StepRequest(
            "client",
            self._step,
            running=RunningRequests.from_rows(rows),  # type: ignore[arg-type]
            **parts,  # type: ignore[arg-type]
        )
        result = self.manager.step(request)
        self.recorder.record(Executed(request, result, self.manager.take_commands()))
        return result.admitted_slots.tolist()

    def taken(self, listener: str = "me", most: int = 100) -> list[tuple[str, float, int]]:
        seen = self.tracer.take(listener, most)
        return [(s.request.request_id, s.arrival_s, s.num_output_tokens) for s in seen.requests]


def prompt(request_id: str, num_tokens: int = 10, **more: object) -> NewRequest:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return NewRequest(request_id, tokens, num_tokens, **more)  # type: ignore[arg-type]


def test_requests_are_told_in_order_of_admission_once_they_have_ended() -> None:
    served = Served()
    served.step(new=(prompt("before"),))
    assert served.taken() == []  # the recording begins
    (a,) = served.step(new=(prompt("a"),))
    (b,) = served.step(new=(prompt("b"),), rows=[RunningRow(a, 1, (7,))])
    served.step(rows=[RunningRow(a, 1, (7, 8)), RunningRow(b, 1, (9,))], finished=("before",))
    served.step(rows=[RunningRow(a, 1, (7,))], finished=("b",))
    assert served.taken() == []  # a came first, and continues
    served.step(finished=("a",))
    assert served.taken() == [("a", 2.0, 4), ("b", 3.0, 1)]
    assert served.taken() == []


def test_who_finds_no_room_is_seen_when_it_is_admitted() -> None:
    served = Served(num_blocks=5)
    served.taken()
    served.step(new=(prompt("a", 14), prompt("b", 15)))
    served.step(finished=("a",), new=(prompt("b", 15),))
    served.step(finished=("b",))
    assert served.taken() == [("a", 1.0, 0), ("b", 2.0, 0)]


def test_a_preempted_request_is_one_request_and_counts_on_in_its_next_slot() -> None:
    served = Served()
    served.taken()
    a, _ = served.step(new=(prompt("a"), prompt("b")))
    served.step(rows=[RunningRow(a, 1, (5,))])
    served.step(preempted_recompute=("a",), new=(prompt("c"),))
    (again,) = served.step(resumed=(ResumedRequest("a", 20),), finished=("b",))
    served.step(rows=[RunningRow(again, 1, (6, 6))])
    served.step(finished=("a", "c"))
    assert served.taken() == [("a", 1.0, 3), ("b", 1.0, 0), ("c", 3.0, 0)]


def test_a_request_is_told_with_its_last_hints() -> None:
    first, last = (CacheHint(priority=9),), (CacheHint(start=4, returns_in_s=2.0),)
    served = Served()
    served.taken()
    served.step(new=(prompt("a", hints=first), prompt("b", hints=first), prompt("c")))
    served.step(hints=(RequestHints("b", ()),), finished=("a",))
    served.step(hints=(RequestHints("c", last),), finished=("b", "c"))
    seen = served.tracer.take("me", 10).requests
    assert [each.hints for each in seen] == [first, (), last]
    assert [record_request(each, 4, SALT).hints for each in seen] == [first, (), last]


def test_a_forks_child_is_not_a_request_of_the_recording() -> None:
    served = Served()
    served.taken()
    (a,) = served.step(new=(prompt("a"),))
    served.step(rows=[RunningRow(a, 1, (5,))])
    served.step(forks=(Fork("a", "child"),))
    served.step(finished=("a", "child"))
    assert served.taken() == [("a", 1.0, 1)]


def test_what_a_failed_step_admitted_comes_again_as_one_request() -> None:
    served = Served()
    served.taken()
    served.step(new=(prompt("a"),))
    served.step(failed_step=1, new=(prompt("a"),))
    served.step(finished=("a",))
    assert served.taken() == [("a", 2.0, 0)]


def test_clients_and_epochs_that_are_gone_end_their_requests() -> None:
    served = Served()
    served.taken()
    served.step(new=(prompt("a"),))
    served.recorder.record(Released("client"))
    served.step(new=(prompt("b"),))
    assert served.taken() == [("a", 1.0, 0)]
    served.recorder.record(EpochEnded())
    assert served.taken() == [("b", 2.0, 0)]


def test_the_end_tells_of_all_that_still_run_and_keeps_nothing() -> None:
    served = Served()
    served.taken()
    served.step(new=(prompt("a"),))
    assert [s.request.request_id for s in served.tracer.finish("me").requests] == ["a"]
    served.step(finished=("a",), new=(prompt("b"),))
    served.step(finished=("b",))
    assert served.taken("you") == []
    assert served.tracer.finish("me").requests == ()


def test_waiting_requests_are_bounded_and_lost_ones_counted() -> None:
    served = Served(limits=TracerLimits(most_requests=3, most_tokens=35))
    served.taken()
    served.step(new=tuple(prompt(name) for name in "abcd"))
    served.step(finished=tuple("abcd"))
    assert served.tracer.take("me", 2).num_lost == 1
    served.step(new=(prompt("e"), prompt("f", 30)))
    served.step(finished=("e", "f"))
    seen = served.tracer.take("me", 10)
    assert [s.request.request_id for s in seen.requests] == ["c", "e"]
    assert seen.num_lost == 2


def test_one_that_never_ends_holds_back_only_so_many() -> None:
    served = Served(limits=TracerLimits(most_held=2))
    served.taken()
    served.step(new=tuple(prompt(name) for name in "abc"))
    served.step(finished=("b", "c"))
    assert served.taken() == [("a", 1.0, 0), ("b", 1.0, 0), ("c", 1.0, 0)]


def test_a_second_listener_waits_until_the_first_is_taken_to_be_dead() -> None:
    served = Served(limits=TracerLimits(lease_s=30.0))
    served.taken()
    served.clock.advance(12.0)
    with pytest.raises(AlreadyRunningError) as caught:
        served.taken("you")
    assert str(caught.value) == (
        "the cluster's requests are being recorded already: wait until that recording ends, or "
        "18 s if it has died"
    )
    served.step(new=(prompt("a"),))
    served.clock.advance(20.0)
    assert served.taken("you") == []
    served.step(finished=("a",), new=(prompt("b"),))
    served.step(finished=("b",))
    assert [name for name, _, _ in served.taken("you")] == ["b"]


def test_nothing_is_kept_for_a_listener_that_has_died() -> None:
    served = Served(limits=TracerLimits(lease_s=30.0))
    served.taken()
    served.clock.advance(31.0)
    served.step(new=(prompt("a"),))
    served.step(finished=("a",))
    assert served.taken() == []


def digests(request: NewRequest, salt: bytes = SALT) -> list[bytes]:
    joined = block_digests(request, 4, salt)
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]


def test_equal_prefixes_have_equal_digests_as_far_as_they_go() -> None:
    one, two = digests(prompt("a", 10)), digests(prompt("b", 14))
    assert (len(one), len(two)) == (3, 4)
    assert one[:2] == two[:2] and one[2] != two[2]
    other = dataclasses.replace(prompt("c", 10), token_ids=np.arange(1, 11, dtype=np.int32))
    assert not set(digests(other)) & set(one)


def test_what_sets_contents_apart_sets_digests_apart() -> None:
    plain = digests(prompt("a"))
    for apart in (
        {"cache_salt": "x"},
        {"tenant": "x"},
        {"lora_name": "x", "lora_path": ""},
    ):
        assert not set(digests(prompt("a", 10, **apart))) & set(plain)
    image = {
        "mm_hashes": ("picture",),
        "mm_offsets": np.array([5], np.int32),
        "mm_lengths": np.array([2], np.int32),
    }
    shown = digests(prompt("a", 10, **image))
    assert shown[0] == plain[0] and not set(shown[1:]) & set(plain)
    assert digests(prompt("a", 10, **{**image, "mm_hashes": ("other",)}))[1] != shown[1]


def test_another_salt_gives_other_digests() -> None:
    assert not set(digests(prompt("a"), bytes(32))) & set(digests(prompt("a")))


def test_a_record_has_no_tokens() -> None:
    tokens = np.array([77_777_777] * 9, np.int32)
    request = NewRequest("secret", tokens, 9, tenant="t")
    record = record_request(SeenRequest(3.0, request, 5), 4, SALT)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (9, 5)
    assert len(record.digests) == 3 * DIGEST_BYTES
    for value in dataclasses.asdict(record).values():
        assert "77777777" not in repr(value) and "secret" not in repr(value)
    assert tokens[:2].tobytes() not in record.digests
