"""A tree from labels: what a restarted coordinator may keep of what workers still hold.

Stands between the label sets of all ranks and an empty core. Kept is what every rank agrees on;
one block of duplicate contents; no unit without all units before it. Refuses to guess: whatever
does not fit is dropped, cold is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.arrays import IndexArray, index_array
from kvcache.blocks.extra_keys import parse_extra_keys
from kvcache.blocks.prefix_table import parse_namespace_name
from kvcache.blocks.rebuild import agreed_labels
from kvcache.errors import BlockError, MalformedMessageError
from kvcache.extents.block_store import SEALED
from kvcache.extents.parts import CoreParts
from kvcache.extents.published import Published, Segment
from kvcache.extents.run import Run
from kvcache.hashing import ExtraKeys
from kvcache.labels import BlockLabel, LabelSet
from kvcache.request import Namespace


@dataclass(eq=False)
class _Namespace:
    """The labels of one namespace: of each group by digest, and of the leading group by parent."""

    name: Namespace
    by_digest: list[dict[bytes, BlockLabel]]
    following: dict[bytes, list[BlockLabel]]


class TreeRebuilder:
    """Fills one empty core.

    The *leading* group has a block for every unit; its labels make the runs. Where no group's
    blocks are one unit long, or only a group that drops blocks leads, less can be kept.
    """

    def __init__(self, parts: CoreParts) -> None:
        """Work on the parts of a core in which nothing is held or cached."""
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._evictor = parts.evictor
        self._announcer = parts.announcer
        self._match_tokens = parts.match_tokens
        self._none_hash = parts.none_hash
        short = [group for group in parts.shape.groups if group.num_units == 1]
        self._leading = next((g for g in short if g.is_ordered), short[0] if short else None)

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
        chosen: list[tuple[_Namespace, list[BlockLabel], int, int]] = []
        kept: list[int] = []
        for namespace in self._namespaces(agreed_labels(labels, store.num_blocks, sizes)):
            before = len(chosen)
            chosen += [
                (name, chain, start, above if above < 0 else above + before)
                for name, chain, start, above in self._chains(namespace)
            ]
        for namespace, chain, start, _ in chosen:
            kept += [b for column in self._blocks(namespace, chain, start) for b in column if b]
        labelled = {label.block_id for label_set in labels for label in label_set}
        self._announcer.cleared()
        self._announcer.forgotten(index_array(sorted(labelled - set(kept))))
        store.leave_fresh(index_array(kept))
        self._plant(chosen)
        return len(kept)

    # --- choosing ------------------------------------------------------------------------------

    def _namespaces(self, labels: Sequence[BlockLabel]) -> list[_Namespace]:
        if self._leading is None:
            return []
        found: dict[bytes, _Namespace] = {}
        places: set[tuple[bytes, bytes, bytes]] = set()
        for label in sorted(labels, key=lambda label: label.block_id):
            if min(label.token_ids) < 0:
                continue  # negative match tokens are numbers that mean something else
            namespace = found.get(label.namespace)
            if namespace is None:
                try:
                    name = parse_namespace_name(label.namespace)
                except MalformedMessageError:
                    continue
                by_digest: list[dict[bytes, BlockLabel]] = [{} for _ in self._shape.groups]
                namespace = found[label.namespace] = _Namespace(name, by_digest, {})
            is_leading = label.group == self._leading.index
            if is_leading and label.digest not in namespace.by_digest[label.group]:
                place = label.namespace, label.parent_digest, self._match_bytes(label)
                if place in places:
                    continue  # another digest for the same tokens: one of them is wrong
                places.add(place)
            known = namespace.by_digest[label.group].setdefault(label.digest, label)
            if known is label and is_leading:
                namespace.following.setdefault(label.parent_digest, []).append(label)
        return [namespace for _, namespace in sorted(found.items())]

    def _chains(self, namespace: _Namespace) -> list[tuple[_Namespace, list[BlockLabel], int, int]]:
        """Return unbroken chains: labels, first unit, and the place of the chain it continues."""
        chains: list[tuple[_Namespace, list[BlockLabel], int, int]] = []
        pending = [
            (label, 0, -1) for label in reversed(namespace.following.get(self._none_hash, []))
        ]
        seen: set[bytes] = set()
        while pending:
            label, start, above = pending.pop()
            chain: list[BlockLabel] = []
            following = [label]
            while len(following) == 1:
                (label,) = following
                unit = start + len(chain)
                if label.digest in seen or not self._is_whole(namespace, label, unit):
                    following = []
                    break
                seen.add(label.digest)
                chain.append(label)
                following = namespace.following.get(label.digest, [])
            if chain:
                place = len(chains)
                chains.append((namespace, chain, start, above))
                pending += [(each, start + len(chain), place) for each in reversed(following)]
        return chains

    def _is_whole(self, namespace: _Namespace, label: BlockLabel, unit: int) -> bool:
        """Say whether every ordered group has its block at a unit."""
        return all(
            label.digest in namespace.by_digest[group.index]
            for group in self._shape.ordered
            if (unit + 1) % group.num_units == 0
        )

    def _blocks(
        self, namespace: _Namespace, chain: Sequence[BlockLabel], start: int
    ) -> list[list[int]]:
        """Return the blocks of each group at the units of a chain; 0 where there is none."""
        columns = []
        for group in self._shape.groups:
            known = namespace.by_digest[group.index]
            column = []
            for unit, label in enumerate(chain, start):
                found = known.get(label.digest) if (unit + 1) % group.num_units == 0 else None
                column.append(0 if found is None else found.block_id)
            columns.append(column)
        return columns

    # --- planting ------------------------------------------------------------------------------

    def _plant(self, chosen: Sequence[tuple[_Namespace, list[BlockLabel], int, int]]) -> None:
        """Make runs of the chains, hold them all, and let go of them leaves first."""
        runs: list[Run] = []
        roots: list[Run] = []
        singles: list[IndexArray] = []
        for namespace, chain, start, above in chosen:
            parent = self._tree.root(namespace.name) if above < 0 else runs[above]
            self._tree.hold(parent)
            if above < 0:
                self._tree.hold(parent)
                roots.append(parent)
            run, beside = self._plant_chain(namespace, chain, start, parent)
            runs.append(run)
            singles.append(beside)
        for run in reversed(runs):
            self._tree.release(run)
        for root in roots:
            self._tree.release(root)
        unheld = index_array(np.concatenate(singles)) if singles else index_array(())
        if len(unheld):
            self._store.policy.insert(unheld)
            self._store.num_unheld_cached += len(unheld)

    def _plant_chain(
        self, namespace: _Namespace, chain: list[BlockLabel], start: int, parent: Run
    ) -> tuple[Run, IndexArray]:
        shape, store = self._shape, self._store
        blocks = np.array(self._blocks(namespace, chain, start), dtype=np.int32)
        store.fill(blocks[blocks != 0], SEALED)
        ids = blocks[[group.index for group in shape.ordered]]
        beside = blocks[[group.index for group in shape.others]]
        for group in shape.others:
            here = blocks[group.index]
            self._evictor.group_of[here[here != 0]] = group.index
            store.is_single[here[here != 0]] = True
            if self._evictor.digest_of.size:
                for block_id, label in zip(here.tolist(), chain, strict=True):
                    if block_id:
                        self._evictor.digest_of[block_id] = np.frombuffer(label.digest, np.uint8)
        digests = b"".join([label.digest for label in chain])
        run = self._tree.extend(
            parent,
            b"".join([self._match_bytes(label) for label in chain]),
            ids,
            store.handles_of(beside),
            digests,
        )
        self._tell(namespace, chain, start, run, blocks)
        return run, index_array(beside[beside != 0])

    def _tell(
        self,
        namespace: _Namespace,
        chain: list[BlockLabel],
        start: int,
        run: Run,
        blocks: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    ) -> None:
        size = self._shape.unit_tokens
        keys = [parse_extra_keys(label.extra_keys) for label in chain]

        def extra_keys(first: int, end: int) -> ExtraKeys | None:
            return keys[first // size - start] if end - first == size else None

        segment = Segment(
            run,
            start,
            len(chain),
            "",
            namespace.name,
            start,
            np.array([t for label in chain for t in label.token_ids], np.int32).tobytes(),
            b"".join([label.digest for label in chain]),
            chain[0].parent_digest,
            extra_keys if any(keys) else None,
        )
        published = Published([segment], self._store.handles_of(blocks), is_content=True)
        is_short = np.array([[group.num_units == 1] for group in self._shape.groups])
        self._announcer.sealed(
            published, index_array(blocks), (blocks != 0) & is_short, is_labelled=True
        )

    def _match_bytes(self, label: BlockLabel) -> bytes:
        tokens = np.array(label.token_ids, dtype=np.int32)
        keys = parse_extra_keys(label.extra_keys)
        if keys:
            tokens[0] = self._match_tokens.numbered(int(tokens[0]), keys)
        return tokens.tobytes()
