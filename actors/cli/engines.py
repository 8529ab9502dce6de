"""Commands about a vLLM engine on this node: `--vllm NAME` of `status`, `top`, `usage`, `clear`.

The engine is found by its name, without Ray. After its end, its memory may still be kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from actors.cli.status import tier_table
from actors.cli.tables import bytes_text, print_facts, print_json, print_table, say
from kvcache.base.errors import ClusterError, ConfigurationError, NotRunningError

if TYPE_CHECKING:
    from kvcache.memory_service.client import KeptMemory
    from kvcache.metrics.engine_samples import EngineStatistics

CLEAR_S = 10.0


def show_status(which: str, as_json: bool) -> None:
    """Print an engine's status, or the memory that it has left.

    `NAME` alone has the memory of all its replicas, unless one runs. Raises NotRunningError if
    there is neither.
    """
    try:
        found = _statistics(which)
    except NotRunningError:
        kept = _kept(which)
        if not kept:
            raise
        _show_kept(which, kept, as_json)
        return
    if as_json:
        print_json({"state": "running", **found.to_plain()})
        return
    print_facts(Console(file=sys.stdout), f"{which}: vLLM engine", facts(found))


def show_metrics(which: str) -> None:
    """Print an engine's metrics in Prometheus' format."""
    print(_ask(which, "metrics")["text"].rstrip("\n"))


def show_usage(which: str, as_json: bool) -> None:
    """Print the contents of an engine's tiers."""
    found = _statistics(which)
    tiers = {} if found.tiers is None else {"host": found.tiers.host, "disk": found.tiers.disk}
    held = {name: tier for name, tier in tiers.items() if tier is not None}
    if as_json:
        plain = {name: asdict(tier) for name, tier in held.items()}
        whole = {"name": found.name, "replica": found.replica, "tiers": plain}
        print_json(whole)
        return
    print_table(Console(file=sys.stdout), f"{which}: tiers below the device", tier_table(held))


def watch(
    which: str,
    interval_s: float,
    is_over: Callable[[float], bool],
    as_json: bool,
) -> None:
    """Print an engine's status repeatedly until `is_over` after this many seconds."""
    console, begun_s = Console(file=sys.stdout), time.monotonic()
    before = _statistics(which)
    while True:
        time.sleep(interval_s)
        now = _statistics(which)
        if as_json:
            print_json(now.to_plain(), indent=None)
        else:
            if console.is_terminal:
                console.clear()
            title = f"{which}: vLLM engine, up {now.uptime_s:,.0f} s"
            print_facts(console, title, {**rates(before, now), **facts(now)})
        before = now
        if is_over(time.monotonic() - begun_s):
            return


def clear_engine(which: str, is_confirmed: bool, as_json: bool) -> None:
    """Empty an engine's tiers; ask first."""
    from actors.cli.admin import ask_on_terminal

    held = _num_held(_statistics(which))
    if not is_confirmed:
        ask_on_terminal(which, f"{held:,} blocks in memory and files of {which}")
    answer = _ask(which, "clear")
    if as_json:
        print_json({"name": which, **answer}, indent=None)
    elif answer["is_cleared"]:
        say(f"{which} is cleared: {answer['num_forgotten_blocks']:,} blocks dropped")
    else:
        say(
            f"{which} is idle: {answer['num_forgotten_blocks']:,} blocks are dropped before its "
            "next request is looked up"
        )


def facts(found: EngineStatistics) -> dict[str, str]:
    """Return an engine's statistics in words."""
    requests, tiers = found.requests, found.tiers
    told = {
        "model": found.model,
        "engine": f"process {found.process_id}, {found.num_ranks} ranks, replica {found.replica}",
        "uptime": f"{found.uptime_s:,.0f} s",
        "requests": f"{requests.num_requests:,}, {requests.num_asked_tokens:,} tokens",
        "hits": _hits(found),
        "waits": (
            f"{requests.files_wait_s:,.2f} s for files, {requests.load_wait_s:,.2f} s for loads, "
            f"{requests.num_waiting:,} requests wait"
        ),
        "failed loads": (
            f"{requests.num_failed_loads:,}, {requests.num_failed_tokens:,} tokens computed instead"
        ),
    }
    if tiers is None:
        return {**told, "tiers": "the ranks have not told yet what they hold"}
    for tier in (tiers.host, tiers.disk):
        if tier is not None:
            told[f"{tier.medium} tier"] = (
                f"{tier.num_ready:,} of {tier.num_slots:,} blocks, "
                f"{bytes_text(tier.stored_bytes)} stored, {bytes_text(tier.loaded_bytes)} loaded "
                f"by each rank, {tier.num_evicted:,} evicted, {tier.num_refused:,} without room"
            )
    jobs = ", ".join(f"{count:,} {kind}" for kind, count in tiers.open_jobs.items() if count)
    told["jobs"] = (
        f"{jobs or 'none'} open; {tiers.num_failed_jobs:,} failed, {tiers.num_expired_jobs:,} late"
    )
    if tiers.disk_problem:
        told["disk"] = tiers.disk_problem
    if found.nodes is not None:
        nodes = found.nodes
        told["other nodes"] = (
            f"coordinator {nodes['coordinator']}: {nodes['num_questions']:,} questions, "
            f"{nodes['num_unanswered_questions']:,} unanswered; "
            f"{requests.num_imported_tokens:,} tokens copied from other nodes; "
            + ("gives" if nodes["is_giving_blocks"] else "does not give")
            + " blocks"
        )
    if found.events is not None:
        told["events"] = f"{found.events['endpoint']}, replay {found.events['replay_endpoint']}"
    if found.recording is not None:
        told["recording"] = "; ".join(f"{key} {value}" for key, value in found.recording.items())
    return told


