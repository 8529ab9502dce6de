"""Models for the tests of stock models: made once, never changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

KINDS = ("llama", "mistral", "gemma3")
"""Full attention only; windows only; windows except in every third layer."""


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    from tests.integrations.stock_models import make_model

    return {kind: make_model(kind) for kind in KINDS}


@pytest.fixture(
    params=[*(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[:2]), KINDS[2]]
)
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    return models[request.param]


@pytest.fixture
def llama(models: dict[str, Any]) -> Any:
    return models["llama"]


@pytest.fixture
def mistral(models: dict[str, Any]) -> Any:
    return models["mistral"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrix products are tiny: more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_hook_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "models" in request.fixturenames:
        for model in request.getfixturevalue("models").values():
            assert not model._forward_pre_hooks
            assert not model._forward_hooks
