"""Labels: a worker's description of each of its blocks. The truth is where the bytes are.

Only commands change labels, in sequence with the bytes: the old label is dropped before the first
write, the new one is written after the last. `LabelTable` holds a worker's labels; `LabelSet` is
the copy that it sends when a coordinator asks. Numpy only, no device memory. Never guesses: an
unknown version or a wrong size is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import cbor2
import numpy as np
from numba import types

from kvcache.base.arrays import (
    BoolArray,
    ByteArray,
    IndexArray,
    Int32Array,
    Int64Array,
    are_below,
    are_distinct,
    are_ids,
    int32_array,
)
from kvcache.base.compiled import array_type, compiled
from kvcache.base.errors import (
    BlockError,
    InvariantError,
    MalformedMessageError,
    VersionMismatchError,
)
from kvcache.protocol.commands import Label
from kvcache.requests.hash_algorithms import ExtraKeys, canonical_cbor

GROUP, SLOT, NAMESPACE, TOKEN_COUNT = range(4)
"""Numbers per label."""
NUM_PER_LABEL = 4

_MOST_COMPARED = 64
"""Up to this many unsorted ids, each is compared with each."""

_READ = array_type("int32", is_read=True)
_READ_BYTES = array_type("uint8", is_read=True)


@compiled(types.boolean(_READ, _READ, _READ, types.intp, types.intp, types.intp, types.intp))
def are_sound(  # noqa: PLR0917 - the columns, and the bounds of each
    block_ids: Int32Array,
    token_counts: Int32Array,
    namespaces: Int32Array,
    num_tokens: int,
    num_names: int,
    num_blocks: int,
    max_block_tokens: int,
) -> bool:
    """Return whether blocks are in `[1, num_blocks)` and different, with `num_tokens` in all, as
    many as a block may have, and with namespaces that exist. False: check in detail."""
    count, total = len(block_ids), 0
    if len(token_counts) != count or len(namespaces) != count:
        return False
    is_rising = True
    for i in range(count):
        block_id, num_of_block = block_ids[i], token_counts[i]
        if not (0 < block_id < num_blocks and 0 <= num_of_block <= max_block_tokens):
            return False
        if not 0 <= namespaces[i] < num_names:
            return False
        total += num_of_block
        is_rising &= i == 0 or block_ids[i - 1] < block_id
    if not is_rising:
        if count > _MOST_COMPARED:
            return False
        for i in range(count):
            for k in range(i):
                if block_ids[k] == block_ids[i]:
                    return False
    return bool(total == num_tokens)


@compiled(
    types.void(
        array_type("int32", 2),
        array_type("uint8", 2),
        array_type("uint8", 2),
        array_type("int32", 2),
        array_type("int64"),
        _READ,
        _READ,
        _READ,
        _READ_BYTES,
        _READ_BYTES,
        _READ,
        _READ,
        _READ,
        _READ,
    )
)
def write_labels(  # noqa: PLR0917 - the columns of a table, and those of a label
    numbers: Int32Array,
    digests: ByteArray,
    parents: ByteArray,
    tokens: Int32Array,
    checksums: Int64Array,
    block_ids: Int32Array,
    groups: Int32Array,
    slots: Int32Array,
    new_digests: ByteArray,
    new_parents: ByteArray,
    token_counts: Int32Array,
    token_ids: Int32Array,
    namespaces: Int32Array,
    namespace_numbers: Int32Array,
) -> None:
    """Write labels whose columns were checked; their checksums are unknown.

    `namespace_numbers` are the table's numbers of the names that `namespaces` index.
    """
    size, start = digests.shape[1], 0
    for i in range(len(block_ids)):
        block_id, count = block_ids[i], token_counts[i]
        numbers[GROUP, block_id] = groups[i]
        numbers[SLOT, block_id] = slots[i]
        numbers[NAMESPACE, block_id] = namespace_numbers[namespaces[i]]
        numbers[TOKEN_COUNT, block_id] = count
        checksums[block_id] = -1
        for k in range(size):
            digests[block_id, k] = new_digests[i * size + k]
            parents[block_id, k] = new_parents[i * size + k]
        for k in range(count):
            tokens[block_id, k] = token_ids[start + k]
        start += count


LABEL_VERSION = 1
UNLABELLED = -1

MIN_FORGOTTEN_NAMESPACES = 1024
"""Names are dropped when there are this many more than blocks."""


@dataclass(frozen=True)
class BlockLabel:
    """One block's label, unpacked: its content according to the command that sealed it."""

    block_id: int
    group: int
    slot: int
    digest: bytes
    parent_digest: bytes
    token_ids: tuple[int, ...]
    namespace: bytes
    extra_keys: bytes
    is_sealed: bool = True
    checksum: int | None = None


