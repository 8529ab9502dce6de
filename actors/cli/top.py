"""`kvcache top` and `dashboard`: a running cluster live, on a terminal or a page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.cli.command import NameOption, SecondsOption, VllmOption, command
from actors.cli.tables import bytes_text, facts_table
from kvcache.base.errors import ConfigurationError, DeadlineError

if TYPE_CHECKING:
    from actors.clusters.access import ClusterStatistics
    from actors.reports import ClusterStatus
    from kvcache.coordinator.settings import CoordinatorStatistics

BAR_CELLS = 30


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
    from actors.cli.clusters import open_cluster

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

    from actors.cli.clusters import open_cluster
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
    """Return a look as a screen."""
    status, statistics = look.status, look.coordinator
    state = "no answer" if status is None else status.state
    problem = look.problem or ("" if status is None else status.problem)
    title = f"{name}: {state}, epoch {statistics.epoch}, {statistics.num_clients:,} clients"
    facts = facts_table(_facts(statistics, rate))
    parts: list[RenderableType] = [Text(title, style="italic"), facts, _ranks(look)]
    if problem:
        parts.append(Text(problem, style="red"))
    return Group(*parts)


def _facts(statistics: CoordinatorStatistics, rate: Rates) -> dict[str, str]:
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
        host, disk = statistics.offload.tiers.host, statistics.offload.tiers.disk
        facts["host"] = _bar(host.num_ready, host.num_slots * host.blocks_per_slot)
        if disk is not None:
            facts["disk"] = _bar(disk.num_ready, disk.num_slots * disk.blocks_per_slot)
        stored, loaded = bytes_text(rate.stored_bytes), bytes_text(rate.loaded_bytes)
        facts["copies"] = f"{stored}/s stored, {loaded}/s loaded, by each rank"
    return facts


def _bar(count: int, total: int) -> str:
    share = count / max(1, total)
    num_full = round(share * BAR_CELLS)
    return f"{'█' * num_full}{'░' * (BAR_CELLS - num_full)} {count:,} of {total:,} ({share:.1%})"


def _ranks(look: Look) -> Table:
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
