"""Stores concurrent with steps: no block is written while a copy still reads it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache.protocol.commands import Command, Copy, Load, Store, Unlabel, Zero
from kvcache.protocol.messages import Ack
from kvcache.specs import Layout
from kvcache.worker.transfers import TransferUses
from tests.worker.delayed_engine import DelayedEngine
from tests.worker.told_engine import ToldEngine
from tests.worker.worker_support import (
    Harness,
    block_bytes,
    fill_block,
    full_groups,
    ids,
    make_config,
    patch,
)

NUM_BLOCKS = 12
NUM_SLOTS = 6
MAX_TICKS = 20_000
TIMEOUT_S = 60.0


def make(seed: int, layout: Layout = "layer_first") -> tuple[Harness, DelayedEngine]:
    engine = DelayedEngine(seed)
    config = make_config(full_groups(3), NUM_BLOCKS, layout, host_blocks=NUM_SLOTS)
    harness = Harness.make(config, copy_engine=engine)
    for block_id in range(1, NUM_BLOCKS):
        fill_block(harness.worker, block_id, float(block_id))
    return harness, engine


def wait_for(harness: Harness, job_id: int) -> None:
    for _ in range(MAX_TICKS):
        if job_id in harness.reports:
            return
        harness.note(harness.worker.on_tick())
    raise AssertionError(f"job {job_id} does not end")


def by_forward(harness: Harness) -> None:
    harness.send(Unlabel(ids(3)), patch(0, [3]))
    harness.worker.begin_forward(1, harness.seq, TIMEOUT_S)
    fill_block(harness.worker, 3, 99.0)
    harness.worker.end_forward(1, harness.seq)


def by_later_forward(harness: Harness) -> None:
    harness.send(Unlabel(ids(3)))
    harness.send(patch(0, [3]))
    harness.worker.begin_forward(1, harness.seq, TIMEOUT_S)
    fill_block(harness.worker, 3, 99.0)
    harness.worker.end_forward(1, harness.seq)


def by(*commands: Command) -> Callable[[Harness], None]:
    def write(harness: Harness) -> None:
        harness.send(*commands)
        harness.forward(TIMEOUT_S)

    return write


def by_load(harness: Harness) -> None:
    harness.send(Load(50, "host", ids(5), ids(3)))
    wait_for(harness, 50)


WRITERS = {
    "a forward": by_forward,
    "a later forward": by_later_forward,
    "a zero": by(Zero(ids(3))),
    "a copy": by(Copy(ids(8), ids(3))),
    "a load": by_load,
}


def stored_bytes_are_right(seed: int, write: Callable[[Harness], None]) -> bool:
    """Store blocks, write one of them at once, and check the stored bytes."""
    harness, engine = make(seed)
    harness.send(Store(1, "host", ids(7), ids(5)))
    wait_for(harness, 1)
    blocks, slots = [2, 3, 4], [0, 1, 2]
    before = [block_bytes(harness.worker, block_id) for block_id in blocks]
    engine.is_stopped = True
    harness.send(Store(2, "host", ids(*blocks), ids(*slots)))
    if write is not by_load:
        write(harness)
    engine.is_stopped = False
    if write is by_load:
        write(harness)
    wait_for(harness, 2)
    assert harness.reports[2].ok
    harness.send(Load(3, "host", ids(*slots), ids(9, 10, 11)))
    wait_for(harness, 3)
    assert harness.reports[3].ok, harness.reports[3].detail
    after = [block_bytes(harness.worker, block_id) for block_id in (9, 10, 11)]
    harness.worker.check()
    return after == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_block_that_a_store_reads_is_not_written_before_the_copy_is_over(writer: str) -> None:
    for seed in range(20):
        print("seed", seed)
        assert stored_bytes_are_right(seed, WRITERS[writer])


@pytest.mark.parametrize("writer", WRITERS)
def test_without_the_wait_wrong_bytes_are_stored(
    writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: this is how."""
    monkeypatch.setattr(TransferUses, "before_forward", lambda uses, seq: None)
    monkeypatch.setattr(
        TransferUses, "before_write", lambda uses, block_ids: uses.writes.using(block_ids)
    )
    assert not all(stored_bytes_are_right(seed, WRITERS[writer]) for seed in range(20))


def test_a_step_that_reuses_a_stored_block_is_acknowledged_while_the_copy_runs() -> None:
    harness, engine = make(0)
    engine.is_stopped = True
    harness.send(Store(2, "host", ids(3), ids(1)))
    replies = harness.send(Unlabel(ids(3)), Zero(ids(4)), patch(0, [3]))
    assert replies == [Ack("coordinator-1", "process-a", 0, 1, 2)]
    assert engine.num_waits == 0
    harness.forward(TIMEOUT_S)
    assert engine.num_waits > 0
    assert harness.worker.statistics().transfers.num_waits == 1


