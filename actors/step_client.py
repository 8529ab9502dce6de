"""Steps of the synchronous client: send them, and wait for their results.

    with cluster.client() as client:
        result = client.step(StepRequest(...))             one step, and its answer
        number = client.submit(StepRequest(...))           pipelined: send now,
        result = client.wait_result(number)                look later
        client.wait_finished(number)

Every wait has a deadline. A missing answer raises DeadlineError; the request may or may not have
been executed. No request is ever sent again under another number. Threads may share a client: one
at a time reads the socket and wakes the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from actors.calls import SentTokens
from actors.connection import (
    ClientConnection,
    Dialing,
    SessionView,
    limit_of,
    lost_workers_error,
    overdue_error,
    result_of_step,
)
from actors.transport import Endpoint
from kvcache.base.arguments import as_int
from kvcache.base.errors import (
    BacklogFullError,
    DeadlineError,
    KVCacheError,
    RequestError,
    StaleEpochError,
)
from kvcache.base.serving_loop import ServingLoop
from kvcache.client.session import SessionState, Submitted
from kvcache.protocol.messages import CallResult
from kvcache.protocol.step import StepRequest, StepResult

T = TypeVar("T")

CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits for a thread that is reading."""


class StepClient(SessionView):
    """Steps and waits. `KVCacheClient` adds the per-request calls."""

    def __init__(self, dialer: Dialing, client_name: str = "client") -> None:
        """Connect and attach.

        Raises NotRunningError if there is no cluster, DeadlineError if it does not answer,
        WorkerLostError if it waits for a rank.
        """
        self._connection = ClientConnection(dialer, client_name)
        self._sent = SentTokens()
        self._changed = threading.Condition()
        self._num_blocked = 0
        self._is_reading = False
        self._is_shared = False
        self._num_writers = 0
        self._num_taken = 0
        self._is_closed = threading.Event()
        self._has_closed = False  # the same, cheaper to read
        self._last_seq = 0
        try:
            self.attach()
        except BaseException:
            self._connection.close()
            raise
        if dialer.needs_keeping_alive:
            _keep_alive(self, self._is_closed, self._connection.settings.heartbeat_s / 2)

    # --- identity: SessionView, and this client's own counters

    @property
    def num_resent(self) -> int:
        """Steps that were sent again because no answer came."""
        return self._connection.session.num_resent

    # --- attaching

    def attach(self, timeout_s: float | None = None) -> None:
        """Attach, also again after an epoch has ended: everything scheduled before is void.

        Raises DeadlineError, WorkerLostError or NotRunningError as the constructor does.
        """
        session = self._connection.session
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        self._begin_to_write()
        try:
            if session.state is SessionState.ATTACHED:
                return
            if session.state is not SessionState.ATTACHING:
                self._sent.forget_all()
                self._connection.send(session.attach())
        finally:
            self._end_to_write()
        try:
            self._wait(self._connection.is_attached, limit_s, "be attached")
        except DeadlineError:
            error = session.not_attached(limit_s)
            raise lost_workers_error(error, self._connection.lost_workers()) from None

    # --- steps

    def step(self, request: StepRequest, timeout_s: float | None = None) -> StepResult:
        """Schedule one step and return its answer. Raises what `submit` and `wait_result` raise."""
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        return self.wait_result(self.submit(request), limit_s)

    def submit(self, request: StepRequest, timeout_s: float | None = None) -> int:
        """Send a step and return its number; fills in `client_id`, `step` and `epoch`.

        Waits while too many steps have no answer. Raises WorkerLostError or StaleEpochError if the
        epoch is over, DeadlineError if the backlog does not shrink in time; nothing was sent then.
        """
        return self._submit(partial(self._connection.session.submit, request), timeout_s)

    def wait_result(self, step: int, timeout_s: float | None = None) -> StepResult:
        """Return the answer to a step.

        Raises the error of a refused step, DeadlineError (the step may or may not have been
        executed), WorkerLostError or StaleEpochError (the step is void). A WorkerLostError while
        `is_attached` means that a rank is silent: the step was refused without effect and may be
        sent again. Otherwise the epoch is over: see `attach`.
        """
        return result_of_step(step, self._wait_answer(step, timeout_s))

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        """Return once every rank has applied the step's commands. Raises as `wait_result`."""
        self._await(self._connection.session.is_applied, step, "applied", timeout_s)

    def wait_finished(self, step: int, timeout_s: float | None = None) -> None:
        """Return once the step is finished on every rank, with content checking also its forward.

        Forwards that found wrong bytes are in `failures`. Raises as `wait_result`.
        """
        self._await(self._connection.session.is_finished, step, "finished", timeout_s)

    def poll(self) -> None:
        """Receive what has arrived, without waiting. Raises nothing about single steps."""
        with self._changed:
            self._require_open()
            self._read_all()

    # --- the end

    def close(self) -> None:
        """Detach; everything that still runs is freed. Repeatable.

        Returns when the coordinator has confirmed. After a few seconds without an answer a warning
        is logged; the coordinator frees the client's requests when it notices that the client is
        gone.
        """
        if self._connection.is_inherited:
            return
        with self._changed:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
            self._has_closed = True
            self._connection.transport.wake()
            give_up_s = self._connection.clock.now() + CLOSE_TIMEOUT_S
            while self._is_reading and (left_s := give_up_s - self._connection.clock.now()) > 0:
                self._block(left_s)
        try:
            self._detach()
        finally:
            self._connection.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside

    def _detach(self) -> None:
        """Detach, and wait for the confirmation. No other thread uses the connection any more."""
        connection = self._connection
        connection.begin_to_detach()
        while not connection.has_detached():
            connection.take(connection.transport.receive(connection.tick_s))
            connection.tick(connection.clock.now())
            try:
                moved_to = self._look_where()
                if moved_to is not None:
                    connection.redial(moved_to)
            except KVCacheError as error:
                connection.give_up_detaching(error)

    def _submit(self, make: Callable[[], Submitted], timeout_s: float | None) -> int:
        """Send what `make` returns as soon as the window has room; see `submit`."""
        clock = self._connection.clock
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        give_up_s = clock.now() + limit_s
        while True:
            try:
                self._begin_to_write()
                try:
                    return self._connection.send_step(make())
                finally:
                    self._end_to_write()
            except BacklogFullError:
                num_taken = self._num_taken
            except StaleEpochError as error:
                raise lost_workers_error(error, self._connection.lost_workers()) from error
            remaining_s = max(0.0, give_up_s - clock.now())
            self._wait(partial(self._has_taken_more_than, num_taken), remaining_s, "make room")

    def _has_taken_more_than(self, num_taken: int) -> bool:
        return self._num_taken > num_taken

    def _begin_to_write(self) -> None:
        """Take the lock when no thread is reading: only one thread at a time may use a socket."""
        self._connection.require_own_process()  # a fork may have copied a held lock
        self._changed.acquire()
        try:
            self._num_writers += 1
            while self._is_reading:
                # From now on, reads can be interrupted, which makes them slower.
                self._is_shared = True
                self._connection.transport.wake()
                self._block(self._connection.tick_s)
            self._require_open()
        except BaseException:
            self._end_to_write()
            raise

    def _end_to_write(self) -> None:
        self._num_writers -= 1
        self._unblock()
        self._changed.release()

    def _block(self, timeout_s: float) -> None:
        """Release the lock until another thread calls `_unblock`. The lock is held on return."""
        self._num_blocked += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._num_blocked -= 1

    def _unblock(self) -> None:
        """Wake all blocked threads. Usually there is none."""
        if self._num_blocked:
            self._changed.notify_all()

    def _wait_answer(self, step: int, timeout_s: float | None) -> StepResult | CallResult:
        session = self._connection.session
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        step = as_int("step", step, 1, error=RequestError)
        answers: list[StepResult | CallResult] = []

        def is_answered() -> bool:
            answer = session.result(step)
            if answer is not None:
                answers.append(answer)
            return answer is not None

        what = f"answer step {step}: it may or may not have been executed"
        self._wait(is_answered, limit_s, what)
        self._last_seq = max(self._last_seq, answers[0].seq)
        return answers[0]

    def _await(
        self, has_reached: Callable[[int], bool], step: int, what: str, timeout_s: float | None
    ) -> None:
        limit_s = limit_of(timeout_s, self._connection.settings.forward_s)
        number = as_int("step", step, 1, error=RequestError)
        what = f"have step {step} {what} on every rank"
        self._wait(partial(has_reached, number), limit_s, what)

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Serve the connection until `is_done()`, at most `timeout_s`.

        One thread reads at a time; the lock is free while it waits for the socket. `is_done` is
        called with the lock held.
        """
        self._connection.require_own_process()
        try:
            self._wait_with_lock(is_done, timeout_s, what)
        except StaleEpochError as error:
            raise lost_workers_error(error, self._connection.lost_workers()) from error

    def _wait_with_lock(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        clock, tick_s = self._connection.clock, self._connection.tick_s
        give_up_s = clock.now() + timeout_s
        with self._changed:
            while not is_done():
                self._require_open()
                now_s = clock.now()
                remaining_s = give_up_s - now_s
                if remaining_s <= 0:
                    raise overdue_error(what, timeout_s)
                if self._is_reading or self._num_writers:
                    self._block(remaining_s)
                else:
                    self._read(min(remaining_s, tick_s), now_s)

    def _read(self, timeout_s: float, now_s: float) -> None:
        """Receive what arrives within `timeout_s`. The lock is held before and after."""
        connection = self._connection
        connection.tick(now_s)
        transport = connection.transport
        self._is_reading = True
        self._changed.release()
        try:
            receive = transport.receive_or_wake if self._is_shared else transport.receive
            payloads = receive(timeout_s)
            moved_to = None if payloads else self._look_where()
        finally:
            self._changed.acquire()
            self._is_reading = False
            self._unblock()
        connection.take(payloads)
        self._num_taken += len(payloads)
        if moved_to is not None:
            connection.redial(moved_to)

    def _read_all(self) -> None:
        """Receive everything there is, unless another thread reads. The lock is held."""
        while not self._is_reading and (payloads := self._connection.transport.receive(0.0)):
            self._connection.take(payloads)
            self._num_taken += len(payloads)
        self._unblock()

    def _look_where(self) -> Endpoint | None:
        """Return the coordinator's new endpoint, None if it has not moved or that is unknown."""
        connection = self._connection
        noted = connection.look_for_move() if connection.is_time_to_look else None
        if noted is None and connection.may_have_moved:
            return self._ask_where()
        return noted

    def _ask_where(self) -> Endpoint | None:
        """Ask for the coordinator's endpoint; None while it is unknown. Deadlines handle the
        rest."""
        try:
            return self._connection.dialer.endpoint()
        except DeadlineError:
            self._connection.put_off_redial()
            return None

    def _require_open(self) -> None:
        if self._has_closed:
            raise self._connection.closed_error()

    def _keep_alive(self) -> None:
        """Send a sign of life, unless a waiting thread sends it."""
        with self._changed:
            if not (self._is_closed.is_set() or self._is_reading):
                self._read_all()
                self._connection.tick(self._connection.clock.now())


def _keep_alive(client: StepClient, is_closed: threading.Event, interval_s: float) -> None:
    """Keep an idle client alive at the coordinator, in a thread that ends with the client."""
    known = weakref.ref(client)

    def turn() -> None:
        is_over = is_closed.wait(interval_s)
        found = None if is_over else known()
        if found is None:
            loop.stop()
        else:
            found._keep_alive()

    loop = ServingLoop("kvcache-keep-alive", turn)
    loop.start()
