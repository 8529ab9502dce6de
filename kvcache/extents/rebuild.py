"""A tree from labels: what a restarted coordinator may keep of what workers still hold.

Stands between the label sets of all ranks and an empty core. Kept is what every rank agrees on;
one block of duplicate contents; no unit without all units before it. Chooses with whole arrays;
only runs are made one by one. Refuses to guess: whatever does not fit is dropped, cold is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, index_array, int32_array
from kvcache.core.group_labels import FIRST_BLOCK, NO_ROW, FittingLabels, fitting_labels
from kvcache.core.label_chains import NO_CHAIN, Chains, chains_of, depths_of
from kvcache.errors import BlockError
from kvcache.extents.block_store import SEALED
from kvcache.extents.label_units import LabelUnits, UnitLinks, blocks_beside, units_of
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment
from kvcache.extents.run import Run
from kvcache.hashing import ExtraKeys
from kvcache.label_agreement import agreed_labels, labelled_blocks
from kvcache.labels import LabelSet

BlockTable = npt.NDArray[np.intp]
"""Blocks, a row per group and a column per unit; 0 where there is none."""


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What is kept: units in chains. `rows` are the chains' units, `blocks` are theirs."""

    units: LabelUnits
    above: IndexArray
    chains: Chains
    blocks: BlockTable

    @property
    def rows(self) -> IndexArray:
        return self.chains.rows


