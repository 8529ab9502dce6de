"""Attention on pages: CUDA equals CPU, and pages after a row are not read."""

from __future__ import annotations

import pytest
import torch

from examples.engine import Engine, EngineConfig
from examples.engine.attention import attend, fused_attention, plain_attention
from tests.engine.support import ADAPTERS, ALL_MODELS, GREEDY, expected, model, run, tokens

NO_CUDA = "NO CUDA DEVICE: attention on CUDA is NOT TESTED"

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(num_heads: int, num_kv_heads: int, value_size: int) -> Drawn:
    """Three rows of 4 queries behind 9, 2 and 0 tokens, on pages of 16 tokens."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    positions = torch.tensor([9, 2, 0])[:, None] + torch.arange(4)
    is_seen = positions[:, :, None] >= torch.arange(16)
    key, value = random(3, 16, num_kv_heads, 6), random(3, 16, num_kv_heads, value_size)
    return random(3, 4, num_heads, 6), key, value, is_seen


@pytest.mark.parametrize("shape", [(4, 4, 6), (4, 2, 6), (4, 1, 3)], ids=["mha", "gqa", "latent"])
def test_fused_and_plain_attention_agree(shape: tuple[int, int, int]) -> None:
    query, key, value, is_seen = draw(*shape)
    plain = plain_attention(query, key, value, is_seen, 0.4)
    torch.testing.assert_close(fused_attention(query, key, value, is_seen, 0.4), plain)
    reversed_ = plain_attention(query, key.flip(1), value.flip(1), is_seen, 0.4)
    assert not torch.allclose(plain, reversed_), "what is seen counts"


def test_what_no_query_sees_may_be_no_number() -> None:
    query, key, value, is_seen = draw(4, 2, 6)
    wanted = attend(query, key, value, is_seen, 0.4)
    unseen = ~is_seen.any(dim=1)
    key[unseen], value[unseen] = torch.nan, torch.inf
    assert torch.equal(attend(query, key, value, is_seen, 0.4), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
@pytest.mark.parametrize("name", ALL_MODELS)
def test_tokens_on_cuda_are_those_of_the_cpu_without_a_cache(name: str) -> None:
    prompts = [[*tokens(0, 30), *tokens(seed, 4 * seed)] for seed in range(1, 5)]
    config = EngineConfig(
        model=model(name), device="cuda", block_size=8, max_chunk_tokens=24, adapters=ADAPTERS
    )
    with Engine.launch(config) as engine:
        for _ in range(2):  # computed, then found
            ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
            told = run(engine)
            for request_id, prompt in zip(ids, prompts, strict=True):
                assert told[request_id, 0].token_ids == expected(name, prompt, GREEDY)
        assert engine.statistics().num_cached_tokens > 0
