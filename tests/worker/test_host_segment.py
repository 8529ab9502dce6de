"""Host memory that outlives a process: its labels, its head, and which process may attach."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import InvariantError, NotEnoughMemoryError, PlanMismatchError
from kvcache.worker.host_memory import first_touch, shared_memory
from kvcache.worker.host_memory.first_touch import SLICE_BYTES, FirstTouch
from kvcache.worker.host_memory.labels import HostLabels, SlotState
from kvcache.worker.host_memory.segment import UNKNOWN_MODEL_EPOCH, HostSegment, SegmentShape
from kvcache.worker.host_memory.shared_memory import (
    available_memory_bytes,
    make_memory,
    total_memory_bytes,
)
from tests.forked import in_a_fork
from tests.worker.tier_support import SHAPE, attach_again, label_views, make_segment, random_labels
from tests.worker.worker_support import ids


def fill(labels: HostLabels, slots: list[int], rng: np.random.Generator, *, seal: bool) -> None:
    wanted = int32_array(slots)
    begun = labels.begin(wanted)
    labels.describe(wanted, random_labels(rng, slots))
    labels.finish(wanted, begun, rng.integers(0, 2**62, len(slots)))
    if seal:
        labels.seal(wanted)


def test_another_process_finds_the_sealed_slots_with_their_bytes() -> None:
    segment = make_segment()
    rng = np.random.default_rng(0)
    labels = random_labels(rng, [4, 0])
    begun = segment.labels.begin(ids(4, 0))
    segment.labels.describe(ids(4, 0), labels)
    for slot in (4, 0):
        for view in segment.slot_views(slot):
            view[:] = bytes([slot + 1]) * len(view)
    segment.labels.finish(ids(4, 0), begun, np.array([77, 78], dtype=np.int64))
    segment.labels.seal(ids(4, 0))
    fill(segment.labels, [2], rng, seal=False)
    segment.labels.begin(ids(3))
    again = attach_again(segment)
    found = again.labels.sealed()
    assert found.labels.block_ids.tolist() == [0, 4]
    first, second = label_views(labels)
    assert label_views(found.labels) == [second, first]
    assert np.frombuffer(found.checksums, "<i8").tolist() == [78, 77]
    assert [bytes(view) for view in again.slot_views(4)] == [b"\5" * 64, b"\5" * 32]
    assert [again.labels.state(slot) for slot in (2, 3)] == [SlotState.EMPTY] * 2
    again.labels.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "the host segment has rank 1, rank 2 needs 2"),
        (
            {"layout_fingerprint": "other"},
            "the host segment has layout fingerprint layout, rank 1 needs other",
        ),
        (
            {"widths": (32, 64)},
            r"the host segment has widths \(64, 32\), rank 1 needs \(32, 64\)",
        ),
        ({"digest_bytes": 3}, "the host segment has digest bytes 4, rank 1 needs 3"),
        ({"num_slots": 600}, "a host segment of 36864 bytes is there, rank 1 needs "),
    ],
)
def test_memory_of_another_shape_is_refused(change: dict[str, object], message: str) -> None:
    segment = make_segment()
    with pytest.raises(PlanMismatchError, match=f"^{message}"):
        attach_again(segment, replace(SHAPE, **change))


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "the memory holds no host segment"),
        (8, "the host segment has version 254, this package reads 1"),
        (140, "the head of the host segment is damaged"),
        (88, "the head of the host segment is damaged"),
    ],
)
def test_a_head_that_was_changed_is_refused(offset: int, message: str) -> None:
    segment = make_segment()
    byte = os.pread(segment.descriptor, 1, offset)[0]
    os.pwrite(segment.descriptor, bytes([255 - byte]), offset)
    with pytest.raises(PlanMismatchError, match=f"^{message}$"):
        attach_again(segment)


def test_a_label_that_was_changed_behind_our_back_is_not_believed() -> None:
    segment = make_segment()
    fill(segment.labels, [0, 1, 2], np.random.default_rng(1), seal=True)
    row_bytes = SHAPE.rows_bytes // SHAPE.num_slots
    place = SHAPE.offsets[0] + row_bytes + row_bytes // 2
    byte = os.pread(segment.descriptor, 1, place)[0]
    os.pwrite(segment.descriptor, bytes([byte ^ 1]), place)
    with pytest.raises(InvariantError, match=r"^labels of sealed host slots \[1\] were changed$"):
        segment.labels.check()
    again = attach_again(segment)
    assert again.labels.sealed().labels.block_ids.tolist() == [0, 2]
    assert again.labels.num_damaged_rows == 1
    again.labels.check()


def test_random_lives_of_slots_equal_a_model_and_survive_attaching() -> None:
    for seed in range(15):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        segment = make_segment(replace(SHAPE, num_slots=12))
        model: dict[int, tuple[object, ...]] = {}
        for _ in range(60):
            count = int(rng.integers(1, 5))
            slots = rng.permutation(12)[:count].tolist()
            act = rng.random()
            labels = segment.labels
            if act < 0.55:
                given = random_labels(rng, slots, longest_names=900)
                begun = labels.begin(int32_array(slots))
                labels.describe(int32_array(slots), given)
                labels.finish(int32_array(slots), begun, np.arange(count, dtype=np.int64))
                labels.seal(int32_array(slots))
                model.update(zip(slots, label_views(given), strict=True))
            elif act < 0.75:
                labels.withdraw(int32_array(slots))
                for slot in slots:
                    model.pop(slot, None)
            elif act < 0.9:
                labels.begin(int32_array(slots))
                for slot in slots:
                    model.pop(slot, None)
            else:
                segment = attach_again(segment, segment.shape)
            segment.labels.check()
            found = segment.labels.sealed().labels
            expected = [model[slot] for slot in sorted(model)]
            assert found.block_ids.tolist() == sorted(model)
            assert label_views(found) == expected


def test_a_slot_that_was_withdrawn_meanwhile_is_not_finished() -> None:
    labels = make_segment().labels
    begun = labels.begin(ids(1, 2))
    labels.withdraw(ids(1))
    again = labels.begin(ids(1))
    labels.finish(ids(1, 2), begun, np.array([1, 2], dtype=np.int64))
    assert [labels.state(slot) for slot in (1, 2)] == [SlotState.WRITING, SlotState.WRITTEN]
    labels.finish(ids(1), again, np.array([3], dtype=np.int64))
    assert labels.checksums(ids(1, 2)).tolist() == [3, 2]


def test_only_labelled_slots_that_were_written_are_sealed() -> None:
    labels = make_segment().labels
    fill(labels, [0], np.random.default_rng(0), seal=True)
    begun = labels.begin(ids(1))
    labels.finish(ids(1), begun, np.array([1], dtype=np.int64))
    labels.begin(ids(2))
    labels.seal(ids(0, 1, 2, 3))
    assert [labels.state(slot).name for slot in range(4)] == [
        "SEALED",
        "WRITTEN",
        "WRITING",
        "EMPTY",
    ]
    assert labels.num_seals_refused == 3


def test_labels_that_find_no_room_are_not_written_and_the_slot_stays_usable() -> None:
    shape = replace(SHAPE, num_slots=1)
    labels = make_segment(shape).labels
    given = replace(random_labels(np.random.default_rng(0), [0]), extra_keys={0: b"x" * 20_000})
    begun = labels.begin(ids(0))
    labels.describe(ids(0), given)
    labels.finish(ids(0), begun, np.array([9], dtype=np.int64))
    labels.seal(ids(0))
    assert labels.state(0) == SlotState.WRITTEN
    assert labels.are_readable(ids(0)).tolist() == [True]
    assert labels.num_without_room == 1
    labels.check()


def test_a_higher_model_epoch_forgets_every_slot_and_the_same_one_none() -> None:
    segment = make_segment()
    assert segment.model_epoch == UNKNOWN_MODEL_EPOCH
    fill(segment.labels, [0], np.random.default_rng(0), seal=True)
    segment.reset(3)
    segment.reset(3)
    again = attach_again(segment)
    assert (again.model_epoch, again.labels.num_in(SlotState.SEALED)) == (3, 1)
    again.reset(4)
    assert (again.model_epoch, again.labels.num_in(SlotState.SEALED)) == (4, 0)


def test_memory_that_is_not_there_is_an_error_that_says_how_much_is() -> None:
    available = available_memory_bytes()
    assert available is not None
    wanted = 64 * (available + 2**30)
    with pytest.raises(NotEnoughMemoryError) as caught:
        make_memory("too large", wanted)
    text = str(caught.value)
    assert text.startswith(f"shared memory too large needs {wanted} bytes of memory, ")
    assert text.endswith(
        " are available: lower offload.host_memory_per_rank, or raise the limit of the container"
    )


def test_the_narrowest_limit_around_the_process_counts(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert available_memory_bytes(tmp_path) is None
    assert total_memory_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory_bytes(tmp_path) == 5_000 * 1024
    assert total_memory_bytes(tmp_path) == 9_000 * 1024
    write("proc/self/cgroup", "0::/pods/pod1\n")
    write("sys/fs/cgroup/pods/memory.max", "2000000\n")
    write("sys/fs/cgroup/pods/memory.current", "1500000\n")
    write("sys/fs/cgroup/pods/memory.stat", "anon 5\ninactive_file 400000\n")
    write("sys/fs/cgroup/pods/pod1/memory.max", "max\n")
    write("sys/fs/cgroup/pods/pod1/memory.current", "1\n")
    assert available_memory_bytes(tmp_path) == 900_000
    assert total_memory_bytes(tmp_path) == 2_000_000
    write("proc/self/cgroup", "5:cpu,memory:/old\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n")
    assert available_memory_bytes(tmp_path) == 200_000
    assert total_memory_bytes(tmp_path) == 300_000


def test_without_memfd_a_file_is_used_and_its_name_is_gone_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(shared_memory, "FALLBACK_DIRECTORY", tmp_path)
    segment = make_segment()
    assert list(tmp_path.iterdir()) == []
    fill(segment.labels, [3], np.random.default_rng(0), seal=True)
    assert attach_again(segment).labels.num_in(SlotState.SEALED) == 1


def test_no_process_can_take_pages_away_under_a_mapping() -> None:
    descriptor = make_memory("test", SHAPE.size_bytes)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_memory_that_a_living_process_uses_is_refused() -> None:
    segment = make_segment()
    found = in_a_fork(HostSegment, segment.descriptor, SHAPE, "attached")
    assert isinstance(found, PlanMismatchError)
    assert str(found).startswith("the host segment is another living process's (")


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="a block has 300 parts, host slots have at most 224"):
        replace(SHAPE, widths=(1,) * 300)
    assert isinstance(SHAPE, SegmentShape)
    assert isinstance(make_segment(), HostSegment)


def mapped_bytes(segment: HostSegment) -> int:
    """How much of a segment this process has mapped so far, by the kernel's account."""
    start = f"{segment.memory.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in lines)
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def test_all_memory_is_mapped_in_the_background_and_keeps_its_bytes() -> None:
    segment = make_segment(replace(SHAPE, num_slots=100_000))
    assert segment.shape.size_bytes % SLICE_BYTES
    segment.tensors[0][::1000] = 3
    before = mapped_bytes(segment)
    touch = FirstTouch(segment.memory)
    assert touch.wait(60)
    assert before < touch.num_bytes == mapped_bytes(segment) == segment.shape.size_bytes
    assert np.flatnonzero(segment.tensors[0].any(axis=1)).tolist() == list(range(0, 100_000, 1000))


def test_a_closed_segment_is_mapped_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = make_segment(replace(SHAPE, num_slots=100_000))
    may_map, map_slice = Event(), first_touch.map_slice

    def map_later(address: int, length: int) -> bool:
        assert may_map.wait(60)
        return map_slice(address, length)

    monkeypatch.setattr(first_touch, "map_slice", map_later)
    touch = FirstTouch(segment.memory)
    touch.end_soon()
    may_map.set()
    touch.close()
    assert touch.num_bytes <= SLICE_BYTES < segment.shape.size_bytes
