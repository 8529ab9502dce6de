"""`kvcache plan`: the blocks and bytes of a configuration or a published model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from actors.cli.command import (
    JsonOption,
    OptionalConfigOption,
    bytes_text,
    command,
    print_facts,
    print_note,
    print_table,
)
from kvcache.base.errors import ConfigurationError

if TYPE_CHECKING:
    from kvcache.planner import PlanReport


@command
def plan(
    config: OptionalConfigOption = None,
    *,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="Plan this config.json of a Hugging Face model."),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="With --hf-config: ranks that share a layer (default: 1).", min=1),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="With --hf-config: pipeline stages (default: 1).", min=1)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="With --hf-config: memory of each rank, such as 60GiB.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="With --hf-config: tokens per block (default: 16).", min=1)
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="With --hf-config: longest request (default: auto).")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="With --hf-config: tokens of a step (default: 8192).", min=1)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --hf-config: type of keys and values (default: the model's)."),
    ] = None,
    mamba_cache_mode: Annotated[
        str | None, typer.Option(help="With --hf-config: none or align (default: none).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the plan of a configuration or a model: blocks, bytes, tokens and concurrency."""
    from kvcache.config import load_config
    from kvcache.planner import HFChoices, cluster_from_hf_config, plan_cluster, report_plan

    if config is not None and hf_config is None:
        of_a_model = {
            "--tp": tp,
            "--pp": pp,
            "--memory": memory,
            "--block-size": block_size,
            "--max-model-len": max_model_len,
            "--max-num-batched-tokens": max_num_batched_tokens,
            "--dtype": dtype,
            "--mamba-cache-mode": mamba_cache_mode,
        }
        typed = [option for option, value in of_a_model.items() if value is not None]
        if typed:
            raise ConfigurationError(
                f"{', '.join(typed)} cannot be combined with --config: set them in {config}"
            )
        settings = load_config(config)
        name = settings.name
    elif hf_config is None or config is not None:
        raise ConfigurationError(
            "nothing to plan, or two things: give --config FILE for a configuration, or "
            "--hf-config FILE for the config.json of a model"
        )
    elif memory is None:
        raise ConfigurationError(
            "a config.json does not say how much memory a rank has: give --memory, such as 60GiB"
        )
    else:
        choices = HFChoices(
            tensor_parallel_size=tp or 1,
            pipeline_parallel_size=pp or 1,
            max_model_len=_tokens_or_text(max_model_len or "auto"),
            dtype=dtype,
            mamba_cache_mode=mamba_cache_mode or "none",
        )
        cache: dict[str, object] = {"memory_per_rank": memory}
        if block_size is not None:
            cache["block_size"] = block_size
        scheduler: dict[str, object] = {}
        if max_num_batched_tokens is not None:
            scheduler["max_num_batched_tokens"] = max_num_batched_tokens
            scheduler["max_num_seqs"] = min(128, max_num_batched_tokens)
        settings = cluster_from_hf_config(hf_config, choices, cache=cache, scheduler=scheduler)
        name = settings.model.name
    report = report_plan(plan_cluster(settings), name)
    if as_json:
        print(report.to_json())
        return
    print_facts(f"plan of {report.name}", _summary(report))
    print_table("KV cache groups", _groups(report))
    print_table("ranks", _ranks(report))
    for warning in report.warnings:
        print_note(f"warning: {warning}", "yellow")


def _tokens_or_text(text: str) -> int | str:
    """Return an integer if the text is one, else the text, which the model refuses."""
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
            f"{bytes_text(report.request_bytes)} of full length, with "
            f"{bytes_text(report.request_padding_bytes)} ({padding:.1%}) of padding"
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
