"""A real cluster under garbage: all sockets that its processes listen on, while it serves.

The cluster has host memory and publishes events, so it has a memory service, a coordinator,
workers and a publisher. An honest client, an honest follower and the memory service's state show
the effects. Ray's own ports are left alone.
"""

from __future__ import annotations

import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from actors import KVCacheClient, KVCacheCluster
from actors.clusters.placement import wait_until
from actors.reports import ClusterStatus, MemoryServiceStatus
from kvcache.config import ClusterConfig
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.memory_service import MemoryServiceClient
from tests.actors.tier_driver import FOUND, play, play_all, tier_config
from tests.attack.sockets import Attacker, tcp_connector, unix_connector
from tests.fuzz.targets import make_targets

SOON_S = 90.0
PROMPTS = range(4)
HOST_BLOCKS = 24 * (len(PROMPTS) + 1)
ANYWHERE = "tcp://127.0.0.1:0"


def siege_config(directory: Path, name: str = "") -> ClusterConfig:
    """Return the configuration: two ranks, host memory for all prompts, and events."""
    return tier_config(
        directory,
        name,
        host_blocks=HOST_BLOCKS,
        offload={"disk": None},
        events={"enabled": True, "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE},
    )


@dataclass(frozen=True)
class Listening:
    """One listening socket: its process, kind and address."""

    owner: str
    kind: str
    place: str


def listening_sockets(process_ids: dict[str, int]) -> list[Listening]:
    """Return our abstract Unix sockets on which these processes listen."""
    found = []
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {fields[6]: fields for fields in listed if fields[-1].startswith("@kvcache-")}
    for owner, process_id in process_ids.items():
        for link in Path(f"/proc/{process_id}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue  # closed meanwhile
            fields = named.get(target.removeprefix("socket:[").rstrip("]"))
            if fields is not None and int(fields[3], 16) & 0x10000:  # it accepts connections
                kind = "packets" if int(fields[4]) == socket.SOCK_SEQPACKET else "stream"
                found.append(Listening(owner, kind, fields[-1][1:]))
    return found


class Siege:
    """One cluster, its honest users, and one attacker for each socket."""

    def __init__(self, cluster: KVCacheCluster, client: KVCacheClient, seed: int) -> None:
        self.cluster, self.client = cluster, client
        self.chance = random.Random(seed)
        self.before = self._settled()
        statistics = self._event_statistics()
        self._follower = KVEventSubscriber(statistics["endpoint"], statistics["replay_endpoint"])
        self.sockets = [
            *listening_sockets(self._process_ids()),
            Listening("publisher", "zmq", statistics["endpoint"]),
            Listening("publisher", "zmq", statistics["replay_endpoint"]),
        ]
        targets = make_targets()
        good = {
            "packets": targets["memory service"].good,
            "stream": targets["messages"].good,
            "zmq": (b"",),
        }
        self._attackers = {kind: Attacker(self.chance, payloads) for kind, payloads in good.items()}

    @property
    def played(self) -> Counter[str]:
        """The attacks so far."""
        return sum((one.played for one in self._attackers.values()), Counter())

    def attack(self, count: int) -> None:
        """Play `count` attacks on each socket."""
        for listening in self.sockets:
            attacker = self._attackers[listening.kind]
            for _ in range(count):
                if listening.kind == "stream":
                    attacker.attack_stream(unix_connector(listening.place, socket.SOCK_STREAM))
                elif listening.kind == "packets":
                    attacker.attack_packets(unix_connector(listening.place, socket.SOCK_SEQPACKET))
                else:
                    attacker.attack_zmq(tcp_connector(listening.place), listening.place)

    def steal_memory(self) -> None:
        """Make the memory service release a rank's memory; the rank registers it again."""
        (place,) = [one.place for one in self.sockets if one.kind == "packets"]
        MemoryServiceClient(f"unix:@{place}", SOON_S).drop(f"{self.cluster.name}/rank0")
        self._settled()

    def check(self) -> None:
        """Fail unless all processes live, no error occurred, and the honest users are served."""
        now = self._settled()
        assert self._process_ids(now) == self._process_ids(self.before)
        assert now.epoch == self.before.epoch
        assert now.warnings == self.before.warnings
        assert all(loop.is_running and not loop.num_faults for loop in now.loops), now.loops
        statistics = self._event_statistics()
        assert (statistics["num_publisher_restarts"], statistics["num_faults"]) == (0, 0), (
            statistics
        )
        assert play_all(self.client, PROMPTS, self.statistics) == [FOUND] * len(PROMPTS)
        assert self.client.failures == ()
        statistics = self._event_statistics()
        assert wait_until(self._is_exact, SOON_S), self._follower.statistics()

    def close(self) -> None:
        for attacker in self._attackers.values():
            attacker.close()
        self._follower.close()

    def statistics(self) -> OffloadStatistics:
        told = self.cluster.coordinator_statistics()
        assert told is not None and told.offload is not None
        return told.offload

    def _is_exact(self) -> bool:
        self._follower.poll(0.1)
        statistics = self._event_statistics()
        told = self._follower.statistics()
        return (told.last_seq, told.checksum) == (statistics["last_seq"], statistics["checksum"])

    def _event_statistics(self) -> dict[str, object]:
        told = self.cluster.coordinator_statistics()
        assert told is not None and told.events is not None
        return told.events

    def _settled(self) -> ClusterStatus:
        """Return the status once the cluster is healthy and host memory is kept."""
        seen: list[ClusterStatus] = []

        def is_well() -> bool:
            seen[:] = [self.cluster.status()]
            kept = [rank for service in seen[0].memory_services for rank in service.kept_ranks]
            return seen[0].state == "ready" and sorted(kept) == [0, 1]

        assert wait_until(is_well, SOON_S), seen
        return seen[0]

    def _process_ids(self, status: ClusterStatus | None = None) -> dict[str, int]:
        """Return all processes of the cluster, with their roles."""
        status = status or self.cluster.status()
        found = {"coordinator": status.coordinator_process_id}
        found |= {f"rank {rank.rank}": rank.process_id for rank in status.ranks}
        found |= {
            f"memory service {i}": one.process_id for i, one in enumerate(status.memory_services)
        }
        found["publisher"] = int(str(self._event_statistics()["process_id"]))
        return found


@contextmanager
def besieged(cluster: KVCacheCluster, seed: int) -> Iterator[Siege]:
    """Yield the siege of a cluster that has played all prompts twice."""
    with cluster.client() as client:
        for number in PROMPTS:
            play(client, number)
        siege = Siege(cluster, client, seed)
        try:
            play_all(client, PROMPTS, siege.statistics)
            yield siege
        finally:
            siege.close()


# --- killed memory services


def wait_for_memory_service(
    cluster: KVCacheCluster, holds: Callable[[MemoryServiceStatus], bool]
) -> MemoryServiceStatus:
    """Return the status of a cluster's only memory service once it is as expected."""
    seen: list[MemoryServiceStatus] = []

    def is_so() -> bool:
        seen[:] = cluster.status().memory_services
        return len(seen) == 1 and holds(seen[0])

    assert wait_until(is_so, SOON_S), seen
    return seen[0]


def is_keeping_all(status: MemoryServiceStatus) -> bool:
    return not status.problem and not status.missing_ranks


def kill_service_and_worker(cluster: KVCacheCluster, rank: int) -> None:
    """Kill the memory service, wait until it has all memory again, then kill a worker; return when
    another process has found that worker's memory."""
    victim = wait_for_memory_service(cluster, is_keeping_all).process_id
    os.kill(victim, signal.SIGKILL)
    wait_for_memory_service(cluster, lambda one: one.process_id != victim and is_keeping_all(one))
    worker = cluster.status().ranks[rank].process_id
    psutil.Process(worker).kill()

    def is_replaced() -> bool:
        status = cluster.status()
        return status.state == "ready" and status.ranks[rank].process_id != worker

    assert wait_until(is_replaced, SOON_S), cluster.status()
    told = cluster.statistics().workers[rank]
    assert told is not None and told.transfers.host is not None
    assert told.transfers.host.origin == "attached"
