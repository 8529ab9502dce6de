"""`kvcache status`: state and pending work of a running cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from actors.cli.command import EXIT_STUCK, JsonOption, NameOption, VllmOption, command
from actors.cli.tables import bytes_text, print_facts, print_json, print_table
from kvcache.base.errors import legible

if TYPE_CHECKING:
    from actors.reports import ClusterStatus
    from kvcache.coordinator.settings import CoordinatorStatistics, OffloadStatistics
    from kvcache.coordinator.watchdog import PendingWork
    from kvcache.manager.statistics import ManagerStatistics
    from kvcache.offload.statistics import TierStatistics
    from kvcache.tenants import TenantStatistics

_UNNAMED = "(none)"


@command
def status(
    name: NameOption = None,
    *,
    stuck: Annotated[
        bool,
        typer.Option("--stuck", help="Show pending work; exit code 1 if any of it is stuck."),
    ] = False,
    vllm: VllmOption = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="With --vllm: print metrics as Prometheus reads them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a running cluster: ranks, epoch, blocks, steps, clients."""
    if vllm is not None:
        from actors.cli.engines import show_metrics, show_status

        show_metrics(vllm) if metrics else show_status(vllm, as_json)
        return
    from actors.cli.clusters import named_cluster, ray_session

    if stuck:
        if _show_pending(name, as_json):
            raise typer.Exit(EXIT_STUCK)
        return
    with ray_session(may_start=False):
        cluster = named_cluster(name)
        found = cluster.status()
        statistics = cluster.coordinator_statistics()
        messages = cluster.message_statistics()
    if as_json:
        told = None if statistics is None else asdict(statistics)
        loop = None if messages is None else asdict(messages)
        whole = {**found.to_dict(), "statistics": told, "messages": loop}
        print_json(whole)
        return
    console = Console(file=sys.stdout)
    print_facts(console, found.name, _summary(found, statistics))
    print_table(console, "ranks", _ranks(found))
    from kvcache.metrics.samples import tenants_of

    if tenants := tenants_of(statistics):
        print_table(console, "tenants", tenant_table(tenants))
        for line in refusal_lines(tenants):
            console.print(f"no room: {line}", markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _show_pending(name: str | None, as_json: bool) -> bool:
    """Print the pending work of a running cluster; return whether any of it is stuck.

    Raises NotRunningError if no cluster runs, or its coordinator cannot be asked.
    """
    from actors.cli.clusters import open_cluster

    with open_cluster(name, must_serve=False, otherwise="look there for what it waits") as cluster:
        state, problem = cluster.status().state, cluster.status().problem
        pending = cluster.pending()
    stuck = [work for work in pending if work.is_stuck]
    has_failed = state == "failed"
    if as_json:
        rows = [{**asdict(work), "is_stuck": work.is_stuck} for work in pending]
        print_json({"name": cluster.name, "state": state, "pending": rows})
        return bool(stuck) or has_failed
    console = Console(file=sys.stdout)
    if has_failed:
        console.print(f"{cluster.name} has failed: {problem}", markup=False)
    if pending:
        print_table(console, f"{cluster.name} waits for", _pending_table(pending))
    if not (stuck or has_failed):
        console.print(f"nothing is stuck in {cluster.name}: all waits are normal", markup=False)
    return bool(stuck) or has_failed


def _pending_table(pending: Sequence[PendingWork]) -> Table:
    table = Table("what", "for", "limit", "state")
    for work in pending:
        mark = "STUCK" if work.is_stuck else "normal"
        table.add_row(work.what, f"{work.age_s:.1f} s", f"{work.limit_s:g} s", mark)
    return table


def _summary(status: ClusterStatus, statistics: CoordinatorStatistics | None) -> dict[str, str]:
    facts = {
        "state": f"{status.state}{': ' + status.problem if status.problem else ''}",
        "model": f"{status.model}, up to {status.max_model_len:,} tokens",
        "epoch": str(status.epoch),
        "transport": status.transport,
        "coordinator": (
            f"{'embedded in ' if status.is_embedded else ''}process "
            f"{status.coordinator_process_id} on {status.coordinator_node.host}"
        ),
        "log": f"{status.coordinator_node.host}:{status.log_path}" if status.log_path else "-",
        "blocks": f"{status.num_blocks:,}",
        "fingerprint": status.fingerprint[:16],
    }
    manager = None if statistics is None else statistics.manager
    if statistics is not None and manager is not None:
        core = manager.core
        facts |= {
            "free blocks": f"{core.num_free_blocks:,}",
            "cached blocks": f"{core.num_cached_blocks:,} ({core.num_sealed_blocks:,} sealed)",
            "hit rate": _hit_rate(manager),
            "evictions": f"{core.num_evictions:,}",
            "requests": (
                f"{manager.num_running_requests:,} running, "
                f"{manager.num_preempted_requests:,} preempted"
            ),
            "clients": f"{statistics.num_clients:,}",
            "steps": f"{statistics.num_steps:,} ({statistics.num_refused_steps:,} with an error)",
            "no room": f"{statistics.num_no_room:,} times, for a new or resumed request or a fork",
        }
        if manager.num_pins:
            facts["pins"] = f"{manager.num_pins:,}, {core.num_pinned_blocks:,} blocks"
        if manager.is_draining:
            facts["draining"] = "no hits until the running requests have finished"
    offload = None if statistics is None else statistics.offload
    if offload is not None:
        facts |= tier_facts(offload)
    recorder = None if statistics is None else statistics.recorder
    if recorder is not None:
        written = f"{recorder.num_records:,} records, {bytes_text(recorder.written_bytes)}"
        lost = f"; {recorder.num_lost_records:,} lost: {recorder.problem}"
        facts["recording"] = f"{written} in {recorder.directory}{lost if recorder.problem else ''}"
    return facts


def _hit_rate(manager: ManagerStatistics) -> str:
    if not manager.num_asked_tokens:
        return "-"
    rate = manager.num_hit_tokens / manager.num_asked_tokens
    return f"{rate:.1%} of {manager.num_asked_tokens:,} tokens"


def _ranks(status: ClusterStatus) -> Table:
    table = Table("rank", "host", "process", "GPUs", "state")
    for rank in status.ranks:
        table.add_row(
            str(rank.rank),
            rank.host,
            str(rank.process_id),
            ", ".join(rank.gpu_ids) or "-",
            rank.describe(),
        )
    return table


def tier_facts(offload: OffloadStatistics) -> dict[str, str]:
    """Return the contents and counters of the tiers below the device."""
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
        f"requests waiting: {offload.num_waiting_requests:,}"
    )
    if offload.num_swapped_out:
        facts["requests swapped"] = (
            f"{offload.num_swapped_out:,} out, {offload.num_swapped_in:,} in, "
            f"{offload.num_swap_saved_tokens:,} tokens saved"
        )
    if offload.num_failed_jobs or offload.num_loads_given_up:
        facts["tiers' failures"] = (
            f"jobs: {offload.num_failed_jobs:,}, loads given up: {offload.num_loads_given_up:,}"
            f"{'; the last: ' + offload.last_failure if offload.last_failure else ''}"
        )
    return facts


