"""Who has the original of a block, and who has copies, against lists that are obviously right."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from kvcache.sharing import block_index, index_updates
from kvcache.sharing.block_index import SILENCE_S, BlockIndex
from kvcache.sharing.index_updates import HEARTBEAT_S, REPEAT_S, IndexUpdates
from kvcache.sharing.messages import MAX_KEYS, MAX_ORIGINALS, Holding, Taken, pack_bits, unpack_bits
from tests.sharing.test_index import (
    MEMORIES,
    endpoint_of,
    key_of,
    question_of,
    source_of,
    told,
    unpacked,
)

NUM_KEYS = 12


class Lists:
    """The holders of each key, in the order in which they said so."""

    def __init__(self) -> None:
        self.holders: dict[tuple[bytes, bytes], list[bytes]] = {}
        self.heard: dict[bytes, tuple[int, float]] = {}

    def drop(self, source: bytes) -> None:
        self.heard.pop(source, None)
        for names in self.holders.values():
            names[:] = [name for name in names if name != source]

    def hold(self, message: Holding, now_s: float) -> bool:
        """Take a message; say whether it was in order."""
        seq, _ = self.heard.get(message.source, (-1, 0.0))
        if message.is_first and message.seq > seq:
            self.drop(message.source)
        elif seq < 0 or not seq <= message.seq <= seq + 1:
            return False
        self.heard[message.source] = message.seq, now_s
        if message.seq > seq:
            for key in (message.removed[i : i + 36] for i in range(0, len(message.removed), 36)):
                names = self.holders.get((message.memory, key), [])
                names[:] = [name for name in names if name != message.source]
            for key in (message.added[i : i + 36] for i in range(0, len(message.added), 36)):
                names = self.holders.setdefault((message.memory, key), [])
                names += [message.source] * (message.source not in names)
        return True

    def expire(self, now_s: float) -> None:
        for source, (_, heard_s) in list(self.heard.items()):
            if now_s > heard_s + SILENCE_S:
                self.drop(source)


class Node:
    """An engine, which has `marks` on what it holds, and its process, which tells of it. Messages
    of both directions are lost, repeated and late."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory = MEMORIES[number % 2]
        self.name = source_of(number)
        self.marks: dict[bytes, bool] = {}
        self.sent: list[Holding] = []
        self.answers: list[Taken] = []
        self.is_silent = False
        self.begin(0)

    def begin(self, last_seq: int) -> None:
        """Start the process."""
        self.updates = IndexUpdates(
            self.name, self.memory, endpoint_of(self.number), self.marks.keys(), last_seq=last_seq
        )

    def restart(self, last_seq: int) -> None:
        """Start the engine again, with the memory that it had, or without."""
        if random.random() < 0.5:
            self.marks.clear()
        for key in self.marks:
            self.marks[key] = False
        self.begin(last_seq)

    def change(self) -> None:
        """Store, import and evict some blocks; some are evicted and stored between two looks."""
        keys = [key_of(random.randrange(NUM_KEYS)) for _ in range(3)]
        for key in keys:
            if self.marks.pop(key, None) is None or random.random() < 0.2:
                self.marks[key] = random.random() < 0.3
        self.updates.changed(keys)
        assert self.updates.beliefs.keys() <= self.marks.keys()

    def take(self, count: int | None = None) -> None:
        """Have the engine take some of what its process was told."""
        for key in list(islice(self.updates.beliefs, count)):
            is_copy = self.updates.beliefs.pop(key)
            if key in self.marks:
                self.marks[key] = is_copy


def exchange(node: Node, index: BlockIndex, lists: Lists, now_s: float, *, is_bad: bool) -> None:
    """Have a node say what there is to say, over a bad network or a good one."""
    message = node.updates.next(now_s)
    messages = [] if message is None else [unpacked(message, Holding)]
    if is_bad:
        node.sent += messages
        if random.random() < 0.1 and node.sent:
            messages.append(random.choice(node.sent[-8:]))
        if random.random() < 0.2:
            messages = messages[1:] + messages[-1:]
    for each in messages:
        answer = index.hold(each, now_s)
        assert answer is not None and answer.is_known == lists.hold(each, now_s)
        node.answers.append(unpacked(answer, Taken))
        if is_bad and random.random() < 0.2:
            random.shuffle(node.answers)
    if not is_bad or random.random() < 0.8:
        for answer in node.answers:
            node.updates.taken(answer)
        node.answers.clear()


