"""The manager's workloads as rows: ours and the peer's side alternating, each in its process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from tests.benchmarks.measure import Row, alternate

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Work:
    """One row: the function of `workloads.Workloads`, its arguments, and the goal."""

    workload: str
    what: str
    function: str
    arguments: tuple[int, ...]
    goal: str


WORKS = (
    Work("w1", "hash a fresh 32k-token prompt, sha256", "hash_fresh", (), ">= 2.5x"),
    Work("w2", "look up a cached 32k prompt", "look_up_cached", (), ">= 4x"),
    Work("w3", "allocate 32k under eviction, hashed before", "allocate_hashed", (), ">= 4x"),
    Work("w3", "allocate 32k under eviction, hashing", "allocate_hashing", (), ">= 4x"),
    Work("w5", "free 2048 blocks", "free_prompt", (), ">= 2x"),
    Work("w4", "decode step, 256 requests", "decode", (256,), ">= 4x"),
    Work("w4", "decode step, 1024 requests", "decode", (1024,), ">= 4x"),
)
MANAGER_WORKLOADS = tuple(dict.fromkeys(work.workload for work in WORKS))


class Side:
    """A process that runs workloads of one side."""

    def __init__(self, name: str, python: Path, num_blocks: int, prompt_tokens: int) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [str(python), str(HERE / "side.py"), name, str(num_blocks), str(prompt_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if name == "ours" else subprocess.DEVNULL,
            text=True,
        )
        self._expect("ready")

    def run(self, work: Work) -> Callable[[], float]:
        def once() -> float:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([work.function, work.arguments]) + "\n")
            self._process.stdin.flush()
            return float(self._read())

        return once

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

    def _expect(self, word: str) -> None:
        got = self._read()
        if got != word:
            raise RuntimeError(f"the side '{self._name}' said {got!r} instead of {word!r}")


def measure_manager(
    names: list[str], peer: Path | None, smoke: bool, progress: Progress
) -> list[Row]:
    """Run the named workloads; without a peer its figures are missing."""
    works = [work for work in WORKS if work.workload in names]
    if not works:
        return []
    num_blocks, prompt_tokens = (20_000, 4096) if smoke else (60_000, 32_768)
    repetitions = 2 if smoke else 15
    sides = [Side("ours", Path(sys.executable), num_blocks, prompt_tokens)]
    if peer is not None:
        sides.append(Side("peer", peer / "bin" / "python", num_blocks, prompt_tokens))
    rows = []
    try:
        for work in works:
            task = progress.add_task(work.what, total=repetitions)
            figures = alternate(
                [side.run(work) for side in sides], repetitions, lambda t=task: progress.advance(t)
            )
            other = figures[1] if len(figures) > 1 else None
            rows.append(Row(work.workload, work.what, figures[0], other, "vLLM", work.goal))
    finally:
        for side in sides:
            side.close()
    return rows
