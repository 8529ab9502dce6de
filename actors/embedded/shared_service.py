"""The coordinator's service in an engine's process, used by many threads, one at a time.

    client's thread ──send──▶ serve ─┐
    service's thread ──turn──────────┴─ lock ─▶ CoordinatorService ─▶ Coordinator

A client's thread serves its own messages and all others that have arrived, so that a step needs no
thread switch. The service's own thread waits for workers and checks the clock. No thread waits
inside the lock. If a signal interrupts a decision, the state may be inconsistent: the service ends,
and every client gets the reason.
"""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from actors.service import CoordinatorService, Decider, ServiceStatistics
from actors.transport import Inbound, Peer
from actors.transport.inprocess import InProcessPeer, InProcessServer
from kvcache.base.clock import Clock
from kvcache.base.errors import ClusterError, KVCacheError, ProtocolError
from kvcache.base.logs import get_logger
from kvcache.protocol.messages import ClientAddress, Detach, Detached, Outgoing, Unattached
from kvcache.protocol.wire import decode, encode, prose

logger = get_logger(__name__)

T = TypeVar("T")


class SharedService:
    """One coordinator behind one `InProcessServer`, for the threads of this process.

    Invariant: after `ended` is set, the coordinator is not called any more.
    """

    def __init__(
        self,
        transport: InProcessServer,
        clock: Clock,
        max_message_bytes: int,
        *,
        tick_s: float,
        stall_s: float,
        check_takeover: Callable[[], None],
    ) -> None:
        """Serve no worker yet.

        `check_takeover` is called before anything else is served, if a worker's connection has
        ended or no message was served for `stall_s`. This process was stopped then, and another one
        may have taken over.
        """
        self.ended: KVCacheError | None = None
        self._transport = transport
        self._service = CoordinatorService(transport, clock, max_message_bytes, tick_s)
        self._clock = clock
        self._tick_ms = math.ceil(tick_s * 1000)
        self._stall_s = stall_s
        self._check_takeover = check_takeover
        self._served_s = clock.now()
        self._num_disconnections = 0
        self._coordinator: Decider | None = None
        self._lock = threading.RLock()
        self._poller = select.poll()
        self._poller.register(transport.fileno(), select.POLLIN)
        self._has_more = False

    def open(self, coordinator: Decider, start: Callable[[], list[Outgoing]]) -> None:
        """Pass messages to `coordinator` from now on; first send what `start` returns. Raises what
        `start` raises."""
        with self._lock:
            outgoing = start()
            self._coordinator = coordinator
            self._service.open(coordinator, outgoing)

    def connect(self, peer: Peer) -> InProcessPeer:
        """Return a new connection for a client of this process. Raises the error that ended the
        service."""
        with self._lock:
            self._require_going_on()
            return self._transport.connect(peer, self._serve)

    def call(self, action: Callable[[], T]) -> T:
        """Run `action` while no message is served; return its result."""
        with self._lock:
            return action()

    def ask(self, action: Callable[[], T]) -> T:
        """Run `action` as `call` does; it may make decisions. Raises the error that ended the
        service."""
        with self._lock:
            self._require_going_on()
            return action()

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send messages. Only inside `ask`."""
        self._service.send(outgoing)

    def turn(self) -> None:
        """Wait for workers until the next tick, and serve them. For the service's own thread."""
        if not self._has_more:
            self._poller.poll(self._tick_ms)
        with self._lock:
            arrived = self._transport.receive(0.0)
            self._look_around()
            if self.ended is None:
                try:
                    self._service.serve(arrived)
                    self._service.tick()
                except BaseException as error:
                    self._fail(error)
                    raise
            self._has_more = self._transport.has_arrived()

    def end(self, reason: KVCacheError) -> None:
        """Stop serving: everything that clients have scheduled is void, for `reason`. Only the
        first reason counts."""
        with self._lock:
            if self.ended is None:
                self.ended = reason
                for peer in self._transport.peers():
                    self._part_from(peer)

    def statistics(self) -> ServiceStatistics:
        return self._service.statistics()

    # --- inside

    def _serve(self, inbound: Inbound, end: InProcessPeer) -> None:
        """Serve a message of a client of this process, in the client's thread."""
        with self._lock:
            arrived: list[Inbound] = []
            if self.ended is None:
                arrived = self._transport.receive(0.0)
                self._look_around()
            if self.ended is not None:
                self._answer_after_the_end(inbound, end)
                return
            try:
                self._service.serve((*arrived, inbound))
            except BaseException as error:
                self._fail(error)
                raise
            if self._transport.has_arrived():  # sending may have consumed the signal
                self._transport.wake()

    def _require_going_on(self) -> None:
        ended = self.ended
        if ended is not None:
            raise type(ended)(str(ended))

    def _look_around(self) -> None:
        """If there is reason for doubt, check whether this process still owns the cluster."""
        now_s, num_disconnections = self._clock.now(), self._transport.num_disconnections
        has_stalled = now_s - self._served_s > self._stall_s
        # Reset before the check: a process that is stopped during it checks again.
        self._served_s = now_s
        if has_stalled or num_disconnections != self._num_disconnections:
            self._num_disconnections = num_disconnections
            if self.ended is None:
                self._check_takeover()

    def _fail(self, error: BaseException) -> None:
        """Handle an error or a signal in the middle of a decision."""
        logger.error("the coordinator in this process has ended: %r", error)
        self.end(ClusterError(f"the coordinator in this process has ended by an error: {error!r}"))

    def _part_from(self, end: InProcessPeer) -> None:
        """Tell a client at once that the epoch is over, in a way that it accepts."""
        address, coordinator = end.peer.address, self._coordinator
        if isinstance(address, ClientAddress):
            epoch = 1 + (0 if coordinator is None else coordinator.epoch)
            end.put(encode(Unattached(address.client_id, epoch, prose(str(self.ended)))))

    def _answer_after_the_end(self, inbound: Inbound, end: InProcessPeer) -> None:
        """Refuse a client's message, or confirm that it detaches."""
        try:
            message = decode(inbound.payload)
        except ProtocolError:
            return
        if isinstance(message, Detach):
            end.put(encode(Detached(message.client_id, message.epoch)))
        else:
            self._part_from(end)
