"""Answers: a slow reader gets all of them, and costs neither time nor memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from kvcache.events.answers import QUEUED_MESSAGES, Answers

PATIENCE_S = 20.0
LONG = b"x" * (1 << 20)


class World:
    """A ROUTER that answers, and one client."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.answers = Answers(self.router)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.client = self.context.socket(zmq.DEALER)
        self.client.setsockopt(zmq.RCVHWM, 1)
        self.client.connect(f"tcp://127.0.0.1:{self.port}")
        self.client.send(b"hello")
        assert self.router.poll(int(1000 * PATIENCE_S))
        self.name = self.router.recv_multipart()[0]

    def answer(self, count: int, payload: bytes = b"") -> None:
        self.answers.put([[self.name, b"%d" % i, payload] for i in range(count)], 0.0)

    def hand_over_all(self) -> None:
        while self.answers.go_on(0.0):
            pass

    def read(self) -> list[int]:
        """Read until everything was sent and nothing more arrives."""
        found: list[int] = []
        give_up_s = time.monotonic() + PATIENCE_S
        while self.answers or self.client.poll(200):
            assert time.monotonic() < give_up_s
            self.answers.go_on(0.0)
            if self.client.poll(1):
                found.append(int(self.client.recv_multipart()[0]))
        return found


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.client.close(0)
    made.router.close(0)
    made.context.term()


def test_a_slow_reader_gets_everything_in_order(world: World) -> None:
    payload = b"x" * 50_000
    world.answer(10 * QUEUED_MESSAGES, payload)
    world.hand_over_all()
    assert len(world.answers) == 1
    assert world.read() == list(range(10 * QUEUED_MESSAGES))


def test_of_long_messages_one_waits_in_the_socket(world: World) -> None:
    """System buffers are not counted: these messages are longer than them."""
    world.answer(50, 16 * LONG)
    world.hand_over_all()
    assert len(world.answers) == 1
    assert len(world.answers._answers[world.name]) >= 45
    world.answer(3, LONG)
    assert world.read()[-3:] == [0, 1, 2]


def test_an_answer_goes_out_a_few_messages_at_a_time(world: World) -> None:
    world.answer(200)
    assert world.answers.go_on(0.0)
    assert len(world.answers._answers[world.name]) > 0
    assert world.read() == list(range(200))


def test_who_does_not_read_in_time_has_to_ask_again(world: World) -> None:
    world.answer(50, 16 * LONG)
    world.hand_over_all()
    world.answers.go_on(29.0)
    assert len(world.answers) == 1
    world.answers.go_on(31.0)
    assert (len(world.answers), world.answers.num_given_up) == (0, 1)


def test_who_has_gone_is_not_answered(world: World) -> None:
    world.answers.put([[b"nobody", b"", b""]], 0.0)
    world.answers.go_on(0.0)
    assert (len(world.answers), world.answers.num_given_up) == (0, 1)


def test_requests_wait_while_there_are_many_answers(world: World) -> None:
    for i in range(16):
        assert world.answers.has_room
        world.answers.put([[b"%d" % i, b"", b""]], 0.0)
    assert not world.answers.has_room


def test_an_error_costs_one_answer_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Answers._send

    def fail_for_one(answers: Answers, client: bytes, message: list[bytes]) -> bool:
        if client == b"odd":
            raise KeyError(client)
        return send(answers, client, message)

    monkeypatch.setattr(Answers, "_send", fail_for_one)
    world.answers.put([[b"odd", b"", b""]], 0.0)
    world.answer(3)
    assert world.read() == [0, 1, 2]
    assert (world.answers.num_given_up, world.answers.faults.count) == (1, 1)
