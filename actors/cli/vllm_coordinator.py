"""`kvcache vllm-coordinator`: let vLLM engines on several nodes share their host memory."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from actors.cli.command import JsonOption, command
from actors.cli.tables import print_facts, print_json, say
from kvcache.base.errors import ConfigurationError

ASK_MS = 5000


@command
def vllm_coordinator(  # noqa: PLR0917
    address: Annotated[
        str,
        typer.Argument(help="Where to listen, the same for all engines: tcp://HOST:PORT."),
    ],
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            help="A file of keys; made if it does not exist. Copy it to every node. Without it, "
            "only engines of this machine can connect.",
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            "--events",
            help="Where routers follow the events of all engines with coordinator.events: "
            "tcp://HOST:PORT. Not encrypted.",
        ),
    ] = None,
    events_replay: Annotated[
        str | None,
        typer.Option(
            "--events-replay", help="Where routers request missed events; needs --events."
        ),
    ] = None,
    only_status: Annotated[
        bool,
        typer.Option("--status", help="Print what the running coordinator knows, and end."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve in the foreground until SIGTERM: which node holds which block.

    Its state is soft: after a restart, engines tell it again within seconds.
    """
    from kvcache.events.stream_proxy import StreamProxy
    from kvcache.sharing.access import make_keys, read_keys
    from kvcache.sharing.index_server import IndexServer, ask_status

    if only_status:
        found = ask_status(address, None if keys is None else read_keys(keys), ASK_MS)
        if as_json:
            print_json(found)
            return
        print_facts(Console(file=sys.stdout), f"coordinator at {address}", _facts(found))
        return
    if (events is None) != (events_replay is None):
        raise ConfigurationError("--events and --events-replay: pass both, or none")
    is_new = keys is not None and not os.path.exists(keys)
    made = None
    if keys is not None:
        made = make_keys(keys) if is_new else read_keys(keys)
    proxy = None
    if events is not None and events_replay is not None:
        proxy = StreamProxy(events, events_replay, made)
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


def _facts(found: dict[str, Any]) -> dict[str, str]:
    """Return what a coordinator knows, in words."""
    engines = {source["endpoint"]: source["num_blocks"] for source in found["sources"]}
    counts = {name: found.get(f"num_{name}", 0) for name in ("questions", "found_blocks")}
    return {
        "uptime": f"{found['uptime_s']:,.0f} s",
        "blocks": f"{found['num_blocks']:,} of {len(engines):,} engines",
        **{endpoint: f"{count:,} blocks" for endpoint, count in engines.items()},
        **_event_facts(found.get("events")),
        "questions": (
            f"{counts['questions']:,}, {counts['found_blocks']:,} of "
            f"{found.get('num_asked_blocks', 0):,} blocks found"
        ),
    }


def _event_facts(found: dict[str, Any] | None) -> dict[str, str]:
    if found is None:
        return {}
    told = f"{found.get('num_batches', 0):,} batches, {found.get('num_requests', 0):,} requests"
    return {
        "events": f"{found['endpoint']}, {told}",
        "topics": "\n".join(found["topics"]) or "none",
    }
