"""Fixtures of the interop tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interop.dynamo_indexer import DynamoIndexer
from tests.interop.router_venv import OWN_VENV, find_python


@pytest.fixture(scope="session")
def router_python() -> Path:
    """The interpreter that has the routers."""
    found = find_python()
    if found is None:
        pytest.skip(f"NOT COMPARED with real routers: {OWN_VENV} is absent, run make test-interop")
    return found


@pytest.fixture
def start_indexer(router_python: Path, tmp_path: Path) -> Iterator[Callable[[], DynamoIndexer]]:
    """Starts Dynamo's indexers; all are ended with the test."""
    with ExitStack() as stack:
        count = 0

        def start() -> DynamoIndexer:
            nonlocal count
            count += 1
            return stack.enter_context(DynamoIndexer(router_python, tmp_path / f"indexer-{count}"))

        yield start
