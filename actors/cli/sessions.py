"""The Ray session of one command: the running Ray cluster if there is one, else one of its own.

Ray itself finds a running cluster (a job's, `ray start`'s). What a command has started it stops.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from kvcache.errors import NotRunningError

PROBE_S = 3.0


@contextmanager
def ray_session(*, may_start: bool) -> Iterator[bool]:
    """Connect to Ray for the `with` block; yield whether this command has started it. In a process
    that is connected already, it stays so.

    Raises NotRunningError when no Ray runs and `may_start` is false.
    """
    if ray.is_initialized():
        yield False
        return
    has_started = False
    _require_answer(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        if not may_start:
            raise NotRunningError(
                "no Ray cluster is running here: start one with `ray start --head`"
            ) from error
        ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        has_started = True
    try:
        yield has_started
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise NotRunningError where `address`, which Ray would try for minutes, does not answer.

    Ray's own variable is looked at because Ray looks at it, too. Only host:port is tried.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise NotRunningError(
            f"RAY_ADDRESS is {address}, and nothing answers there ({error}): start Ray there, "
            "correct it, or unset it"
        ) from error
