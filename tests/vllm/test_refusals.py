"""A real vLLM that cannot have the connector ends at its start with one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Starter, made_model
from tests.vllm.test_connector import MEMORY

pytestmark = pytest.mark.vllm


def test_a_wrong_option_of_a_rank_ends_the_start_with_one_sentence(
    start: Starter, new_name: Callable[[], str]
) -> None:
    disk = {"directory": "/absent/kvcache", "capacity_per_rank": "8MiB"}
    wrong = {"name": new_name(), "offload": {"host_memory_per_rank": "8MiB", "disk": disk}}
    assert re.fullmatch(r".*/absent/kvcache.*: make or mount it first", refusal(start, wrong))


def test_another_version_ends_the_start_with_one_sentence(
    start: Starter, new_name: Callable[[], str]
) -> None:
    extra = {"name": new_name(), **MEMORY}
    assert refusal(start, extra, module="tests.vllm.other_version") == (
        "vLLM is version 0.33.1, kvcache's connector serves 0.32.x: install vllm==0.32.0, or "
        "remove --kv-transfer-config"
    )


def test_a_model_whose_states_are_no_blocks_ends_the_start_with_one_sentence(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    model = made_model(python, tmp_path, "mamba")
    assert refusal(start, {"name": new_name(), **MEMORY}, model=model) == (
        "the model has KV cache groups MambaSpec, the connector serves FullAttentionSpec and "
        "SlidingWindowSpec: remove --kv-transfer-config"
    )


def test_a_layout_that_cannot_be_moved_ends_the_start_with_one_sentence(
    start: Starter, new_name: Callable[[], str]
) -> None:
    extra = {"name": new_name(), **MEMORY}
    assert re.fullmatch(
        r"the KV cache of layer model\.layers\.0\S* is \(.*\) with strides \(.*\), the connector "
        r"moves tensors of \d+ blocks, blocks first, in pieces of at least 64 bytes: choose "
        r"another attention backend, or remove --kv-transfer-config",
        refusal(start, extra, module="tests.vllm.odd_layout"),
    )


def refusal(start: Starter, extra: dict[str, Any], **options: Any) -> str:
    """Return the sentence with which an engine ends at its start."""
    with pytest.raises(AssertionError, match="does not answer") as ended:
        start(extra, **options)
    found = re.findall(r"kvcache\.base\.errors\.\w+: (.*)", str(ended.value))
    assert found, ended.value
    return str(found[-1])