def tier_table(tiers: Mapping[str, TierStatistics]) -> Table:
    """Return a table of the contents of tiers, by name."""
    table = Table("tier", "blocks", "ready", "being stored", "being read", "stored", "loaded")
    for name, tier in tiers.items():
        capacity = tier.num_slots * tier.blocks_per_slot
        counts = (capacity, tier.num_ready, tier.num_pending, tier.num_held)
        moved = (bytes_text(tier.stored_bytes), bytes_text(tier.loaded_bytes))
        table.add_row(name, *(f"{count:,}" for count in counts), *moved)
    return table


def tenant_table(tenants: Sequence[TenantStatistics]) -> Table:
    """Return a table with a row per tenant and tier. Below the device, slots are counted.

    `evicted`: blocks lost by the tenant, and blocks evicted for it.
    """
    headings = ("tenant", "tier", "held", "cached", "pinned", "share")
    table = Table(*headings, "hit rate", "evicted", "no room")
    for each in tenants:
        asked = each.num_asked_tokens
        table.add_row(
            each.name or _UNNAMED,
            each.tier,
            f"{each.num_held_blocks:,}",
            f"{each.num_cached_blocks:,}",
            f"{each.num_pinned_blocks:,}",
            f"{each.guaranteed_blocks:,} to {each.limit_blocks:,}",
            f"{each.num_hit_tokens / asked:.1%}" if asked else "-",
            f"{each.num_evicted_blocks:,}, {each.num_evicted_for_blocks:,}",
            f"{each.num_refusals:,}",
        )
    return table


def tenant_usage_table(tenants: Sequence[TenantStatistics]) -> Table:
    """Return a table with the blocks, looked-up tokens and hits of each tenant in each tier."""
    table = Table("tenant", "tier", "held", "of at most", "tokens asked", "hit")
    for each in tenants:
        counts = (each.num_held_blocks, each.limit_blocks, each.num_asked_tokens)
        rate = each.num_hit_tokens / max(1, each.num_asked_tokens)
        table.add_row(
            each.name or _UNNAMED,
            each.tier,
            *(f"{count:,}" for count in counts),
            f"{each.num_hit_tokens:,} ({rate:.1%})",
        )
    return table


def refusal_lines(tenants: Sequence[TenantStatistics]) -> list[str]:
    """Return the last refusal of each refused tenant, with its numbers and the remedy."""
    return [
        legible(f"{each.name or _UNNAMED} ({each.tier}): {each.last_refusal}")
        for each in tenants
        if each.last_refusal
    ]
