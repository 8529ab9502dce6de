"""What the fast core tells others: label, unlabel and zero commands, stored and removed events.

Called whenever contents are confirmed or lost. Commands wait here, in order, until they are taken;
events go to the sink at once, one per unbroken stretch of blocks, their digests packed. Refuses to
decide what is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.commands import Command, Copy, Label, Unlabel, Zero
from kvcache.core import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventSink,
    NullEventSink,
    OffloadHooks,
)
from kvcache.core.pending_copies import PendingCopies
from kvcache.digests import PackedDigests
from kvcache.extents.grown_segments import NO_SLOT, GrownSegments
from kvcache.extents.published import Published, Segment
from kvcache.extents.shape import GroupShape, TreeShape
from kvcache.hashing import BlockHash, ExtraKeys
from kvcache.labels import extra_keys_bytes, join_labels
from kvcache.request import Namespace
from kvcache.request_content import namespace_name

BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class _Stretch:
    """Successive blocks of one group and one segment, ready to be told of."""

    group: GroupShape
    segment: Segment
    block_ids: Int32Array
    digests: bytes
    parents: bytes
    tokens: Int32Array
    extra_keys: tuple[ExtraKeys | None, ...]


@dataclass(eq=False)
class _Waiting:
    """Commands that are not built yet: unlabels, or labels and stretches that still get some."""

    unlabels: list[Int32Array] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    stretches: list[_Stretch] = field(default_factory=list)


class Announcer:
    """Commands that wait to be taken, and the way to the event sink and the tiers below."""

    def __init__(
        self,
        shape: TreeShape,
        sink: EventSink,
        medium: str,
        *,
        published_groups: frozenset[int],
        has_workers: bool,
        none_hash: bytes,
        offload: OffloadHooks | None,
        slots: Mapping[str, int],
    ) -> None:
        """Collect commands only if there are workers; publish events of these groups only."""
        self.has_workers = has_workers
        self.published_groups = frozenset() if type(sink) is NullEventSink else published_groups
        self.tells_contents = has_workers or bool(self.published_groups)
        """Whether anybody is told what a sealed block holds."""
        self.offload = offload
        self.copies = PendingCopies()
        self.shape = shape
        self._sink = sink
        self._medium = medium
        self._none_hash = none_hash
        self._slots = slots
        self._commands: list[Command] = []
        self._waiting = _Waiting()
        self._zeros: list[Int32Array] = []

    def sealed(
        self,
        published: Published,
        block_ids: IndexArray,
        is_new: BoolArray,
        *,
        is_labelled: bool = False,
    ) -> None:
        """Blocks have their bytes now: `block_ids[g, u]` where `is_new[g, u]`.

        `is_labelled`: workers know already, no label is sent.
        """
        has_labels = self.has_workers and not is_labelled
        if has_labels and isinstance(published.segments, GrownSegments):
            self._label_grown(published.segments, block_ids, is_new)
            has_labels = False
        if has_labels or self.published_groups:
            for stretch in self._stretches(published, block_ids, is_new):
                if has_labels:
                    self._flush_unlabels()
                    self._waiting.stretches.append(stretch)
                if stretch.group.index in self.published_groups:
                    self._emit_stored(stretch)
        if self.offload is not None:
            for group in self.shape.groups:
                ids = block_ids[group.index][is_new[group.index]]
                if len(ids):
                    self.offload.on_sealed(group.index, int32_array(ids))

    def replaced(self, published: Published, block_ids: IndexArray, is_new: BoolArray) -> None:
        """Contents that everybody knows are in other blocks from now on."""
        if self.has_workers:
            self._flush_unlabels()
            self._waiting.stretches += self._stretches(published, block_ids, is_new)

    def forgotten(self, block_ids: IndexArray | Int32Array) -> None:
        """The labels of these sealed blocks are void, before anything writes into them."""
        if self.has_workers and len(block_ids):
            self._flush_labels()
            self._waiting.unlabels.append(int32_array(block_ids))

    def removed(self, group: int, digests: bytes) -> None:
        """These sealed contents of a group are in no block any more."""
        if digests and group in self.published_groups:
            packed = PackedDigests(digests, self.shape.digest_bytes)
            self._sink.emit(BlocksRemoved(group, self._medium, packed))

    def cleared(self) -> None:
        """Nothing is cached any more."""
        self._sink.emit(AllBlocksCleared())

    def zero(self, block_ids: Int32Array) -> None:
        """These blocks are to be zeroed before their first use."""
        if self.has_workers:
            self._zeros.append(block_ids)

    def take_commands(self) -> list[Command]:
        """Return all commands since the last call, in order, and forget them."""
        self._flush_unlabels()
        self._flush_labels()
        if self._zeros:
            self._commands.append(Zero(np.concatenate(self._zeros)))
            self._zeros = []
        if copies := self.copies.take():
            sources, destinations = zip(*copies, strict=True)
            self._commands.append(Copy(int32_array(sources), int32_array(destinations)))
        commands, self._commands = self._commands, []
        return commands

    def _flush_unlabels(self) -> None:
        if self._waiting.unlabels:
            self._commands.append(Unlabel(np.concatenate(self._waiting.unlabels)))
            self._waiting.unlabels = []

    def _flush_labels(self) -> None:
        waiting = self._waiting
        if waiting.stretches:
            waiting.labels.append(self._label(waiting.stretches))
            waiting.stretches = []
        if waiting.labels:
            self._commands.append(join_labels(waiting.labels))
            waiting.labels = []

    def _label_grown(self, grown: GrownSegments, block_ids: IndexArray, is_new: BoolArray) -> None:
        """Tell workers of new blocks, each of which is one of these units."""
        for group in self.shape.groups:
            new, ids = is_new[group.index], block_ids[group.index]
            num_new = np.count_nonzero(new)
            if num_new:
                chosen = None if num_new == len(new) else new.nonzero()[0]
                self._flush_unlabels()
                self._waiting.labels.append(
                    grown.label(
                        group.index, ids if chosen is None else ids[chosen], chosen, self._slots
                    )
                )

    def _stretches(
        self, published: Published, block_ids: IndexArray, is_new: BoolArray
    ) -> Iterator[_Stretch]:
        """Yield the new blocks, segment by segment, group by group, in unbroken stretches."""
        start = 0
        for segment in published.segments:
            end = start + segment.num_units
            for group in self.shape.groups:
                new = is_new[group.index, start:end]
                num_new = np.count_nonzero(new)
                if not num_new:
                    continue
                ids = block_ids[group.index, start:end]
                if num_new == len(new):
                    yield self._stretch(group, segment, int32_array(ids), 0)
                    continue
                for part in _unbroken(new.nonzero()[0], group.num_units):
                    yield self._stretch(group, segment, int32_array(ids[part]), int(part[0]))
            start = end

    def _stretch(
        self, group: GroupShape, segment: Segment, block_ids: Int32Array, first: int
    ) -> _Stretch:
        """Return what is told of blocks whose first one ends with unit `first` of the segment."""
        size, unit_bytes, length = self.shape.digest_bytes, self.shape.unit_bytes, group.num_units
        lead = segment.first_unit - segment.base_unit
        last = lead + first  # the unit, counted from the base, with which the first block ends
        count = len(block_ids)
        begin, end = last + 1 - length, last + 1 + (count - 1) * length
        before = segment.parent
        if begin:
            before = segment.digests[(begin - 1) * size : begin * size]
        of_blocks = segment.digests[last * size : end * size]
        if length > 1:
            of_blocks = np.frombuffer(of_blocks, np.uint8).reshape(-1, size)[::length].tobytes()
        keys: tuple[ExtraKeys | None, ...] = ()
        if segment.extra_keys is not None:
            start = (segment.base_unit + begin) * self.shape.unit_tokens
            keys = tuple(
                segment.extra_keys(at, at + group.block_size)
                for at in range(start, start + count * group.block_size, group.block_size)
            )
        return _Stretch(
            group,
            segment,
            block_ids,
            of_blocks,
            before + of_blocks[:-size],
            np.frombuffer(segment.tokens[begin * unit_bytes : end * unit_bytes], np.int32),
            keys,
        )

    def _emit_stored(self, stretch: _Stretch) -> None:
        size = self.shape.digest_bytes
        parent = BlockHash(stretch.parents[:size])
        self._sink.emit(
            BlocksStored(
                group=stretch.group.index,
                medium=self._medium,
                digests=PackedDigests(stretch.digests, size),
                parent_digest=None if parent == self._none_hash else parent,
                token_ids=stretch.tokens,
                block_size=stretch.group.block_size,
                namespace=stretch.segment.namespace,
                extra_keys=stretch.extra_keys,
            )
        )

    def _label(self, stretches: Sequence[_Stretch]) -> Label:
        counts = [len(stretch.block_ids) for stretch in stretches]
        numbers: dict[Namespace, int] = {}  # each is named once
        namespaces = []
        extra_keys: dict[int, bytes] = {}
        offset = 0
        for stretch, count in zip(stretches, counts, strict=True):
            namespaces.append(numbers.setdefault(stretch.segment.namespace, len(numbers)))
            for i, keys in enumerate(stretch.extra_keys, offset):
                if keys is not None:
                    extra_keys[i] = extra_keys_bytes(keys)
            offset += count
        slots = [self._slots.get(each.segment.request_id, NO_SLOT) for each in stretches]
        return Label(
            block_ids=np.concatenate([stretch.block_ids for stretch in stretches]),
            groups=_repeat([stretch.group.index for stretch in stretches], counts),
            slots=_repeat(slots, counts),
            digests=b"".join([stretch.digests for stretch in stretches]),
            parent_digests=b"".join([stretch.parents for stretch in stretches]),
            token_counts=_repeat([stretch.group.block_size for stretch in stretches], counts),
            token_ids=np.concatenate([stretch.tokens for stretch in stretches]),
            namespaces=_repeat(namespaces, counts),
            namespace_names=tuple(namespace_name(namespace) for namespace in numbers),
            extra_keys=extra_keys,
        )


def _unbroken(units: IndexArray, step: int) -> list[IndexArray]:
    """Cut ascending units where they are more than `step` apart."""
    cuts = np.flatnonzero(np.diff(units) != step)
    return np.split(units, cuts + 1) if len(cuts) else [units]


def _repeat(values: Sequence[int], counts: Sequence[int]) -> Int32Array:
    return np.repeat(np.array(values, dtype=np.int32), counts)
