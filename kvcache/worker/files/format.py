"""The format of a block's file, and the errors that a file can have.

Integers are little endian. The checksum of the head covers everything before the payload; the head
has the payload's checksum. So a torn, damaged or foreign file is recognised without other
information, and reported as a `FileTierError` with the kind of problem.

    | magic, version | head bytes | payload bytes | CRC-32C | head (msgpack) | payload ........
    0                8            12              20        24               24 + head bytes
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal, TypeAlias

import google_crc32c
import msgpack
import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import ConfigurationError, KVCacheError
from kvcache.protocol.commands import Label
from kvcache.worker.host_memory.segment import SegmentShape

Problem: TypeAlias = Literal[
    "missing",  # no such file
    "truncated",  # shorter than it says
    "damaged",  # wrong checksum, or invalid content
    "foreign",  # another layout, rank or size of blocks
    "wrong_key",  # another block's file under this name
    "version",  # another format
    "quota",  # the tier's own limit
    "no_space",  # the disk is full
    "denied",  # permissions, or a read-only disk
    "unplugged",  # the directory is gone
    "backlog",  # too many blocks wait
    "io",  # any other error of the system
]

SET_ASIDE: frozenset[Problem] = frozenset(
    ("truncated", "damaged", "foreign", "wrong_key", "version")
)
"""Files with these problems are set aside, for a person to inspect."""

LOST = SET_ASIDE | frozenset[Problem](("missing",))
"""After these problems the file can never be read; after others, perhaps later."""


class FileTierError(KVCacheError):
    """A block that cannot be written to, or read from, its file. Other blocks are not affected."""

    def __init__(self, kind: Problem, message: str) -> None:
        """Describe the problem; `kind` is for counting."""
        super().__init__(message)
        self.kind: Problem = kind


_KINDS: dict[int, Problem] = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.ENOENT: "unplugged",
    errno.ENODEV: "unplugged",
    errno.ENXIO: "unplugged",
    errno.ENOTCONN: "unplugged",
    errno.ESTALE: "unplugged",
}

_REMEDIES: dict[Problem, str] = {
    "no_space": "free space on the disk, or lower the tier's size",
    "denied": "let the workers' user write there",
    "unplugged": "bring the directory back, and restart the workers",
}


def from_os_error(what: str, error: OSError) -> FileTierError:
    """Return the error for a failed system call; `what` describes the operation."""
    kind = _KINDS.get(error.errno or 0, "io")
    remedy = _REMEDIES.get(kind, "look at the disk")
    return FileTierError(kind, f"{what}: {error.strerror or error}: {remedy}")


FILE_MAGIC = b"kvcb"
FORMAT_VERSION = 1
"""Version of each file, and of a directory in its `about`.

If you raise it, ranks refuse the directories that exist: a launch fails until an operator removes
them or chooses another root. To keep old files, leave the version in `about` as it is, and let
`head_bytes` and `unpack_head` read both versions of a file.
"""
START_BYTES = 24
MAX_HEAD_BYTES = 1 << 20
_FIXED_HEAD_BYTES = 512
"""Limit of a head without tokens: three digests, two fingerprints, a namespace, numbers."""

_START = struct.Struct("<4sIIQI")


@dataclass(frozen=True)
class FileHead:
    """A file's description of its block. `token_bytes` are int32; `checksum` covers the payload, as
    in host slots; `block_bytes` is the payload's length."""

    key: bytes
    digest: bytes
    group: int
    layout_fingerprint: str
    rank: int
    namespace: bytes
    parent_digest: bytes
    token_bytes: bytes
    extra_keys: bytes
    block_bytes: int
    checksum: int

    @property
    def token_ids(self) -> Int32Array:
        """The block's tokens."""
        return int32_array(np.frombuffer(self.token_bytes, "<i4"))


_FIELD_TYPES = [{"bytes": bytes, "int": int, "str": str}[str(f.type)] for f in fields(FileHead)]


def files_bound(payload_bytes: int, num_files: int, block_size: int) -> int:
    """Return the maximum length of `num_files` files of `payload_bytes`, including heads.

    A head has fixed parts, the block's tokens and its namespace and extra keys; with small blocks
    it is a quarter of the file or more. An eighth is added, for files set aside and for extra keys.
    """
    head_bytes = _FIXED_HEAD_BYTES + 4 * block_size
    return payload_bytes + payload_bytes // 8 + num_files * head_bytes


