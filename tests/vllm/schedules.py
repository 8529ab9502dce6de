"""Faults at drawn moments, against the tokens of a vLLM without a connector.

    python -m tests.vllm.schedules --seeds 0:50 [--ranks 2] [--scratch DIRECTORY]

Each seed draws a model, a fault and its moment within a load of prompts with shared prefixes: the
engine, one of several workers or the memory service is killed or stopped for a while, bytes of the
host segment change, files are damaged, cut or removed. The engine's next answers, or those of the
next engine if it died, must be the expected tokens, within a deadline. One engine of each model
serves seed after seed as long as it lives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcache.base.errors import ClusterError
from kvcache.memory_service.client import service_address
from kvcache.memory_service.process import end
from tests.vllm.conftest import (
    PYTHON,
    Answer,
    Engine,
    Segment,
    Starter,
    await_memory,
    made_model,
    processes_of_session,
    signal_service,
)

NUM_TOKENS = 12
LONGEST_STOP_S = 2.0

FAULTS = (
    "kill engine",
    "kill engine core",
    "stop engine",
    "kill memory service",
    "stop memory service",
    "flip segment",
    "damage files",
    "damage both",
)

FAULTS_OF_RANKS = (*FAULTS, "kill worker", "stop worker")
"""Drawn from when there are several."""

MODELS = ("llama", "llama", "gemma3")
"""Drawn from; the layers of the last one have sliding windows and full attention in turn."""

CORE, WORKERS = 1, 2
"""Generations of an engine's processes."""

DEADLY = ("kill engine", "kill engine core", "kill worker")

OF_SERVICE = ("kill memory service", "stop memory service", "flip segment", "damage both")
"""Need a memory service."""


@dataclass(frozen=True)
class Outcome:
    """The results of one seed. `cached`: tokens that its last answer did not compute."""

    seed: int
    model: str
    fault: str
    is_restarted: bool
    cached: int
    wall_s: float


def prompts_of(seed: int) -> list[list[int]]:
    """Return 24 prompts that share prefixes with each other and with those of other seeds."""
    shared = random.Random(1)
    prefixes = [[shared.randrange(4, 500) for _ in range(160)] for _ in range(12)]
    draw = random.Random(f"prompts {seed % 4}")  # few, so that the expected tokens are known
    return [
        draw.choice(prefixes)[: draw.randrange(40, 160)]
        + [draw.randrange(4, 500) for _ in range(draw.randrange(1, 60))]
        for _ in range(24)
    ]


