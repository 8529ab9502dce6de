"""A tree from labels: sealed blocks return, except those on which ranks disagree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvcache.base.errors import BlockError
from kvcache.core import AllBlocksCleared, BlocksStored, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.protocol.labels import LabelSet
from kvcache.requests.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import (
    EventLog,
    full,
    make_flat_core,
    make_request,
    mamba,
    run_request,
    window,
)
from tests.core.labels import label_table, without

NUM_BLOCKS = 60

PLANS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(),),
    "two full": (full(), full(8)),
    "full, window": (full(), window(9)),
    "full, window of long blocks": (full(), window(9, 8)),
    "full, states": (full(), mamba()),
}


def some_request(choose: random.Random, name: str) -> Request:
    units = [choose.randrange(2) for _ in range(choose.randrange(1, 7))]
    tokens = [unit for unit in units for _ in range(4)] + [9]
    items = {}
    if choose.random() < 0.3:
        items = {"mm_positions": [(0, 3)], "mm_hashes": [choose.choice(["cat", "dog"])]}
    return make_request(name, tokens, cache_salt=choose.choice([None, "s"]), **items)


def churned(choose: random.Random, specs: Sequence[KVCacheSpec]) -> FlatCore:
    """Return a core that has served some requests; the first steps are complete."""
    core = make_flat_core(NUM_BLOCKS, *specs)
    running: list[Request] = []
    for step in range(40):
        core.open_step("engine", step)
        request = some_request(choose, f"r{step}")
        if run_request(core, request) is not None:
            running.append(request)
        while running and choose.random() < 0.5:
            core.free(running.pop(choose.randrange(len(running))))
    core.complete_steps("engine", 33)
    core.close_step()
    return core


@pytest.mark.parametrize("name", PLANS)
def test_what_was_sealed_comes_back_into_the_same_blocks(name: str) -> None:
    choose, specs = random.Random(5), PLANS[name]
    core = churned(choose, specs)
    core.fail_steps("engine", 0)
    longest = max(spec.block_size for spec in specs)
    labels = label_table(core, NUM_BLOCKS, longest).collect(0, 1, 1, "layout")
    rebuilt = make_flat_core(NUM_BLOCKS, *specs)
    assert rebuilt.restore([labels, labels]) == core.statistics().num_sealed_blocks
    for number in range(60):
        request = some_request(choose, f"probe {number}")
        assert rebuilt.look_up(request) == core.look_up(request)


def sealed_labels() -> LabelSet:
    core = make_flat_core(20)
    run_request(core, make_request("a", [1] * 4 + [2] * 4 + [3] * 4))
    return label_table(core, 20).collect(0, 1, 1, "layout")


def test_a_rebuilt_core_tells_listeners_everything_after_a_clear() -> None:
    log = EventLog()
    core = make_flat_core(20, events=log)
    assert core.restore([sealed_labels()]) == 3
    cleared, *stored = log.take()
    assert cleared == AllBlocksCleared()
    assert sum(len(event.digests) for event in stored if isinstance(event, BlocksStored)) == 3


def test_tails_are_evicted_before_their_heads_after_a_rebuild() -> None:
    core = make_flat_core(20)
    core.restore([sealed_labels()])
    core.reserve(*filler(17))
    assert core.look_up(make_request("probe", [1] * 4 + [2] * 4 + [3] * 5)).num_tokens == 8


def test_tails_of_a_windowed_group_go_first_where_the_prefix_groups_labels_are_lost() -> None:
    specs = full(), window(25)
    core = make_flat_core(20, *specs)
    run_request(core, make_request("a", [1] * 4 + [2] * 4 + [3] * 4))
    lost = [b for _, g, b, _ in core.contents() if g == 0]
    rebuilt = make_flat_core(20, *specs)
    assert rebuilt.restore([without(label_table(core, 20), 20, lost)]) == 3
    run_request(rebuilt, make_request("filler", [7] * 4 * 9))  # of 19 blocks it takes 18
    tokens = rebuilt.store.columns.tokens
    kept = {int(tokens[n, 0]) for n, g, _, _ in rebuilt.contents() if g == 1}
    assert kept == {1, 7}


def filler(num_blocks: int) -> tuple[Request, Reservation]:
    request = make_request("filler", [7] * 4 * num_blocks)
    return request, Reservation(0, 4 * num_blocks, 0)


def test_two_digests_for_one_place_become_one_block() -> None:
    labels = sealed_labels()
    packed = labels.labels
    forged = np.frombuffer(packed.digests, np.uint8).reshape(3, -1).copy()
    parents = np.frombuffer(packed.parent_digests, np.uint8).reshape(3, -1).copy()
    tokens = packed.token_ids.copy().reshape(3, -1)
    forged[1], parents[1], tokens[1] = 1, parents[0], tokens[0]
    broken = replace(
        packed,
        digests=forged.tobytes(),
        parent_digests=parents.tobytes(),
        token_ids=tokens.ravel(),
    )
    core = make_flat_core(20)
    assert core.restore([replace(labels, labels=broken)]) == 1
    core.check()


def test_a_core_in_use_is_not_restored() -> None:
    core = make_flat_core(20)
    run_request(core, make_request("a", [1] * 8))
    with pytest.raises(BlockError) as error:
        core.restore([sealed_labels()])
    assert str(error.value) == (
        "cannot restore: 2 blocks are in use and 2 are cached: restore an empty pool"
    )
    core.check()


def test_labels_with_negative_tokens_are_not_mistaken_for_images() -> None:
    labels = sealed_labels()
    tokens = labels.labels.token_ids.copy()
    tokens[0] = -1
    core = make_flat_core(20)
    assert core.restore([replace(labels, labels=replace(labels.labels, token_ids=tokens))]) == 0
    seen = make_request("a", [1] * 5, mm_positions=[(0, 3)], mm_hashes=["cat"])
    assert core.look_up(seen).num_tokens == 0
    core.check()
