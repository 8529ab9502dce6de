"""Steps through a real cluster, beside the same messages as plain Ray calls. Rows C1 and C2.

    python -m tests.benchmarks.bench_cluster [--smoke] [--json FILE] [--only C1|C2]

C1: one empty step from the engine to the coordinator actor, to the workers, acknowledged by all of
them, back to the engine. C2: the same pipelined, in steps a second. The peer is what one would
write without sockets: driver -> async coordinator actor -> workers -> back, the very bytes of the
same messages as arguments. Both sides alternate in one run; printed are medians and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCRATCH = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
(SCRATCH / "token").touch(mode=0o600)
(SCRATCH / "token").write_text(secrets.token_hex(32))
os.environ.pop("RAY_ADDRESS", None)
os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(SCRATCH / "token"),
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)

import ray  # noqa: E402 - Ray reads the settings above when it is imported
from rich.progress import Progress  # noqa: E402

from actors import KVCacheClient, KVCacheCluster  # noqa: E402
from kvcache.config import ClusterConfig, parse_config  # noqa: E402
from kvcache.messages import StepCommands  # noqa: E402
from kvcache.step import StepRequest  # noqa: E402
from kvcache.wire import encode  # noqa: E402
from tests.benchmarks.measure import Figure, Row  # noqa: E402

EMPTY_STEP = StepRequest("", 0, 0)
DEPTH = 16
"""Steps under way at once when pipelined."""


def make_config(num_workers: int) -> ClusterConfig:
    """Return a small model on `num_workers` tensor-parallel ranks."""
    return parse_config(
        {
            "name": f"bench-{num_workers}",
            "model": {
                "name": "bench",
                "max_model_len": 2048,
                "layers": [{"kind": "full", "count": 4, "num_kv_heads": 8, "head_size": 8}],
            },
            "cache": {"memory_per_rank": "16MiB"},
            "parallel": {"tensor_parallel_size": num_workers},
            "workers": {"num_cpus_per_rank": 0.1},
        }
    )


class RayWorker:
    """The peer's worker: takes the message, acknowledges."""

    def apply(self, payload: bytes) -> int:
        """Return how many bytes came."""
        return len(payload)


class RayCoordinator:
    """The peer's coordinator: an async actor that passes a message on to all workers."""

    def __init__(self, workers: list[Any], commands: bytes) -> None:
        self._workers = workers
        self._commands = commands

    async def step(self, request: bytes) -> int:
        """Send the commands to every worker and return when all have acknowledged."""
        done = await asyncio.gather(*(w.apply.remote(self._commands) for w in self._workers))
        return len(done) + len(request)


class RayPeer:
    """The same step by plain Ray calls."""

    def __init__(self, num_workers: int) -> None:
        make_remote: Any = ray.remote
        worker = make_remote(RayWorker)
        self._workers = [worker.options(num_cpus=0.1).remote() for _ in range(num_workers)]
        commands = encode(StepCommands("n" * 32, "f" * 32, 1, 1, "client", 1, ()))
        coordinator = make_remote(RayCoordinator).options(num_cpus=0)
        self._coordinator = coordinator.remote(self._workers, commands)
        self._request = encode(EMPTY_STEP)
        self.step()

    def step(self) -> None:
        """One step and back."""
        ray.get(self._coordinator.step.remote(self._request))

    def pipeline(self, num_steps: int) -> None:
        """Steps with `DEPTH` of them under way."""
        waiting: list[Any] = []
        for _ in range(num_steps):
            waiting.append(self._coordinator.step.remote(self._request))
            if len(waiting) == DEPTH:
                ray.get(waiting.pop(0))
        ray.get(waiting)

    def close(self) -> None:
        """End the actors."""
        for actor in [self._coordinator, *self._workers]:
            ray.kill(actor)


def our_step(client: KVCacheClient) -> None:
    """One empty step, acknowledged by every worker."""
    client.wait_applied(client.submit(EMPTY_STEP))


def our_pipeline(client: KVCacheClient, num_steps: int) -> None:
    """Steps with `DEPTH` of them under way, each taken and applied everywhere."""
    waiting: list[int] = []
    for _ in range(num_steps):
        waiting.append(client.submit(EMPTY_STEP))
        if len(waiting) == DEPTH:
            client.wait_applied(waiting.pop(0))
    client.wait_applied(waiting[-1])


