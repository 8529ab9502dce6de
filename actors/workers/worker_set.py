"""The workers of a cluster, as the launcher and coordinators know them.

Ray knows workers as named actors, the coordinator as ranks. The rank of each actor is also recorded
in the cluster's small state: a restarted coordinator asks the workers themselves, and reads there
about those that it cannot reach.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from actors.connect import find_actor
from actors.names import worker_name
from actors.reports import NodeAddress, WorkerReport
from actors.state import RayRecordStore
from actors.workers.health import describe_death
from kvcache.base.errors import ClusterError
from kvcache.base.logs import get_logger
from kvcache.config import ClusterConfig, layer_specs
from kvcache.planner import Plan, RankMemory

logger = get_logger(__name__)

CALL_TIMEOUT_S = 10.0

_RECORD = "workforce"
ROSTER_VERSION = 1


@dataclass(frozen=True)
class WorkerSet:
    """The workers of a cluster in rank order: actors and their reports.

    An unknown actor is None, an unknown incarnation empty. `placement` is the placement group of
    this package's workers, None for an engine's own.
    """

    plan: Plan
    actors: tuple[Any, ...]
    reports: tuple[WorkerReport, ...]
    placement: PlacementGroup | None = None

    def incarnations(self, lost: Container[int]) -> dict[int, str]:
        """Return the known process of each rank that is not `lost`."""
        known = enumerate(self.reports)
        return {r: one.incarnation for r, one in known if one.incarnation and r not in lost}

    def with_worker(self, rank: int, actor: Any, report: WorkerReport) -> WorkerSet:
        """Return a copy in which `actor` serves `rank`."""
        actors, reports = list(self.actors), list(self.reports)
        actors[rank], reports[rank] = actor, report
        return replace(self, actors=tuple(actors), reports=tuple(reports))


@dataclass(frozen=True)
class Roster:
    """The recorded worker of each rank."""

    actors: tuple[Any, ...]
    reports: tuple[WorkerReport, ...]
    placement: PlacementGroup | None

    def rank_at(self, place: int) -> int | None:
        places = [report.place for report in self.reports]
        return places.index(place) if place in places else None


@dataclass(frozen=True)
class DiscoveredCluster:
    """What a coordinator finds when it looks for its workers.

    `worker_set` is None until a worker knows the plan. `lost`: ranks without a process, and why;
    `is_hopeless`: all ranks are lost.
    """

    worker_set: WorkerSet | None
    lost: Mapping[int, str] = field(default_factory=dict)
    is_hopeless: bool = False


def save_roster(cluster: str, worker_set: WorkerSet) -> None:
    """Record the rank of each worker. Raises ClusterError if Ray's store cannot be written."""
    ranks = []
    for actor, report in zip(worker_set.actors, worker_set.reports, strict=True):
        handle = b"" if actor is None else handle_to_bytes(actor)
        plain = asdict(replace(report, specs={}))  # the layers are in the configuration
        ranks.append({"handle": base64.b64encode(handle).decode(), "report": plain})
    group = worker_set.placement
    placement = "" if group is None else group.id.hex()
    record = {"version": ROSTER_VERSION, "placement": placement, "ranks": ranks}
    RayRecordStore(cluster, _RECORD).save(json.dumps(record).encode())


def load_roster(config: ClusterConfig) -> Roster | None:
    """Return the record, None if it is missing or unreadable."""
    try:
        data = RayRecordStore(config.name, _RECORD).load()
        return None if data is None else _read_roster(json.loads(data), config)
    except Exception as error:  # another release's record may fail in any way
        logger.warning("the record of the workers of %s cannot be read: %r", config.name, error)
        return None


def _read_roster(record: Any, config: ClusterConfig) -> Roster:
    if record["version"] != ROSTER_VERSION:
        raise ClusterError(f"version {record['version']}, this package reads {ROSTER_VERSION}")
    actors, reports = [], []
    for rank, specs in zip(record["ranks"], layer_specs(config), strict=True):
        handle = base64.b64decode(rank["handle"])
        actors.append(handle_from_bytes(handle) if handle else None)
        plain = rank["report"]
        plain["node"] = NodeAddress(**plain["node"])
        plain["memory"] = RankMemory(**plain["memory"])
        plain["gpu_ids"], plain["specs"] = tuple(plain["gpu_ids"]), specs
        reports.append(WorkerReport(**plain))
    group = record["placement"]
    placement = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))) if group else None
    return Roster(tuple(actors), tuple(reports), placement)


