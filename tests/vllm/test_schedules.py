"""A few seeds of the schedules of faults: `python -m tests.vllm.schedules` runs others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import Starter
from tests.vllm.schedules import World

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def world(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(start, tmp_path_factory.mktemp("files"))
    made.expect()
    yield made
    made.close()


SEEDS = [1, 2, 7, 9]
"""The engine is stopped; it is killed; bytes change; bytes change, in files too."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault_changes_a_token(world: World, seed: int) -> None:
    world.run(seed)