@dataclass(frozen=True, eq=False)
class LabelSet:
    """All labels of one rank, packed. Shapes as in `commands.Label`; `checksums` is `(n,)` int64,
    -1 if unknown. `layout_fingerprint` identifies the layout of the labelled bytes."""

    version: int
    rank: int
    epoch: int
    applied_seq: int
    layout_fingerprint: str
    digest_bytes: int
    labels: Label
    checksums: bytes

    def __post_init__(self) -> None:
        if self.version != LABEL_VERSION:
            raise VersionMismatchError(
                f"labels of rank {self.rank} have version {self.version}, this package reads "
                f"version {LABEL_VERSION}: run the same release everywhere"
            )
        validate_label_command(self.labels, self.digest_bytes)
        if len(self.checksums) != 8 * len(self.labels.block_ids):
            raise MalformedMessageError(
                f"labels of rank {self.rank}: {len(self.checksums)} checksum bytes for "
                f"{len(self.labels.block_ids)} blocks, expected 8 each"
            )

    def __iter__(self) -> Iterator[BlockLabel]:
        """Yield the labels one by one, in order of block id. For tests, audits and rebuilds."""
        labels, size = self.labels, self.digest_bytes
        ends = np.cumsum(labels.token_counts)
        checksums = np.frombuffer(self.checksums, dtype="<i8")
        for i, block_id in enumerate(labels.block_ids.tolist()):
            start = int(ends[i]) - int(labels.token_counts[i])
            yield BlockLabel(
                block_id=block_id,
                group=int(labels.groups[i]),
                slot=int(labels.slots[i]),
                digest=labels.digests[i * size : (i + 1) * size],
                parent_digest=labels.parent_digests[i * size : (i + 1) * size],
                token_ids=tuple(labels.token_ids[start : int(ends[i])].tolist()),
                namespace=labels.namespace_names[int(labels.namespaces[i])],
                extra_keys=labels.extra_keys.get(i, b""),
                checksum=None if checksums[i] < 0 else int(checksums[i]),
            )


class LabelBounds(NamedTuple):
    """The number of blocks, including the null block, and the most tokens of one."""

    num_blocks: int = (1 << 31) - 1
    max_block_tokens: int = (1 << 31) - 1


_ANY_BLOCKS = LabelBounds()


def validate_label_command(
    label: Label, digest_bytes: int, bounds: LabelBounds = _ANY_BLOCKS
) -> bool:
    """Raise `MalformedMessageError` unless the arrays of `label` fit together. Changes nothing.

    Returns whether all of its blocks are known to be within `bounds`; False is not an error.
    """
    count = len(label.block_ids)
    if digest_bytes < 1:
        raise MalformedMessageError(f"label with digests of {digest_bytes} bytes")
    is_even = count == len(label.groups) == len(label.slots) == len(label.token_counts)
    if not (
        is_even
        and count == len(label.namespaces)
        and count * digest_bytes == len(label.digests) == len(label.parent_digests)
    ):
        raise _uneven(label, digest_bytes)
    if not label.extra_keys and are_sound(
        label.block_ids,
        label.token_counts,
        label.namespaces,
        len(label.token_ids),
        len(label.namespace_names),
        bounds.num_blocks,
        bounds.max_block_tokens,
    ):
        return True
    if np.count_nonzero(label.token_counts < 0):
        raise MalformedMessageError("label has a negative token count")
    num_tokens = int(np.add.reduce(label.token_counts, dtype=np.int64))
    if num_tokens != len(label.token_ids):
        raise MalformedMessageError(
            f"label announces {num_tokens} tokens and brings {len(label.token_ids)}"
        )
    if not are_below(label.namespaces, len(label.namespace_names)):
        raise MalformedMessageError("label names a namespace it does not bring")
    if label.extra_keys and any(not 0 <= index < count for index in label.extra_keys):
        raise MalformedMessageError(f"label of {count} blocks has extra keys for other ones")
    if not are_distinct(label.block_ids):
        raise MalformedMessageError("label names a block twice")
    return False


def _uneven(label: Label, digest_bytes: int) -> MalformedMessageError:
    count = len(label.block_ids)
    sizes = {
        "groups": len(label.groups),
        "slots": len(label.slots),
        "token_counts": len(label.token_counts),
        "namespaces": len(label.namespaces),
        "digests": len(label.digests) / digest_bytes,
        "parent_digests": len(label.parent_digests) / digest_bytes,
    }
    wrong = {name: size for name, size in sizes.items() if size != count}
    return MalformedMessageError(f"label of {count} blocks has arrays of other sizes: {wrong}")


