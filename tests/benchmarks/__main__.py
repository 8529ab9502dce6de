"""Run the benchmarks.

    python -m tests.benchmarks [NAME ...] [--peer DIR] [--smoke] [--churn-turns N] [--json FILE]
                               [--write FILE]

Names are workloads (`w1` ... `w9`, `m`, `g`, `c1`, `c2`); without any, all run. `--peer` is the
environment that `make bench-peer` builds; without it the peer's columns are empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.benchmarks.manager_rows import MANAGER_WORKLOADS, measure_manager, peer_version
from tests.benchmarks.measure import Row
from tests.benchmarks.works import Sizes

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_WORKLOADS = ("c1", "c2")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="workloads to run")
    parser.add_argument("--peer", type=Path, help="environment of the peer")
    parser.add_argument("--smoke", action="store_true", help="small sizes: does it run at all")
    parser.add_argument(
        "--churn-turns", type=int, default=2000, help="turns of w7 (20000 is its full size)"
    )
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    parser.add_argument("--write", type=Path, help="write the table as Markdown")
    options = parser.parse_args()
    known = (*MANAGER_WORKLOADS, *CLUSTER_WORKLOADS)
    names = options.names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown workloads {unknown}: there are {', '.join(known)}")
    console = Console(stderr=True)
    peer = options.peer
    if peer is None and (ROOT / ".venv-peer" / ".installed").exists():
        peer = ROOT / ".venv-peer"
    if peer is None:
        console.print("no peer: its columns stay empty (make bench-peer builds it)")
    rows: list[Row] = []
    with Progress(console=console) as progress:
        sizes = Sizes(options.smoke, 16 if options.smoke else options.churn_turns)
        managers = [name for name in names if name in MANAGER_WORKLOADS]
        rows += measure_manager(managers, peer, sizes, progress)
        cluster = [name for name in names if name in CLUSTER_WORKLOADS]
        if cluster:
            from tests.benchmarks.bench_cluster import measure_cluster

            rows += measure_cluster(cluster, options.smoke, progress)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
    if options.write:
        options.write.write_text(markdown(rows, peer), encoding="utf-8")


def show(rows: list[Row]) -> None:
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=170).print(table)


HEADINGS = ("", "work", "ours", "other", "ratio", "bar now", "goal")


def cells(row: Row) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.1f}x"
    other = f"{row.peer} ({row.peer_name})" if row.peer else "-"
    what = f"{row.what} ({row.note})" if row.note else row.what
    return row.workload, what, str(row.ours), other, ratio, row.bar, row.goal


def markdown(rows: list[Row], peer: Path | None) -> str:
    name = "vLLM" if peer is None else f"vLLM {peer_version(peer)}"
    lines = [
        "# Benchmarks",
        "",
        "Only ratios mean something: both sides ran alternately, in the same minutes, on a",
        "shared, noisy machine. Figures are medians; ± is half the distance between the quartiles.",
        "",
        f"- Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("numpy", "ray", "torch", "pyzmq")),
        f"- Revision: {revision()}",
        f"- Command: `python -m tests.benchmarks {' '.join(options_without_paths())}`",
        f"- Peer of W, M, G: the KV cache manager of {name} (`make bench-peer`). Other side of C:",
        "  the same messages as plain Ray actor calls.",
        "",
        "`bar now` is what the reference core must reach, `goal` what the fast core is built for.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def options_without_paths() -> list[str]:
    """Return the command line's words, paths of this machine left out."""
    return [word for word in sys.argv[1:] if not word.startswith("/")]


def revision() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
