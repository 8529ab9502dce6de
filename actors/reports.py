"""What actors tell each other and the launcher by Ray calls: plain frozen records.

No torch and no Ray in here, so that every process can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from actors.transport.protocol import TransportStatistics
from kvcache.planner import RankMemory
from kvcache.specs import KVCacheSpec


@dataclass(frozen=True)
class NodeAddress:
    """Where a process runs: Ray's id of the node, and the node's network address."""

    node_id: str
    host: str


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says before there is a plan. `place` is where the launcher put it.

    `memory` is what it may plan with, `free_bytes` what its device has. `started_ticks` says when
    its process started, so that no other one is taken for it.
    """

    place: int
    incarnation: str
    process_id: int
    node: NodeAddress
    gpu_ids: tuple[str, ...]
    specs: Mapping[str, KVCacheSpec]
    memory: RankMemory
    free_bytes: int = 0
    started_ticks: int = 0


@dataclass(frozen=True)
class HostStatistics:
    """What one worker's process has carried and refused beside the worker's own figures.

    `malformed`: payloads that are no message. `misdirected`: messages that are not for workers.
    `faults`: errors that should not be, each of which cost a message or a connection.
    """

    transport: TransportStatistics
    malformed: int
    misdirected: int
    faults: int = 0


@dataclass(frozen=True)
class LastWorkers:
    """Who served the ranks when the coordinator was closed: process ids, and the actors of an
    engine's own."""

    process_ids: tuple[int, ...]
    foreign_workers: tuple[Any, ...]


@dataclass(frozen=True)
class RankStatus:
    """One rank as the coordinator sees it. `problem` is empty while all is well, or says how its
    process was lost; `replacement` how far another one has come."""

    rank: int
    place: int
    node_id: str
    host: str
    process_id: int
    gpu_ids: tuple[str, ...]
    problem: str
    replacement: str = ""

    def describe(self) -> str:
        """Return how the rank does, in words."""
        if not self.problem:
            return "ready"
        replacement = f", replacement: {self.replacement}" if self.replacement else ""
        return f"lost ({self.problem}){replacement}"


@dataclass(frozen=True)
class ClusterStatus:
    """What a running cluster is and how it does, for people and programs.

    `state`: "starting", "ready", "degraded" (a rank is lost: clients get errors that name it),
    "failed" (the coordinator itself has ended by an error, see `problem`). `is_embedded`: the
    coordinator is no actor, but in a process of the engine.
    """

    name: str
    state: str
    problem: str
    model: str
    epoch: int
    fingerprint: str
    num_blocks: int
    max_model_len: int
    transport: str
    coordinator_process_id: int
    coordinator_node: NodeAddress
    ranks: tuple[RankStatus, ...]
    warnings: tuple[str, ...]
    is_embedded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)
