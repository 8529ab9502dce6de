"""`kvcache status --stuck`: what a cluster waits for, and what it has waited for too long."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from actors.cli.clusters import named_cluster
from actors.cli.sessions import ray_session
from actors.cli.tables import print_json, print_table
from actors.cluster import KVCacheCluster
from kvcache.base.errors import NotRunningError
from kvcache.coordinator.watchdog import PendingWork


def show_pending(name: str | None, as_json: bool) -> bool:
    """Print what a running cluster waits for; say whether any of it is stuck.

    Raises NotRunningError if there is none, or none that can be asked.
    """
    with ray_session(may_start=False):
        cluster = named_cluster(name)
        if not isinstance(cluster, KVCacheCluster):
            raise NotRunningError(
                f"the coordinator of {cluster.name} is in a process of its engine, which alone "
                "knows what it waits for: look there"
            )
        state, problem = cluster.status().state, cluster.status().problem
        pending = cluster.pending()
    stuck = [work for work in pending if work.is_stuck]
    has_failed = state == "failed"
    if as_json:
        rows = [{**asdict(work), "is_stuck": work.is_stuck} for work in pending]
        print_json(json.dumps({"name": cluster.name, "state": state, "pending": rows}, indent=2))
        return bool(stuck) or has_failed
    console = Console(file=sys.stdout)
    if has_failed:
        console.print(f"{cluster.name} has failed: {problem}", markup=False)
    if pending:
        print_table(console, f"{cluster.name} waits for", _table(pending))
    if not (stuck or has_failed):
        console.print(f"nothing is stuck in {cluster.name}", markup=False)
    return bool(stuck) or has_failed


def _table(pending: Sequence[PendingWork]) -> Table:
    table = Table()
    for heading in ("what", "for", "limit", ""):
        table.add_column(heading)
    for work in pending:
        mark = "STUCK" if work.is_stuck else ""
        table.add_row(work.what, f"{work.age_s:.1f} s", f"{work.limit_s:g} s", mark)
    return table
