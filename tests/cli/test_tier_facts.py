"""Lines of `kvcache status` about tiers, for statistics of real tiers."""

from __future__ import annotations

from dataclasses import replace

from actors.cli.status import tier_facts
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.offload.statistics import HierarchyStatistics, TierStatistics

HOST = TierStatistics(
    "host",
    num_slots=50,
    blocks_per_slot=2,
    num_free_slots=10,
    num_ready=70,
    num_pending=3,
    num_held=0,
    num_dirty=0,
    num_quarantined_slots=0,
    num_hits=3,
    num_misses=1,
    num_evicted=1234,
    stored_bytes=3 << 20,
    loaded_bytes=1 << 20,
)


def test_a_healthy_tier_is_one_line_and_no_failures() -> None:
    facts = tier_facts(OffloadStatistics(HierarchyStatistics(HOST, None), num_loaded_tokens=4096))
    assert facts == {
        "host tier": "70 of 100 blocks, 75.0% of look-ups hit, 3.0 MiB stored, 1.0 MiB loaded, "
        "1,234 evicted",
        "tokens loaded": "4,096 (0 from files), requests waiting: 0",
    }


def test_files_have_a_line_and_failures_say_what_came_last() -> None:
    files = replace(HOST, medium="files", num_ready=7)
    offload = OffloadStatistics(
        HierarchyStatistics(HOST, files),
        num_failed_jobs=2,
        num_loads_given_up=1,
        last_failure="spill: rank 1: no space left on device",
    )
    facts = tier_facts(offload)
    assert facts["files tier"].startswith("7 of 100 blocks")
    assert facts["tiers' failures"] == (
        "jobs: 2, loads given up: 1; the last: spill: rank 1: no space left on device"
    )
