"""`kvcache replay` and `replay-record`: play a workload on a cluster, or replay a recording.

A workload runs on a new cluster, on a running one, in this process without Ray, or with
`--prefill-only` as a plain count of hits. A recording is replayed in this process, without cluster
and workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.command import (
    EXIT_DIFFERENT,
    JsonOption,
    NoProgressOption,
    OptionalConfigOption,
    WorkProgress,
    bytes_text,
    command,
    print_facts,
    print_json,
    print_note,
)
from actors.cli.simulate import UNLIMITED, parse_capacity
from kvcache.base.errors import ConfigurationError, TraceError, WrongBytesError

if TYPE_CHECKING:
    from kvcache.recorder import Recording, RecordReplayReport
    from kvcache.replay.report import ReplayReport
    from kvcache.replay.stepper import TierCounters
    from kvcache.simulate.counting import CountingOptions, PrefillCount
    from kvcache.simulate.workload import Workload, WorkloadRequest


@command
def replay(
    workload: Annotated[
        str,
        typer.Argument(
            help="conversations, chat, agents, retrieval or scans, a Mooncake trace (.jsonl, "
            ".jsonl.gz), a text file or a directory."
        ),
    ] = "conversations",
    *,
    config: OptionalConfigOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", help="Play the first N requests only.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a generated workload.")] = 0,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Play on this running cluster.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Play in this process, without Ray.")
    ] = False,
    prefill_only: Annotated[
        bool,
        typer.Option(
            "--prefill-only", help="No cluster: count the hits of one prompt after another."
        ),
    ] = False,
    blocks: Annotated[
        str | None,
        typer.Option(
            help="With --prefill-only: capacity in blocks, or unlimited (default: unlimited)."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="With --prefill-only: tokens per block.", min=1)
    ] = None,
    pipeline_depth: Annotated[
        int, typer.Option(help="Steps that may run while the next one is scheduled.", min=1)
    ] = 1,
    skip_too_long: Annotated[
        bool,
        typer.Option("--skip-too-long", help="Skip and count requests longer than max_model_len."),
    ] = False,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Play a workload on a cluster, check every byte, and report hits and evictions."""
    from actors.cli.playground import open_playground
    from kvcache.base.clock import SystemClock
    from kvcache.config import load_config
    from kvcache.replay.engine import ReplayEngine
    from kvcache.simulate.opening import open_workload

    if prefill_only:
        options = (("--config", config), ("--name", name), ("--local", local))
        if given := [option for option, value in options if value]:
            raise ConfigurationError(f"--prefill-only plays on no cluster: omit {', '.join(given)}")
    elif blocks is not None or block_size is not None:
        raise ConfigurationError(
            "--blocks and --block-size are for --prefill-only: add it, or set the sizes in the "
            "configuration"
        )
    counting = (
        _counting_options(blocks or UNLIMITED, block_size, skip_too_long) if prefill_only else None
    )
    opened = open_workload(workload, limit=limit, seed=seed)
    size = measure_workload(opened)
    if counting is not None:
        count = _count_prefills(opened, size, counting, is_shown=not no_progress)
        if as_json:
            print(count.to_json())
        else:
            _print_count(count)
        return
    if config is not None:
        max_model_len = load_config(config).model.max_model_len
        if max_model_len != "auto":
            size = _playable(opened, size, max_model_len, skip_too_long)
    with open_playground(config, name, local) as ground:
        size = _playable(opened, size, ground.limits.max_model_len, skip_too_long)
        limits = replace(ground.limits, pipeline_depth=pipeline_depth, skips_too_long=skip_too_long)
        clock, title = SystemClock(), f"{opened.name} on {ground.title}"
        progress = WorkProgress(title, size.num_tokens, is_shown=not no_progress)

        def show(report: ReplayReport) -> None:
            rate = f"{report.steps_per_s:,.0f} steps/s  hit rate {report.hit_rate:.1%}"
            progress.show(report.num_prompt_tokens + report.num_output_tokens, rate)

        engine = ReplayEngine(opened, ground.stepper, limits, clock, show)
        try:
            with progress:
                report = engine.run()
        except WrongBytesError:
            _print_report(engine.report(), ground.title, as_json)
            raise
    _print_report(report, ground.title, as_json)