def test_a_wait_for_a_copy_polls_where_no_thread_does() -> None:
    engine, asked = ToldEngine(), []

    def poll(timeout_s: float) -> None:
        asked.append(timeout_s)
        engine.finish()

    config = make_config(full_groups(3), NUM_BLOCKS, host_blocks=NUM_SLOTS)
    harness = Harness.make(config, copy_engine=engine, poll=poll)
    harness.send(Store(1, "host", ids(3), ids(1)))
    harness.send(Unlabel(ids(3)), patch(0, [3]))
    harness.worker.begin_forward(1, harness.seq, TIMEOUT_S)
    harness.worker.end_forward(1, harness.seq)
    assert asked == [0.0]


def test_a_step_that_writes_other_blocks_does_not_wait() -> None:
    harness, engine = make(0)
    engine.is_stopped = True
    harness.send(Store(2, "host", ids(3), ids(1)))
    harness.send(Unlabel(ids(4)), Zero(ids(4)), Copy(ids(3), ids(5)), patch(0, [4]))
    harness.forward(TIMEOUT_S)
    assert engine.num_waits == 0


class Walk:
    """Random jobs and steps, and the right content of every block and slot."""

    def __init__(self, seed: int) -> None:
        self.harness, self.engine = make(seed, "block_first" if seed % 2 else "layer_first")
        self.chance = random.Random(1000 + seed)
        self.blocks = {i: block_bytes(self.harness.worker, i) for i in range(1, NUM_BLOCKS)}
        self.slots: dict[int, bytes] = {}
        self.stores: dict[int, dict[int, bytes]] = {}
        self.loads: dict[int, dict[int, bytes]] = {}
        self.held: dict[int, set[int]] = {}

    @property
    def busy_slots(self) -> set[int]:
        return set().union(*self.held.values())

    @property
    def free_blocks(self) -> list[int]:
        loading = {block for targets in self.loads.values() for block in targets}
        return [block for block in self.blocks if block not in loading]

    def store(self, job: int) -> None:
        idle = [slot for slot in range(NUM_SLOTS) if slot not in self.busy_slots]
        wanted = self.chance.sample(idle, self.chance.randint(min(1, len(idle)), len(idle)))
        read = [self.chance.choice(self.free_blocks) for _ in wanted]
        self.harness.send(Store(job, "host", ids(*read), ids(*wanted)))
        self.stores[job] = {s: self.blocks[b] for s, b in zip(wanted, read, strict=True)}
        self.held[job] = set(wanted)
        for slot in wanted:
            self.slots.pop(slot, None)

    def load(self, job: int) -> None:
        if not self.slots:
            return
        target = self.chance.choice(self.free_blocks)
        slot = self.chance.choice(sorted(self.slots))
        self.harness.send(Load(job, "host", ids(slot), ids(target)))
        self.loads[job] = {target: self.slots[slot]}
        self.held[job] = {slot}

    def step(self, job: int) -> None:
        target, source = (self.chance.choice(self.free_blocks) for _ in range(2))
        if self.chance.random() < 0.5:
            self.harness.send(Unlabel(ids(target)), patch(0, [target]))
            self.harness.worker.begin_forward(1, self.harness.seq, TIMEOUT_S)
            fill_block(self.harness.worker, target, float(job))
            self.harness.worker.end_forward(1, self.harness.seq)
        else:
            self.harness.send(Copy(ids(source), ids(target)))
            self.harness.forward(TIMEOUT_S)
        self.blocks[target] = block_bytes(self.harness.worker, target)

    def settle(self) -> None:
        """Take reports, and compare the loaded blocks."""
        self.engine.is_stopped = self.chance.random() < 0.3
        self.harness.note(self.harness.worker.on_tick())
        for done in [job for job in self.held if job in self.harness.reports]:
            assert self.harness.reports[done].ok, self.harness.reports[done]
            self.slots.update(self.stores.pop(done, {}))
            for target, content in self.loads.pop(done, {}).items():
                assert block_bytes(self.harness.worker, target) == content
                self.blocks[target] = content
            del self.held[done]
        self.harness.worker.check()


def test_random_jobs_and_steps_keep_every_byte() -> None:
    for seed in range(10):
        print("seed", seed)
        walk = Walk(seed)
        for job in range(1, 120):
            walk.chance.choices([walk.store, walk.load, walk.step], [3, 3, 4])[0](job)
            walk.settle()
