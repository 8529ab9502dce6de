"""The roles of a forked process: a worker, the coordinator, or an engine with its client.

The same plain parts, sockets and state file as everywhere, without Ray. The supervisor does Ray's
part: it starts processes, reports deaths, and says where the coordinator listens.
"""

from __future__ import annotations

import json
import os
import select
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from actors.assembly import make_coordinator
from actors.client import KVCacheClient
from actors.coordinator import tick_s
from actors.loop import calm_garbage_collector
from actors.reports import NodeAddress
from actors.service import CoordinatorService
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.mailbox import Mailbox
from actors.transport.node_server import NodeServer
from actors.transport.protocol import TransportLimits
from actors.transport.unix_peer import UnixPeer
from actors.transport.unix_server import unix_address
from actors.workers.embedding import EmbeddedWorker
from kvcache.base.clock import Clock, StallAwareClock, SystemClock
from kvcache.base.errors import ClusterError, DeadlineError, InvariantError
from kvcache.config import ClusterConfig, parse_config
from kvcache.coordinator import Coordinator
from kvcache.planner import Plan, plan_kv_cache, plan_options
from tests.chaos.control import Control
from tests.chaos.fault_trigger import FaultTrigger, FaultyPeer, FaultyServer
from tests.chaos.game import Dealt, play_game
from tests.protocol.file_state_store import FileStateStore

HERE = NodeAddress("here", "127.0.0.1")
ENDPOINT_FILE = "endpoint"
STATE_FILE = "state"
TURN_S = 0.02
START_S = 10.0
DIAL_S = 5.0


def play(message: dict[str, Any], control: Control) -> int:
    """Play the given role until told to close; return the exit code."""
    try:
        config = parse_config(json.loads(message["config"]))
        trigger = FaultTrigger.of(message.get("fault"))
        match message["kind"]:
            case "worker":
                be_worker(config, message["rank"], control, trigger)
            case "coordinator":
                be_coordinator(config, message, control, trigger)
            case _:
                be_engine(config, message, control, trigger)
        return 0
    except BaseException:
        control.send({"failed": f"{message['kind']} {os.getpid()}: {traceback.format_exc()}"})
        return 1


# --- a worker


def be_worker(config: ClusterConfig, rank: int, control: Control, trigger: FaultTrigger) -> None:
    """Keep a rank's cache."""
    worker = EmbeddedWorker(config, rank, partial(connect, trigger), is_threaded=True)
    plan = plan_of(config, worker)
    worker.allocate(rank, plan)
    calm_garbage_collector()
    control.send({"ready": worker.incarnation})
    is_attached = False
    while not control.is_over:
        for order in control.receive():
            match order["do"]:
                case "attach":
                    worker.attach(Endpoint(order["address"]))
                    is_attached = True
                case "report":
                    control.send({"report": order["report"], **describe_worker(worker)})
                case "close":
                    worker.close()
                    return
        if is_attached:
            worker.poll(TURN_S)
        else:
            select.select([control], [], [], TURN_S)


def plan_of(config: ClusterConfig, worker: EmbeddedWorker | None = None) -> Plan:
    """Return the plan, which every process makes for itself: all ranks are alike here."""
    num_ranks = config.parallel.num_ranks
    workers = [EmbeddedWorker(config, rank, refuse_connection) for rank in range(num_ranks)]
    if worker is not None:
        workers[0] = worker
    reports = [one.report(HERE, (), num_ranks) for one in workers]
    return plan_kv_cache(
        plan_options(config), [r.specs for r in reports], [r.memory for r in reports]
    )


def connect(
    trigger: FaultTrigger, endpoint: Endpoint, peer: Peer, max_message_bytes: int, mailbox: Mailbox
) -> PeerTransport:
    """Return a worker's or client's end."""
    made: Any = FaultyPeer(UnixPeer(endpoint, peer, TransportLimits(max_message_bytes)), trigger)
    transport: PeerTransport = made
    return transport


def refuse_connection(*_: object) -> PeerTransport:
    """For workers that only report their labels."""
    raise ClusterError("no process is there")


def describe_worker(worker: EmbeddedWorker) -> dict[str, Any]:
    """Return the statistics of a rank, and inconsistencies of its state."""
    statistics = worker.worker.statistics()
    return {
        "broken": broken(worker.worker.check),
        "epoch": statistics.epoch,
        "applied_seq": worker.worker.applied_seq,
        "num_labels": len(worker.worker.labels),
        "num_failed_jobs": statistics.num_failed_jobs,
        "num_invalid": statistics.num_invalid_messages,
        "last_invalid": statistics.last_invalid_reason,
        "num_compared": statistics.num_bytes_compared,
    }


