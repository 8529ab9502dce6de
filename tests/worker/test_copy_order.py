"""Stores and loads concurrent with forwards and with each other: what waits for what.

With an engine that reads at the very end: without a wait, bytes are wrong.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import DeadlineError
from kvcache.protocol.commands import (
    Copy,
    Discard,
    Fetch,
    Load,
    SealSlots,
    Spill,
    Store,
    Unlabel,
    Zero,
)
from kvcache.protocol.messages import Ack
from kvcache.worker import PendingCopy
from kvcache.worker.copies import task as copy_task
from kvcache.worker.files.tier import FileTierSettings
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

IN_USE = "host slots [0] are in use by a running job: wait for its report"


class Bench(Harness):
    """A worker with six host slots; blocks 1 to 15 hold their number."""

    engine: ToldEngine

    def finish(self, *, is_reversed: bool = False) -> None:
        """Let all copies end, and those that waited for them, and take the reports."""
        for _ in range(3):
            self.engine.finish(is_reversed=is_reversed)
            self.note(self.worker.on_tick())

    def store(self, job_id: int, block_id: int, slot: int) -> None:
        self.send(Store(job_id, "host", ids(block_id), ids(slot)))

    def load(self, job_id: int, slot: int, block_id: int) -> None:
        self.send(Load(job_id, "host", ids(slot), ids(block_id)))

    def begin(self) -> None:
        self.worker.begin_forward(self.epoch, self.seq, timeout_s=0.0)

    def end(self) -> None:
        self.worker.end_forward(self.epoch, self.seq)

    def content(self, block_id: int) -> bytes:
        return block_bytes(self.worker, block_id)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    engine = ToldEngine()
    config = make_config(full_groups(3), 16, "layer_first", host_blocks=6)
    made = Bench.make(config, copy_engine=engine, file_tier=FileTierSettings(tmp_path, "cluster"))
    assert isinstance(made, Bench)
    made.engine = engine
    for block_id in range(1, 16):
        fill_block(made.worker, block_id, float(block_id))
    return made


def stored(bench: Bench, block_id: int, slot: int) -> bytes:
    """Store a block, and return its content."""
    content = bench.content(block_id)
    bench.store(100 + slot, block_id, slot)
    bench.finish()
    assert bench.reports[100 + slot].ok
    return content


def loaded(bench: Bench, slot: int) -> bytes:
    """Return the content of a slot, by way of block 15."""
    bench.load(200 + slot, slot, 15)
    bench.finish()
    assert bench.reports[200 + slot].ok, bench.reports[200 + slot].detail
    return bench.content(15)


def test_a_store_waits_for_the_forward_that_writes_its_block(bench: Bench) -> None:
    bench.send(patch(0, [3]))
    bench.begin()
    bench.worker.on_message(bench.message(Store(1, "host", ids(3), ids(0)), seq=2))
    bench.finish()
    fill_block(bench.worker, 3, 77.0)
    bench.end()
    bench.seq = 2
    bench.finish()
    assert bench.reports[1].ok
    assert loaded(bench, 0) == bench.content(3)


def test_a_forward_waits_for_the_store_that_reads_what_it_writes(bench: Bench) -> None:
    content = bench.content(3)
    bench.store(1, 3, 0)
    assert bench.send(Unlabel(ids(3)), patch(0, [3])) == [
        Ack("coordinator-1", "process-a", 0, 1, 2)
    ]
    with pytest.raises(DeadlineError) as caught:
        bench.begin()
    assert str(caught.value) == (
        "forward 2 cannot begin within 0.0 s: rank 0 has applied 2 of epoch 1, and moves its "
        "blocks: ask again, or give up"
    )
    assert 1 not in bench.reports
    assert bench.worker.statistics().num_running_jobs == 1
    bench.engine.finish()
    bench.begin()
    fill_block(bench.worker, 3, 77.0)
    bench.end()
    bench.finish()
    assert loaded(bench, 0) == content


@pytest.mark.parametrize("writer", [Zero(ids(3)), Copy(ids(4), ids(3))])
def test_a_zero_or_copy_of_a_block_that_is_stored_keeps_its_forward_waiting(
    bench: Bench, writer: Zero | Copy
) -> None:
    content = bench.content(3)
    bench.store(1, 3, 0)
    bench.send(writer)
    with pytest.raises(DeadlineError, match="moves its blocks"):
        bench.begin()
    assert bench.content(3) == content
    bench.finish()
    bench.forward()
    assert bench.content(3) != content
    assert loaded(bench, 0) == content


def test_a_load_begins_when_the_store_that_reads_its_block_is_over(bench: Bench) -> None:
    old, new = bench.content(3), stored(bench, 5, 1)
    bench.store(1, 3, 0)
    bench.load(2, 1, 3)
    assert len(bench.engine.copies) == 6  # three tensors: the first store, then this one
    bench.finish(is_reversed=True)
    assert bench.content(3) == new
    assert loaded(bench, 0) == old


def test_a_store_reads_a_block_when_the_load_that_writes_it_is_over(bench: Bench) -> None:
    new = stored(bench, 5, 1)
    bench.load(2, 1, 3)
    bench.store(3, 3, 0)
    bench.finish(is_reversed=True)
    assert bench.reports[3].ok
    assert loaded(bench, 0) == new


def test_the_later_of_two_loads_into_a_block_wins(bench: Bench) -> None:
    stored(bench, 5, 1)
    later = stored(bench, 6, 2)
    bench.load(2, 1, 3)
    bench.load(3, 2, 3)
    bench.finish(is_reversed=True)
    assert bench.content(3) == later


@pytest.mark.parametrize(
    "use", [patch(0, [3]), Copy(ids(3), ids(9)), Copy(ids(9), ids(3)), Zero(ids(3))]
)
def test_a_block_that_is_loaded_is_not_used_before_the_load_is_over(
    bench: Bench, use: Zero | Copy
) -> None:
    stored(bench, 5, 1)
    bench.load(2, 1, 3)
    bench.send(use)
    with pytest.raises(DeadlineError, match="moves its blocks"):
        bench.begin()
    bench.finish()
    bench.forward()
    assert bench.reports[2].ok


def test_a_load_begins_behind_what_was_put_off_for_its_block(bench: Bench) -> None:
    content = stored(bench, 5, 1)
    bench.send(Zero(ids(3)))
    bench.engine.log.clear()
    bench.load(2, 1, 3)
    assert bench.engine.log == ["zero"] * 3 + ["forward end"] + ["copy"] * 3
    bench.finish()
    bench.send()
    bench.forward()
    assert bench.content(3) == content


def test_a_job_whose_way_is_not_cleared_in_time_fails_and_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.worker.execution.SETTLE_TIMEOUT_S", 0.0)
    stored(bench, 5, 1)
    content = bench.content(3)
    bench.store(1, 3, 0)
    bench.send(Zero(ids(3)))
    bench.load(2, 1, 3)
    assert bench.reports[2].detail == (
        "a transfer of rank 0 still uses the blocks after 0 s: wait for its report"
    )
    assert bench.content(3) == content
    bench.finish()
    assert bench.reports[1].ok
    bench.forward()
    assert bench.content(3) == b"\0" * len(content)


def test_a_checksum_is_of_what_has_arrived(bench: Bench) -> None:
    content = bench.content(3)
    bench.store(1, 3, 0)
    host = bench.worker.host_pool
    for tensor in host.tensors:
        tensor[0].fill_(9)  # the content of the slot until the copy is done
    bench.finish()
    assert loaded(bench, 0) == content


def test_a_checksum_that_cannot_be_taken_when_all_has_arrived_fails_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    bench.store(1, 3, 0)
    with monkeypatch.context() as patched:
        patched.setattr(copy_task, "checksums_of_rows", fail)
        bench.finish()
    assert bench.reports[1].detail == "checksums failed: MemoryError no room"
    bench.load(2, 0, 9)
    assert bench.reports[2].detail == "host slot 0 holds nothing that this rank stored"


def test_a_slot_is_neither_read_nor_written_while_a_job_writes_it(bench: Bench) -> None:
    key = b"k" * 8
    bench.store(1, 3, 0)
    bench.load(2, 0, 9)
    bench.store(3, 4, 0)
    bench.send(Spill(4, "file", ids(0), key), Fetch(5, "file", key, ids(0)))
    bench.note(bench.worker.on_tick())
    assert [bench.reports[job].detail for job in (2, 3, 4, 5)] == [IN_USE] * 4
    bench.send(SealSlots("host", ids(0)))
    host = bench.worker.host_pool
    assert host.labels.state(0).name == "WRITING"
    bench.finish()
    assert bench.reports[1].ok


def test_a_slot_is_not_written_while_loads_read_it(bench: Bench) -> None:
    content = stored(bench, 5, 0)
    bench.load(1, 0, 9)
    bench.load(4, 0, 10)
    bench.store(2, 4, 0)
    bench.send(Fetch(3, "file", b"k" * 8, ids(0)))
    bench.note(bench.worker.on_tick())
    assert [bench.reports[job].detail for job in (2, 3)] == [IN_USE] * 2
    bench.finish()
    assert bench.content(9) == bench.content(10) == content


def test_a_slot_that_is_discarded_while_it_is_stored_stays_empty(bench: Bench) -> None:
    bench.store(1, 3, 0)
    bench.send(Discard("host", ids(0), b""))
    bench.finish()
    bench.load(2, 0, 9)
    assert bench.reports[2].detail == "host slot 0 holds nothing that this rank stored"


class WatchingEngine(ToldEngine):
    """Notes the ids of each copy, and keeps the arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Int32Array, list[int]]] = []

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        for array in (source_ids, destination_ids):
            self.seen.append((array, array.tolist()))
        return super().copy_blocks(sources, source_ids, destinations, destination_ids)


