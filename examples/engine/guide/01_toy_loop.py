"""Step 1: a loop without a cache. Each new token recomputes all tokens before it.

.venv/bin/python examples/engine/guide/01_toy_loop.py
"""

from __future__ import annotations

import torch
from tiny_model import TinyModel, attend, promise

PROMPT = list(range(10, 30))
NUM_NEW = 8


def main() -> None:
    model = TinyModel()
    tokens = list(PROMPT)
    num_computed = 0

    def attention(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        return attend(*qkv)

    for _ in range(NUM_NEW):
        tokens.append(model.run(tokens, 0, attention))  # all tokens, from position 0
        num_computed += len(tokens) - 1
    print(f"{tokens[len(PROMPT) :]}")
    print(f"{num_computed} tokens computed for {len(PROMPT)} of a prompt and {NUM_NEW} new ones")
    promise(num_computed == sum(range(20, 28)), "the work grows with the square of the length")


if __name__ == "__main__":
    main()
