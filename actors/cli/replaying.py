"""`kvcache replay`: a workload on a cluster, every byte checked, and what the cache made of it.

Three ways to play: on a cluster that is started for it or is running already, in this process
without Ray, or by the counting rule without any cluster at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from actors.cli.playground import open_playground
from actors.cli.progress import ReplayProgress, WorkloadSize, measure_workload
from actors.cli.tables import bytes_text, print_facts, print_json
from actors.cli.trace_choices import UNLIMITED, parse_capacity
from kvcache.base.clock import SystemClock
from kvcache.base.errors import ConfigurationError, WrongBytesError
from kvcache.config import load_config
from kvcache.replay.engine import ReplayEngine
from kvcache.replay.limits import require_model_len
from kvcache.replay.report import ReplayReport
from kvcache.replay.stepper import TierCounters
from kvcache.simulate.counting import CountingOptions, PrefillCount, count_prefill_hits
from kvcache.simulate.opening import open_workload
from kvcache.simulate.workload import Workload


@dataclass(frozen=True)
class ReplayChoices:
    """What was typed."""

    workload: str
    config: Path | None
    limit: int | None
    seed: int
    name: str | None
    is_local: bool
    blocks: str
    block_size: int | None
    pipeline_depth: int
    skips_too_long: bool
    as_json: bool
    has_progress: bool


def count_prefills(choices: ReplayChoices) -> None:
    """Count the hits of the prompts alone and print the statistics.

    Raises ConfigurationError for `--skip-too-long`: no model limits a count.
    """
    if choices.skips_too_long:
        raise ConfigurationError(
            "--prefill-only has no model, so no request is too long: leave --skip-too-long out"
        )
    options = CountingOptions(parse_capacity(choices.blocks), choices.block_size)
    workload = open_workload(choices.workload, limit=choices.limit, seed=choices.seed)
    clock = SystemClock()
    size = measure_workload(workload)
    with ReplayProgress(workload.name, size, clock, is_shown=choices.has_progress) as progress:
        count = count_prefill_hits(workload, options, clock, progress.show_count)
    if choices.as_json:
        print_json(count.to_json())
    else:
        _print_count(count)


def replay_workload(choices: ReplayChoices) -> None:
    """Play the workload and print the report; raises WrongBytesError after having printed it."""
    workload = open_workload(choices.workload, limit=choices.limit, seed=choices.seed)
    clock = SystemClock()
    size = measure_workload(workload)
    if choices.config is not None:
        max_model_len = load_config(choices.config).model.max_model_len
        if max_model_len != "auto":
            size = _playable(workload, size, max_model_len, choices.skips_too_long)
    with open_playground(choices.config, choices.name, choices.is_local) as ground:
        size = _playable(workload, size, ground.limits.max_model_len, choices.skips_too_long)
        title = f"{workload.name} on {ground.title}"
        progress = ReplayProgress(title, size, clock, is_shown=choices.has_progress)
        limits = replace(
            ground.limits,
            pipeline_depth=choices.pipeline_depth,
            skips_too_long=choices.skips_too_long,
        )
        engine = ReplayEngine(workload, ground.stepper, limits, clock, progress.show_replay)
        try:
            with progress:
                report = engine.run()
        except WrongBytesError:
            _print_report(engine.report(), ground.title, choices.as_json)
            raise
    _print_report(report, ground.title, choices.as_json)


def _playable(
    workload: Workload, size: WorkloadSize, max_model_len: int, skips_too_long: bool
) -> WorkloadSize:
    """Return how much of a workload a model of `max_model_len` tokens plays.

    Raises RequestError when a request is too long and none is to be skipped, or when all are.
    """
    if size.longest.num_tokens <= max_model_len:
        return size
    if not skips_too_long:
        require_model_len(workload.name, size.longest, max_model_len)
    return measure_workload(workload, max_model_len)


def _print_count(count: PrefillCount) -> None:
    capacity = UNLIMITED if count.num_blocks is None else f"{count.num_blocks:,} blocks"
    print_facts(
        Console(),
        f"{count.workload}, prompts only",
        {
            "capacity": f"{capacity} of {count.block_size} tokens",
            "requests": f"{count.num_requests:,}",
            "tokens": f"{count.num_input_tokens:,}",
            "block references": f"{count.num_block_references:,}",
            "hit blocks": f"{count.num_hit_blocks:,}",
            "hit rate": f"{count.hit_rate:.4f}",
            "evictions": f"{count.num_evictions:,}",
            "time": f"{count.wall_time_s:.1f} s",
        },
    )


def _print_report(report: ReplayReport, title: str, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json())
        return
    tokens = f"{report.num_prompt_tokens:,} prompt, {report.num_output_tokens:,} output"
    again = f"{report.num_recomputed_tokens:,} tokens computed twice"
    print_facts(
        Console(),
        f"{report.workload} on {title}",
        {
            "requests": f"{report.num_requests:,}{_skipped_text(report)}",
            "tokens": tokens,
            "hit rate": f"{report.hit_rate:.1%} of prompt tokens",
            "not computed again": f"{report.num_hit_tokens:,} tokens",
            "evictions": f"{report.num_evictions:,} blocks",
            "preemptions": f"{report.num_preemptions:,} ({again})",
            "copies": f"{report.num_copies:,} blocks",
            **_tier_facts(report.tiers),
            "returns after a loss": f"{report.num_returns:,}",
            "peak usage, sampled": f"{report.peak_usage:.1%} of blocks",
            "steps": f"{report.num_steps:,} ({report.steps_per_s:,.0f} per second)",
            "time": f"{report.wall_time_s:.1f} s",
            "bytes checked": f"{report.bytes_checked:,} ({bytes_text(report.bytes_checked)})",
            "wrong bytes": _wrong_text(report),
        },
    )


def _tier_facts(tiers: TierCounters | None) -> dict[str, str]:
    if tiers is None:
        return {}
    from_host = tiers.num_loaded_tokens - tiers.num_fetched_tokens
    return {
        "loaded from host memory": f"{from_host:,} tokens",
        "loaded from files": f"{tiers.num_fetched_tokens:,} tokens",
        "host memory": f"{bytes_text(tiers.stored_bytes)} stored, "
        f"{bytes_text(tiers.loaded_bytes)} loaded",
        "files": f"{bytes_text(tiers.spilled_bytes)} written, "
        f"{bytes_text(tiers.fetched_bytes)} read",
        "requests swapped": f"{tiers.num_swapped_out:,} out, {tiers.num_swapped_in:,} in, "
        f"{tiers.num_swap_saved_tokens:,} tokens saved",
    }


def _skipped_text(report: ReplayReport) -> str:
    skipped = report.num_skipped_requests
    return f" ({skipped:,} skipped, longer than max_model_len)" if skipped else ""


def _wrong_text(report: ReplayReport) -> str:
    return f"in {report.num_wrong_blocks:,} blocks" if report.num_wrong_blocks else "0"
