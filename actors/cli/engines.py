"""Commands about vLLM engines: `--vllm NAME` of `status`, `top`, `usage`, `clear`, `record` for an
engine on this node, and `kvcache vllm-coordinator`, which lets engines on several nodes share what
they hold.

An engine is found by its name, without Ray. After its end, its memory may still be kept.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from actors.cli.command import (
    JsonOption,
    bytes_text,
    command,
    print_facts,
    print_json,
    print_table,
    say,
)
from actors.cli.status import tier_table
from kvcache.base.errors import ClusterError, ConfigurationError, NotRunningError

if TYPE_CHECKING:
    from kvcache.base.curve import CurveKeys
    from kvcache.memory_service.client import KeptMemory
    from kvcache.metrics.engine_samples import EngineStatistics

CLEAR_S = 10.0
ASK_MS = 5000

ACTOR_S = 60.0
"""How long a coordinator on Ray may take to start, to answer and to end."""


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
    print_facts(f"{which}: vLLM engine", facts(found))


def show_metrics(which: str) -> None:
    """Print an engine's metrics in Prometheus' format."""
    print(ask(which, "metrics")["text"].rstrip("\n"))


def show_usage(which: str, as_json: bool) -> None:
    """Print the contents of an engine's tiers."""
    found = _statistics(which)
    held = {} if found.tiers is None else found.tiers.by_name
    if as_json:
        plain = {name: asdict(tier) for name, tier in held.items()}
        whole = {"name": found.name, "replica": found.replica, "tiers": plain}
        print_json(whole)
        return
    print_table(f"{which}: tiers below the device", tier_table(held))


def watch(which: str, interval_s: float, is_over: Callable[[float], bool], as_json: bool) -> None:
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
            print_facts(title, {**rates(before, now), **facts(now)})
        before = now
        if is_over(time.monotonic() - begun_s):
            return


