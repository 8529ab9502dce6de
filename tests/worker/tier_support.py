"""Segments, labels, files and faults for the tests of the tiers below the device."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.offload.keys import label_keys
from kvcache.protocol.commands import Label
from kvcache.requests.request import Namespace
from kvcache.requests.request_content import namespace_name
from kvcache.worker.copies.checksums import checksum_of
from kvcache.worker.files.file_pool import FilePool
from kvcache.worker.files.format import FileHead, labels_of_heads
from kvcache.worker.files.system import Buffers, DirectoryFiles
from kvcache.worker.host_memory.segment import HostSegment, SegmentShape
from kvcache.worker.host_memory.shared_memory import make_memory

DIGEST_BYTES = 4
BLOCK_TOKENS = 4
PLAIN = namespace_name(Namespace(0, None, None, None))

SHAPE = SegmentShape(
    layout_fingerprint="layout",
    rank=1,
    num_slots=6,
    widths=(64, 32),
    digest_bytes=DIGEST_BYTES,
    max_block_tokens=BLOCK_TOKENS,
)


def make_segment(shape: SegmentShape = SHAPE) -> HostSegment:
    return HostSegment(make_memory("test", shape.size_bytes), shape)


def attach_again(segment: HostSegment, shape: SegmentShape = SHAPE) -> HostSegment:
    return HostSegment(os.dup(segment.descriptor), shape, "attached")


def random_labels(
    rng: np.random.Generator, block_ids: Sequence[int], *, longest_names: int = 300
) -> Label:
    """Labels as a coordinator sends them: few namespaces, extra keys for some."""
    count = len(block_ids)
    names = [PLAIN] + [
        namespace_name(Namespace(2, None, "s" * int(rng.integers(1, longest_names)), "t"))
        for _ in range(2)
    ]
    counts = int32_array(rng.integers(0, BLOCK_TOKENS + 1, count))
    return Label(
        block_ids=int32_array(list(block_ids)),
        groups=int32_array(rng.integers(0, 3, count)),
        slots=int32_array([-1] * count),
        digests=rng.bytes(count * DIGEST_BYTES),
        parent_digests=rng.bytes(count * DIGEST_BYTES),
        token_counts=counts,
        token_ids=int32_array(rng.integers(0, 2**31, int(counts.sum()))),
        namespaces=int32_array(rng.integers(0, len(names), count)),
        namespace_names=tuple(names),
        extra_keys={
            i: rng.bytes(int(rng.integers(1, longest_names)))
            for i in range(count)
            if rng.random() < 0.3
        },
    )


def label_views(label: Label, digest_bytes: int = DIGEST_BYTES) -> list[tuple[object, ...]]:
    """The content of each block's label, computed by hand."""
    found: list[tuple[object, ...]] = []
    start = 0
    for i in range(len(label.block_ids)):
        end = start + int(label.token_counts[i])
        part = slice(i * digest_bytes, (i + 1) * digest_bytes)
        found.append(
            (
                int(label.groups[i]),
                label.digests[part],
                label.parent_digests[part],
                label.token_ids[start:end].tolist(),
                label.namespace_names[int(label.namespaces[i])],
                label.extra_keys.get(i, b""),
            )
        )
        start = end
    return found


def random_head(rng: np.random.Generator, payload: bytes) -> FileHead:
    label = random_labels(rng, [0])
    return FileHead(
        key=label_keys(label)[0],
        digest=label.digests,
        group=int(label.groups[0]),
        layout_fingerprint=SHAPE.layout_fingerprint,
        rank=SHAPE.rank,
        namespace=label.namespace_names[int(label.namespaces[0])],
        parent_digest=label.parent_digests,
        token_bytes=label.token_ids.astype("<i4").tobytes(),
        extra_keys=label.extra_keys.get(0, b""),
        block_bytes=len(payload),
        checksum=checksum_of([memoryview(payload)]),
    )


def fill(segment: HostSegment, payloads: Mapping[int, bytes]) -> None:
    """Seal these slots, and leave slot 1 half-written."""
    rng = np.random.default_rng(0)
    slots = int32_array(list(payloads))
    begun = segment.labels.begin(slots)
    heads = [random_head(rng, payload) for payload in payloads.values()]
    segment.labels.describe(slots, labels_of_heads(heads))
    for slot, payload in payloads.items():
        first, second = segment.slot_views(slot)
        first[:], second[:] = payload[:64], payload[64:]
    checksums = np.array([head.checksum for head in heads], dtype=np.int64)
    segment.labels.finish(slots, begun, checksums)
    segment.labels.seal(slots)
    segment.labels.begin(int32_array([1]))


@dataclass
class Faults:
    """Faults of a disk. Counters go down; below 0 nothing happens.

    `full_after` bytes may still be written; every call named in `failing` fails with its errno;
    `short` makes reads and writes partial, by chance.
    """

    full_after: int = -1
    failing: dict[str, int] = field(default_factory=dict)
    short: random.Random | None = None

    def cure(self) -> None:
        self.full_after, self.short = -1, None
        self.failing.clear()


class FaultyFiles(DirectoryFiles):
    """A directory on a disk with faults. Counts the open descriptors."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        super().__init__(self._fd)
        self.faults = Faults()
        self.open_descriptors: set[int] = set()

    def create(self, name: str) -> int:
        self._fail("create")
        descriptor = super().create(name)
        self.open_descriptors.add(descriptor)
        return descriptor

    def open(self, name: str) -> int:
        self._fail("open")
        descriptor = super().open(name)
        self.open_descriptors.add(descriptor)
        return descriptor

    def write(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        self._fail("write")
        data = b"".join(bytes(buffer) for buffer in buffers)
        if self.faults.short is not None:
            data = data[: self.faults.short.randint(1, len(data))]
        if self.faults.full_after >= 0:
            data = data[: self.faults.full_after]
            if not data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.faults.full_after -= len(data)
        return super().write(descriptor, [data], offset)

    def read(self, descriptor: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._fail("read")
        if self.faults.short is not None:
            first = memoryview(buffers[0])
            return super().read(
                descriptor, [first[: self.faults.short.randint(1, len(first))]], offset
            )
        return super().read(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        self._fail("sync")
        super().sync(descriptor)

    def sync_directory(self, name: str) -> None:
        self._fail("sync_directory")
        super().sync_directory(name)

    def close(self, descriptor: int) -> None:
        self.open_descriptors.discard(descriptor)
        super().close(descriptor)
        self._fail("close")

    def rename(self, name: str, new_name: str) -> None:
        self._fail("rename")
        super().rename(name, new_name)

    def remove(self, name: str) -> None:
        self._fail("remove")
        super().remove(name)

    def names_in(self, directory: str) -> list[str]:
        self._fail("names_in")
        return super().names_in(directory)

    def _fail(self, call: str) -> None:
        if call in self.faults.failing:
            number = self.faults.failing[call]
            raise OSError(number, os.strerror(number))


def files_below(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def wait_for_files(pool: FilePool, timeout_s: float) -> bool:
    """Wait until the lanes have done all work submitted so far; say whether they did in time."""
    lanes = pool._lanes
    done = [threading.Event() for _ in range(lanes.num_lanes)]
    for lane, event in enumerate(done):
        lanes.put(lane, event.set)
    return all(event.wait(timeout_s) for event in done)


def is_scanning(pool: FilePool) -> bool:
    """Say whether `take_scanned` will have more to return than it has now."""
    return bool(pool._to_scan or pool._num_scanning)
