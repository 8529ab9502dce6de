"""Finds the coordinator: at the address that is set, or on Ray, where an actor has it.

A process of its own asks Ray. So vLLM's processes, which may use Ray themselves, never connect to
it for this, and a Ray that hangs costs them nothing but that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from kvcache.base.errors import ClusterError
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.options import CoordinatorOptions
from kvcache.sharing.access import IndexPlace, read_keys

logger = get_logger(__name__)

FIND_S = 30.0
"""How long Ray may take to say where the coordinator listens."""

SILENCE_S = 3.0
"""Ray is asked again when the coordinator has been silent for so long."""

REST_S = 5.0
MAX_REST_S = 80.0
"""Pause before Ray is asked once more about a coordinator that stays silent, doubled each time."""

_POLL_S = 0.02


class FinderProcess:
    """The process that asks Ray where the coordinator `name` listens. Use `answer` until there is
    one, or `close`."""

    def __init__(self, name: str) -> None:
        """Start it; raises ClusterError if that is not possible."""
        self._name = name
        self._give_up_s = time.monotonic() + FIND_S
        command = [sys.executable, "-m", "actors.vllm_coordinator", name, str(FIND_S)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise self._problem(str(error)) from error

    def answer(self) -> IndexPlace | None:
        """Return the place, None as long as there is no answer. Does not wait.

        Raises ClusterError, which says what is wrong and the remedy; the process is over then.
        """
        if self._process.poll() is None:
            if time.monotonic() < self._give_up_s:
                return None
            self.close()
            raise self._problem(f"Ray has not said within {FIND_S:g} s where it listens")
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            lines = pipe.read().splitlines()
        try:
            told = json.loads(lines[-1])
        except (IndexError, ValueError):
            status = self._process.returncode
            raise self._problem(f"the process that asks Ray ended with status {status}") from None
        if "place" not in told:
            raise self._problem(told["problem"])
        return IndexPlace.of_plain(told["place"])

    def close(self) -> None:
        """End the process. Repeatable."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _problem(self, what: str) -> ClusterError:
        return ClusterError(f"coordinator.ray: {self._name!r}: {what}")


def find_index(options: CoordinatorOptions) -> IndexPlace:
    """Return where the coordinator listens, and its keys. On Ray, waits at most `FIND_S`.

    Raises ConfigurationError for keys that cannot be read; ClusterError, with the remedy, if there
    is no Ray, or no such coordinator on it.
    """
    if options.ray is None:
        assert options.address is not None
        return IndexPlace(
            options.address, None if options.keys is None else read_keys(options.keys)
        )
    finder = FinderProcess(options.ray)
    try:
        while (place := finder.answer()) is None:
            time.sleep(_POLL_S)
    except BaseException:
        finder.close()
        raise
    return place


class IndexSearch:
    """Asks Ray again where the coordinator listens, whenever it is silent. Never waits."""

    def __init__(self, name: str, place: IndexPlace) -> None:
        """Begin with the `place` known so far; without a `name`, it is not on Ray, and stays."""
        self._name, self._place = name, place
        self._finder: FinderProcess | None = None
        self._ask_at_s, self._rest_s = 0.0, REST_S

    def moved_to(self, silent_s: float, now_s: float) -> IndexPlace | None:
        """Return, once, the place of a coordinator that listens elsewhere than it did; it has been
        silent for `silent_s`."""
        if self._finder is None:
            if silent_s < SILENCE_S:
                self._rest_s = REST_S
            elif self._name and now_s >= self._ask_at_s:
                self._begin(now_s)
            return None
        try:
            place = self._finder.answer()
            if place is None:
                return None
        except ClusterError as error:
            self._warn(error)
            place = self._place
        self._finder = None
        if place == self._place:
            return None
        self._place = place
        return place

    def _begin(self, now_s: float) -> None:
        self._ask_at_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        try:
            self._finder = FinderProcess(self._name)
        except ClusterError as error:
            self._warn(error)

    def _warn(self, error: ClusterError) -> None:
        logger.warning("%s: blocks are not shared with other nodes meanwhile", error)

    def close(self) -> None:
        """End the process that asks Ray, if it runs."""
        if self._finder is not None:
            self._finder.close()
            self._finder = None
