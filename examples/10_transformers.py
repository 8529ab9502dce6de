"""A stock `transformers` model generates on the cache's blocks, and computes no prefix twice.

The model is a tiny Llama with random weights, made from its configuration: nothing is downloaded.
Three people ask a question each after the same system prompt; then one of them asks again in the
same conversation. Every answer is compared with the model's answer without the cache.

    store = PagedCacheStore(model, ...)                 blocks for this model
    with store.open(ids) as cache:                      finds the cached prefix
        model.generate(ids, past_key_values=cache)      computes the rest

    .venv/bin/python examples/10_transformers.py        needs pip install 'kvcache[transformers]'
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache.integrations.transformers import MemorySizes, PagedCache, PagedCacheStore

VOCABULARY = 256
BLOCK_SIZE = 8
NUM_NEW = 12


def make_model() -> LlamaForCausalLM:
    """Return a Llama of two layers; the same every time, because the seed is."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval()


def text(num_tokens: int, seed: int) -> torch.Tensor:
    """Return `(1, num_tokens)` tokens that stand for a text."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, num_tokens), generator=random)


def answer(
    model: LlamaForCausalLM, ids: torch.Tensor, cache: PagedCache | None, num_beams: int = 1
) -> torch.Tensor:
    """Return prompt and answer, by the paged cache or, without one, by the model's own."""
    output: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        num_beams=num_beams,
    )
    return output


def ask(store: PagedCacheStore, model: LlamaForCausalLM, name: str, ids: torch.Tensor) -> None:
    """Answer a prompt on the store's blocks and print its hit."""
    with store.open(ids) as cache:
        num_found = cache.get_seq_length()
        output = answer(model, ids, cache)
        blocks = cache.block_ids()[0][0]
    print(f"{name}: {num_found} of {ids.shape[1]} prompt tokens found, blocks {blocks}")
    print(f"  {output[0, ids.shape[1] :].tolist()}")
    promise(torch.equal(output, answer(model, ids, None)), "the model says the same by itself")


def main() -> None:
    model = make_model()
    system = text(40, seed=1)
    with PagedCacheStore(model, MemorySizes(num_blocks=64), block_size=BLOCK_SIZE) as store:
        for number in range(3):
            question = text(9 + number, seed=10 + number)
            ask(store, model, f"question {number}", torch.cat([system, question], dim=1))
        found = store.statistics().num_hit_tokens
        promise(found == 2 * 40, "the system prompt was computed once")

        ids = torch.cat([system, text(9, seed=10)], dim=1)
        first = answer(model, ids, None)
        ask(store, model, "second turn", torch.cat([first, text(7, seed=20)], dim=1))

        with store.open(ids) as cache:
            beams = answer(model, ids, cache, num_beams=4)
            tables = [row[0] for row in cache.block_ids()]
        print(f"4 beams of question 0, by block table: {tables}")
        promise(torch.equal(beams, answer(model, ids, None, num_beams=4)), "beams are the same")

        statistics = store.statistics()
        print(
            f"{statistics.num_asked_tokens} prompt tokens, {statistics.num_hit_tokens} of them "
            f"found; {statistics.num_blocks_in_use} of {statistics.num_blocks} blocks in use, "
            f"{statistics.num_blocks_cached} cached, {statistics.num_copied_blocks} copied before "
            "a write"
        )
        promise(statistics.num_blocks_in_use == 0, "no block is lost")


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless `what` was promised holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
