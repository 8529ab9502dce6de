"""Common parts of the tests of tiers in whole clusters: a small configuration and prompts.

Everything that is stored is also written to files, and the tests wait for that, so that hits do not
depend on chance.

Every forward checks every byte it reads, so a prompt that was hit and played to its end has shown
that the bytes from the tiers were right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvcache.base.errors import KVCacheError
from kvcache.config import ClusterConfig
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.protocol.step import NewRequest, StepRequest
from tests.actors.conftest import build_config

BLOCK_TOKENS = 16
BLOCKS = 24
"""Tokens of a prompt."""

PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS
FOUND = PROMPT_TOKENS - BLOCK_TOKENS
"""Tokens hit of a prompt that was played before: its last block is computed again."""

BLOCK_BYTES = 4 * 2 * BLOCK_TOKENS * 8 * 2
"""Bytes of a block on one of two ranks: keys and values of four layers, a head of eight halves."""

PATIENCE_S = 60.0

ReadStatistics = Callable[[], OffloadStatistics]
"""Asks a cluster for the state of its tiers."""


def tier_config(
    directory: object, name: str = "", *, host_blocks: int = 40, **sections: dict[str, Any]
) -> ClusterConfig:
    """A pool for two prompts, host memory for less than two, and files for all."""
    offload = {
        "host_memory_per_rank": host_blocks * BLOCK_BYTES,
        "disk": {
            "directory": str(directory),
            "capacity_per_rank": 1000 * BLOCK_BYTES,
            "write": "on_store",
        },
        **sections.pop("offload", {}),
    }
    cache = {"memory_per_rank": 49 * BLOCK_BYTES, **sections.pop("cache", {})}
    return build_config(name, offload=offload, cache=cache, **sections)


def play(client: Any, number: int) -> int:
    """Admit prompt `number`, compute it and finish it; return how many of its tokens were hit.

    A client whose epoch ends during that attaches again, and sends the prompt again.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _play(client, f"{number}-{time.monotonic_ns()}", number, give_up_s)
        except KVCacheError:
            assert time.monotonic() < give_up_s
            attach_again(client, give_up_s)


def attach_again(client: Any, give_up_s: float) -> None:
    while True:
        try:
            client.attach()
            return
        except KVCacheError:
            assert time.monotonic() < give_up_s
            time.sleep(0.05)


def _play(client: Any, name: str, number: int, give_up_s: float) -> int:
    tokens = np.arange(number * 1000, number * 1000 + PROMPT_TOKENS, dtype=np.int32)
    new, completed = NewRequest(name, tokens, max_new_tokens=PROMPT_TOKENS), -1
    while True:
        result = client.step(StepRequest(new=(new,), completed_step=completed))
        client.wait_finished(result.step)
        completed = result.step
        if result.admitted_slots[0] >= 0:
            break
        assert time.monotonic() < give_up_s, f"prompt {number} is not admitted"
        time.sleep(0.002)
    found = int(result.num_hit_tokens[0])
    step = client.submit(StepRequest(finished=(name,), completed_step=completed))
    client.wait_finished(step)
    client.wait_finished(client.submit(StepRequest(completed_step=step)))
    return found


def settle(client: Any, statistics: ReadStatistics) -> None:
    """Send empty steps until the tiers have nothing left to do."""
    give_up_s = time.monotonic() + PATIENCE_S
    num_quiet = 0
    while num_quiet < 2:
        client.wait_finished(client.submit(StepRequest()))
        num_quiet = 0 if any(statistics().tiers.open_jobs.values()) else num_quiet + 1
        assert time.monotonic() < give_up_s, statistics()
        time.sleep(0.002)


def play_all(client: Any, numbers: Iterable[int], statistics: ReadStatistics) -> list[int]:
    """Play prompts one after the other; return how many tokens of each were hit."""
    found = []
    for number in numbers:
        found.append(play(client, number))
        settle(client, statistics)
    return found


def play_until_found(client: Any, number: int, statistics: ReadStatistics) -> None:
    """Play a prompt until it is hit, which may take until a disk works again."""
    give_up_s = time.monotonic() + PATIENCE_S
    while (found := play(client, number)) < FOUND:
        assert time.monotonic() < give_up_s, f"{found} tokens of prompt {number} are found"
        settle(client, statistics)