def per_step_us(run: Callable[[], None], num_steps: int) -> float:
    """Return microseconds a step of a run of `num_steps`."""
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) / num_steps * 1e6


@dataclass(frozen=True)
class Samples:
    """Microseconds a step of one workload with one number of workers, both sides."""

    row: str
    num_workers: int
    ours_us: tuple[float, ...]
    ray_us: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times faster than by Ray calls, by the medians."""
        return statistics.median(self.ray_us) / statistics.median(self.ours_us)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "ratio": round(self.ratio, 2)}


def measure(
    num_workers: int, rows: tuple[str, ...], is_small: bool, say: Callable[[str], None]
) -> list[Samples]:
    """Return the samples for one number of workers; both sides alternate."""
    rounds, ours, theirs = (2, 50, 10) if is_small else (7, 400, 60)
    samples: dict[str, tuple[list[float], list[float]]] = {row: ([], []) for row in rows}
    with KVCacheCluster.launch(make_config(num_workers)) as cluster, cluster.client() as client:
        peer = RayPeer(num_workers)
        for number in range(rounds):
            say(f"{num_workers} workers, round {number + 1} of {rounds}")
            for row, (mine, other) in samples.items():
                if row == "C1":
                    mine.append(per_step_us(lambda: repeat(our_step, client, ours), ours))
                    other.append(per_step_us(lambda: repeat(RayPeer.step, peer, theirs), theirs))
                else:
                    mine.append(per_step_us(lambda: our_pipeline(client, 4 * ours), 4 * ours))
                    other.append(per_step_us(lambda: peer.pipeline(2 * theirs), 2 * theirs))
        peer.close()
    return [
        Samples(row, num_workers, tuple(mine), tuple(other))
        for row, (mine, other) in samples.items()
    ]


def repeat(action: Callable[[Any], None], argument: Any, count: int) -> None:
    """Do `action` again and again."""
    for _ in range(count):
        action(argument)


def say(line: str) -> None:
    """Show progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def measure_all(
    wanted: tuple[str, ...], is_small: bool, say: Callable[[str], None]
) -> list[Samples]:
    """Start Ray, measure what is wanted of C1 and C2, stop Ray."""
    plan = {2: wanted} if is_small else {4: wanted, 1: ("C2",), 8: ("C2",)}
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(SCRATCH / "ray"),
    )
    measured: list[Samples] = []
    try:
        for num_workers, rows in plan.items():
            chosen = tuple(row for row in rows if row in wanted)
            if chosen:
                measured += measure(num_workers, chosen, is_small, say)
    finally:
        ray.shutdown()
        shutil.rmtree(SCRATCH, ignore_errors=True)
    return measured


def measure_cluster(names: Sequence[str], is_small: bool, progress: Progress) -> list[Row]:
    """Return the rows of `names` (`c1`, `c2`) for the table of all benchmarks."""
    task = progress.add_task("cluster", total=None)
    wanted = tuple(name.upper() for name in names)
    measured = measure_all(
        wanted, is_small, lambda line: progress.update(task, description=f"cluster: {line}")
    )
    progress.remove_task(task)
    what = {"C1": "an empty step, acknowledged by all", "C2": f"pipelined, {DEPTH} under way"}
    return [
        Row(
            workload=samples.row,
            what=f"{what[samples.row]}, {samples.num_workers} workers",
            ours=Figure(tuple(us / 1e6 for us in samples.ours_us)),
            peer=Figure(tuple(us / 1e6 for us in samples.ray_us)),
            peer_name="Ray calls",
            goal=">= 10x",
        )
        for samples in measured
    ]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes: does it run at all")
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    parser.add_argument("--only", choices=("C1", "C2"))
    arguments = parser.parse_args()
    wanted = ("C1", "C2") if arguments.only is None else (arguments.only,)
    measured = measure_all(wanted, arguments.smoke, say)
    for samples in measured:
        ours, theirs = statistics.median(samples.ours_us), statistics.median(samples.ray_us)
        print(
            f"{samples.row}  {samples.num_workers} workers  ours {ours:8.1f} us"
            f" [{min(samples.ours_us):.0f}, {max(samples.ours_us):.0f}]"
            f"  ray {theirs:8.1f} us [{min(samples.ray_us):.0f}, {max(samples.ray_us):.0f}]"
            f"  ratio {samples.ratio:5.1f}  {1e6 / ours:.0f} steps/s"
        )
    if arguments.json:
        rows = [samples.to_json() for samples in measured]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
