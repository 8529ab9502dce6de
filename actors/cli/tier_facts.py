"""What the tiers below the device hold and have done, as lines of `kvcache status`."""

from __future__ import annotations

from actors.cli.tables import bytes_text
from kvcache.coordinator.offload_statistics import OffloadStatistics


def tier_facts(offload: OffloadStatistics) -> dict[str, str]:
    """Return what the tiers below the device hold and have done."""
    facts: dict[str, str] = {}
    for tier in (offload.tiers.host, offload.tiers.disk):
        if tier is None:
            continue
        facts[f"{tier.medium} tier"] = (
            f"{tier.num_ready:,} of {tier.num_slots * tier.blocks_per_slot:,} blocks, "
            f"{tier.hit_rate:.1%} of look-ups hit, {bytes_text(tier.stored_bytes)} stored, "
            f"{bytes_text(tier.loaded_bytes)} loaded, {tier.num_evicted:,} evicted"
        )
    facts["tokens loaded"] = (
        f"{offload.num_loaded_tokens:,} ({offload.num_fetched_tokens:,} from files), "
        f"{offload.num_waiting_requests:,} requests wait"
    )
    if offload.num_swapped_out:
        facts["requests swapped"] = (
            f"{offload.num_swapped_out:,} out, {offload.num_swapped_in:,} in, "
            f"{offload.num_swap_saved_tokens:,} tokens saved"
        )
    if offload.num_failed_jobs or offload.num_loads_given_up:
        facts["tiers' failures"] = (
            f"{offload.num_failed_jobs:,} jobs, {offload.num_loads_given_up:,} loads given up"
            f"{'; the last: ' + offload.last_failure if offload.last_failure else ''}"
        )
    return facts