def clear_engine(which: str, is_confirmed: bool, as_json: bool) -> None:
    """Empty an engine's tiers; ask first."""
    from actors.cli.admin import ask_on_terminal

    tiers = _statistics(which).tiers
    held = 0 if tiers is None else tiers.num_ready
    if not is_confirmed:
        ask_on_terminal(which, f"{held:,} blocks in memory and files of {which}")
    answer = ask(which, "clear")
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
        "engine": f"process {found.process_id}, ranks: {found.num_ranks}, replica {found.replica}",
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
    for tier in tiers.by_name.values():
        told[f"{tier.medium} tier"] = (
            f"{tier.num_ready:,} of {tier.num_slots:,} blocks, "
            f"{bytes_text(tier.stored_bytes)} stored, {bytes_text(tier.loaded_bytes)} loaded "
            f"by each rank, {tier.num_evicted:,} evicted, {tier.num_refused:,} without room"
            + (f", {tier.num_copies:,} copies" if tier.num_copies else "")
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


def _show_kept(which: str, kept: list[KeptMemory], as_json: bool) -> None:
    if as_json:
        name, replica = _parsed(which)
        asked = {"name": name, "replica": replica if "/" in which else None}
        rows = [asdict(each) for each in kept]
        print_json({"state": "not running", **asked, "kept": rows})
        return
    from kvcache.memory_service.protocol import process_text

    table = Table("memory", "size", "used by")
    for each in kept:
        user = process_text(each.process_id) if each.process_id else "no process"
        table.add_row(each.name, bytes_text(each.num_bytes), user)
    title = f"no engine {which} runs; its memory service keeps, for the next one"
    print_table(title, table)


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

    return EngineStatistics.of_plain(ask(which, "status"))


def ask(which: str, verb: str, **more: Any) -> dict[str, Any]:
    """Return an engine's answer to a question; raises as `ask_engine`."""
    from kvcache.metrics.engine_socket import ask_engine

    return ask_engine(*_parsed(which), {"do": verb, **more}, CLEAR_S)


def _parsed(which: str) -> tuple[str, int]:
    """Return name and replica of `NAME` or `NAME/REPLICA`; raises ConfigurationError."""
    name, _, replica = which.partition("/")
    if not name or (replica and not replica.isdigit()):
        raise ConfigurationError(f"--vllm {which}: write NAME, or NAME/REPLICA with a number")
    return name, int(replica or 0)


@command
def vllm_coordinator(  # noqa: PLR0917
    address: Annotated[
        str | None,
        typer.Argument(
            help="Serve in this process, here, the same address for all engines: tcp://HOST:PORT."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="NAME",
            help="Instead: an actor of this name on the running Ray cluster, which Ray restarts; "
            "return when it serves.",
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            help="A file of keys; made if it does not exist. Copy it to every node. Without it, "
            "only engines of this machine can connect. Not with --ray: engines get keys from it.",
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            "--events",
            help="Where routers follow the events of all engines with coordinator.events: "
            "tcp://HOST:PORT, with --ray only the port, 0 for a free one. Not encrypted.",
        ),
    ] = None,
    events_replay: Annotated[
        str | None,
        typer.Option(
            "--events-replay", help="Where routers request missed events; needs --events."
        ),
    ] = None,
    only_status: Annotated[
        bool, typer.Option("--status", help="Print what the running coordinator knows, and end.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the coordinator on Ray; needs --ray.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve until SIGTERM, or on Ray: which node holds which block.

    Its state is soft: after a restart, engines tell it again within seconds.
    """
    if (address is None) == (ray is None):
        raise ConfigurationError("pass tcp://HOST:PORT, or --ray NAME: one of them")
    if stop and (ray is None or only_status):
        raise ConfigurationError(
            "--stop ends a coordinator on Ray: pass --ray NAME without --status; SIGTERM ends one "
            "at an address"
        )
    if (events is None) != (events_replay is None):
        raise ConfigurationError("--events and --events-replay: pass both, or none")
    published = None if events is None or events_replay is None else (events, events_replay)
    if ray is not None:
        if keys is not None:
            raise ConfigurationError("--keys: a coordinator on Ray has keys of its own: remove it")
        _on_ray(ray, published, only_status=only_status, stop=stop, as_json=as_json)
    elif only_status and address is not None:
        from kvcache.sharing.access import read_keys

        _print_coordinator(address, None if keys is None else read_keys(keys), as_json)
    elif address is not None:
        _serve(address, keys, published)


def _serve(address: str, keys: str | None, events: tuple[str, str] | None) -> None:
    """Serve in this process until SIGTERM."""
    from kvcache.events.stream_proxy import StreamProxy
    from kvcache.sharing.access import make_keys, read_keys
    from kvcache.sharing.index_server import IndexServer

    is_new = keys is not None and not os.path.exists(keys)
    made = None
    if keys is not None:
        made = make_keys(keys) if is_new else read_keys(keys)
    proxy = None if events is None else StreamProxy(*events, made)
    server = IndexServer(address, made, proxy=proxy)
    if is_new:
        say(f"made {keys}: copy it to every node, readable by the engines' user only")
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    server.start()
    if proxy is not None:
        proxy.start()
        say(f"events are at {proxy.endpoints[0]}, missed ones at {proxy.endpoints[1]}")
    say(f"listening at {server.endpoint}")
    signal.sigwait((signal.SIGTERM, signal.SIGINT))
    server.close()
    if proxy is not None:
        proxy.close()


def _on_ray(
    name: str, events: tuple[str, str] | None, *, only_status: bool, stop: bool, as_json: bool
) -> None:
    """Start the actor of this name, or ask or end it."""
    from actors.cli.clusters import ray_session
    from actors.vllm_coordinator import ask_place, start_vllm_coordinator, stop_vllm_coordinator
    from kvcache.sharing.access import require_name
    from kvcache.sharing.index_server import ask_status

    require_name(name)
    ports = None
    if events is not None:
        ports = (_port("--events", events[0]), _port("--events-replay", events[1]))
    with ray_session(may_start=False):
        if stop:
            stop_vllm_coordinator(name, ACTOR_S)
            say(f"coordinator {name} has stopped")
        elif only_status:
            place = ask_place(name, ACTOR_S)
            _print_coordinator(place.address, place.keys, as_json)
        else:
            place = start_vllm_coordinator(name, ports, ACTOR_S)
            published = ask_status(place.address, place.keys, ASK_MS).get("events")
            if published is not None:
                live, replay = published["endpoint"], published["replay_endpoint"]
                say(f"events are at {live}, missed ones at {replay}")
            say(f"coordinator {name} listens at {place.address}")
            say(f"`kvcache vllm-coordinator --ray {name} --stop` ends it")


def _port(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise ConfigurationError(f"{option} {text}: with --ray, pass a port, 0 for a free one")
    return int(text)


def _print_coordinator(address: str, keys: CurveKeys | None, as_json: bool) -> None:
    from kvcache.sharing.index_server import ask_status

    found = ask_status(address, keys, ASK_MS)
    if as_json:
        print_json(found)
        return
    print_facts(f"coordinator at {address}", _coordinator_facts(found))


def _coordinator_facts(found: dict[str, Any]) -> dict[str, str]:
    engines = {source["endpoint"]: source["num_blocks"] for source in found["sources"]}
    return {
        "uptime": f"{found['uptime_s']:,.0f} s",
        "blocks": (
            f"{found['num_blocks']:,} of {len(engines):,} engines, "
            f"{found['num_copies']:,} of them copies"
        ),
        **{endpoint: f"{count:,} blocks" for endpoint, count in engines.items()},
        **_event_facts(found.get("events")),
        "questions": (
            f"{found['num_questions']:,}, {found['num_found_blocks']:,} of "
            f"{found['num_asked_blocks']:,} blocks found"
        ),
    }


def _event_facts(found: dict[str, Any] | None) -> dict[str, str]:
    if found is None:
        return {}
    told = f"{found['num_batches']:,} batches, {found['num_requests']:,} requests"
    return {
        "events": f"{found['endpoint']}, {told}",
        "topics": "\n".join(found["topics"]) or "none",
    }
