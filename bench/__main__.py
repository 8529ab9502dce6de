"""Run the benchmarks.

    python -m bench [NAME ...] [--peer DIR] [--before DIR] [--smoke | --full]
                               [--churn-turns N] [--json FILE] [--write FILE]

Names are workloads (`w1` ... `w10`, `m`, `g`, `flat`, `c1` to `c5`, `o1`, `e1`); without any, all
run.
`--peer` is the environment that `make bench-peer` builds; without it the peer's column is empty.
`--before` is a checkout of an earlier revision (`git worktree add DIR REVISION`): w, m, g and flat
run it in turn with this one, and the table says how much more this one takes.
`--full` serves 20,000 turns of churn and a million small requests.
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

from bench.cores import BEFORE, OURS, PEER
from bench.manager_rows import MANAGER_WORKLOADS, measure_manager, peer_version
from bench.measure import Row
from bench.sides import SidePool
from bench.works import Sizes

ROOT = Path(__file__).resolve().parents[1]
CLUSTER_WORKLOADS = ("c1", "c2", "c4", "c5")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", help="workloads to run")
    parser.add_argument("--peer", type=Path, help="environment of the peer")
    parser.add_argument("--before", type=Path, help="checkout of an earlier revision")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smoke", action="store_true", help="small sizes: does it run at all")
    size.add_argument("--full", action="store_true", help="full sizes of w7, w8's churn and flat")
    parser.add_argument("--churn-turns", type=int, help="turns of w7; w8 serves half of them")
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    parser.add_argument("--write", type=Path, help="write the table as Markdown")
    options = parser.parse_args()
    known = (*MANAGER_WORKLOADS, *CLUSTER_WORKLOADS, "c3", "o1", "e1")
    names = options.names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown workloads {unknown}: there are {', '.join(known)}")
    console = Console(stderr=True)
    peer = options.peer
    if peer is None and (ROOT / ".venv-peer" / ".installed").exists():
        peer = ROOT / ".venv-peer"
    if peer is None:
        console.print("no peer: its column stays empty (make bench-peer builds it)")
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        console.print(f"the load is {load_before:.1f}: others use this machine, ratios will suffer")
    rows: list[Row] = []
    with Progress(console=console) as progress:
        managers = [name for name in names if name in MANAGER_WORKLOADS]
        with SidePool(peer, options.before) as pool:
            rows += measure_manager(managers, pool, sizes_of(options), progress)
        rows += measure_in_process(names, options.smoke, progress)
        if "c3" in names:
            from bench.bench_copies import measure_copies_shown

            rows += measure_copies_shown(options.smoke, progress)
        cluster = [name for name in names if name in CLUSTER_WORKLOADS]
        if cluster:
            from bench.bench_cluster import measure_cluster

            rows += measure_cluster(cluster, options.smoke, progress)
    show(rows, has_before=options.before is not None)
    if options.json:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
    if options.write:
        options.write.write_text(markdown(rows, peer, load_before), encoding="utf-8")


def measure_in_process(names: list[str], is_smoke: bool, progress: Progress) -> list[Row]:
    """Return the rows of workloads that have a process to themselves: this one."""
    rows: list[Row] = []
    if "o1" in names:
        from bench.bench_metrics import measure_metrics

        rows += measure_metrics(is_smoke, progress)
    if "e1" in names:
        from bench.bench_engine import measure_engine

        rows += measure_engine(is_smoke, progress)
    return rows


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes that the command line asks for."""
    turns, requests = (20_000, 1_000_000) if options.full else (2_000, 20_000)
    if options.smoke:
        turns, requests = 16, 2_000
    return Sizes(options.smoke, options.churn_turns or turns, requests)


def show(rows: list[Row], *, has_before: bool) -> None:
    table = Table(*HEADINGS, *(["before", "change"] if has_before else []))
    for row in rows:
        table.add_row(*cells(row), *(change(row) if has_before else []))
    Console(width=200).print(table)


def change(row: Row) -> tuple[str, str]:
    """Return what the earlier revision measured, and by how much ours is more."""
    before = row.figures.get(BEFORE)
    if before is None:
        return "-", "-"
    return str(before), f"{row.figures[OURS].median / before.median - 1:+.0%}"


HEADINGS = ("", "work", OURS, "peer", "ratio", "goal")


def cells(row: Row) -> tuple[str, ...]:
    figures = [str(row.figures.get(side, "-")) for side in (OURS, PEER)]
    ratio = row.ratio(OURS)
    if PEER in row.figures:
        figures[-1] += f" ({row.peer_name})"
    what = f"{row.what} ({row.note})" if row.note else row.what
    times = "-" if ratio is None else f"{ratio:.1f}x"
    return row.workload, what, *figures, times, row.goal


def markdown(rows: list[Row], peer: Path | None, load_before: float) -> str:
    name = "vLLM" if peer is None else f"vLLM {peer_version(peer)}"
    lines = [
        "# Benchmarks",
        "",
        "Only ratios mean something: the sides ran alternately, in the same minutes, on a",
        "shared, noisy machine. Figures are medians; ± is half the distance between the quartiles.",
        "",
        f"- Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()}; load "
        f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "- Clock: processor time of the one thread for w, m, g, flat and copies of C3; time on the",
        "  wall for the rest of C",
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("numpy", "ray", "torch", "pyzmq")),
        f"- Revision: {revision()}",
        f"- Command: `python -m bench {' '.join(options_without_paths())}`",
        f"- Peer of w, m, g: the KV cache manager of {name} (`make bench-peer`). Peer of C: the",
        "  same messages as plain Ray actor calls; of C3: a memcpy of as many bytes.",
        "",
        "A ratio is the peer's figure divided by ours: how many times less it took.",
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
