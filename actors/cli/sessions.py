"""The Ray session of one command: the running Ray cluster if there is one, else one of its own.

Ray itself finds a running cluster (a job's, `ray start`'s); ray_access.py says why one that is
there cannot be joined. What a command has started it stops.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from actors.cli.ray_access import Refusal, find_refusal, refusal_behind
from kvcache.errors import ClusterError, NotRunningError


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
    try:
        yield has_started
    finally:
        ray.shutdown()


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
