"""`kvcache simulate`: play traces on the manager alone, without Ray or torch.

Errors in options and traces are found before the first simulation, except for requests that do not
fit when groups share the blocks. Curves need matplotlib (extra `plots`). Equal curves give equal
SVG files, without dates and random names. `advise` uses the same traces, simulations and curves.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from actors.cli.command import (
    JsonOption,
    NoProgressOption,
    WorkProgress,
    command,
    print_json,
    print_note,
    print_table,
    require_positive,
)
from kvcache.base.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvcache.simulate.block_trace import BlockTrace
    from kvcache.simulate.simulation import SimulationResult
    from kvcache.simulate.simulation_processes import SimulationTask
    from kvcache.specs import KVCacheGroupSpec

UNLIMITED = "unlimited"
ALL = "all"

_DEFAULT_POLICY = "lru"
_PREFILL_SPEED = 10_000
_DECODE_SPEED = 40
_STEPS = (1, 2, 5)
_MOST_CAPACITIES = 9
_ENDS = (".svg", ".png", ".pdf")

SeedOption = Annotated[int, typer.Option(help="Seed of a generated trace.")]
RequestsOption = Annotated[
    int | None,
    typer.Option("--requests", "-l", help="Only the first N requests.", min=1, max=sys.maxsize),
]
BlockSizeOption = Annotated[
    int | None, typer.Option(help="Tokens per block, if the trace does not say.", min=1)
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
        float | None,
        typer.Option(help="With --running: prompt tokens per second (default: 10000)."),
    ] = None,
    decode_speed: Annotated[
        float | None, typer.Option(help="With --running: answer tokens per second (default: 40).")
    ] = None,
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
        Path | None, typer.Option(help="Write the trace to this file (.jsonl, .jsonl.gz) and stop.")
    ] = None,
    processes: ProcessesOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Simulate hit rates of traces by policy and capacity, without a cluster."""
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
    pace = None
    require_positive(prefill_speed=prefill_speed, decode_speed=decode_speed)
    if running:
        pace = Pace(
            _PREFILL_SPEED if prefill_speed is None else prefill_speed,
            _DECODE_SPEED if decode_speed is None else decode_speed,
        )
    elif prefill_speed is not None or decode_speed is not None:
        raise ConfigurationError(
            "--prefill-speed and --decode-speed are for requests that overlap: add --running, or "
            "omit them"
        )
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
    for trace in played:
        _print(trace, [r for r in results if r.trace == trace.name])
        if regret is not None:
            for capacity in capacities:
                _print_regret(trace, capacity, results)


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


def _print(trace: BlockTrace, results: list[SimulationResult]) -> None:
    """Print a table with a row per policy and a column per capacity."""
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
    print_table(f"{trace.name}: {_summary(trace)}", table)
    if cache.host_blocks:
        note = (
            f"below the device: {cache.host_blocks:,} blocks of host memory, "
            f"{cache.disk_blocks:,} on disk; in brackets: hits on the device + host + disk"
        )
        print_note(note)
    if cache.pace is not None:
        note = (
            "requests run side by side, answers included; in brackets: how long they wait for "
            "room, on average"
        )
        print_note(note)
    if cache.groups:
        specs = [group.kv_cache_spec for group in cache.groups]
        kinds = ", ".join(f"{spec.kind} ({spec.block_size:,} tokens a block)" for spec in specs)
        note = f"hit tokens of prompt tokens; blocks are shared by groups: {kinds}"
        if OPTIMUM in cells:
            note += f"; {OPTIMUM}: a bound that may be out of reach"
        print_note(note)


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
    trace: BlockTrace, num_blocks: int | None, results: Sequence[SimulationResult]
) -> None:
    """Print a table against each reference, with a row per part of the trace."""
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
        left = [
            ["request", *(f"{i + 1:,}" for i in starts[:-1]), "all"],
            ["at", *(f"{trace.arrivals_ms[i] / 1000:,.0f} s" for i in starts[:-1]), ""],
            [
                _in_lines(label),
                *(f"{r:.2%}" for r in (*reference.hit_rates_over_time, reference.hit_rate)),
            ],
        ]
        right = [
            [_in_lines(r.cache.label), *(f"{100 * regret:+.2f}" for regret in points)]
            for r, points in zip(others, regrets, strict=True)
        ]
        best = f"{label}, the best in hindsight" if name == "best" else f"the {OPTIMUM}"
        title = f"points missed against {best}, with {capacity_text(num_blocks)} blocks"
        for table in _tables(left, right, Console().width):
            print_table(title, table)


