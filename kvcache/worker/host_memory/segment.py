"""One rank's host memory: a segment with slots of bytes and their labels.

The head describes the segment, so a process that attaches to the memory of an earlier one never
uses bytes of another layout. Memory that does not match exactly is refused.

    | head | rows of labels | cells of labels | slots of tensor 0 | slots of tensor 1 | ...
    0      4096             each part begins at a whole page

`open_segment` asks the memory service of the node. If the service has a segment that this rank
cannot use, the service drops it first, to free its memory; then the rank makes a new, cold one, and
says why. Without a memory service the segment is private, and ends with the process. A missing
memory service is not an error; too little memory is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import google_crc32c
import numpy as np

from kvcache.base.arrays import ByteArray
from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    ExhaustedError,
    PlanMismatchError,
    ProtocolError,
)
from kvcache.base.logs import get_logger
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.offload.keys import GROUP_BYTES
from kvcache.specs import require_count
from kvcache.worker.host_memory.labels import CELL_BYTES, HostLabels, row_type
from kvcache.worker.host_memory.shared_memory import SYSTEM_ROOT, make_memory

logger = get_logger(__name__)

SEGMENT_MAGIC = b"kvc-host"
SEGMENT_VERSION = 1
PAGE_BYTES = 4096
HEAD_BYTES = PAGE_BYTES
SPARE_CELLS = 64

UNKNOWN_MODEL_EPOCH = -1
"""The model epoch of a new segment, until a reset sets one."""


_HEAD = struct.Struct("<8sII64sqqqqqqI")
"""Magic, version, rank, layout fingerprint, number of slots, bytes of a slot, number of tensors,
digest bytes, tokens of a label, total bytes, and a checksum over them and the tensors' widths."""

_CRC = struct.Struct("<I")
_MODEL_EPOCH_OFFSET = 2048
_WIDTHS_OFFSET = 256
MAX_TENSORS = (_MODEL_EPOCH_OFFSET - _WIDTHS_OFFSET) // 8


