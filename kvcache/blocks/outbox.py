"""What the core tells others: label, unlabel and zero commands, stored and removed events.

Stands behind the content index, which calls it whenever a content is confirmed or lost. Commands
wait here, in order, until they are taken; events go to the sink at once. Refuses to decide what is
cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from kvcache.arrays import Int32Array, int32_array
from kvcache.blocks.prefix_table import PrefixTable
from kvcache.blocks.run import CachedRun
from kvcache.commands import Command, Copy, Label, Unlabel, Zero
from kvcache.core import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventSink,
    NullEventSink,
)
from kvcache.core.pending_copies import PendingCopies
from kvcache.hashing import BlockHash
from kvcache.labels import extra_keys_bytes
from kvcache.request import Namespace
from kvcache.request_content import namespace_name

NO_SLOT = -1

_T = TypeVar("_T")


class EventLog:
    """An `EventSink` that keeps what it gets until it is taken."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._events: list[CacheEvent] = []

    def emit(self, event: CacheEvent) -> None:
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        """Return all events since the last call, and forget them."""
        events, self._events = self._events, []
        return events


class Outbox:
    """Commands that wait to be taken, and the way to the event sink."""

    def __init__(
        self,
        sink: EventSink,
        medium: str,
        *,
        none_hash: BlockHash,
        published_groups: frozenset[int],
        has_workers: bool,
    ) -> None:
        """Collect commands only if there are workers; publish events of these groups only."""
        self.slots: Mapping[str, int] = {}
        self._sink = sink
        self._medium = medium
        self.none_hash = none_hash
        self._published_groups = frozenset() if type(sink) is NullEventSink else published_groups
        self.has_workers = has_workers
        self._commands: list[Command] = []
        # At most one of the first two is filled: the other one was turned into a command before.
        self._unlabels: list[int] = []
        self._labels: list[tuple[CachedRun, Sequence[int]]] = []
        self._zeros: list[int] = []
        self.copies = PendingCopies()

    @property
    def tells_tokens(self) -> bool:
        """Whether anything is said of contents and their tokens: labels, or stored events."""
        return self.has_workers or bool(self._published_groups)

    def sealed(self, run: CachedRun, indices: Sequence[int], *, is_labelled: bool = False) -> None:
        """The blocks at `indices` of `run` have their bytes now; label them unless they are."""
        if self.has_workers and not is_labelled:
            if self._unlabels:
                self._flush_unlabels()
            self._labels.append((run, indices))
        if run.table.group in self._published_groups:
            self._publish(run, indices)

    def unlabel(self, block_ids: Sequence[int]) -> None:
        """The labels of these sealed blocks are void, before anything writes into them."""
        if self.has_workers and block_ids:
            if self._labels:
                self._flush_labels()
            self._unlabels += block_ids

    def zero(self, block_ids: Sequence[int]) -> None:
        """These blocks are to be zeroed before their first use."""
        if self.has_workers:
            self._zeros += block_ids

    def removed(self, table: PrefixTable, digests: Sequence[BlockHash]) -> None:
        """These digests have left `table`; those that were published are called back."""
        gone = [digest for digest in digests if digest in table.published]
        if gone:
            table.published.difference_update(gone)
            self._sink.emit(BlocksRemoved(table.group, self._medium, tuple(gone)))

    def cleared(self) -> None:
        """Nothing is cached any more."""
        self._sink.emit(AllBlocksCleared())

    def take_commands(self) -> list[Command]:
        """Return all commands since the last call, in order, and forget them."""
        if self._unlabels:
            self._flush_unlabels()
        if self._labels:
            self._flush_labels()
        if self._zeros:
            self._commands.append(Zero(int32_array(self._zeros)))
            self._zeros = []
        if copies := self.copies.take():
            sources, destinations = zip(*copies, strict=True)
            self._commands.append(Copy(int32_array(sources), int32_array(destinations)))
        commands, self._commands = self._commands, []
        return commands

    def _flush_unlabels(self) -> None:
        self._commands.append(Unlabel(int32_array(self._unlabels)))
        self._unlabels = []

    def _flush_labels(self) -> None:
        self._commands.append(build_label(self._labels, self.slots))
        self._labels = []

    def _publish(self, run: CachedRun, indices: Sequence[int]) -> None:
        """Emit what is new among `indices`, one event per unbroken part of the run."""
        published = run.table.published
        if len(indices) == len(run.digests) and published.isdisjoint(run.digests):
            self._emit_stored(run, 0, len(run.digests))
            return
        part: list[int] = []
        for index in indices:
            if run.digests[index] in published:
                continue
            if part and part[-1] != index - 1:
                self._emit_stored(run, part[0], part[-1] + 1)
                part = []
            part.append(index)
        if part:
            self._emit_stored(run, part[0], part[-1] + 1)

    def _emit_stored(self, run: CachedRun, first: int, end: int) -> None:
        """Emit what blocks `[first, end)` of a run hold, which is published from now on."""
        digests = run.digests[first:end]
        run.table.published.update(digests)
        parent = run.parent_of(first)
        self._sink.emit(
            BlocksStored(
                group=run.table.group,
                medium=self._medium,
                digests=tuple(digests),
                parent_digest=None if parent == self.none_hash else parent,
                token_ids=run.token_ids[first * run.block_size : end * run.block_size],
                block_size=run.block_size,
                namespace=run.table.namespace,
                extra_keys=run.extra_keys[first:end],
            )
        )


def build_label(
    sealed: Sequence[tuple[CachedRun, Sequence[int]]], slots: Mapping[str, int]
) -> Label:
    """Return one command for all blocks; a request that `slots` does not name has slot -1."""
    lengths = [len(indices) for _, indices in sealed]
    names: dict[Namespace, int] = {}
    namespaces = [names.setdefault(run.table.namespace, len(names)) for run, _ in sealed]
    extra_keys: dict[int, bytes] = {}
    offset = 0
    for run, indices in sealed:
        if run.extra_keys:
            for i, index in enumerate(indices, offset):
                keys = run.extra_keys[index]
                if keys is not None:
                    extra_keys[i] = extra_keys_bytes(keys)
        offset += len(indices)
    return Label(
        block_ids=int32_array(
            list(chain.from_iterable(_select(run.block_ids, part) for run, part in sealed))
        ),
        groups=_repeat([run.table.group for run, _ in sealed], lengths),
        slots=_repeat([slots.get(run.request_id, NO_SLOT) for run, _ in sealed], lengths),
        digests=b"".join(chain.from_iterable(_select(run.digests, part) for run, part in sealed)),
        parent_digests=b"".join(
            chain.from_iterable(
                _select([run.parent, *run.digests[:-1]], part) for run, part in sealed
            )
        ),
        token_counts=_repeat([run.block_size for run, _ in sealed], lengths),
        token_ids=np.concatenate([_tokens(run, part) for run, part in sealed]),
        namespaces=_repeat(namespaces, lengths),
        namespace_names=tuple(namespace_name(namespace) for namespace in names),
        extra_keys=extra_keys,
    )


def _select(values: Sequence[_T], indices: Sequence[int]) -> Sequence[_T]:
    if len(indices) == len(values):
        return values
    return [values[index] for index in indices]


def _tokens(run: CachedRun, indices: Sequence[int]) -> Int32Array:
    if len(indices) == len(run.block_ids):
        return run.token_ids
    return run.token_ids.reshape(-1, run.block_size)[list(indices)].reshape(-1)


def _repeat(values: list[int], lengths: list[int]) -> Int32Array:
    return np.repeat(np.array(values, dtype=np.int32), lengths)
