"""`kvcache plan`: what a configuration or a published model takes, before anything runs."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.cli.tables import bytes_text, print_facts, print_json, print_table
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig, load_config
from kvcache.planner import (
    HFChoices,
    PlanReport,
    cluster_from_hf_config,
    plan_cluster,
    report_plan,
)


@dataclass(frozen=True)
class ModelChoices:
    """What was typed with a `config.json`, named like the options; None: not typed."""

    tp: int | None = None
    pp: int | None = None
    memory: str | None = None
    block_size: int | None = None
    max_model_len: str | None = None
    max_num_batched_tokens: int | None = None
    dtype: str | None = None
    mamba_cache_mode: str | None = None


def show_plan(
    config_path: Path | None, hf_config_path: Path | None, choices: ModelChoices, as_json: bool
) -> None:
    """Print the plan of a configuration or of a model; raises what makes it impossible."""
    config, name = _read(config_path, hf_config_path, choices)
    report = report_plan(plan_cluster(config), name)
    if as_json:
        print_json(report.to_json())
        return
    console = Console(file=sys.stdout)
    print_facts(console, f"plan of {report.name}", _summary(report))
    print_table(console, "KV cache groups", _groups(report))
    print_table(console, "ranks", _ranks(report))
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _read(
    config_path: Path | None, hf_config_path: Path | None, choices: ModelChoices
) -> tuple[ClusterConfig, str]:
    """Return the configuration to plan, and what to call it."""
    typed = [
        f"--{name.replace('_', '-')}"
        for name, value in asdict(choices).items()
        if value is not None
    ]
    if config_path is not None and hf_config_path is None:
        if typed:
            raise ConfigurationError(
                f"{', '.join(typed)} cannot be typed beside --config: set them in {config_path}"
            )
        config = load_config(config_path)
        return config, config.name
    if hf_config_path is None or config_path is not None:
        raise ConfigurationError(
            "there must be one thing to plan: give --config FILE for a configuration, or "
            "--hf-config FILE for the config.json of a model"
        )
    config = _cluster_of_model(hf_config_path, choices)
    return config, config.model.name


def _cluster_of_model(path: Path, choices: ModelChoices) -> ClusterConfig:
    """Return the configuration of a cluster for the model; raises ConfigurationError."""
    if choices.memory is None:
        raise ConfigurationError(
            "a config.json does not say how much memory there is: give --memory, such as 60GiB"
        )
    typed = HFChoices(
        tensor_parallel_size=choices.tp or 1,
        pipeline_parallel_size=choices.pp or 1,
        max_model_len=_tokens_or_text(choices.max_model_len or "auto"),
        dtype=choices.dtype,
        mamba_cache_mode=choices.mamba_cache_mode or "none",
    )
    cache: dict[str, object] = {"memory_per_rank": choices.memory}
    if choices.block_size is not None:
        cache["block_size"] = choices.block_size
    scheduler: dict[str, object] = {}
    if choices.max_num_batched_tokens is not None:
        scheduler["max_num_batched_tokens"] = choices.max_num_batched_tokens
        scheduler["max_num_seqs"] = min(128, choices.max_num_batched_tokens)
    return cluster_from_hf_config(path, typed, cache=cache, scheduler=scheduler)


def _tokens_or_text(text: str) -> int | str:
    """Return a number that was typed as one, other text as it is for the model to refuse."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text


def _summary(report: PlanReport) -> dict[str, str]:
    concurrency, capacity = report.max_concurrency, report.capacity_tokens
    largest = report.largest_model_len
    padding = report.request_padding_bytes / report.request_bytes if report.request_bytes else 0
    return {
        "blocks": f"{report.num_usable_blocks:,} and the null block",
        "capacity": "unlimited" if capacity is None else f"{capacity:,} tokens",
        "longest request": f"{report.max_model_len:,} tokens",
        "largest possible": "any length" if largest is None else f"{largest:,} tokens fit",
        "tokens per step": f"{report.max_num_batched_tokens:,}",
        "concurrency": (
            "unlimited" if concurrency is None else f"{concurrency:.2f} requests of full length"
        ),
        "memory": f"{bytes_text(report.allocated_bytes)} on {report.num_ranks} ranks",
        "per token": f"{report.bytes_per_token:,.1f} bytes, all ranks",
        "one request": (
            f"{bytes_text(report.request_bytes)} of full length, of which padding wastes "
            f"{bytes_text(report.request_padding_bytes)} ({padding:.1%})"
        ),
        "prefix caching": "possible" if report.can_prefix_cache else "not possible",
        "layout": report.layout,
        "fingerprint": report.fingerprint[:16],
    }


def _groups(report: PlanReport) -> Table:
    table = Table()
    table.add_column("group")
    table.add_column("kind", no_wrap=True)
    for heading in ("layers", "block size", "page", "content", "blocks per request"):
        table.add_column(heading, justify="right")
    for group in report.groups:
        table.add_row(
            str(group.group_id),
            group.kind,
            str(group.num_layers),
            f"{group.block_size_tokens} tokens",
            bytes_text(group.page_size_bytes),
            f"{group.real_page_size_bytes / group.page_size_bytes:.1%}",
            f"{group.blocks_per_request:,}",
        )
    return table


def _ranks(report: PlanReport) -> Table:
    table = Table()
    table.add_column("rank")
    for heading in ("layers", "memory", "blocks", "block", "allocated", "padding"):
        table.add_column(heading, justify="right")
    for rank in report.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.num_layers),
            bytes_text(rank.available_bytes),
            f"{rank.num_blocks:,}",
            bytes_text(rank.block_bytes),
            bytes_text(rank.allocated_bytes),
            f"{rank.padding_waste:.1%}",
        )
    return table
