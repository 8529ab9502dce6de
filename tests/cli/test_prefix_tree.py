"""Prefixes rebuilt from labels of a real manager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.cli.contents import (
    blocks_by_group,
    blocks_by_namespace,
    last_use,
    prefix_roots,
    sorted_prefixes,
)
from kvcache import KVCacheManager, Request
from kvcache.metrics.inspection import CacheInspection
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelSet, LabelTable
from tests.protocol.scenario import make_config

BLOCK = 4
NUM_BLOCKS = 64


class Cache:
    """A manager, and the labels of a rank below it."""

    def __init__(self) -> None:
        config = make_config(NUM_BLOCKS, is_hybrid=False)
        self.manager = KVCacheManager(config, 64, has_workers=True)
        self._labels = LabelTable(NUM_BLOCKS, 32, BLOCK)

    def run(self, request_id: str, tokens: list[int], **fields: Any) -> Request:
        request = Request(request_id, tokens, **fields)
        blocks, num_hit = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(tokens) - num_hit, num_hit, blocks)
        request.num_computed_tokens = len(tokens)
        return request

    def labels(self) -> LabelSet:
        for command in self.manager.take_commands():
            if isinstance(command, Label):
                self._labels.validate(command)
                self._labels.apply(command)
        return self._labels.collect(0, 1, 0, "layout")

    def inspection(self) -> CacheInspection:
        counts = self.manager.control.users_of_blocks()
        idle_s = np.where(counts > 0, -1, 5.0).astype(np.float32)
        return CacheInspection(0, False, (), counts, idle_s)


def words(*numbers: int) -> list[int]:
    """Return a prompt of one block for each number, and a token."""
    return [number * 100 + i for number in numbers for i in range(BLOCK)] + [7]


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_tree_has_a_node_for_what_prompts_share_and_one_for_each_end(cache: Cache) -> None:
    kept = cache.run("a", words(1, 2, 3, 4))
    for request_id, tokens in (("b", words(1, 2, 5)), ("c", words(1, 2, 5, 6)), ("d", words(9))):
        cache.manager.free(cache.run(request_id, tokens))
    labels, inspection = cache.labels(), cache.inspection()
    roots = prefix_roots(labels, inspection)
    shared, alone = roots
    assert (shared.num_own_blocks, shared.num_tokens, shared.num_ends) == (2, 8, 2)
    assert (alone.num_blocks, alone.num_ends, alone.num_references, alone.idle_s) == (1, 1, 0, 5.0)
    assert sorted((n.num_own_blocks, n.num_blocks, n.num_references) for n in shared.children) == [
        (2, 4, 0),
        (2, 4, 1),
    ]
    assert shared.num_references == 1 and shared.idle_s == -1
    assert blocks_by_group(labels) == {0: 7}
    cache.manager.free(kept)


def test_prefixes_come_in_the_order_that_was_asked_for(cache: Cache) -> None:
    cache.run("a", words(1, 2, 3))
    cache.run("b", words(1, 2, 4))
    cache.manager.free(cache.run("c", words(8, 9, 10, 11, 12)))
    roots = prefix_roots(cache.labels(), cache.inspection())
    firsts = {
        sort: sorted_prefixes(roots, sort, 1)[0].num_blocks
        for sort in ("used", "shared", "longest", "recent")
    }
    assert firsts == {"used": 2, "shared": 2, "longest": 5, "recent": 3}
    assert len(sorted_prefixes(roots, "used", 3)) == 3


def test_namespaces_are_told_apart(cache: Cache) -> None:
    for request_id, tenant in (("a", None), ("b", "x"), ("c", "x")):
        tokens = words(1, 2) if request_id != "c" else words(1, 3)
        cache.run(request_id, tokens, tenant=tenant)
    labels = cache.labels()
    assert [(n.tenant, count) for n, count in blocks_by_namespace(labels).items()] == [
        ("x", 3),
        (None, 2),
    ]
    roots = prefix_roots(labels, cache.inspection())
    assert sorted((root.namespace.tenant or "", root.num_ends) for root in roots) == [
        ("", 1),
        ("x", 2),
    ]


def test_an_empty_cache_has_no_prefixes(cache: Cache) -> None:
    assert prefix_roots(cache.labels(), cache.inspection()) == []
    assert blocks_by_group(cache.labels()) == {}


@pytest.mark.parametrize(
    ("idle_s", "num_references", "text"),
    [
        (3.2, 0, "3 s ago"),
        (600.0, 0, "10 min ago"),
        (9000.0, 0, "2 h ago"),
        (3.0, 1, "in use"),
        (-1.0, 0, ""),
    ],
)
def test_times_are_told_in_words(idle_s: float, num_references: int, text: str) -> None:
    assert last_use(idle_s, num_references) == text
