"""`kvcache advise`: how much memory of each kind to buy for a load, and which policy to use.

Every number comes from a simulation of the whole trace. The advice states its assumptions, and how
much the hit rates varied over the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from actors.cli.command import (
    JsonOption,
    NoProgressOption,
    bytes_text,
    command,
    parse_size,
    print_json,
    print_note,
    print_table,
    require_positive,
)
from actors.cli.simulate import (
    BlockSizeOption,
    Curve,
    PlotOption,
    ProcessesOption,
    RequestsOption,
    SeedOption,
    capacity_range,
    draw_curves,
    parse_policies,
    play,
    read_traces,
    require_plots,
)
from kvcache.base.errors import ConfigurationError

if TYPE_CHECKING:
    from kvcache.simulate.advice import Candidate, HitCurve, MeasuredCandidate, Memory, Speeds
    from kvcache.simulate.block_trace import BlockTrace
    from kvcache.simulate.simulated_cache import SimulatedCache
    from kvcache.simulate.simulation import SimulationResult

_USUAL_POLICY = "lru"
_FEW_REQUESTS = 2_000
_LARGE_ERROR = 0.02


@command
def advise(
    trace: Annotated[str, typer.Argument(help="A trace, as `simulate` reads or makes it.")],
    *,
    device_price: Annotated[float, typer.Option(help="Price of a GiB of device memory.")],
    budget: Annotated[float, typer.Option(help="Money to spend, in the currency of the prices.")],
    host_price: Annotated[
        float | None, typer.Option(help="Price of a GiB of host memory (default: no such tier).")
    ] = None,
    disk_price: Annotated[
        float | None, typer.Option(help="Price of a GiB of disk (default: no such tier).")
    ] = None,
    token_size: Annotated[
        str | None, typer.Option(help="Bytes of a token on all ranks, such as 128KiB.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Take the bytes of a token from this configuration."),
    ] = None,
    prefill_speed: Annotated[float, typer.Option(help="Tokens computed per second.")] = 10_000,
    host_bandwidth: Annotated[
        float, typer.Option(help="GiB per second from host memory, all ranks.")
    ] = 25,
    disk_bandwidth: Annotated[float, typer.Option(help="GiB per second from disk, all ranks.")] = 5,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="Consider only these (default: all).")
    ] = None,
    seed: SeedOption = 0,
    requests: RequestsOption = None,
    block_size: BlockSizeOption = None,
    processes: ProcessesOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Recommend memory of each kind, and a policy, for a load and a budget."""
    from kvcache.simulate.advice import (
        GIB,
        Memory,
        Prices,
        Speeds,
        best_candidates,
        choose,
        choose_policy,
        estimate,
        measured,
    )
    from kvcache.simulate.simulated_cache import OPTIMUM
    from kvcache.simulate.simulation_processes import SimulationTask

    require_positive(
        budget=budget,
        prefill_speed=prefill_speed,
        host_bandwidth=host_bandwidth,
        disk_bandwidth=disk_bandwidth,
    )
    prices = Prices(device_price, host_price, disk_price)
    speeds = Speeds(prefill_speed, host_bandwidth * GIB, disk_bandwidth * GIB)
    if plot is not None:
        require_plots(plot)
    policies = parse_policies(policy or ("all",))
    bytes_per_token = _bytes_per_token(token_size, config)
    (load,) = read_traces([trace], limit=requests, seed=seed, block_size=block_size)
    memory = Memory(bytes_per_token * load.block_size, prices, budget)
    size, least = load.block_size, load.most_blocks
    best_candidates({}, memory, speeds, size, least)  # raises if the budget is too small
    curves = _curves(load, policies, processes, has_progress=not no_progress)
    ruled = {name: curve for name, curve in curves.items() if name != OPTIMUM}
    found = best_candidates(ruled, memory, speeds, size, least)

    def simulated(candidates: Sequence[Candidate]) -> list[MeasuredCandidate]:
        tasks = [SimulationTask(0, candidate.cache) for candidate in candidates]
        results = play([load], tasks, processes, is_shown=not no_progress)
        pairs = zip(candidates, results, strict=True)
        return [measured(*pair, speeds, bytes_per_token) for pair in pairs]

    candidates = simulated(found)
    best = choose(candidates)
    usual = _USUAL_POLICY if _USUAL_POLICY in policies else policies[0]

    def estimated(policy: str) -> Candidate:
        cache = replace(best.candidate.cache, policy=policy)
        worth = speeds.worth(bytes_per_token)
        return estimate(best.candidate.shape, cache, curves[policy], memory, worth)

    others = [estimated(policy) for policy in policies if policy != best.candidate.cache.policy]
    rivals = [best, *simulated(others)]
    chosen = choose_policy(rivals, usual)
    candidates[candidates.index(best)] = chosen
    hinted = _hinted(load, chosen.result.cache, processes, has_progress=not no_progress)
    advice = _Advice(
        load, memory, speeds, bytes_per_token, chosen, candidates, curves, usual, rivals, hinted
    )
    if plot is not None:
        _draw(plot, advice)
    if as_json:
        print_json(_to_dict(advice))
    else:
        _print(advice)


