"""Python in pages runs unchanged; names that a page does not define are provided."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.protocol.step import RequestHints, StepRequest
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from tests.docs.pages import PAGES, ROOT, fences, name_of

BLOCKS = {
    ("README.md", "manager.get_computed_blocks("): "tests/test_readme.py",
    ("README.md", "KVCacheCluster.launch("): "here",
    ("docs/engine-guide.md", "manager.fork("): "here",
    ("docs/engine-guide.md", "PrefixCachingBlockAllocator("): "here",
    ("docs/hints.md", "request.hints"): "here",
    ("docs/hints.md", "client.step("): "here",
    ("docs/hints.md", "client.prefetch_prefix("): "tests/protocol/test_offloading.py",
    ("docs/index.md", "StepRequest(new="): "here",
    ("docs/routers.md", "KVEventSubscriber("): "here",
    ("docs/transformers.md", "PagedCacheStore("): "here",
    ("examples/engine/README.md", "Engine.launch("): "here",
}
"""The start of a block, and the page where it is."""


def block(page: str, mark: str) -> Any:
    """Return a block, compiled."""
    (code,) = [code for code in python_of(ROOT / page) if mark in code]
    return compile(code, page, "exec")


def python_of(page: Path) -> list[str]:
    return [text for language, text in fences(page) if language == "python"]


def test_no_block_is_left_out() -> None:
    missing = [
        (name_of(page), code)
        for page in PAGES
        for code in python_of(page)
        if sum(name_of(page) == name and mark in code for name, mark in BLOCKS) != 1
    ]
    assert not missing
    for name, mark in BLOCKS:
        assert block(name, mark)


def test_the_step_of_the_first_page_can_be_made() -> None:
    names: dict[str, Any] = {}
    exec(block("docs/index.md", "StepRequest(new="), names)
    assert len(names["step"].new[0].token_ids) == 40


def test_the_fork_snippet_copies_before_the_child_writes() -> None:
    library: dict[str, Any] = {"prompt_token_ids": list(range(40))}
    exec(block("README.md", "manager.get_computed_blocks("), library)
    names: dict[str, Any] = {"config": library["config"]}
    exec(block("docs/engine-guide.md", "manager.fork("), names)
    copy = names["copy"]
    assert (copy.sources.tolist(), copy.destinations.tolist()) == ([3], [4])
    assert names["manager"].get_block_ids("child") == ([1, 2, 4],)


def test_the_hints_of_the_page_are_followed() -> None:
    library: dict[str, Any] = {"prompt_token_ids": list(range(40))}
    exec(block("README.md", "manager.get_computed_blocks("), library)
    manager = library["manager"]
    request = Request("r1", list(range(1300)))
    assert manager.allocate_slots(request, 1300) is not None
    exec(block("docs/hints.md", "request.hints"), {"request": request, "manager": manager})
    assert [hint.priority for hint in request.hints] == [90, None]
    assert manager.get_computed_blocks(Request("r2", list(range(1300))))[1] == 1296
    manager.check()


def test_the_step_with_hints_of_the_page_can_be_made() -> None:
    steps: list[StepRequest] = []
    client = SimpleNamespace(step=steps.append)
    names = {"client": client, "StepRequest": StepRequest, "RequestHints": RequestHints}
    exec(block("docs/hints.md", "client.step("), {**names, "CacheHint": CacheHint})
    assert [hint.request_id for hint in steps[0].hints] == list(steps[0].finished) == ["r0"]


def test_the_allocator_snippet_copies_on_write() -> None:
    names: dict[str, Any] = {}
    exec(block("docs/engine-guide.md", "PrefixCachingBlockAllocator("), names)
    assert names["copies"] == [(1, 2)]


def test_the_engine_streams(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("examples/engine/README.md", "Engine.launch("), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("length")
    assert sum(len(re.findall(r"\d+", line)) for line in lines) == 8


def test_a_stock_model_generates_on_paged_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="TRANSFORMERS IS NOT INSTALLED")
    import torch

    from tests.integrations.stock_models import make_model

    ids = torch.arange(12)[None] + 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names: dict[str, Any] = {"model": make_model("llama"), "inputs": inputs}
    exec(block("docs/transformers.md", "PagedCacheStore("), names)
    assert names["output"].shape == (1, 62)
    assert "num_hit_tokens" in capsys.readouterr().out


def test_a_follower_ranks_prefixes() -> None:
    from tests.interop.published_cluster import Prompt, PublishedCluster, fixed_places

    class Enough(Exception):
        """The loop of the page has no end."""

    told: list[Any] = []

    def say(matches: Any) -> None:
        told.append(matches)
        assert len(told) < 1000  # a beat is a tenth of a second
        if matches:
            raise Enough

    prompt = np.arange(65, dtype=np.int32)
    places = fixed_places()
    page = "docs/routers.md"
    (text,) = [code for code in python_of(ROOT / page) if "KVEventSubscriber(" in code]
    for said, place in (("5557", "endpoint"), ("5657", "replay_endpoint")):
        assert f'"tcp://127.0.0.1:{said}"' in text
        text = text.replace(f"tcp://127.0.0.1:{said}", places[place])
    with PublishedCluster(11, **places) as published:
        published.play(Prompt(prompt))
        published.settle()
        with pytest.raises(Enough):
            exec(compile(text, page, "exec"), {"print": say, "prompt_token_ids": prompt})
    (match,) = told[-1]
    assert match.source == "replica 0" and match.device_blocks == 4


@pytest.mark.ray
def test_a_cluster_takes_the_steps_of_an_engine(
    ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"token_ids": np.arange(40, dtype=np.int32), "sampled": 7}
    exec(block("README.md", "KVCacheCluster.launch("), names)
    assert names["result"].admitted_slots[0] >= 0
