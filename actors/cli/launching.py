"""`kvcache launch`, `status`, `stop`: a cluster that lives longer than one command's work."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from actors.cli.clusters import named_cluster, only_cluster, running_clusters
from actors.cli.sessions import ray_session
from actors.cli.tables import bytes_text, print_facts, print_json, print_table
from actors.cli.tenant_facts import refusal_lines, tenant_table, tenants_of
from actors.cli.tier_facts import tier_facts
from actors.cluster import KVCacheCluster
from actors.embedded_site import EmbeddedSite
from actors.launch import is_actor_known
from actors.names import coordinator_name
from actors.replicas import KVCacheReplicas
from actors.reports import ClusterStatus
from actors.shutdown import ClusterParts, take_down
from kvcache.base.errors import DeadlineError, KVCacheError, NotRunningError
from kvcache.config import load_config, parse_config
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.manager.statistics import ManagerStatistics

_WATCH_INTERVAL_S = 2.0


def launch_cluster(config_path: Path, name: str | None, is_detached: bool) -> None:
    """Start a cluster; keep it until a signal comes, or with `is_detached` leave it running.

    Raises NotRunningError when a detached cluster would have no Ray to live in, and whatever
    makes starting impossible; nothing is left running then.
    """
    config = load_config(config_path)
    if name is not None:
        config = parse_config({**config.model_dump(), "name": name}, "command line")
    with ray_session(may_start=not is_detached), interrupted_by_sigterm():
        cluster: KVCacheCluster | KVCacheReplicas
        if config.parallel.data_parallel_size > 1:
            cluster = KVCacheReplicas.launch(config, detached=is_detached, on_progress=say)
        else:
            cluster = KVCacheCluster.launch(config, detached=is_detached, on_progress=say)
        if is_detached:
            _say_where_it_logs(cluster)
            say(f"{config.name} is running: `kvcache stop --name {config.name}` ends it")
            return
        _say_where_it_logs(cluster)
        say(f"{config.name} is running: Ctrl-C or SIGTERM ends it")
        try:
            say(_watch(cluster))
        except KeyboardInterrupt:
            say(f"stopping {config.name}")
        finally:
            with undisturbed():
                cluster.stop()
    say(f"{config.name} has stopped")


def _say_where_it_logs(launched: KVCacheCluster | KVCacheReplicas) -> None:
    """Name the files with the coordinators' logs, of those that can tell."""
    for cluster in [launched] if isinstance(launched, KVCacheCluster) else list(launched):
        with suppress(KVCacheError):
            status = cluster.status()
            if status.log_path:
                say(f"log of {cluster.name}: {status.coordinator_node.host}:{status.log_path}")


def _watch(launched: KVCacheCluster | KVCacheReplicas) -> str:
    """Return why a cluster has ended by itself; a coordinator that restarts has not."""
    clusters = [launched] if isinstance(launched, KVCacheCluster) else list(launched)
    while True:
        time.sleep(_WATCH_INTERVAL_S)
        for cluster in clusters:
            try:
                status = cluster.status()
            except NotRunningError:
                return f"{cluster.name} was stopped from elsewhere"
            except DeadlineError:
                continue
            if status.state == "failed":
                raise NotRunningError(f"{cluster.name} has failed: {status.problem}")


def show_status(name: str | None, as_json: bool) -> None:
    """Print what a running cluster is and how it does; raises NotRunningError if there is none."""
    with ray_session(may_start=False):
        cluster = named_cluster(name)
        status = cluster.status()
        statistics = cluster.coordinator_statistics()
        messages = cluster.message_statistics()
    if as_json:
        told = None if statistics is None else asdict(statistics)
        loop = None if messages is None else asdict(messages)
        whole = {**status.to_dict(), "statistics": told, "messages": loop}
        print_json(json.dumps(whole, indent=2))
        return
    console = Console(file=sys.stdout)
    print_facts(console, status.name, _summary(status, statistics))
    print_table(console, "ranks", _ranks(status))
    if tenants := tenants_of(statistics):
        print_table(console, "tenants", tenant_table(tenants))
        for line in refusal_lines(tenants):
            console.print(f"refused: {line}", markup=False)
    for warning in status.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def stop_cluster(name: str | None) -> None:
    """Stop a running cluster, also where its coordinator hangs; raises NotRunningError if there
    is none."""
    with ray_session(may_start=False):
        name = name or only_cluster()
        try:
            find_launched(name).stop()
        except DeadlineError:
            hanging = [n for n in names_under(name) if is_actor_known(coordinator_name(n))]
            if not hanging:
                raise
            say(f"the coordinator of {name} does not answer: everything of it is ended by name")
            for each in hanging:
                take_down(ClusterParts.found(each))
    say(f"{name} has stopped")


def find_launched(name: str) -> KVCacheCluster | KVCacheReplicas | EmbeddedSite:
    """Return what runs under a name: a cluster, or the replicas of one launch. Raises
    NotRunningError, naming what does run, if there is nothing."""
    try:
        return named_cluster(name)
    except NotRunningError as error:
        try:
            return KVCacheReplicas.connect(name)
        except NotRunningError:
            raise error from None


def names_under(name: str) -> list[str]:
    """Return the names of what runs under a name: one cluster, or the replicas of one launch."""
    return [
        each
        for each in running_clusters()
        if each == name or (each.startswith(f"{name}-dp") and each[len(name) + 3 :].isdigit())
    ]


def say(line: str) -> None:
    """Say on stderr what is being done: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: raise KeyboardInterrupt. Inside `ray_session`, which sets a
    handler of its own."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGTERM and Ctrl-C while something is taken down; it has deadlines of its own."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
            "steps": f"{statistics.num_steps:,} ({statistics.num_refused_steps:,} refused)",
        }
        if manager.num_pins:
            facts["pins"] = f"{manager.num_pins:,}, {core.num_pinned_blocks:,} blocks"
        if manager.is_draining:
            facts["draining"] = "nothing hits until running requests have left"
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
    table = Table()
    for heading in ("rank", "host", "process", "GPUs", "state"):
        table.add_column(heading)
    for rank in status.ranks:
        table.add_row(
            str(rank.rank),
            rank.host,
            str(rank.process_id),
            ", ".join(rank.gpu_ids) or "-",
            rank.describe(),
        )
    return table
