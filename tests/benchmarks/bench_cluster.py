"""Steps through a real cluster, beside the same messages as plain Ray calls. Rows C1 and C2.

    python tests/benchmarks/bench_cluster.py [--smoke] [--json FILE] [--only C1|C2]

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
from collections.abc import Callable
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

from actors import KVCacheClient, KVCacheCluster  # noqa: E402
from kvcache.config import ClusterConfig, parse_config  # noqa: E402
from kvcache.messages import StepCommands  # noqa: E402
from kvcache.step import StepRequest  # noqa: E402
from kvcache.wire import encode  # noqa: E402

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


def measure(num_workers: int, rows: tuple[str, ...], is_small: bool) -> list[dict[str, Any]]:
    """Return the rows for one number of workers."""
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
    return [make_row(row, num_workers, *pair) for row, pair in samples.items()]


def repeat(action: Callable[[Any], None], argument: Any, count: int) -> None:
    """Do `action` again and again."""
    for _ in range(count):
        action(argument)


def make_row(row: str, num_workers: int, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return medians, spread and ratio as plain values."""
    ours_us, theirs_us = statistics.median(ours), statistics.median(theirs)
    return {
        "row": row,
        "workers": num_workers,
        "ours_us": round(ours_us, 1),
        "ours_spread_us": [round(min(ours), 1), round(max(ours), 1)],
        "ray_us": round(theirs_us, 1),
        "ray_spread_us": [round(min(theirs), 1), round(max(theirs), 1)],
        "ratio": round(theirs_us / ours_us, 1),
        "steps_per_s": round(1e6 / ours_us),
    }


def say(line: str) -> None:
    """Show progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes: does it run at all")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", choices=("C1", "C2"))
    arguments = parser.parse_args()
    plan = {4: ("C1", "C2"), 1: ("C2",), 8: ("C2",)}
    if arguments.smoke:
        plan = {2: ("C1", "C2")}
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(SCRATCH / "ray"),
    )
    rows: list[dict[str, Any]] = []
    try:
        for num_workers, wanted in plan.items():
            chosen = tuple(row for row in wanted if arguments.only in (None, row))
            if chosen:
                rows += measure(num_workers, chosen, arguments.smoke)
    finally:
        ray.shutdown()
        shutil.rmtree(SCRATCH, ignore_errors=True)
    for row in rows:
        print(
            f"{row['row']}  {row['workers']} workers  ours {row['ours_us']:8.1f} us"
            f"  ray {row['ray_us']:8.1f} us  ratio {row['ratio']:5.1f}"
            f"  {row['steps_per_s']} steps/s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
