"""Copies of blocks against a plain memcpy of as many bytes, and steps during transfers. Rows C3.

    python -m bench.bench_copies [--smoke] [--json FILE]

A page is all of a block's bytes here. Contiguous: blocks and slots in ascending order. Scattered:
blocks in random order, host slots in ascending order; on both sides: slots in random order, too.
The peer is `numpy.copyto` of one array of the same bytes, alternating with the others; results are
shares of its speed. Other rows time a step of one worker, over a socket, with and without
transfers, and next to a process that copies all the time. They mean something only if there is a
free core for the copying process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from bench.cores import OURS, PEER
from bench.measure import Figure, Row, alternate
from bench.step_during_copies import OtherCopies, StepDuringCopies
from bench.stopwatch import now_s
from kvcache.base.arrays import Int32Array, int32_array
from kvcache.worker import CpuCopyEngine, HostPool
from kvcache.worker.copies.checksums import checksums_of_rows
from kvcache.worker.copies.runner import InlineCopies
from kvcache.worker.copies.task import BlockMove, Comparison, CopyTask
from kvcache.worker.host_memory.segment import HostSegment, SegmentShape
from kvcache.worker.host_memory.shared_memory import make_memory

PAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
ORDERS = ("contiguous", "scattered", "scattered on both sides")
GOAL = ">= 80 % of memcpy"
STEP_GOAL = "<= 1.2 times"
RARE = 10
"""Steps between two starts of transfers, where these are not all the time: 16 MiB are moved, a
fifth of the time that so many steps take here."""

CADENCES_S = (0.005, 0.010)
"""Time between two steps of an engine, with a forward of the model in between."""


@dataclass(frozen=True)
class CopySizes:
    """How much is copied at once, of how much memory, and how often."""

    copied_bytes: int
    pool_bytes: int
    repetitions: int
    num_steps: int


FULL = CopySizes(64 << 20, 128 << 20, 15, 200)
SMOKE = CopySizes(4 << 20, 8 << 20, 2, 20)


class Memories:
    """A device pool and host slots of one page size, both touched."""

    def __init__(self, page_bytes: int, sizes: CopySizes) -> None:
        num_rows = sizes.pool_bytes // page_bytes
        shape = SegmentShape("bench", 0, num_rows, (page_bytes,), 16, 16)
        descriptor = make_memory("bench-copies", shape.size_bytes)
        self.host = HostPool(HostSegment(descriptor, shape), is_pinned=False)
        self.device = torch.full((num_rows, page_bytes), 1, dtype=torch.uint8)
        self.host.tensors[0].fill_(2)
        self.count = sizes.copied_bytes // page_bytes
        self.page_bytes = page_bytes
        self._rng = np.random.default_rng(page_bytes)

    def ids(self, order: str) -> tuple[Int32Array, Int32Array]:
        """Return blocks, and slots for them."""
        num_rows, count = len(self.device), self.count
        straight = int32_array(np.arange(count))
        mixed = [int32_array(self._rng.permutation(num_rows)[:count]) for _ in range(2)]
        return {
            "contiguous": (straight, straight),
            "scattered": (mixed[0], straight),
            "scattered on both sides": (mixed[0], mixed[1]),
        }[order]

    def within(self, order: str) -> tuple[Int32Array, Int32Array]:
        """Return blocks, and others to which they are copied."""
        half = len(self.device) // 2
        count = min(self.count, half)
        sources, destinations = np.arange(half), np.arange(half, 2 * half)
        if order != "contiguous":
            sources = self._rng.permutation(sources)
        if order == "scattered on both sides":
            destinations = self._rng.permutation(destinations)
        return int32_array(sources[:count]), int32_array(destinations[:count])


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs it and returns its processor time in seconds."""

    def measured() -> float:
        start_s = now_s()
        action()
        return now_s() - start_s

    return measured


def sides_of(memories: Memories, order: str) -> dict[str, Callable[[], float]]:
    """Return the sides that take turns; each copies the same number of bytes."""
    engine, device, host = CpuCopyEngine(), memories.device, memories.host
    blocks, slots = memories.ids(order)
    sources, destinations = memories.within(order)
    flat_device, flat_host = device.numpy().reshape(-1), host.segment.tensors[0].reshape(-1)
    size = len(blocks) * memories.page_bytes
    expected = np.empty(0, np.int64)

    def run(to_host: bool) -> None:
        comparison = None
        if not to_host:
            comparison = Comparison(expected, np.ones(len(slots), np.bool_))
        move = BlockMove((device,), host, blocks, slots, to_host)
        runner = InlineCopies()
        runner.submit(CopyTask(move, engine, takes_checksums=to_host, comparison=comparison))
        (finished,) = runner.take_finished()
        if finished.result.problem or len(finished.result.wrong):
            raise RuntimeError(f"a copy failed: {finished.result}")

    def store() -> None:
        run(to_host=True)

    def load() -> None:
        nonlocal expected
        run(to_host=False)

    run(to_host=True)
    expected = checksums_of_rows([host.segment.tensors[0]], slots)
    return {
        "memcpy": timed(lambda: np.copyto(flat_host[:size], flat_device[:size])),
        "copy within the device": timed(lambda: engine.copy_within(device, sources, destinations)),
        "copy to the host": timed(
            lambda: engine.copy_blocks(device, blocks, host.tensors[0], slots)
        ),
        "store: copy and checksum": timed(store),
        "load: verify and copy": timed(load),
    }


