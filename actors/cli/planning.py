"""`kvcache plan`: a configuration as figures, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.cli.tables import bytes_text, print_facts, print_json, print_table
from kvcache.config import load_config
from kvcache.planner import PlanReport, plan_cluster, report_plan


def show_plan(config_path: Path, as_json: bool) -> None:
    """Print the plan of the configuration in `config_path`; raises what makes it impossible."""
    config = load_config(config_path)
    report = report_plan(plan_cluster(config), config.name)
    if as_json:
        print_json(report.to_json())
        return
    console = Console(file=sys.stdout)
    print_facts(console, f"plan of {report.name}", _summary(report))
    print_table(console, "KV cache groups", _groups(report))
    print_table(console, "ranks", _ranks(report))
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _summary(report: PlanReport) -> dict[str, str]:
    concurrency, capacity = report.max_concurrency, report.capacity_tokens
    return {
        "blocks": f"{report.num_usable_blocks:,} and the null block",
        "capacity": "unlimited" if capacity is None else f"{capacity:,} tokens",
        "longest request": f"{report.max_model_len:,} tokens",
        "tokens per step": f"{report.max_num_batched_tokens:,}",
        "concurrency": (
            "unlimited" if concurrency is None else f"{concurrency:.2f} requests of full length"
        ),
        "memory": f"{bytes_text(report.allocated_bytes)} on {report.num_ranks} ranks",
        "per token": f"{report.bytes_per_token:,.1f} bytes, all ranks",
        "prefix caching": "possible" if report.can_prefix_cache else "not possible",
        "layout": report.layout,
        "fingerprint": report.fingerprint[:16],
    }


def _groups(report: PlanReport) -> Table:
    table = Table()
    for heading in ("group", "kind"):
        table.add_column(heading)
    for heading in ("layers", "block size", "page", "blocks per request"):
        table.add_column(heading, justify="right")
    for group in report.groups:
        table.add_row(
            str(group.group_id),
            group.kind,
            str(group.num_layers),
            f"{group.block_size_tokens} tokens",
            bytes_text(group.page_size_bytes),
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