@dataclass
class World:
    """The engine under test and what surrounds it. `expected[i]`: tokens for `prompts_of(i)`.

    `start` starts engines on the tiny model of the kind `model`. `busy_s`: how long the last answer
    took.
    """

    start: Starter
    directory: Path
    model: str = MODELS[0]
    num_ranks: int = 1
    name: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    expected: dict[int, list[list[int]]] = field(default_factory=dict)
    engine: Engine | None = None
    busy_s: float = 1.0

    def expect(self, kept: Path | None = None) -> None:
        """Ask a vLLM without a connector, unless an earlier one has answered into the file
        `kept`."""
        if kept is not None and kept.exists():
            self.expected = dict(enumerate(json.loads(kept.read_text())))
            return
        engine = self.start(tensor_parallel_size=self.num_ranks)
        for i in range(4):
            self.expected[i] = engine.generate(prompts_of(i), NUM_TOKENS).tokens
        engine.kill()
        if kept is not None:
            kept.write_text(json.dumps(list(self.expected.values())))

    def living(self) -> Engine:
        """Return the engine; start one if there is none."""
        if self.engine is None:
            disk = {"directory": str(self.directory), "capacity_per_rank": "6MiB"}
            extra: dict[str, Any] = {
                "name": self.name,
                "is_asynchronous": True,
                "offload": {"host_memory_per_rank": "2MiB", "disk": disk},
            }
            self.engine = self.start(
                extra,
                tensor_parallel_size=self.num_ranks,
                num_gpu_blocks_override=40,
                max_num_batched_tokens=128,
            )
        return self.engine

    def answer(self, seed: int) -> Answer:
        """Have the engine answer; note how long it takes."""
        engine, begun_s = self.living(), time.monotonic()
        answer = engine.generate(prompts_of(seed), NUM_TOKENS)
        self.busy_s = time.monotonic() - begun_s
        return answer

    def run(self, seed: int) -> Outcome:
        """Run one seed; raises AssertionError with the difference."""
        draw = random.Random(seed)
        faults = FAULTS if self.num_ranks == 1 else FAULTS_OF_RANKS
        fault, moment_s = draw.choice(faults), draw.random() * self.busy_s
        begun_s = time.monotonic()
        engine = self.living()
        engine.reset()
        if fault in OF_SERVICE:  # one that was killed has a successor in a moment
            await_memory(self.name, self.num_ranks)
        problems: list[Exception] = []
        harm = threading.Timer(moment_s, self.harm, (fault, draw, problems))
        harm.start()
        is_restarted = False
        try:
            answer = engine.generate(prompts_of(seed), NUM_TOKENS)
        except (AssertionError, OSError):
            assert fault in DEADLY, f"seed {seed}: {fault} ends the engine"
            is_restarted = True
        harm.join()
        assert not problems, f"seed {seed}: {fault} was not done: {problems}"
        if fault in DEADLY:
            engine.kill()
            self.engine = None
            is_restarted = True
        else:
            assert answer.tokens == self.expected[seed % 4], f"seed {seed}: {fault}: wrong tokens"
            engine.reset()
        answer = self.answer(seed)
        assert answer.tokens == self.expected[seed % 4], f"seed {seed}: wrong tokens after {fault}"
        wall_s = time.monotonic() - begun_s
        return Outcome(seed, self.model, fault, is_restarted, sum(answer.cached), wall_s)

    def harm(self, fault: str, draw: random.Random, problems: list[Exception]) -> None:
        """Execute the drawn action; append why it could not be done."""
        acts: dict[str, Callable[[], None]] = {
            "kill engine": lambda: self._signal_engine(signal.SIGKILL),
            "kill engine core": lambda: self._kill_one(CORE, draw),
            "kill worker": lambda: self._kill_one(WORKERS, draw),
            "stop worker": lambda: self._stop_worker(draw),
            "stop engine": lambda: self._stop_engine(draw.random() * LONGEST_STOP_S),
            "kill memory service": lambda: signal_service(self.name, signal.SIGKILL),
            "stop memory service": lambda: self._stop_service(draw.random() * LONGEST_STOP_S),
            "flip segment": lambda: self._flip(draw),
            "damage files": lambda: self._damage(draw),
            "damage both": lambda: (self._flip(draw), self._damage(draw))[0],
        }
        try:
            acts[fault]()
        except Exception as error:
            problems.append(error)

    def close(self) -> None:
        """End everything."""
        if self.engine is not None:
            self.engine.kill()
        self.start.end_all()
        try:
            end(service_address(self.name).address)
        except ClusterError:  # it was killed, and no engine came behind
            return

    def _signal_engine(self, number: int) -> None:
        for process in processes_of_session(self.engine.process.pid):
            _send(process, number)

    def _kill_one(self, depth: int, draw: random.Random) -> None:
        """Kill one process, and the rest, which may wait for it, a moment later."""
        _send(draw.choice(self._processes(depth)), signal.SIGKILL)
        time.sleep(LONGEST_STOP_S)
        self._signal_engine(signal.SIGKILL)

    def _stop_worker(self, draw: random.Random) -> None:
        process = draw.choice(self._processes(WORKERS))
        _send(process, signal.SIGSTOP)
        time.sleep(draw.random() * LONGEST_STOP_S)
        _send(process, signal.SIGCONT)

    def _processes(self, depth: int) -> list[int]:
        """Return the engine's processes of a generation: 1 is its core, 2 are the workers."""
        parents = {self.engine.process.pid: 0}
        for process in sorted(processes_of_session(self.engine.process.pid)):
            with contextlib.suppress(OSError):  # it has just ended
                tree = Path(f"/proc/{process}")
                parent = int(tree.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                is_python = b"resource_tracker" not in tree.joinpath("cmdline").read_bytes()
                if is_python and parent in parents:
                    parents[process] = parents[parent] + 1
        return sorted(process for process, found in parents.items() if found == depth)

    def _stop_engine(self, seconds: float) -> None:
        self._signal_engine(signal.SIGSTOP)
        time.sleep(seconds)
        self._signal_engine(signal.SIGCONT)

    def _stop_service(self, seconds: float) -> None:
        signal_service(self.name, signal.SIGSTOP)
        time.sleep(seconds)
        signal_service(self.name, signal.SIGCONT)

    def _flip(self, draw: random.Random) -> None:
        """Change bytes of some slots, whatever their state."""
        segment = Segment(self.name, draw.randrange(self.num_ranks))
        for slot in segment.sealed_slots():
            if draw.random() < 0.4:
                segment.flip_byte(slot, byte=draw.randrange(segment.shape.widths[0]))

    def _damage(self, draw: random.Random) -> None:
        """Change, cut and remove some files."""
        for path in self.directory.rglob("*.kvb"):
            if draw.random() < 0.6:
                damage(path, draw)


def damage(path: Path, draw: random.Random) -> bool:
    """Change, cut or remove a file; say whether it was there."""
    kind = draw.choice(("flip", "cut", "remove"))
    try:
        content = bytearray(path.read_bytes())
        if kind == "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        if kind == "cut":
            del content[draw.randrange(len(content)) :]
        if kind == "remove":
            path.unlink()
        else:
            path.write_bytes(content)
    except FileNotFoundError:  # the tier has discarded it
        return False
    return True


def _send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def model_of(seed: int) -> str:
    """Return the model that a seed draws."""
    return random.Random(f"model {seed}").choice(MODELS)


@contextlib.contextmanager
def opened(model: str, scratch: Path, kept: Path, num_ranks: int) -> Iterator[World]:
    """Open a world below `scratch`; the model and the expected tokens are kept in `kept`."""
    files, logs = (scratch / model / name for name in ("files", "logs"))
    for directory in (files, logs, kept):
        directory.mkdir(parents=True, exist_ok=True)
    weights = kept / model
    if not weights.exists():
        made_model(str(PYTHON), weights, model)
    world = World(Starter(str(PYTHON), str(weights), logs), files, model, num_ranks)
    try:
        world.expect(kept / f"expected-{model}-{num_ranks}.json")
        yield world
    finally:
        world.close()


def main() -> int:
    """Run seeds; return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.vllm.schedules", description=__doc__)
    parser.add_argument("--seeds", default="0:10", help="A:B runs the seeds A to B - 1")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--scratch", help="keeps the model and the expected tokens")
    chosen = parser.parse_args()
    first, _, last = chosen.seeds.partition(":")
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        kept = Path(chosen.scratch or f"{scratch}/kept")
        worlds = {
            model: stack.enter_context(opened(model, Path(scratch), kept, chosen.ranks))
            for model in set(MODELS)
        }
        for seed in range(int(first), int(last)):
            outcome = worlds[model_of(seed)].run(seed)
            counts[outcome.model, outcome.fault] += 1
            print(outcome, flush=True)
    print(f"{sum(counts.values())} seeds, no wrong token: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
