"""What actors tell each other and the launcher by Ray calls: plain frozen records.

No torch and no Ray in here, so that every process can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """What a worker says before there is a plan. `place` is where the launcher put it."""

    place: int
    incarnation: str
    process_id: int
    node: NodeAddress
    gpu_ids: tuple[str, ...]
    specs: Mapping[str, KVCacheSpec]
    memory: RankMemory


@dataclass(frozen=True)
class HostStatistics:
    """What one worker's process has carried and refused beside the worker's own figures.

    `malformed`: payloads that are no message. `misdirected`: messages that are not for workers.
    """

    transport: TransportStatistics
    malformed: int
    misdirected: int
