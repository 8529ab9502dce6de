"""One schedule on a cluster on Ray: faults by seed, the replay finishes, nothing is left.

The same game as on processes, with faults at its moments: one or several of the processes that Ray
has started, coordinator and workers, die or stop; Ray and the worker supervisor recover. In some
schedules another driver attaches to the cluster, plays too, and may be killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.processes import started_ticks
from kvcache.config import ClusterConfig
from tests.chaos.game import Dealt, play_game
from tests.chaos.outcome import Outcome
from tests.chaos.processes import QUIET_S, shared_memory, time_limit
from tests.chaos.schedule import MODELS, ray_config
from tests.waiting import wait_until

ROOT = Path(__file__).absolute().parents[2]
HANG_S = 300.0
SOON_S = 120.0
POLL_S = 0.1


@dataclass(frozen=True)
class RayStrike:
    """`deeds` happen at a moment, one right after the other: a process, and whether it dies or
    stops for `pause_s`."""

    moment: int
    deeds: tuple[tuple[str, str], ...]
    pause_s: float


@dataclass(frozen=True)
class RaySchedule:
    """One seed's. `other_is_killed_at`: the moment for the second driver, 0 for none."""

    seed: int
    model: str
    config: ClusterConfig
    game: Dealt
    other_game: Dealt | None
    other_is_killed_at: int
    strikes: tuple[RayStrike, ...]

    def __str__(self) -> str:
        deeds = [f"{', '.join(map(' '.join, s.deeds))} at {s.moment}" for s in self.strikes]
        other = ""
        if self.other_game is not None:
            other = f", another driver{' that is killed' if self.other_is_killed_at else ''}"
        return f"{self.model}, {self.config.cache.core}{other}: {'; '.join(deeds)}"


ROWS = (
    (("kill", "coordinator"),),
    (("kill", "worker-0"),),
    (("kill", "worker-1"),),
    (("kill", "worker-0"), ("kill", "worker-1")),
    (("kill", "worker-1"), ("kill", "coordinator")),
    (("kill", "coordinator"), ("kill", "worker-0")),
    (("stop", "coordinator"),),
    (("stop", "worker-0"),),
    (("stop", "worker-1"), ("kill", "coordinator")),
    (("stop", "coordinator"), ("kill", "worker-1")),
)
"""Combined faults. Never all workers and the coordinator: no process would know the plan."""


def random_ray_schedule(seed: int) -> RaySchedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed * 6271 + 3)
    model = rng.choice(list(MODELS))
    has_other = rng.random() < 0.4
    strikes = tuple(
        RayStrike(round(2 ** rng.uniform(1, 7)), rng.choice(ROWS), rng.choice((0.3, 2.0, 6.0)))
        for _ in range(rng.randint(1, 3))
    )
    return RaySchedule(
        seed,
        model,
        ray_config(rng, seed, model),
        _game(rng, "one", seed),
        _game(rng, "two", seed) if has_other else None,
        rng.choice((0, rng.randint(1, 60))),
        strikes,
    )


def _game(rng: random.Random, name: str, seed: int) -> Dealt:
    return Dealt(
        name=name,
        seed=seed,
        num_conversations=rng.randint(8, 16),
        num_turns=rng.randint(2, 3),
        system_prompt_tokens=random.Random(seed).randint(1, 40),
        question_tokens=rng.randint(4, 24),
        answer_tokens=rng.randint(8, 20),
        pipeline_depth=rng.randint(1, 3),
        max_num_seqs=rng.choice((3, 8, 16)),
    )


def play_on_ray(address: str, seed: int) -> Outcome:
    """Play one schedule on the Ray cluster to which this process is connected; raises
    AssertionError with the seed if anything is wrong."""
    schedule = random_ray_schedule(seed)
    before = look()
    striker = Striker(schedule)
    try:
        with time_limit(HANG_S):
            outcome = _play(address, schedule, striker)
            left = await_nothing_left(schedule.config.name, before)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise AssertionError(f"seed {seed} ({schedule}): {problem}") from error
    finally:
        striker.go_on()
    assert not left, f"seed {seed} ({schedule}): left are {left}"
    outcome.deeds = striker.deeds
    return outcome


def _play(address: str, schedule: RaySchedule, striker: Striker) -> Outcome:
    from actors import KVCacheCluster

    outcome = Outcome()
    with KVCacheCluster.launch(schedule.config) as cluster:
        length = cluster.status().max_model_len
        striker.cluster = cluster
        with other_driver(address, schedule) as driver:
            striker.driver = driver
            with cluster.client("game") as client:
                game = schedule.game
                report = play_game(schedule.config, length, client, game, striker.on_moment)
                outcome.count(report)
            striker.go_on()
            if not schedule.other_is_killed_at:
                await_driver(driver)
        wait_until(lambda: is_ready(cluster), "the cluster is not ready again", limit_s=SOON_S)
        with cluster.client("again") as client:
            outcome.count(play_game(schedule.config, length, client, schedule.game))
        wait_until(lambda: not unsettled(cluster), "something never ends", limit_s=QUIET_S)
        outcome.num_epochs = cluster.status().epoch
    return outcome