@pytest.mark.seeds(30, long=300)
def test_after_quiet_each_block_has_one_original_and_everybody_knows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(seed)
    monkeypatch.setattr(block_index, "SWEEP_KEYS", random.choice([1, 1 << 12]))
    most = random.choice([1, MAX_ORIGINALS])
    for module in (block_index, index_updates):
        monkeypatch.setattr(module, "MAX_ORIGINALS", most)
    index, lists, now_s = BlockIndex(), Lists(), 0.0
    nodes = [Node(i) for i in range(5)]
    for step in range(1, 250):
        now_s += random.choice([0.0, 0.1, REPEAT_S, HEARTBEAT_S])
        node, action = random.choice(nodes), random.random()
        if action < 0.5:
            node.change()
        elif action < 0.53:
            node.begin(step * 1000)
        elif action < 0.56:
            node.restart(step * 1000)
        elif action < 0.58:
            index, lists = BlockIndex(), Lists()
        elif action < 0.6:
            node.is_silent = not node.is_silent
        elif action < 0.8:
            index.sweep()
        node.take(random.randrange(4))
        index.expire(now_s)
        lists.expire(now_s)
        if not node.is_silent:
            exchange(node, index, lists, now_s, is_bad=True)
        index.check()
    nodes = nodes[1:]  # one of them is silent from now on
    for node in nodes:
        node.answers.clear()
    for _ in range(30):
        now_s += REPEAT_S
        index.expire(now_s)
        lists.expire(now_s)
        while index.sweep():
            pass
        for node in nodes:
            exchange(node, index, lists, now_s, is_bad=False)
            node.take()
    index.check()
    held = sum(map(len, lists.holders.values()))
    statistics: dict[str, Any] = index.statistics()
    num_copies = sum(len(names) - 1 for names in lists.holders.values() if names)
    assert (statistics["num_blocks"], statistics["num_copies"]) == (held, num_copies)
    for (memory, key), names in lists.holders.items():
        holding = [each for each in nodes if each.memory == memory and key in each.marks]
        assert {each.name for each in holding} == set(names)
        assert [each.name for each in holding if not each.marks[key]] == names[:1]
    assert sum(len(node.marks) for node in nodes) == held > 0


def test_who_comes_first_has_the_original_and_who_comes_next_inherits_it() -> None:
    index = BlockIndex()
    both = key_of(1) + key_of(2)
    assert index.hold(told(1, 1, both, is_first=True), 0.0) == Taken(source_of(1), 1, True)
    answer = index.hold(told(2, 1, key_of(3) + key_of(2), is_first=True), 0.0)
    assert answer == Taken(source_of(2), 1, True, pack_bits([False, True]))
    index.hold(told(3, 1, both, is_first=True), 0.0)
    lost = Holding(source_of(1), MEMORIES[0], endpoint_of(1), 2, False, b"", key_of(2))
    index.hold(lost, 1.0)
    expected = Taken(source_of(2), 2, True, b"", key_of(2))
    assert index.hold(told(2, 2), 1.0) == expected
    assert index.hold(told(2, 2), 1.0) == expected  # the first answer was lost
    assert index.hold(told(2, 3), 1.0) == Taken(source_of(2), 3, True)
    assert index.hold(told(3, 2), 1.0) == Taken(source_of(3), 2, True)
    assert index.hold(told(3, 3), 1.1 + SILENCE_S) is not None
    assert index.expire(1.1 + SILENCE_S) == 2
    assert not index.sweep()
    heir = index.hold(told(3, 4), 6.0)
    assert heir is not None and sorted([heir.originals[:36], heir.originals[36:]]) == [
        key_of(1),
        key_of(2),
    ]


