"""Messages that cannot be sent or read: their sender learns of it, and continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, cast

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import MalformedMessageError
from kvcache.client.session import ClientSession, SessionSettings
from kvcache.coordinator import Phase
from kvcache.protocol.commands import Zero
from kvcache.protocol.messages import (
    Ack,
    Address,
    Attach,
    Attached,
    Call,
    CallResult,
    ClientAddress,
    CollectLabels,
    FailedForward,
    Finished,
    FromClient,
    JobReport,
    LabelReport,
    Message,
    MissingSteps,
    Outgoing,
    Ping,
    Progress,
    Rejected,
    StepCommands,
    Unattached,
    Unreadable,
    WorkerAddress,
)
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.wire import decode, encode, prose
from tests.protocol.engine import Engine
from tests.protocol.loose_sender import unchecked
from tests.protocol.scenario import Scenario, random_scenario
from tests.protocol.simulation import Cluster
from tests.protocol.test_coordinator import Bench, call, label_report, new, only
from tests.worker.worker_support import Harness, label

C = ClientAddress("c")
BAD = StepRequest("c", 1, 1, completed_step=2**63)


def reason_of(payload: bytes) -> str:
    with pytest.raises(MalformedMessageError) as caught:
        decode(payload)
    return str(caught.value)


def unreadable(bench: Bench, sender: Address, message: Message) -> list[Outgoing]:
    payload = unchecked(message)
    return bench.coordinator.on_unreadable(sender, payload, reason_of(payload))


# --- client to coordinator


def test_a_step_that_cannot_be_read_is_refused_under_its_number_and_the_next_one_served() -> None:
    bench = Bench().run()
    for _ in range(2):  # a repeat gets the stored answer
        (answer,) = only(unreadable(bench, C, BAD), StepResult)
        assert (answer.client_id, answer.step, answer.epoch) == ("c", 1, 1)
        assert answer.error == (
            "MalformedMessageError: StepRequest.completed_step is 9223372036854775808: pass an "
            "integer of 64 bits"
        )
    (served,) = only(bench.step(2, new=(new("r"),)), StepResult)
    assert served.error == ""
    bench.coordinator.check()
    statistics = bench.coordinator.statistics()
    assert (statistics.num_steps, statistics.num_refused_steps) == (2, 1)


def test_a_call_that_cannot_be_read_is_refused_like_a_step() -> None:
    bench = Bench().run()
    (answer,) = only(unreadable(bench, C, Call("c", 1, 1, -1, "m" * 5000, b"")), CallResult)
    assert (answer.step, answer.error_type) == (1, "MalformedMessageError")
    assert answer.error.startswith("Call.method has 5000 characters")
    assert call(bench, 2, "usage").error == ""


def test_a_step_that_cannot_be_read_waits_for_those_before_it() -> None:
    bench = Bench().run()
    out = unreadable(bench, C, replace(BAD, step=2))
    assert only(out, MissingSteps) == [MissingSteps("c", 1, 1)]
    answers = only(bench.step(1), StepResult)
    assert [(answer.step, bool(answer.error)) for answer in answers] == [(1, False), (2, True)]


@pytest.mark.parametrize(
    ("sender", "payload"),
    [
        (ClientAddress("d"), unchecked(BAD)),
        (C, unchecked(BAD)[:-1]),
        (C, unchecked(replace(BAD, step=cast(int, "x")))),
        (C, b"\x93\x02\xa4Ping"),
        (C, unchecked(Ping(cast(str, 7), 1))),
        (WorkerAddress(0), unchecked(BAD)),
        (WorkerAddress(0), unchecked(Finished("other", "p", 0, 1, (JobReport(2**63, True),)))),
        (WorkerAddress(0), unchecked(Ack("n", "p", 0, 1, 2**63))),
    ],
)
def test_what_does_not_say_whose_it_is_gets_no_answer(sender: Address, payload: bytes) -> None:
    bench = Bench().run()
    assert bench.coordinator.on_unreadable(sender, payload, "why") == []
    assert only(bench.step(1), StepResult)[0].error == ""


def test_a_client_of_another_epoch_is_sent_away_whatever_it_sends() -> None:
    bench = Bench().run()
    (away,) = only(unreadable(bench, C, replace(BAD, epoch=7)), Unattached)
    assert away.epoch == 1
    (away,) = only(unreadable(bench, ClientAddress("d"), replace(BAD, client_id="d")), Unattached)
    assert away.client_id == "d"


def test_an_introduction_that_cannot_be_read_is_answered_with_the_reason() -> None:
    bench = Bench().run()
    (away,) = only(unreadable(bench, C, Attach("c", 2**63)), Unattached)
    assert away.reason == "Attach.next_step is 9223372036854775808: pass an integer of 64 bits"


# --- coordinator to client


def too_long(answer: StepResult | CallResult | Progress) -> Outgoing:
    return Outgoing((C,), answer)


def test_an_answer_that_cannot_be_sent_becomes_an_error_also_for_repeats() -> None:
    bench = Bench().run()
    (result,) = only(bench.step(1, new=(new("r"),)), StepResult)
    (replacement,) = bench.coordinator.on_unsendable(too_long(result), "too long")
    answer = replacement.message
    assert isinstance(answer, StepResult)
    assert (answer.step, answer.epoch, answer.seq) == (1, 1, result.seq)
    assert answer.error == (
        "MalformedMessageError: step 1 was executed, but its answer cannot be sent: too long"
    )
    assert only(bench.step(1), StepResult) == [answer]
    made = call(bench, 2, "usage")
    (replacement,) = bench.coordinator.on_unsendable(too_long(made), "too long")
    assert isinstance(replacement.message, CallResult)
    assert replacement.message.error_type == "MalformedMessageError"
    assert replacement.message.result == b""


def test_progress_that_cannot_be_sent_leaves_out_what_people_read() -> None:
    progress = Progress("c", 1, 3, 2, 10, (FailedForward(2, 1, "why"),))
    (replacement,) = Bench().run().coordinator.on_unsendable(too_long(progress), "too long")
    assert replacement.message == replace(progress, failures=(FailedForward(2, 1, ""),))


def attached_session() -> ClientSession:
    session = ClientSession("c", SessionSettings(), VirtualClock())
    session.attach()
    session.on_message(Attached("c", 1, 0, "plan", 1, True, "n"))
    return session


@pytest.mark.parametrize("is_call", [False, True])
def test_an_answer_that_cannot_be_read_is_an_error_of_its_step(is_call: bool) -> None:
    session = attached_session()
    if is_call:
        step = session.call("usage", b"").step
        payload = unchecked(CallResult("c", step, 1, 9, b"", "E" * 5000))
    else:
        step = session.submit(StepRequest()).step
        payload = unchecked(StepResult("c", step, 1, 9, no_room=cast(Any, (7,))))
    reason = reason_of(payload)
    session.on_unreadable(payload, reason)
    answer = session.result(step)
    assert answer is not None
    said = f"the answer to step 1 cannot be read, it may have been executed: {reason}"
    if isinstance(answer, CallResult):
        assert (answer.error_type, answer.error) == ("MalformedMessageError", said)
    else:
        assert answer.error == f"MalformedMessageError: {said}"
    assert answer.seq == 9
    following = session.submit(StepRequest()).step
    session.on_message(StepResult("c", following, 1, 10))
    assert session.result(following) is not None


@pytest.mark.parametrize(
    "payload",
    [
        unchecked(StepResult("d", 1, 1, 9, error="e" * 20_000)),
        unchecked(StepResult("c", 1, 2, 9, error="e" * 20_000)),
        unchecked(StepResult("c", 5, 1, 9, error="e" * 20_000)),
        unchecked(StepResult("c", 1, 1, 9, error="e" * 20_000))[:-1],
        unchecked(Progress("c", 1, 1, 2**63)),
    ],
)
def test_an_answer_to_no_step_of_this_client_changes_nothing(payload: bytes) -> None:
    session = attached_session()
    step = session.submit(StepRequest()).step
    assert session.on_unreadable(payload, "why") == []
    assert session.result(step) is None


# --- coordinator to worker


def test_commands_that_cannot_be_sent_end_the_epoch_and_say_so() -> None:
    bench = Bench().run()
    out = bench.step(1, new=(new("r"),))
    (item,) = [one for one in out if isinstance(one.message, StepCommands)]
    ended = bench.coordinator.on_unsendable(item, "134217728 bytes, the limit is 67108864")
    (away,) = only(ended, Unattached)
    assert away.reason.startswith(
        "the commands of step 1 of client 'c', message 1:2, cannot be sent: 134217728 bytes, the "
        "limit is 67108864; waiting for ranks [0, 1]"
    )
    assert (bench.coordinator.epoch, bench.coordinator.phase) == (2, Phase.FENCING)
    assert bench.coordinator.on_unsendable(item, "of the epoch before") == []
    assert bench.coordinator.on_unsendable(Outgoing((WorkerAddress(0),), Ping("n", 2)), "") == []


def test_commands_that_a_rank_rejects_are_sent_once_more_and_then_end_the_epoch() -> None:
    bench = Bench().run()
    (sent,) = only(bench.step(1, new=(new("r"),)), StepCommands)
    rejected = Rejected("n", "q", 1, 1, sent.seq, "Zero.block_ids is b'1'")
    again = bench.coordinator.on_worker_message(1, rejected)
    assert [(item.to, item.message) for item in again] == [((WorkerAddress(1),), sent)]
    for other in (
        replace(rejected, seq=99),
        replace(rejected, seq=1),
        replace(rejected, epoch=7),
        replace(rejected, nonce="m"),
    ):
        assert bench.coordinator.on_worker_message(1, other) == []
    assert bench.coordinator.phase is Phase.RUNNING
    (away,) = only(bench.coordinator.on_worker_message(1, rejected), Unattached)
    assert away.reason.startswith("rank 1 cannot obey message 1:2: Zero.block_ids is b'1'")


def test_the_longest_reason_still_travels() -> None:
    bench = Bench().run()
    (sent,) = only(bench.step(1), StepCommands)
    rejected = Rejected("n", "q", 1, 1, sent.seq, prose("\ud800\u20ac" * 20_000))
    encode(rejected)
    bench.coordinator.on_worker_message(1, rejected)
    for item in bench.coordinator.on_worker_message(1, rejected):
        encode(item.message)


def test_a_worker_rejects_commands_that_it_cannot_read_and_takes_good_ones_instead() -> None:
    harness = Harness.make()
    good = harness.message(label(3), seq=1)
    payload = unchecked(replace(good, commands=(Zero(cast(Any, b"1")),)))
    reason = reason_of(payload)
    assert reason == "Zero.block_ids is b'1': pass whole int32 numbers as bytes"
    assert harness.worker.on_unreadable(payload, reason) == [
        Rejected("coordinator-1", "process-a", 0, 1, 1, reason)
    ]
    for other in (
        unchecked(replace(good, nonce="other", client_id="c" * 5000)),
        unchecked(replace(good, epoch=7, client_id="c" * 5000)),
        payload[:-1],
        unchecked(Ping("coordinator-1", 2**63)),
    ):
        assert harness.worker.on_unreadable(other, "why") == []
    assert harness.worker.on_message(good) == [Ack("coordinator-1", "process-a", 0, 1, 1)]


# --- worker to coordinator


@pytest.mark.parametrize(
    "report",
    [
        Finished("n", "p", 0, 1, (JobReport(1, False, detail="d" * 20_000),)),
        replace(label_report(0, "p", 1, [], 24), digest_bytes=2**63),
    ],
)
def test_a_report_that_cannot_be_read_is_to_be_said_with_less(
    report: Finished | LabelReport,
) -> None:
    bench = Bench().run()
    (item,) = unreadable(bench, WorkerAddress(0), report)
    assert item.to == (WorkerAddress(0),)
    reason = reason_of(unchecked(report))
    assert item.message == Unreadable("n", 1, type(report).__name__, reason)
    assert decode(encode(item.message)) == item.message


def test_details_that_the_coordinator_cannot_read_are_left_out_of_the_repeat() -> None:
    harness = Harness.make()
    details = "\udcff" + "d" * 20_000  # as from a path that is not text
    harness.worker._reports.add(JobReport(7, False, 1, 2, details, (3,), (3,)))
    (first,) = harness.worker.on_tick()
    encode(first)
    assert isinstance(first, Finished)
    assert first.jobs[0].detail.startswith("\\udcffddd")
    harness.worker.on_message(Unreadable("other", 1, "Finished", "why"))
    harness.worker.on_message(Unreadable("coordinator-1", 1, "Finished", "why"))
    harness.clock.advance(10.0)
    (second,) = [m for m in harness.worker.on_tick() if isinstance(m, Finished)]
    assert second.jobs == (JobReport(7, False, 1, 2, "", (3,), (3,)),)
    assert harness.worker.statistics().num_refused_reports == 1


def test_labels_that_cannot_be_read_are_left_out_until_another_coordinator_asks() -> None:
    harness = Harness.make()
    harness.send(label(3))

    def ask() -> LabelReport:
        (report,) = harness.worker.on_message(CollectLabels(harness.nonce, harness.epoch, 0))
        assert isinstance(report, LabelReport)
        return report

    whole = ask()
    assert whole.labels.block_ids.tolist() == [3]
    harness.worker.say_less("LabelReport", "why")
    less = ask()
    assert (len(less.labels.block_ids), less.checksums) == (0, b"")
    assert (less.first_block, less.end_block) == (whole.first_block, whole.end_block)
    encode(less)
    harness.epoch = 2
    harness.grant()
    assert ask().labels.block_ids.tolist() == [3]


# --- all of it, in schedules


def spoiled(step: StepRequest) -> StepRequest:
    """Return a step that no coordinator can read."""
    return replace(step, completed_step=2**63)


class LooseEngine(Engine):
    """Sometimes sends an unreadable step, and has it refused."""

    probe: int | None = None
    num_refused = 0

    def _turn(self) -> list[FromClient]:
        if self.probe is not None:
            result = self.session.result(self.probe)
            if result is None:
                return []
            assert isinstance(result, StepResult)
            assert result.error.startswith("MalformedMessageError: StepRequest.completed_step")
            self.probe = None
            self.num_refused += 1
            return []
        if self._sent is None and self._last > self._void and self._random.random() < 0.2:
            submitted = self.session.submit(StepRequest())
            if self._random.random() < 0.5:
                # Our own sender sends nothing then, and the number is free again.
                with pytest.raises(MalformedMessageError):
                    encode(spoiled(cast(StepRequest, submitted.messages[0])))
                self.session.take_back(submitted.step)
                return []
            self.probe = self._last = submitted.step
            return list(submitted.messages)
        return super()._turn()

    def _start_over(self) -> None:
        self.probe = None
        super()._start_over()


class LooseCluster(Cluster):
    """Its senders check nothing, and damage some messages when they first send them."""

    def __init__(self, scenario: Scenario) -> None:
        self.num_spoiled: Counter[str] = Counter()
        self._has_met: set[tuple[Any, ...]] = set()
        super().__init__(scenario)

    def _make_engine(self, index: int) -> Engine:
        made = super()._make_engine(index)
        made.__class__ = LooseEngine
        return made

    def _encoded(self, message: Message, receiver: Hashable) -> bytes:
        if isinstance(message, StepCommands) and self.random.random() < 0.2:
            key = (message.nonce, message.epoch, message.seq, receiver)
            if key not in self._has_met:
                self._has_met.add(key)
                self.num_spoiled["commands"] += 1
                return unchecked(replace(message, commands=(*message.commands, cast(Any, 7))))
        if isinstance(message, StepRequest):
            engine = cast(LooseEngine, self.engines[message.client_id])
            if message.step == engine.probe:
                self.num_spoiled["steps"] += 1
                return unchecked(spoiled(message))
        return encode(message)


@pytest.mark.seeds(4, long=20)
def test_schedules_with_senders_that_check_nothing_end_well(seed: int) -> None:
    # A refused step cannot be reported as failed, which the engine would do by chance.
    changes = {"num_disk_blocks": 0, "keeps_memory": False, "fail_share": 0.0}
    changes["num_weight_changes"] = 0
    cluster = LooseCluster(replace(random_scenario(seed), **changes))
    try:
        cluster.play()
    finally:
        cluster.close()
    refused = sum(cast(LooseEngine, engine).num_refused for engine in cluster.engines.values())
    assert cluster.num_spoiled["commands"] > 0
    assert cluster.num_spoiled["steps"] >= refused > 0
