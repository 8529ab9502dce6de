"""Tiers below a device whose hits end earlier, for a draft head to compute the end again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors import LocalCluster
from kvcache.coordinator.settings import OffloadStatistics
from tests.actors.tier_driver import BLOCK_BYTES, PROMPT_TOKENS, play_all, tier_config

PROMPTS = range(3)
"""Two of them fit on the device, at most."""


def layer(kind: str, num_kv_heads: int = 2, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "count": 1, "num_kv_heads": num_kv_heads, "head_size": 8, **more}


FULL = layer("full")
WINDOW = layer("sliding_window", window_tokens=40)
WIDE_WINDOW = layer("sliding_window", num_kv_heads=4, window_tokens=40)
"""Its blocks hold half as many tokens as those of the others."""


@pytest.mark.parametrize(
    ("layers", "block_tokens", "memory"),
    [
        pytest.param([FULL], 16, 14, marks=pytest.mark.long, id="full"),
        pytest.param([WINDOW], 16, 14, marks=pytest.mark.long, id="window"),
        pytest.param([FULL, WINDOW], 16, 25, id="full, window"),
        pytest.param([FULL, WIDE_WINDOW], 32, 25, marks=pytest.mark.long, id="unequal blocks"),
    ],
)
def test_a_loaded_prefix_is_hit_except_for_its_end(
    layers: list[dict[str, Any]], block_tokens: int, memory: int, tmp_path: Path
) -> None:
    config = tier_config(
        tmp_path,
        host_blocks=400,
        model={"layers": layers},
        cache={
            "memory_per_rank": memory * BLOCK_BYTES,
            "use_eagle": True,
        },
    )
    with LocalCluster(config) as cluster, cluster.client() as client:

        def statistics() -> OffloadStatistics:
            found = cluster.coordinator.statistics().offload
            assert found is not None
            return found

        assert play_all(client, PROMPTS, statistics) == [0] * len(PROMPTS)
        # The last token is always computed; with EAGLE, so is the end of the cached prefix.
        hit = (PROMPT_TOKENS - 1) // block_tokens * block_tokens - block_tokens
        assert play_all(client, PROMPTS, statistics) == [hit] * len(PROMPTS)
        assert statistics().num_loaded_tokens > 0
        assert client.failures == ()
        cluster.coordinator.check()
