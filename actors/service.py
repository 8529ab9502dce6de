"""The coordinator's message loop: bytes in, decisions by the plain Coordinator, bytes out.

    transport ──payload──▶ decode ──▶ Coordinator.on_* ──Outgoing──▶ encode once ──▶ transport

Independent of Ray, so that it runs in the coordinator actor, in an engine's driver and in tests.
Payloads that are no message, have a false sender or must not be obeyed are counted and dropped. An
error in a decision ends the epoch, never the loop: the epoch's state is dropped, and the next epoch
rebuilds it from the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, get_args

from actors.transport import Inbound, ServerTransport, TransportStatistics
from kvcache.base.clock import Clock
from kvcache.base.errors import ProtocolError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import Faults, LoopStatistics
from kvcache.protocol.messages import Address, FromClient, FromWorker, Outgoing, WorkerAddress
from kvcache.protocol.wire import decode, encode

logger = get_logger(__name__)

FROM_WORKER = get_args(FromWorker)
FROM_CLIENT = get_args(FromClient)


class Decider(Protocol):
    """The part of the Coordinator that the loop uses. Each call returns messages to send."""

    @property
    def epoch(self) -> int:
        """The present epoch."""

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        """Take a worker's message. Raises ProtocolError for one that must not be obeyed."""

    def on_plain_applied(self, rank: int, payload: bytes) -> bool:
        """Take a worker's `Ack` without decoding it completely; return whether it was taken."""

    def settle(self) -> list[Outgoing]:
        """Return what the acks taken by `on_plain_applied` have made possible."""

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        """Take a client's message. Raises ProtocolError for one that must not be obeyed."""

    def on_client_lost(self, client_id: str) -> None:
        """Note that a client's last connection has ended."""

    def on_unreadable(self, sender: Address, payload: bytes, reason: str) -> list[Outgoing]:
        """Take a payload that is not a message, for `reason`; return the answer to its sender."""

    def on_unsendable(self, item: Outgoing, reason: str) -> list[Outgoing]:
        """Return a substitute for a message that cannot be sent, for `reason`."""

    def on_tick(self) -> list[Outgoing]:
        """Do the work that is due by the clock."""

    def on_error(self, reason: str) -> list[Outgoing]:
        """Continue after an error in a decision, with new state: the old one may be
        inconsistent."""


@dataclass(frozen=True)
class ServiceStatistics:
    """What the loop has transferred and refused.

    `malformed`: payloads that are no message, `last_malformed` describes the last. `impersonated`:
    messages with a false sender. `refused`: messages that the coordinator must not obey.
    `unsendable`: messages that could not be sent. `early`: before it was started. `faults`:
    unexpected errors, `last_fault` describes the last; one in a decision ended the epoch.
    """

    transport: TransportStatistics
    malformed: int
    impersonated: int
    refused: int
    early: int
    faults: int = 0
    last_fault: str = ""
    last_malformed: str = ""
    unsendable: int = 0


def with_faults(loop: LoopStatistics, service: ServiceStatistics) -> LoopStatistics:
    """Return a message loop's statistics with the errors that its turns survived."""
    count = loop.num_faults + service.faults + service.transport.faults
    last = service.last_fault or loop.last_fault or "of a connection"
    return replace(loop, num_faults=count, last_fault=last if count else "")


