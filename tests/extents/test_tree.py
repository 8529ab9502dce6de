"""The tree of runs against a plain dictionary of prefixes, and what a run does to its arrays."""

from __future__ import annotations

import random
from typing import TypeAlias

import numpy as np
import pytest

from kvcache.arrays import IndexArray
from kvcache.extents.block_store import SEALED, BlockStore
from kvcache.extents.run import Run
from kvcache.extents.shape import TreeShape
from kvcache.extents.tree import RunTree
from kvcache.policies import EntryInfo, make_eviction_policy
from kvcache.request_content import DEFAULT_NAMESPACE
from tests.extents.footprint import footprint_bytes
from tests.managers.core_builders import full, plan

UNIT_TOKENS, DIGEST_BYTES = 4, 8
NUM_BLOCKS = 400
NONE_DIGEST = bytes(DIGEST_BYTES)

Prefix: TypeAlias = tuple[int, ...]
"""A sequence of units, each named by a number."""


def tokens_of(prefix: Prefix) -> bytes:
    return np.repeat(np.array(prefix, dtype=np.int32), UNIT_TOKENS).tobytes()


def digest_of(prefix: Prefix) -> bytes:
    return (hash(prefix) % (1 << 64)).to_bytes(DIGEST_BYTES, "little")


class Book:
    """Weights of a tree's runs, for the policy."""

    is_uniform = False

    def __init__(self) -> None:
        self.tree: RunTree

    def weight(self, entry: int) -> int:
        return self.tree.num_blocks(self.tree.run_by_entry[entry])

    def weights(self, entries: IndexArray) -> IndexArray:
        runs = [self.tree.run_by_entry[entry] for entry in entries.tolist()]
        return np.array([self.tree.num_blocks(run) for run in runs], dtype=np.intp)

    def describe(self, entry: int) -> EntryInfo:
        return EntryInfo(self.tree.num_blocks(self.tree.run_by_entry[entry]))


class TreeWalk:
    """A tree, and the block of each prefix as a dictionary would have it."""

    def __init__(self, seed: int) -> None:
        print(f"seed {seed}")
        self.random = random.Random(seed)
        shape = TreeShape.of(plan(NUM_BLOCKS, full(UNIT_TOKENS)), DIGEST_BYTES)
        self.store = BlockStore(NUM_BLOCKS, has_single=False)
        book = Book()
        self.tree = book.tree = RunTree(shape, self.store, NONE_DIGEST, lambda run: None)
        self.store.policy = make_eviction_policy("lru", NUM_BLOCKS + 1, book)
        self.blocks: dict[Prefix, int] = {}
        self.held: list[tuple[Run, Prefix]] = []

    def some_prefix(self) -> Prefix:
        length = self.random.randrange(1, 9)
        return tuple(self.random.randrange(1, 3) for _ in range(length))

    def longest_cached(self, prefix: Prefix) -> int:
        return next((n for n in range(len(prefix), 0, -1) if prefix[:n] in self.blocks), 0)

    def admit(self, prefix: Prefix | None = None) -> None:
        """Hold what is there of a prefix, and add what is missing."""
        prefix = prefix or self.some_prefix()
        if len(prefix) > self.store.num_fresh:
            return
        root = self.tree.root(DEFAULT_NAMESPACE)
        walk = self.tree.walk(root, tokens_of(prefix), 0, len(prefix))
        assert walk.num_units == self.longest_cached(prefix)
        run = root
        if walk.path:
            run = walk.path[-1]
            if walk.num_of_last < run.num_units:
                run = self.tree.split(run, walk.num_of_last)
        self.tree.hold(run)
        missing = range(walk.num_units, len(prefix))
        if missing:
            ids = self.store.take_fresh(len(missing))
            self.store.references[ids] = 0
            self.store.fill(ids, SEALED)
            run = self.tree.extend(
                run,
                tokens_of(prefix)[walk.num_units * UNIT_TOKENS * 4 :],
                ids.reshape(1, -1),
                np.empty((0, len(missing)), dtype=np.int64),
                b"".join([digest_of(prefix[: n + 1]) for n in missing]),
            )
            for n, block_id in zip(missing, ids.tolist(), strict=True):
                self.blocks[prefix[: n + 1]] = block_id
        self.held.append((run, prefix))

    def release(self, index: int | None = None) -> None:
        if self.held:
            if index is None:
                index = self.random.randrange(len(self.held))
            run, _ = self.held.pop(index)
            self.tree.release(run)

    def evict(self, wanted: int = 0) -> None:
        """Evict some blocks: never such as are held, children before parents."""
        wanted = wanted or self.random.randrange(1, 6)
        if wanted > self.store.num_unheld_cached:
            return
        while wanted:
            victims = self.store.policy.choose(wanted)
            entries = list(victims.entries)
            for entry in entries:
                run = self.tree.run_by_entry[entry]
                assert not run.children
                run.settle()
                is_last = entry == entries[-1]
                count = victims.num_blocks_of_last if is_last else run.num_units
                gone = self.tree.blocks_of(run, run.num_units - count)
                is_whole = count == run.num_units
                self.forget(gone.tolist())
                self.tree.trim(run, count)
                self.store.end_lives(gone)
                self.store.put_fresh(gone)
                if not is_whole:
                    self.store.policy.put_back([entry])
                wanted -= len(gone)

    def forget(self, block_ids: list[int]) -> None:
        by_block = {block_id: prefix for prefix, block_id in self.blocks.items()}
        held = {prefix[:n] for _, prefix in self.held for n in range(1, len(prefix) + 1)}
        for block_id in block_ids:
            prefix = by_block[block_id]
            del self.blocks[prefix]
            assert prefix not in held
            assert not any(other[: len(prefix)] == prefix for other in self.blocks)

    def compare(self) -> None:
        found: dict[Prefix, int] = {}
        pending: list[tuple[Run, Prefix]] = [
            (child, ()) for root in self.tree.roots.values() for child in root.children.values()
        ]
        while pending:
            run, prefix = pending.pop()
            run.settle()
            units = np.frombuffer(run.tokens, np.int32)[::UNIT_TOKENS].tolist()
            for n, (unit, block_id) in enumerate(zip(units, run.ids[0].tolist(), strict=True)):
                prefix = (*prefix, unit)
                found[prefix] = block_id
                digest = run.digests[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]
                assert digest == digest_of(prefix)
            assert run.end == len(prefix)
            pending += [(child, prefix) for child in run.children.values()]
        assert found == self.blocks
        assert self.tree.num_units == len(found)
        assert self.tree.num_runs == len(list(self.tree.runs()))
        held = {prefix[:n] for _, prefix in self.held for n in range(1, len(prefix) + 1)}
        assert self.store.num_unheld_cached == len(self.blocks.keys() - held)
        for run, prefix in self.held:
            assert run.end == len(prefix)
            assert run.last_digest(DIGEST_BYTES) == digest_of(prefix)


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_holds_what_a_dictionary_of_prefixes_would(seed: int) -> None:
    walk = TreeWalk(seed)
    for _ in range(250):
        walk.random.choice([walk.admit, walk.admit, walk.release, walk.evict])()
        walk.compare()
    while walk.held:
        walk.release()
        walk.compare()
    assert walk.store.num_free == NUM_BLOCKS - 1


