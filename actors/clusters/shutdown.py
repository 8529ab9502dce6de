"""Takes a cluster down, whatever state it is in.

In this order: the coordinator stops replacing workers, releases its sentinels and closes its
sockets; workers close theirs; each actor is asked to end, and killed if it does not; the placement
group goes last. The present workers may differ from those launched, so they are looked up by name
when the coordinator is closed, and again when it is dead. Every wait has a deadline. A dead process
is not an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from actors.clusters.placement import POLL_S, remove_placement, wait_until
from actors.connect import actor_names, end_actors, find_actor, is_actor_known
from actors.memory_service import await_no_memory_services, find_memory_services
from actors.names import coordinator_name, placement_group_name, worker_name
from actors.state import RayStateStore
from kvcache.config import DeadlinesConfig


@dataclass
class ClusterParts:
    """The parts of a cluster, filled in during the launch. `foreign_workers`: an engine's own
    actors, which are closed but never ended. `process_ids`: of all workers. `num_places`: how many
    workers have names of this package. `was_stopped`: `take_down` found that another process has
    stopped it."""

    name: str
    deadlines: DeadlinesConfig
    coordinator: Any = None
    workers: list[Any] = field(default_factory=list)
    foreign_workers: list[Any] = field(default_factory=list)
    placement: PlacementGroup | None = None
    memory_services: list[Any] = field(default_factory=list)
    process_ids: tuple[int, ...] = ()
    num_places: int = 0
    was_stopped: bool = False

    @classmethod
    def found(cls, name: str) -> ClusterParts:
        """Find everything by the cluster's name, with the usual deadlines. For a cluster whose
        coordinator hangs: it is not asked."""
        parts = cls(name, DeadlinesConfig())
        parts.coordinator = find_actor(coordinator_name(name))
        prefix = worker_name(name, 0).removesuffix("0")
        places = [n.removeprefix(prefix) for n in actor_names() if n.startswith(prefix)]
        parts.find_workers(max((int(place) + 1 for place in places if place.isdigit()), default=0))
        parts.find_placement(placement_group_name(name))
        return parts

    def find_workers(self, num_ranks: int) -> None:
        """Look up the present worker actors, except an engine's own."""
        self.num_places = num_ranks
        found = [find_actor(worker_name(self.name, place)) for place in range(num_ranks)]
        self.workers = [actor for actor in found if actor is not None]

    def find_placement(self, group_name: str) -> None:
        """Look up the placement group of a cluster that another driver launched. Searches all
        groups, because Ray looks for a name only in this driver's namespace."""
        for group_id, group in placement_group_table().items():
            if group["name"] == group_name and group["state"] != "REMOVED":
                self.placement = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))


def take_down(parts: ClusterParts) -> None:
    """End everything in `parts`; return when it is gone, or after twice `shutdown_s`."""
    shutdown_s, share_s = parts.deadlines.shutdown_s, parts.deadlines.closing_s
    give_up_s = time.monotonic() + shutdown_s
    coordinators = [] if parts.coordinator is None else [parts.coordinator]
    _close(parts, give_up_s)
    parts.find_workers(parts.num_places)
    closing = [w.kvcache_close.remote() for w in [*parts.workers, *parts.foreign_workers]]
    _settle(closing, share_s)  # a separate share of the time: the coordinator may have hung
    actors = [*parts.workers, *coordinators]
    ending = [actor.__ray_terminate__.remote() for actor in actors]
    _settle(ending, share_s)
    end_actors(actors)
    parts.find_workers(parts.num_places)
    end_actors(parts.workers)
    _await_gone(parts, give_up_s + shutdown_s)
    end_actors(find_memory_services(parts.name))
    await_no_memory_services(parts.name, give_up_s + shutdown_s)
    if parts.placement is not None:
        remove_placement(parts.placement, shutdown_s)
    RayStateStore(parts.name).clear()


def _close(parts: ClusterParts, give_up_s: float) -> None:
    """Close the coordinator. Note an engine's own workers, which it names, and whether another
    process has closed or ended it. Ray restarts one that died otherwise."""
    while parts.coordinator is not None:
        call = parts.coordinator.close.remote()
        try:
            end = ray.get(call, timeout=max(0.0, give_up_s - time.monotonic()))
        except ActorUnavailableError:
            if time.monotonic() < give_up_s:
                time.sleep(POLL_S)
                continue
        except ActorDiedError as error:
            parts.was_stopped = not error.actor_init_failed
        except RayError:
            pass
        else:
            parts.was_stopped = end.was_closed
            parts.foreign_workers += end.foreign_workers
            parts.process_ids = end.process_ids or parts.process_ids
        return


def _settle(calls: Sequence[Any], timeout_s: float) -> None:
    """Wait at most `timeout_s` until every call has ended, successfully or not."""
    if calls:
        ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)


def _await_gone(parts: ClusterParts, give_up_s: float) -> None:
    """Wait until no name of the cluster is registered and no worker process is left here."""
    own = () if parts.foreign_workers else parts.process_ids
    num_places = max(parts.num_places, len(own))
    names = [coordinator_name(parts.name)]
    names += [worker_name(parts.name, place) for place in range(num_places)]

    def is_gone() -> bool:
        return not any(map(is_actor_known, names)) and not any(map(_is_process, own))

    wait_until(is_gone, max(0.0, give_up_s - time.monotonic()))


def _is_process(process_id: int) -> bool:
    """Say whether a process of this machine has the id; one of another node counts as gone."""
    try:
        with open(f"/proc/{process_id}/cmdline", "rb") as file:
            return b"ray::" in file.read()
    except OSError:
        return False
