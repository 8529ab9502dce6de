"""What can be typed: commands, arguments, options, and what becomes of errors.

Imports nothing but typer, so that `--help` is there at once; every command imports its work when it
runs. outcomes.py has the exit codes, simulation_commands.py the commands that simulate,
admin_commands.py those that look at a cache or change it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.cli.admin_commands import add_admin_commands
from actors.cli.outcomes import EXIT_CODES, EXIT_DIFFERENT, EXIT_PREVENTED, EXIT_STUCK
from actors.cli.outcomes import run_command as _run
from actors.cli.simulation_commands import add_simulation_commands

app = typer.Typer(
    name="kvcache",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="KV-cache coordinator for distributed LLM inference on Ray.",
    epilog=EXIT_CODES,
)

events_app = typer.Typer(no_args_is_help=True, help="Cache events, as routers read them.")
app.add_typer(events_app, name="events")

CONFIG_HELP = (
    "The cluster's configuration: a YAML file, or one that comes with the package by its name, "
    "such as cpu_tp2."
)
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help=CONFIG_HELP)]
NameOption = Annotated[
    str | None,
    typer.Option("--name", "-n", help="Name of the cluster; default: the only one that runs."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="Show no progress bar.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")
]
ClusterArgument = Annotated[
    str | None, typer.Argument(help="Name of the cluster; default: the only one that runs.")
]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", help="Instead: where events are published.")
]
ReplayEndpointOption = Annotated[
    str | None, typer.Option("--replay-endpoint", help="With --endpoint: where to ask for more.")
]


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


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help=CONFIG_HELP),
    ] = None,
    *,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="Instead: the config.json of a model on Hugging Face."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="With --hf-config: ranks that share a layer [1].", min=1)
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="With --hf-config: pipeline stages [1].", min=1)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="With --hf-config: memory of each rank, such as 60GiB.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="With --hf-config: tokens per block [16].", min=1)
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="With --hf-config: tokens of a request, or auto [auto].")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="With --hf-config: tokens of a step [8192].", min=1)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --hf-config: of keys and values [the model's].")
    ] = None,
    mamba_cache_mode: Annotated[
        str | None, typer.Option(help="With --hf-config: none or align [none].")
    ] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what a configuration or a model means: blocks, bytes, tokens, concurrency, per rank."""

    def work() -> None:
        from actors.cli.planning import ModelChoices, show_plan

        choices = ModelChoices(
            tp=tp,
            pp=pp,
            memory=memory,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype,
            mamba_cache_mode=mamba_cache_mode,
        )
        show_plan(config, hf_config, choices, as_json)

    _run(work, verbose)


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Look with this cluster's eyes; a YAML file."),
    ] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Examine this machine: memory, speed of copies; exit code 1 if a launch would fail."""

    def work() -> None:
        from actors.cli.doctor import show_examination

        if show_examination(config, as_json):
            raise typer.Exit(EXIT_PREVENTED)

    _run(work, verbose)


@app.command()
def launch(
    config: ConfigOption,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", help="Name of the cluster; default: the configuration's."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; the cluster stays.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Start a cluster and keep it until SIGTERM or Ctrl-C; with --detach, return when ready."""

    def work() -> None:
        from actors.cli.launching import launch_cluster

        launch_cluster(config, name, detach)

    _run(work, verbose)


@app.command()
def status(
    name: NameOption = None,
    *,
    stuck: Annotated[
        bool,
        typer.Option("--stuck", help="Instead: what is waited for; exit code 1 if for too long."),
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show a running cluster: ranks, epoch, blocks, steps, clients."""

    def work() -> None:
        if stuck:
            from actors.cli.watching import show_pending

            if show_pending(name, as_json):
                raise typer.Exit(EXIT_STUCK)
            return
        from actors.cli.launching import show_status

        show_status(name, as_json)

    _run(work, verbose)


@app.command()
def stop(name: NameOption = None, verbose: VerboseOption = False) -> None:
    """Stop a running cluster in order: nothing of it is left behind."""

    def work() -> None:
        from actors.cli.launching import stop_cluster

        stop_cluster(name)

    _run(work, verbose)


@app.command(epilog=EXIT_CODES)
def replay(
    workload: Annotated[
        str,
        typer.Argument(
            help="conversations, chat, agents, retrieval or scans, a Mooncake trace (.jsonl, "
            ".jsonl.gz), a text file or a directory."
        ),
    ] = "conversations",
    *,
    config: Annotated[Path | None, typer.Option("--config", "-c", help=CONFIG_HELP)] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", help="Play the first N requests only.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Play on this running cluster.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Play in this process, without Ray.")
    ] = False,
    prefill_only: Annotated[
        bool,
        typer.Option(
            "--prefill-only", help="No cluster: count hits of the prompts, one after another."
        ),
    ] = False,
    blocks: Annotated[
        str, typer.Option(help="With --prefill-only: capacity in blocks, or unlimited.")
    ] = "unlimited",
    block_size: Annotated[
        int | None, typer.Option(help="With --prefill-only: tokens per block.", min=1)
    ] = None,
    pipeline_depth: Annotated[
        int, typer.Option(help="Steps that may run while the next is scheduled.", min=1)
    ] = 1,
    skip_too_long: Annotated[
        bool,
        typer.Option(
            "--skip-too-long", help="Leave out and count requests longer than max_model_len."
        ),
    ] = False,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Play a workload on a cluster, checking every byte, and show what the cache made of it."""

    def work() -> None:
        from actors.cli.replaying import ReplayChoices, count_prefills, replay_workload

        choices = ReplayChoices(
            workload=workload,
            config=config,
            limit=limit,
            seed=seed,
            name=name,
            is_local=local,
            blocks=blocks,
            block_size=block_size,
            pipeline_depth=pipeline_depth,
            skips_too_long=skip_too_long,
            as_json=as_json,
            has_progress=not no_progress,
        )
        if prefill_only:
            count_prefills(choices)
        else:
            replay_workload(choices)

    _run(work, verbose)


@app.command()
def replay_record(
    file: Annotated[
        Path, typer.Argument(help="A recording: a directory, or one segment (.kvrec) of it.")
    ],
    *,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Do all that a recorder wrote down again, and compare what comes of it."""

    def work() -> None:
        from actors.cli.record_replaying import replay_recording

        if not replay_recording(file, as_json=as_json, has_progress=not no_progress):
            raise typer.Exit(EXIT_DIFFERENT)

    _run(work, verbose)


@app.command()
def watch(
    name: ClusterArgument = None,
    *,
    endpoint: EndpointOption = None,
    replay_endpoint: ReplayEndpointOption = None,
    seconds: Annotated[
        float | None, typer.Option("--for", help="End after so many seconds.", min=0)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON each second instead.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show live what a cache's events say: rates, blocks, prefixes, and what is missing."""

    def work() -> None:
        from actors.cli.event_source import SourceChoice
        from actors.cli.event_watch import watch_events

        watch_events(SourceChoice(name, endpoint, replay_endpoint), as_json, seconds)

    _run(work, verbose)


@events_app.command()
def dump(
    name: ClusterArgument = None,
    *,
    endpoint: EndpointOption = None,
    replay_endpoint: ReplayEndpointOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens then.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", help="End after N events.", min=1)
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Print cache events as lines of JSON: first what is cached now, prompt tokens included."""

    def work() -> None:
        from actors.cli.event_dump import dump_events
        from actors.cli.event_source import SourceChoice

        dump_events(SourceChoice(name, endpoint, replay_endpoint), follow, limit)

    _run(work, verbose)


add_admin_commands(app)
add_simulation_commands(app)
