"""A few seeds of the schedules of faults: `python -m tests.vllm.schedules` runs others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.vllm.schedules import World, model_of, opened

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def worlds(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    scratch = tmp_path_factory.mktemp("schedules")
    with contextlib.ExitStack() as stack:
        models = {model_of(seed) for seed in SEEDS}
        yield {m: stack.enter_context(opened(m, scratch, scratch / "kept", 1)) for m in models}


SEEDS = [1, 2, 7, 9]
"""The engine of a hybrid is stopped; one is killed; bytes change; bytes change, in files too."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault_changes_a_token(worlds: dict[str, World], seed: int) -> None:
    worlds[model_of(seed)].run(seed)
