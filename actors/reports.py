"""Records that actors and the launcher exchange by Ray calls.

Imports neither torch nor Ray, so that every process can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from actors.transport.protocol import TransportStatistics
from kvcache.base.serving_loop import LoopStatistics, problems_of
from kvcache.config import ClusterConfig
from kvcache.memory_service import MemoryServiceStatistics
from kvcache.planner import Plan, RankMemory
from kvcache.specs import KVCacheSpec


@dataclass(frozen=True)
class NodeAddress:
    """Where a process runs: Ray's node id and the node's network address."""

    node_id: str
    host: str


@dataclass(frozen=True)
class WorkerReport:
    """What a worker reports before there is a plan. `place` is the launcher's.

    `memory`: bytes to plan with; `free_bytes`: bytes free on its device. `started_ticks`: start
    time of its process, which makes its process id unique.
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
class ProcessStatistics:
    """What one worker's process has transferred and refused, besides the worker's own statistics.

    `malformed`: payloads that are no message. `misdirected`: messages that are not for workers.
    `faults`: unexpected errors; each cost a message or a connection.
    """

    transport: TransportStatistics
    malformed: int
    misdirected: int
    faults: int = 0


@dataclass(frozen=True)
class LastWorkers:
    """The workers when the coordinator was closed: process ids, and an engine's own actors.
    `was_closed`: the coordinator had been closed before."""

    process_ids: tuple[int, ...]
    foreign_workers: tuple[Any, ...]
    was_closed: bool


@dataclass(frozen=True)
class RankStatus:
    """One rank as the coordinator sees it. `problem`: how its process was lost, empty if it was
    not; `replacement`: progress of its replacement."""

    rank: int
    place: int
    node_id: str
    host: str
    process_id: int
    gpu_ids: tuple[str, ...]
    problem: str
    replacement: str = ""

    def describe(self) -> str:
        """Describe the rank's state in words."""
        if not self.problem:
            return "ready"
        replacement = f", replacement: {self.replacement}" if self.replacement else ""
        return f"lost ({self.problem}){replacement}"


def describe_losses(ranks: Sequence[RankStatus], verb: str = ":") -> str:
    """Return which ranks are lost and why, in words; empty if none is."""
    return "; ".join(f"rank {one.rank}{verb} {one.describe()}" for one in ranks if one.problem)


@dataclass(frozen=True)
class MemoryServiceReport:
    """A memory service's own report. `statistics` is None while it cannot serve; `problem` says
    why."""

    process_id: int
    started_ticks: int
    statistics: MemoryServiceStatistics | None
    problem: str = ""


@dataclass(frozen=True)
class MemoryServiceStatus:
    """One node's memory service. `problem` is empty while it serves, and has lasted `silent_s`.

    `kept_ranks` and `missing_ranks`: ranks of the node whose memory is and is not kept; `reasons`:
    why not, if known. `num_restarts`: as far as the coordinator has seen.
    """

    node_id: str
    host: str
    process_id: int = 0
    started_ticks: int = 0
    problem: str = ""
    is_silent: bool = False
    silent_s: float = 0.0
    kept_ranks: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    num_restarts: int = 0
    statistics: MemoryServiceStatistics | None = None

    def warnings(self) -> list[str]:
        """Return warnings: memory that ends with a process, and errors."""
        if self.problem:
            since = f" for {self.silent_s:.0f} s" if self.silent_s >= 1 else ""
            several = len(self.missing_ranks) > 1
            return [
                f"the memory service of node {self.host} does not serve{since} ({self.problem}): "
                f"host memory of {_ranks(self.missing_ranks)} now ends with "
                f"{'their processes' if several else 'its process'}"
            ]
        found = [
            f"host memory of rank {rank} ends with its process: the memory service of node "
            f"{self.host} does not have it{': ' + reason if reason else ' yet'}"
            for rank, reason in zip_longest(self.missing_ranks, self.reasons, fillvalue="")
        ]
        told = self.statistics
        loop = "" if told is None else told.loop.problem()
        return [*found, f"node {self.host}: {loop}"] if loop else found


@dataclass(frozen=True)
class ClusterStatus:
    """State of a running cluster, for people and programs.

    `state`: "starting", "ready", "degraded" (a rank is lost: clients get errors that name it), or
    "failed" (an error has ended the coordinator, see `problem`). `is_embedded`: the coordinator is
    not an actor, but runs in a process of the engine. `memory_services`: the nodes' host memory, if
    the cluster has any. `loops`: service threads of the coordinator's process. `log_path`: the
    coordinator's log on its node, empty if there is none.
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
    memory_services: tuple[MemoryServiceStatus, ...] = ()
    loops: tuple[LoopStatistics, ...] = ()
    log_path: str = ""

    @classmethod
    def of(
        cls,
        config: ClusterConfig,
        plan: Plan | None,
        process_id: int,
        node: NodeAddress,
        *,
        state: str,
        problem: str,
        epoch: int,
        ranks: Sequence[RankStatus],
        memory_services: Sequence[MemoryServiceStatus] = (),
        loops: Sequence[LoopStatistics] = (),
        is_embedded: bool = False,
        log_path: str = "",
    ) -> ClusterStatus:
        """Return the status of a cluster whose coordinator runs in that process of that node."""
        warnings = [] if plan is None else list(plan.warnings)
        for service in memory_services:
            warnings += service.warnings()
        return cls(
            name=config.name,
            state=state,
            problem=problem,
            model=config.model.name,
            epoch=epoch,
            fingerprint="" if plan is None else plan.fingerprint,
            num_blocks=0 if plan is None else plan.num_blocks,
            max_model_len=0 if plan is None else plan.max_model_len,
            transport=config.transport.kind,
            coordinator_process_id=process_id,
            coordinator_node=node,
            ranks=tuple(ranks),
            warnings=(*warnings, *problems_of(loops)),
            is_embedded=is_embedded,
            memory_services=tuple(memory_services),
            loops=tuple(loops),
            log_path=log_path,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
