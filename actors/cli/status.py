"""`kvcache status`, `top` and `dashboard`: a running cluster, once or live."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.cli.clusters import named_cluster, open_cluster, ray_session
from actors.cli.command import (
    EXIT_STUCK,
    JsonOption,
    NameOption,
    SecondsOption,
    VllmOption,
    bytes_text,
    command,
    facts_table,
    print_facts,
    print_json,
    print_note,
    print_table,
)
from kvcache.base.errors import ConfigurationError, DeadlineError, legible

if TYPE_CHECKING:
    from actors.clusters.access import ClusterStatistics
    from actors.reports import ClusterStatus
    from kvcache.coordinator.settings import CoordinatorStatistics, OffloadStatistics
    from kvcache.coordinator.watchdog import PendingWork
    from kvcache.manager.statistics import ManagerStatistics
    from kvcache.offload.statistics import TierStatistics
    from kvcache.tenants import TenantStatistics

BAR_CELLS = 30
_UNNAMED = "(none)"


@command
def status(
    name: NameOption = None,
    *,
    stuck: Annotated[
        bool, typer.Option("--stuck", help="Show pending work; exit code 1 if any of it is stuck.")
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

        if name is not None or stuck:
            raise ConfigurationError(
                "--name and --stuck are for clusters, not for --vllm: omit them, or --vllm"
            )
        show_metrics(vllm) if metrics else show_status(vllm, as_json)
        return

    if metrics:
        raise ConfigurationError(
            "--metrics is for --vllm NAME: Ray serves the metrics of a cluster, omit it"
        )
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
    print_facts(found.name, _summary(found, statistics))
    print_table("ranks", _ranks(found))
    from kvcache.metrics.samples import tenants_of

    if tenants := tenants_of(statistics):
        print_table("tenants", tenant_table(tenants))
        for line in refusal_lines(tenants):
            print_note(f"no room: {line}")
    for warning in found.warnings:
        print_note(f"warning: {warning}", "yellow")


def _show_pending(name: str | None, as_json: bool) -> bool:
    """Print the pending work of a running cluster; return whether any of it is stuck.

    Raises NotRunningError if no cluster runs, or its coordinator cannot be asked.
    """

    with open_cluster(name, must_serve=False, otherwise="look there for what it waits") as cluster:
        state, problem = cluster.status().state, cluster.status().problem
        pending = cluster.pending()
    stuck = [work for work in pending if work.is_stuck]
    has_failed = state == "failed"
    if as_json:
        rows = [{**asdict(work), "is_stuck": work.is_stuck} for work in pending]
        print_json({"name": cluster.name, "state": state, "pending": rows})
        return bool(stuck) or has_failed
    if has_failed:
        print_note(f"{cluster.name} has failed: {problem}")
    if pending:
        print_table(f"{cluster.name} waits for", _pending_table(pending))
    if not (stuck or has_failed):
        print_note(f"nothing is stuck in {cluster.name}: all waits are normal")
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
    for tier in offload.tiers.by_name.values():
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


@command
def top(
    name: NameOption = None,
    *,
    vllm: VllmOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and stop.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", help="Seconds between updates.", min=0.1)
    ] = 1.0,
    seconds: SecondsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON per update.")
    ] = False,
) -> None:
    """Show a cluster live: steps, hit rate, blocks, tiers, ranks."""
    if vllm is not None:
        from actors.cli.engines import watch

        limit_s = 0.0 if once else float("inf") if seconds is None else seconds
        watch(vllm, interval, lambda elapsed_s: elapsed_s >= limit_s, as_json)
        return

    with (
        open_cluster(name, must_serve=False) as cluster,
        _shower(cluster.name, once, as_json) as show,
    ):
        begun_s = time.monotonic()

        def look() -> Look:
            try:
                status, statistics = cluster.status(), cluster.statistics()
            except DeadlineError as error:  # the coordinator restarts
                return Look(time.monotonic(), None, None, str(error))
            return Look(time.monotonic(), status, statistics)

        before = look()
        while True:
            time.sleep(interval)
            now = look()
            show(now, rates(before, now))
            before = now
            if once or (seconds is not None and now.at_s - begun_s >= seconds):
                return


@command
def dashboard(
    name: NameOption = None,
    *,
    port: Annotated[
        int, typer.Option("--port", "-p", help="Where to listen; 0: any port.", min=0, max=65535)
    ] = 8266,
    host: Annotated[str, typer.Option(help="A loopback address to listen at.")] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the page in this machine's browser.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the page's address as a line of JSON.")
    ] = False,
) -> None:
    """Serve a page about a running cluster: the pool as a picture, prefixes, tiers, traffic."""
    import asyncio
    import webbrowser

    from actors.endpoints import is_loopback

    if not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} can be reached from other machines, and the page has no "
            "authentication: omit it, and reach the page through an SSH tunnel"
        )
    try:
        from actors.dashboard.server import DashboardServer
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigurationError(
            "the page needs aiohttp, which Ray brings: pip install 'ray[default]'"
        ) from error
    from actors.dashboard.observer import Observer

    with open_cluster(name, must_serve=False) as cluster, Observer(cluster) as observer:

        def tell(address: str) -> None:
            line = f"{cluster.name}: {address}   (Ctrl-C ends it)"
            print(
                json.dumps({"name": cluster.name, "url": address}) if as_json else line, flush=True
            )
            if browser:
                webbrowser.open(address)

        with suppress(KeyboardInterrupt):
            asyncio.run(DashboardServer(observer, host, port).serve(tell))


@dataclass(frozen=True)
class Look:
    """The statistics of one moment; `problem` says why there are none."""

    at_s: float
    status: ClusterStatus | None
    statistics: ClusterStatistics | None
    problem: str = ""

    @property
    def coordinator(self) -> CoordinatorStatistics:
        """The coordinator's statistics, zeros if there are none."""
        from kvcache.coordinator.settings import CoordinatorStatistics

        known = None if self.statistics is None else self.statistics.coordinator
        return CoordinatorStatistics() if known is None else known


