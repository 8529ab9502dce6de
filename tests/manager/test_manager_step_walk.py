"""Random steps against a slow, obvious model."""

from __future__ import annotations

import random

import pytest

from tests.manager.managers_under_test import (
    FULL,
    HYBRID,
    MORE_SHAPES,
    THREE_KINDS,
    WINDOW,
    Shape,
    make_manager,
)
from tests.manager.slow_model import SlowModel
from tests.manager.step_walk import StepWalk

QUICK_SEEDS, SEEDS = 3, 12
WALKS = [
    pytest.param(
        shape,
        seed,
        marks=() if seed < QUICK_SEEDS else pytest.mark.long,
        id=f"{shape.name}-{seed}",
    )
    for shape in (FULL, WINDOW, HYBRID, THREE_KINDS, *MORE_SHAPES)
    for seed in range(SEEDS)
]
"""The first seeds in every run, the others where there is time."""


@pytest.mark.parametrize(("shape", "seed"), WALKS)
def test_steps_do_what_a_slow_model_says(shape: Shape, seed: int) -> None:
    print(f"seed {seed}, shape {shape.name}")
    rng = random.Random(f"{shape.name} {seed}")
    num_blocks = rng.choice([24, 40, 90])
    num_slots = rng.choice([4, 8])
    # The model counts block by block, as the reference core does; the fast one must agree with it.
    manager = make_manager(
        shape, num_blocks=num_blocks, max_num_seqs=num_slots, log_stats=True, core="blocks"
    )
    model = SlowModel(num_blocks, shape.groups, shape.max_model_len)
    walk = StepWalk(manager, model, rng, num_slots)
    for _ in range(120):
        walk.step()
    for _ in range(12):
        walk.step(may_admit=False, finish_all=True)
    assert model.requests == {}
    assert manager.statistics().core.num_free_blocks == num_blocks - 1
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert stats.hits + stats.preempted_hits == walk.num_hit_tokens
