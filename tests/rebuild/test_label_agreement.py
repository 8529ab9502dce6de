"""Agreement of ranks: every field counts, except owner slots and checksums."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvcache.protocol.label_agreement import agreed_labels, labelled_blocks
from kvcache.protocol.labels import BlockLabel, LabelSet
from tests.rebuild import model
from tests.rebuild.ranks import packed


def some_label(rng: random.Random, block_id: int) -> BlockLabel:
    return BlockLabel(
        block_id,
        rng.randrange(2),
        rng.randrange(9),
        rng.randbytes(32),
        rng.randbytes(32),
        tuple(rng.randrange(9) for _ in range(rng.choice([4, 4, 0, 8]))),
        rng.choice([b"one", b"two", b"three"]),
        rng.choice([b"", b"", b"keys", b"others"]),
    )


def unpacked(label_sets: Sequence[LabelSet]) -> list[BlockLabel]:
    """Return the agreed labels, without slots."""
    label = agreed_labels(label_sets)
    checksums = np.full(len(label.block_ids), -1, dtype="<i8").tobytes()
    one = replace(label_sets[0], labels=label, checksums=checksums)
    return [replace(each, slot=0) for each in one]


@pytest.mark.seeds(30)
def test_agreed_labels_are_those_that_every_rank_has(seed: int) -> None:
    rng = random.Random(seed)
    labels = [some_label(rng, block_id) for block_id in range(1, rng.randint(2, 20))]
    ranks = []
    for _ in range(rng.randint(1, 4)):
        own = list(labels)
        for _ in range(rng.choice([0, 0, 1, 3])):
            place = rng.randrange(len(own))
            other = some_label(rng, own[place].block_id)
            field = rng.choice([name for name in vars(other) if name != "block_id"])
            own[place] = replace(own[place], **{field: getattr(other, field)})
        for _ in range(rng.choice([0, 0, 1, 3])):
            own.pop(rng.randrange(len(own))) if len(own) > 1 else None
        if rng.random() < 0.3:
            rng.shuffle(own)
        ranks.append(packed(own))
    expected = [replace(label, slot=0) for label in model.agreed(ranks)]
    assert sorted(unpacked(ranks), key=lambda label: label.block_id) == expected
    labelled = sorted({b for each in ranks for b in each.labels.block_ids.tolist()})
    assert labelled_blocks(ranks, 20).tolist() == labelled


def test_slots_and_checksums_may_differ() -> None:
    rng = random.Random(0)
    label = some_label(rng, 1)
    one, other = packed([label]), packed([replace(label, slot=99)])
    other = replace(other, checksums=np.array([7], dtype="<i8").tobytes())
    assert unpacked([one, other]) == [replace(label, slot=0)]


def test_ranks_whose_arrays_are_equal_are_not_looked_at_block_by_block() -> None:
    rng = random.Random(0)
    labels = [some_label(rng, block_id) for block_id in range(1, 9)]
    one, other = packed(labels), packed(labels)
    assert agreed_labels([one, other]) is one.labels


def test_no_ranks_or_different_digest_lengths_agree_on_nothing() -> None:
    label = some_label(random.Random(0), 1)
    short = replace(label, digest=bytes(16), parent_digest=bytes(16))
    assert not len(agreed_labels([]).block_ids)
    assert not len(agreed_labels([packed([label]), packed([short], 16)]).block_ids)
    assert labelled_blocks([], 9).tolist() == []
