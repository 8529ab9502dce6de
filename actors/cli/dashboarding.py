"""`kvcache dashboard`: serve one local page about a running cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import webbrowser

from actors.cli.clusters import open_cluster
from actors.endpoints import is_loopback
from kvcache.base.errors import ConfigurationError


def serve_dashboard(
    name: str | None, host: str, port: int, *, opens_browser: bool, as_json: bool
) -> None:
    """Serve until interrupted.

    Raises NotRunningError if there is no cluster, ConfigurationError for an address that others
    reach, or where the web library is not installed, ClusterError for a port that is taken.
    """
    if not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} is not this machine alone, and the page does not ask its readers who "
            "they are: leave it out, and reach the page through an SSH tunnel"
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
            if opens_browser:
                webbrowser.open(address)

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(DashboardServer(observer, host, port).serve(tell))
