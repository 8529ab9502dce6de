"""Who is dead: sentinel calls that end when a worker's process does.

Ray says within milliseconds that a process has died, and nothing about one that hangs: silence is
the Coordinator's matter, which hears heartbeats. A sentinel is a call that the worker answers only
when a newer epoch sends its own, or when it closes, so that calls do not pile up over restarts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

logger = logging.getLogger(__name__)

WAIT_S = 0.5
"""How often the thread looks whether it is to stop. It sleeps inside Ray meanwhile."""

OnDeath = Callable[[int, str], None]
"""Told once of each dead worker: rank and cause. Called from the watching thread."""


class DeathWatch:
    """Watches the worker actors of one epoch from a thread that sleeps inside Ray."""

    def __init__(self, workers: Mapping[int, Any], epoch: int, on_death: OnDeath) -> None:
        """Watch `workers`, rank to actor handle, from now on."""
        self._workers = dict(workers)
        self._epoch = epoch
        self._on_death = on_death
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-sentinels", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer. Whoever dies afterwards is not reported."""
        self._is_stopping.set()

    def _run(self) -> None:
        calls = {self._call(rank): rank for rank in self._workers}
        while calls and not self._is_stopping.is_set():
            ended, _ = ray.wait(list(calls), num_returns=1, timeout=WAIT_S)
            for call in ended:
                rank = calls.pop(call)
                if self._is_stopping.is_set():
                    return
                if self._is_still_to_watch(call, rank):
                    # Not more often than this: the node, not the process, may be out of reach.
                    self._is_stopping.wait(WAIT_S)
                    calls[self._call(rank)] = rank

    def _call(self, rank: int) -> Any:
        return self._workers[rank].kvcache_watch.remote(self._epoch)

    def _is_still_to_watch(self, call: Any, rank: int) -> bool:
        """Look at an ended sentinel; report a death; say whether to send another one."""
        try:
            ray.get(call)
        except ActorDiedError as error:
            self._on_death(rank, describe_death(error))
            return False
        except RayError as error:
            logger.warning("the sentinel of rank %d ended without proof of death: %s", rank, error)
            return True
        return False  # superseded by a newer epoch, or the worker was closed


def describe_death(error: Exception) -> str:
    """Return the first telling line of what Ray says about a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (causes or lines or [type(error).__name__])[0][:300]
