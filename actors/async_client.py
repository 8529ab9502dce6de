"""The asyncio client: an engine's way to the coordinator, by steps or request by request.

    async with await cluster.async_client() as client:
        result = await client.step(StepRequest(...))

All work happens in the event loop that created the client: a reader callback receives messages, a
task checks the clock. It starts no thread. The rules are those of step_client.py.

The calls for single requests are the methods of client.py, awaited: each makes a `RemoteCall` and
passes it to `_run` of this client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from actors.calls import RemoteCall, SentTokens
from actors.client import KVCacheClient
from actors.connection import (
    ClientConnection,
    Dialing,
    SessionView,
    limit_of,
    lost_workers_error,
    overdue_error,
    result_of_call,
    result_of_step,
)
from kvcache.base.arguments import as_int
from kvcache.base.errors import (
    BacklogFullError,
    ClusterError,
    DeadlineError,
    KVCacheError,
    RequestError,
    StaleEpochError,
)
from kvcache.client.session import SessionState, Submitted
from kvcache.protocol.messages import CallResult
from kvcache.protocol.step import NO_STEP, StepRequest, StepResult

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="AsyncStepClient")


class AsyncStepClient(SessionView):
    """Steps and waits as coroutines. Make it with `connect`."""

    def __init__(self, connection: ClientConnection) -> None:
        """Use `connect` instead."""
        self._connection = connection
        self._sent = SentTokens()
        self._waiters: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._is_reading = True
        self._last_seq = 0
        self._reader = connection.transport.fileno()
        self._loop.add_reader(self._reader, self._on_readable)
        self._ticker = self._loop.create_task(self._tick())

    @classmethod
    async def connect(cls: type[C], dialer: Dialing, client_name: str = "client") -> C:
        """Return a new client, attached. Raises as `StepClient` does."""
        loop = asyncio.get_running_loop()
        # Not `to_thread`: after a cancellation, its connection would be lost and never closed.
        connecting = loop.run_in_executor(None, ClientConnection, dialer, client_name)
        try:
            connection = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_close_unused)
            raise
        client = cls(connection)
        try:
            await client.attach()
        except BaseException:
            await client.close()
            raise
        return client

    # --- steps

    async def attach(self, timeout_s: float | None = None) -> None:
        """Attach, also again after an epoch has ended. See `StepClient.attach`."""
        session = self._connection.session
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        if session.state not in (SessionState.ATTACHED, SessionState.ATTACHING):
            self._sent.forget_all()
            self._connection.send(session.attach())
            self._drain_soon()
        try:
            await self._wait(self._connection.is_attached, limit_s, "be attached")
        except DeadlineError:
            error = session.not_attached(limit_s)
            raise lost_workers_error(
                error, await asyncio.to_thread(self._connection.lost_workers)
            ) from None

    async def step(self, request: StepRequest, timeout_s: float | None = None) -> StepResult:
        """Schedule one step and return its answer. See `StepClient.step`."""
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        return await self.wait_result(await self.submit(request), limit_s)

    async def submit(self, request: StepRequest, timeout_s: float | None = None) -> int:
        """Send a step and return its number. See `StepClient.submit`."""
        return await self._submit(partial(self._connection.session.submit, request), timeout_s)

    async def wait_result(self, step: int, timeout_s: float | None = None) -> StepResult:
        """Return the answer to a step. See `StepClient.wait_result`."""
        return result_of_step(step, await self._wait_answer(step, timeout_s))

    async def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        """Return once every rank has applied the step's commands."""
        await self._await(self._connection.session.is_applied, step, "applied", timeout_s)

    async def wait_finished(self, step: int, timeout_s: float | None = None) -> None:
        """Return once the step is finished on every rank, with content checking also its
        forward."""
        await self._await(self._connection.session.is_finished, step, "finished", timeout_s)

    async def close(self) -> None:
        """Detach; everything that still runs is freed. See `StepClient.close`. Repeatable.

        It continues after a cancellation of the caller, so the client is always detached.
        """
        if self._connection.is_inherited:
            return
        if self._closing is None:
            self._is_closed = True
            self._ticker.cancel()
            self._notify()
            self._connection.begin_to_detach()
            self._drain_soon()
            self._closing = self._loop.create_task(self._detach_and_close())
        await asyncio.shield(self._closing)

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- inside

    async def _submit(self, make: Callable[[], Submitted], timeout_s: float | None) -> int:
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        made: list[Submitted] = []

        def try_to_make() -> bool:
            try:
                made.append(make())
            except BacklogFullError:
                return False
            return True

        await self._wait(try_to_make, limit_s, "be sent: the backlog is full")
        step = self._connection.send_step(made[0])
        self._drain_soon()
        return step

    async def _wait_answer(self, step: int, timeout_s: float | None) -> StepResult | CallResult:
        session = self._connection.session
        limit_s = limit_of(timeout_s, self._connection.settings.step_s)
        step = as_int("step", step, 1, error=RequestError)
        what = f"answer step {step}: it may or may not have been executed"
        await self._wait(partial(session.has_answer, step), limit_s, what)
        answer = session.result(step)
        if answer is None:
            raise RequestError(f"the answer to step {step} is not kept any more: take it earlier")
        self._last_seq = max(self._last_seq, answer.seq)
        return answer

    async def _await(
        self, has_reached: Callable[[int], bool], step: int, what: str, timeout_s: float | None
    ) -> None:
        limit_s = limit_of(timeout_s, self._connection.settings.forward_s)
        number = as_int("step", step, 1, error=RequestError)
        what = f"have step {step} {what} on every rank"
        await self._wait(partial(has_reached, number), limit_s, what)

    async def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Return when `is_done()`; check after every arrival and at every tick."""
        self._connection.require_own_process()
        give_up_s = self._connection.clock.now() + timeout_s
        while True:
            if self._is_closed:
                raise self._connection.closed_error()
            try:
                if is_done():
                    return
            except StaleEpochError as error:
                lost = await asyncio.to_thread(self._connection.lost_workers)
                raise lost_workers_error(error, lost) from error
            if self._connection.clock.now() >= give_up_s:
                raise overdue_error(what, timeout_s)
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    async def _detach_and_close(self) -> None:
        connection = self._connection
        try:
            while not connection.has_detached():
                await self._wait_for_news(connection.tick_s)
                connection.tick(connection.clock.now())
                self._on_readable()
                try:
                    await asyncio.wait_for(self._look_where(), connection.detach_left_s)
                except asyncio.TimeoutError:
                    break
                except KVCacheError as error:
                    connection.give_up_detaching(error)
        finally:
            self._is_reading = False
            self._loop.remove_reader(self._reader)
            # Closing may take a while, and must not be cancelled with this task.
            closing = self._loop.run_in_executor(None, connection.close)
        await asyncio.shield(closing)

    async def _wait_for_news(self, timeout_s: float) -> None:
        """Return when a message has arrived, or after `timeout_s`."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)

    def _on_readable(self) -> None:
        """Receive everything there is: the descriptor may signal only once."""
        if not self._is_reading:
            return
        has_news = False
        while payloads := self._connection.transport.receive(0.0):
            self._connection.take(payloads)
            has_news = True
        if has_news:
            self._notify()

    def _drain_soon(self) -> None:
        """Schedule a read: sending may have consumed the signal that something arrived."""
        self._loop.call_soon(self._on_readable)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _tick(self) -> None:
        """Check the clock periodically, and whether the coordinator has moved."""
        while not self._is_closed:
            await asyncio.sleep(self._connection.tick_s)
            with self._connection.faults.contained("a look at the clock"):
                self._connection.tick(self._connection.clock.now())
                self._on_readable()
                if self._waiters:
                    try:
                        await self._look_where()
                    except ClusterError:
                        self._connection.put_off_redial()  # the waiting caller gets an error
            self._notify()

    async def _look_where(self) -> None:
        """Reconnect if the coordinator has moved.

        Raises ClusterError if there is no coordinator any more.
        """
        connection, endpoint = self._connection, None
        if connection.is_time_to_look:
            endpoint = await asyncio.to_thread(connection.look_for_move)
        if endpoint is None:
            if not connection.may_have_moved:
                return
            try:
                endpoint = await asyncio.to_thread(connection.dialer.endpoint)
            except DeadlineError:
                connection.put_off_redial()
                return
        self._loop.remove_reader(self._reader)
        try:
            self._connection.redial(endpoint)
        finally:
            self._reader = self._connection.transport.fileno()
            self._loop.add_reader(self._reader, self._on_readable)