def test_the_same_key_of_another_memory_is_another_block() -> None:
    index = BlockIndex()
    index.hold(told(1, 1, key_of(1), is_first=True), 0.0)
    other = Holding(source_of(2), MEMORIES[1], endpoint_of(2), 1, True, key_of(1))
    assert index.hold(other, 0.0) == Taken(source_of(2), 1, True)
    index.expire(1.0 + SILENCE_S)
    assert not index.sweep()
    index.check()
    assert index.statistics()["num_blocks"] == 0


def test_a_source_that_starts_again_comes_last_and_is_no_copy_of_itself() -> None:
    index = BlockIndex()
    index.hold(told(1, 1, key_of(1) + key_of(2), is_first=True), 0.0)
    index.hold(told(2, 1, key_of(1), is_first=True), 0.0)
    again = index.hold(told(1, 9, key_of(1) + key_of(2), is_first=True), 0.0)
    assert again == Taken(source_of(1), 9, True, pack_bits([True, False]))
    assert index.find(question_of(1, 2)).places == bytes([0, 0])
    index.sweep()
    assert index.hold(told(2, 2), 0.0) == Taken(source_of(2), 2, True, b"", key_of(1))
    index.check()


def test_keys_that_are_left_out_are_no_copies() -> None:
    index = BlockIndex(max_blocks=2)
    index.hold(told(1, 1, key_of(1), is_first=True), 0.0)
    answer = index.hold(told(2, 1, key_of(2) + key_of(1), is_first=True), 0.0)
    assert answer == Taken(source_of(2), 1, True)
    assert index.statistics()["num_left_out_blocks"] == 1
    index.check()


def test_what_is_gone_takes_no_room() -> None:
    index = BlockIndex(max_blocks=3)
    index.hold(told(1, 1, key_of(1) + key_of(2), is_first=True), 0.0)
    index.hold(told(2, 1, key_of(3), is_first=True), 0.0)
    index.hold(told(1, 9, key_of(1) + key_of(2), is_first=True), 0.0)
    statistics = index.statistics()
    assert (statistics["num_blocks"], statistics["num_left_out_blocks"]) == (3, 0)
    index.check()


def test_many_new_originals_come_at_once_in_several_answers() -> None:
    held = {key_of(i) for i in range(2 * MAX_ORIGINALS + 5)}
    index, now_s = BlockIndex(), 0.0
    many = b"".join(held)
    assert index.hold(told(1, 1, many, is_first=True), 0.0) is not None
    updates = IndexUpdates(source_of(2), MEMORIES[0], endpoint_of(2), held)

    def exchange_all() -> int:
        count = 0
        while (message := updates.next(now_s)) is not None:
            answer = index.hold(message, now_s)
            assert answer is not None
            updates.taken(answer)
            count += 1
        return count

    assert exchange_all() == 1
    assert updates.beliefs == dict.fromkeys(held, True)
    now_s = 1.0 + SILENCE_S
    assert exchange_all() == 1
    index.expire(now_s)
    assert not index.sweep()
    now_s += HEARTBEAT_S
    assert exchange_all() == 3  # without a pause
    assert updates.beliefs == dict.fromkeys(held, False)


def test_a_source_that_is_refused_does_not_ask_again_at_once() -> None:
    index = BlockIndex()
    index.hold(told(1, 1000, key_of(1), is_first=True), 0.0)
    late = IndexUpdates(source_of(1), MEMORIES[0], endpoint_of(1), {key_of(1)})
    for now_s in (0.0, REPEAT_S):
        message = late.next(now_s)
        assert message is not None and message.is_first
        answer = index.hold(message, now_s)
        assert answer is not None and not answer.is_known
        late.taken(answer)
        assert late.next(now_s + REPEAT_S / 2) is None


def test_bits_are_read_as_they_were_written() -> None:
    draw = random.Random(5)
    for count in (0, 1, 7, 8, 9, MAX_KEYS):
        values = [draw.random() < 0.5 for _ in range(count)]
        packed = pack_bits(values)
        assert len(packed) <= MAX_KEYS // 8
        assert unpack_bits(packed, count) == values
    assert pack_bits([False] * 9) == b""
    for packed, expected in ((b"", []), (b"\xa0", [True, False, True])):
        for count in range(3, 100):
            assert unpack_bits(packed, count) == expected + [False] * (count - len(expected))