def broken(check: Any) -> str:
    """Return the message of a failed check, empty if it passes."""
    try:
        check()
    except InvariantError as error:
        return str(error)
    return ""


# --- the coordinator


def be_coordinator(
    config: ClusterConfig, message: dict[str, Any], control: Control, trigger: FaultTrigger
) -> None:
    """Take the workers over, and serve."""
    clock = StallAwareClock(SystemClock(), config.transport.heartbeat_s)
    limits = TransportLimits(config.transport.max_message_bytes)
    server = NodeServer(limits)
    address = server.bind(unix_address(), is_guarded=False)
    faulty: Any = FaultyServer(server, trigger)
    service = CoordinatorService(
        faulty, clock, config.transport.max_message_bytes, tick_s=tick_s(config)
    )
    coordinator = begin(config, message, service, clock)
    calm_garbage_collector()
    control.send({"ready": address})
    while not control.is_over:
        for order in control.receive():
            match order["do"]:
                case "lost":
                    lost = (order["rank"], order["incarnation"], "its process was killed")
                    service.send(coordinator.on_worker_lost(*lost))
                case "report":
                    control.send({"report": order["report"], **describe(coordinator, service)})
                case "close":
                    coordinator.close()
                    server.close()
                    return
        service.turn()


def begin(
    config: ClusterConfig, message: dict[str, Any], service: CoordinatorService, clock: Clock
) -> Coordinator:
    """Take an epoch; try again if another coordinator was faster."""
    store = FileStateStore(Path(message["directory"]) / STATE_FILE)
    plan, give_up_s = plan_of(config), time.monotonic() + START_S
    known = {int(rank): name for rank, name in message["incarnations"].items()}
    while True:
        coordinator = make_coordinator(config, plan, clock, store)
        try:
            service.open(coordinator, coordinator.start(known))
            return coordinator
        except ClusterError:
            if time.monotonic() > give_up_s:
                raise


def describe(coordinator: Coordinator, service: CoordinatorService) -> dict[str, Any]:
    """Return the statistics of a coordinator, and inconsistencies of its state."""
    statistics, carried = coordinator.statistics(), service.statistics()
    manager = statistics.manager
    return {
        "broken": broken(coordinator.check),
        "phase": statistics.phase,
        "epoch": statistics.epoch,
        "problem": statistics.problem,
        "num_clients": statistics.num_clients,
        "num_open_jobs": statistics.num_open_jobs,
        "num_unacknowledged": statistics.num_unacknowledged,
        "num_wrong_blocks": statistics.num_wrong_blocks,
        "last_finding": statistics.last_finding,
        "num_kept_blocks": statistics.num_kept_blocks,
        "cold_reason": statistics.cold_reason,
        "num_malformed": carried.malformed + carried.impersonated,
        "applied_seq": statistics.applied_seq,
        "manager": None if manager is None else asdict(manager),
    }


# --- an engine


class FileDialer:
    """How clients find the coordinator: the supervisor writes its address to a file. A
    `Dialing`."""

    needs_keeping_alive = True

    def __init__(self, config: ClusterConfig, directory: Path, trigger: FaultTrigger) -> None:
        self.config = config
        self._file = directory / ENDPOINT_FILE
        self._trigger = trigger

    def endpoint(self) -> Endpoint:
        """Return where the coordinator listens; raises DeadlineError if nowhere."""
        give_up_s = time.monotonic() + DIAL_S
        while True:
            try:
                return Endpoint(self._file.read_text())
            except FileNotFoundError as error:
                if time.monotonic() > give_up_s:
                    raise DeadlineError("there is no coordinator now") from error
                time.sleep(TURN_S)

    def noted(self) -> Endpoint | None:
        """Return at once: reading the file takes no waiting."""
        return None

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a client's end."""
        limit = self.config.transport.max_message_bytes
        return connect(self._trigger, endpoint, peer, limit, Mailbox(capacity=1))

    def lost_workers(self) -> str:
        """Does nothing."""
        return ""


def be_engine(
    config: ClusterConfig, message: dict[str, Any], control: Control, trigger: FaultTrigger
) -> None:
    """Play a game, and report how it ended."""
    dialer = FileDialer(config, Path(message["directory"]), trigger)
    with KVCacheClient(dialer, f"engine-{os.getpid()}") as client:
        dealt = Dealt(**message["dealt"])
        report = play_game(config, plan_of(config).max_model_len, client, dealt)
    control.send({"done": report.to_json()})
