"""Traces, policies and capacities of simulations; run them, and draw curves.

Used by `kvcache simulate` and `advise`. Errors in options and traces are found before the first
simulation, except for requests that do not fit when groups share the blocks. Curves need matplotlib
(extra `plots`). Equal curves give equal SVG files, without dates and random names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from actors.cli.tables import WorkProgress
from kvcache.base.errors import ConfigurationError
from kvcache.policies.registry import require_eviction_policy
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.hinting import KINDS_OF_HINTS, NO_HINTS
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.regret import best_in_hindsight, regret_over_time
from kvcache.simulate.simulated_cache import OPTIMUM, all_policies
from kvcache.simulate.simulation import SimulationResult, part_starts
from kvcache.simulate.simulation_processes import SimulationTask, run_simulations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNLIMITED = "unlimited"
ALL = "all"

_DEFAULT_POLICY = "lru"
_STEPS = (1, 2, 5)
_MOST_CAPACITIES = 9
_ENDS = (".svg", ".png", ".pdf")


def read_traces(
    names: Sequence[str], *, limit: int | None, seed: int, block_size: int | None
) -> list[BlockTrace]:
    """Return all traces once, under distinct names. Raises TraceError."""
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
    """Return a capacity as text."""
    return UNLIMITED if num_blocks is None else f"{num_blocks:,}"


def play(
    traces: list[BlockTrace],
    tasks: list[SimulationTask],
    num_processes: int | None,
    *,
    is_shown: bool,
) -> list[SimulationResult]:
    """Run simulations and show the progress."""
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
