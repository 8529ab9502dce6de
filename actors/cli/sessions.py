"""The Ray session of one command: the running Ray cluster if there is one, else one of its own.

Ray itself finds a running cluster (a job's, `ray start`'s); ray_access.py says why one that is
there cannot be joined. What a command has started it stops. A Ray whose control service (GCS) dies
meanwhile ends the command with an error: Ray itself would end the process without one, with exit
code 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray.exceptions import RayError

from actors.cli.outcomes import EXIT_CLUSTER
from actors.cli.ray_access import Refusal, find_refusal, refusal_behind, why_unanswered
from kvcache.errors import ClusterError, NotRunningError

LOOK_S = 1.0
"""How often the control service is looked for."""

GONE_S = 45.0
"""How long it may be away, as while it restarts on another node. Ray ends connected processes after
60 s (RAY_gcs_rpc_server_reconnect_timeout_s)."""

LAST_WORDS_S = 5.0
"""How long a command may take to end by itself then: whatever it asks Ray has no answer."""


@contextmanager
def ray_session(*, may_start: bool) -> Iterator[bool]:
    """Connect to Ray for the `with` block; yield whether this command has started it. In a process
    that is connected already, it stays so.

    Raises NotRunningError when no Ray runs and `may_start` is false; ClusterError when the one that
    runs, or the one that RAY_ADDRESS names, cannot be joined. One that nobody has named, perhaps
    somebody else's, is left alone where `may_start`.
    """
    if ray.is_initialized():
        yield False
        return
    has_started = not _has_joined(may_start)
    if has_started:
        ray.init(
            address="local",
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False,
        )
    with _ended_with_ray():
        try:
            yield has_started
        finally:
            ray.shutdown()


@contextmanager
def _ended_with_ray() -> Iterator[None]:
    """Raise ClusterError in the main thread when the control service has been away for too long;
    end the process where that does not end the command. No effect in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(str(ray.get_runtime_context().gcs_address))

    def raise_error(number: int, frame: FrameType | None) -> None:
        raise ClusterError(watch.problem)

    previous = signal.signal(signal.SIGUSR1, raise_error)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        signal.signal(signal.SIGUSR1, previous)


class _Watch(threading.Thread):
    """Looks for the control service until it is stopped, or that has been away for too long."""

    def __init__(self, address: str) -> None:
        super().__init__(name="kvcache-ray-watch", daemon=True)
        self.problem = ""
        self._address = address
        self._has_ended = threading.Event()
        self._signalling = threading.Lock()

    def stop(self) -> None:
        """Send no signal from now on."""
        with self._signalling:
            self._has_ended.set()

    def run(self) -> None:
        """Look, and see to the end."""
        since_s: float | None = None
        while not self._has_ended.wait(LOOK_S):
            now_s, why_not = time.monotonic(), why_unanswered(self._address)
            since_s = (since_s or now_s) if why_not else None
            if since_s is not None and now_s - since_s > GONE_S:
                self._end(now_s - since_s, why_not)
                return

    def _end(self, away_s: float, why_not: str) -> None:
        self.problem = (
            f"the Ray at {self._address} is lost: its control service (GCS) has not answered for "
            f"{away_s:.0f} s ({why_not}), and what runs there ends with it: `ray stop --force`, "
            "start Ray again, and launch"
        )
        main = threading.main_thread().ident
        with self._signalling:
            if main is not None and not self._has_ended.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
        if not self._has_ended.wait(LAST_WORDS_S):
            print(f"kvcache: {self.problem}", file=sys.stderr, flush=True)
            os._exit(EXIT_CLUSTER)


def _has_joined(may_start: bool) -> bool:
    """Join the Ray that runs; False, which nobody gets unless `may_start`, if there is none."""
    refusal = find_refusal()
    if refusal is None:
        try:
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        except ConnectionError as error:
            refusal = refusal_behind(error)
        except RayError as error:
            raise ClusterError(f"Ray cannot be joined: {error}") from error
        else:
            return True
    if refusal is not None:
        _pass_over(refusal, may_start)
    elif not may_start:
        raise NotRunningError("no Ray cluster is running here: start one with `ray start --head`")
    return False


def _pass_over(refusal: Refusal, may_start: bool) -> None:
    if refusal.is_named or not may_start:
        raise ClusterError(str(refusal))
    print(f"a Ray of its own is started: {refusal.what}", file=sys.stderr, flush=True)