def pack_head(head: FileHead) -> bytes:
    """Return the part of a file before its payload.

    Raises ConfigurationError for a head that could not be read again.
    """
    packed: bytes = msgpack.packb(astuple(head))
    if len(packed) > MAX_HEAD_BYTES:
        raise ConfigurationError(
            f"a block with a head of {len(packed)} bytes, files have at most {MAX_HEAD_BYTES}"
        )
    start = _START.pack(FILE_MAGIC, FORMAT_VERSION, len(packed), head.block_bytes, 0)
    return start[:-4] + struct.pack("<I", google_crc32c.value(start[:-4] + packed)) + packed


def head_bytes(start: bytes) -> int:
    """Return the length of the head after the first `START_BYTES`; raises FileTierError."""
    if len(start) < START_BYTES:
        raise FileTierError("truncated", f"the file ends after {len(start)} bytes")
    magic, version, size, _, _ = _START.unpack_from(start)
    if magic != FILE_MAGIC:
        raise FileTierError("damaged", f"it begins with {magic!r}, no block of this cache")
    if version != FORMAT_VERSION:
        raise FileTierError(
            "version", f"it has format version {version}, this package reads {FORMAT_VERSION}"
        )
    if not 0 < size <= MAX_HEAD_BYTES:
        raise FileTierError("damaged", f"it announces a head of {size} bytes")
    return int(size)


def unpack_head(data: bytes, file_bytes: int) -> FileHead:
    """Return the head at the start of `data`, of a file of `file_bytes`.

    Raises FileTierError.
    """
    end = START_BYTES + head_bytes(data)
    _, _, _, payload_bytes, crc = _START.unpack_from(data)
    if len(data) < end:
        raise FileTierError("truncated", f"the file ends within its head, at byte {len(data)}")
    if google_crc32c.value(data[: START_BYTES - 4] + data[START_BYTES:end]) != crc:
        raise FileTierError("damaged", "the checksum of its head is wrong")
    try:
        values = msgpack.unpackb(data[START_BYTES:end])
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FileTierError("damaged", f"its head cannot be read: {error}") from error
    if type(values) is not list or [type(value) for value in values] != _FIELD_TYPES:
        raise FileTierError("damaged", "its head has other fields")
    head = FileHead(*values)
    is_in_range = 0 <= head.group < 1 << 31 and 0 <= head.checksum < 1 << 63
    if payload_bytes != head.block_bytes or len(head.token_bytes) % 4 or not is_in_range:
        raise FileTierError("damaged", "its head contradicts itself")
    if file_bytes != end + payload_bytes:
        kind: Problem = "truncated" if file_bytes < end + payload_bytes else "damaged"
        raise FileTierError(
            kind, f"the file has {file_bytes} bytes, its head says {end + payload_bytes}"
        )
    return head


def labels_of_heads(heads: Sequence[FileHead]) -> Label:
    """Return the heads as labels; `block_ids` are indices of `heads`, owners' slots are -1."""
    names: dict[bytes, int] = {}
    tokens = [head.token_ids for head in heads]
    return Label(
        block_ids=int32_array(range(len(heads))),
        groups=int32_array([head.group for head in heads]),
        slots=np.full(len(heads), -1, dtype=np.int32),
        digests=b"".join(head.digest for head in heads),
        parent_digests=b"".join(head.parent_digest for head in heads),
        token_counts=int32_array([len(ids) for ids in tokens]),
        token_ids=np.concatenate(tokens) if tokens else int32_array([]),
        namespaces=int32_array([names.setdefault(h.namespace, len(names)) for h in heads]),
        namespace_names=tuple(names),
        extra_keys={i: head.extra_keys for i, head in enumerate(heads) if head.extra_keys},
    )


def heads_of_labels(
    labels: Label, keys: Sequence[bytes], checksums: Sequence[int], shape: SegmentShape
) -> list[FileHead]:
    """Return the head of each label's file: `keys[i]` and `checksums[i]` belong to label `i`."""
    size = shape.digest_bytes
    ends = np.cumsum(labels.token_counts).tolist()
    heads = []
    for i, key in enumerate(keys):
        start = ends[i] - int(labels.token_counts[i])
        heads.append(
            FileHead(
                key=key,
                digest=labels.digests[i * size : (i + 1) * size],
                group=int(labels.groups[i]),
                layout_fingerprint=shape.layout_fingerprint,
                rank=shape.rank,
                namespace=labels.namespace_names[int(labels.namespaces[i])],
                parent_digest=labels.parent_digests[i * size : (i + 1) * size],
                token_bytes=labels.token_ids[start : ends[i]].astype("<i4").tobytes(),
                extra_keys=labels.extra_keys.get(i, b""),
                block_bytes=shape.slot_bytes,
                checksum=int(checksums[i]),
            )
        )
    return heads