def _close_unused(connecting: asyncio.Future[ClientConnection]) -> None:
    """Close a connection whose caller has gone."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def awaited(
    method: Callable[Concatenate[KVCacheClient, P], T],
) -> Callable[Concatenate[AsyncKVCacheClient, P], Coroutine[Any, Any, T]]:
    """Return `method` as a coroutine function that awaits the result of `_run`."""
    run = cast("Callable[..., Awaitable[T]]", method)

    @wraps(method)
    async def call(self: AsyncKVCacheClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run(self, *args, **kwargs)

    return call


class AsyncKVCacheClient(AsyncStepClient):
    """Steps, and the manager's methods for single requests: those of `KVCacheClient`, awaited.

    The caller keeps its `Request` objects, appends their tokens and sets their
    `num_computed_tokens`, as with a manager in its own process. A refused call raises what the
    manager raised.
    """

    get_computed_blocks = awaited(KVCacheClient.get_computed_blocks)
    allocate_slots = awaited(KVCacheClient.allocate_slots)
    fork = awaited(KVCacheClient.fork)
    cache_blocks = awaited(KVCacheClient.cache_blocks)
    free = awaited(KVCacheClient.free)
    free_block_hashes = awaited(KVCacheClient.free_block_hashes)
    get_num_common_prefix_blocks = awaited(KVCacheClient.get_num_common_prefix_blocks)
    get_blocks = awaited(KVCacheClient.get_blocks)
    get_block_ids = awaited(KVCacheClient.get_block_ids)
    usage = awaited(KVCacheClient.usage)
    reset_prefix_cache = awaited(KVCacheClient.reset_prefix_cache)
    begin_model_epoch = awaited(KVCacheClient.begin_model_epoch)
    evict_blocks = awaited(KVCacheClient.evict_blocks)
    pin_prefix = awaited(KVCacheClient.pin_prefix)
    prefetch_prefix = awaited(KVCacheClient.prefetch_prefix)
    unpin_prefix = awaited(KVCacheClient.unpin_prefix)
    make_prefix_cache_stats = awaited(KVCacheClient.make_prefix_cache_stats)

    async def _run(self, call: RemoteCall[T]) -> T:
        """Send a call, wait for its answer, and decode it."""
        session, arguments = self._connection.session, call.pack()
        make = partial(session.call, call.method, arguments, NO_STEP)
        number = await self._submit(make, None)
        return call.answer(result_of_call(number, await self._wait_answer(number, None)))
