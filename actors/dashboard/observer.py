"""Watches one cluster from its own thread, and keeps the newest picture of it as JSON.

    cluster   statistics and blocks every second, a rank's labels now and then
    events    followed as a router does, if the cluster publishes them

The server takes the newest text, or waits for the next. If the cluster does not answer, the picture
says so and keeps the last tree and traffic.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import Any

from actors.cli.contents import prefix_roots
from actors.cli.events import EventFollower
from actors.cli.status import rates_of
from actors.clusters.cluster import KVCacheCluster
from actors.dashboard.picture import facts_picture, pool_picture, tiers_picture, tree_picture
from actors.routing.event_endpoints import cluster_endpoints, publisher_host
from kvcache.base.errors import KVCacheError
from kvcache.base.serving_loop import ServingLoop
from kvcache.coordinator.settings import CoordinatorStatistics

INTERVAL_S = 1.0
LABELS_EVERY_S = 3.0
POLL_S = 0.1
MAX_SAMPLES = 300
"""Five minutes of traffic."""


class Observer:
    """The newest picture of one cluster. A context manager that runs the thread."""

    def __init__(self, cluster: KVCacheCluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._text = json.dumps({"name": cluster.name, "problem": "waiting for the first look"})
        self._number = 0
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._before: tuple[float, CoordinatorStatistics] | None = None
        self._tree: dict[str, Any] = {}
        self._labels_s = float("-inf")
        self._follower: EventFollower | None = None
        self._next_look_s = 0.0
        self._loop = ServingLoop("dashboard", self._turn)

    def __enter__(self) -> Observer:
        self._loop.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.stop()
        self._loop.join()
        self._stop_following()

    def newest(self) -> tuple[int, str]:
        """Return the newest picture and its number."""
        with self._changed:
            return self._number, self._text

    def wait_newer(self, number: int, timeout_s: float) -> tuple[int, str]:
        """Return a picture newer than `number`, or the newest after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number, timeout_s)
            return self._number, self._text

    def _turn(self) -> None:
        try:
            self._follow()
        except Exception:
            self._stop_following()  # the next look begins again
            raise
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + INTERVAL_S
            self._publish(self._look())

    def _stop_following(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def _publish(self, picture: dict[str, Any]) -> None:
        text = json.dumps(picture)
        with self._changed:
            self._number += 1
            self._text = text
            self._changed.notify_all()

    def _look(self) -> dict[str, Any]:
        """Return the present picture, or the problem if the cluster gives none."""
        picture: dict[str, Any] = {"name": self._cluster.name, "time_s": time.time()}
        try:
            status = self._cluster.status()
            picture |= {
                "state": status.state,
                "problem": status.problem,
                "model": status.model,
                "ranks": [
                    {"rank": r.rank, "problem": r.describe() if r.problem else ""}
                    for r in status.ranks
                ],
            }
            statistics = self._cluster.coordinator_statistics()
            if statistics is not None and statistics.manager is not None:
                picture |= self._cache_picture(statistics)
        except KVCacheError as error:
            picture["problem"] = str(error)
            picture.setdefault("state", "away")
        except Exception as error:
            picture["problem"] = self._loop.faults.note("a look at the cluster", error)
        return picture | {"tree": self._tree, "traffic": list(self._samples)}

    def _cache_picture(self, statistics: CoordinatorStatistics) -> dict[str, Any]:
        inspection = self._cluster.inspect()
        now_s = time.monotonic()
        if now_s - self._labels_s >= LABELS_EVERY_S:
            self._labels_s = now_s
            self._tree = tree_picture(prefix_roots(self._cluster.collect_labels(0), inspection))
        events = self._events_picture(statistics)
        self._sample(statistics, events)
        return {
            "facts": facts_picture(statistics),
            "pool": pool_picture(inspection),
            "tiers": tiers_picture(statistics),
            "events": events,
        }

    def _sample(self, statistics: CoordinatorStatistics, events: dict[str, Any]) -> None:
        """Append a second of traffic to the series."""
        now_s = time.monotonic()
        before, self._before = self._before, (now_s, statistics)
        if before is None or statistics.num_steps < before[1].num_steps:
            return  # the first look, or a new coordinator
        rate = rates_of(before[1], statistics, now_s - before[0])
        self._samples.append(
            {
                "time_s": round(time.time(), 2),
                "asked": round(rate.asked_tokens, 1),
                "hit": round(rate.hit_tokens, 1),
                "evicted": round(rate.evictions, 1),
                "steps": round(rate.steps, 1),
                "stored": round(events.get("stored_per_s", 0.0), 1),
                "removed": round(events.get("removed_per_s", 0.0), 1),
            }
        )

    # --- events

    def _follow(self) -> None:
        """Receive events for a moment; without events, wait that long."""
        if self._follower is None:
            self._loop.pause(POLL_S)
        else:
            self._follower.receive(POLL_S)

    def _events_picture(self, statistics: CoordinatorStatistics) -> dict[str, Any]:
        """Return the picture of the events; follow a publisher that has moved."""
        if statistics.events is None:
            return {"problem": "the cluster publishes no events: set events.enabled"}
        if self._follower is None:
            self._follower = EventFollower(cluster_endpoints(self._cluster))
        look = self._follower.look(statistics, publisher_host(self._cluster))
        return {
            "seq": look.subscription.last_seq,
            "is_exact": look.subscription.is_exact,
            "is_same_state": look.is_same_state,
            "blocks": look.subscription.num_blocks,
            "stored_per_s": look.traffic.stored_blocks,
            "removed_per_s": look.traffic.removed_blocks,
            "gaps": look.subscription.num_gaps,
            "problem": look.subscription.last_problem,
        }
