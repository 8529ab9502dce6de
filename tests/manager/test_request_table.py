"""Rows of running requests: their requests, their tokens, and when request objects get them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.core.running import FIRST_IN_RING, NO_ROWS, SYNCED, TOKENS
from kvcache.manager.request_table import CALLER, RequestTable
from kvcache.requests.request import Request
from tests.core.builders import append as append_to_ring
from tests.walks import random_walk

CLIENT = 1


def seated(table: RequestTable, name: str, num_tokens: int, num_computed: int = 0) -> int:
    return table.admit(Request(name, list(range(num_tokens))), CLIENT, num_computed).slot


def append(table: RequestTable, tokens: dict[int, list[int]]) -> None:
    counts = [len(ids) for ids in tokens.values()]
    num_waiting = [table.rows[slot, TOKENS] - table.rows[slot, SYNCED] for slot in tokens]
    rows = NO_ROWS._replace(
        slots=int32_array(list(tokens)),
        offsets=int32_array([0, *np.cumsum(counts)]),
        token_ids=int32_array([token for ids in tokens.values() for token in ids]),
        is_crowded=any(np.add(num_waiting, counts) > table.width),
    )
    if rows.is_crowded:
        rows = table.make_room(rows)
    append_to_ring(table, rows)


def no_blocks(request_id: str) -> tuple[list[int], ...]:
    return ([],)


def request_in(table: RequestTable, slot: int) -> Request:
    """The request of a slot, without an update."""
    request: Request = table.requests[slot]
    return request


def units(table: RequestTable, pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Tokens of the given units (slot, unit): from the ring, if it has them."""
    newest = []
    for slot, unit in pairs:
        start = unit * table.unit_tokens
        if start >= max(table.rows[slot, FIRST_IN_RING], table.rows[slot, TOKENS] - table.width):
            column = start % table.width
            newest.append(table.ring[slot, column : column + table.unit_tokens].tolist())
        else:
            table.sync(slot)
            tokens = request_in(table, slot).all_token_ids
            newest.append(tokens[start : start + table.unit_tokens].tolist())
    return newest


def test_a_unit_that_decoding_fills_is_read_without_its_request() -> None:
    table = RequestTable(4, unit_tokens=4)
    slot = seated(table, "a", 6)
    append(table, {slot: [70]})
    append(table, {slot: [71]})
    assert units(table, [(slot, 1)]) == [[4, 5, 70, 71]]
    assert request_in(table, slot).num_tokens == 6


def test_requests_get_tokens_once_in_hundreds_of_steps() -> None:
    table = RequestTable(2, unit_tokens=16)
    slot = seated(table, "a", 20)
    sizes = set()
    for token in range(1000):
        append(table, {slot: [token]})
        sizes.add(request_in(table, slot).num_tokens)
    assert len(sizes) <= 1 + 1000 // 256
    request = table.request_in(slot)
    assert request.all_token_ids.tolist() == [*range(20), *range(1000)]


def test_sync_brings_one_row_up_to_date_and_no_other() -> None:
    table = RequestTable(4, unit_tokens=4)
    slots = [seated(table, name, 5, num_computed=5) for name in "abc"]
    append(table, {slot: [7, 8] for slot in slots})
    table.sync(slots[0])
    table.sync(slots[2])
    assert [request_in(table, slot).num_tokens for slot in slots] == [7, 5, 7]
    assert request_in(table, slots[0]).num_computed_tokens == 5


def test_callers_append_behind_the_back_of_the_table() -> None:
    table = RequestTable(2, unit_tokens=4)
    request = Request("a", [1, 2, 3, 4, 5])
    slot = table.admit(request, CALLER, 0).slot
    request.append_output_token_ids([6])
    request.truncate_tokens(5)
    assert table.request_in(slot) is request
    table.check(no_blocks)
    table.forget(table.known["a"])
    assert table.num_free_slots == 2
    table.check(no_blocks)


@dataclass
class Row:
    """The expected row."""

    request: Request
    tokens: list[int]
    computed: int
    marks: list[int] = field(default_factory=list)


class SlotWalk:
    """Random operations on a table, and on lists."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.unit = self.random.choice([1, 3, 4, 16, 300])
        self.table = RequestTable(5, self.unit)
        self.rows: dict[int, Row] = {}
        self.num_names = 0

    def take(self) -> None:
        if not self.table.num_free_slots:
            return
        self.num_names += 1
        tokens = [self.token() for _ in range(self.random.randint(1, 3 * self.unit))]
        request = Request(str(self.num_names), tokens)
        slot = self.table.admit(request, CLIENT, len(tokens)).slot
        self.rows[slot] = Row(request, tokens, len(tokens), [len(tokens)])

    def token(self) -> int:
        return self.random.randrange(1 << 20)

    def release(self) -> None:
        if self.rows and self.random.random() < 0.3:
            slot = self.random.choice(list(self.rows))
            row = self.rows.pop(slot)
            self.table.preempt(self.table.known[row.request.request_id])
            assert row.request.all_token_ids.tolist() == row.tokens

    def append(self) -> None:
        most = self.random.choice([1, 1, 1, 5, 40, 700])
        taken = self.random.sample(list(self.rows), self.random.randint(0, len(self.rows)))
        new = {s: [self.token() for _ in range(self.random.randint(1, most))] for s in taken}
        if self.random.random() < 0.2:
            new = {slot: ids if self.random.random() < 0.5 else [] for slot, ids in new.items()}
        append(self.table, new)
        for slot, ids in new.items():
            self.rows[slot].tokens += ids
            self.rows[slot].marks.append(len(self.rows[slot].tokens))

    def roll_back(self) -> None:
        if not self.rows or self.random.random() < 0.7:
            return
        slot = self.random.choice(list(self.rows))
        row = self.rows[slot]
        num_tokens = self.random.choice(row.marks)
        self.table.roll_back(slot, num_tokens, num_tokens)
        del row.tokens[num_tokens:]
        row.marks = [mark for mark in row.marks if mark <= num_tokens]

    def sync(self) -> None:
        slots = [slot for slot in self.rows if self.random.random() < 0.2]
        for slot in slots:
            self.table.sync(slot)
            row = self.rows[slot]
            assert row.request.all_token_ids.tolist() == row.tokens

    def compare(self) -> None:
        self.table.check(no_blocks)
        wanted = []
        for slot, row in self.rows.items():
            assert self.table.rows[slot, TOKENS] == len(row.tokens)
            num_units = len(row.tokens) // self.unit
            recent = num_units - 1 - self.random.randrange(3)
            some = (recent, self.random.randrange(num_units + 1))
            wanted += [(slot, unit) for unit in some if 0 <= unit < num_units]
        assert units(self.table, wanted) == [
            self.rows[slot].tokens[unit * self.unit : (unit + 1) * self.unit]
            for slot, unit in wanted
        ]


@pytest.mark.seeds(12)
def test_rows_have_the_tokens_that_were_appended(seed: int) -> None:
    walk = SlotWalk(seed)
    operations = {
        walk.take: 1,
        walk.append: 3,
        walk.release: 1,
        walk.roll_back: 1,
        walk.sync: 1,
    }
    random_walk(f"seed {seed}", walk.random, operations, 250, walk.compare)