def test_arrays_of_ids_stay_as_they_are_while_a_copy_may_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_task, "PIECE_BYTES", 1)  # every block by itself
    engine = WatchingEngine()
    bench = Bench.make(make_config(full_groups(2), 16, host_blocks=6), copy_engine=engine)
    assert isinstance(bench, Bench)
    bench.engine = engine
    for block_id in range(1, 16):
        fill_block(bench.worker, block_id, float(block_id))
    contents = [bench.content(block_id) for block_id in (3, 7, 5, 2)]
    bench.send(Store(1, "host", ids(3, 7), ids(4, 0)), Store(2, "host", ids(5, 2), ids(1, 3)))
    assert [array.tolist() for array, _ in engine.seen] == [before for _, before in engine.seen]
    assert sorted(chain(*(before for _, before in engine.seen))) == [0, 1, 2, 3, 3, 4, 5, 7]
    bench.finish(is_reversed=True)
    bench.send(Load(3, "host", ids(4, 0, 1, 3), ids(9, 10, 11, 12)))
    bench.finish(is_reversed=True)
    assert [bench.content(block_id) for block_id in (9, 10, 11, 12)] == contents


def test_a_load_names_the_slots_that_are_wrong_and_copies_nothing_of_them(bench: Bench) -> None:
    for slot in range(4):
        stored(bench, slot + 1, slot)
    host = bench.worker.host_pool
    assert host is not None
    for slot in (1, 3):
        host.tensors[1][slot, 5] ^= 1
    before = [bench.content(block_id) for block_id in (9, 10, 11, 12)]
    bench.send(Load(1, "host", ids(0, 1, 2, 3), ids(9, 10, 11, 12)))
    bench.finish()
    report = bench.reports[1]
    assert not report.ok
    assert report.block_ids == (1, 3)
    assert report.detail.startswith("checksum of host slot 1 is 0x")
    assert report.detail.endswith("(2 of 4 slots are wrong)")
    after = [bench.content(block_id) for block_id in (9, 10, 11, 12)]
    assert (after[1], after[3]) == (before[1], before[3])
    bench.send(Load(2, "host", ids(0, 2), ids(9, 11)))
    bench.finish()
    assert bench.reports[2].ok
    bench.worker.check()


def test_random_endings_keep_every_byte(bench: Bench) -> None:
    for seed in range(20):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        expected = {block_id: bench.content(block_id) for block_id in range(1, 16)}
        slots: dict[int, bytes] = {}
        for turn in range(12):
            slot, block_id = turn % 6, int(rng.integers(1, 15))
            job = 1000 + seed * 100 + turn
            if slot in slots and rng.random() < 0.6:
                bench.load(job, slot, block_id)
                expected[block_id] = slots[slot]
            else:
                bench.store(job, block_id, slot)
                slots[slot] = expected[block_id]
            # Several jobs are under way at once, but none whose slot another one uses.
            if turn % 6 == 5 or rng.random() < 0.3:
                for copy in rng.permutation(np.array(bench.engine.copies, dtype=object)):
                    copy.finish()
                bench.finish()
                assert bench.reports[job].ok, bench.reports[job].detail
        bench.finish()
        assert {b: bench.content(b) for b in expected} == expected
        bench.worker.check()
