"""Requests with images: equal text with other images is another prompt, on the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.conftest import Starter, made_model
from tests.vllm.engine_process import IMAGE_TOKENS
from tests.vllm.test_connector import BLOCK, MEMORY

pytestmark = pytest.mark.vllm

TEXT = [(7 * i * i + 3 * i) % 250 + 5 for i in range(150)]
HIT = (IMAGE_TOKENS + len(TEXT)) // BLOCK * BLOCK


def test_an_image_is_found_again_and_never_taken_for_another_one(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    model = made_model(python, tmp_path, "blip2")
    prompts = [TEXT] * 3
    engine = start(model=model)
    expected = engine.generate(prompts, images=[1, 2, 3]).tokens
    engine.kill()
    assert expected[0] != expected[1] != expected[2] != expected[0]

    extra = {"name": new_name(), **MEMORY}
    engine = start(extra, model=model)
    cold = engine.generate(prompts[:2], images=[1, 2])
    assert (cold.cached, cold.tokens) == ([0, 0], expected[:2])
    engine.reset()
    warm = engine.generate(prompts, images=[2, 3, 1])
    assert warm.cached == [HIT, 0, HIT]
    assert warm.tokens == [expected[1], expected[2], expected[0]]
    engine.generate(prompts[:1], 1, images=[4])  # a step after the last one brings its seals
    engine.kill()

    engine = start(extra, model=model)
    adopted = engine.generate(prompts, images=[3, 5, 2])
    engine.kill()
    assert adopted.cached == [HIT, 0, HIT]
    assert adopted.tokens[::2] == [expected[2], expected[1]]