class TreeRebuilder:
    """Fills one empty core.

    Units are those of the ordered group of one unit's block size, where there is one. Otherwise
    they are put together from what all groups have: then less may be kept, where blocks of groups
    that drop some are missing, or blocks of several units overlap multimodal items.
    """

    def __init__(self, parts: CoreParts) -> None:
        """Work on the parts of a core in which nothing is held or cached."""
        self._parts = parts
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._evictor = parts.evictor
        self._announcer = parts.announcer

    def rebuild(self, labels: Sequence[LabelSet], *, can_hit: bool) -> int:
        """Fill the core; return how many blocks were kept, all of them evictable.

        Withdraws every label that is not kept, and tells listeners: cleared, then all there is.

        Raises:
            BlockError: something is held or cached already; nothing was changed.
        """
        store = self._store
        num_held = store.num_blocks - 1 - store.num_free
        if num_held or store.num_cached:
            raise BlockError(
                f"cannot restore: {num_held} blocks are in use and {store.num_cached} are cached: "
                "restore an empty pool"
            )
        sizes = [group.block_size for group in self._shape.groups] if can_hit else []
        none_hash = self._parts.none_hash
        fitting = fitting_labels(agreed_labels(labels), store.num_blocks, sizes, none_hash)
        chosen = self._choose(fitting) if sizes else None
        kept = index_array(()) if chosen is None else chosen.blocks[chosen.blocks != 0]
        labelled = labelled_blocks(labels, store.num_blocks)
        self._announcer.cleared()
        self._announcer.forgotten(np.setdiff1d(labelled, kept, assume_unique=True))
        if chosen is not None:
            store.leave_fresh(kept)
            store.fill(kept, SEALED)
            self._note_singles(chosen)
            runs = self._plant(chosen)
            self._tell(fitting, chosen, runs)
            self._release(chosen, runs)
        return len(kept)

    # --- choosing ------------------------------------------------------------------------------

    def _choose(self, fitting: FittingLabels) -> _Chosen:
        """Find the units that are whole, and whole before. Changes nothing."""
        shape, parts = self._shape, self._parts
        units = units_of(fitting, shape, parts.hash_fn, parts.none_hash)
        above = units.labels.parent_rows(parts.none_hash)
        above[self._second_in_place(units, above)] = NO_ROW
        depths = depths_of(above)
        links = UnitLinks(above, depths, parts.none_hash)
        found = blocks_beside(fitting, shape, units, links)
        lacks = np.zeros(len(depths), dtype=np.bool_)
        for group in shape.ordered:
            lacks |= ((depths + 1) % group.num_units == 0) & (found[group.index] == 0)
        if lacks.any():
            above[lacks] = NO_ROW
            depths = depths_of(above)
        if shape.ordered and not units.is_of_ordered_group:
            self._drop_useless(found, above, depths)
        chains = chains_of(above, depths)
        return _Chosen(units, above, chains, found[:, chains.rows])

    def _second_in_place(self, units: LabelUnits, above: IndexArray) -> IndexArray:
        """Return units that have another digest than one before them for the same content.

        One of the two is wrong, and the tree has one place for both.
        """
        labels = units.labels
        linked = np.flatnonzero(above != NO_ROW)
        places = above[linked] - FIRST_BLOCK
        is_shared = np.bincount(places, minlength=1)[places] > 1
        rows = linked[is_shared]
        width = labels.tokens.shape[1]
        tokens = labels.tokens[rows].view(f"V{4 * width}").ravel().tolist()
        items = [units.items[key] for key in labels.keys[rows].tolist()]
        namespaces = labels.namespaces[rows].tolist()
        seen: dict[tuple[int, int, bytes, ExtraKeys], int] = {}
        keys = zip(above[rows].tolist(), namespaces, tokens, items, strict=True)
        firsts = [seen.setdefault(key, row) for key, row in zip(keys, rows.tolist(), strict=True)]
        seconds: IndexArray = rows[rows != index_array(firsts)]
        return seconds

    def _drop_useless(self, found: BlockTable, above: IndexArray, depths: IndexArray) -> None:
        """Leave out units behind which no block of an ordered group ends."""
        is_needed = np.zeros(len(depths), dtype=np.bool_)
        for group in self._shape.ordered:
            rows = np.flatnonzero((found[group.index] != 0) & (depths != NO_ROW))
            for _ in range(group.num_units):
                is_needed[rows] = True
                rows = above[rows]
        depths[~is_needed] = NO_ROW

    # --- planting ------------------------------------------------------------------------------

    def _note_singles(self, chosen: _Chosen) -> None:
        """Note of blocks that can go one by one what the evictor must know of them."""
        evictor = self._evictor
        for group in self._shape.others:
            here = chosen.blocks[group.index]
            ids = here[here != 0]
            evictor.group_of[ids] = group.index
            self._store.is_single[ids] = True
            if evictor.digest_of.size:
                evictor.digest_of[ids] = chosen.units.labels.digests[chosen.rows[here != 0]]

    def _plant(self, chosen: _Chosen) -> list[Run]:
        """Make a run of each chain, and hold it."""
        shape, tree = self._shape, self._tree
        unit_bytes, digest_bytes = shape.unit_bytes, shape.digest_bytes
        tokens = self._match_tokens(chosen)
        digests = chosen.units.labels.digests[chosen.rows].tobytes()
        ids = int32_array(chosen.blocks[[group.index for group in shape.ordered]])
        handles = self._store.handles_of(chosen.blocks[[group.index for group in shape.others]])
        runs: list[Run] = []
        above = chosen.chains.above.tolist()
        for chain, (start, end) in enumerate(pairwise(chosen.chains.starts.tolist())):
            if above[chain] == NO_CHAIN:
                parent = tree.root(chosen.units.namespace(int(chosen.rows[start])))
            else:
                parent = runs[above[chain]]
            tree.hold(parent)
            run = tree.extend(
                parent,
                tokens[start * unit_bytes : end * unit_bytes],
                ids[:, start:end].copy(),
                handles[:, start:end].copy(),
                digests[start * digest_bytes : end * digest_bytes],
            )
            if run.tenant is not None and self._store.tenants is not None:
                kept = chosen.blocks[:, start:end].ravel()
                self._store.tenants.took(kept[kept != 0], run.tenant)
            runs.append(run)
        return runs

    def _match_tokens(self, chosen: _Chosen) -> bytes:
        """Return the match tokens of all units."""
        labels, extra_keys = chosen.units.labels, chosen.units.extra_keys
        tokens, keys = labels.tokens[chosen.rows], labels.keys[chosen.rows]
        for place in np.flatnonzero(keys).tolist():
            first = int(tokens[place, 0])
            tokens[place, 0] = self._parts.match_tokens.numbered(
                first, extra_keys[int(keys[place])] or ()
            )
        matched: bytes = tokens.tobytes()
        return matched

    def _release(self, chosen: _Chosen, runs: Sequence[Run]) -> None:
        """Let go of all runs, the last one first, before each what stands beside it."""
        tree, store = self._tree, self._store
        beside = chosen.blocks[[group.index for group in self._shape.others]]
        starts = chosen.chains.starts.tolist()
        for chain in range(len(runs) - 1, -1, -1):
            singles = beside[:, starts[chain] : starts[chain + 1]][:, ::-1].ravel()
            singles = singles[singles != 0]
            if len(singles):
                store.put_unheld(singles)
            tree.release(runs[chain])

    # --- telling -------------------------------------------------------------------------------

    def _tell(self, fitting: FittingLabels, chosen: _Chosen, runs: Sequence[Run]) -> None:
        """Tell listeners and the tiers below what is there; workers know."""
        announcer = self._announcer
        if not (announcer.published_groups or announcer.offload):
            return
        starts = chosen.chains.starts.tolist()
        segments = [
            self._segment(fitting, chosen, runs[chain], start, end)
            for chain, (start, end) in enumerate(pairwise(starts))
        ]
        handles = self._store.handles_of(chosen.blocks)
        announcer.sealed(
            Published(segments, handles, is_content=True),
            chosen.blocks,
            chosen.blocks != 0,
            is_labelled=True,
        )

    def _segment(
        self, fitting: FittingLabels, chosen: _Chosen, run: Run, start: int, end: int
    ) -> Segment:
        """Return a chain as it is told of, and units before it that its first blocks reach to."""
        labels, first = chosen.units.labels, run.start
        rows = chosen.rows[start:end].tolist()
        lead = min(first, max(group.num_units for group in self._shape.groups) - 1)
        for _ in range(lead):
            rows.insert(0, int(chosen.above[rows[0]]))
        told = index_array(rows)
        return Segment(
            run,
            first,
            end - start,
            "",
            chosen.units.namespace(rows[0]),
            first - lead,
            labels.tokens[told].tobytes(),
            labels.digests[told].tobytes(),
            labels.parents[told[0]].tobytes(),
            self._keys_of(fitting, chosen, start, first),
        )

    def _keys_of(
        self, fitting: FittingLabels, chosen: _Chosen, start: int, first_unit: int
    ) -> Callable[[int, int], ExtraKeys | None] | None:
        """Return what finds the extra keys of blocks that end in a chain, by their tokens.

        The chain begins with column `start` of the blocks, which is unit `first_unit`.
        """
        if len(fitting.extra_keys) == 1:
            return None
        units, size = chosen.units, self._shape.unit_tokens

        def extra_keys(first_token: int, end_token: int) -> ExtraKeys | None:
            column = start + end_token // size - 1 - first_unit
            row = int(chosen.rows[column])
            if end_token - first_token == size:
                return units.extra_keys[int(units.labels.keys[row])]
            group = next(
                group.index
                for group in self._shape.groups
                if group.block_size == end_token - first_token
                and chosen.blocks[group.index, column]
            )
            labels = fitting.groups[group]
            return fitting.extra_keys[int(labels.keys[labels.rows[units.labels.names[row]]])]

        return extra_keys
