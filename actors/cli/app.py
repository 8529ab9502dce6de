"""The commands, in the order in which `--help` shows them.

Each is a function in the module of its noun; its signature declares its options.
"""

from __future__ import annotations

from typing import Annotated

import typer

from actors.cli.admin import clear, pin, pins, prefetch, unpin
from actors.cli.advise import advise
from actors.cli.command import EXIT_CODES
from actors.cli.contents import prefixes, usage
from actors.cli.doctor import doctor
from actors.cli.events import dump, watch
from actors.cli.launch import launch, stop
from actors.cli.plan import plan
from actors.cli.record import record
from actors.cli.replay import replay, replay_record
from actors.cli.simulate import simulate
from actors.cli.status import status
from actors.cli.top import dashboard, top
from actors.cli.vllm_coordinator import vllm_coordinator

app = typer.Typer(
    name="kvcache",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="KV-cache coordinator for distributed LLM inference on Ray.",
    epilog=EXIT_CODES,
)

for _work in (plan, doctor, launch, status, stop):
    app.command()(_work)
app.command(epilog=EXIT_CODES)(replay)
for _work in (
    replay_record,
    watch,
    usage,
    prefixes,
    pin,
    unpin,
    pins,
    prefetch,
    clear,
    top,
    dashboard,
):
    app.command()(_work)
for _work in (simulate, record, advise, vllm_coordinator):
    app.command()(_work)

events_app = typer.Typer(no_args_is_help=True, help="Cache events, as routers read them.")
events_app.command()(dump)
app.add_typer(events_app, name="events")


def main() -> None:
    """Entry point of the command `kvcache`."""
    app()


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"kvcache {version('kvcache')}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """KV-cache coordinator for distributed LLM inference on Ray."""