def test_runs_grow_together_when_their_branches_have_gone() -> None:
    walk = TreeWalk(0)
    for prefix in ((1, 1, 1, 1), (1, 1, 2), (1, 2)):
        walk.admit(prefix)
    assert walk.tree.num_runs == 5
    walk.release(2)
    walk.release(1)
    walk.evict(2)
    walk.compare()
    assert walk.tree.num_runs == 3
    walk.release()
    walk.compare()
    assert walk.tree.num_runs == 1


def test_of_a_namespace_without_contents_nothing_is_left() -> None:
    walk = TreeWalk(0)
    walk.admit((1, 2, 3))
    assert len(walk.tree.roots) == 1
    walk.release()
    walk.evict(3)
    assert (len(walk.tree.roots), walk.tree.num_runs, walk.tree.num_units) == (0, 0, 0)


def make_run(units: list[int]) -> Run:
    prefixes = [tuple(units[: n + 1]) for n in range(len(units))]
    return Run(
        None,
        tokens_of(tuple(units)),
        ids=np.array([units], dtype=np.int32),
        handles=np.empty((0, len(units)), dtype=np.int64),
        digests=b"".join(map(digest_of, prefixes)),
        num_units=len(units),
    )


def contents_of(run: Run) -> tuple[list[int], int, int]:
    run.settle()
    assert len(run.tokens) == run.num_units * UNIT_TOKENS * 4
    return run.ids[0].tolist(), len(run.tokens), len(run.digests)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_a_list_that_grows_and_shrinks_at_its_end(seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    units = [1, 2]
    run = make_run(units)
    for _ in range(120):
        if len(units) > 1 and choose.random() < 0.5:
            count = choose.randrange(1, len(units))
            run.settle()
            run.trim(count)
            del units[-count:]
        else:
            new = [choose.randrange(100) for _ in range(choose.randrange(1, 5))]
            prefixes = [(*units, *new[: n + 1]) for n in range(len(new))]
            run.append(
                tokens_of(tuple(new)),
                np.array([new], dtype=np.int32),
                np.empty((0, len(new)), dtype=np.int64),
                b"".join(map(digest_of, prefixes)),
                len(new),
            )
            units += new
        assert run.last_digest(DIGEST_BYTES) == digest_of(tuple(units))
        assert run.end == len(units)
        if choose.random() < 0.5:
            assert contents_of(run) == (
                units,
                len(units) * UNIT_TOKENS * 4,
                len(units) * DIGEST_BYTES,
            )


def test_the_two_parts_of_a_run_that_was_split_become_one_again() -> None:
    run = make_run([5, 6, 7, 8])
    before = contents_of(run)
    head = run.split(1)
    assert (head.ids.tolist(), run.ids.tolist()) == ([[5]], [[6, 7, 8]])
    assert (head.start, head.end, run.start, run.end) == (0, 1, 1, 4)
    assert list(head.children.values()) == [run]
    run.absorb([head])
    assert contents_of(run) == before
    assert head.standing() is run


def test_a_run_that_grew_unit_by_unit_keeps_no_arrays_of_whole_batches() -> None:
    run, wide = make_run([0]), np.zeros((1, 1000), dtype=np.int32)
    for unit in range(3000):
        of_batch = wide.copy()
        run.append(
            tokens_of((unit,)),
            of_batch[:, :1],
            np.empty((0, 1), dtype=np.int64),
            digest_of((unit,)),
            1,
        )
    assert footprint_bytes(run) < 3000 * wide.nbytes / 4
    assert contents_of(run)[0] == [0] * 3001
