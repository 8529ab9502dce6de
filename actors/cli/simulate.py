"""`kvcache simulate`: play traces on the manager alone, without Ray or torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from actors.cli.command import JsonOption, NoProgressOption, command
from actors.cli.tables import print_json, print_note, print_table
from kvcache.base.errors import ConfigurationError

if TYPE_CHECKING:
    from kvcache.simulate.block_trace import BlockTrace
    from kvcache.simulate.simulation import SimulationResult
    from kvcache.specs import KVCacheGroupSpec

SeedOption = Annotated[int, typer.Option(help="Seed of a generated trace.")]
RequestsOption = Annotated[
    int | None, typer.Option("--requests", "-l", help="Only the first N requests.", min=1)
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(help="Tokens per block, if the trace does not say.", min=1),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", "-j", help="Parallel simulations (default: one per core).", min=1),
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw the curves: .svg, .png or .pdf (extra `plots`).")
]


@command
def simulate(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="A Mooncake trace or a kvcache recording (.jsonl, .jsonl.gz), or generated: chat, "
            "agents, retrieval, scans, conversations.",
        ),
    ],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", "-p", help="An eviction policy, or all; may be repeated (default: lru)."
        ),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(
            "--blocks",
            "-b",
            help="Capacity in blocks, or unlimited; may be repeated (default: a range of sizes).",
        ),
    ] = None,
    host_blocks: Annotated[
        int, typer.Option(help="Blocks of host memory below the device.", min=0)
    ] = 0,
    disk_blocks: Annotated[int, typer.Option(help="Blocks on disk below host memory.", min=0)] = 0,
    window: Annotated[
        int | None,
        typer.Option(help="A hybrid model: half its layers have a window of N tokens.", min=1),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Take groups, block sizes and capacity from this configuration."
        ),
    ] = None,
    running: Annotated[
        bool,
        typer.Option(
            "--running/--prefill-only",
            help="Run requests concurrently, by their timestamps and with answers; or one after "
            "another, only prompts.",
        ),
    ] = False,
    prefill_speed: Annotated[
        float, typer.Option(help="With --running: prompt tokens per second.")
    ] = 10_000,
    decode_speed: Annotated[
        float, typer.Option(help="With --running: answer tokens per second.")
    ] = 40,
    hints: Annotated[
        list[str] | None,
        typer.Option(
            help="What the policies are told of each request's session: none, session (whether and "
            "about when it goes on), oracle (exactly); may be repeated (default: none)."
        ),
    ] = None,
    regret: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Also show, for each of N parts of the trace, the points of hit rate that every "
            "policy misses against the best in hindsight and the optimum.",
        ),
    ] = None,
    optimum: Annotated[
        bool, typer.Option(help="Also show the bound of all policies (Belady).")
    ] = True,
    seed: SeedOption = 0,
    requests: RequestsOption = None,
    block_size: BlockSizeOption = None,
    write_trace: Annotated[
        Path | None,
        typer.Option(help="Write the trace to this file (.jsonl, .jsonl.gz) and stop."),
    ] = None,
    processes: ProcessesOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Simulate hit rates of traces by policy and capacity, without a cluster."""
    from actors.cli.simulations import (
        draw_regret,
        parse_policies,
        play,
        read_traces,
        require_plots,
    )
    from kvcache.simulate.hinting import NO_HINTS
    from kvcache.simulate.regret import require_parts
    from kvcache.simulate.running_counting import Pace
    from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache
    from kvcache.simulate.simulation import DEFAULT_NUM_PARTS
    from kvcache.simulate.simulation_processes import SimulationTask
    from kvcache.simulate.trace_writing import write_trace as write_lines

    read = partial(read_traces, traces, limit=requests, seed=seed, block_size=block_size)
    if write_trace is not None:
        if len(traces) != 1:
            raise ConfigurationError(
                f"--write-trace writes one trace, {len(traces)} are given: give one"
            )
        (trace,) = read()
        write_lines(write_trace, trace.to_lines())
        print(f"{write_trace}: {_summary(trace)}")
        return
    pace = Pace(prefill_speed, decode_speed) if running else None
    if plot is not None:
        require_plots(plot)
    policies = parse_policies(policy or ())
    played = read()
    if regret is not None:
        for trace in played:
            require_parts(trace, regret)
    groups, num_blocks = _model(played, window, config)
    capacities = _capacities(played, blocks or (), groups, num_blocks)
    if plot is not None and regret is not None and len(played) * len(capacities) > 1:
        raise ConfigurationError(
            f"--regret draws one trace with one capacity, {len(played)} and {len(capacities)} are "
            "given: give one --blocks"
        )
    kinds = [(each, kind) for each in policies for kind in dict.fromkeys(hints or [NO_HINTS])]
    if optimum and pace is None:
        kinds.append((OPTIMUM, NO_HINTS))
    tasks = [
        SimulationTask(
            i,
            SimulatedCache(each, capacity, host_blocks, disk_blocks, groups, pace, kind),
            regret or DEFAULT_NUM_PARTS,
        )
        for i in range(len(played))
        for each, kind in kinds
        for capacity in capacities
    ]
    results = play(played, tasks, processes, is_shown=not no_progress)
    if plot is not None and regret is None:
        _draw(plot, played, results)
    elif plot is not None:
        draw_regret(plot, results)
    if as_json:
        found = [result.to_dict() for result in results]
        if regret is not None:
            found = [result.to_dict() | _regrets(result, results) for result in results]
        print_json(found)
        return
    console = Console()
    for trace in played:
        _print(console, trace, [r for r in results if r.trace == trace.name])
        if regret is not None:
            for capacity in capacities:
                _print_regret(console, trace, capacity, results)


