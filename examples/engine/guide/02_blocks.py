"""Step 2: keys and values are stored in blocks, and a manager decides in which.

`get_computed_blocks` looks the prompt up, `allocate_slots` allocates blocks for the rest, and
`free` releases them. The engine owns the tensor; the manager never sees its bytes. A token is
computed once, and a second request with the same prefix does not compute the prefix at all.

    .venv/bin/python examples/engine/guide/02_blocks.py
"""

from __future__ import annotations

import torch
from tiny_model import (
    HEAD_SIZE,
    MAX_TOKENS,
    NUM_HEADS,
    NUM_LAYERS,
    TinyModel,
    attend,
    generate_from_scratch,
    promise,
)

from kvcache import (
    FullAttentionSpec,
    KVCacheManager,
    PlanOptions,
    Request,
    get_kv_cache_config,
)

BLOCK_SIZE = 4
NUM_NEW = 8
SYSTEM = list(range(10, 26))


class PagedAttention:
    """One request's attention: writes new keys and values into its blocks, and reads all."""

    def __init__(self, pool: torch.Tensor, table: list[int], start: int) -> None:
        self._pool, self._table, self._start = pool, torch.tensor(table), start

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        positions = torch.arange(self._start + len(query))
        blocks, offsets = self._table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        new = slice(self._start, None)
        self._pool[layer, 0, blocks[new], offsets[new]] = key
        self._pool[layer, 1, blocks[new], offsets[new]] = value
        return attend(
            query, self._pool[layer, 0, blocks, offsets], self._pool[layer, 1, blocks, offsets]
        )


class Engine:
    """One request after the other."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float64"
        )
        specs = {f"layers.{layer}": spec for layer in range(NUM_LAYERS)}
        config = get_kv_cache_config(PlanOptions(MAX_TOKENS), specs, 1 << 20)
        self.manager = KVCacheManager(config, MAX_TOKENS)
        shape = (NUM_LAYERS, 2, config.num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
        self._pool = torch.zeros(shape, dtype=torch.float64)
        self._model = TinyModel()
        self.num_computed = 0

    def generate(self, name: str, prompt: list[int]) -> list[int]:
        """Return the generated tokens."""
        request = Request(name, prompt)
        hit, num_hit = self.manager.get_computed_blocks(request)
        print(f"{name}: {num_hit} of {len(prompt)} tokens are cached")
        while request.num_tokens < len(prompt) + NUM_NEW:
            start = request.num_computed_tokens + num_hit
            num_new = request.num_tokens - start
            given = self.manager.allocate_slots(request, num_new, num_hit, hit)
            promise(given is not None, "there is room")
            table = self.manager.get_block_ids(name)[0]
            if num_new > 1 or len(table) * BLOCK_SIZE == request.num_tokens + BLOCK_SIZE - 1:
                print(f"  {request.num_tokens:2} tokens in blocks {table}")
            tokens = request.all_token_ids[start:].tolist()
            token = self._model.run(tokens, start, PagedAttention(self._pool, table, start))
            self.num_computed += num_new
            request.num_computed_tokens, num_hit, hit = request.num_tokens, 0, None
            request.append_output_token_ids([token])
        self.manager.free(request)
        return request.all_token_ids[len(prompt) :].tolist()


def main() -> None:
    engine, model = Engine(), TinyModel()
    for name, prompt in (("first", [*SYSTEM, 1, 2, 3]), ("second", [*SYSTEM, 4, 5, 6, 7])):
        before = engine.num_computed
        output = engine.generate(name, prompt)
        print(f"  {output}, {engine.num_computed - before} tokens computed")
        promise(output == generate_from_scratch(model, prompt, NUM_NEW), "the tokens are the same")
    promise(
        engine.num_computed == 19 + 7 + 4 + 7, "a token is computed once, the beginning not again"
    )
    promise(engine.manager.usage == 0.0, "no block is in use")


if __name__ == "__main__":
    main()
