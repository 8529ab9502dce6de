"""What a side is built as: sizes, kind, and what it runs. The same for both sides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BLOCK_SIZE = 16
WINDOW_TOKENS = 1024
"""Window of the second group of a hybrid."""


@dataclass(frozen=True)
class Setup:
    """One process of a side: a manager, and the suite of workloads that runs on it.

    `suite` names a class of `side.SUITES`. `is_hybrid`: full attention and a sliding window, else
    full attention alone. `is_list`: prompts come as lists of integers, not as arrays (the peer gets
    lists always). `size` scales a suite's own numbers: requests in flight, prompts at a time, or
    blocks of the trunk.
    """

    suite: str
    num_blocks: int
    prompt_tokens: int = 32_768
    is_hybrid: bool = False
    has_events: bool = False
    is_list: bool = False
    hash_algorithm: str = "sha256"
    size: int = 256
    num_warm_up: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
