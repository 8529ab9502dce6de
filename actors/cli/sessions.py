"""The Ray session of one command: the running Ray cluster if there is one, else one of its own.

Ray itself finds a running cluster (a job's, `ray start`'s); ray_access.py says why one that is
there cannot be joined. What a command has started it stops. A Ray whose control service (GCS) dies
meanwhile ends the process of every driver with exit code 1, which is for wrong bytes here: the
command ends itself before, with its own.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from actors.cli.outcomes import EXIT_CLUSTER
from actors.cli.ray_access import Refusal, find_refusal, refusal_behind, why_unanswered
from kvcache.base.errors import ClusterError, NotRunningError

RAY_WAITS_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
"""How long Ray lets the control service be away, as while it restarts, before it ends processes."""

LOST_S = 0.75 * RAY_WAITS_S
"""How long we let it."""

LOOK_S = LOST_S / 30
"""How often it is looked for."""


@contextmanager
def ray_session(*, may_start: bool) -> Iterator[bool]:
    """Connect to Ray for the `with` block; yield whether this command has started it. In a process
    that is connected already, it stays so.

    Raises NotRunningError when no Ray runs and `may_start` is false; ClusterError when the one that
    runs, or the one that RAY_ADDRESS names, cannot be joined. One that was not named, perhaps
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
    is_over = threading.Event()
    address = ray.get_runtime_context().gcs_address
    watch = threading.Thread(
        target=_watch, args=(address, is_over), name="kvcache-ray-watch", daemon=True
    )
    watch.start()
    try:
        yield has_started
    finally:
        ray.shutdown()  # which may wait for the control service, too
        is_over.set()


def _watch(address: str, is_over: threading.Event) -> None:
    """End the process when the control service at `address` has been away for too long. The main
    thread may hang in a call of Ray, where no exception reaches it."""
    since_s: float | None = None  # of the first look in vain, as this process may have stood still
    while not is_over.wait(LOOK_S):
        why_not = why_unanswered(address)
        now_s = time.monotonic()
        since_s = (since_s or now_s) if why_not else None
        if since_s is not None and now_s - since_s > LOST_S:
            print(
                f"kvcache: the Ray at {address} is lost: its control service (GCS) has not "
                f"answered for {LOST_S:g} s ({why_not}), and what runs there ends with it: "
                "`ray stop --force` ends what is left; start Ray again, and launch",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CLUSTER)


def _has_joined(may_start: bool) -> bool:
    """Join the Ray that runs; False, which happens only with `may_start`, if there is none."""
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
