"""The index of shared blocks against a table that is obviously right, and its messages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq

from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import ConfigurationError, MalformedMessageError, VersionMismatchError
from kvcache.sharing import block_index, index_server, questions
from kvcache.sharing.access import IndexPlace, make_keys, read_keys, require_guarded
from kvcache.sharing.block_index import SILENCE_S, BlockIndex
from kvcache.sharing.index_server import IndexServer
from kvcache.sharing.index_updates import HEARTBEAT_S, REPEAT_S, IndexUpdates
from kvcache.sharing.messages import (
    KEY_BYTES,
    MAX_ANSWER_NODES,
    MAX_KEYS,
    NO_NODE,
    Answer,
    Given,
    Holding,
    Message,
    Question,
    StatusQuestion,
    StatusReport,
    Taken,
    Wanted,
    pack,
    split,
    unpack,
)
from kvcache.sharing.questions import REST_S, Questions

MEMORIES = [bytes([i]) * 32 for i in range(2)]


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def source_of(number: int) -> bytes:
    return bytes([number]) * 16


def endpoint_of(number: int) -> str:
    return f"tcp://10.0.0.{number}:1"


def question_of(*numbers: int, memory: int = 0, source: int = 99) -> Question:
    keys = b"".join(map(key_of, numbers))
    return Question(5, MEMORIES[memory], source_of(source), keys)


class Source:
    """A node that gets and loses blocks, and tells of it."""

    def __init__(self, number: int, memory: int = 0) -> None:
        self.number, self.memory = number, memory
        self.held: set[bytes] = set()
        self.restart()

    def restart(self) -> None:
        self.held.clear()
        self.name = random.randbytes(16)
        self.updates = IndexUpdates(
            self.name, MEMORIES[self.memory], endpoint_of(self.number), self.held
        )

    def change(self, keys: set[bytes]) -> None:
        self.held.symmetric_difference_update(keys)
        self.updates.changed(keys)


def test_a_walk_with_lost_messages_and_restarts_ends_in_an_exact_index() -> None:
    for seed in range(30):
        random.seed(seed)
        index, now_s = BlockIndex(), 0.0
        sources = [Source(i, i % 2) for i in range(4)]
        for _ in range(150):
            now_s += random.choice([0.0, 0.1, REPEAT_S])
            each = random.choice(sources)
            action = random.random()
            if action < 0.5:
                each.change({key_of(random.randrange(12)) for _ in range(3)})
            elif action < 0.52:
                each.restart()
            elif action < 0.54:
                index = BlockIndex()
            told = each.updates.next(now_s)
            if told is None or random.random() < 0.2:
                continue
            for _ in range(random.choice([1, 1, 2])):  # some messages come twice
                answer = index.hold(unpacked(told, Holding), now_s)
            if answer is not None and random.random() < 0.8:
                each.updates.taken(answer)
        for _ in range(20):
            now_s += REPEAT_S
            index.expire(now_s)
            index.sweep()
            for each in sources:
                told = each.updates.next(now_s)
                if told is not None and (answer := index.hold(told, now_s)) is not None:
                    each.updates.taken(answer)
        for memory in (0, 1):
            found = index.find(question_of(*range(12), memory=memory))
            of_memory = [each for each in sources if each.memory == memory]
            for key, place in zip(map(key_of, range(12)), found.places, strict=True):
                holders = {endpoint_of(each.number) for each in of_memory if key in each.held}
                named = set() if place == NO_NODE else {found.endpoints[place]}
                assert named <= holders and bool(named) == bool(holders), (seed, key)
        statistics: dict[str, Any] = index.statistics()
        assert statistics["num_blocks"] == sum(len(each.held) for each in sources)
        assert len(statistics["sources"]) == 4


def unpacked(message: Message, kind: type) -> Any:
    found = unpack(pack(message))
    assert type(found) is kind and found == message
    return found


def told(number: int, seq: int, added: bytes = b"", *, is_first: bool = False) -> Holding:
    memory = MEMORIES[0]
    return Holding(source_of(number), memory, endpoint_of(number), seq, is_first, added)


def test_the_source_that_holds_most_is_named_and_never_the_one_who_asks() -> None:
    index = BlockIndex()
    index.hold(told(1, 1, key_of(1), is_first=True), 0.0)
    index.hold(told(2, 1, key_of(1) + key_of(2) + key_of(3), is_first=True), 0.0)
    answer = index.find(question_of(1, 2, 4))
    assert answer == Answer(5, (endpoint_of(2),), bytes([0, 0, NO_NODE]))
    answer = index.find(question_of(1, 2, 4, source=2))
    assert answer == Answer(5, (endpoint_of(1),), bytes([0, NO_NODE, NO_NODE]))


def test_a_gap_is_answered_by_asking_for_everything() -> None:
    index = BlockIndex()
    assert index.hold(told(1, 7, key_of(1)), 0.0) == Taken(source_of(1), 7, False)
    assert index.hold(told(1, 8, key_of(1), is_first=True), 0.0) == Taken(source_of(1), 8, True)
    assert index.hold(told(1, 10, key_of(2)), 0.0) == Taken(source_of(1), 10, False)
    assert index.find(question_of(1, 2)).places == bytes([0, NO_NODE])


def test_a_silent_source_is_forgotten() -> None:
    index = BlockIndex()
    index.hold(told(1, 1, key_of(1), is_first=True), 0.0)
    index.hold(told(1, 2), 3.0)
    assert index.expire(3.0 + SILENCE_S) == 0
    assert index.expire(3.1 + SILENCE_S) == 1
    assert index.find(question_of(1)).places == bytes([NO_NODE])


def test_the_index_is_bounded() -> None:
    index = BlockIndex(max_blocks=3, max_sources=2)
    many = b"".join(map(key_of, range(5)))
    assert index.hold(told(1, 1, many, is_first=True), 0.0) is not None
    assert index.hold(told(2, 1, many, is_first=True), 0.0) is not None
    assert index.hold(told(3, 1, many, is_first=True), 0.0) is None
    statistics = index.statistics()
    assert (statistics["num_blocks"], statistics["num_left_out_blocks"]) == (3, 7)
    assert statistics["num_refused_sources"] == 1
    for number in range(4, 60):
        index = block_index.BlockIndex() if number == 4 else index
        index.hold(told(number, 1, key_of(number), is_first=True), 0.0)
    assert len(index.find(question_of(*range(60))).endpoints) == MAX_ANSWER_NODES


def test_events_are_those_of_the_last_source_of_a_topic() -> None:
    index = BlockIndex()
    for number, topic in ((1, "kv@a@m"), (2, ""), (3, "kv@b@m"), (4, "kv@a@m")):
        live, replay = endpoint_of(10 + number), endpoint_of(20 + number)
        named = replace(told(number, 1, is_first=True), topic=topic, live=live, replay=replay)
        assert index.hold(named, 0.1 * number) is not None
    found = {
        "kv@a@m": (endpoint_of(14), endpoint_of(24)),
        "kv@b@m": (endpoint_of(13), endpoint_of(23)),
    }
    assert index.streams() == found
    index.expire(0.15 + SILENCE_S)
    assert index.streams() == found
    index.expire(0.35 + SILENCE_S)
    assert list(index.streams()) == ["kv@a@m"]


def test_a_source_says_much_in_several_messages() -> None:
    held = {key_of(i) for i in range(2 * MAX_KEYS + 5)}
    updates, index = IndexUpdates(source_of(1), MEMORIES[0], endpoint_of(1), held), BlockIndex()
    for _ in range(3):
        message = updates.next(0.0)
        assert message is not None and len(pack(message)) < 1 << 20
        answer = index.hold(message, 0.0)
        assert answer is not None
        updates.taken(answer)
    assert updates.is_known and updates.next(0.0) is None
    assert index.statistics()["num_blocks"] == len(held)
    assert updates.next(HEARTBEAT_S) == told(1, 4)


MESSAGES: list[Message] = [
    told(1, 3, key_of(4), is_first=True),
    replace(told(1, 3), topic="kv@a@m", live=endpoint_of(1), replay=endpoint_of(2)),
    Taken(source_of(1), 3, True, b"\x80", key_of(5) + key_of(6)),
    question_of(1, 2),
    Answer(5, (endpoint_of(1),), bytes([0, NO_NODE])),
    StatusQuestion(),
    StatusReport({"num_blocks": 3}),
    Wanted(1, 0, key_of(3)),
    Given(1, True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=range(9))
def test_a_message_is_read_as_it_was_written_and_nothing_else_is(message: Message) -> None:
    data = pack(message)
    assert unpack(data) == message
    random.seed(1)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        try:
            unpack(bytes(damaged[: random.choice([None, random.randrange(len(damaged))])]))
        except (MalformedMessageError, VersionMismatchError):
            continue


HELD = [source_of(1), MEMORIES[0], endpoint_of(1), 1, True, b"", b""]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [3],
        [3, "hold"],
        [3, b"hold", *[0] * 7],
        [3, "steal"],
        [3, "want", 1, 0, b"short"],
        [3, "want", True, 0, key_of(1)],
        [3, "ask", 1, MEMORIES[0], source_of(1), bytes(KEY_BYTES + 1)],
        [3, "ask", 1, MEMORIES[0], source_of(1), bytes(KEY_BYTES * (MAX_KEYS + 1))],
        [3, "hold", b"", MEMORIES[0], endpoint_of(1), 1, True, b"", b"", "", "", ""],
        [3, "hold", source_of(1), MEMORIES[0], "ipc:///tmp/x", 1, True, b"", b"", "", "", ""],
        [3, "hold", source_of(1), MEMORIES[0], endpoint_of(1), -1, True, b"", b"", "", "", ""],
        [3, "hold", *HELD, "kv@a@m", "ipc:///tmp/x", endpoint_of(1)],
        [3, "hold", *HELD, "kv@a@m", endpoint_of(1), "tcp://*:5"],
        [3, "hold", *HELD, "k" * 401, endpoint_of(1), endpoint_of(1)],
        [3, "answer", 1, [endpoint_of(1)], bytes([1])],
        [3, "answer", 1, [7], bytes([0])],
        [3, "taken", source_of(1), 3, True, bytes(MAX_KEYS // 8 + 1), b""],
        [3, "taken", source_of(1), 3, True, b"", bytes(KEY_BYTES - 1)],
        {"verb": "hold"},
    ],
    ids=range(20),
)
def test_a_message_that_is_wrong_is_refused(values: Any) -> None:
    with pytest.raises(MalformedMessageError):
        unpack(msgpack.packb(values))


def test_another_version_is_named() -> None:
    with pytest.raises(VersionMismatchError, match="version 1, this package in 3"):
        unpack(msgpack.packb([1, "status"]))


# --- over sockets


@pytest.fixture
def server() -> Iterator[tuple[IndexServer, str]]:
    index = BlockIndex()
    made = IndexServer("tcp://127.0.0.1:" + str(free_port()), index=index)
    made.start()
    yield made, made.endpoint
    made.close()


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def exchange(endpoint: str, *payloads: bytes, num_answers: int = 1) -> list[Message]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 10_000
        socket.connect(endpoint)
        for payload in payloads:
            socket.send(payload)
        return [unpack(socket.recv()) for _ in range(num_answers)]


def test_wrong_messages_cost_the_server_nothing_but_a_count(
    server: tuple[IndexServer, str],
) -> None:
    made, endpoint = server
    wrong = [b"", b"\xc1", pack(Given(1, True)), msgpack.packb([9, "status"]), bytes(70_000)]
    (report,) = exchange(endpoint, *wrong, pack(StatusQuestion()))
    assert isinstance(report, StatusReport)
    assert report.values["num_malformed_messages"] == 5
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send(bytes(2 << 20))  # ends the connection
        socket.send_multipart([b"several", b"frames"])
    answers = exchange(
        endpoint, pack(told(1, 1, key_of(3), is_first=True)), pack(question_of(3)), num_answers=2
    )
    assert answers == [Taken(source_of(1), 1, True), Answer(5, (endpoint_of(1),), b"\0")]
    assert made.statistics()["num_blocks"] == 1


def test_a_source_whose_message_waits_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the index was stopped for a while."""
    made, now_s = IndexServer("tcp://127.0.0.1:0"), 100.0
    monkeypatch.setattr(index_server, "time", SimpleNamespace(monotonic=lambda: now_s))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.connect(made.endpoint)
        for seq in (1, 2):
            socket.send(pack(told(1, seq, key_of(3) if seq == 1 else b"", is_first=seq == 1)))
            assert made._socket.poll(10_000)
            made._turn()
            assert unpack(socket.recv()) == Taken(source_of(1), seq, True)
            now_s += 2 * SILENCE_S
        made._turn()
    assert made.statistics()["sources"] == []
    made.start()
    made.close()


