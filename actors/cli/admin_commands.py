"""Commands that look at a running cluster's cache, or change it: what can be typed.

app.py adds them to its own. Imports nothing but typer; the work is in modules of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.cli.outcomes import run_command

NameOption = Annotated[
    str | None,
    typer.Option("--name", "-n", help="Name of the cluster; default: the only one that runs."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")
]


def add_admin_commands(app: typer.Typer) -> None:
    """Make commands of the functions below."""
    for command in (usage, prefixes, pin, unpin, pins, clear, top, dashboard):
        app.command()(command)


def usage(
    name: NameOption = None, as_json: JsonOption = False, verbose: VerboseOption = False
) -> None:
    """Show whose a running cluster's blocks are: by state, group, tenant and tier."""

    def work() -> None:
        from actors.cli.cache_usage import show_usage

        show_usage(name, as_json)

    run_command(work, verbose)


def prefixes(
    name: NameOption = None,
    *,
    sort: Annotated[
        str, typer.Option("--sort", "-s", help="used (now), shared, longest or recent first.")
    ] = "used",
    limit: Annotated[int, typer.Option("--limit", "-l", help="Show N of them.", min=1)] = 20,
    tree: Annotated[bool, typer.Option("--tree", help="Instead: what continues what.")] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show which prefixes a running cluster has cached, and who uses them."""

    def work() -> None:
        from actors.cli.cached_prefixes import show_prefixes

        show_prefixes(name, sort, limit, tree, as_json)

    run_command(work, verbose)


def pin(
    name: NameOption = None,
    *,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Token ids, separated by commas.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Instead: a file of token ids, or JSON.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="Instead: a text file; needs --tokenizer.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="With --text: a directory or name for transformers.")
    ] = None,
    ttl: Annotated[float, typer.Option("--ttl", help="Seconds until the pin ends.")] = 3600.0,
    lora: Annotated[str | None, typer.Option(help="Adapter of the prefix's requests.")] = None,
    salt: Annotated[str | None, typer.Option(help="Cache salt of the prefix's requests.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the prefix's requests.")] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Keep what is cached of a prefix from being evicted, until a time limit."""

    def work() -> None:
        from actors.cli.pinning import PrefixChoice
        from actors.cli.pinning import pin as pin_prefix

        choice = PrefixChoice(tokens, token_file, text, tokenizer, lora, salt, tenant)
        pin_prefix(name, choice, ttl, as_json)

    run_command(work, verbose)


def unpin(
    pin_id: Annotated[int, typer.Argument(help="Number of the pin; `kvcache pins` shows them.")],
    name: NameOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """End a pin before its time."""

    def work() -> None:
        from actors.cli.pinning import unpin as unpin_prefix

        unpin_prefix(name, pin_id, as_json)

    run_command(work, verbose)


def pins(
    name: NameOption = None, as_json: JsonOption = False, verbose: VerboseOption = False
) -> None:
    """Show the pins that hold."""

    def work() -> None:
        from actors.cli.pinning import show_pins

        show_pins(name, as_json)

    run_command(work, verbose)


def clear(
    name: NameOption = None,
    *,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="Wait for running requests; weights have changed: next model epoch."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Annotated[
        float, typer.Option(help="With --drain: seconds to wait; it goes on then.", min=0)
    ] = 600.0,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Forget everything that a running cluster has cached; asks first."""

    def work() -> None:
        from actors.cli.clearing import clear as clear_cache

        clear_cache(name, drain=drain, yes=yes, timeout_s=timeout, as_json=as_json)

    run_command(work, verbose)


def top(
    name: NameOption = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", help="Seconds between two looks.", min=0.1)
    ] = 1.0,
    seconds: Annotated[
        float | None, typer.Option("--for", help="End after so many seconds.", min=0)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each look instead.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show live how a cluster does: steps, hit rate, blocks, tiers, ranks."""

    def work() -> None:
        from actors.cli.top import show_top

        show_top(name, once=once, interval_s=interval, as_json=as_json, seconds=seconds)

    run_command(work, verbose)


def dashboard(
    name: NameOption = None,
    *,
    port: Annotated[
        int, typer.Option("--port", "-p", help="Where to listen; 0: any port.", min=0, max=65535)
    ] = 8266,
    host: Annotated[str, typer.Option(help="An address of this machine only.")] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the page in this machine's browser.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where the page is as a line of JSON.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Serve a page about a running cluster: the pool as a picture, prefixes, tiers, traffic."""

    def work() -> None:
        from actors.cli.dashboarding import serve_dashboard

        serve_dashboard(name, host, port, opens_browser=browser, as_json=as_json)

    run_command(work, verbose)
