"""The notifier: commands for workers, cache events, and news for the tiers below.

Commands are queued in order until they are taken. Events go to the sink at once, one per run of
consecutive blocks. Blocks of one group are described in one call. The notifier does not decide what
is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent, CoreSettings
from kvcache.core.columns import ColumnStore
from kvcache.core.digesting import Digester, describe
from kvcache.core.kinds.rule import LENGTH, SIZE
from kvcache.protocol.commands import Command, Copy, Label, Unlabel, Zero
from kvcache.protocol.labels import extra_keys_bytes, join_labels
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hash_algorithms import BlockHash, ExtraKey, ExtraKeys
from kvcache.requests.request import Namespace
from kvcache.requests.request_content import namespace_name


class PendingCopies:
    """Copies that wait, as sources by destination, in order. A source is never a destination that
    was noted earlier, because its bytes have not arrived yet: its own source takes its place."""

    def __init__(self) -> None:
        """Start without copies."""
        self._sources: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: int, destination: int) -> None:
        """Note that `destination` gets the bytes of `source`, unless it already gets others."""
        origin = self._sources.get(source, source)
        if origin != destination:
            self._sources.setdefault(destination, origin)

    def is_waiting(self, block_id: int) -> bool:
        """Return whether a copy will still write the bytes of a block."""
        return block_id in self._sources

    def drop(self, block_id: int) -> None:
        """Cancel the copy into `block_id`, whose bytes are no longer needed."""
        self._sources.pop(block_id, None)

    def take(self) -> list[tuple[int, int]]:
        """Return all copies as (source, destination), and clear the queue."""
        copies = [(source, destination) for destination, source in self._sources.items()]
        self._sources.clear()
        return copies


NodeNotes = Any
"""What became hittable: node, group, row, generation of the row, root. Shape `(n, 5)`, int32."""

_MEDIUM = "device"


class Notifier:
    """The queue of commands, and the connection to the event sink and the tiers below."""

    def __init__(
        self,
        store: ColumnStore,
        digester: Digester,
        settings: CoreSettings,
        *,
        event_groups: frozenset[int],
        namespaces: dict[int, Namespace],
        slots_of: Callable[[NodeNotes], Int32Array],
    ) -> None:
        """Queue commands only if there are workers; emit events of `event_groups` only.

        `namespaces` is a live view of the namespaces of roots. `slots_of` returns the slots of the
        requests that computed blocks.
        """
        self.has_workers = settings.has_workers
        self.event_groups = frozenset() if settings.events is None else event_groups
        self.offload = settings.offload
        self.needs_digests = self.has_workers or bool(self.event_groups)
        self.has_listeners = self.needs_digests or self.offload is not None
        self.copies = PendingCopies()
        self._store, self._digester, self._sink = store, digester, settings.events
        self._none_hash = settings.none_hash
        self._namespaces, self._slots_of = namespaces, slots_of
        self._commands: list[Command] = []
        # Only one of the first two is filled: before one grows, the other becomes a command.
        self._unlabels: list[Int32Array] = []
        self._labels: list[Label] = []
        self._zeros: list[Int32Array] = []

    def sealed(self, notes: NodeNotes, *, is_labelled: bool = False) -> None:
        """Report that blocks are sealed. With `is_labelled`, workers have their labels already."""
        if not self.has_listeners or not len(notes):
            return
        if self.needs_digests:
            self._digester.make(np.ascontiguousarray(notes[:, 0]))
        group = self._store.columns.group
        for g in range(self._store.num_groups):
            here = notes
            if self._store.num_groups > 1:
                here = np.ascontiguousarray(notes[notes[:, 1] == g])
                if not len(here):
                    continue
            self._report_group(g, int(group[g, LENGTH]), here, is_labelled=is_labelled)

    def forgotten(self, block_ids: Int32Array, groups: Int32Array, digests: Any) -> None:
        """Report that sealed contents are gone, one per row."""
        self.unlabel(block_ids)
        for g in sorted(self.event_groups) if len(block_ids) else ():
            packed = digests[groups == g].tobytes()
            if packed:
                size = digests.shape[1]
                self._emit(BlocksRemoved(g, _MEDIUM, PackedDigests(packed, size)))

    def unlabel(self, block_ids: Int32Array) -> None:
        """Report that the labels of blocks are void, before anything writes to the blocks."""
        if self.has_workers and len(block_ids):
            self._flush_labels()
            self._unlabels.append(block_ids)

    def cleared(self) -> None:
        """Report that nothing is cached any more."""
        self._emit(AllBlocksCleared())

    def _emit(self, event: CacheEvent) -> None:
        if self._sink is not None:
            self._sink.emit(event)

    def zero(self, block_ids: Int32Array) -> None:
        """Report blocks whose bytes workers must zero before their first use."""
        if self.has_workers and len(block_ids):
            self._zeros.append(block_ids)

    def take_commands(self) -> list[Command]:
        """Return all queued commands in order, and clear the queue."""
        if not self.has_workers:
            return []
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

    # --- inside ------------------------------------------------------------------------------

    def _flush_unlabels(self) -> None:
        if self._unlabels:
            self._commands.append(Unlabel(np.concatenate(self._unlabels)))
            self._unlabels = []

    def _flush_labels(self) -> None:
        if self._labels:
            self._commands.append(join_labels(self._labels))
            self._labels = []

    def _report_group(self, g: int, length: int, notes: NodeNotes, *, is_labelled: bool) -> None:
        """Report sealed blocks of one group."""
        c, count = self._store.columns, len(notes)
        size, unit = c.digest.shape[1], c.tokens.shape[1]
        ids, follows = np.empty(count, np.int32), np.empty(count, np.int32)
        digests, parents = np.empty((count, size), np.uint8), np.empty((count, size), np.uint8)
        tokens = np.empty((count, length * unit), np.int32)
        numbers = np.empty((count, length), np.int32)
        describe(
            self._store.address, notes, length, ids, digests, parents, tokens, numbers, follows
        )
        keys: list[ExtraKeys | None] = []
        if np.count_nonzero(numbers):
            keys = [self._joined_keys(row) for row in numbers.tolist()]
        if self.has_workers and not is_labelled:
            self._flush_unlabels()
            self._labels.append(
                self._label(g, length * unit, notes, ids, digests, parents, tokens, keys)
            )
        if g in self.event_groups:
            cuts = np.flatnonzero(follows == 0)
            self._emit_stored(g, notes[cuts, 4], digests, parents[cuts], tokens, keys, cuts)
        if self.offload is not None:
            self.offload.on_sealed(g, ids)

    def _label(
        self, g: int, size: int, notes: NodeNotes, ids: Int32Array, digests: Any, parents: Any,
        tokens: Any, keys: Sequence[ExtraKeys | None],
    ) -> Label:  # fmt: skip
        roots, places = notes[:, 4], np.zeros(len(ids), np.int32)
        used = [int(roots[0])]
        if (roots != roots[0]).any():
            found, inverse = np.unique(roots, return_inverse=True)
            used, places = found.tolist(), int32_array(inverse.reshape(-1))
        extra_keys = {}
        if keys:
            extra_keys = {i: extra_keys_bytes(each) for i, each in enumerate(keys) if each}
        return Label(
            block_ids=ids,
            groups=np.full(len(ids), g, np.int32),
            slots=self._slots_of(notes),
            digests=digests.tobytes(),
            parent_digests=parents.tobytes(),
            token_counts=np.full(len(ids), size, np.int32),
            token_ids=tokens.reshape(-1),
            namespaces=places,
            namespace_names=(*map(namespace_name, map(self._namespaces.__getitem__, used)),),
            extra_keys=extra_keys,
        )

    def _emit_stored(
        self, g: int, roots: Any, digests: Any, parents: Any, tokens: Any,
        keys: Sequence[ExtraKeys | None], cuts: Any,
    ) -> None:  # fmt: skip
        """Emit an event for the blocks of one group from each of `cuts` to the next one; the first
        block of each has its root in `roots`, and its parent's digest in `parents`."""
        (count, size), num_tokens = digests.shape, tokens.shape[1]
        packed, parents, tokens = digests.tobytes(), parents.tobytes(), tokens.reshape(-1)
        block_size, starts = int(self._store.columns.group[g, SIZE]), cuts.tolist()
        for i, (root, start, end) in enumerate(
            zip(roots.tolist(), starts, [*starts[1:], count], strict=True)
        ):
            parent = parents[size * i : size * (i + 1)]
            self._emit(
                BlocksStored(
                    g,
                    _MEDIUM,
                    PackedDigests(packed[size * start : size * end], size),
                    None if parent == self._none_hash else BlockHash(parent),
                    tokens[num_tokens * start : num_tokens * end],
                    block_size,
                    self._namespaces[root],
                    tuple(keys[start:end]),
                )
            )

    def _joined_keys(self, numbers: Sequence[int]) -> ExtraKeys | None:
        """Return a block's extra keys, given those of its units: adapter, then multimodal items in
        the order of their start, then the salt."""
        if len(numbers) == 1:
            return self._digester.keys_of(numbers[0])
        unit = self._store.unit_tokens
        found: dict[ExtraKey, None] = {}
        for place, number in enumerate(numbers):
            for key in self._digester.keys_of(number) or ():
                of_block: ExtraKey = key
                if len(key) == 3 and key[0] == "mm":
                    of_block = ("mm", key[1], int(key[2]) + place * unit)
                found[of_block] = None
        kinds = ("lora", "mm", "cache_salt")
        return tuple(sorted(found, key=lambda key: kinds.index(key[0]))) or None
