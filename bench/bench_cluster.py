"""Steps through a real cluster, compared with Ray calls that do the same. Rows C1 and C2.

    python -m bench.bench_cluster [--smoke] [--json FILE] [--only C1|C2]

C1: one empty step from the engine to the coordinator actor, to the workers, acknowledged by all of
them, back to the engine; and the same step with 256 requests that decode a token each, both with
the processor time of the engine, the coordinator and one worker. C2: pipelined empty steps, in
steps a second. The peer is plain Ray calls without sockets: driver -> async coordinator actor ->
workers -> back, with the bytes of the same messages as arguments. All sides alternate in one run.
The benchmark prints medians and their ratios.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
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

import numpy as np  # noqa: E402 - Ray reads the settings above when it is imported
import ray  # noqa: E402
from rich.progress import Progress  # noqa: E402

from actors import KVCacheClient, KVCacheCluster  # noqa: E402
from actors.reports import ClusterStatus  # noqa: E402
from bench.cores import OURS, PEER  # noqa: E402
from bench.measure import Figure, Row  # noqa: E402
from kvcache.config import ClusterConfig, parse_config  # noqa: E402
from kvcache.protocol.messages import StepCommands  # noqa: E402
from kvcache.protocol.step import NewRequest, RunningRequests, StepRequest  # noqa: E402
from kvcache.protocol.wire import encode  # noqa: E402

EMPTY_STEP = StepRequest("", 0, 0)
DEPTH = 16
"""Steps under way at once when pipelined."""

NUM_DECODES = 256


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
            "cache": {"memory_per_rank": "128MiB"},
            "scheduler": {"max_num_seqs": NUM_DECODES},
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


class Decodes:
    """Steps of `NUM_DECODES` requests that decode a token each. A context manager."""

    def __init__(self, client: KVCacheClient, seed: int) -> None:
        self._client = client
        self._last_step = -1
        random = np.random.default_rng(seed)
        self._new = tuple(
            # Staggered lengths: one request in sixteen fills a block in each step.
            NewRequest(f"decode-{i}", random.integers(0, 1000, 16 + i % 16, np.int32), 32)
            for i in range(NUM_DECODES)
        )
        ones, zeros = np.ones(NUM_DECODES, np.int32), np.zeros(NUM_DECODES, np.int32)
        offsets = np.arange(NUM_DECODES + 1, dtype=np.int32)
        self._running = RunningRequests(zeros, ones, zeros, zeros, offsets, ones)

    def __enter__(self) -> Decodes:
        number = self._run(StepRequest(new=self._new))
        slots = self._client.wait_result(number).admitted_slots
        if (slots < 0).any():
            raise RuntimeError(f"no room for {NUM_DECODES} requests")
        self._running = replace(self._running, slots=slots)
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(StepRequest(finished=tuple(request.request_id for request in self._new)))

    def step(self) -> None:
        """One token for every request, acknowledged by every worker."""
        self._run(StepRequest(running=self._running))

    def _run(self, request: StepRequest) -> int:
        number = self._client.submit(replace(request, completed_step=self._last_step))
        self._client.wait_applied(number)
        self._last_step = number
        return number


def per_step_us(run: Callable[[], None], num_steps: int) -> float:
    """Return microseconds a step of a run of `num_steps`."""
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) / num_steps * 1e6


class Shares:
    """Processor time of each process of a cluster that takes part in steps, in microseconds."""

    def __init__(self, status: ClusterStatus) -> None:
        """Count nothing yet."""
        self._pids = {
            "engine": os.getpid(),
            "coordinator": status.coordinator_process_id,
            "worker": status.ranks[0].process_id,
        }
        self._us = dict.fromkeys(self._pids, 0.0)
        self._num_steps = 0

    def around(self, run: Callable[[], float], num_steps: int) -> float:
        """Return what `run` returns; count its processor time over so many steps."""
        before = {name: processor_us(pid) for name, pid in self._pids.items()}
        result = run()
        for name, pid in self._pids.items():
            self._us[name] += processor_us(pid) - before[name]
        self._num_steps += num_steps
        return result

    def per_step_us(self) -> dict[str, int]:
        """Return each process's processor time per step."""
        return {name: round(us / self._num_steps) for name, us in self._us.items()}