def look_for_workers(config: ClusterConfig) -> DiscoveredCluster:
    """Ask all workers for their plan; one that does not answer in time counts as hanging."""
    roster = load_roster(config)
    answers = _ask_all(_candidates(config, roster))
    told = {answer.rank: answer for answer in answers if answer.plan is not None}
    seats: dict[int, _Answer] = dict(told)
    for answer in answers:
        if answer.plan is None:
            seats[_rank_for(config, answer.place, roster, seats)] = answer
    lost = {rank: seat.cause for rank, seat in sorted(seats.items()) if seat.cause}
    is_hopeless = len(lost) == config.parallel.num_ranks
    if not told:
        return DiscoveredCluster(None, lost, is_hopeless)
    plan = next(answer.plan for answer in told.values() if answer.plan is not None)
    ranks = range(config.parallel.num_ranks)
    reports = tuple(
        seats[rank].report or _known_report(config, roster, rank, seats[rank].place)
        for rank in ranks
    )
    placement = None if roster is None else roster.placement
    return DiscoveredCluster(
        WorkerSet(plan, tuple(seats[rank].actor for rank in ranks), reports, placement), lost
    )


@dataclass(frozen=True)
class _Answer:
    """The result of asking one worker. `cause` says why there is no process; without plan and
    cause it hangs."""

    place: int
    actor: Any
    rank: int = -1
    plan: Plan | None = None
    report: WorkerReport | None = None
    cause: str = ""


def _candidates(config: ClusterConfig, roster: Roster | None) -> dict[int, Any]:
    """Return the actors that should be workers, by place; None if there is none.

    Recorded handles come first: a look-up by name imports the actor's class and, for seconds,
    everything that a worker imports.
    """
    known: dict[int, Any] = {}
    if roster is not None:
        known = {r.place: a for r, a in zip(roster.reports, roster.actors, strict=True)}
    return {
        place: known[place]
        if known.get(place) is not None
        else find_actor(worker_name(config.name, place))
        for place in range(config.parallel.num_ranks)
    }


def _ask_all(candidates: Mapping[int, Any]) -> list[_Answer]:
    """Ask all workers at once; return their answers, by place."""
    calls = {p: a.kvcache_assignment.remote() for p, a in candidates.items() if a is not None}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=CALL_TIMEOUT_S)
    answers = []
    for place, actor in candidates.items():
        if place not in calls:
            answers.append(_Answer(place, None, cause="its actor is gone"))
            continue
        try:
            rank, plan, report = ray.get(calls[place], timeout=0)
            answers.append(_Answer(place, actor, rank, plan, report))
        except ActorDiedError as error:
            answers.append(_Answer(place, actor, cause=describe_death(error)))
        except RayTaskError:
            answers.append(_Answer(place, actor, cause="its new process has no plan yet"))
        except RayError:
            answers.append(_Answer(place, actor))
    return answers


def _rank_for(
    config: ClusterConfig, place: int, roster: Roster | None, taken: Mapping[int, _Answer]
) -> int:
    """Return the rank of a place whose worker does not answer: the recorded one, or a free one of
    its stage."""
    rank = None if roster is None else roster.rank_at(place)
    if rank is not None and rank not in taken:
        return rank
    width = config.parallel.tensor_parallel_size
    first = place // width * width
    free = [rank for rank in range(first, first + width) if rank not in taken]
    if not free:
        raise ClusterError(f"the worker at place {place} of {config.name} has no rank left")
    return free[0]


def _known_report(
    config: ClusterConfig, roster: Roster | None, rank: int, place: int
) -> WorkerReport:
    """Return the known report of a rank whose worker does not answer."""
    if roster is not None and roster.reports[rank].place == place:
        return roster.reports[rank]
    specs = layer_specs(config)[rank]
    return WorkerReport(place, "", 0, NodeAddress("", "unknown"), (), specs, RankMemory(0))


def handle_to_bytes(actor: Any) -> bytes:
    """Return an actor's handle as bytes. The process is connected to Ray."""
    data, _ = _core_worker().serialize_actor_handle(actor._ray_actor_id)
    return bytes(data)


def handle_from_bytes(data: bytes) -> Any:
    """Return the handle encoded by `handle_to_bytes`, whether or not its actor lives."""
    return _core_worker().deserialize_and_register_actor_handle(data, None, False)


def _core_worker() -> Any:
    connected: Any = ray_worker.global_worker
    connected.check_connected()
    return connected.core_worker
