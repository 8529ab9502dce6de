"""The command line `kvcache`: plan, doctor, launch, status, watch, events, replay, stop and more.

Each command is a function in the module of its noun: the signature declares its options, the body
does the work. Modules of commands import nothing slow until a command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from actors.cli import (
    admin,
    advise,
    clusters,
    contents,
    doctor,
    engines,
    events,
    plan,
    record,
    replay,
    simulate,
    status,
)
from actors.cli.command import EXIT_CODES

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvcache",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="KV-cache coordinator for distributed LLM inference on Ray.",
    epilog=EXIT_CODES,
)

# In the order in which `--help` shows them.
for _work in (plan.plan, doctor.doctor, clusters.launch, status.status, clusters.stop):
    app.command()(_work)
app.command(epilog=EXIT_CODES)(replay.replay)
for _work in (
    replay.replay_record,
    events.watch,
    contents.usage,
    contents.prefixes,
    admin.pin,
    admin.unpin,
    admin.pins,
    admin.prefetch,
    admin.clear,
    status.top,
    status.dashboard,
    simulate.simulate,
    record.record,
    advise.advise,
    engines.vllm_coordinator,
):
    app.command()(_work)

events_app = typer.Typer(no_args_is_help=True, help="Cache events, as routers read them.")
events_app.command()(events.dump)
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