@dataclass(frozen=True)
class _Advice:
    trace: BlockTrace
    memory: Memory
    speeds: Speeds
    bytes_per_token: float
    best: MeasuredCandidate
    candidates: list[MeasuredCandidate]
    curves: dict[str, HitCurve]
    usual: str
    rivals: list[MeasuredCandidate]
    """Every policy with the sizes of `best`, the one first for which they were chosen."""
    hinted: dict[str, SimulationResult]

    def num_parts_behind(self, rival: MeasuredCandidate) -> int:
        """Return in how many parts of the trace a policy has fewer hits than the usual one."""
        from kvcache.simulate.regret import num_parts_behind

        (usual,) = [each for each in self.rivals if each.result.cache.policy == self.usual]
        return num_parts_behind(rival.result, usual.result)


def _hinted(
    trace: BlockTrace, cache: SimulatedCache, num_processes: int | None, *, has_progress: bool
) -> dict[str, SimulationResult]:
    """Simulate the device alone with each kind of hints that the trace has, and the optimum."""
    from kvcache.simulate.hinting import KINDS_OF_HINTS, SESSION_HINTS
    from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache
    from kvcache.simulate.simulation_processes import SimulationTask

    kinds = [kind for kind in KINDS_OF_HINTS if kind != SESSION_HINTS or trace.hints]
    caches = {
        kind: SimulatedCache(cache.policy, cache.num_blocks, hints=kind) for kind in kinds
    } | {OPTIMUM: SimulatedCache(OPTIMUM, cache.num_blocks)}
    tasks = [SimulationTask(0, each) for each in caches.values()]
    results = play([trace], tasks, num_processes, is_shown=has_progress)
    return dict(zip(caches, results, strict=True))


def _curves(
    trace: BlockTrace, policies: Sequence[str], num_processes: int | None, *, has_progress: bool
) -> dict[str, HitCurve]:
    """Simulate pools of several sizes with every policy, and the optimum."""
    from kvcache.simulate.advice import HitCurve
    from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache
    from kvcache.simulate.simulation_processes import SimulationTask

    capacities = sorted({trace.most_blocks, *capacity_range([trace])})
    tasks = [
        SimulationTask(0, SimulatedCache(policy, num_blocks))
        for policy in (*policies, OPTIMUM)
        for num_blocks in capacities
    ]
    points: dict[str, list[tuple[int, float]]] = {}
    for result in play([trace], tasks, num_processes, is_shown=has_progress):
        point = (result.cache.num_blocks or 0, result.hit_rate)
        points.setdefault(result.cache.policy, []).append(point)
    return {policy: HitCurve(found) for policy, found in points.items()}