@dataclass(frozen=True)
class Rates:
    """Events per second between two looks."""

    steps: float = 0.0
    evictions: float = 0.0
    preemptions: float = 0.0
    asked_tokens: float = 0.0
    hit_tokens: float = 0.0
    stored_bytes: float = 0.0
    loaded_bytes: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """The share of the tokens looked up then that were hit, None if there were none."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else None


def rates(before: Look, now: Look) -> Rates:
    """Return the rates between two looks, or since the start of an epoch that began between
    them."""
    return rates_of(before.coordinator, now.coordinator, now.at_s - before.at_s)


def rates_of(before: CoordinatorStatistics, now: CoordinatorStatistics, seconds: float) -> Rates:
    """Return the rates between two moments, as `rates` does."""
    old = _counts(before) if before.epoch == now.epoch else {}
    grown = {key: max(0, count - old.get(key, 0)) for key, count in _counts(now).items()}
    grown["steps"] = max(0, now.num_steps - before.num_steps)
    return Rates(**{key: count / max(1e-9, seconds) for key, count in grown.items()})


def _counts(statistics: CoordinatorStatistics) -> dict[str, int]:
    counts: dict[str, int] = {}
    manager, offload = statistics.manager, statistics.offload
    if manager is not None:
        counts["evictions"] = manager.core.num_evictions
        counts["preemptions"] = manager.num_preemptions
        counts["asked_tokens"] = manager.num_asked_tokens
        counts["hit_tokens"] = manager.num_hit_tokens
    if offload is not None:
        counts["stored_bytes"] = offload.tiers.host.stored_bytes
        counts["loaded_bytes"] = offload.tiers.host.loaded_bytes
    return counts


Show = Callable[[Look, Rates], None]


@contextmanager
def _shower(name: str, once: bool, as_json: bool) -> Iterator[Show]:
    """Yield a function that shows a look, as a line of JSON, a table or the whole screen."""
    if as_json:
        yield lambda look, rate: print(json.dumps(as_plain(name, look, rate)), flush=True)
    elif once:
        yield lambda look, rate: Console().print(screen(name, look, rate))
    else:
        from rich.live import Live

        with Live(Text(f"{name}: looking"), auto_refresh=False, screen=False) as live:
            yield lambda look, rate: live.update(screen(name, look, rate), refresh=True)


def as_plain(name: str, look: Look, rate: Rates) -> dict[str, Any]:
    """Return a look as plain values for JSON."""
    statistics = look.coordinator
    manager = statistics.manager
    values: dict[str, Any] = {
        "name": name,
        "state": "unknown" if look.status is None else look.status.state,
        "problem": look.problem or ("" if look.status is None else look.status.problem),
        "epoch": statistics.epoch,
        "num_clients": statistics.num_clients,
        **{f"{name}_per_s": count for name, count in asdict(rate).items() if name != "hit_tokens"},
        "hit_rate": rate.hit_rate,
    }
    if manager is not None:
        core = manager.core
        values |= {
            "num_blocks": core.num_blocks,
            "num_free_blocks": core.num_free_blocks,
            "num_cached_blocks": core.num_cached_blocks,
            "num_running_requests": manager.num_running_requests,
            "num_preempted_requests": manager.num_preempted_requests,
            "num_pins": manager.num_pins,
        }
    return values


def screen(name: str, look: Look, rate: Rates) -> RenderableType:
    status, statistics = look.status, look.coordinator
    state = "no answer" if status is None else status.state
    problem = look.problem or ("" if status is None else status.problem)
    title = f"{name}: {state}, epoch {statistics.epoch}, {statistics.num_clients:,} clients"
    facts = facts_table(_live_facts(statistics, rate))
    parts: list[RenderableType] = [Text(title, style="italic"), facts, _live_ranks(look)]
    if problem:
        parts.append(Text(problem, style="red"))
    return Group(*parts)


def _live_facts(statistics: CoordinatorStatistics, rate: Rates) -> dict[str, str]:
    facts = {"steps": f"{rate.steps:,.1f}/s, {statistics.num_unacknowledged:,} messages under way"}
    manager = statistics.manager
    if manager is not None:
        core = manager.core
        total_rate = manager.num_hit_tokens / max(1, manager.num_asked_tokens)
        recent = "-" if rate.hit_rate is None else f"{rate.hit_rate:.1%}"
        facts |= {
            "requests": f"{manager.num_running_requests:,} running, "
            f"{manager.num_preempted_requests:,} preempted ({rate.preemptions:,.1f}/s)",
            "hit rate": f"{recent} of {rate.asked_tokens:,.0f} tokens/s, {total_rate:.1%} in all",
            "in use": _bar(core.num_blocks - core.num_free_blocks, core.num_blocks),
            "cached": _bar(core.num_cached_blocks, core.num_blocks),
            "evictions": f"{rate.evictions:,.1f} blocks/s",
        }
    if statistics.offload is not None:
        for name, tier in statistics.offload.tiers.by_name.items():
            facts[name] = _bar(tier.num_ready, tier.num_slots * tier.blocks_per_slot)
        stored, loaded = bytes_text(rate.stored_bytes), bytes_text(rate.loaded_bytes)
        facts["copies"] = f"{stored}/s stored, {loaded}/s loaded, by each rank"
    return facts


def _bar(count: int, total: int) -> str:
    share = count / max(1, total)
    num_full = round(share * BAR_CELLS)
    return f"{'█' * num_full}{'░' * (BAR_CELLS - num_full)} {count:,} of {total:,} ({share:.1%})"


def _live_ranks(look: Look) -> Table:
    table = Table("rank", "state", "applied", "behind", "forwards", "failed jobs")
    workers = () if look.statistics is None else look.statistics.workers
    last_seq = look.coordinator.last_seq
    for rank in () if look.status is None else look.status.ranks:
        worker = workers[rank.rank] if rank.rank < len(workers) else None
        cells: tuple[str, ...] = ("-",) * 4
        if worker is not None:
            behind = max(0, last_seq - worker.applied_seq)
            counts = (worker.applied_seq, behind, worker.num_forwards, worker.num_failed_jobs)
            cells = tuple(f"{count:,}" for count in counts)
        table.add_row(str(rank.rank), rank.describe(), *cells)
    return table
