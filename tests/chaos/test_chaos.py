"""Short forms of the schedules that `python -m tests.chaos` plays: real processes, real signals.

A failing seed is in the message, and `python -m tests.chaos processes --seeds N` plays it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chaos.fork_server import ForkServer
from tests.chaos.processes import play_schedule

pytestmark = [pytest.mark.faults, pytest.mark.chaos]

REACHING_SEEDS = (5, 45)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """The fork server of all schedules."""
    with ForkServer() as made:
        yield made


@pytest.mark.seeds(10)
def test_processes_are_killed_and_stopped_and_every_byte_is_right(
    fork_server: ForkServer, seed: int
) -> None:
    outcome = play_schedule(fork_server, seed)
    assert outcome.bytes_checked > 0


def test_the_schedules_reach_what_they_are_meant_to_reach(fork_server: ForkServer) -> None:
    deeds: Counter[str] = Counter()
    for seed in REACHING_SEEDS:
        deeds += play_schedule(fork_server, seed).deeds
    assert {"killed coordinator", "killed worker", "stopped", "usurped"} <= set(deeds)


@pytest.mark.ray
@pytest.mark.seeds(2)
def test_clusters_on_ray_survive_a_schedule(ray_cluster: str, seed: int) -> None:
    from tests.chaos.ray_clusters import play_on_ray

    outcome = play_on_ray(ray_cluster, seed)
    assert outcome.bytes_checked > 0