def rates(before: EngineStatistics, now: EngineStatistics) -> dict[str, str]:
    """Return the rates between two looks."""
    seconds = max(1e-9, now.uptime_s - before.uptime_s)
    old, new = before.requests, now.requests
    if before.process_id != now.process_id or now.uptime_s < before.uptime_s:
        old, seconds = type(old)(), max(1e-9, now.uptime_s)
    asked = new.num_asked_tokens - old.num_asked_tokens
    on_device = new.num_device_tokens - old.num_device_tokens
    loaded = new.num_loaded_tokens - old.num_loaded_tokens
    return {
        "now": f"{(new.num_requests - old.num_requests) / seconds:,.1f} requests/s, "
        f"{asked / seconds:,.0f} tokens/s; {on_device / seconds:,.0f} on the device, "
        f"{loaded / seconds:,.0f} loaded"
    }


def _hits(found: EngineStatistics) -> str:
    requests = found.requests
    if not requests.num_asked_tokens:
        return "-"
    counts = {
        "device": requests.num_device_tokens,
        "host": (
            requests.num_loaded_tokens - requests.num_file_tokens - requests.num_remote_tokens
        ),
        "disk": requests.num_file_tokens,
    }
    if found.nodes is not None:
        counts["other nodes"] = requests.num_remote_tokens
    shares = {name: count / requests.num_asked_tokens for name, count in counts.items()}
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) + " of tokens"


def _num_held(found: EngineStatistics) -> int:
    if found.tiers is None:
        return 0
    disk = found.tiers.disk
    return found.tiers.host.num_ready + (0 if disk is None else disk.num_ready)


def _show_kept(which: str, kept: list[KeptMemory], as_json: bool) -> None:
    if as_json:
        name, replica = _parsed(which)
        asked = {"name": name, "replica": replica if "/" in which else None}
        rows = [asdict(each) for each in kept]
        print_json({"state": "not running", **asked, "kept": rows})
        return
    table = Table("memory", "size", "used by")
    for each in kept:
        user = f"process {each.process_id}" if each.process_id else "no process"
        table.add_row(each.name, bytes_text(each.num_bytes), user)
    title = f"no engine {which} runs; its memory service keeps, for the next one"
    print_table(Console(file=sys.stdout), title, table)


def _kept(which: str) -> list[KeptMemory]:
    from kvcache.memory_service.client import kept_memory, service_address
    from kvcache.metrics.engine_socket import running_engines

    name, replica = _parsed(which)
    has_replica = "/" in which
    if not has_replica and any(name == each for each, _ in running_engines()):
        return []
    begin = f"{service_address(name, replica).cluster}/rank" if has_replica else f"{name}/"
    try:
        return [each for each in kept_memory(name) if each.name.startswith(begin)]
    except ClusterError:
        return []


def _statistics(which: str) -> EngineStatistics:
    from kvcache.metrics.engine_samples import EngineStatistics

    return EngineStatistics.of_plain(_ask(which, "status"))


def _ask(which: str, verb: str) -> dict[str, Any]:
    from kvcache.metrics.engine_socket import ask_engine

    return ask_engine(*_parsed(which), {"do": verb}, CLEAR_S)


def _parsed(which: str) -> tuple[str, int]:
    """Return name and replica of `NAME` or `NAME/REPLICA`; raises ConfigurationError."""
    name, _, replica = which.partition("/")
    if not name or (replica and not replica.isdigit()):
        raise ConfigurationError(f"--vllm {which}: write NAME, or NAME/REPLICA with a number")
    return name, int(replica or 0)
