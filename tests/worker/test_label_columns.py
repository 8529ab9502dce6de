"""Label commands and patches with slightly wrong columns are refused, as by a check of each rule;
valid ones have exactly their effect."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.base.arrays import int32_array
from kvcache.base.errors import KVCacheError
from kvcache.protocol.commands import BlockTablePatch, Label
from kvcache.protocol.labels import LabelTable
from kvcache.worker.block_tables import BlockTables

NUM_BLOCKS, DIGEST_BYTES, BLOCK_TOKENS = 40, 8, 4
EDGES = (-(2**31), -1, 0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, NUM_BLOCKS - 1, NUM_BLOCKS, 2**31 - 1)


def random_label(choose: random.Random) -> Label:
    """Return a valid label, with ascending blocks or not."""
    count = choose.randint(0, 6)
    ids = choose.sample(range(1, NUM_BLOCKS), count)
    if choose.random() < 0.5:
        ids.sort()
    counts = [choose.randint(0, BLOCK_TOKENS) for _ in ids]
    names = tuple(choose.randbytes(2) for _ in range(choose.randint(1, 3)))
    return Label(
        block_ids=int32_array(ids),
        groups=int32_array([choose.randint(0, 2) for _ in ids]),
        slots=int32_array([choose.randint(-1, 5) for _ in ids]),
        digests=choose.randbytes(count * DIGEST_BYTES),
        parent_digests=choose.randbytes(count * DIGEST_BYTES),
        token_counts=int32_array(counts),
        token_ids=int32_array([choose.randint(0, 2**31 - 1) for _ in range(sum(counts))]),
        namespaces=int32_array([choose.randrange(len(names)) for _ in ids]),
        namespace_names=names,
    )


def spoiled(choose: random.Random, label: Label) -> Label:
    """Return the label with one number of one column changed, or one column shortened."""
    name = choose.choice(("block_ids", "token_counts", "namespaces", "token_ids"))
    column = getattr(label, name).copy()
    if len(column) and choose.random() < 0.8:
        column[choose.randrange(len(column))] = choose.choice((*EDGES, *label.block_ids.tolist()))
    else:
        column = column[: max(0, len(column) - 1)]
    return replace(label, **{name: column})


def is_sound(label: Label) -> bool:
    ids, counts = label.block_ids.tolist(), label.token_counts.tolist()
    namespaces = label.namespaces.tolist()
    return (
        len(ids) == len(counts) == len(namespaces)
        and len(set(ids)) == len(ids)
        and all(1 <= each < NUM_BLOCKS for each in ids)
        and all(0 <= each <= BLOCK_TOKENS for each in counts)
        and sum(counts) == len(label.token_ids)
        and all(0 <= each < len(label.namespace_names) for each in namespaces)
    )


def state_of(table: LabelTable) -> list[Any]:
    return list(table.collect(0, 0, 0, ""))


def test_labels_are_refused_or_written_as_the_rules_say() -> None:
    choose = random.Random(3)
    table = LabelTable(NUM_BLOCKS, DIGEST_BYTES, BLOCK_TOKENS)
    known: dict[int, tuple[Any, ...]] = {}
    num_refused = 0
    for _ in range(3000):
        label = random_label(choose)
        if choose.random() < 0.5:
            label = spoiled(choose, label)
        if not is_sound(label):
            num_refused += 1
            with pytest.raises(KVCacheError):
                table.validate(label)
            continue
        table.validate(label)
        table.apply(label)
        start = 0
        for i, block_id in enumerate(label.block_ids.tolist()):
            end, at = start + int(label.token_counts[i]), slice(i * DIGEST_BYTES, None)
            known[block_id] = (
                int(label.groups[i]),
                int(label.slots[i]),
                label.digests[at][:DIGEST_BYTES],
                label.parent_digests[at][:DIGEST_BYTES],
                tuple(label.token_ids[start:end].tolist()),
                label.namespace_names[int(label.namespaces[i])],
                None,
            )
            start = end
    found = {
        each.block_id: (
            each.group,
            each.slot,
            each.digest,
            each.parent_digest,
            each.token_ids,
            each.namespace,
            each.checksum,
        )
        for each in state_of(table)
    }
    assert found == known
    assert num_refused > 500


def test_many_blocks_that_do_not_rise_are_written_and_named_once() -> None:
    table = LabelTable(NUM_BLOCKS * 10, DIGEST_BYTES, BLOCK_TOKENS)
    count = 200
    ids = int32_array(range(count, 0, -1))
    zeros = np.zeros(count, dtype=np.int32)
    digests = bytes(count * DIGEST_BYTES)
    label = Label(ids, zeros, zeros, digests, digests, zeros, zeros[:0], zeros, (b"n",))
    table.validate(label)
    table.apply(label)
    assert len(table) == count
    ids[7] = ids[150]
    with pytest.raises(KVCacheError, match="names a block twice"):
        table.validate(label)


WIDTHS, NUM_SLOTS = (6, 3), 5
PATCH_EDGES = (-(2**31), -1, 0, 1, 2, 3, 5, 6, NUM_BLOCKS - 1, NUM_BLOCKS, 2**31 - 1)


def random_patch(choose: random.Random) -> BlockTablePatch:
    runs = []
    for _ in range(choose.randint(0, 5)):
        group = choose.randrange(len(WIDTHS))
        first = choose.randint(0, WIDTHS[group])
        count = choose.randint(0, WIDTHS[group] - first)
        runs.append((choose.randrange(NUM_SLOTS), group, first, count))
    columns = [int32_array([run[i] for run in runs]) for i in range(4)]
    total = sum(run[3] for run in runs)
    ids = int32_array([choose.randrange(NUM_BLOCKS) for _ in range(total)])
    return BlockTablePatch(*columns, ids)


def is_fitting(patch: BlockTablePatch) -> bool:
    columns = (patch.slots, patch.groups, patch.first_indices, patch.counts)
    if len(set(map(len, columns))) > 1:
        return False
    runs = zip(*(column.tolist() for column in columns), strict=True)
    return (
        all(
            0 <= slot < NUM_SLOTS
            and 0 <= group < len(WIDTHS)
            and first >= 0
            and count >= 0
            and first + count <= WIDTHS[group]
            for slot, group, first, count in runs
        )
        and sum(patch.counts.tolist()) == len(patch.block_ids)
        and all(0 <= each < NUM_BLOCKS for each in patch.block_ids.tolist())
    )


def test_patches_are_refused_or_written_as_the_rules_say() -> None:
    choose = random.Random(5)
    tables = BlockTables(WIDTHS, NUM_BLOCKS, NUM_SLOTS, torch.device("cpu"))
    expected = [np.zeros((NUM_SLOTS, width), dtype=np.int32) for width in WIDTHS]
    num_refused = 0
    for _ in range(3000):
        patch = random_patch(choose)
        if choose.random() < 0.5:
            name = choose.choice(("slots", "groups", "first_indices", "counts", "block_ids"))
            column = getattr(patch, name).copy()
            if len(column) and choose.random() < 0.8:
                column[choose.randrange(len(column))] = choose.choice(PATCH_EDGES)
            else:
                column = column[: max(0, len(column) - 1)]
            patch = replace(patch, **{name: column})
        if not is_fitting(patch):
            num_refused += 1
            with pytest.raises(KVCacheError):
                tables.validate(patch)
            continue
        tables.validate(patch)
        tables.apply(patch)
        start = 0
        for slot, group, first, count in zip(
            patch.slots.tolist(),
            patch.groups.tolist(),
            patch.first_indices.tolist(),
            patch.counts.tolist(),
            strict=True,
        ):
            expected[group][slot, first : first + count] = patch.block_ids[start : start + count]
            start += count
    assert all(np.array_equal(tables[g], table) for g, table in enumerate(expected))
    assert num_refused > 500