@command
def replay_record(
    file: Annotated[
        Path, typer.Argument(help="A recording: a directory, or one segment (.kvrec) of it.")
    ],
    *,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Replay a recording and compare the results."""
    from kvcache.recorder import RecordReplay, open_recording

    recording = open_recording(file)
    title, is_shown = "replaying the recording", not no_progress
    progress = WorkProgress(title, recording.size_bytes, is_shown=is_shown)

    def show(report: RecordReplayReport) -> None:
        progress.show(report.bytes_read, f"{report.num_records:,} records")

    with progress:
        report = RecordReplay(recording, show).run()
    if as_json:
        print_json(report.to_dict())
    else:
        _print_repetition(report, file, recording)
    if not report.is_identical:
        raise typer.Exit(EXIT_DIFFERENT)


@dataclass(frozen=True)
class WorkloadSize:
    """Number of requests and tokens to play."""

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    longest: WorkloadRequest

    @property
    def num_tokens(self) -> int:
        """Input and output tokens."""
        return self.num_input_tokens + self.num_output_tokens


def measure_workload(workload: Workload, max_num_tokens: int | None = None) -> WorkloadSize:
    """Read a workload once, without its tokens. With `max_num_tokens`, longer requests do not
    count.

    Finds errors in the workload before anything is started. Raises TraceError if it has no
    request to play.
    """
    num_requests = num_input_tokens = num_output_tokens = num_skipped = 0
    longest: WorkloadRequest | None = None
    for request in workload:
        if max_num_tokens is not None and request.num_tokens > max_num_tokens:
            num_skipped += 1
            continue
        if longest is None or request.num_tokens > longest.num_tokens:
            longest = request
        num_requests += 1
        num_input_tokens += request.num_prompt_tokens
        num_output_tokens += request.num_output_tokens
    if longest is None and num_skipped:
        raise TraceError(
            f"every request of {workload.name} ({num_skipped:,}) is longer than max_model_len "
            f"({max_num_tokens}): raise it, or give another workload"
        )
    if longest is None:
        raise TraceError(f"{workload.name} has no requests: give a workload with at least one")
    return WorkloadSize(num_requests, num_input_tokens, num_output_tokens, longest)


def _counting_options(blocks: str, block_size: int | None, skip_too_long: bool) -> CountingOptions:
    """Raises ConfigurationError for `--skip-too-long`: a count has no model and no longest
    request."""
    from kvcache.simulate.counting import CountingOptions

    if skip_too_long:
        raise ConfigurationError(
            "--prefill-only has no model, so no request is too long: omit --skip-too-long"
        )
    return CountingOptions(parse_capacity(blocks), block_size)


def _count_prefills(
    workload: Workload, size: WorkloadSize, options: CountingOptions, *, is_shown: bool
) -> PrefillCount:
    from kvcache.base.clock import SystemClock
    from kvcache.simulate.counting import count_prefill_hits

    progress = WorkProgress(workload.name, size.num_tokens, is_shown=is_shown)

    def show(count: PrefillCount) -> None:
        per_s = count.num_input_tokens / count.wall_time_s if count.wall_time_s else 0.0
        rate = f"{per_s / 1e6:,.1f}M tokens/s  hit rate {count.hit_rate:.1%}"
        progress.show(count.num_input_tokens, rate)

    with progress:
        return count_prefill_hits(workload, options, SystemClock(), show)


def _playable(
    workload: Workload, size: WorkloadSize, max_model_len: int, skips_too_long: bool
) -> WorkloadSize:
    """Return the part of a workload that fits a model of `max_model_len` tokens.

    Raises RequestError if a request is too long and may not be skipped, or if all are too long.
    """
    from kvcache.replay.limits import require_model_len

    if size.longest.num_tokens <= max_model_len:
        return size
    if not skips_too_long:
        require_model_len(workload.name, size.longest, max_model_len)
    return measure_workload(workload, max_model_len)


def _print_count(count: PrefillCount) -> None:
    capacity = "unlimited, blocks" if count.num_blocks is None else f"{count.num_blocks:,} blocks"
    print_facts(
        f"{count.workload}, prompts only",
        {
            "capacity": f"{capacity} of {count.block_size} tokens",
            "requests": f"{count.num_requests:,}",
            "tokens": f"{count.num_input_tokens:,}",
            "block references": f"{count.num_block_references:,}",
            "hit blocks": f"{count.num_hit_blocks:,}",
            "hit rate": f"{count.hit_rate:.2%} of blocks",
            "evictions": f"{count.num_evictions:,} blocks",
            "time": f"{count.wall_time_s:.1f} s",
        },
    )


def _print_report(report: ReplayReport, title: str, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
        return
    tokens = f"{report.num_prompt_tokens:,} prompt, {report.num_output_tokens:,} output"
    again = f"{report.num_recomputed_tokens:,} tokens computed twice"
    print_facts(
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


def _print_repetition(report: RecordReplayReport, path: Path, recording: Recording) -> None:
    head = recording.segments[0].head
    manager_config = head.manager_config
    facts = {
        "recorded": f"{len(recording.segments):,} segments, {bytes_text(recording.size_bytes)}",
        "manager": (
            f"{manager_config.kv_cache_config.num_blocks:,} blocks, plan {head.fingerprint[:16]}"
        ),
        "epochs": f"{report.num_epochs:,}",
        "records": f"{report.num_records:,} ({report.num_skipped_records:,} left out)",
        "steps": f"{report.num_steps:,}",
        "calls": f"{report.num_calls:,}",
        "refused": f"{report.num_refused:,}",
        "state at the end": f"{report.state_digest[:16]} ({_comparison(report)})",
        "outcome": "identical" if report.is_identical else "DIFFERENT",
    }
    print_facts(f"recording {path}", facts)
    for note in report.notes:
        print_note(f"note: {note}", "yellow")
    if report.difference is not None:
        told = f"first difference: {report.difference}"
        print_note(told, "red")


def _comparison(report: RecordReplayReport) -> str:
    if not report.recorded_state_digest:
        return "none recorded: the coordinator was not closed"
    if report.state_digest == report.recorded_state_digest:
        return "as recorded"
    return f"recorded: {report.recorded_state_digest[:16]}"
