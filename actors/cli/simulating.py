"""`kvcache simulate`: traces on the manager alone, by policy and capacity.

Neither Ray nor torch is imported. What can be wrong with what was typed, and with the traces, is
found before the first simulation begins, but whether requests fit where groups share the blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.cli.plots import Curve, draw_curves, require_plots
from actors.cli.simulation_progress import SimulationProgress
from actors.cli.tables import print_json, print_table
from actors.cli.trace_choices import TraceChoices, capacity_range, capacity_text, parse_capacity
from kvcache.base.clock import SystemClock
from kvcache.base.errors import ConfigurationError
from kvcache.policies.registry import require_eviction_policy
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.running_counting import Pace
from kvcache.simulate.simulated_cache import (
    OPTIMUM,
    SimulatedCache,
    all_policies,
    window_groups,
)
from kvcache.simulate.simulation import SimulationResult
from kvcache.simulate.simulation_processes import SimulationTask, run_simulations
from kvcache.simulate.trace_writing import write_trace
from kvcache.specs import KVCacheGroupSpec

ALL = "all"
_DEFAULT_POLICY = "lru"


@dataclass(frozen=True)
class SimulationChoices:
    """What was typed."""

    traces: TraceChoices
    policies: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    host_blocks: int = 0
    disk_blocks: int = 0
    window_tokens: int | None = None
    config: Path | None = None
    pace: Pace | None = None
    has_optimum: bool = True
    num_processes: int | None = None
    plot: Path | None = None
    as_json: bool = False
    has_progress: bool = True


def simulate_traces(choices: SimulationChoices) -> None:
    """Simulate all that was asked for and print it."""
    if choices.plot is not None:
        require_plots(choices.plot)
    policies = parse_policies(choices.policies)
    traces = choices.traces.read()
    model = _Model.of(choices, traces)
    capacities = _capacities(choices, model, traces)
    if choices.has_optimum and choices.pace is None:
        policies = (*policies, OPTIMUM)
    tasks = [
        SimulationTask(
            i,
            SimulatedCache(
                policy,
                num_blocks,
                choices.host_blocks,
                choices.disk_blocks,
                model.groups,
                choices.pace,
            ),
        )
        for i in range(len(traces))
        for policy in policies
        for num_blocks in capacities
    ]
    results = play(traces, tasks, choices.num_processes, is_shown=choices.has_progress)
    if choices.plot is not None:
        _draw(choices.plot, traces, results)
    if choices.as_json:
        print_json(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        console = Console()
        for trace in traces:
            _print(console, trace, [r for r in results if r.trace == trace.name])


def write_down(choices: TraceChoices, path: Path) -> None:
    """Write the one trace that was asked for to a file, and say what it is."""
    if len(choices.names) != 1:
        raise ConfigurationError(
            f"--write-trace writes one trace, {len(choices.names)} are named: name one"
        )
    (trace,) = choices.read()
    write_trace(path, trace.to_lines())
    print(f"{path}: {_summary(trace)}")


def play(
    traces: list[BlockTrace],
    tasks: list[SimulationTask],
    num_processes: int | None,
    *,
    is_shown: bool,
) -> list[SimulationResult]:
    """Run simulations and show how far they are."""
    num_requests = [traces[task.trace_index].num_requests for task in tasks]
    title = f"{len(tasks)} simulations" if len(tasks) > 1 else "simulation"
    with SimulationProgress(title, num_requests, SystemClock(), is_shown=is_shown) as progress:
        return run_simulations(traces, tasks, num_processes, progress.show)


def parse_policies(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was typed, each once. Raises ConfigurationError for what is no policy's name."""
    if not names:
        return (_DEFAULT_POLICY,)
    if ALL in names:
        return all_policies()
    return tuple(dict.fromkeys(require_eviction_policy(name) for name in names))


@dataclass(frozen=True)
class _Model:
    """What kinds of layers share the blocks, and how many blocks a configuration has of them."""

    groups: tuple[KVCacheGroupSpec, ...] = ()
    num_blocks: int | None = None

    @classmethod
    def of(cls, choices: SimulationChoices, traces: list[BlockTrace]) -> _Model:
        """Return the model that was typed. Raises ConfigurationError."""
        window_tokens, config = choices.window_tokens, choices.config
        if config is not None and window_tokens is not None:
            raise ConfigurationError(
                "--window and --config both say what the model is: give one of them"
            )
        if window_tokens is not None:
            sizes = {trace.block_size for trace in traces}
            if len(sizes) > 1:
                raise ConfigurationError(
                    f"--window with traces of blocks of {sorted(sizes)} tokens: simulate them "
                    "one by one"
                )
            return cls(window_groups(sizes.pop(), window_tokens))
        return cls() if config is None else cls._configured(config)

    @classmethod
    def _configured(cls, path: Path) -> _Model:
        from kvcache.config import load_config
        from kvcache.planner import plan_cluster

        plan = plan_cluster(load_config(path))
        return cls(plan.model_groups, plan.num_blocks - 1)


def _capacities(
    choices: SimulationChoices, model: _Model, traces: list[BlockTrace]
) -> list[int | None]:
    if choices.blocks:
        return list(dict.fromkeys(parse_capacity(text) for text in choices.blocks))
    if model.num_blocks is not None:
        return [model.num_blocks]
    if model.groups:
        raise ConfigurationError(
            "--window without --blocks: the kinds of layers share them, so say how many there are"
        )
    return list(capacity_range(traces))


def _summary(trace: BlockTrace) -> str:
    return (
        f"{trace.num_requests:,} requests, {trace.num_references:,} blocks of "
        f"{trace.block_size:,} tokens, {trace.num_distinct_blocks:,} of them different"
    )


def _print(console: Console, trace: BlockTrace, results: list[SimulationResult]) -> None:
    """Print a table: a row for each policy, a column for each capacity."""
    cells: dict[str, list[str]] = {}
    for result in results:
        cells.setdefault(result.cache.policy, []).append(_cell(result))
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
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if cache.pace is not None:
        note = (
            "requests run side by side, answers included; in brackets: how long they wait for "
            "room, on average"
        )
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if cache.groups:
        kinds = ", ".join(group.kv_cache_spec.kind for group in cache.groups)
        note = f"hit tokens of prompt tokens; blocks are shared by groups: {kinds}"
        if OPTIMUM in cells:
            note += f"; {OPTIMUM}: a bound that may be out of reach"
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _cell(result: SimulationResult) -> str:
    text = f"{result.hit_rate:.2%}"
    if result.cache.policy == OPTIMUM:
        return text
    more = []
    if result.cache.host_blocks:
        more.append(" + ".join(f"{100 * rate:.1f}" for rate in result.hit_rates_by_tier))
    if result.waits is not None:
        more.append(f"{result.waits.mean_wait_s:,.1f} s")
    return f"{text} ({'; '.join(more)})" if more else text


def _draw(path: Path, traces: list[BlockTrace], results: list[SimulationResult]) -> None:
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for result in results:
        trace = next(trace for trace in traces if trace.name == result.trace)
        num_blocks = result.cache.num_blocks
        x = trace.num_distinct_blocks if num_blocks is None else num_blocks
        curves.setdefault((result.trace, result.cache.policy), []).append((x, result.hit_rate))
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