def _bytes_per_token(token_size: str | None, config: Path | None) -> float:
    """Return the bytes of a token on all ranks together. Raises ConfigurationError."""
    from kvcache.config import load_config
    from kvcache.planner import plan_cluster, report_plan

    if token_size is not None and config is not None:
        raise ConfigurationError("--token-size and --config both size a token: give one of them")
    if token_size is None and config is None:
        raise ConfigurationError(
            "the size of a token on all ranks is unknown: give --token-size, such as "
            "128KiB, or --config"
        )
    if token_size is not None:
        return float(parse_size("--token-size", token_size, "128KiB"))
    assert config is not None
    plan = plan_cluster(load_config(config))
    groups = plan.model_groups
    if len(groups) != 1:
        raise ConfigurationError(
            f"{config} has {len(groups)} groups of layers, so the size of a token depends "
            "on its position: give --token-size"
        )
    report = report_plan(plan)
    num_tokens = plan.num_blocks * groups[0].kv_cache_spec.block_size
    return report.allocated_bytes / num_tokens


@dataclass(frozen=True)
class _Steadiness:
    """How the hit rate varied between the tenths of a trace, without the first, which fills it."""

    least: float
    most: float
    standard_error: float

    @classmethod
    def of(cls, result: SimulationResult) -> _Steadiness | None:
        """Return None if the trace is too short."""
        from statistics import stdev

        rates = result.hit_rates_over_time[1:]
        if len(rates) < 2:
            return None
        return cls(min(rates), max(rates), stdev(rates) / len(rates) ** 0.5)

    def describe(self) -> str:
        """Return one sentence."""
        return (
            f"over the trace, without its first tenth, tenths had {self.least:.1%} to "
            f"{self.most:.1%}; standard error of the mean {self.standard_error:.1%}"
        )


def _doubts(advice: _Advice) -> list[str]:
    """Return the reasons to distrust the results, empty if there are none."""
    from kvcache.simulate.advice import AS_GOOD

    trace, best = advice.trace, advice.best
    doubts = []
    if trace.num_requests < _FEW_REQUESTS:
        doubts.append(f"the trace has only {trace.num_requests:,} requests: record more")
    steadiness = _Steadiness.of(best.result)
    if steadiness is not None and steadiness.standard_error > _LARGE_ERROR:
        doubts.append("the hit rate varies much between tenths of the trace: record longer")
    if (best.result.cache.total_blocks or 0) >= trace.num_distinct_blocks:
        doubts.append(
            "the memory holds all blocks of the trace: record longer to learn whether more helps"
        )
    difference = abs(best.result.hit_rate - best.candidate.hit_rate)
    if difference > _LARGE_ERROR:
        doubts.append(
            f"the estimate by which these sizes were chosen was off by {difference:.1%}: sizes "
            "nearby may be better"
        )
    first = advice.rivals[0]
    if best.saved < first.saved - AS_GOOD:
        doubts.append(
            f"the sizes were chosen for {first.result.cache.policy}: with "
            f"{best.result.cache.policy}, others may be better"
        )
    return doubts


def _assumptions(advice: _Advice) -> list[str]:
    speeds = advice.speeds
    worth = speeds.worth(advice.bytes_per_token)
    return [
        f"a token takes {bytes_text(advice.bytes_per_token)}; "
        f"{speeds.prefill_tokens_per_s:,.0f} tokens are computed, "
        f"{bytes_text(speeds.host_bytes_per_s)} loaded from host memory and "
        f"{bytes_text(speeds.disk_bytes_per_s)} from disk a second",
        f"so a hit saves {worth[0]:.0%} of its prefill on the device, {worth[1]:.0%} from host "
        f"memory, {worth[2]:.0%} from disk",
        "requests one after another, prompts only: room for running requests and their answers "
        "is extra",
        "the load stays as the trace is; the cache begins empty",
        "one policy for all tiers; tiers of whole blocks, transfers without queueing",
    ]


def _to_dict(advice: _Advice) -> dict[str, object]:
    steadiness = _Steadiness.of(advice.best.result)
    return {
        "trace": advice.trace.name,
        "advice": _candidate_dict(advice, advice.best),
        "compared": [_candidate_dict(advice, candidate) for candidate in advice.candidates],
        "curves": {
            policy: [
                {"num_blocks": n, "gib": advice.memory.gib(n), "hit_rate": rate}
                for n, rate in curve.points
            ]
            for policy, curve in advice.curves.items()
        },
        "policies": [
            {
                "policy": rival.result.cache.policy,
                "hit_rate": rival.result.hit_rate,
                "saved_prefill": rival.saved,
                "num_parts_behind": advice.num_parts_behind(rival),
            }
            for rival in advice.rivals
        ],
        "usual_policy": advice.usual,
        "num_parts": len(advice.best.result.hit_rates_over_time),
        "device_hit_rate_by_hints": {kind: r.hit_rate for kind, r in advice.hinted.items()},
        "reasons": [_policy_sentence(advice), _hints_sentence(advice)],
        "steadiness": None if steadiness is None else asdict(steadiness),
        "doubts": _doubts(advice),
        "assumptions": _assumptions(advice),
    }


