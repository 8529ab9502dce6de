"""The asyncio client: an engine's way to the coordinator, by steps or request by request.

    async with await cluster.async_client() as client:
        result = await client.step(StepRequest(...))

Its calls for single requests are the methods of client.py, awaited: each makes a `RemoteCall` and
passes it to `_run` of this client. async_step_client.py has waits and deadlines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from actors.async_step_client import AsyncStepClient
from actors.calls import RemoteCall
from actors.client import KVCacheClient
from actors.connection import result_of_call
from kvcache.protocol.step import NO_STEP

P = ParamSpec("P")
T = TypeVar("T")


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
    evict_blocks = awaited(KVCacheClient.evict_blocks)
    pin_prefix = awaited(KVCacheClient.pin_prefix)
    unpin_prefix = awaited(KVCacheClient.unpin_prefix)
    make_prefix_cache_stats = awaited(KVCacheClient.make_prefix_cache_stats)

    async def _run(self, call: RemoteCall[T]) -> T:
        """Send a call, wait for its answer, and decode it."""
        session, arguments = self._connection.session, call.pack()
        make = partial(session.call, call.method, arguments, NO_STEP)
        number = await self._submit(make, None)
        return call.answer(result_of_call(number, await self._wait_answer(number, None)))
