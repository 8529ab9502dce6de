"""A hybrid's hit is the longest prefix for which the rule of every kind holds: by brute force."""

from __future__ import annotations

import random
from math import gcd, lcm

import numpy as np
import pytest

from kvcache.blocks.pool import BlockPool
from kvcache.blocks.run import CachedRun
from kvcache.hashing import BlockHash
from kvcache.managers.coordinators import get_kv_cache_coordinator
from kvcache.request_content import DEFAULT_NAMESPACE
from kvcache.specs import KVCacheSpec
from tests.managers.core_builders import plan
from tests.managers.core_model import ModelGroup
from tests.managers.core_walk import spec_of

FULL, WINDOW = ModelGroup(4), ModelGroup(4, window=6)
CHUNKED, STATES = ModelGroup(4, chunk=8), ModelGroup(4, states="align")

ANY_KINDS = {
    "full": [FULL],
    "window": [WINDOW],
    "chunked": [CHUNKED],
    "states": [STATES],
    "full and chunked": [FULL, CHUNKED],
    "full and states": [FULL, STATES],
    "chunked and states": [CHUNKED, STATES],
    "window and chunked": [WINDOW, CHUNKED],
    "two chunks": [ModelGroup(2, chunk=6), ModelGroup(4, chunk=8)],
    "all": [FULL, WINDOW, CHUNKED, STATES],
    "full 16, window 8, chunked 32": [
        ModelGroup(16),
        ModelGroup(8, window=20),
        ModelGroup(32, chunk=64),
    ],
    "blocks that share no divisor": [
        ModelGroup(6),
        ModelGroup(4, chunk=8),
        ModelGroup(2, states="align"),
        ModelGroup(2, window=5),
    ],
    "coarse states": [ModelGroup(2), ModelGroup(2, window=3), ModelGroup(8, states="align")],
}
WITH_EAGLE = {
    "full": [FULL],
    "window": [WINDOW],
    "full and window": [FULL, WINDOW],
    "differing blocks": [ModelGroup(6), ModelGroup(4, window=9), ModelGroup(2, window=3)],
}
CASES = [(name, groups, False) for name, groups in ANY_KINDS.items()]
CASES += [(f"{name}, eagle", groups, True) for name, groups in WITH_EAGLE.items()]


class CachedBlocks:
    """A pool where some blocks of one sequence are cached, by group and index."""

    def __init__(self, groups: list[ModelGroup], num_tokens: int, rng: random.Random) -> None:
        self.groups = groups
        self.fine = gcd(*(group.block_size for group in groups))
        self.digests = [BlockHash(bytes([i, 7])) for i in range(num_tokens // self.fine)]
        sizes = [group.block_size for group in groups]
        self.pool = BlockPool(
            1 + sum(num_tokens // size for size in sizes), ordered_groups=frozenset()
        )
        self.ids: list[dict[int, int]] = []
        share = rng.choice([0.3, 0.6, 0.8, 0.95])
        for number, size in enumerate(sizes):
            held = {}
            for index in range(num_tokens // size):
                if rng.random() < share:
                    held[index] = self.cache(number, index, size)
            self.ids.append(held)

    def cache(self, group: int, index: int, size: int) -> int:
        (block_id,) = self.pool.get_new_blocks(1)
        digest = self.digests[(index + 1) * size // self.fine - 1]
        self.pool.cache_full_blocks(
            CachedRun(
                table=self.pool.contents.table(DEFAULT_NAMESPACE, group),
                block_ids=[block_id],
                digests=[digest],
                parent=BlockHash(b"before" + digest),
                token_ids=np.arange(size, dtype=np.int32),
                block_size=size,
                extra_keys=(),
                request_id="r",
                first_index=index,
            )
        )
        return block_id

    def tables_at(self, length: int, extra: int) -> list[list[int]] | None:
        """The tables of a hit of `length` tokens, or None if a group has not what it needs."""
        tables = []
        for group, ids in zip(self.groups, self.ids, strict=True):
            size = group.block_size
            first = max(0, group.first_needed(length) - (extra // size if group.window else 0))
            if any(index not in ids for index in range(first, length // size)):
                return None
            table = [0 if i < first else ids[i] for i in range(length // size)]
            tables.append(table[: (length - extra) // size])
        return tables

    def longest(self, max_length: int, use_eagle: bool) -> tuple[list[list[int]], int]:
        step = lcm(*(group.block_size for group in self.groups))
        extra = step if use_eagle else 0
        most = min(max_length, len(self.digests) * self.fine)
        for length in range(most // step * step, 0, -step):
            tables = self.tables_at(length, extra)
            if tables is not None:
                return tables, length - extra
        return [[] for _ in self.groups], 0


@pytest.mark.parametrize(
    ("groups", "use_eagle"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_hit_is_the_longest_on_which_all_kinds_agree(
    groups: list[ModelGroup], use_eagle: bool
) -> None:
    specs: list[KVCacheSpec] = [spec_of(group) for group in groups]
    lengths = set()
    for seed in range(60):
        rng = random.Random(seed)
        step = lcm(*(group.block_size for group in groups))
        blocks = CachedBlocks(groups, step * rng.randint(1, 9), rng)
        coordinator = get_kv_cache_coordinator(
            plan(blocks.pool.num_blocks, *specs), blocks.pool, use_eagle=use_eagle
        )
        for max_length in rng.sample(range(step * 11), 5):
            hit = coordinator.find_longest_cache_hit(blocks.digests, max_length, DEFAULT_NAMESPACE)
            tables, num_tokens = blocks.longest(max_length, use_eagle)
            assert hit.num_tokens == num_tokens, f"seed {seed}, {max_length} tokens"
            assert [list(ids) for ids in hit.block_ids] == tables, f"seed {seed}"
            lengths.add(num_tokens)
    assert len(lengths) > 3
