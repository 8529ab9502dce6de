"""A cluster with an embedded coordinator, described for people and programs.

By the process that has the coordinator, which knows; or by any other one, from the record and from
the workers' own words. Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.process_identity import ProcessIdentity
from actors.reports import ClusterStatus, MemoryServiceStatus, NodeAddress, RankStatus
from kvcache.base.serving_loop import LoopStatistics, problems_of
from kvcache.config import ClusterConfig
from kvcache.planner import Plan

NO_PROCESS = ProcessIdentity("", "no node", 0, 0)


def embedded_status(
    config: ClusterConfig,
    plan: Plan | None,
    process: ProcessIdentity | None,
    *,
    state: str,
    problem: str,
    epoch: int,
    ranks: Sequence[RankStatus],
    memory_services: Sequence[MemoryServiceStatus] = (),
    loops: Sequence[LoopStatistics] = (),
) -> ClusterStatus:
    """Return the status of a cluster whose coordinator is in `process`."""
    where = process or NO_PROCESS
    warnings = [] if plan is None else list(plan.warnings)
    for service in memory_services:
        warnings += service.warnings()
    return ClusterStatus(
        name=config.name,
        state=state,
        problem=problem,
        model=config.model.name,
        epoch=epoch,
        fingerprint="" if plan is None else plan.fingerprint,
        num_blocks=0 if plan is None else plan.num_blocks,
        max_model_len=0 if plan is None else plan.max_model_len,
        transport=config.transport.kind,
        coordinator_process_id=where.process_id,
        coordinator_node=NodeAddress(where.node_id, where.host),
        ranks=tuple(ranks),
        warnings=(*warnings, *problems_of(loops)),
        is_embedded=True,
        memory_services=tuple(memory_services),
        loops=tuple(loops),
    )