def asked(endpoint: str, answer_s: float = 10.0, **more: Any) -> Questions:
    return Questions(endpoint, None, MEMORIES[0], source_of(9), answer_s=answer_s, **more)


def test_a_question_is_answered(server: tuple[IndexServer, str]) -> None:
    _, endpoint = server
    exchange(endpoint, pack(told(1, 1, key_of(3), is_first=True)))
    made = asked(endpoint)
    made.ask("r", [key_of(2), key_of(3)])
    while (answer := made.answer_of("r")) is None:
        assert made.is_asking
    assert answer == {key_of(3): endpoint_of(1)}
    assert (made.num_asked, made.num_unanswered, made.is_asking) == (1, 0, False)
    made.close()


def test_without_an_answer_no_coordinator_is_asked_for_a_while() -> None:
    now_s = 100.0
    made = asked(f"tcp://127.0.0.1:{free_port()}", 0.2, now=lambda: now_s)
    made.ask("r", [key_of(2)])
    made.ask("s", [key_of(2)])
    assert made.answer_of("r") is None
    now_s += 0.2
    assert (made.answer_of("r"), made.answer_of("s")) == ({}, {})
    assert (made.num_asked, made.num_unanswered, made.is_asking) == (2, 2, False)
    made.ask("t", [key_of(2)])
    assert made.answer_of("t") == {} and made.num_asked == 2
    now_s += REST_S
    made.ask("u", [key_of(2)])
    assert made.answer_of("u") is None and made.num_asked == 3
    made.close()