def _model(
    traces: Sequence[BlockTrace], window_tokens: int | None, config: Path | None
) -> tuple[tuple[KVCacheGroupSpec, ...], int | None]:
    """Return the groups of layers that share the blocks, and a configuration's number of blocks.

    Raises ConfigurationError if `--window` and `--config` contradict each other or the traces.
    """
    from kvcache.simulate.simulated_cache import window_groups

    if config is not None and window_tokens is not None:
        raise ConfigurationError("--window and --config both describe the model: give one of them")
    if window_tokens is not None:
        sizes = {trace.block_size for trace in traces}
        if len(sizes) > 1:
            raise ConfigurationError(
                f"--window needs one block size, the traces have {sorted(sizes)}: simulate one by "
                "one"
            )
        return window_groups(sizes.pop(), window_tokens), None
    if config is None:
        return (), None
    from kvcache.config import load_config
    from kvcache.planner import plan_cluster

    plan = plan_cluster(load_config(config))
    return plan.model_groups, plan.num_blocks - 1


def _capacities(
    traces: Sequence[BlockTrace],
    blocks: Sequence[str],
    groups: Sequence[KVCacheGroupSpec],
    num_blocks: int | None,
) -> list[int | None]:
    """Return the given capacities, the configuration's, or a range."""
    from actors.cli.simulations import capacity_range, parse_capacity

    if blocks:
        return list(dict.fromkeys(parse_capacity(text) for text in blocks))
    if num_blocks is not None:
        return [num_blocks]
    if groups:
        raise ConfigurationError(
            "--window needs --blocks: the kinds of layers share the blocks, so give their number"
        )
    return list(capacity_range(traces))


def _summary(trace: BlockTrace) -> str:
    return (
        f"{trace.num_requests:,} requests, {trace.num_references:,} blocks of "
        f"{trace.block_size:,} tokens, {trace.num_distinct_blocks:,} of them different"
    )


def _print(console: Console, trace: BlockTrace, results: list[SimulationResult]) -> None:
    """Print a table with a row per policy and a column per capacity."""
    from actors.cli.simulations import capacity_text
    from kvcache.simulate.simulated_cache import OPTIMUM

    cells: dict[str, list[str]] = {}
    for result in results:
        cells.setdefault(result.cache.label, []).append(_cell(result))
    cache = results[0].cache
    columns = list(dict.fromkeys(capacity_text(r.cache.num_blocks) for r in results))
    table = Table()
    table.add_column("hit rate with blocks")
    for column in columns:
        table.add_column(column, justify="right")
    for policy, row in cells.items():
        table.add_row(policy, *row, style="dim" if policy == OPTIMUM else None)
    print_table(console, f"{trace.name}: {_summary(trace)}", table)
    if cache.host_blocks:
        note = (
            f"below the device: {cache.host_blocks:,} blocks of host memory, "
            f"{cache.disk_blocks:,} on disk; in brackets: hits on the device + host + disk"
        )
        print_note(console, note)
    if cache.pace is not None:
        note = (
            "requests run side by side, answers included; in brackets: how long they wait for "
            "room, on average"
        )
        print_note(console, note)
    if cache.groups:
        kinds = ", ".join(group.kv_cache_spec.kind for group in cache.groups)
        note = f"hit tokens of prompt tokens; blocks are shared by groups: {kinds}"
        if OPTIMUM in cells:
            note += f"; {OPTIMUM}: a bound that may be out of reach"
        print_note(console, note)