class CoordinatorService:
    """One coordinator behind one transport. The thread that calls `turn` owns it."""

    def __init__(
        self, transport: ServerTransport, clock: Clock, max_message_bytes: int, tick_s: float
    ) -> None:
        """Start without a decider: messages are counted and dropped until `open`."""
        self.transport = transport
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._tick_s = tick_s
        self._next_tick_s = clock.now() + tick_s
        self._decider: Decider | None = None
        self._malformed = self._impersonated = self._refused = self._early = 0
        self._unsendable = 0
        self._last_malformed = ""
        self._faults = Faults("the coordinator's message loop")
        self._error = ""  # an error after which the state has not been dropped yet

    def open(self, decider: Decider, outgoing: Sequence[Outgoing]) -> None:
        """Pass messages to `decider` from now on; first send `outgoing`."""
        self._decider = decider
        self.send(outgoing)

    def turn(self) -> None:
        """Wait for messages until the next tick, and serve them. Call it repeatedly."""
        self.tick()
        self.serve(self.transport.receive(self._tick_s))

    def tick(self) -> None:
        """Do the work that is due by the clock."""
        if self._error:
            self.send(self._drop_state())
        now_s = self._clock.now()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self._tick_s
            lost = self.transport.take_lost_clients()  # their last messages have been served
            decider = self._decider
            if decider is not None:

                def look() -> list[Outgoing]:
                    for client_id in lost:
                        decider.on_client_lost(client_id)
                    return decider.on_tick()

                self.send(self._decide("a look at the clock", look))

    def serve(self, arrived: Sequence[Inbound]) -> None:
        """Serve messages that arrived together, in order."""
        decider, has_plain = self._decider, False
        outgoing: list[Outgoing] = []
        for inbound in arrived:
            address = inbound.peer.address
            try:
                if (
                    decider is not None
                    and type(address) is WorkerAddress
                    and decider.on_plain_applied(address.rank, inbound.payload)
                ):
                    has_plain = True
                else:
                    outgoing += self._take(inbound)
            except Exception as error:
                outgoing += self._on_error(f"a message of {address}", error)
        if has_plain and decider is not None:
            outgoing += self._decide("an acknowledgement", decider.settle)
        if len(arrived) == 1:
            # Nothing to batch: send to the ranks before the answer to the client is encoded.
            for item in outgoing:
                self.send((item,))
        elif outgoing:
            self.send(outgoing)

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Encode each message once and send it to its receivers. Messages for the same receivers
        are sent together. A message that cannot be sent may be replaced by another one."""
        unsendable = self._send(outgoing)
        if unsendable and (decider := self._decider) is not None:
            for item, reason in unsendable:
                what = f"a message to {item.to} that cannot be sent"
                self._send(self._decide(what, partial(decider.on_unsendable, item, reason)))

    def _send(self, outgoing: Sequence[Outgoing]) -> list[tuple[Outgoing, str]]:
        """Send; return the messages that cannot be sent, and why."""
        by_receivers: dict[tuple[Address, ...], list[bytes]] = {}
        unsendable: list[tuple[Outgoing, str]] = []
        for item in outgoing:
            try:
                payload = encode(item.message, self._max_message_bytes)
            except ProtocolError as error:
                self._unsendable += 1
                logger.error("not sent to %s: %s", item.to, error)
                unsendable.append((item, str(error)))
                continue
            except Exception as error:
                self._unsendable += 1
                reason = self._faults.note(f"a message to {item.to}", error)
                unsendable.append((item, reason))
                continue
            by_receivers.setdefault(item.to, []).append(payload)
        for receivers, payloads in by_receivers.items():
            self.transport.send(receivers, *payloads)
        return unsendable

    def statistics(self) -> ServiceStatistics:
        return ServiceStatistics(
            transport=self.transport.statistics(),
            malformed=self._malformed,
            impersonated=self._impersonated,
            refused=self._refused,
            early=self._early,
            faults=self._faults.count,
            last_fault=self._faults.last,
            last_malformed=self._last_malformed,
            unsendable=self._unsendable,
        )

    def _decide(self, what: str, decide: Callable[[], list[Outgoing]]) -> list[Outgoing]:
        """Return a decision's messages; after an error, note it and begin a new epoch."""
        try:
            return decide()
        except Exception as error:
            return self._on_error(what, error)

    def _on_error(self, what: str, error: Exception) -> list[Outgoing]:
        """Note an error; make the decider drop its possibly inconsistent state."""
        self._error = self._faults.note(what, error)
        return self._drop_state()

    def _drop_state(self) -> list[Outgoing]:
        """Drop the state. Raises what the decider raises; the next turn then tries again."""
        outgoing = [] if self._decider is None else self._decider.on_error(self._error)
        self._error = ""
        return outgoing

    def _take(self, inbound: Inbound) -> list[Outgoing]:
        """Return the messages to send for a received one; count one that must not be obeyed."""
        address, decider = inbound.peer.address, self._decider
        try:
            message = decode(inbound.payload, self._max_message_bytes)
        except ProtocolError as error:
            logger.warning("a message of %s cannot be read: %s", address, error)
            return self._on_unreadable(inbound, str(error))
        except Exception as error:
            return self._on_unreadable(inbound, self._faults.note(f"the bytes of {address}", error))
        if decider is None:
            self._early += 1
            return []
        try:
            if isinstance(address, WorkerAddress):
                if isinstance(message, FROM_WORKER) and message.rank == address.rank:
                    return decider.on_worker_message(address.rank, message)
            elif isinstance(message, FROM_CLIENT) and message.client_id == address.client_id:
                return decider.on_client_message(message)
        except ProtocolError as error:
            self._refused += 1
            logger.warning("a message of %s is refused: %s", address, error)
            return []
        self._impersonated += 1
        logger.warning("%s sends a %s in another's name", address, type(message).__name__)
        return []

    def _on_unreadable(self, inbound: Inbound, reason: str) -> list[Outgoing]:
        """Count a payload that is not a message; return the answer to its sender."""
        address, decider = inbound.peer.address, self._decider
        self._malformed += 1
        self._last_malformed = f"{address}: {reason}"
        if decider is None:
            return []
        return decider.on_unreadable(address, inbound.payload, reason)
