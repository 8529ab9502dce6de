"""Tiny random stock models, and helpers for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 61
WINDOW = 9
BLOCK_SIZE = 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a seeded model in float64, with weights large enough to distinguish tokens."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))
    elif kind == "mistral":
        model = MistralForCausalLM(
            MistralConfig(num_hidden_layers=2, sliding_window=WINDOW, **SIZES)
        )
    elif kind == "llama4":
        model = Llama4ForCausalLM(
            Llama4TextConfig(
                num_hidden_layers=3,
                attention_chunk_size=8,
                layer_types=["chunked_attention", "full_attention", "chunked_attention"],
                no_rope_layers=[1, 0, 1],
                moe_layers=[],
                num_local_experts=2,
                intermediate_size_mlp=48,
                **SIZES,
            )
        )
    else:
        layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                num_hidden_layers=3, sliding_window=WINDOW, layer_types=layer_types, **SIZES
            )
        )
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.4)
    return model.double().eval()


def prompt(num_tokens: int, seed: int, shared: int = 0, batch: int = 1) -> torch.Tensor:
    """Return `(batch, num_tokens)` random tokens; the first `shared` are equal in all rows."""
    random = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(1, VOCABULARY, (batch, num_tokens), generator=random)
    start = torch.randint(1, VOCABULARY, (1, shared), generator=torch.Generator().manual_seed(7))
    ids[:, :shared] = start
    return ids


def padded(ids: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift each row to the right by its pads; return tokens and mask."""
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row] = ids[row].roll(pad)
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return ids, mask
