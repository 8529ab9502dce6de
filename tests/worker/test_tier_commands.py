"""Commands for host slots and files in a worker: labels, seals, spills, fetches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.offload.keys import label_keys
from kvcache.protocol.commands import (
    Command,
    Discard,
    Fetch,
    Label,
    Load,
    Reset,
    SealSlots,
    Spill,
    Store,
    Unlabel,
)
from kvcache.protocol.messages import JobReport
from kvcache.worker.files.format import FileHead, labels_of_heads
from kvcache.worker.files.tier import FileTierSettings
from kvcache.worker.host_memory import host_pool
from kvcache.worker.host_memory.labels import SlotState
from tests.worker.tier_support import PLAIN, files_below, label_views, random_labels, wait_for_files
from tests.worker.worker_support import (
    Harness,
    Row,
    block_bytes,
    fill_block,
    full_groups,
    ids,
    label,
    make_config,
    patch,
    write_expected,
)

TIMEOUT_S = 60.0
CONTENT = replace(label(3), namespace_names=(PLAIN,))
KEY = b"abcd\0\0\0\0"
OTHER_KEY = b"abce\0\0\0\0"


class Bench(Harness):
    """A worker with six host slots and a directory."""

    def settle(self, job_id: int) -> JobReport:
        """Wait for the files, then for the report."""
        pool = self.worker._executor.tiers.files
        assert pool is not None
        assert wait_for_files(pool, TIMEOUT_S)
        self.note(self.worker.on_tick())
        return self.reports[job_id]

    def states(self) -> list[str]:
        host = self.worker.host_pool
        assert host is not None
        return [host.labels.state(slot).name for slot in range(host.num_slots)]

    def labels(self) -> Label:
        host = self.worker.host_pool
        return host.labels.sealed().labels


def make(root: Path | None, **changes: Any) -> Bench:
    file_tier = None if root is None else FileTierSettings(root, "cluster", threads=2)
    config = make_config(full_groups(), host_blocks=6)
    made = Bench.make(config, file_tier=file_tier, **changes)
    assert isinstance(made, Bench)
    for block_id in range(1, 16):
        fill_block(made.worker, block_id, float(block_id))
    return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = make(tmp_path)
    yield made
    made.worker.check()
    made.worker.close()


def stored(bench: Bench) -> None:
    """Block 3, with its label, in slot 2."""
    bench.send(CONTENT)
    bench.send(Store(1, "host", ids(3), ids(2)))
    assert bench.reports[1].ok


def test_a_store_takes_the_label_along_and_a_seal_makes_it_known(bench: Bench) -> None:
    bench.send(CONTENT)
    bench.send(Store(1, "host", ids(3, 4), ids(2, 0)), Unlabel(ids(3)))
    assert bench.states() == ["WRITTEN", "EMPTY", "WRITTEN", "EMPTY", "EMPTY", "EMPTY"]
    assert list(bench.labels().block_ids) == []
    bench.send(SealSlots("host", ids(2, 0, 1)))
    assert bench.states() == ["WRITTEN", "EMPTY", "SEALED", "EMPTY", "EMPTY", "EMPTY"]
    assert bench.labels().block_ids.tolist() == [2]
    assert label_views(bench.labels()) == label_views(CONTENT)
    statistics = bench.worker.statistics().transfers.host
    assert (statistics.num_sealed, statistics.num_written, statistics.num_seals_refused) == (
        1,
        1,
        2,
    )


def test_a_slot_that_is_written_again_has_no_label_while_it_is(bench: Bench) -> None:
    stored(bench)
    bench.send(SealSlots("host", ids(2)))
    bench.send(Store(2, "host", ids(5), ids(2)))
    assert bench.labels().block_ids.tolist() == []


def test_a_new_epoch_keeps_sealed_slots_only(bench: Bench) -> None:
    stored(bench)
    bench.send(SealSlots("host", ids(2)), Store(2, "host", ids(3), ids(4)))
    bench.nonce, bench.epoch, bench.seq = "coordinator-2", 2, 0
    bench.grant()
    assert bench.states() == ["EMPTY", "EMPTY", "SEALED", "EMPTY", "EMPTY", "EMPTY"]


def test_a_reset_forgets_slots_of_an_older_model_epoch(bench: Bench) -> None:
    bench.send(Reset(1))
    stored(bench)
    bench.send(SealSlots("host", ids(2)))
    bench.send(Reset(1))
    assert bench.labels().block_ids.tolist() == [2]
    bench.send(Reset(2))
    assert bench.states() == ["EMPTY"] * 6


def test_a_discarded_slot_holds_nothing(bench: Bench) -> None:
    stored(bench)
    bench.send(SealSlots("host", ids(2)), Discard("host", ids(2), b""))
    bench.send(Load(3, "host", ids(2), ids(9)))
    assert bench.reports[3].detail == "host slot 2 holds nothing that this rank stored"


def test_a_block_goes_to_its_file_and_comes_back_with_its_label(
    bench: Bench, tmp_path: Path
) -> None:
    stored(bench)
    content = block_bytes(bench.worker, 3)
    bench.send(Spill(2, "file", ids(2), KEY))
    spill = bench.settle(2)
    assert spill.ok, spill.detail
    directory = "cluster/layout/rank0"
    assert files_below(tmp_path) == [
        f"{directory}/61/{KEY.hex()}.kvb",
        f"{directory}/about",
    ]
    bench.send(Fetch(3, "file", KEY, ids(5)))
    fetch = bench.settle(3)
    assert fetch.ok, fetch.detail
    assert bench.reports[1].checksum == spill.checksum == fetch.checksum
    assert spill.num_bytes == fetch.num_bytes == bench.reports[1].num_bytes == len(content)
    bench.send(SealSlots("host", ids(5)), Load(4, "host", ids(5), ids(9)))
    assert bench.reports[4].ok
    assert bench.reports[4].checksum == fetch.checksum
    assert block_bytes(bench.worker, 9) == content
    assert label_views(bench.labels()) == label_views(CONTENT)
    bench.send(Discard("file", ids(), KEY))
    bench.send(Fetch(5, "file", KEY, ids(0)))
    assert bench.settle(5).detail == ("1 of 1 blocks failed: block 6162636400000000 has no file")
    assert bench.states()[0] == "EMPTY"
    counts = bench.worker.statistics().transfers.jobs
    assert {kind: (c.num_good, c.num_failed) for kind, c in counts.items()} == {
        "store": (1, 0),
        "spill": (1, 0),
        "fetch": (1, 1),
        "load": (1, 0),
    }
    files = bench.worker.statistics().transfers.files
    assert (files.num_written, files.num_read, files.num_discarded) == (1, 1, 1)
    assert files.problems == {"missing": 1}


def test_of_a_job_that_fails_the_blocks_that_did_not_are_usable(bench: Bench) -> None:
    stored(bench)
    bench.send(Spill(2, "file", ids(2), KEY))
    bench.settle(2)
    bench.send(Fetch(3, "file", OTHER_KEY + KEY, ids(4, 5)))
    report = bench.settle(3)
    assert not report.ok
    assert report.block_ids == (4,)
    assert bench.states() == ["EMPTY", "EMPTY", "WRITTEN", "EMPTY", "EMPTY", "WRITTEN"]


def test_a_file_that_was_damaged_is_a_miss_and_its_slot_stays_empty(
    bench: Bench, tmp_path: Path
) -> None:
    stored(bench)
    bench.send(Spill(2, "file", ids(2), KEY))
    bench.settle(2)
    path = tmp_path / "cluster/layout/rank0/61" / f"{KEY.hex()}.kvb"
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(bytes(data))
    bench.send(Fetch(3, "file", KEY, ids(4)))
    report = bench.settle(3)
    assert report.detail == (
        "1 of 1 blocks failed: file of block 6162636400000000: the checksum of its bytes is wrong: "
        "set aside"
    )
    assert report.block_ids == (4,)
    assert bench.states()[4] == "EMPTY"
    assert not path.exists()


def test_a_slot_that_is_discarded_while_it_is_fetched_stays_empty(bench: Bench) -> None:
    bench.send(replace(CONTENT, extra_keys={0: b"k" * 300}))
    bench.send(Store(1, "host", ids(3), ids(2)))
    bench.send(Spill(2, "file", ids(2), KEY))
    bench.settle(2)
    bench.send(Fetch(3, "file", KEY, ids(4)), Discard("host", ids(4), b""))
    assert bench.settle(3).ok
    bench.send(SealSlots("host", ids(4)))
    assert bench.states()[4] == "EMPTY"


@pytest.mark.parametrize(
    ("command", "detail"),
    [
        (Spill(8, "file", ids(0), KEY), "host slot 0 holds nothing whose content is known"),
        (
            Spill(8, "file", ids(2), OTHER_KEY),
            "host slot 2 holds another block than its key says",
        ),
        (Spill(8, "file", ids(6), KEY), "host slots 6..6 are asked for, this rank has 0..5"),
        (Spill(8, "tape", ids(2), KEY), "medium 'tape' is not served here: only 'file' is"),
        (Fetch(8, "file", KEY, ids(-1)), "host slots -1..-1 are asked for, this rank has 0..5"),
    ],
)
def test_jobs_that_cannot_be_done_are_reported(bench: Bench, command: Command, detail: str) -> None:
    stored(bench)
    bench.send(command)
    assert bench.settle(8).detail == detail


def test_a_block_without_a_label_is_not_spilled(bench: Bench) -> None:
    bench.send(Store(1, "host", ids(3), ids(2)))
    bench.send(Spill(2, "file", ids(2), KEY))
    assert bench.settle(2).detail == "host slot 2 holds nothing whose content is known"


def test_a_label_that_found_no_room_costs_its_own_block_and_no_other(
    bench: Bench, tmp_path: Path
) -> None:
    long = replace(label(4), namespace_names=(PLAIN,), extra_keys={0: b"x" * 30_000})
    bench.send(CONTENT, long)
    bench.send(Store(1, "host", ids(4, 3, 5), ids(1, 2, 0)))
    bench.send(Spill(2, "file", ids(1, 2, 0), KEY * 3))
    report = bench.settle(2)
    assert (report.ok, report.block_ids, report.lost_ids) == (False, (1, 0), ())
    assert report.num_bytes == len(block_bytes(bench.worker, 3))
    assert report.detail == (
        "2 of 3 blocks failed: host slot 1 holds nothing whose content is known (2 such slots)"
    )
    bench.send(Fetch(3, "file", KEY, ids(5)))
    assert bench.settle(3).ok
    bench.send(Store(4, "host", ids(5), ids(2)))
    assert bench.reports[4].ok  # the slot is unreferenced


def test_a_namespace_that_cannot_be_read_has_no_key(bench: Bench) -> None:
    bench.send(label(3))
    bench.send(Store(1, "host", ids(3), ids(2)))
    bench.send(Spill(2, "file", ids(2), KEY))
    assert bench.settle(2).detail.startswith("the content of host slots has no key: namespace ")


def test_without_a_file_tier_every_job_fails_with_the_remedy() -> None:
    bench = make(None)
    bench.send(Spill(2, "file", ids(2), KEY), Discard("file", ids(), KEY))
    assert bench.reports[2].detail == "this rank has no file tier: configure one"
    assert bench.worker._executor.tiers.files is None


def test_a_rank_whose_directory_is_gone_starts_without_files_where_it_may(tmp_path: Path) -> None:
    wanted = FileTierSettings(tmp_path / "unplugged", "cluster")
    config = make_config(full_groups(), host_blocks=6)
    message = f"the file tier's root {tmp_path / 'unplugged'} is not a directory: make or mount it"
    with pytest.raises(ConfigurationError, match=f"^{message} first$"):
        Harness.make(config, file_tier=wanted)
    bench = Harness.make(config, file_tier=replace(wanted, must_work=False))
    bench.send(CONTENT)
    bench.send(Store(1, "host", ids(3), ids(2)), Spill(2, "file", ids(2), KEY))
    assert bench.reports[1].ok
    assert bench.reports[2].detail == f"this rank has no file tier: {message} first"


def test_slots_in_different_pieces_of_registered_memory_are_copied_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_pool, "MAX_REGISTERED_BYTES", 4096)
    bench = Harness.make(make_config(full_groups(), host_blocks=100))
    host = bench.worker.host_pool
    first, second, third = 1, 4096 // host.slot_bytes, 4096 // host.slot_bytes + 1
    pieces = host.pieces(0, ids(second, first, third))
    assert [piece.tolist() for piece in pieces] == [[1], [0, 2]]
    for block_id in range(1, 10):
        fill_block(bench.worker, block_id, float(block_id))
    before = [block_bytes(bench.worker, b) for b in (3, 4, 5)]
    bench.send(Store(1, "host", ids(3, 4, 5), ids(second, first, third)))
    bench.send(Load(2, "host", ids(second, first, third), ids(7, 8, 9)))
    assert bench.reports[2].ok
    assert [block_bytes(bench.worker, b) for b in (7, 8, 9)] == before


def test_files_without_host_slots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Harness.make(file_tier=FileTierSettings(tmp_path, "cluster"))
    assert str(caught.value) == (
        "rank 0 has a file tier and no host slots to read files into: plan host_blocks above 0"
    )


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Spill(8, "file", ids(1, 2), KEY), "spill with 8 bytes of keys, one has 8: send 2 of"),
        (Fetch(8, "file", KEY[:-1], ids(1)), "fetch with 7 bytes of keys, one has 8: send 1 of"),
        (Fetch(8, "file", KEY + KEY, ids(1, 1)), "fetch writes a destination twice"),
        (Discard("file", ids(), KEY[:5]), "discard with 5 bytes of keys, one has 8: send whole"),
        (Discard("host", ids(6), b""), "discard of host slots 6..6, this rank has 6"),
        (SealSlots("host", ids(-1)), "seal of host slots -1..-1, this rank has 6"),
        (SealSlots("file", ids(1)), "seal of slots of medium 'file': only 'host' has slots"),
    ],
)
def test_commands_that_do_not_fit_are_refused(bench: Bench, command: Command, reason: str) -> None:
    bench.send(command)
    text = bench.worker.statistics().last_invalid_reason
    assert text.startswith(f"message 1:1: {reason}")
    assert bench.worker.statistics().num_invalid_messages == 1


def test_a_grant_waits_until_no_file_is_read_or_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(bench)
    pool = bench.worker._executor.tiers.files
    write, may_write = pool.store.write, threading.Event()

    def write_late(head: FileHead, payload: Sequence[memoryview]) -> int:
        assert may_write.wait(TIMEOUT_S)
        return write(head, payload)

    monkeypatch.setattr(pool.store, "write", write_late)
    bench.send(Spill(2, "file", ids(2), KEY))
    bench.nonce, bench.epoch, bench.seq = "coordinator-2", 2, 0
    assert bench.grant() == []
    assert bench.worker.on_tick() == []
    may_write.set()
    assert wait_for_files(pool, TIMEOUT_S)
    granted = bench.worker.on_tick()
    assert [type(reply).__name__ for reply in granted] == ["Granted"]


def test_content_checked_blocks_survive_all_tiers(tmp_path: Path) -> None:
    """The right bytes are spilled, fetched elsewhere, and compared."""
    made = make(tmp_path, is_content_checking=True)
    tokens = list(range(50, 59))
    assert made.run(patch(0, [5, 3, 7]), write_expected(1, [Row(0, tokens, 0, 9)])).ok
    labels = random_labels(np.random.default_rng(0), [5, 3])
    labels = replace(labels, groups=ids(0, 0))
    keys = label_keys(labels)
    made.send(labels)
    made.send(Store(2, "host", ids(5, 3), ids(0, 1)))
    made.send(SealSlots("host", ids(0, 1)), Spill(3, "file", ids(0, 1), b"".join(keys)))
    assert made.settle(3).ok, made.reports[3].detail
    made.send(Fetch(4, "file", b"".join(reversed(keys)), ids(5, 4)))
    assert made.settle(4).ok, made.reports[4].detail
    made.send(Load(5, "host", ids(4, 5), ids(9, 10)))
    hit = Row(1, tokens, 8, 1)
    report = made.run(patch(1, [9, 10, 11]), write_expected(6, [hit]))
    assert report.ok, report.detail
    made.worker.close()


def test_random_moves_between_all_tiers_equal_a_model(tmp_path: Path) -> None:
    for seed in range(4):
        print("seed", seed)
        root = tmp_path / str(seed)
        root.mkdir()
        bench, rng = make(root), np.random.default_rng(seed)
        given = replace(random_labels(rng, range(1, 16)), groups=ids(*[0] * 15))
        views = label_views(given)
        keys = label_keys(given)
        bench.send(given)
        contents = {i: block_bytes(bench.worker, i) for i in range(1, 16)}
        slots: dict[int, int] = {}
        files: set[int] = set()
        for job in range(2, 70):
            act, block_id = rng.random(), int(rng.integers(1, 10))
            slot = int(rng.integers(0, 6))
            if act < 0.35:
                bench.send(Store(job, "host", ids(block_id), ids(slot)))
                bench.send(SealSlots("host", ids(slot)))
                assert bench.reports[job].ok
                slots[slot] = block_id
            elif act < 0.6 and slots:
                slot = sorted(slots)[slot % len(slots)]
                bench.send(Spill(job, "file", ids(slot), keys[slots[slot] - 1]))
                assert bench.settle(job).ok, bench.reports[job]
                files.add(slots[slot])
            elif act < 0.8:
                bench.send(Fetch(job, "file", keys[block_id - 1], ids(slot)))
                assert bench.settle(job).ok == (block_id in files)
                slots.pop(slot, None)
                if block_id in files:
                    slots[slot] = block_id
                    bench.send(SealSlots("host", ids(slot)))
            elif act < 0.9:
                bench.send(Discard("file", ids(), keys[block_id - 1]))
                files.discard(block_id)
            elif slots:
                slot = sorted(slots)[slot % len(slots)]
                bench.send(Load(job, "host", ids(slot), ids(14)))
                assert bench.reports[job].ok
                assert block_bytes(bench.worker, 14) == contents[slots[slot]]
            found = bench.labels()
            assert found.block_ids.tolist() == sorted(slots)
            assert label_views(found) == [views[slots[s] - 1] for s in sorted(slots)]
            bench.worker.check()
        bench.worker.close()


def test_a_worker_that_begins_again_finds_its_files(tmp_path: Path) -> None:
    first = make(tmp_path)
    stored(first)
    first.send(Spill(2, "file", ids(2), KEY))
    assert first.settle(2).ok
    first.worker.close()
    again = make(tmp_path)
    pool = again.worker._executor.tiers.files
    pool.scan([KEY[0]])
    assert wait_for_files(pool, TIMEOUT_S)
    (scanned,) = pool.take_scanned()
    assert [head.key for head in scanned.heads] == [KEY]
    assert label_views(labels_of_heads(scanned.heads)) == label_views(CONTENT)
    again.send(Fetch(1, "file", KEY, ids(0)))
    assert again.settle(1).ok
    assert again.states()[0] == SlotState.WRITTEN.name
    again.worker.close()