def copy_rows(sizes: CopySizes, on_row: Callable[[str], None]) -> list[Row]:
    """Measure every page size in every order."""
    rows: list[Row] = []
    for page_bytes in PAGES:
        memories = Memories(page_bytes, sizes)
        for order in ORDERS:
            name = f"{page_bytes >> 10} KiB, {order}"
            on_row(name)
            figures = alternate(sides_of(memories, order), sizes.repetitions)
            plain = figures.pop("memcpy")
            rows += [as_row(f"{what}, {name}", figure, plain) for what, figure in figures.items()]
        memories.host.close()
    return rows


def as_row(what: str, ours: Figure, plain: Figure) -> Row:
    """Return a line of the table. The share is of medians."""
    share = plain.median / ours.median
    return Row(
        workload="C3",
        what=what,
        figures={OURS: ours, PEER: plain},
        peer_name="memcpy",
        goal=GOAL,
        note=f"{share:.0%} of memcpy",
    )


def step_rows(sizes: CopySizes, on_row: Callable[[str], None]) -> list[Row]:
    """Measure steps during transfers against steps without, in turns: during transfers that never
    pause (the median step), during some before every `RARE` steps (the mean step), and next to an
    unrelated process."""
    rows: list[Row] = []
    for block_bytes in (16 << 10, 256 << 10, 2 << 20):
        on_row(f"steps during transfers of {block_bytes >> 10} KiB")
        quiet: list[list[float]] = []
        during: dict[str, list[list[float]]] = {"never": [], "rare": [], "other": []}
        with StepDuringCopies(block_bytes, sizes.copied_bytes) as bench:
            for _ in range(sizes.repetitions):
                quiet.append(bench.steps(sizes.num_steps))
                during["never"].append(bench.steps(sizes.num_steps, copies_every=1))
                during["rare"].append(bench.steps(sizes.num_steps, copies_every=RARE))
                with OtherCopies():
                    during["other"].append(bench.steps(sizes.num_steps))
        size = f"blocks of {block_bytes >> 10} KiB"
        median, mean = statistics.median, statistics.fmean
        rows += [
            _step_row(f"a step while {size} are stored and loaded", quiet, during["never"], median),
            _step_row(
                f"mean step, {size} stored and loaded every {RARE} steps",
                quiet,
                during["rare"],
                mean,
            ),
            _step_row(
                f"a step next to another process's memcpy ({size})", quiet, during["other"], median
            ),
        ]
    return rows


def cadence_rows(sizes: CopySizes, on_row: Callable[[str], None]) -> list[Row]:
    """Measure steps at an engine's pace, with transfers that never pause and without, in turns."""
    rows: list[Row] = []
    for block_bytes in (16 << 10, 256 << 10, 2 << 20):
        size = f"blocks of {block_bytes >> 10} KiB"
        with StepDuringCopies(block_bytes, sizes.copied_bytes) as bench:
            for pause_s in CADENCES_S:
                what = f"a step every {pause_s * 1e3:g} ms while {size} are stored and loaded"
                on_row(what)
                quiet: list[list[float]] = []
                busy: list[list[float]] = []
                for _ in range(sizes.repetitions):
                    count = sizes.num_steps // 5
                    quiet.append(bench.steps(count, pause_s=pause_s))
                    busy.append(bench.steps(count, pause_s=pause_s, copies_every=1, is_busy=True))
                rows.append(_step_row(what, quiet, busy, statistics.median))
    return rows


def _step_row(
    what: str,
    quiet: list[list[float]],
    during: list[list[float]],
    average: Callable[[list[float]], float],
) -> Row:
    """Return a line of the table: how many times longer steps took."""
    without, with_them = [average(took) for took in quiet], [average(took) for took in during]
    ratios = tuple(b / q for b, q in zip(with_them, without, strict=True))
    note = (
        f"{statistics.median(without) * 1e3:.3f} and {statistics.median(with_them) * 1e3:.3f} ms, "
        f"in the quietest repetition {min(without) * 1e3:.3f} and {min(with_them) * 1e3:.3f}"
    )
    return Row("C3", what, {OURS: Figure(ratios, "times")}, "", STEP_GOAL, note=note)


def measure_copies(is_small: bool, on_row: Callable[[str], None]) -> list[Row]:
    """Return all rows of C3."""
    sizes = SMOKE if is_small else FULL
    return copy_rows(sizes, on_row) + step_rows(sizes, on_row) + cadence_rows(sizes, on_row)


def measure_copies_shown(is_small: bool, progress: Progress) -> list[Row]:
    """Return the rows for the table of all benchmarks."""
    task = progress.add_task("copies", total=None)
    rows = measure_copies(
        is_small, lambda name: progress.update(task, description=f"copies: {name}")
    )
    progress.remove_task(task)
    return rows


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes: does it run at all")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure_copies(arguments.smoke, lambda name: print(name, file=sys.stderr, flush=True))
    for row in rows:
        print(f"{row.workload}  {row.what:62} {row.figures[OURS]!s:16} {row.note}")
    if arguments.json:
        arguments.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
