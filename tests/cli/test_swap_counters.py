"""Swapped requests in `kvcache status` and `kvcache replay`."""

from __future__ import annotations

from dataclasses import replace

from actors.cli.playground import _tier_counters
from actors.cli.replay import _tier_facts
from actors.cli.status import tier_facts
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.options import TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import HOST_MEDIUM


def test_requests_that_were_swapped_are_shown() -> None:
    tiers = TierHierarchy(make_tier(TierOptions(HOST_MEDIUM, 4)), None, lambda: 1)
    offload = OffloadStatistics(
        tiers.statistics(), num_swapped_out=1300, num_swapped_in=1200, num_swap_saved_tokens=9001
    )
    said = "1,300 out, 1,200 in, 9,001 tokens saved"
    assert tier_facts(offload)["requests swapped"] == said
    assert _tier_facts(_tier_counters(offload))["requests swapped"] == said
    assert "requests swapped" not in tier_facts(replace(offload, num_swapped_out=0))
