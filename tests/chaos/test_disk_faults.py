"""A cluster on Ray whose disk fails during a replay: it continues, and serves no wrong byte.

Every forward compares every byte it reads; statistics and the log say what happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcache.coordinator.settings import OffloadStatistics
from tests.actors.tier_driver import FOUND, play, play_all, play_until_found, settle, tier_config
from tests.chaos.disk import Disk, NotHereError, cut, flip_a_bit, mounted
from tests.conftest import SCRATCH
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.chaos]

PROMPTS = range(8)
"""After all prompts were played, six or seven of them are only in files."""

OTHERS = range(100, 110)
LOG_S = 30.0


def nothing(disk: Disk) -> None:
    """Does nothing: there is nothing to repair."""


@dataclass(frozen=True)
class Fault:
    """A fault of a disk, its repair, and its reports: the kinds of problems that ranks count, and
    words of the log."""

    strike: Callable[[Disk], None]
    repair: Callable[[Disk], None]
    kinds: frozenset[str]
    logged: str


FAULTS = {
    "full": Fault(Disk.fill, Disk.empty, frozenset({"no_space"}), "free space on the disk"),
    "forbidden": Fault(
        Disk.forbid, Disk.allow, frozenset({"denied"}), "let the workers' user write there"
    ),
    "removed": Fault(Disk.remove, nothing, frozenset({"missing"}), "and is made again"),
    "unplugged": Fault(
        Disk.unplug, nothing, frozenset({"missing", "unplugged"}), "cannot be made again"
    ),
    "bits flipped": Fault(
        lambda disk: disk.spoil(flip_a_bit),
        nothing,
        frozenset({"damaged"}),
        "the checksum of its bytes is wrong",
    ),
    "truncated": Fault(
        lambda disk: disk.spoil(cut), nothing, frozenset({"truncated"}), " bytes, its head says "
    ),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with mounted(tmp_path / "disk") as made:
            yield made
    except NotHereError as error:
        pytest.skip(f"FAULTS OF DISKS ARE NOT TESTED: {error}")


class Player:
    """Plays prompts on a cluster, and reads the state of its tiers."""

    def __init__(self, cluster: Any, client: Any) -> None:
        self.cluster, self.client = cluster, client

    def statistics(self) -> OffloadStatistics:
        told = self.cluster.statistics().coordinator
        assert told.offload is not None
        found: OffloadStatistics = told.offload
        return found

    def problems(self) -> Counter[str]:
        """Return counts of file problems, over all ranks."""
        counts: Counter[str] = Counter()
        for worker in self.cluster.statistics().workers:
            counts += Counter(dict(worker.transfers.files.problems))
        return counts


@pytest.mark.parametrize("name", FAULTS)
def test_a_disk_that_fails_costs_hits_and_nothing_else(
    ray_cluster: str, disk: Disk, name: str
) -> None:
    from actors import KVCacheCluster

    fault = FAULTS[name]
    with KVCacheCluster.launch(tier_config(disk.root)) as cluster, cluster.client() as client:
        player = Player(cluster, client)
        assert play_all(client, PROMPTS, player.statistics) == [0] * len(PROMPTS)
        assert player.problems() == {}
        try:
            fault.strike(disk)
        except NotHereError as error:
            pytest.skip(f"THIS FAULT OF A DISK IS NOT TESTED: {error}")
        # One prompt after the other, while the one before is still being written to the disk.
        for number in (*OTHERS, *PROMPTS, *OTHERS):
            play(client, number)
        settle(client, player.statistics)
        assert client.failures == ()
        problems = player.problems()
        assert fault.kinds <= set(problems)
        assert player.statistics().num_failed_jobs > 0
        await_logged(fault.logged)
        fault.repair(disk)
        # Host memory has room for less than two prompts, so the first of them comes from the disk.
        if name != "unplugged":
            for number in PROMPTS:
                play_until_found(client, number, player.statistics)
            assert play(client, PROMPTS[0]) == FOUND
        play_all(client, OTHERS, player.statistics)
        assert client.failures == ()
        coordinator = cluster.statistics().coordinator
        assert coordinator.num_wrong_blocks == 0


def await_logged(words: str) -> None:
    """Wait until a process of the cluster has logged this."""
    logs = SCRATCH / "ray" / "session_latest" / "logs"
    wait_until(
        lambda: any(words in path.read_text(errors="replace") for path in logs.glob("worker-*")),
        f"no log says {words!r}",
        limit_s=LOG_S,
    )
