"""A published Llama's format: its weights, its config and its output, against transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.engine import DecoderConfig, Engine, EngineConfig, SamplingParams
from examples.engine.checkpoint import read_config
from kvcache.base.errors import ConfigurationError
from tests.engine.support import tokens

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
pytest.importorskip("safetensors", reason="needs the extra 'transformers'")


@pytest.fixture(scope="module", params=[False, True], ids=["own-head", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers, saved as any other."""
    directory = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=request.param,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).double().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_a_checkpoint_says_what_its_own_library_says(checkpoint: Path, tensor_size: int) -> None:
    peer = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    prompts = [tokens(seed, 20 + seed) for seed in range(3)]
    want = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(10):
            with torch.no_grad():
                ids.append(int(peer(torch.tensor([ids])).logits[0, -1].argmax()))
        want.append(ids[len(prompt) :])
    config = EngineConfig(
        model=DecoderConfig(dtype="float64", max_model_len=128),
        checkpoint=str(checkpoint),
        tensor_parallel_size=tensor_size,
        block_size=8,
        max_chunk_tokens=8,
    )
    with Engine.launch(config) as engine:
        assert engine.generate(prompts, SamplingParams(max_tokens=10)) == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "is of model_type 'qwen3': the decoder reads 'llama'"),
        ({"attention_bias": True}, "has attention_bias: the decoder has no biases"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "scales positions by 'yarn': the decoder knows 'default' only",
        ),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    said = json.loads((checkpoint / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(said | changes))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        read_config(tmp_path)


def test_a_checkpoint_that_lacks_something_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text("utf-8"))
    model = DecoderConfig(max_model_len=128)
    with pytest.raises(ConfigurationError, match=re.escape("has no *.safetensors")):
        Engine.launch(EngineConfig(model=model, checkpoint=str(tmp_path)))
    said = json.loads((checkpoint / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(said | {"intermediate_size": 81}))
    weights = next(checkpoint.glob("*.safetensors"))
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    with pytest.raises(ConfigurationError, match="has shape"):
        Engine.launch(EngineConfig(model=model, checkpoint=str(tmp_path)))
