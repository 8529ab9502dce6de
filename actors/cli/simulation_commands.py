"""Commands about loads: record one, and what a cache of some size would make of it.

Imports nothing but typer, as app.py, to which these commands are added. The functions are long
lists of options and little else: typer reads a command's options from its parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.cli.outcomes import run_command

TracesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...",
        help="Mooncake's JSONL or a recording of ours (.jsonl, .jsonl.gz), or made: chat, agents, "
        "retrieval, scans, conversations.",
    ),
]
SeedOption = Annotated[int, typer.Option(help="Seed of a trace that is made.")]
RequestsOption = Annotated[
    int | None, typer.Option("--requests", "-l", help="The first N requests only.", min=1)
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(help="Tokens per block of a file that does not say, or of what is made.", min=1),
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", "-j", help="At once [one for each core].", min=1)
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw it, too: .svg, .png or .pdf (extra `plots`).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="Show no progress bar.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")
]


PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", "-p", help="An eviction policy, or all; may be repeated (default: lru)."
    ),
]
CapacitiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--blocks",
        "-b",
        help="Capacity in blocks, or unlimited; may be repeated (default: a range).",
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(help="A hybrid model: half its layers have a window of N tokens.", min=1),
]
GroupsOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Groups, block sizes and capacity of this cluster."),
]
RunningOption = Annotated[
    bool,
    typer.Option(
        "--running/--prefill-only",
        help="Requests run side by side by their timestamps, answers included; or one after "
        "another, prompts only.",
    ),
]
WriteTraceOption = Annotated[
    Path | None,
    typer.Option(help="Instead: write the trace to this file (.jsonl, .jsonl.gz)."),
]


def add_simulation_commands(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(simulate)
    app.command()(record)
    app.command()(advise)


def simulate(
    traces: TracesArgument,
    *,
    policy: PoliciesOption = None,
    blocks: CapacitiesOption = None,
    host_blocks: Annotated[
        int, typer.Option(help="Blocks of host memory below the device.", min=0)
    ] = 0,
    disk_blocks: Annotated[int, typer.Option(help="Blocks on disk below that.", min=0)] = 0,
    window: WindowOption = None,
    config: GroupsOption = None,
    running: RunningOption = False,
    prefill_speed: Annotated[
        float, typer.Option(help="With --running: tokens of a prompt a second.")
    ] = 10_000,
    decode_speed: Annotated[
        float, typer.Option(help="With --running: tokens of an answer a second.")
    ] = 40,
    optimum: Annotated[
        bool, typer.Option(help="Also show what no policy can beat (Belady).")
    ] = True,
    seed: SeedOption = 0,
    requests: RequestsOption = None,
    block_size: BlockSizeOption = None,
    write_trace: WriteTraceOption = None,
    processes: ProcessesOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Play traces on the manager alone: hit rates by policy and capacity, without a cluster."""

    def work() -> None:
        from actors.cli.simulating import SimulationChoices, simulate_traces, write_down
        from actors.cli.trace_choices import TraceChoices
        from kvcache.simulate.running_counting import Pace

        chosen = TraceChoices(tuple(traces), seed, requests, block_size)
        if write_trace is not None:
            write_down(chosen, write_trace)
            return
        choices = SimulationChoices(
            traces=chosen,
            policies=tuple(policy or ()),
            blocks=tuple(blocks or ()),
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            window_tokens=window,
            config=config,
            pace=Pace(prefill_speed, decode_speed) if running else None,
            has_optimum=optimum,
            num_processes=processes,
            plot=plot,
            as_json=as_json,
            has_progress=not no_progress,
        )
        simulate_traces(choices)

    run_command(work, verbose)


def record(
    file: Annotated[Path, typer.Argument(help="The trace to write, a new file (.jsonl).")],
    *,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", help="Name of the cluster; default: the only one that runs."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="End after so many seconds, above 0.")
    ] = None,
    requests: RequestsOption = None,
    max_size: Annotated[str, typer.Option(help="End before the file is larger.")] = "256MiB",
    tenants: Annotated[
        bool, typer.Option("--tenants", help="Write the tenant of each request, too.")
    ] = False,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Record the requests of a running cluster as a trace, without tokens, until Ctrl-C."""

    def work() -> None:
        from actors.cli.recording import RecordingChoices, record_trace

        choices = RecordingChoices(
            path=file,
            name=name,
            seconds=seconds,
            num_requests=requests,
            max_size=max_size,
            has_tenants=tenants,
            as_json=as_json,
            has_progress=not no_progress,
        )
        record_trace(choices)

    run_command(work, verbose)


def advise(
    trace: Annotated[str, typer.Argument(help="A trace, as `simulate` reads or makes it.")],
    *,
    device_price: Annotated[float, typer.Option(help="Money per GiB of device memory.")],
    budget: Annotated[float, typer.Option(help="Money there is.")],
    host_price: Annotated[
        float | None, typer.Option(help="Per GiB of host memory; none: there is none.")
    ] = None,
    disk_price: Annotated[
        float | None, typer.Option(help="Per GiB of disk; none: there is none.")
    ] = None,
    token_size: Annotated[
        str | None, typer.Option(help="Keys and values of a token, all ranks, such as 128KiB.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Instead: of this cluster's model.")
    ] = None,
    prefill_speed: Annotated[float, typer.Option(help="Tokens computed a second.")] = 10_000,
    host_bandwidth: Annotated[float, typer.Option(help="GiB a second, all ranks.")] = 25,
    disk_bandwidth: Annotated[float, typer.Option(help="GiB a second, all ranks.")] = 5,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="Consider these only [all].")
    ] = None,
    seed: SeedOption = 0,
    requests: RequestsOption = None,
    block_size: BlockSizeOption = None,
    processes: ProcessesOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Say how much memory of which kind a load deserves, and which policy, for some money."""

    def work() -> None:
        from actors.cli.advising import AdviceChoices, give_advice
        from actors.cli.trace_choices import TraceChoices
        from kvcache.simulate.advice import GIB, Prices, Speeds

        choices = AdviceChoices(
            trace=TraceChoices((trace,), seed, requests, block_size),
            prices=Prices(device_price, host_price, disk_price),
            budget=budget,
            token_size=token_size,
            config=config,
            speeds=Speeds(prefill_speed, host_bandwidth * GIB, disk_bandwidth * GIB),
            policies=tuple(policy or ()),
            num_processes=processes,
            plot=plot,
            as_json=as_json,
            has_progress=not no_progress,
        )
        give_advice(choices)

    run_command(work, verbose)
