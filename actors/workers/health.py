"""Detects dead and hanging workers: by sentinel calls that end with a process, and by silence.

Ray reports the death of a process within milliseconds, but not that one hangs. A sentinel is a call
that the worker answers only when a newer epoch sends its own, or when it closes, so that calls do
not pile up over epochs and restarts. Silence is time without messages to the Coordinator. A silent
process is not dead before Ray says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import ServingLoop

logger = get_logger(__name__)

WAIT_S = 0.5
"""How often the thread checks for more processes to watch. It sleeps inside Ray meanwhile."""

OnDeath = Callable[[int, str, str], None]
"""Called once for each dead process with rank, incarnation and cause, in the watching thread."""


@dataclass(frozen=True)
class _Sentinel:
    """A running or properly ended call: the process that it watches, and since which epoch."""

    rank: int
    incarnation: str
    epoch: int


class DeathWatch:
    """Watches one worker actor per rank, from a thread that sleeps inside Ray.

    Every epoch sends its own sentinels: another coordinator in between may have released those of
    an older epoch.
    """

    def __init__(self, epoch: Callable[[], int], on_death: OnDeath) -> None:
        """Watch no process yet. `epoch` returns the present one, in any thread."""
        self._epoch = epoch
        self._on_death = on_death
        self._lock = threading.Lock()
        self._workers: dict[int, tuple[str, Any]] = {}
        self._sent: dict[int, _Sentinel] = {}
        self._calls: dict[Any, _Sentinel] = {}
        self._has_news = threading.Event()
        self._loop = ServingLoop("kvcache-sentinels", self._turn)
        self._loop.start()

    def watch(self, rank: int, incarnation: str, actor: Any) -> None:
        """Watch the process that serves `rank`, instead of the previous one."""
        with self._lock:
            self._workers[rank] = (incarnation, actor)
        self._has_news.set()

    def stop(self) -> None:
        """Stop watching. Later deaths are not reported."""
        self._loop.stop()
        self._has_news.set()

    @property
    def loop(self) -> ServingLoop:
        return self._loop

    def _turn(self) -> None:
        self._has_news.clear()
        self._send_missing()
        if not self._calls:
            self._has_news.wait(WAIT_S)
            return
        ended, _ = ray.wait(list(self._calls), num_returns=1, timeout=WAIT_S)
        for call in ended:
            sentinel = self._calls.pop(call)
            if self._loop.is_stopping:
                return
            is_to_be_sent_again = True
            with self._loop.faults.contained(f"the sentinel of rank {sentinel.rank}"):
                is_to_be_sent_again = self._is_to_be_sent_again(call, sentinel)
            if is_to_be_sent_again:
                # Limit the rate: the node may be unreachable, and the process alive.
                self._loop.pause(WAIT_S)
                if self._sent.get(sentinel.rank) == sentinel:
                    del self._sent[sentinel.rank]

    def _send_missing(self) -> None:
        """Send the sentinels of processes and of an epoch that have none yet."""
        epoch = self._epoch()
        with self._lock:
            workers = dict(self._workers)
        for rank, (incarnation, actor) in workers.items():
            sentinel = _Sentinel(rank, incarnation, epoch)
            if self._sent.get(rank) != sentinel:
                self._calls[actor.kvcache_watch.remote(epoch)] = sentinel
                self._sent[rank] = sentinel

    def _is_to_be_sent_again(self, call: Any, sentinel: _Sentinel) -> bool:
        """Inspect an ended sentinel; report a death; return whether another one must be sent."""
        try:
            ray.get(call)
        except ActorDiedError as error:
            self._forget(sentinel)
            self._tell(sentinel, describe_death(error))
            return False
        except RayError as error:
            logger.warning(
                "the sentinel of rank %d ended without proof of death: %s", sentinel.rank, error
            )
            return True
        return False  # superseded by a newer epoch, or the worker was closed

    def _tell(self, sentinel: _Sentinel, cause: str) -> None:
        """Report a death; if that fails, the others are still watched."""
        try:
            self._on_death(sentinel.rank, sentinel.incarnation, cause)
        except Exception:
            logger.exception("the death of rank %d could not be handled", sentinel.rank)

    def _forget(self, sentinel: _Sentinel) -> None:
        """Send no more sentinels to a dead process."""
        with self._lock:
            incarnation, _ = self._workers.get(sentinel.rank, ("", None))
            if incarnation == sentinel.incarnation:
                del self._workers[sentinel.rank]


def describe_death(error: Exception) -> str:
    """Return the first meaningful line of Ray's text about a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return known_part((causes or lines or [type(error).__name__])[0])


def known_part(line: str) -> str:
    """Return the known part of a death's cause, without Ray's guesses."""
    return line.split(" Some common causes include", maxsplit=1)[0][:300]


class SilenceWatch:
    """How long each process has been silent while the coordinator was able to hear it.

    A coordinator that was stopped heard no worker: of a long pause between two looks, only the
    usual interval counts.
    """

    def __init__(self, look_s: float) -> None:
        """Expect a look every `look_s`."""
        self._longest_s = 2 * look_s
        self._looked_s: float | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, heard: Mapping[int, tuple[str, float]], now_s: float) -> dict[int, float]:
        """Return how long each rank has been silent. `heard`: the process of each rank, and the
        time of its last message."""
        looked_s = now_s if self._looked_s is None else self._looked_s
        passed_s = min(now_s - looked_s, self._longest_s)
        self._looked_s = now_s
        self._silent_s = {
            rank: self._silent_s.get(rank, 0.0) + passed_s if self._heard.get(rank) == sign else 0.0
            for rank, sign in heard.items()
        }
        self._heard = dict(heard)
        return dict(self._silent_s)
