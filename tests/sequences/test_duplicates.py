"""Duplicate blocks of running requests are merged, if configured."""

from __future__ import annotations

import numpy as np

from kvcache import KVCacheManager
from kvcache.protocol.commands import BlockTablePatch, Label, Unlabel
from tests.core.model_group import spec_of
from tests.manager.managers_under_test import HYBRID, make_manager
from tests.manager.steps import Engine, new, row

TOKENS = range(10)


def two_that_computed_the_same(manager: KVCacheManager, engine: Engine) -> None:
    """Two requests fill the same two blocks, and neither could hit the other's."""
    for name in ("a", "b"):
        engine.step(new=(new(name, TOKENS, skip_reading_prefix_cache=True),))
    assert manager.get_block_ids("a") == ([1, 2, 3], [4, 5, 6])
    assert manager.get_block_ids("b") == ([7, 8, 9], [10, 11, 12])


def columns_of(patches: BlockTablePatch) -> list[tuple[int, ...]]:
    """Return slot, group, column and block of each changed column."""
    counts = patches.counts
    offsets = np.concatenate([np.arange(count) for count in counts])
    columns = (
        np.repeat(patches.slots, counts),
        np.repeat(patches.groups, counts),
        np.repeat(patches.first_indices, counts) + offsets,
        patches.block_ids,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_requests_that_computed_the_same_share_it_when_their_steps_are_complete() -> None:
    manager = make_manager(HYBRID, merge_duplicates=True)
    engine = Engine(manager)
    two_that_computed_the_same(manager, engine)
    free = manager.statistics().core.num_free_blocks
    result = engine.step(row(1, [10]), completed_step=2)
    assert manager.get_block_ids("b") == ([1, 2, 9], [4, 5, 12])
    assert columns_of(result.patches) == [(1, 0, 0, 1), (1, 0, 1, 2), (1, 1, 0, 4), (1, 1, 1, 5)]
    statistics = manager.statistics().core
    assert (statistics.num_merged_blocks, statistics.num_free_blocks) == (4, free + 4)
    assert statistics.merged_bytes == 4 * spec_of(HYBRID.groups[0]).page_size_bytes
    commands = manager.take_commands()
    labelled = [b for c in commands if isinstance(c, Label) for b in c.block_ids.tolist()]
    withdrawn = [b for c in commands if isinstance(c, Unlabel) for b in c.block_ids.tolist()]
    assert set(labelled) - set(withdrawn) == {1, 2, 4, 5}
    manager.check()


def test_nothing_is_merged_before_the_steps_are_complete() -> None:
    manager = make_manager(HYBRID, merge_duplicates=True)
    engine = Engine(manager)
    two_that_computed_the_same(manager, engine)
    engine.step(row(1, [10]), completed_step=1)
    assert manager.get_block_ids("b") == ([7, 8, 9], [10, 11, 12])
    engine.step(failed_step=2)
    assert manager.statistics().core.num_merged_blocks == 0
    manager.check()


def test_without_the_option_duplicates_stay() -> None:
    manager = make_manager(HYBRID)
    engine = Engine(manager)
    two_that_computed_the_same(manager, engine)
    engine.step(row(1, [10]), completed_step=2)
    assert manager.get_block_ids("b") == ([7, 8, 9], [10, 11, 12])
    assert manager.statistics().core.num_merged_blocks == 0


def test_a_request_that_goes_in_the_same_step_is_not_told() -> None:
    manager = make_manager(HYBRID, merge_duplicates=True)
    engine = Engine(manager)
    two_that_computed_the_same(manager, engine)
    result = engine.step(completed_step=2, finished=("b",), new=(new("c", [1, 2]),))
    assert result.admitted_slots.tolist() == [1]
    assert result.patches.first_indices.tolist() == [0, 0]
    assert result.patches.counts.tolist() == [1, 1]
    manager.check()


def test_a_block_whose_bytes_are_not_confirmed_evicts_no_other() -> None:
    manager = make_manager(HYBRID, merge_duplicates=True)
    one, two = Engine(manager, "one#1"), Engine(manager, "two#1")
    one.step(new=(new("a", TOKENS),))
    two.step(new=(new("b", TOKENS),))
    two.step(completed_step=1)
    assert manager.get_block_ids("b") == ([7, 8, 9], [10, 11, 12])
    assert manager.statistics().core.num_merged_blocks == 0
    # Later no request gives way either: the step that filled the second block has ended.
    one.step(completed_step=1)
    assert manager.statistics().core.num_merged_blocks == 0
    manager.check()