def _tables(left: list[list[str]], right: list[list[str]], width: int) -> Iterator[Table]:
    """Yield tables no wider than `width` of columns, a title and cells each, with all of `left`
    and some of `right`."""
    fitting: list[list[list[str]]] = [[]]
    for column in right:
        if fitting[-1] and _width_of([*left, *fitting[-1], column]) > width:
            fitting.append([])
        fitting[-1].append(column)
    for some in fitting:
        table = Table()
        for column in (*left, *some):
            table.add_column(column[0], justify="right")
        for row in zip(*(column[1:] for column in (*left, *some)), strict=True):
            table.add_row(*row, style="bold" if row[0] == "all" else None)
        yield table


def _in_lines(label: str) -> str:
    return label.replace(", ", "\n")


def _width_of(columns: list[list[str]]) -> int:
    return 1 + sum(3 + max(map(len, "\n".join(cells).split("\n"))) for cells in columns)


def _draw(path: Path, traces: list[BlockTrace], results: list[SimulationResult]) -> None:
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


def read_traces(
    names: Sequence[str], *, limit: int | None, seed: int, block_size: int | None
) -> list[BlockTrace]:
    """Return all traces once, under distinct names. Raises TraceError."""
    from kvcache.simulate.opening import open_block_trace

    names = list(dict.fromkeys(names))
    traces = [
        open_block_trace(name, limit=limit, seed=seed, block_size=block_size) for name in names
    ]
    uses = Counter(trace.name for trace in traces)
    return [
        replace(trace, name=name) if uses[trace.name] > 1 else trace
        for name, trace in zip(names, traces, strict=True)
    ]


def parse_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the policies without repetitions. Raises ConfigurationError for an unknown name."""
    from kvcache.policies.registry import require_eviction_policy
    from kvcache.simulate.simulated_cache import all_policies

    if not names:
        return (_DEFAULT_POLICY,)
    if ALL in names:
        return all_policies()
    return tuple(dict.fromkeys(require_eviction_policy(name) for name in names))


def parse_capacity(text: str) -> int | None:
    """Return the capacity in blocks, None for unlimited. Raises ConfigurationError."""
    if text == UNLIMITED:
        return None
    digits = text.replace("_", "").replace(",", "")
    if not (digits.isascii() and digits.isdigit() and int(digits)):
        raise ConfigurationError(
            f"--blocks {text!r} is not a capacity: give a number of at least 1, or {UNLIMITED}"
        )
    return int(digits)


def capacity_range(traces: Sequence[BlockTrace]) -> list[int]:
    """Return capacities 1, 2, 5, 10, ... from the longest request up to all blocks; the largest
    ones if there are many."""
    least = max(trace.most_blocks for trace in traces)
    enough = max(trace.num_distinct_blocks for trace in traces)
    capacities: list[int] = []
    power = 1
    while not capacities or capacities[-1] < enough:
        capacities.extend(step * power for step in _STEPS if step * power >= least)
        power *= 10
    while len(capacities) > 1 and capacities[-2] >= enough:
        capacities.pop()
    return capacities[-_MOST_CAPACITIES:]


def capacity_text(num_blocks: int | None) -> str:
    return UNLIMITED if num_blocks is None else f"{num_blocks:,}"


def play(
    traces: list[BlockTrace],
    tasks: list[SimulationTask],
    num_processes: int | None,
    *,
    is_shown: bool,
) -> list[SimulationResult]:
    """Run simulations and show the progress."""
    from kvcache.simulate.simulation_processes import run_simulations

    num_played = [0] * len(tasks)
    total = sum(traces[task.trace_index].num_requests for task in tasks)
    title = f"{len(tasks)} simulations" if len(tasks) > 1 else "simulation"
    with WorkProgress(title, total, is_shown=is_shown) as progress:

        def show(task_index: int, num_requests: int) -> None:
            num_played[task_index] = num_requests
            played, elapsed_s = sum(num_played), progress.elapsed_s
            progress.show(played, f"{played / elapsed_s:,.0f} requests/s" if elapsed_s else "")

        return run_simulations(traces, tasks, num_processes, show)


@dataclass(frozen=True)
class Curve:
    """A named line. `is_bound`: the line is the bound of the others."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_bound: bool = False


