"""Units in the tails of rows: whoever ends one gets every unit once, in order, as it was put in."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate

import numpy as np
import pytest

from kvcache.arrays import index_array
from kvcache.extents.leaf_tails import LeafTail, LeafTails
from kvcache.extents.row_columns import CAPACITY, FULL, NEXT, NUM_LIMITS, PUBLISHED
from kvcache.extents.shape import TreeShape
from kvcache.specs import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from tests.managers.core_builders import full, window

PLANS = {"full": (full(4),), "hybrid": (full(4), window(8)), "full twice": (full(4), full(4))}
NUM_ROWS = 5


@dataclass
class Leaf:
    """What one run has grown by, as plain lists."""

    start: bytes
    tail: LeafTail
    tokens: list[list[int]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    handles: list[list[int]] = field(default_factory=list)

    def digests(self) -> list[bytes]:
        """Return the digest before the first unit, and that of each."""
        pieces = [np.array(tokens, np.int32).tobytes() for tokens in self.tokens]
        return list(
            accumulate(
                pieces, lambda above, piece: sha256(above + piece).digest(), initial=self.start
            )
        )


def shape_of(*specs: KVCacheSpec) -> TreeShape:
    groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    return TreeShape.of(KVCacheConfig(64, (), groups), digest_bytes=32)


class Walk:
    """Leaves that grow, are packed, looked at and ended, beside lists that do the same."""

    def __init__(self, shape: TreeShape, seed: int) -> None:
        self.random = random.Random(seed)
        self.shape, self.tails = shape, LeafTails(shape)
        num_figures = 2 * len(shape.groups) + NUM_LIMITS
        self.figures = np.zeros((num_figures, NUM_ROWS), dtype=np.int64)
        self.leaves: dict[int, Leaf] = {}

    def open(self) -> None:
        row = self.random.randrange(NUM_ROWS)
        self.tails.reach(row + 1)
        if row not in self.leaves:
            start = self.random.randbytes(32)
            self.leaves[row] = Leaf(start, self.tails.open(row, start))

    def grow(self) -> None:
        if not self.leaves:
            return
        count = self.random.randint(1, len(self.leaves))
        rows = self.random.sample(sorted(self.leaves), count)
        for row in rows:
            if self.tails.counts[row] >= self.tails.max_units:
                self.leaves[row].tail.pack()
        units = np.empty((len(rows), self.tails.width), dtype=np.int32)
        for unit, row in zip(units, rows, strict=True):
            self._put(unit, self.leaves[row])
        pieces = self.tails.hashed(units)
        digests = b"".join(sha256(piece).digest() for piece in pieces)
        before = self.figures.copy()
        self.tails.append(index_array(rows), units, digests, self.figures)
        self._require_published(rows, before)

    def _require_published(self, rows: list[int], before: np.ndarray) -> None:
        """Each of the rows has published a unit more, and may fill the next one; no other has."""
        after = before
        after[PUBLISHED, rows] += 1
        after[FULL, rows] = (after[PUBLISHED, rows] + 1) * self.shape.unit_tokens
        after[NEXT, rows] = np.minimum(after[CAPACITY, rows] + 1, after[FULL, rows])
        assert np.array_equal(self.figures, after)

    def _put(self, unit: np.ndarray, leaf: Leaf) -> None:
        draw, shape, tails = self.random.randrange, self.shape, self.tails
        leaf.tokens.append([draw(1 << 31) for _ in range(shape.unit_tokens)])
        leaf.ids.append([draw(1 << 31) for _ in shape.ordered])
        leaf.handles.append([draw(1 << 62) for _ in shape.others])
        unit[: tails.tokens_at] = np.frombuffer(leaf.tail.last, np.int32)
        unit[tails.tokens_at : tails.ids_at] = leaf.tokens[-1]
        unit[tails.ids_at : tails.handles_at] = leaf.ids[-1]
        unit[tails.handles_at :] = np.array(leaf.handles[-1], np.int64).view(np.int32)

    def look(self) -> None:
        for leaf in self.leaves.values():
            assert leaf.tail.num_units == len(leaf.tokens)
            assert leaf.tail.last == leaf.digests()[-1]

    def end(self) -> None:
        if not self.leaves:
            return
        row = self.random.choice(sorted(self.leaves))
        leaf = self.leaves.pop(row)
        assert leaf.tail.num_units == len(leaf.tokens)
        assert leaf.tail.last == leaf.digests()[-1]
        piece = leaf.tail.end()
        if self.random.random() < 0.5:  # another leaf gets its row: the units stay what they were
            start = self.random.randbytes(32)
            self.leaves[row] = Leaf(start, self.tails.open(row, start))
            for _ in range(3):
                self.grow()
        assert piece.tokens == np.array(leaf.tokens, np.int32).tobytes()
        assert piece.ids.T.tolist() == leaf.ids
        assert piece.handles.T.tolist() == leaf.handles
        assert piece.digests == b"".join(leaf.digests()[1:])
        if row not in self.leaves:
            assert self.tails.counts[row] > self.tails.max_units


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seed", range(10))
def test_every_unit_comes_out_as_it_went_in(plan: str, seed: int) -> None:
    walk = Walk(shape_of(*PLANS[plan]), seed)
    for _ in range(400):
        walk.random.choices((walk.open, walk.grow, walk.look, walk.end), (4, 40, 2, 1))[0]()
    assert max(map(len, (leaf.tokens for leaf in walk.leaves.values()))) > walk.tails.max_units


def test_a_row_that_grows_no_leaf_has_no_room() -> None:
    tails = LeafTails(shape_of(full(4)))
    tails.reach(3)
    tails.open(1, bytes(32))
    assert [bool(count < tails.max_units) for count in tails.counts] == [False, True, False]
    tails.clear()
    assert not (tails.counts < tails.max_units).any()