def test_there_is_a_limit_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_QUESTIONS", 2)
    made = asked(f"tcp://127.0.0.1:{free_port()}")
    for name in "abc":
        made.ask(name, [key_of(1)])
    assert [made.answer_of(name) for name in "abc"] == [None, None, {}]
    made.forget("a")
    made.ask("d", [key_of(1)])
    assert made.answer_of("d") is None
    made.close()


def test_an_answer_that_does_not_fit_is_no_answer() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = 10_000
        port = router.bind_to_random_port("tcp://127.0.0.1")
        now_s = 0.0
        made = asked(f"tcp://127.0.0.1:{port}", 1.0, now=lambda: now_s)
        made.ask("r", [key_of(1), key_of(2)])
        identity, data = router.recv_multipart()
        question = unpack(data)
        assert isinstance(question, Question)
        assert split(question.keys) == [key_of(1), key_of(2)]
        for answer in (
            pack(Answer(question.number, (endpoint_of(1),), b"\0")),
            pack(Answer(question.number + 1, (endpoint_of(1),), b"\0\0")),
            b"noise",
        ):
            router.send_multipart([identity, answer])
        for _ in range(50):
            assert made.answer_of("r") is None
        now_s = 1.0
        assert made.answer_of("r") == {}
        made.close()


def test_questions_move_to_a_coordinator_that_listens_elsewhere() -> None:
    gone, present = "tcp://127.0.0.1:" + str(free_port()), IndexServer("tcp://127.0.0.1:0")
    present.start()
    now_s = 0.0
    made = asked(gone, 1.0, now=lambda: now_s)
    made.ask("a", [key_of(1)])
    now_s = 1.0
    assert made.answer_of("a") == {} and made.num_unanswered == 1
    made.ask("b", [key_of(1)])
    assert made.answer_of("b") == {}  # it rests
    made.move(present.endpoint, None)
    made.ask("c", [key_of(1)])
    while (answer := made.answer_of("c")) is None:
        pass
    assert answer == {} and (made.num_asked, made.num_unanswered) == (2, 1)
    made.ask("d", [key_of(1)])
    made.move(gone, None)
    assert made.answer_of("d") == {}  # nobody is going to answer it
    made.close()
    present.close()


