"""One rank in any process: a `KVCacheWorker`, its connection, and its start-up.

    report ─▶ (the launcher plans) ─▶ allocate ─▶ attach ─▶ poll, poll, poll ... ─▶ close

`WorkerActor` polls from its own thread. An engine that keeps the KV cache inside its own actors
makes an `EmbeddedWorker` there and polls from its own loop, without another thread. This module
is independent of Ray; worker.py has the actor methods that forward the cluster's calls.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import torch

from actors.names import memory_service_address
from actors.processes import started_ticks
from actors.reports import NodeAddress, ProcessStatistics, WorkerReport
from actors.transport import Endpoint, Peer, PeerTransport, TransportStatistics, worker_peer
from actors.transport.mailbox import Mailbox
from kvcache.base.clock import Clock, SystemClock
from kvcache.base.errors import ConfigurationError, NotRunningError, ProtocolError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import Faults
from kvcache.config import ClusterConfig, layer_specs
from kvcache.config.sections import Location
from kvcache.memory_service.client import MemoryServiceAddress
from kvcache.planner import Plan, plan_fingerprint, rank_layout_fingerprint, rank_memory
from kvcache.protocol.messages import Message, ToWorker
from kvcache.protocol.wire import decode, encode
from kvcache.requests.hashing import get_hash_fn
from kvcache.specs import KVCacheConfig, KVCacheSpec
from kvcache.worker.files.format import files_bound
from kvcache.worker.files.tier import FileTierSettings
from kvcache.worker.host_memory.shared_memory import available_memory_bytes
from kvcache.worker.settings import WorkerSettings
from kvcache.worker.worker import KVCacheWorker

logger = get_logger(__name__)

MAX_QUEUED_BLOCKS = 8192
"""Blocks that wait for the file threads: more than are ever spilled and fetched at once."""

TO_WORKER = get_args(ToWorker)

Connect = Callable[[Endpoint, Peer, int, Mailbox], PeerTransport]
"""Opens a worker's end to a coordinator: endpoint, peer, limit in bytes, and the mailbox for
payloads that arrive as calls."""

MAILBOX_CAPACITY = 4096


USABLE_SHARE = 0.8
"""Share of free memory to use; the rest is for activations, staging and other processes."""


class EmbeddedWorker:
    """The rank of this process, from its first report to its end.

    One thread at a time polls; other threads may call everything else. `worker` exists once
    allocated. Unless `must_have_files`, the rank runs without files if its directory is unusable.
    """

    def __init__(
        self,
        config: ClusterConfig,
        place: int,
        connect: Connect,
        *,
        specs: Mapping[str, KVCacheSpec] | None = None,
        clock: Clock | None = None,
        is_threaded: bool = False,
    ) -> None:
        """Set up the process at `place`, without allocating or connecting.

        `specs`: the model's layers on this rank; default: the configuration's. `is_threaded`:
        another thread only polls, so that the engine need not.
        """
        self._is_threaded = is_threaded
        self._last_poll_s = 0.0
        self._config = config
        self._place = place
        self._connect = connect
        self._specs = dict(layer_specs(config)[place] if specs is None else specs)
        self._clock = SystemClock() if clock is None else clock
        self.mailbox = Mailbox(MAILBOX_CAPACITY)
        self.incarnation = secrets.token_hex(8)
        self.must_have_files = True
        self.on_close: Callable[[], None] | None = None
        """The owner's hook; called first when this worker closes."""
        self._polling = threading.Lock()
        self._worker: KVCacheWorker | None = None
        self._plan: Plan | None = None
        self._report: WorkerReport | None = None
        self._transport: PeerTransport | None = None
        self._pending_endpoint: Endpoint | None = None
        self._carried = TransportStatistics()
        self._malformed = self._misdirected = 0
        self._faults = Faults("a worker's message loop")
        self._max_message_bytes = config.transport.max_message_bytes
        self._tick_s = min(config.transport.resend_s, config.transport.heartbeat_s) / 4
        self._next_tick_s = 0.0
        self._is_closed = False
        self._watching = threading.Condition()
        self._watched_epoch = -1

    @property
    def config(self) -> ClusterConfig:
        """The cluster's configuration."""
        return self._config

    @property
    def worker(self) -> KVCacheWorker:
        """The rank's tensors, tables and labels. Raises NotRunningError before `allocate`."""
        if self._worker is None:
            raise NotRunningError(
                f"the worker at place {self._place} has no plan yet: wait for the launch to return"
            )
        return self._worker

    # --- start-up; the launcher calls these in this order

    def report(self, node: NodeAddress, gpu_ids: Sequence[str], num_sharing: int) -> WorkerReport:
        """Return this rank's layers and usable memory. Changes nothing."""
        free_bytes = free_memory_bytes(self._config)
        self._report = WorkerReport(
            place=self._place,
            incarnation=self.incarnation,
            process_id=os.getpid(),
            node=node,
            gpu_ids=tuple(gpu_ids),
            specs=self._specs,
            memory=rank_memory(
                self._config, plannable_bytes(self._config, free_bytes, num_sharing)
            ),
            free_bytes=free_bytes,
            started_ticks=started_ticks(os.getpid()),
        )
        return self._report

    def allocate(self, rank: int, plan: Plan) -> str:
        """Become `rank` of `plan`: allocate its tensors. Return the plan's fingerprint.

        The fingerprint is computed here, from the received plan. Raises as `KVCacheWorker` does.
        """
        config = self._config
        settings = WorkerSettings(
            rank=rank,
            kv_cache_config=plan.configs[rank],
            fingerprint=plan_fingerprint(plan.configs),
            layout_fingerprint=rank_layout_fingerprint(config, plan, rank),
            incarnation=self.incarnation,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=plan.max_model_len,
            device=config.workers.device,
            digest_bytes=get_hash_fn(config.cache.hash_algorithm).digest_bytes,
            is_content_checking=config.content_check.enabled,
            repeat_interval_s=config.transport.resend_s,
            heartbeat_interval_s=config.transport.heartbeat_s,
            held_up_s=config.deadlines.held_up_s,
            max_buffered=4 * config.transport.window,
            max_report_bytes=min(2**20, config.transport.max_message_bytes // 4),
            memory_service=self._service(),
            file_tier=self._file_tier(plan.configs[rank]),
            verify=config.offload.verify,
            copy_priority=config.offload.copy_priority,
            copy_threads=config.offload.copy_threads,
        )
        poll = None if self._is_threaded else self.poll
        self._worker = KVCacheWorker(settings, clock=self._clock, poll=poll, on_news=self.wake)
        self._plan = plan
        logger.info(
            "rank %d has %d blocks on %s, process %s of place %d",
            rank,
            settings.kv_cache_config.num_blocks,
            settings.device,
            self.incarnation,
            self._place,
        )
        return settings.fingerprint

    def _service(self) -> MemoryServiceAddress | None:
        """Return this node's memory service, if the configuration has memory kept."""
        offload = self._config.offload
        if offload.host_memory_per_rank is None or not offload.keeps_memory:
            return None
        node_id = "" if self._report is None else self._report.node.node_id
        return MemoryServiceAddress(
            memory_service_address(self._config.name, node_id), self._config.name
        )

    def _file_tier(self, plan: KVCacheConfig) -> FileTierSettings | None:
        disk = self._config.offload.disk
        if disk is None:
            return None
        location = Location.of(disk.directory)
        return FileTierSettings(
            location.root,
            self._config.name,
            below=location.below,
            threads=disk.num_threads,
            max_queued_blocks=MAX_QUEUED_BLOCKS,
            max_bytes=files_bound(
                disk.capacity_per_rank,
                plan.disk_blocks,
                max(group.kv_cache_spec.block_size for group in plan.kv_cache_groups),
            ),
            sync=disk.sync,
            must_work=self.must_have_files,
        )

    def assignment(self) -> tuple[int, Plan, WorkerReport]:
        """Return the rank, plan and report. Raises NotRunningError before `allocate`."""
        rank = self.worker.settings.rank
        if self._plan is None or self._report is None:
            raise NotRunningError(f"the worker at place {self._place} has made no report yet")
        return rank, self._plan, self._report

    def attach(self, endpoint: Endpoint) -> None:
        """Connect to the coordinator at `endpoint` with the next poll, and to no other."""
        self._pending_endpoint = endpoint
        self.wake()

    def poll_until_granted(self) -> None:
        """Poll until a coordinator has taken this worker over, at most for one heartbeat, so that
        start-up does not wait for the engine's first poll."""
        give_up_s = self._clock.now() + self._config.transport.heartbeat_s
        while not (self._is_closed or self.worker.epoch or self._clock.now() > give_up_s):
            self.poll(self._tick_s)

    # --- service

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Serve what has arrived; wait for it at most `timeout_s`. Return whether anything arrived.

        Call it often: between forwards, and while the engine is idle. Raises the error of a message
        that failed; from then on ClusterError: see `KVCacheWorker.on_messages`.
        """
        with self._polling:
            self._last_poll_s = now_s = self._clock.now()
            if self._is_closed or self._worker is None:
                return False
            if self._pending_endpoint is not None:
                self._reconnect(self._pending_endpoint)
            transport = self._transport
            if transport is None:
                return False
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + self._tick_s
                self._send(transport, self._worker.on_tick())
            return self._serve(self._worker, transport, timeout_s)

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread."""
        transport = self._transport
        if transport is not None:
            transport.wake()

    def statistics(self) -> ProcessStatistics:
        """Return the transferred and refused messages, frozen."""
        transport = self._transport
        carried = self._carried
        if transport is not None:
            carried += transport.statistics()
        faults = self._faults.count + carried.faults
        return ProcessStatistics(carried, self._malformed, self._misdirected, faults)

    # --- sentinel

    def watch(self, epoch: int) -> int:
        """Return when a newer epoch watches, or this worker closes; any other end of the call
        proves that the process is dead. Return the newest epoch that watched.

        During this call the worker counts as alive for its coordinator, even if the engine is too
        busy to poll.
        """
        heartbeat_s = self._config.transport.heartbeat_s
        with self._watching:
            self._watched_epoch = max(self._watched_epoch, epoch)
            self._watching.notify_all()
        while True:
            with self._watching:
                self._watching.wait_for(lambda: self._is_released(epoch), heartbeat_s)
                if self._is_released(epoch):
                    return self._watched_epoch
            if not self._is_threaded and self._clock.now() - self._last_poll_s >= heartbeat_s:
                self.poll()

    def close(self) -> None:
        """Release connection and tensors. Repeatable."""
        if self.on_close is not None:
            self.on_close()
        self._is_closed = True
        self.wake()
        with self._polling:
            self._disconnect()
            if self._worker is not None:
                self._worker.close()
        with self._watching:
            self._watching.notify_all()

    def _is_released(self, epoch: int) -> bool:
        return self._is_closed or self._watched_epoch > epoch

    def _reconnect(self, endpoint: Endpoint) -> None:
        self._pending_endpoint = None
        self._disconnect()
        rank = self.worker.settings.rank
        logger.info("rank %d connects to %s", rank, endpoint.address)
        self._transport = self._connect(
            endpoint, worker_peer(rank, self.incarnation), self._max_message_bytes, self.mailbox
        )
        self.worker.introduce()

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._carried += self._transport.statistics()
            self._transport.close()
            self._transport = None

    def _serve(self, worker: KVCacheWorker, transport: PeerTransport, timeout_s: float) -> bool:
        receive = transport.receive_or_wake if worker.is_transferring else transport.receive
        payloads = receive(min(timeout_s, self._tick_s))
        if payloads:
            num_plain, acknowledgement = worker.on_plain_steps(payloads)
            if num_plain:
                transport.send(acknowledgement)
            if num_plain < len(payloads):
                self._take(worker, transport, payloads[num_plain:])
        if worker.has_due_forwards or not payloads:
            self._send(transport, worker.run_due_forwards())
        return bool(payloads)

    def _take(
        self, worker: KVCacheWorker, transport: PeerTransport, payloads: Sequence[bytes]
    ) -> None:
        """Make the worker execute its messages among `payloads`; count and answer the others."""
        messages: list[Message] = []
        rank = worker.settings.rank
        for payload in payloads:
            try:
                message = decode(payload, self._max_message_bytes)
            except ProtocolError as error:
                self._malformed += 1
                logger.warning(
                    "rank %d: a message of the coordinator cannot be read: %s", rank, error
                )
                self._send(transport, worker.on_unreadable(payload, str(error)))
                continue
            except Exception as error:
                self._malformed += 1
                self._faults.note("the bytes of a message", error)
                continue
            if isinstance(message, TO_WORKER):
                messages.append(message)
            else:
                self._misdirected += 1
                kind = type(message).__name__
                logger.warning("rank %d drops a message: %s is for others", rank, kind)
        self._send(transport, worker.on_messages(messages))

    def _send(self, transport: PeerTransport, messages: Sequence[Message]) -> None:
        """Send; a message that cannot be sent is replaced by a shorter one."""
        for message in messages:
            try:
                payload = encode(message, self._max_message_bytes)
            except ProtocolError as error:
                self.worker.say_less(type(message).__name__, str(error))
            else:
                transport.send(payload)


def free_memory_bytes(config: ClusterConfig) -> int:
    """Return the free bytes of this rank's device, or the configured amount. Raises
    ConfigurationError if they cannot be determined."""
    configured = config.cache.memory_per_rank
    if configured is not None:
        return configured
    if config.workers.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    available = available_memory_bytes()
    if available is None:
        raise ConfigurationError(
            "the free memory of this machine cannot be read: set cache.memory_per_rank, for "
            "instance to 256MiB"
        )
    return available


def plannable_bytes(config: ClusterConfig, free_bytes: int, num_sharing: int) -> int:
    """Return the bytes that one of `num_sharing` ranks on the same device may use."""
    if config.cache.memory_per_rank is not None:
        return free_bytes
    return int(free_bytes * USABLE_SHARE) // max(1, num_sharing)
