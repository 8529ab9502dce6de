"""One schedule on real processes, from the first fork to the last check for leftovers.

    two games with faults ──▶ one without, over the same cache ──▶ state is consistent, nothing left

Every byte is checked when it is read, and all cached blocks are read once more at the end.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.client import KVCacheClient
from tests.chaos.fault_trigger import FaultTrigger
from tests.chaos.fork_server import ForkServer
from tests.chaos.game import play_game
from tests.chaos.outcome import Outcome
from tests.chaos.roles import FileDialer, plan_of
from tests.chaos.schedule import Schedule, Strike, random_schedule
from tests.chaos.supervisor import ChaosSupervisor
from tests.waiting import wait_until

HANG_S = 60.0
"""A schedule takes a second or two; after this time it hangs."""

QUIET_S = 15.0
POLL_S = 0.02


class HangError(Exception):
    """A schedule does not end."""


def play_schedule(fork_server: ForkServer, seed: int) -> Outcome:
    """Play one schedule to its end; raises AssertionError with the seed if anything is wrong."""
    schedule = random_schedule(seed)
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="kvx-", dir="/tmp") as folder:
        supervisor = ChaosSupervisor(fork_server, schedule, Path(folder))
        try:
            with time_limit(HANG_S):
                outcome = _play(supervisor, schedule, Path(folder))
        except Exception as error:
            # The list of processes is gone once it is closed.
            problem = (
                f"{type(error).__name__}: {error}: {supervisor.problems} {supervisor.describe()}"
            )
            supervisor.close()
            raise AssertionError(f"seed {seed} ({schedule}): {problem}") from error
        supervisor.close()
    left = [*supervisor.problems, *(shared_memory() - before)]
    assert not left, f"seed {seed} ({schedule}): {left}"
    outcome.deeds = supervisor.deeds
    return outcome


def _play(supervisor: ChaosSupervisor, schedule: Schedule, folder: Path) -> Outcome:
    config, outcome = schedule.config, Outcome()
    length = plan_of(config).max_model_len
    strikes: dict[int, list[Strike]] = {}
    for strike in schedule.strikes:
        strikes.setdefault(strike.moment, []).append(strike)

    def on_moment(moment: int) -> None:
        for strike in strikes.pop(moment, ()):
            supervisor.strike(strike)

    supervisor.start()
    dialer = FileDialer(config, folder, FaultTrigger(0, 0))
    with KVCacheClient(dialer, "game") as client:
        outcome.count(play_game(config, length, client, schedule.game, on_moment))
    supervisor.await_engine(HANG_S)
    _await(supervisor.is_settled, "settle")
    with KVCacheClient(dialer, "again") as client:
        outcome.count(play_game(config, length, client, schedule.game))
    _check_state(supervisor)
    outcome.num_epochs = supervisor.reports()["coordinator"]["epoch"]
    return outcome


def _check_state(supervisor: ChaosSupervisor) -> None:
    """Check that nothing is in progress, all blocks are free, and the state is consistent."""
    wrong: list[str] = []
    give_up_s = time.monotonic() + QUIET_S
    while True:
        reports = supervisor.reports()
        wrong = [*_unsettled(reports), *_broken(reports)]
        if not wrong:
            return
        assert time.monotonic() < give_up_s, f"{wrong}: {reports}"
        time.sleep(POLL_S)


def _unsettled(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield everything in progress; for a moment, that is no mistake."""
    coordinator = reports["coordinator"]
    if coordinator.get("phase") != "running":
        yield f"the coordinator is {coordinator.get('phase')}"
        return
    # One audit may be in progress.
    expected = {"num_clients": 0, "num_open_jobs": 1, "num_unacknowledged": 1}
    for name, most in expected.items():
        if coordinator[name] > most:
            yield f"{name} is {coordinator[name]}"
    manager = coordinator["manager"]
    core = manager["core"]
    if manager["num_running_requests"] or manager["num_preempted_requests"]:
        yield f"requests are left: {manager}"
    if core["num_free_blocks"] != core["num_blocks"]:
        yield f"{core['num_free_blocks']} of {core['num_blocks']} blocks are free"
    for role, worker in reports.items():
        if role == "coordinator" or worker.get("broken"):
            continue
        if worker["epoch"] != coordinator["epoch"]:
            yield f"{role} is in epoch {worker['epoch']}"
        elif worker["num_labels"] != core["num_sealed_blocks"]:
            yield f"{role} has {worker['num_labels']} labels"


def _broken(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    for role, report in reports.items():
        if report["broken"]:
            yield f"{role}: {report['broken']}"
        for name in ("num_wrong_blocks", "num_malformed", "num_failed_jobs", "num_invalid"):
            if report.get(name):
                yield f"{role}: {name} is {report[name]}"


def _await(is_done: Any, what: str) -> None:
    wait_until(is_done, f"it did not {what} within {QUIET_S} s", limit_s=QUIET_S, pause_s=POLL_S)


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise HangError in this thread, the main thread, after `limit_s`."""

    def on_alarm(number: int, frame: object) -> None:
        raise HangError(f"nothing has come to an end for {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shared_memory() -> set[str]:
    """Return the files in shared memory."""
    return {str(path) for path in Path("/dev/shm").glob("*kvcache*")}
