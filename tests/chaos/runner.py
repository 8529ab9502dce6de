"""Plays many schedules, reports progress, and names the failed ones at the end."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.chaos.outcome import Outcome

KINDS = ("processes", "ray", "simulated")
NUM_SIMULATIONS_AT_ONCE = 2
SEEDS_AT_ONCE = 10
SHOWN_AFTER_S = 30.0
"""How often progress is written to a file."""


@dataclass
class Played:
    """One seed: its outcome, or its error."""

    seed: int
    took_s: float
    outcome: Outcome | None = None
    problem: str = ""


@dataclass
class Progress:
    """Progress, on one line of a terminal, or sometimes on a line of a file."""

    kind: str
    num_seeds: int
    num_played: int = 0
    failed: list[Played] = field(default_factory=list)
    total: Outcome = field(default_factory=Outcome)
    started_s: float = field(default_factory=time.monotonic)
    shown_s: float = 0.0

    def add(self, played: Played) -> None:
        """Count one more."""
        self.num_played += 1
        if played.problem:
            self.failed.append(played)
            print(f"\n{played.problem}", file=sys.stderr, flush=True)
        elif played.outcome is not None:
            self.total.add(played.outcome)
        is_terminal, now_s = sys.stdout.isatty(), time.monotonic()
        if is_terminal or now_s - self.shown_s > SHOWN_AFTER_S:
            self.shown_s = now_s
            start, end = ("\r", "") if is_terminal else ("", "\n")
            print(f"{start}{self.line()}", end=end, flush=True)

    def line(self) -> str:
        """Return the line."""
        took_s = time.monotonic() - self.started_s
        return (
            f"{self.num_played} of {self.num_seeds} schedules ({self.kind}), "
            f"{len(self.failed)} failed, {took_s:.0f} s"
        )

    def finish(self) -> int:
        """Print the sums and the failed seeds; return the exit code."""
        print(f"\n{self.line()}: {self.total}" if str(self.total) else f"\n{self.line()}")
        for played in self.failed:
            seed = played.seed
            print(
                f"seed {seed} failed after {played.took_s:.1f} s; again: "
                f"python -m tests.chaos {self.kind} --seeds {seed}:{seed + 1}"
            )
        return 1 if self.failed else 0


def main() -> int:
    """Parse the arguments and play."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seeds", type=seeds, default=range(10), metavar="FIRST:END")
    given = parser.parse_args()
    # Surviving processes log each death; here deaths are intended.
    logging.disable(logging.WARNING)
    progress = Progress(given.kind, len(given.seeds))
    playing = {"processes": on_processes, "ray": on_ray, "simulated": simulated}[given.kind]
    for played in playing(given.seeds):
        progress.add(played)
    return progress.finish()


def seeds(text: str) -> range:
    """Return the seeds from `FIRST` to `END`, exclusive; raises ValueError."""
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def on_processes(chosen: Iterable[int]) -> Iterator[Played]:
    """Play on processes, one schedule after the other."""
    from tests.chaos.fork_server import ForkServer
    from tests.chaos.processes import play_schedule

    with ForkServer() as fork_server:
        for seed in chosen:
            with measured(seed) as played:
                played.outcome = play_schedule(fork_server, seed)
            yield played


def on_ray(chosen: Iterable[int]) -> Iterator[Played]:
    """Play on clusters, one after the other, in a Ray cluster of this command."""
    from tests.chaos.own_ray import ray_of_our_own

    with ray_of_our_own() as address:
        from tests.chaos.ray_clusters import play_on_ray

        for seed in chosen:
            with measured(seed) as played:
                played.outcome = play_on_ray(address, seed)
            yield played


def simulated(chosen: Iterable[int]) -> Iterator[Played]:
    """Play in the simulator, in several processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(NUM_SIMULATIONS_AT_ONCE) as pool:
        yield from pool.imap_unordered(_simulate, chosen, SEEDS_AT_ONCE)


def _simulate(seed: int) -> Played:
    from tests.protocol.scenario import random_scenario
    from tests.protocol.simulation import simulate

    logging.disable(logging.WARNING)
    with measured(seed) as played:
        simulate(random_scenario(seed))
    return played


@contextmanager
def measured(seed: int) -> Iterator[Played]:
    """Yield an outcome to fill in; a schedule that fails is recorded there."""
    played, started_s = Played(seed, 0.0), time.monotonic()
    try:
        yield played
    except Exception as error:
        played.problem = str(error) if isinstance(error, AssertionError) else f"{seed}: {error!r}"
        played.problem = played.problem or f"seed {seed}: {error!r}"
    played.took_s = time.monotonic() - started_s