def join_labels(parts: Sequence[Label]) -> Label:
    """Return one label command with the blocks of all `parts`, at least one."""
    if len(parts) == 1:
        return parts[0]
    names: dict[bytes, int] = {}
    namespaces: list[Int32Array] = []
    extra_keys: dict[int, bytes] = {}
    offset = 0
    for part in parts:
        places = [names.setdefault(name, len(names)) for name in part.namespace_names]
        namespaces.append(int32_array(places)[part.namespaces])
        extra_keys.update({offset + i: keys for i, keys in part.extra_keys.items()})
        offset += len(part.block_ids)
    return Label(
        block_ids=np.concatenate([part.block_ids for part in parts]),
        groups=np.concatenate([part.groups for part in parts]),
        slots=np.concatenate([part.slots for part in parts]),
        digests=b"".join([part.digests for part in parts]),
        parent_digests=b"".join([part.parent_digests for part in parts]),
        token_counts=np.concatenate([part.token_counts for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        namespaces=np.concatenate(namespaces),
        namespace_names=tuple(names),
        extra_keys=extra_keys,
    )


def label_rows(labels: Label, rows: IndexArray) -> Label:
    """Return some rows of labels, in this order; a copy. Each row may be named once."""
    count = len(labels.block_ids)
    if len(rows) == count and bool((rows == np.arange(count)).all()):
        return labels
    size = len(labels.digests) // count if count else 1
    digests = np.frombuffer(labels.digests, np.uint8).reshape(count, size)
    parents = np.frombuffer(labels.parent_digests, np.uint8).reshape(count, size)
    counts = labels.token_counts[rows]
    starts = (np.cumsum(labels.token_counts) - labels.token_counts)[rows]
    ends = np.cumsum(counts)
    tokens = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        starts - (ends - counts), counts
    )
    extra_keys = {}
    if labels.extra_keys:
        extra_keys = {
            place: labels.extra_keys[row]
            for place, row in enumerate(rows.tolist())
            if row in labels.extra_keys
        }
    return Label(
        block_ids=labels.block_ids[rows],
        groups=labels.groups[rows],
        slots=labels.slots[rows],
        digests=digests[rows].tobytes(),
        parent_digests=parents[rows].tobytes(),
        token_counts=counts,
        token_ids=labels.token_ids[tokens],
        namespaces=labels.namespaces[rows],
        namespace_names=labels.namespace_names,
        extra_keys=extra_keys,
    )


def join_label_sets(pieces: Sequence[LabelSet]) -> LabelSet:
    """Return the label set of one rank from its pieces, in order of blocks.

    Raises MalformedMessageError without pieces, or for pieces of different ranks or plans.
    """
    if not pieces:
        raise MalformedMessageError("no labels to join")
    first = pieces[0]
    if len(pieces) == 1:
        return first
    for piece in pieces:
        for name in ("rank", "epoch", "layout_fingerprint", "digest_bytes"):
            if getattr(piece, name) != getattr(first, name):
                raise MalformedMessageError(
                    f"labels of rank {first.rank}: {name} is {getattr(first, name)!r} in one piece "
                    f"and {getattr(piece, name)!r} in another"
                )
    joined = join_labels([piece.labels for piece in pieces])
    checksums = b"".join([piece.checksums for piece in pieces])
    return replace(first, labels=joined, checksums=checksums)


class LabelTable:
    """The labels of one rank's blocks, as arrays. Executes label commands; knows nothing of epochs.

    Invariant: `_group[b] == UNLABELLED` exactly when block `b` has no label, and then it has no
    extra keys. Not thread-safe: its worker serialises calls.
    """

    def __init__(self, num_blocks: int, digest_bytes: int, max_block_tokens: int) -> None:
        """Make an empty table. `max_block_tokens` is the largest block size of any group."""
        self._digest_bytes = digest_bytes
        self._max_block_tokens = max_block_tokens
        self._bounds = LabelBounds(num_blocks, max_block_tokens)
        # Values of a block without a label are meaningless.
        self._numbers = np.full((NUM_PER_LABEL, num_blocks), UNLABELLED, dtype=np.int32)
        self._group, self._slot = self._numbers[GROUP], self._numbers[SLOT]
        self._namespace = self._numbers[NAMESPACE]
        self._token_count = self._numbers[TOKEN_COUNT]
        self._digest = np.zeros((num_blocks, digest_bytes), dtype=np.uint8)
        self._parent = np.zeros((num_blocks, digest_bytes), dtype=np.uint8)
        self._tokens = np.zeros((num_blocks, max_block_tokens), dtype=np.int32)
        self._checksum = np.full(num_blocks, -1, dtype=np.int64)
        self._extra_keys: dict[int, bytes] = {}
        self._namespace_names: list[bytes] = []
        self._namespace_index: dict[bytes, int] = {}

    def __len__(self) -> int:
        return int(np.count_nonzero(self._group != UNLABELLED))

    def validate(self, label: Label) -> None:
        """Raise unless `label` can be applied. Changes nothing."""
        if validate_label_command(label, self._digest_bytes, self._bounds):
            return
        self._validate_ids(label.block_ids)
        if not are_below(label.token_counts, self._max_block_tokens + 1):
            raise BlockError(
                f"label for a block of {int(label.token_counts.max())} tokens, the largest block "
                f"here holds {self._max_block_tokens}"
            )

    def apply(self, label: Label) -> None:
        """Write labels that `validate` has accepted."""
        ids = label.block_ids
        if not len(ids):
            return
        if self._extra_keys:
            self._drop_extra_keys(ids)
        self._forget_unused_namespaces(ids)
        write_labels(
            self._numbers,
            self._digest,
            self._parent,
            self._tokens,
            self._checksum,
            ids,
            label.groups,
            label.slots,
            np.frombuffer(label.digests, np.uint8),
            np.frombuffer(label.parent_digests, np.uint8),
            label.token_counts,
            label.token_ids,
            label.namespaces,
            int32_array([self._intern(name) for name in label.namespace_names]),
        )
        for index, keys in label.extra_keys.items():
            self._extra_keys[int(ids[index])] = keys

    def withdraw(self, block_ids: Int32Array) -> None:
        """Drop the labels of `block_ids`; blocks without a label are left unchanged."""
        self._validate_ids(block_ids)
        self._group[block_ids] = UNLABELLED
        if self._extra_keys:
            self._drop_extra_keys(block_ids)

    def reset(self) -> None:
        """Drop every label."""
        self._group[:] = UNLABELLED
        self._extra_keys.clear()
        self._namespace_names.clear()
        self._namespace_index.clear()

    def is_labelled(self, block_id: int) -> bool:
        return bool(self._group[block_id] != UNLABELLED)

    def digest(self, block_id: int) -> bytes | None:
        return self._digest[block_id].tobytes() if self.is_labelled(block_id) else None

    @property
    def num_blocks(self) -> int:
        """Blocks of this rank, including the null block."""
        return len(self._group)

    @property
    def digest_bytes(self) -> int:
        return self._digest_bytes

    def contents(self, first_block: int, end_block: int) -> SealedContents:
        """Return which blocks of `[first_block, end_block)` have a label, and their digests."""
        ids = int32_array(np.flatnonzero(self._group[first_block:end_block] != UNLABELLED))
        ids += first_block
        return SealedContents(ids, self._group[ids], self._digest[ids].tobytes())

    @property
    def label_bytes(self) -> int:
        """Most bytes of one label, without its extra keys."""
        return 2 * self._digest_bytes + 4 * (self._max_block_tokens + 5) + 8

    def collect(
        self,
        rank: int,
        epoch: int,
        applied_seq: int,
        layout_fingerprint: str,
        *,
        first_block: int = 0,
        end_block: int | None = None,
    ) -> LabelSet:
        """Return the labels of blocks `[first_block, end_block)`, packed, by block id.

        A copy. Without an end: of all later blocks.
        """
        ids = int32_array(np.flatnonzero(self._group[first_block:end_block] != UNLABELLED))
        ids += first_block
        labels = self.labels_of(ids)
        return LabelSet(
            version=LABEL_VERSION,
            rank=rank,
            epoch=epoch,
            applied_seq=applied_seq,
            layout_fingerprint=layout_fingerprint,
            digest_bytes=self._digest_bytes,
            labels=labels,
            checksums=self._checksum[ids].astype("<i8").tobytes(),
        )

    def are_labelled(self, block_ids: Int32Array) -> BoolArray:
        """Return for each block whether it has a label; shape `(n,)`."""
        found: BoolArray = self._group[block_ids] != UNLABELLED
        return found

    def labels_of(self, block_ids: Int32Array) -> Label:
        """Return a copy of the labels of blocks, which all have one, in this order.

        A block may be named twice, and is then there twice: such a `Label` is not a command.
        """
        counts = self._token_count[block_ids]
        columns = np.arange(self._max_block_tokens)[None, :] < counts[:, None]
        used, namespaces = np.unique(self._namespace[block_ids], return_inverse=True)
        extra_keys = {}
        if self._extra_keys:
            extra_keys = {
                i: self._extra_keys[block_id]
                for i, block_id in enumerate(block_ids.tolist())
                if block_id in self._extra_keys
            }
        return Label(
            block_ids=block_ids,
            groups=self._group[block_ids],
            slots=self._slot[block_ids],
            digests=self._digest[block_ids].tobytes(),
            parent_digests=self._parent[block_ids].tobytes(),
            token_counts=counts,
            token_ids=self._tokens[block_ids][columns],
            namespaces=int32_array(namespaces),
            namespace_names=tuple(self._namespace_names[index] for index in used.tolist()),
            extra_keys=extra_keys,
        )

    def check(self) -> None:
        """Raise `InvariantError` if an unlabelled block has extra keys."""
        orphans = [b for b in self._extra_keys if self._group[b] == UNLABELLED]
        if orphans:
            raise InvariantError(f"blocks {orphans[:5]} have extra keys but no label")

    def _validate_ids(self, block_ids: Int32Array) -> None:
        if not are_ids(block_ids, len(self._group)):
            raise BlockError(
                f"label command for blocks {int(block_ids.min())}..{int(block_ids.max())}, this "
                f"rank has 1..{len(self._group) - 1}"
            )

    def _drop_extra_keys(self, block_ids: Int32Array) -> None:
        for block_id in block_ids.tolist():
            self._extra_keys.pop(block_id, None)

    def _forget_unused_namespaces(self, block_ids: Int32Array) -> None:
        """Drop names that no labelled block uses except these, if there are many of them."""
        if len(self._namespace_names) < len(self._group) + MIN_FORGOTTEN_NAMESPACES:
            return
        self._group[block_ids] = UNLABELLED
        is_labelled = self._group != UNLABELLED
        used, renumbered = np.unique(self._namespace[is_labelled], return_inverse=True)
        self._namespace[is_labelled] = renumbered
        self._namespace_names = [self._namespace_names[index] for index in used.tolist()]
        self._namespace_index = {name: i for i, name in enumerate(self._namespace_names)}

    def _intern(self, name: bytes) -> int:
        index = self._namespace_index.get(name)
        if index is None:
            index = self._namespace_index[name] = len(self._namespace_names)
            self._namespace_names.append(name)
        return index


def extra_keys_bytes(keys: ExtraKeys | None) -> bytes:
    """Return the canonical bytes of a block's extra keys; empty if it has none."""
    return canonical_cbor(keys) if keys else b""


def parse_extra_keys(data: bytes) -> ExtraKeys | None:
    """Return the keys from `extra_keys_bytes`; raises MalformedMessageError for other bytes."""
    if not data:
        return None
    try:
        keys = cbor2.loads(data)
    except (cbor2.CBORDecodeError, TypeError, ValueError) as error:
        raise MalformedMessageError(f"extra keys {data!r} are not readable: {error}") from error
    if not isinstance(keys, list) or not keys or not all(map(_is_key, keys)):
        raise MalformedMessageError(f"extra keys {data!r} are no list of kinds and their values")
    return cast("ExtraKeys", tuple(tuple(key) for key in keys))


def _is_key(key: object) -> bool:
    """Return whether it is a kind, a text, and optionally another text or number."""
    if not isinstance(key, list) or not 2 <= len(key) <= 3:
        return False
    return all(isinstance(part, str) for part in key[:2]) and type(key[-1]) in (str, int)


@dataclass(frozen=True, eq=False)
class SealedContents:
    """All sealed blocks in ascending order. Shapes: `block_ids`, `groups` `(n,)`, `digests`
    `n * digest_bytes`."""

    block_ids: Int32Array
    groups: Int32Array
    digests: bytes

    def between(self, first_block: int, end_block: int) -> SealedContents:
        """Return those of the blocks `[first_block, end_block)`."""
        first, end = np.searchsorted(self.block_ids, (first_block, end_block)).tolist()
        size = len(self.digests) // len(self.block_ids) if len(self.block_ids) else 0
        return SealedContents(
            self.block_ids[first:end],
            self.groups[first:end],
            self.digests[first * size : end * size],
        )


def sorted_contents(
    block_ids: Int32Array, groups: Int32Array, digests: bytes, digest_bytes: int
) -> SealedContents:
    """Return contents in ascending order of blocks."""
    order = block_ids.argsort()
    packed = np.frombuffer(digests, np.uint8).reshape(len(block_ids), digest_bytes)
    return SealedContents(block_ids[order], groups[order], packed[order].tobytes())