def _candidate_dict(advice: _Advice, one: MeasuredCandidate) -> dict[str, object]:
    cache, memory, result = one.result.cache, advice.memory, one.result
    return {
        "shape": one.candidate.shape,
        "policy": cache.policy,
        "device_gib": memory.gib(cache.num_blocks or 0),
        "host_gib": memory.gib(cache.host_blocks),
        "disk_gib": memory.gib(cache.disk_blocks),
        "device_blocks": cache.num_blocks,
        "host_blocks": cache.host_blocks,
        "disk_blocks": cache.disk_blocks,
        "cost": one.candidate.cost,
        "hit_rate": result.hit_rate,
        "device_hit_rate": result.num_device_hits / result.num_references,
        "host_hit_rate": result.num_host_hits / result.num_references,
        "disk_hit_rate": result.num_disk_hits / result.num_references,
        "saved_prefill": one.saved,
        "estimated_hit_rate": one.candidate.hit_rate,
    }


def _print(advice: _Advice) -> None:
    trace, memory = advice.trace, advice.memory
    title = (
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_distinct_blocks:,} different "
        f"blocks ({_gib_text(memory.gib(trace.num_distinct_blocks))} GiB)"
    )
    print_table(title, _candidate_table(advice))
    print_note(_sentence(advice))
    print_note(_policy_sentence(advice))
    print_note(_hints_sentence(advice))
    best = advice.best.result.cache.policy
    print_table(f"what a GiB of one pool adds, with {best}", _curve_table(advice))
    steadiness = _Steadiness.of(advice.best.result)
    print_note("How sure is this?")
    if steadiness is not None:
        print_note(f"- {steadiness.describe()}")
    for doubt in _doubts(advice) or ["nothing in the trace speaks against it"]:
        print_note(f"- {doubt}")
    print_note("Assumed:")
    for assumption in _assumptions(advice):
        print_note(f"- {assumption}")


def _candidate_table(advice: _Advice) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    for name in ("device GiB", "host GiB", "disk GiB", "cost", "policy", "hit rate", "saved"):
        # A hit rate may wrap onto a second line, so that no number is cut off.
        table.add_column(name, justify="right", no_wrap=" " not in name, overflow="fold")
    memory = advice.memory
    for one in advice.candidates:
        cache, result = one.result.cache, one.result
        hits = (result.num_device_hits, result.num_host_hits, result.num_disk_hits)
        parts = " + ".join(f"{100 * n / result.num_references:.1f}" for n in hits if n)
        sizes = (cache.num_blocks or 0, cache.host_blocks, cache.disk_blocks)
        table.add_row(
            "advised" if one is advice.best else "",
            *(_gib_text(memory.gib(n)) if n else "-" for n in sizes),
            f"{one.candidate.cost:,.2f}",
            cache.policy,
            f"{result.hit_rate:.1%} ({parts})",
            f"{one.saved:.1%}",
        )
    return table


def _gib_text(gib: float) -> str:
    """Return a number of GiB with one decimal, or three digits of a part of one."""
    return f"{gib:,.1f}" if gib >= 1 else f"{gib:.3g}"


def _sentence(advice: _Advice) -> str:
    best, memory = advice.best, advice.memory
    cache = best.result.cache
    sizes = [f"{_gib_text(memory.gib(cache.num_blocks or 0))} GiB of device memory"]
    if cache.host_blocks:
        sizes.append(f"{_gib_text(memory.gib(cache.host_blocks))} GiB of host memory")
    if cache.disk_blocks:
        sizes.append(f"{_gib_text(memory.gib(cache.disk_blocks))} GiB of disk")
    left = memory.budget - best.candidate.cost
    rest = f", {left:,.2f} of it not needed" if left > memory.budget / 100 else ""
    return (
        f"Advice: {', '.join(sizes)}, policy {cache.policy}, for {best.candidate.cost:,.2f} of "
        f"{memory.budget:,.2f}{rest}: {best.result.hit_rate:.1%} hits, {best.saved:.1%} of prefill "
        "time saved."
    )