def require_plots(path: Path) -> None:
    """Raise ConfigurationError if no plot can be written to `path`."""
    if path.suffix not in _ENDS:
        raise ConfigurationError(
            f"--plot {path}: pictures end with {', '.join(_ENDS[:-1])} or {_ENDS[-1]}: choose one"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no directory {path.parent}: create it")
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed: pip install 'kvcache[plots]'"
        )


def draw_curves(
    path: Path, curves: Sequence[Curve], *, title: str, x_name: str, y_name: str
) -> None:
    """Draw all curves over a logarithmic x axis; raises ConfigurationError if that fails."""
    with _picture(path, 1) as (axes,):
        from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

        for curve in curves:
            xs, ys = zip(*curve.points, strict=True)
            form = "k--" if curve.is_bound else "o-"
            axes.plot(xs, ys, form, label=curve.name, linewidth=1.4, markersize=3.5)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        numbers = FuncFormatter(lambda x, _: f"{x:,.10g}")
        axes.xaxis.set_major_formatter(numbers)
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_minor_formatter(numbers)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.set_title(title)
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.legend(fontsize="small")


def draw_regret(path: Path, results: Sequence[SimulationResult]) -> None:
    """Draw the regret over time, and the hit rate by kind of hints, of one trace with one capacity.
    Raises ConfigurationError if that fails."""
    from kvcache.simulate.hinting import KINDS_OF_HINTS, NO_HINTS
    from kvcache.simulate.regret import best_in_hindsight, regret_over_time
    from kvcache.simulate.simulated_cache import OPTIMUM
    from kvcache.simulate.simulation import part_starts

    best = best_in_hindsight(results)
    rates: dict[str, dict[str, float]] = {}
    for result in results:
        rates.setdefault(result.cache.policy, {})[result.cache.hints] = result.hit_rate
    bound = rates.pop(OPTIMUM, {}).get(NO_HINTS)
    forms = dict(zip(KINDS_OF_HINTS, ("o-", "^:", "s-."), strict=True))
    with _picture(path, 2) as (time_axes, rate_axes):
        from matplotlib.ticker import PercentFormatter

        colors = {policy: f"C{i}" for i, policy in enumerate(rates)} | {OPTIMUM: "k"}
        starts = part_starts(best.num_requests, len(best.hit_rates_over_time))
        middles = [(start + end) / 2 for start, end in pairwise(starts)]
        for result in results:
            points = [100 * regret for regret in regret_over_time(result, best)]
            policy = result.cache.policy
            time_axes.plot(
                middles,
                points,
                "--" if policy == OPTIMUM else forms[result.cache.hints],
                color=colors[policy],
                label=result.cache.label,
                linewidth=1.4,
                markersize=3,
            )
        time_axes.set_title(best.trace)
        time_axes.set_xlabel("request")
        time_axes.set_ylabel(f"points missed against {best.cache.label}")
        time_axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3)
        kinds = list(rates[best.cache.policy])
        width = 0.8 / len(kinds)
        for i, kind in enumerate(kinds):
            rate_axes.bar(
                [place + (i - (len(kinds) - 1) / 2) * width for place in range(len(rates))],
                [found[kind] for found in rates.values()],
                width,
                label="no hints" if kind == NO_HINTS else f"{kind} hints",
                color=str(0.8 - 0.25 * i),
            )
        if bound is not None:
            rate_axes.axhline(bound, color="k", linestyle="--", label=OPTIMUM)
        rate_axes.set_xticks(range(len(rates)), list(rates))
        rate_axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        rate_axes.set_title(f"{capacity_text(best.cache.num_blocks)} blocks of the device")
        rate_axes.set_ylabel("hit rate")
        rate_axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4)


@contextmanager
def _picture(path: Path, num_axes: int) -> Iterator[list[Axes]]:
    """Axes in a row, to draw on in the `with` block; saved when it ends."""
    require_plots(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "kvcache", "svg.fonttype": "none"}):
        figure, found = pyplot.subplots(
            1,
            num_axes,
            figsize=(7.5 if num_axes == 1 else 12, 4.5),
            layout="constrained",
            squeeze=False,
        )
        axes = list(found[0])
        for each in axes:
            each.grid(visible=True, alpha=0.3)
            each.set_axisbelow(True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        try:
            yield axes
            figure.savefig(path, metadata=metadata, dpi=150)
        except OSError as error:
            raise ConfigurationError(
                f"--plot {path}: cannot be written ({error.strerror or error}): name another file"
            ) from error
        finally:
            pyplot.close(figure)
