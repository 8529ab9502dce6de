"""The fast decoders accept only what wire.py would, and leave all else to it."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import msgpack
import pytest

from kvcache.base.errors import MalformedMessageError
from kvcache.protocol.commands import Reset
from kvcache.protocol.delivery import CommandReceiver, PlainStep
from kvcache.protocol.message_headers import MessageHeader
from kvcache.protocol.messages import (
    WIRE_VERSION,
    Ack,
    Grant,
    Granted,
    Heartbeat,
    Message,
    Progress,
    StepCommands,
)
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.wire import decode, encode, envelope_of
from tests.protocol.scenario import Scenario, random_scenario
from tests.protocol.simulation import simulate

APPLIED = Ack("nonce", "process", 3, 7, 70_000)
NUMBERS = (0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1)


def plain(seq: int, client_step: int = 5) -> StepCommands:
    return StepCommands("n", "f", 1, seq, "client", client_step, ())


def make_receiver() -> CommandReceiver:
    receiver = CommandReceiver(0, "p", "f", 4)
    assert isinstance(receiver.on_grant(Grant("n", "p", 1, "f"), False), Granted)
    return receiver


@pytest.mark.parametrize("seq", NUMBERS)
def test_a_head_reads_and_writes_what_the_codec_does(seq: int) -> None:
    header = MessageHeader(Ack, "nonce", "process", 3, 7)
    payload = encode(replace(APPLIED, seq=seq))
    assert header.number(payload) == seq
    assert header.with_number(seq) == payload
    assert MessageHeader(Ack, "nonce", "process").rest(payload) == [3, 7, seq]


@pytest.mark.parametrize(
    "other",
    [
        replace(APPLIED, nonce="another"),
        replace(APPLIED, incarnation="another"),
        replace(APPLIED, rank=2),
        replace(APPLIED, epoch=8),
        replace(APPLIED, epoch=70),
        Heartbeat("nonce", "process", 3, 7, 70_000),
    ],
)
def test_a_message_of_anything_else_has_another_header(other: Message) -> None:
    assert MessageHeader(Ack, "nonce", "process", 3, 7).number(encode(other)) is None


def test_truncated_messages_and_those_without_a_number_are_not_read() -> None:
    header = MessageHeader(Ack, "nonce", "process", 3, 7)
    payload = encode(APPLIED)
    for end in range(len(payload)):
        assert header.number(payload[:end]) is None
        assert header.rest(payload[:end]) is None
    for value in (True, 1.0, "1", None, [1], b"1"):
        assert header.number(header.prefix + msgpack.packb(value)) is None
    assert header.number(payload + b"\x00") is None


def test_a_plain_step_is_taken_exactly_once_and_in_order() -> None:
    receiver = make_receiver()
    assert receiver.take_plain(encode(plain(2))) is None
    assert receiver.take_plain(encode(plain(1))) == PlainStep(1, "client", 5)
    assert receiver.take_plain(encode(plain(1))) is None
    assert receiver.take_plain(encode(plain(2, 6))) == PlainStep(2, "client", 6)
    assert (receiver.applied_seq, receiver.statistics().num_delivered) == (2, 2)
    assert decode(receiver.applied_payload()) == Ack("n", "p", 0, 1, 2)


@pytest.mark.parametrize(
    "message",
    [
        StepCommands("m", "f", 1, 1, "client", 5, ()),
        StepCommands("n", "g", 1, 1, "client", 5, ()),
        StepCommands("n", "f", 2, 1, "client", 5, ()),
        StepCommands("n", "f", 1, 1, "client", -1, ()),
        StepCommands("n", "f", 1, 1, "client", 5, (Reset(0),)),
        StepCommands("n", "f", 1, 0, "client", 5, ()),
    ],
)
def test_no_other_message_is_a_plain_step(message: StepCommands) -> None:
    assert make_receiver().take_plain(encode(message)) is None


def test_nothing_is_taken_before_a_grant_or_while_one_is_put_off_or_over_a_gap() -> None:
    assert CommandReceiver(0, "p", "f", 4).take_plain(encode(plain(1))) is None
    receiver = make_receiver()
    receiver.on_commands(plain(2))
    assert receiver.take_plain(encode(plain(1))) is None
    receiver = make_receiver()
    receiver.on_commands(plain(1))  # returned, not applied yet
    assert receiver.take_plain(encode(plain(2))) is None
    receiver = make_receiver()
    assert receiver.on_grant(Grant("m", "p", 2, "f"), True) is None
    assert receiver.take_plain(encode(plain(1))) is None
    assert receiver.on_grant(Grant("m", "p", 2, "f"), False) is not None
    assert receiver.take_plain(encode(plain(1))) is None
    of_new_epoch = replace(plain(1), nonce="m", epoch=2)
    assert receiver.take_plain(encode(of_new_epoch)) == PlainStep(1, "client", 5)


USUAL = (
    StepRequest("client", 70_000, 3, 69_999),
    StepResult("client", 70_000, 3, 80_000),
    StepCommands("n" * 32, "f" * 64, 3, 80_000, "client", 70_000, ()),
    Progress("client", 3, 70_000, 69_999, 2**40),
)


@pytest.mark.parametrize("message", USUAL, ids=lambda message: type(message).__name__)
def test_an_envelope_carries_what_the_codec_carries(message: Message) -> None:
    payload = encode(message)
    whole = msgpack.unpackb(payload)
    assert msgpack.packb(whole) == payload
    assert encode(decode(payload)) == payload
    kind = type(message)
    num_varying = {StepRequest: 4, StepResult: 4, StepCommands: 6, Progress: 5}[kind]
    envelope = envelope_of(message, num_varying)
    assert envelope.pack(message) == payload
    taken = envelope.unpack(payload)
    assert type(taken) is kind and taken.__dict__ == message.__dict__
    chance = random.Random(1)
    for _ in range(300):
        cut = chance.randrange(len(payload))
        assert envelope.unpack(payload[:cut]) is None
        broken = payload[:cut] + bytes([chance.randrange(256)]) + payload[cut + 1 :]
        taken = envelope.unpack(broken)
        if taken is not None:
            assert msgpack.unpackb(encode(taken)) == msgpack.unpackb(broken)


def test_an_envelope_declines_unusual_and_invalid_values() -> None:
    envelope = envelope_of(Progress("", 0, 0, 0), 5)
    progress = Progress("client", 1, 2, 3)
    assert envelope.pack(progress) == encode(progress)
    for unusual in (
        replace(progress, applied_step=2**64),
        replace(progress, applied_step=2**63),
        replace(progress, client_id="c" * 4097),
        replace(progress, client_id="\ud800"),
        replace(progress, applied_step=True),
        replace(progress, failures=("x",)),  # type of a field that only the full decoder checks
    ):
        assert envelope.pack(unusual) is None
    for values in (["client", 1, 2**63, 0, 0, []], ["c" * 4097, 1, 0, 0, 0, []]):
        assert envelope.unpack(msgpack.packb([WIRE_VERSION, "Progress", *values])) is None


def test_a_list_longer_than_any_message_has_is_not_unpacked() -> None:
    header = MessageHeader(Ack, "nonce", "process", 3, 7)
    items = b"\xdd" + (2**20).to_bytes(4, "big") + b"\xc0" * 2**20
    applied = header.prefix + items
    progress = MessageHeader(Progress).prefix + items + b"\x00\x00\x00\x00\x90"
    tracemalloc.start()
    try:
        assert header.number(applied) is None
        assert header.rest(applied) is None
        with pytest.raises(MalformedMessageError):
            decode(progress)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(applied), peak_bytes


def test_the_schedules_take_the_short_ways() -> None:
    taken: Counter[str] = Counter()
    for seed in (1, 3, 5, 9):
        taken += simulate(random_scenario(seed)).num_short_ways
        taken += simulate(Scenario(seed, is_content_checking=False)).num_short_ways
    assert min(taken["coordinator"], taken["worker"]) > 15, taken