def _policy_sentence(advice: _Advice) -> str:
    """Say why this policy."""
    from kvcache.simulate.advice import AS_GOOD

    best, usual = advice.best, advice.usual
    policy, num_parts = best.result.cache.policy, len(best.result.hit_rates_over_time)
    (stays,) = [each for each in advice.rivals if each.result.cache.policy == usual]
    most = max(advice.rivals, key=lambda rival: rival.saved)
    other = most.result.cache.policy
    if policy != usual:
        return (
            f"Policy: {policy} saves {best.saved:.1%} of prefill time, {usual} {stays.saved:.1%}; "
            f"it has fewer hits in {advice.num_parts_behind(best)} of {num_parts} parts of the "
            "trace."
        )
    if most.saved <= stays.saved + AS_GOOD:
        return f"Policy: with this memory, no policy saves notably more than {usual}."
    found = f"{other} saves {most.saved:.1%} of prefill time, {usual} only {stays.saved:.1%}"
    if not num_parts:
        return f"Policy: {found}, but the trace is too short to tell: {usual} is safer."
    return (
        f"Policy: {found}, but {other} has fewer hits in {advice.num_parts_behind(most)} of "
        f"{num_parts} parts of the trace: {usual} is safer."
    )


def _hints_sentence(advice: _Advice) -> str:
    """Say what hints would bring."""
    from kvcache.simulate.advice import AS_GOOD
    from kvcache.simulate.hinting import NO_HINTS, ORACLE_HINTS, SESSION_HINTS
    from kvcache.simulate.simulated_cache import OPTIMUM

    rates = {kind: result.hit_rate for kind, result in advice.hinted.items()}
    kind = SESSION_HINTS if SESSION_HINTS in rates else ORACLE_HINTS
    gain = rates[kind] - rates[NO_HINTS]
    whose = "session hints" if kind == SESSION_HINTS else "hints that know every return exactly"
    what = (
        f"Hints: {whose} would bring {100 * gain:+.1f} points on the device alone "
        f"({rates[NO_HINTS]:.1%} to {rates[kind]:.1%}, optimum {rates[OPTIMUM]:.1%})"
    )
    if gain <= AS_GOOD:
        return f"{what}: not worth sending."
    if kind == SESSION_HINTS:
        return f"{what}: send them, docs/hints.md."
    return f"{what}; send what your engine knows of its sessions, docs/hints.md."


def _curve_table(advice: _Advice) -> Table:
    memory = advice.memory
    from kvcache.simulate.simulated_cache import OPTIMUM

    table = Table()
    for name in ("blocks", "GiB", "hit rate", "points per GiB added", "optimum"):
        table.add_column(name, justify="right")
    curve = advice.curves[advice.best.result.cache.policy]
    optimum = advice.curves[OPTIMUM]
    before = (0, 0.0)
    for num_blocks, rate in curve.points:
        added_gib = memory.gib(num_blocks - before[0])
        table.add_row(
            f"{num_blocks:,}",
            _gib_text(memory.gib(num_blocks)),
            f"{rate:.2%}",
            f"{100 * (rate - before[1]) / added_gib:,.3f}",
            f"{optimum.rate(num_blocks):.2%}",
        )
        before = (num_blocks, rate)
    return table


def _draw(path: Path, advice: _Advice) -> None:
    from kvcache.simulate.simulated_cache import OPTIMUM

    drawn = [
        Curve(
            policy,
            tuple((advice.memory.gib(n), rate) for n, rate in curve.points),
            is_bound=policy == OPTIMUM,
        )
        for policy, curve in advice.curves.items()
    ]
    draw_curves(path, drawn, title=advice.trace.name, x_name="GiB of one pool", y_name="hit rate")
