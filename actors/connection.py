"""One client's session, its connection, and the rules that both kinds of clients share. Never
waits.

    KVCacheClient / AsyncKVCacheClient ─▶ ClientConnection ─▶ ClientSession + PeerTransport

Converts payloads and messages, notices a coordinator that has moved, and reports the steps that the
end of an epoch made void. One thread at a time may use it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Protocol, get_args

from actors.transport import Endpoint, Peer, PeerTransport, client_peer
from kvcache.base import errors
from kvcache.base.arguments import as_number, as_text
from kvcache.base.clock import Clock, SystemClock
from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    DeadlineError,
    KVCacheError,
    NotRunningError,
    ProtocolError,
    RequestError,
    SupersededError,
    WorkerLostError,
    shown,
)
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import Faults
from kvcache.client.session import ClientSession, SessionSettings, SessionState, Submitted
from kvcache.config import ClusterConfig
from kvcache.protocol.messages import CallResult, FailedForward, FromClient, ToClient
from kvcache.protocol.step import StepResult
from kvcache.protocol.wire import decode, encode

logger = get_logger(__name__)

TO_CLIENT = get_args(ToClient)

MAX_NAME_BYTES = 200
"""Longest client name. The client id adds a few characters and travels with every message."""

DETACH_LINGER_S = 0.2
"""How long sending a client's last messages may take."""

DETACH_RESENDS = 10
"""Resend intervals that a client waits for the coordinator to confirm the detaching."""

SILENCE_BEFORE_REDIAL = 3
"""Resend intervals of silence after which the coordinator may have moved."""

LOOK_S = 0.1
"""How often to read the coordinator's endpoint record once the connection has ended or the
coordinator is silent."""

STALL_BEFORE_REDIAL = 10
"""Resend intervals without progress after which to ask whether another coordinator has taken over.
A coordinator that was stopped meanwhile still answers, but has no workers any more."""


def limit_of(timeout_s: float | None, default_s: float) -> float:
    """Return the limit of a wait in seconds; raises InvalidInputError for an invalid one."""
    return default_s if timeout_s is None else as_number("timeout_s", timeout_s, 0)


