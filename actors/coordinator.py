"""The coordinator actor: the plain Coordinator behind sockets, in a process that Ray restarts.

`__init__` starts a thread and returns at once, whatever state the cluster is in: an actor whose
`__init__` raises after a crash is dead for good, and one whose `__init__` waits blocks every call.
Everything that decides is in `kvcache.coordinator`; this class carries bytes and asks Ray.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import ray

from actors.connect import this_node
from actors.endpoints import EndpointBook
from actors.health import DeathWatch
from actors.loop import ServiceLoop
from actors.names import coordinator_name
from actors.reports import ClusterStatus, NodeAddress, RankStatus, WorkerReport
from actors.service import CoordinatorService, ServiceStatistics
from actors.state import RayStateStore
from actors.transport import Endpoint, ServerTransport
from actors.transport.curve import CurveKeys
from actors.transport.ray import RAY_SCHEME, RayServer
from actors.transport.zmq_server import ZmqLimits, ZmqServer
from kvcache.clock import SystemClock
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.errors import NotRunningError, StartupError
from kvcache.planner import Plan

logger = logging.getLogger(__name__)

CONTROL = "control"
MAIL = "mail"
COLLECT = "collect"

COORDINATOR_CONCURRENCY_GROUPS = {CONTROL: 2, MAIL: 1, COLLECT: 8}
"""Threads for calls: start-up and status; messages and long waits of the fallback transport."""

CALL_TIMEOUT_S = 10.0
READY_POLL_S = 0.002


class CoordinatorActor:
    """One cluster's coordinator. Named, restarted by Ray for ever, never retried."""