def _cell(result: SimulationResult) -> str:
    from kvcache.simulate.simulated_cache import OPTIMUM

    text = f"{result.hit_rate:.2%}"
    if result.cache.policy == OPTIMUM:
        return text
    more = []
    if result.cache.host_blocks:
        more.append(" + ".join(f"{100 * rate:.1f}" for rate in result.hit_rates_by_tier))
    if result.waits is not None:
        more.append(f"{result.waits.mean_wait_s:,.1f} s")
    return f"{text} ({'; '.join(more)})" if more else text


def _references(peers: Sequence[SimulationResult]) -> dict[str, SimulationResult]:
    """Return the best policy in hindsight and the optimum, if it was simulated."""
    from kvcache.simulate.regret import best_in_hindsight
    from kvcache.simulate.simulated_cache import OPTIMUM

    optimum = [(OPTIMUM, result) for result in peers if result.cache.policy == OPTIMUM]
    return dict([("best", best_in_hindsight(peers)), *optimum])


def _regrets(result: SimulationResult, results: Sequence[SimulationResult]) -> dict[str, object]:
    from kvcache.simulate.regret import regret_over_time

    peers = _peers(results, result.trace, result.cache.num_blocks)
    return {
        f"regret_to_{name}": {
            "policy": reference.cache.policy,
            "hints": reference.cache.hints,
            "whole": reference.hit_rate - result.hit_rate,
            "over_time": regret_over_time(result, reference),
        }
        for name, reference in _references(peers).items()
    }


def _peers(
    results: Sequence[SimulationResult], trace: str, num_blocks: int | None
) -> list[SimulationResult]:
    return [r for r in results if (r.trace, r.cache.num_blocks) == (trace, num_blocks)]


def _print_regret(
    console: Console,
    trace: BlockTrace,
    num_blocks: int | None,
    results: Sequence[SimulationResult],
) -> None:
    """Print a table against each reference, with a row per part of the trace."""
    from actors.cli.simulations import capacity_text
    from kvcache.simulate.regret import regret_over_time
    from kvcache.simulate.simulated_cache import OPTIMUM
    from kvcache.simulate.simulation import part_starts

    peers = _peers(results, trace.name, num_blocks)
    for name, reference in _references(peers).items():
        others = [r for r in peers if r is not reference and r.cache.policy != OPTIMUM]
        label = reference.cache.label
        regrets = [
            [*regret_over_time(r, reference), reference.hit_rate - r.hit_rate] for r in others
        ]
        starts = part_starts(trace.num_requests, len(reference.hit_rates_over_time))
        rows = [(f"{i + 1:,}", f"{trace.arrivals_ms[i] / 1000:,.0f} s") for i in starts[:-1]]
        table = Table()
        for column in ("request", "at", label, *(r.cache.label for r in others)):
            table.add_column(column, justify="right")
        rates = (*reference.hit_rates_over_time, reference.hit_rate)
        for i, (row, rate) in enumerate(zip([*rows, ("all", "")], rates, strict=True)):
            points = [f"{100 * regret[i]:+.2f}" for regret in regrets]
            table.add_row(*row, f"{rate:.2%}", *points, style="bold" if row[0] == "all" else None)
        best = f"{label}, the best in hindsight" if name == "best" else f"the {OPTIMUM}"
        title = f"points missed against {best}, with {capacity_text(num_blocks)} blocks"
        print_table(console, title, table)


def _draw(path: Path, traces: list[BlockTrace], results: list[SimulationResult]) -> None:
    from actors.cli.simulations import Curve, draw_curves
    from kvcache.simulate.simulated_cache import OPTIMUM

    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for result in results:
        trace = next(trace for trace in traces if trace.name == result.trace)
        num_blocks = result.cache.num_blocks
        x = trace.num_distinct_blocks if num_blocks is None else num_blocks
        curves.setdefault((result.trace, result.cache.label), []).append((x, result.hit_rate))
    drawn = [
        Curve(
            policy if len(traces) == 1 else f"{name}, {policy}",
            tuple(sorted(points)),
            is_bound=policy == OPTIMUM,
        )
        for (name, policy), points in curves.items()
    ]
    title = traces[0].name if len(traces) == 1 else f"{len(traces)} traces"
    draw_curves(path, drawn, title=title, x_name="blocks of the device", y_name="hit rate")
