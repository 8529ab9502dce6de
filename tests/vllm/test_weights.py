"""Other weights, of a model or of an adapter, see no block of old ones on the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.conftest import Starter, made_model, make_adapter
from tests.vllm.test_connector import HITS, MEMORY, PROMPTS

pytestmark = pytest.mark.vllm


def test_weights_that_change_in_a_running_engine_leave_no_old_byte(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    model = made_model(python, tmp_path / "model")
    files = tmp_path / "files"
    files.mkdir()
    disk = {"directory": str(files), "capacity_per_rank": "8MiB", "write": "on_store"}
    extra = {"name": new_name(), "offload": {"host_memory_per_rank": "64MiB", "disk": disk}}
    engine = start(extra, model=model)
    old = engine.generate(PROMPTS)
    made_model(python, tmp_path / "model", seed=8)
    engine.ask(do="reload")
    engine.reset(connector=True)
    new = engine.generate(PROMPTS)
    engine.reset()
    warm = engine.generate(PROMPTS)
    engine.kill()
    engine = start(model=model)
    expected = engine.generate(PROMPTS).tokens
    engine.kill()
    assert expected != old.tokens
    assert (new.cached, new.tokens) == ([0, 0, 0], expected)
    assert (warm.cached, warm.tokens) == (HITS, expected)
    engine = start(extra, model=model)  # it cannot know that its weights are the new ones
    again = engine.generate(PROMPTS)
    assert (again.cached, again.tokens) == ([0, 0, 0], expected)
    engine.reset(connector=True)  # weights may have changed
    engine.kill()
    engine = start({**extra, "weight_revision": "2"}, model=model)
    cold = engine.generate(PROMPTS)
    engine.kill()
    assert (cold.cached, cold.tokens) == ([0, 0, 0], expected)


def test_neither_other_weights_of_an_adapter_nor_a_sleep_see_old_bytes(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    adapter = make_adapter(python, tmp_path, 1)
    extra = {"name": new_name(), **MEMORY}
    lora = {"enable_lora": True, "max_lora_rank": 8}
    engine = start(extra, **lora)
    plain, old = engine.generate(PROMPTS), engine.generate(PROMPTS, adapter=adapter)
    assert (old.cached, old.tokens != plain.tokens) == ([0, 0, 0], True)
    engine.reset()
    warm = engine.generate(PROMPTS, adapter=adapter)
    assert (warm.cached, warm.tokens) == (HITS, old.tokens)
    engine.kill()
    make_adapter(python, tmp_path, 2)
    engine = start(extra, **lora)
    new = engine.generate(PROMPTS, adapter=adapter)
    assert (new.cached, new.tokens != old.tokens) == ([0, 0, 0], True)
    engine.reset()
    warm = engine.generate(PROMPTS, adapter=adapter)
    assert (warm.cached, warm.tokens) == (HITS, new.tokens)
    assert engine.generate(PROMPTS).cached == HITS  # what the first engine has stored
    for level in (1, 2):
        engine.ask(do="sleep", level=level)
        assert engine.generate(PROMPTS).cached == [0, 0, 0]
        engine.reset()
        slept = engine.generate(PROMPTS)
        assert (slept.cached, slept.tokens) == (HITS, plain.tokens)
    engine.kill()