class Striker:
    """Applies the scheduled faults to the processes of a cluster."""

    def __init__(self, schedule: RaySchedule) -> None:
        self.cluster: Any = None
        self.driver: subprocess.Popen[str] | None = None
        self._driver_dies_at = schedule.other_is_killed_at
        self.deeds: Counter[str] = Counter()
        self._strikes: dict[int, list[RayStrike]] = {}
        for strike in schedule.strikes:
            self._strikes.setdefault(strike.moment, []).append(strike)
        self._stopped: list[tuple[int, threading.Timer]] = []

    def on_moment(self, moment: int) -> None:
        """Handle a moment of the game. A process that has not recovered from the last fault is
        spared until another moment: with the coordinator and all workers, the plan would be
        lost."""
        if moment == self._driver_dies_at and self.driver is not None:
            self.deeds["kills of drivers"] += 1
            self.driver.kill()
        strikes = self._strikes.pop(moment, [])
        status = self._status() if strikes else None
        for number, strike in enumerate(strikes):
            if status is None or number:
                self._strikes.setdefault(moment + 1, []).append(strike)
                continue
            victims = {f"worker-{rank.rank}": rank.process_id for rank in status.ranks}
            victims["coordinator"] = status.coordinator_process_id
            for deed, victim in strike.deeds:
                self._do(deed, victims[victim], strike.pause_s)

    def _do(self, deed: str, process_id: int, pause_s: float) -> None:
        self.deeds[f"{deed}s"] += 1
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
            if deed == "stop":
                timer = threading.Timer(pause_s, _continue, [process_id])
                timer.daemon = True
                timer.start()
                self._stopped.append((process_id, timer))

    def go_on(self) -> None:
        """Resume all stopped processes."""
        for process_id, timer in self._stopped:
            timer.cancel()
            _continue(process_id)
        self._stopped.clear()

    def _status(self) -> Any:
        """Return the processes by role; None unless all of them live."""
        from kvcache.base.errors import ClusterError

        try:
            status = self.cluster.status()
        except ClusterError:
            return None
        known = [status.coordinator_process_id, *(rank.process_id for rank in status.ranks)]
        is_whole = status.state == "ready" and all(map(is_alive, known))
        return status if is_whole else None


def is_alive(process_id: int) -> bool:
    """Whether a process runs or is stopped: it is neither dead nor about to be."""
    return started_ticks(process_id) != 0


def _continue(process_id: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGCONT)


# --- the other driver


@contextmanager
def other_driver(address: str, schedule: RaySchedule) -> Iterator[subprocess.Popen[str] | None]:
    """Yield a process that attaches to the cluster and plays too, if one is scheduled."""
    if schedule.other_game is None:
        yield None
        return
    arguments = [address, schedule.config.name, json.dumps(asdict(schedule.other_game))]
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.ray_driver", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout.readline() == "attached\n"
        yield driver
    finally:
        driver.kill()
        driver.communicate()


def await_driver(driver: subprocess.Popen[str] | None) -> None:
    """Wait until the other game has ended without an error."""
    if driver is None:
        return
    said, _ = driver.communicate(timeout=SOON_S)
    assert (driver.returncode, said) == (0, "played\n"), (driver.returncode, said)


# --- inspection


def is_ready(cluster: Any) -> bool:
    """Return whether the cluster is healthy."""
    from kvcache.base.errors import ClusterError

    try:
        return bool(cluster.status().state == "ready")
    except ClusterError:
        return False


def unsettled(cluster: Any) -> list[str]:
    """Return remaining work and used blocks, and inconsistencies."""
    statistics = cluster.statistics()
    coordinator = statistics.coordinator
    if coordinator is None or coordinator.manager is None:
        return ["the coordinator does not run"]
    manager, wrong = coordinator.manager, []
    core = manager.core
    counts = {
        "clients": coordinator.num_clients,
        "running": manager.num_running_requests + manager.num_preempted_requests,
        "blocks in use": core.num_blocks - core.num_free_blocks,
        "wrong blocks": coordinator.num_wrong_blocks,
    }
    wrong += [f"{count} {what}" for what, count in counts.items() if count]
    for rank, worker in enumerate(statistics.workers):
        if worker is None or worker.epoch != coordinator.epoch:
            wrong.append(f"rank {rank} is not there")
        elif worker.num_failed_jobs or worker.num_invalid_messages:
            wrong.append(f"rank {rank}: {worker}")
    return wrong


def look() -> dict[str, str]:
    """Return possible leftovers, shared memory and processes, each with a description."""
    return {**dict.fromkeys(shared_memory(), "shared memory"), **our_processes()}


def await_nothing_left(name: str, before: Mapping[str, str]) -> list[str]:
    """Wait until no leftovers of a cluster remain; return those that do."""
    import ray

    give_up_s = time.monotonic() + QUIET_S
    while True:
        actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
        left = [actor for actor in actors if actor.startswith(f"{name}/")]
        left += [f"{what}: {kind}" for what, kind in look().items() if what not in before]
        if not left or time.monotonic() > give_up_s:
            return left
        time.sleep(POLL_S)


def our_processes() -> dict[str, str]:
    """Return our actor processes among the children of this one, with Ray's names."""
    import psutil

    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command.startswith("ray::") and ("Worker" in command or "Coordinator" in command):
                found[f"process {process.pid} started {process.create_time()}"] = command
    return found