def processor_us(pid: int) -> float:
    """Return the processor time of all threads of a process so far."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e3


@dataclass(frozen=True)
class Samples:
    """Microseconds a step of one workload with one number of workers, by side; of C1 also the
    processor time by process."""

    row: str
    num_workers: int
    us: Mapping[str, tuple[float, ...]]
    processor_us: Mapping[str, int] = field(default_factory=dict)

    def median(self, side: str) -> float:
        """Return the median of that side."""
        return statistics.median(self.us[side])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        ratio = round(self.median(PEER) / self.median(OURS), 2) if PEER in self.us else None
        return {**asdict(self), "ratio": ratio}


@dataclass(frozen=True)
class Counts:
    """How many rounds of how many steps, ours and by Ray calls."""

    rounds: int
    ours: int
    theirs: int
    decodes: int


def measure(
    num_workers: int,
    rows: tuple[str, ...],
    counts: Counts,
    say: Callable[[str], None],
) -> list[Samples]:
    """Return the samples for one number of workers; all sides alternate."""
    if "C1" in rows:
        rows = (*rows, "C1 decodes")
    taken: dict[str, dict[str, list[float]]] = {row: {} for row in rows}
    with ExitStack() as stack:
        cluster = stack.enter_context(KVCacheCluster.launch(make_config(num_workers)))
        client = stack.enter_context(cluster.client())
        peer = RayPeer(num_workers)
        shares = {row: Shares(cluster.status()) for row in rows if row != "C2"}
        for number in range(counts.rounds):
            say(f"{num_workers} workers, round {number + 1} of {counts.rounds}")
            for row, by_side in taken.items():
                by_side.setdefault(OURS, []).append(
                    our_sample(row, client, counts, number, shares.get(row))
                )
                if row != "C1 decodes":
                    by_side.setdefault(PEER, []).append(their_sample(row, peer, counts))
        peer.close()
    return [
        Samples(
            row,
            num_workers,
            {side: tuple(us) for side, us in by_side.items()},
            shares[row].per_step_us() if row in shares else {},
        )
        for row, by_side in taken.items()
    ]


def our_sample(
    row: str, client: KVCacheClient, counts: Counts, number: int, shares: Shares | None
) -> float:
    """Return microseconds a step of round `number` on our side, whose prompts are its own."""
    if shares is None:
        return per_step_us(lambda: our_pipeline(client, 4 * counts.ours), 4 * counts.ours)
    if row == "C1":
        return shares.around(
            lambda: per_step_us(lambda: repeat(our_step, client, counts.ours), counts.ours),
            counts.ours,
        )
    with Decodes(client, number) as decodes:
        return shares.around(
            lambda: per_step_us(
                lambda: repeat(Decodes.step, decodes, counts.decodes), counts.decodes
            ),
            counts.decodes,
        )


def their_sample(row: str, peer: RayPeer, counts: Counts) -> float:
    """Return microseconds a step of one round by Ray calls."""
    if row == "C1":
        return per_step_us(lambda: repeat(RayPeer.step, peer, counts.theirs), counts.theirs)
    return per_step_us(lambda: peer.pipeline(2 * counts.theirs), 2 * counts.theirs)


def repeat(action: Callable[[Any], None], argument: Any, count: int) -> None:
    """Call `action` `count` times."""
    for _ in range(count):
        action(argument)


def say(line: str) -> None:
    """Show progress on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def ray_for_benchmarks() -> Iterator[None]:
    """Run Ray for as long as the context lasts."""
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(SCRATCH / "ray"),
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(SCRATCH, ignore_errors=True)


def measure_all(
    wanted: tuple[str, ...],
    is_small: bool,
    say: Callable[[str], None],
) -> list[Samples]:
    """Measure the requested rows of C1 and C2. Ray must run."""
    plan = {2: wanted} if is_small else {4: wanted, 1: ("C2",), 8: ("C2",)}
    counts = Counts(2, 50, 10, 16) if is_small else Counts(7, 400, 60, 96)
    measured: list[Samples] = []
    for num_workers, rows in plan.items():
        chosen = tuple(row for row in rows if row in wanted)
        if chosen:
            measured += measure(num_workers, chosen, counts, say)
    return measured


def measure_cluster(names: Sequence[str], is_small: bool, progress: Progress) -> list[Row]:
    """Return the rows of `names` (`c1`, `c2`) for the table of all benchmarks."""
    task = progress.add_task("cluster", total=None)
    wanted = tuple(name.upper() for name in names if name in ("c1", "c2"))

    def show(line: str) -> None:
        progress.update(task, description=f"cluster: {line}")

    others: list[Row] = []
    with ray_for_benchmarks():
        measured = measure_all(wanted, is_small, show)
        if "c4" in names:
            from bench.bench_restart import measure_restart

            others += measure_restart(is_small, show)
        if "c5" in names:
            from bench.bench_events import measure_events

            others += measure_events(is_small, show)
    progress.remove_task(task)
    empty = {samples.num_workers: samples for samples in measured if samples.row == "C1"}
    rows = [as_row(samples, empty.get(samples.num_workers, samples)) for samples in measured]
    return rows + others


def as_row(samples: Samples, empty: Samples) -> Row:
    """Return a line of the table; `empty` are the empty steps of the same run."""
    if samples.row == "C1 decodes":
        return decodes_row(samples, empty)
    what = {"C1": "an empty step, acknowledged by all", "C2": f"pipelined, {DEPTH} under way"}
    return Row(
        workload=samples.row,
        what=f"{what[samples.row]}, {samples.num_workers} workers",
        figures={
            side: Figure(tuple(sample / 1e6 for sample in us)) for side, us in samples.us.items()
        },
        peer_name="Ray calls",
        goal=">= 10x",
    )


def decodes_row(decodes: Samples, empty: Samples) -> Row:
    """Return the line that compares steps with decodes with empty ones, round by round."""
    pairs = zip(decodes.us[OURS], empty.us[OURS], strict=True)
    figures = {OURS: Figure(tuple(a / b for a, b in pairs), "times")}
    what = f"a step with {NUM_DECODES} decodes against an empty one"
    times = [
        f"{name} {us} us ({empty.processor_us[name]})" for name, us in decodes.processor_us.items()
    ]
    return Row(
        workload="C1",
        what=f"{what}, {decodes.num_workers} workers",
        figures=figures,
        peer_name="",
        goal="< 1.3 times",
        note=f"{decodes.median(OURS) / 1e3:.2f} ms; of processors' time {', '.join(times)}",
    )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes: does it run at all")
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    parser.add_argument("--only", choices=("C1", "C2"))
    arguments = parser.parse_args()
    wanted = ("C1", "C2") if arguments.only is None else (arguments.only,)
    with ray_for_benchmarks():
        measured = measure_all(wanted, arguments.smoke, say)
    for samples in measured:
        said = [
            f"{side} {samples.median(side):8.1f} us [{min(us):.0f}, {max(us):.0f}]"
            for side, us in samples.us.items()
        ]
        print(f"{samples.row}  {samples.num_workers} workers  {'  '.join(said)}")
    if arguments.json:
        rows = [samples.to_json() for samples in measured]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
