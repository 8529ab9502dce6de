"""Compare our manager with the peer's, operation by operation.

    python -m tests.oracle --peer DIR [--kind KIND ...] [--seeds N] [--first SEED]
                           [--operations N] [--json FILE] [--write FILE]

The same random look-ups, admissions, chunks, decodes, frees, preemptions and resets run on both.
Hit lengths, admissions and free blocks are compared after every operation. `--peer` is the
environment that `make bench-peer` builds. Exits with status 1 if a difference remains that no rule
explains.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.manager_rows import peer_version
from tests.oracle.compare import KINDS, Comparison, Peer, compare_kind
from tests.oracle.rules import RULES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="environment of the peer")
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="default: all")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--operations", type=int, default=400, help="operations a seed")
    parser.add_argument("--json", type=Path, help="write what was found as JSON")
    parser.add_argument("--write", type=Path, help="write the table as Markdown")
    options = parser.parse_args()
    # A refused reset is logged as a warning, and belongs to every walk here.
    logging.getLogger("kvcache").setLevel(logging.ERROR)
    seeds = range(options.first, options.first + options.seeds)
    peer = Peer(options.peer)
    comparisons = []
    try:
        with Progress(console=Console(stderr=True)) as progress:
            for kind in options.kind or KINDS:
                task = progress.add_task(kind, total=len(seeds))
                comparisons.append(
                    compare_kind(
                        peer,
                        kind,
                        seeds,
                        options.operations,
                        partial(progress.advance, task),
                    )
                )
    finally:
        peer.close()
    show(comparisons)
    if options.json:
        found = [comparison.to_json() for comparison in comparisons]
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.write:
        options.write.write_text(markdown(comparisons, options.peer), encoding="utf-8")
    sys.exit(1 if any(comparison.unexplained for comparison in comparisons) else 0)


def cells(comparison: Comparison) -> tuple[str, ...]:
    explained = comparison.explained_by()
    return (
        comparison.kind,
        KINDS[comparison.kind],
        str(comparison.num_seeds),
        str(comparison.num_operations),
        str(comparison.num_hits),
        str(comparison.num_refused),
        str(comparison.num_seeds - len(comparison.differences)),
        "; ".join(f"{count} by {name}" for name, count in explained.items()) or "0",
        str(len(comparison.unexplained)),
    )


HEADINGS = (
    "kind",
    "groups",
    "seeds",
    "operations",
    "hits",
    "refused",
    "seeds that agree",
    "differ by a rule",
    "unexplained",
)


def show(comparisons: list[Comparison]) -> None:
    console = Console(width=150)
    table = Table(*HEADINGS)
    for comparison in comparisons:
        table.add_row(*cells(comparison))
    console.print(table)
    for comparison in comparisons:
        for difference in comparison.unexplained[:5]:
            console.print(
                f"{comparison.kind} seed {difference.seed}, operation {difference.index} "
                f"{difference.operation}: ours {difference.ours}, theirs {difference.theirs} "
                "(tokens hit, admitted, free blocks)",
                markup=False,
            )


def markdown(comparisons: list[Comparison], peer: Path) -> str:
    lines = [
        "# Our manager against the peer's",
        "",
        "The same random operations on this package's `KVCacheManager` and on vLLM's own:",
        "look-ups, admissions (chunked prefill, external tokens, delayed caching), decoding with",
        "drafts and lookahead, frees, preemptions, resets, on pools that are often full. After",
        "every operation the hit length, whether there was room, and the number of free blocks",
        "are compared. The peer retains windows densely (`prefix_cache_retention_interval=None`),",
        "as ours does.",
        "",
        "Where a walk differs, it is done again with the peer's choice in place of one of our",
        "rules (`rules.py`): only if every answer then agrees, the difference is said to come",
        "from it.",
        "",
        f"- vLLM {peer_version(peer)}, Python {platform.python_version()}, "
        f"numpy {version('numpy')}",
        f"- Command: `python -m tests.oracle {' '.join(words_without_paths())}`",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(comparison)) + " |" for comparison in comparisons),
        "",
        "`hits`: answers with a hit above 0 tokens; `refused`: answers without room, and resets",
        "while blocks were in use.",
        "",
        "## Rules by which the sides differ",
    ]
    used = {name for found in comparisons for d in found.differences for name in d.rules}
    for rule in RULES:
        if rule.name in used:
            lines += [
                "",
                f"**{rule.name}.** Ours: {rule.ours}. The peer: {rule.theirs}. "
                f"Contract: {rule.because}.",
            ]
    return "\n".join(lines) + "\n"


def words_without_paths() -> list[str]:
    """Return the command line with paths of this machine replaced."""
    return ["DIR" if word.startswith("/") else word for word in sys.argv[1:]]


if __name__ == "__main__":
    main()