def test_a_place_survives_its_way_as_json() -> None:
    for place in (
        IndexPlace("tcp://127.0.0.1:7"),
        IndexPlace("tcp://10.0.0.1:7", generate_curve_keys()),
    ):
        assert IndexPlace.of_plain(json.loads(json.dumps(place.to_plain()))) == place
    with pytest.raises(ConfigurationError, match="there are no keys"):
        IndexPlace("tcp://10.0.0.1:7")


def test_only_holders_of_the_keys_connect(tmp_path: Path) -> None:
    keys = make_keys(str(tmp_path / "keys"))
    made = IndexServer(f"tcp://127.0.0.1:{free_port()}", keys)
    made.start()
    now_s = 0.0
    stranger = asked(made.endpoint, 1.0, now=lambda: now_s)
    friend = Questions(
        made.endpoint, read_keys(str(tmp_path / "keys")), MEMORIES[0], b"", answer_s=10.0
    )
    stranger.ask("r", [key_of(1)])
    friend.ask("r", [key_of(1)])
    while (answer := friend.answer_of("r")) is None:
        assert stranger.answer_of("r") is None
    now_s = 1.0
    assert answer == {} and friend.num_unanswered == 0
    assert stranger.answer_of("r") == {} and stranger.num_unanswered == 1
    made.close()
    stranger.close()
    friend.close()


def test_keys_and_addresses_are_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigurationError, match="No such file"):
        read_keys(str(path))
    make_keys(str(path))
    with pytest.raises(ConfigurationError, match="File exists"):
        make_keys(str(path))
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_keys(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys(str(path))
    with pytest.raises(ConfigurationError, match="no address"):
        require_guarded("tcp://here", True)
    with pytest.raises(ConfigurationError, match="on the network, and there are no keys"):
        require_guarded("tcp://10.0.0.1:7", False)
    require_guarded("tcp://[::1]:7", False)
    with pytest.raises(ConfigurationError, match="cannot listen"):
        IndexServer("tcp://localhost.invalid:7", make_keys(str(tmp_path / "others")))