@dataclass(frozen=True)
class SegmentShape:
    """The required shape of a rank's slots, and so of its segment and files.

    `widths[i]` is the bytes of a slot in tensor `i`.
    """

    layout_fingerprint: str
    rank: int
    num_slots: int
    widths: tuple[int, ...]
    digest_bytes: int
    max_block_tokens: int

    def __post_init__(self) -> None:
        require_count("num_slots", self.num_slots)
        require_count("rank", self.rank, at_least=0)
        if len(self.layout_fingerprint.encode()) > 64:
            raise ConfigurationError(
                f"layout fingerprint {self.layout_fingerprint!r} is longer than 64 bytes"
            )
        if len(self.widths) > MAX_TENSORS:
            raise ConfigurationError(
                f"a block has {len(self.widths)} parts, host slots have at most {MAX_TENSORS}: "
                "use the block_first layout"
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all tensors."""
        return sum(self.widths)

    @property
    def key_bytes(self) -> int:
        """Bytes of a block's key: a digest and a group."""
        return self.digest_bytes + GROUP_BYTES

    @property
    def rows_bytes(self) -> int:
        return self.num_slots * row_type(self.digest_bytes, self.max_block_tokens).itemsize

    @property
    def cells_bytes(self) -> int:
        """Bytes of the labels' cells: one per slot, and some in reserve."""
        return (self.num_slots + SPARE_CELLS) * CELL_BYTES

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of rows, cells and each tensor, and the end."""
        places = [HEAD_BYTES]
        sizes = (self.rows_bytes, self.cells_bytes, *(self.num_slots * w for w in self.widths))
        for size in sizes:
            places.append(places[-1] + -(-size // PAGE_BYTES) * PAGE_BYTES)
        return tuple(places)

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1]

    def head(self) -> bytes:
        """Return the encoded shape with a checksum."""
        head = _HEAD.pack(
            SEGMENT_MAGIC,
            SEGMENT_VERSION,
            self.rank,
            self.layout_fingerprint.encode(),
            self.num_slots,
            self.slot_bytes,
            len(self.widths),
            self.digest_bytes,
            self.max_block_tokens,
            self.size_bytes,
            0,
        )
        widths = np.array(self.widths, dtype="<i8").tobytes()
        crc: int = google_crc32c.value(head + widths)
        return (head[:-4] + _CRC.pack(crc)).ljust(_WIDTHS_OFFSET, b"\0") + widths


def shape_in(head: bytes) -> SegmentShape:
    """Return the shape that a segment's first `HEAD_BYTES` describe; raises PlanMismatchError."""
    magic, version, *told = _HEAD.unpack_from(head)
    if magic != SEGMENT_MAGIC:
        raise PlanMismatchError("the memory holds no host segment")
    if version != SEGMENT_VERSION:
        raise PlanMismatchError(
            f"the host segment has version {version}, this package reads {SEGMENT_VERSION}"
        )
    rank, fingerprint, num_slots, _, num_tensors, digest_bytes, max_block_tokens, _, crc = told
    widths = head[_WIDTHS_OFFSET : _WIDTHS_OFFSET + 8 * max(0, min(num_tensors, MAX_TENSORS))]
    if crc == google_crc32c.value(head[: _HEAD.size - _CRC.size] + bytes(_CRC.size) + widths):
        shape = SegmentShape(
            fingerprint.rstrip(b"\0").decode(),
            rank,
            num_slots,
            tuple(np.frombuffer(widths, "<i8").tolist()),
            digest_bytes,
            max_block_tokens,
        )
        if head.startswith(shape.head()):
            return shape
    raise PlanMismatchError("the head of the host segment is damaged")


class HostSegment:
    """One rank's mapped segment: `memory` is all of its bytes, head and labels too, and
    `tensors[i]` a view `(num_slots, widths[i])` uint8 of it.

    `origin` says where it comes from. Only one process uses it at a time. The segment owns the
    `descriptor`, which another process can map, until `close`, or until it is dropped.
    """

    def __init__(self, descriptor: int, shape: SegmentShape, origin: str = "fresh") -> None:
        """Map `descriptor`, whose memory is new (all zero) or the segment of an earlier process.

        Takes ownership of the descriptor, unless it raises.

        Raises:
            PlanMismatchError: the memory has another shape, or is in use by another process; the
                message says which. Nothing was changed.
        """
        _take_for_this_process(descriptor)
        size = os.fstat(descriptor).st_size
        if size != shape.size_bytes:
            raise PlanMismatchError(
                f"a host segment of {size} bytes is there, rank {shape.rank} needs "
                f"{shape.size_bytes}"
            )
        memory = mmap.mmap(descriptor, size)
        found = memory[:HEAD_BYTES]
        if any(found):
            _require_same(shape_in(found), shape)
        self.shape = shape
        self.origin = origin
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._lending = threading.Lock()
        self._num_lent = 0
        self._is_closed = False
        self.memory: ByteArray = np.frombuffer(memory, np.uint8)
        self._model_epoch = self._part(_MODEL_EPOCH_OFFSET, 8).view("<i8")
        offsets = shape.offsets
        self.labels = HostLabels(
            self._part(offsets[0], shape.rows_bytes),
            self._part(offsets[1], shape.cells_bytes),
            digest_bytes=shape.digest_bytes,
            max_block_tokens=shape.max_block_tokens,
        )
        self.tensors = tuple(
            self._part(offset, shape.num_slots * width).reshape(shape.num_slots, width)
            for offset, width in zip(offsets[2:], shape.widths, strict=False)
        )
        if not any(found):
            self.model_epoch = UNKNOWN_MODEL_EPOCH
            head = shape.head()
            memory[: len(head)] = head

    @property
    def model_epoch(self) -> int:
        """The model epoch of the last reset, `UNKNOWN_MODEL_EPOCH` before the first."""
        return int(self._model_epoch[0])

    @model_epoch.setter
    def model_epoch(self, model_epoch: int) -> None:
        self._model_epoch[0] = model_epoch

    def reset(self, model_epoch: int) -> None:
        """Record a reset: contents of an earlier model epoch are forgotten."""
        if model_epoch > self.model_epoch != UNKNOWN_MODEL_EPOCH:
            self.labels.withdraw_all()
        self.model_epoch = model_epoch

    def slot_views(self, slot: int) -> list[memoryview]:
        """Return the bytes of one slot, a writable view for each tensor with bytes."""
        return [memoryview(tensor[slot]) for tensor in self.tensors if tensor.shape[1]]

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return not self._is_closed

    @contextmanager
    def lend(self) -> Iterator[int | None]:
        """Give the descriptor, in any thread: it stays open meanwhile. None if it is closed.

        Lend it, never duplicate it: when any copy is closed, the kernel takes this process's lock
        from the memory.
        """
        with self._lending:
            self._num_lent += 1
            is_open = self.is_open
        try:
            yield self.descriptor if is_open else None
        finally:
            with self._lending:
                self._num_lent -= 1
                self._close_if_idle()

    def close(self) -> None:
        """Close the descriptor, when it is lent no more. The mapping ends with its last view."""
        with self._lending:
            self._is_closed = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_closed and not self._num_lent:
            self._close()

    def _part(self, offset: int, num_bytes: int) -> ByteArray:
        return self.memory[offset : offset + num_bytes]


def _take_for_this_process(descriptor: int) -> None:
    """Lock the memory for this process; the lock ends with it, and children do not inherit it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise PlanMismatchError(
            f"the host segment is another living process's ({error.strerror})"
        ) from error


def _require_same(found: SegmentShape, needed: SegmentShape) -> None:
    """Raise PlanMismatchError with the first difference between two shapes."""
    for name, value in asdict(found).items():
        if value != getattr(needed, name):
            raise PlanMismatchError(
                f"the host segment has {name.replace('_', ' ')} {value}, rank {needed.rank} needs "
                f"{getattr(needed, name)}"
            )


ATTACHED = "attached"
FRESH = "fresh"
PRIVATE = "private"

_MEMORY_SERVICE_ERRORS = (ClusterError, ProtocolError, ExhaustedError)


def open_segment(shape: SegmentShape, service: MemoryServiceAddress | None = None) -> HostSegment:
    """Return the rank's segment; its `origin` says where it comes from.

    `attached`: an earlier process's memory, with its sealed slots. `fresh`: new, and kept by the
    memory service; followed by a reason if it could not attach. `private`: the memory service does
    not keep it.

    Raises NotEnoughMemoryError.
    """
    if service is None:
        return _make(shape, f"{PRIVATE}: no memory service is configured")
    client = MemoryServiceClient(service.address, service.timeout_s)
    name = service.name_of(shape.rank)
    origin = FRESH
    try:
        descriptor = client.attach(name)
        if descriptor is not None:
            try:
                return HostSegment(descriptor, shape, ATTACHED)
            except PlanMismatchError as error:
                os.close(descriptor)
                origin = f"{FRESH}: {error}"
                logger.warning("rank %d starts with cold host memory: %s", shape.rank, error)
                client.drop(name)
    except _MEMORY_SERVICE_ERRORS as error:
        return _private(shape, error)
    segment = _make(shape, origin)
    reason = keep_segment(segment, service)
    if reason:
        segment.origin = f"{PRIVATE}: {reason}"
    return segment


def keep_segment(segment: HostSegment, service: MemoryServiceAddress) -> str:
    """Pass a segment to the memory service, unless it is closed; return why that failed, empty on
    success.

    Repeatable, from any thread: a restarted memory service has nothing.
    """
    rank = segment.shape.rank
    client = MemoryServiceClient(service.address, service.timeout_s)
    try:
        with segment.lend() as descriptor:
            if descriptor is not None:
                client.put(service.name_of(rank), descriptor)
    except _MEMORY_SERVICE_ERRORS as error:
        logger.warning("host memory of rank %d ends with its process: %s", rank, error)
        return str(error)
    if segment.origin.startswith(PRIVATE):
        segment.origin = FRESH
    return ""


def _private(shape: SegmentShape, error: Exception) -> HostSegment:
    logger.warning("host memory of rank %d ends with its process: %s", shape.rank, error)
    return _make(shape, f"{PRIVATE}: {error}")


def _make(shape: SegmentShape, origin: str) -> HostSegment:
    descriptor = make_memory(f"kvcache-rank{shape.rank}", shape.size_bytes, SYSTEM_ROOT)
    return HostSegment(descriptor, shape, origin)
