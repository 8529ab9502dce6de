"""Prefixes that pins hold: the run they end with, and the blocks beside it.

For the core, which pins what a look-up found and later gives exactly that back; and for copies,
whose blocks must not be handed out before workers were told, though their row has gone: its run is
held for them. Refuses to know time limits, and to pin what is not in the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.core import CacheHit
from kvcache.errors import BlockError
from kvcache.extents.block_store import BlockStore
from kvcache.extents.run import Run
from kvcache.extents.shape import TreeShape
from kvcache.extents.tree import RunTree
from kvcache.ids import NULL_BLOCK_ID
from kvcache.request import Namespace

BoolArray = npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Pin:
    """One pin. `beside` are blocks of other groups, the last tokens' first; `own` are blocks of
    ordered groups that have lost their content since."""

    run: Run
    beside: IndexArray
    own: IndexArray


class PinnedRuns:
    """All pins of one core, by the hits they were made for."""

    def __init__(self, shape: TreeShape, store: BlockStore, tree: RunTree) -> None:
        """Hold nothing."""
        self._shape = shape
        self._store = store
        self._tree = tree
        self._pins: dict[CacheHit, list[_Pin]] = {}
        self._of_copies: list[Run] = []

    def keep_for_copies(self, run: Run) -> None:
        """Take over a hold of `run`, in which copies that nobody was told of begin or end."""
        self._of_copies.append(run)

    def release_copied(self) -> None:
        """Workers have been told of all copies so far."""
        runs, self._of_copies = self._of_copies, []
        for run in runs:
            self._tree.release(run)

    def pin(self, hit: CacheHit, run: Run) -> None:
        """Hold the blocks of a hit; `run` ends with it and has been held for this pin."""
        parts = [hit.block_ids[group.index][::-1] for group in self._shape.others]
        beside = index_array(np.concatenate(parts)) if parts else index_array(())
        beside = beside[beside != NULL_BLOCK_ID]
        self._store.touch(beside)
        self._pins.setdefault(hit, []).append(_Pin(run, beside, index_array(())))

    def unpin(self, hit: CacheHit) -> None:
        """Give a pin back; raises BlockError, unchanged, if there is none for this hit."""
        pins = self._pins.get(hit)
        if not pins:
            raise BlockError(
                f"a prefix of {hit.num_tokens} tokens is unpinned, but no pin holds it: unpin what "
                "was pinned, once"
            )
        pin = pins.pop()
        if not pins:
            del self._pins[hit]
        self._store.give_back(pin.beside)
        self._store.give_back(pin.own)
        self._tree.release(pin.run)

    def end_at(self, stump: Run, gone: set[int], lost: BoolArray) -> None:
        """Runs, by `id`, are going: pins that end in them end at `stump` and own what is lost."""
        for hit, pins in self._pins.items():
            for pin in pins:
                if id(pin.run) in gone:
                    ids = self._ordered_ids(hit)
                    own = ids[lost[ids]]
                    self._store.references[own] += 1
                    pin.own = np.concatenate((pin.own, own))
                    self._tree.hold(stump)
                    pin.run = stump
        for i, run in enumerate(self._of_copies):
            if id(run) in gone:  # the copies have references to its blocks
                self._tree.hold(stump)
                self._of_copies[i] = stump

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces in which pins hold runs, in the order of `begin_anew`."""
        pins = [pin for pins in self._pins.values() for pin in pins]
        return [self._tree.namespace_of(pin.run) for pin in pins]

    def begin_anew(self, namespaces: Sequence[Namespace]) -> None:
        """Let pins, which hold no block, end at the roots of these namespaces."""
        pins = [pin for pins in self._pins.values() for pin in pins]
        for pin, namespace in zip(pins, namespaces, strict=True):
            pin.run = self._tree.root(namespace)
            self._tree.hold(pin.run)

    def are_pinned(self, block_ids: IndexArray) -> BoolArray:
        """Say which blocks stand in pinned hits. O(pinned)."""
        pinned = [table for hit in self._pins for table in hit.block_ids]
        return np.isin(block_ids, np.concatenate(pinned) if pinned else ())

    def references(self) -> Counter[int]:
        """Return how many pins hold each block. O(pinned)."""
        held: Counter[int] = Counter()
        for hit, pins in self._pins.items():
            ids = [b for table in hit.block_ids for b in table.tolist() if b != NULL_BLOCK_ID]
            for _ in pins:
                held.update(ids)
        return held

    def holders(self) -> list[tuple[Run, IndexArray]]:
        """Return, per pin, the run and the single blocks it holds; copies hold runs. For audits."""
        of_pins = [
            (pin.run, np.concatenate((pin.beside, pin.own)))
            for pins in self._pins.values()
            for pin in pins
        ]
        return of_pins + [(run, index_array(())) for run in self._of_copies]

    def _ordered_ids(self, hit: CacheHit) -> IndexArray:
        parts: list[Int32Array] = [hit.block_ids[group.index] for group in self._shape.ordered]
        ids = index_array(np.concatenate(parts)) if parts else index_array(())
        kept: IndexArray = ids[ids != NULL_BLOCK_ID]
        return kept