class Dialing(Protocol):
    """How to reach the coordinator. The calls may take a while.

    `needs_keeping_alive`: an idle client must send a message now and then, or it is dropped.
    """

    config: ClusterConfig
    needs_keeping_alive: bool

    def endpoint(self) -> Endpoint:
        """Return the coordinator's present endpoint; raises ClusterError."""

    def noted(self) -> Endpoint | None:
        """Return the recorded endpoint for this process, or None. Asks no process that may be
        dead."""

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a new connection for `peer`."""

    def lost_workers(self) -> str:
        """Say which ranks are lost and why, empty if none is; raises ClusterError."""


class ClientConnection:
    """The part of a client that does not wait."""

    def __init__(self, dialer: Dialing, client_name: str, clock: Clock | None = None) -> None:
        """Connect without attaching. Raises ClusterError if there is no coordinator."""
        config = dialer.config
        self.dialer = dialer
        self.clock = SystemClock() if clock is None else clock
        self.settings = SessionSettings(
            window=config.transport.window,
            resend_s=config.transport.resend_s,
            heartbeat_s=config.transport.heartbeat_s,
            step_s=config.deadlines.step_s,
            forward_s=config.deadlines.forward_s,
        )
        client_id = f"{_checked_name(client_name)}-{secrets.token_hex(8)}"
        self._process_id = os.getpid()
        self.session = ClientSession(client_id, self.settings, self.clock)
        self.tick_s = min(self.settings.resend_s, self.settings.heartbeat_s) / 4
        self.malformed = 0
        self.faults = Faults("a client's connection")
        self._is_closed = False
        self._peer = client_peer(client_id)
        self._max_message_bytes = config.transport.max_message_bytes
        self._endpoint = dialer.endpoint()
        self.transport = dialer.open(self._endpoint, self._peer)
        self._num_disconnections = 0
        self._detach_by_s = 0.0
        self._heard_s = self._asked_s = self._looked_s = self._next_tick_s = self.clock.now()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that connected. Both share the socket, and
        would take each other's messages."""
        return self._process_id != os.getpid()

    def require_own_process(self) -> None:
        """Raise NotRunningError if `is_inherited`."""
        if self.is_inherited:
            raise NotRunningError(
                f"client {self.session.client_id} belongs to process {self._process_id}, from "
                "which this one was forked: make a client in this process"
            )

    def send(self, messages: Sequence[FromClient]) -> None:
        for message in messages:
            self.transport.send(encode(message, self._max_message_bytes))

    def send_step(self, submitted: Submitted) -> int:
        """Send the step that the session has just numbered and return its number.

        Raises ProtocolError for a step that cannot be encoded, for example because of a wrong type
        or the size limit. Nothing is submitted then.
        """
        try:
            payloads = [encode(m, self._max_message_bytes) for m in submitted.messages]
        except BaseException:
            self.session.take_back(submitted.step)
            raise
        for payload in payloads:
            self.transport.send(payload)
        return submitted.step

    def take(self, payloads: Sequence[bytes]) -> None:
        """Pass received payloads to the session and send its answers."""
        for payload in payloads:
            try:
                message = decode(payload, self._max_message_bytes)
            except ProtocolError as error:
                self._count_malformed(str(error))
                with self.faults.contained("a message that cannot be read"):
                    self.send(self.session.on_unreadable(payload, str(error)))
                continue
            except Exception as error:
                self.malformed += 1
                self.faults.note("the bytes of a message", error)
                continue
            if not isinstance(message, TO_CLIENT):
                self._count_malformed(f"{type(message).__name__} is not for clients")
                continue
            with self.faults.contained("a message"):
                if answers := self.session.on_message(message):
                    self.send(answers)
        if payloads:
            self._heard_s = self.clock.now()

    def _count_malformed(self, reason: str) -> None:
        self.malformed += 1
        logger.warning(
            "client %s: a message of the coordinator cannot be read: %s",
            self.session.client_id,
            reason,
        )

    def tick(self, now_s: float) -> None:
        """Do the work that is due at `now_s`."""
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self.tick_s
            self.send(self.session.on_tick())

    @property
    def may_have_moved(self) -> bool:
        """Whether silence or lack of progress has lasted so long that the coordinator's address may
        be old; while detaching, also whether the connection has ended."""
        if self.session.state is SessionState.DETACHING and self._has_ended:
            return True
        now_s, resend_s = self.clock.now(), self.settings.resend_s
        stalled_s = self.session.stalled_s
        silence_s = SILENCE_BEFORE_REDIAL * resend_s
        if now_s - self._heard_s > silence_s and stalled_s > silence_s:
            return True  # idle clients receive nothing, and need no coordinator yet
        patience_s = STALL_BEFORE_REDIAL * resend_s
        return now_s - self._asked_s > patience_s and stalled_s > patience_s

    @property
    def is_time_to_look(self) -> bool:
        """Whether the connection has ended or has been silent, and `look_for_move` has not been
        called just now."""
        now_s = self.clock.now()
        if now_s - self._looked_s < LOOK_S:
            return False
        return now_s - self._heard_s > self.settings.resend_s or self._has_ended

    @property
    def _has_ended(self) -> bool:
        """Whether the connection has ended since the last look at the endpoint record."""
        return self.transport.statistics().disconnections > self._num_disconnections

    def look_for_move(self) -> Endpoint | None:
        """Return the coordinator's recorded endpoint if it is a new one, else None.

        Any thread. Changes only the time of the next look.
        """
        self._looked_s = self.clock.now()
        noted = self.dialer.noted()
        return None if noted == self._endpoint else noted

    def put_off_redial(self) -> None:
        """Note that the coordinator could not be asked; ask again after another interval."""
        self._heard_s = self._asked_s = self.clock.now()

    def lost_workers(self) -> str:
        """Say which ranks are lost and why, empty if none is or the cause is unknown.

        Any thread. May take a while; raises SupersededError.
        """
        try:
            return self.dialer.lost_workers()
        except SupersededError:
            raise
        except ClusterError:
            return ""

    def closed_error(self) -> NotRunningError:
        return NotRunningError(f"client {self.session.client_id} is closed: make a new one")

    def redial(self, endpoint: Endpoint) -> None:
        """Reconnect to `endpoint`, which the dialer gave; no effect if it is the present one."""
        self._heard_s = self._asked_s = self.clock.now()
        if endpoint != self._endpoint and not self._is_closed:
            opened = self.dialer.open(endpoint, self._peer)
            self.transport.close()
            self.transport, self._endpoint = opened, endpoint
            self._next_tick_s = self._heard_s  # waiting messages that are due are resent at once
        self._num_disconnections = self.transport.statistics().disconnections

    def is_attached(self) -> bool:
        """Whether steps can be submitted. Raises NotRunningError once the client can never
        attach."""
        self.session.require_open()
        return self.session.state is SessionState.ATTACHED

    # --- the end

    def begin_to_detach(self) -> None:
        """Announce the detaching. Serve the connection until it `has_detached`, then close."""
        self._detach_by_s = self.clock.now() + DETACH_RESENDS * self.settings.resend_s
        self._asked_s = self._heard_s = self.clock.now()
        self.send(self.session.detach())

    def has_detached(self) -> bool:
        """Whether the coordinator has confirmed the detaching, or its time is over."""
        return self.session.state is SessionState.CLOSED or self.detach_left_s <= 0.0

    @property
    def detach_left_s(self) -> float:
        """Return the remaining time to wait for the confirmation."""
        return self._detach_by_s - self.clock.now()

    def give_up_detaching(self, error: KVCacheError) -> None:
        """Stop waiting for the confirmation: the coordinator is gone, as `error` says."""
        logger.info("client %s has nothing to detach from: %s", self.session.client_id, error)
        self.session.give_up()

    def close(self) -> None:
        """Close the connection, detached or not. Repeatable."""
        if self._is_closed or self.is_inherited:
            return
        self._is_closed = True
        session = self.session
        if session.state is SessionState.DETACHING:
            logger.warning(
                "client %s: the coordinator has not confirmed that it is detached: its requests "
                "are freed when the coordinator notices that it is gone",
                session.client_id,
            )
        elif session.state is not SessionState.CLOSED:
            self.send(session.detach())
        session.give_up()
        self.transport.close(linger_s=DETACH_LINGER_S)


class SessionView:
    """Read-only properties of a client, over its connection's session."""

    _connection: ClientConnection
    _last_seq: int

    @property
    def client_id(self) -> str:
        """The name under which steps are counted, including this incarnation."""
        return self._connection.session.client_id

    @property
    def is_attached(self) -> bool:
        """Whether steps are accepted. False from the known end of an epoch until `attach`."""
        return self._connection.session.state is SessionState.ATTACHED

    @property
    def epoch(self) -> int:
        """The epoch of new steps; forwards need it."""
        return self._connection.session.epoch

    @property
    def last_seq(self) -> int:
        """`seq` of the newest answer received; `begin_forward` waits for it."""
        return self._last_seq

    @property
    def finished_step(self) -> int:
        """Every step up to this one is known to be finished on every rank."""
        return self._connection.session.finished_step

    @property
    def failures(self) -> tuple[FailedForward, ...]:
        """Content-checked forwards that found wrong bytes."""
        return self._connection.session.failures

    @property
    def bytes_checked(self) -> int:
        """Bytes compared by content-checked forwards, over all ranks."""
        return self._connection.session.bytes_checked


def _checked_name(client_name: str) -> str:
    """Return the name of a client; raises ConfigurationError if no id can be made of it."""
    name = as_text("client_name", client_name, ConfigurationError)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigurationError(
            f"client_name is {shown(name)}, of {len(name.encode())} bytes: use at most "
            f"{MAX_NAME_BYTES}"
        )
    return name


def overdue_error(what: str, timeout_s: float) -> DeadlineError:
    """Return the error for a coordinator that did not do `what` in time."""
    return DeadlineError(
        f"the coordinator did not {what} ({timeout_s:g} s): look at the cluster's status"
    )


def lost_workers_error(error: KVCacheError, lost: str) -> KVCacheError:
    """Return the error for a void step or a client that is not attached. It names the lost ranks,
    if they are the cause."""
    return WorkerLostError(f"{lost}: {error}") if lost else error


def result_of_step(number: int, answer: StepResult | CallResult) -> StepResult:
    """Return a step's answer; raises the error it carries, RequestError for a call's answer."""
    if not isinstance(answer, StepResult):
        raise RequestError(f"number {number} was a call, not a step")
    require_served(answer)
    return answer


def result_of_call(number: int, answer: StepResult | CallResult) -> bytes:
    """Return a call's packed result; raises the error it carries, RequestError for a step's."""
    require_served(answer)
    if not isinstance(answer, CallResult):
        raise RequestError(f"number {number} was a step, not a call")
    return answer.result


def require_served(answer: StepResult | CallResult) -> None:
    """Raise the error in the answer of a refused step or call."""
    name, text = "", answer.error
    if isinstance(answer, CallResult):
        name = answer.error_type
    elif text:
        name, _, text = text.partition(": ")
    if name:
        raise error_named(name, text)


def error_named(name: str, text: str) -> KVCacheError:
    """Return an error of this package by its class name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, KVCacheError):
        return kind(text)
    return KVCacheError(f"{name}: {text}")
